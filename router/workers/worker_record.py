"""State of one worker address that lasts longer than a Session.

Invariants:
  * `held` is a session that has ended, or the one that is about to resume its sequences. It is released when the next
    stream has said which of them are left, or by the timer that `hold` sets.
  * The address is dialled while it is wanted, or while sequences of this router are held there.
  * A worker that was well is dialled again at once, and then every REDIAL_S. The interval grows with the time for which
    the address has failed (after a minute away a worker is found within three seconds), up to MAX_REDIAL_S, or
    MAX_REDIAL_UNREADY_S while a process answers there. Intervals are random, so that routers do not dial in step.
  * A life is the time of one process. After SHORT_LIVES short lives in a row a worker is on probation when it returns,
    and is dialled later after each death. A life that ended in good order does not count as short.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from common.limits import (
    MAX_PROBATION_S,
    MAX_REDIAL_S,
    MAX_REDIAL_UNREADY_S,
    PROBATION_S,
    RECONNECT_S,
    REDIAL_GROWTH,
    REDIAL_JITTER,
    REDIAL_S,
    SHORT_LIFE_S,
    SHORT_LIVES,
    VIOLATION_MEMORY_S,
)
from common.wire.draft_counts import Counts
from router.scheduling.failover import Loss
from router.scheduling.lane import LaneStatus
from router.workers.session import Fault, Session, WorkerState
from router.workers.session_state import StepEffects

# Faults after which the worker may still have the sequences, so that the next stream can resume them.
RESUMABLE: Final = frozenset({Fault.BROKEN, Fault.VIOLATION})
_LOSSES: Final = {
    Fault.REFUSED: Loss.DIED,
    Fault.SILENT: Loss.SILENT,
    Fault.STALLED: Loss.STALLED,
    Fault.VIOLATION: Loss.VIOLATED,
    Fault.UNREADY: Loss.UNREADY,
}


class AddressHistory:
    """Lives and failed dials of one address: decides when to dial again, and on probation. Pure.

    Times are monotonic seconds.

    Args:
        chance: returns a random number in [0, 1).
    """

    def __init__(self, chance: Callable[[], float]) -> None:
        self._chance = chance
        self._instance = ""
        self._began = 0.0
        self._ended: float | None = None
        # Short lives in a row, without the current one.
        self._short_lives = 0
        self._failing_since: float | None = None

    def came_up(self, instance: str, now: float) -> None:
        """Notes that a stream was opened; another `instance` than before starts a new life."""
        self._failing_since = None
        if instance != self._instance:
            self._end_life()
            self._instance, self._began = instance, now
        self._ended = None

    def went_down(self, now: float, *, in_good_order: bool) -> None:
        """Notes that the stream ended; in good order if the worker announced it or this router closed it."""
        self._failing_since = None
        self._ended = now
        if in_good_order:
            self._short_lives = 0
            self._instance = ""

    def probation_s(self, now: float) -> float:
        """Remaining probation of the worker, seconds; 0 if it is not on probation."""
        if self._short_lives < SHORT_LIVES:
            return 0.0
        whole_s = min(PROBATION_S * 2.0 ** min(self._short_lives - SHORT_LIVES, 10), MAX_PROBATION_S)
        return max(0.0, self._began + whole_s - now)

    def redial_after_s(self, now: float, *, answers: bool) -> float:
        """Seconds until the next dial, after a failed dial or a stream that ended at once.

        Args:
            now: monotonic seconds.
            answers: True if a process at the address says that it does not serve.
        """
        if self._failing_since is None:
            self._failing_since = now
        longest_s = MAX_REDIAL_UNREADY_S if answers else MAX_REDIAL_S
        young_deaths = self._short_lives + (self._ended is not None and self._ended - self._began < SHORT_LIFE_S)
        punished_s = REDIAL_S * 2.0 ** min(max(0, young_deaths - SHORT_LIVES), 10)
        wait_s = max(REDIAL_S, REDIAL_GROWTH * (now - self._failing_since), punished_s)
        return min(wait_s, longest_s) * (1 + REDIAL_JITTER * (self._chance() - 0.5))

    def _end_life(self) -> None:
        """Ends the life of the last process."""
        if not self._instance or self._ended is None:
            return
        is_short = self._ended - self._began < SHORT_LIFE_S
        self._short_lives = self._short_lives + 1 if is_short else 0


@dataclass(slots=True)
class AnswerTotals:
    """Counts and times of a worker's answers to this router, since it was first reached. Times in seconds.

    Attributes:
        output_tokens: tokens that the worker sent.
        first_tokens: answers whose first token came from it.
        ttft_s: sum over these of the time from arrival to first token.
        later_tokens: tokens behind the first one, of answers that ended there.
        decode_s: sum over these of the time from first to last token.
    """

    output_tokens: int = 0
    first_tokens: int = 0
    ttft_s: float = 0.0
    later_tokens: int = 0
    decode_s: float = 0.0

    def add(self, num_tokens: int, effects: StepEffects) -> None:
        """Adds one step's `num_tokens` tokens, and the answers that began or ended with it."""
        self.output_tokens += num_tokens
        for request in effects.begun:
            if (first := request.assembly.first_token_time) is not None:
                self.first_tokens += 1
                self.ttft_s += first - request.arrival
        for request in effects.ended:
            assembly = request.assembly
            first, last = assembly.first_token_time, assembly.last_token_time
            if first is not None and last is not None and assembly.delivered > 1:
                self.later_tokens += assembly.delivered - 1
                self.decode_s += last - first


@dataclass(frozen=True, slots=True)
class KnownWorker:
    """A worker as operators see it.

    `running` counts this router's requests there. `drafts` counts verified and accepted draft tokens of its ended
    requests, by position. Of a worker without a connection only the address, its last name and model, and `last_error`
    are known.
    """

    address: str
    state: WorkerState = WorkerState.UNCONNECTED
    worker_id: str = ""
    instance_id: str = ""
    model: str = ""
    block_size: int = 0
    numerics: str = ""
    kernels: str = ""
    running: int = 0
    load: LaneStatus | None = None
    last_error: str = ""
    draft_method: str = ""
    num_speculative_tokens: int = 0
    drafts: tuple[Counts, ...] = ()
    version: str = ""
    answers: AnswerTotals = field(default_factory=AnswerTotals)


class WorkerRecord:
    """The state of one worker address.

    Attributes:
        address: host:port.
        session: the current session, None without one.
        held: the session whose sequences wait for the next stream.
        is_parting: True if it has left the list of workers.
        last_error: why the worker cannot be used now, "" while it can.
        worker_id: the worker's last name for itself.
        model: name of the model that it last served.
        history: its lives and failed dials.
        drafts: see KnownWorker.
        answers: see KnownWorker.
        dial_now: ends the pause before the next dial.
        task: dials it; None if the pool does not.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.session: Session | None = None
        self.held: Session | None = None
        self.is_parting = False
        self.last_error = ""
        self.worker_id = ""
        self.model = ""
        self.history = AddressHistory(random.random)
        self.drafts: list[Counts] = []
        self.answers = AnswerTotals()
        self.dial_now = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._give_up: asyncio.TimerHandle | None = None
        self._violated: float | None = None

    @property
    def is_wanted(self) -> bool:
        """True if it must stay connected: it is in the list of workers, or sequences are held there."""
        return not self.is_parting or self.held is not None

    def hold(self, give_up: Callable[[], object]) -> None:
        """Keeps the sequences of `held` for the next stream; calls `give_up` after RECONNECT_S."""
        self._give_up = asyncio.get_running_loop().call_later(RECONNECT_S, give_up)

    def release(self) -> Session | None:
        """Removes and returns the held session, and stops its timer."""
        if self._give_up is not None:
            self._give_up.cancel()
            self._give_up = None
        held, self.held = self.held, None
        return held

    def loss_by(self, session: Session, fault: Fault) -> Loss:
        """Kind of loss of the held sequences, after `session` has ended with a fault."""
        if self.held is not None and session.instance_id not in ("", self.held.instance_id):
            return Loss.DIED
        return _LOSSES.get(fault, Loss.UNREACHABLE)

    def violates_again(self, fault: Fault, now: float) -> bool:
        """True if this is the second protocol violation in VIOLATION_MEMORY_S: resuming does not help."""
        if fault is not Fault.VIOLATION:
            return False
        before, self._violated = self._violated, now
        return before is not None and now - before < VIOLATION_MEMORY_S

    def known(self, load: LaneStatus | None) -> KnownWorker:
        """The worker as operators see it, with the load of its lane."""
        session = self.session
        if session is None or session.model is None:
            return KnownWorker(
                self.address,
                worker_id=self.worker_id,
                model=self.model,
                last_error=self.last_error,
                answers=replace(self.answers),
            )
        return KnownWorker(
            self.address,
            session.worker_state,
            worker_id=session.worker_id,
            instance_id=session.instance_id,
            model=session.model.name,
            block_size=session.model.block_size,
            numerics=session.model.numerics,
            kernels=session.kernels,
            running=len(session.state.live),
            load=load,
            draft_method=session.speculation.method,
            num_speculative_tokens=session.speculation.num_speculative_tokens,
            drafts=tuple(self.drafts),
            version=session.version,
            answers=replace(self.answers),
        )
