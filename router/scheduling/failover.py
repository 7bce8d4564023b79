"""Failover decisions: how a request continues after its attempt on a worker was lost. Pure.

Invariants:
  * A request ends after MAX_ATTEMPTS attempts in a row without a token, and after MAX_ATTEMPTS_IN_ALL in any case.
    Attempts that a draining worker gave up do not count: a rolling restart may reach the request on every worker. Nor
    do those that a worker for prefills has completed.
  * A worker counts as dead only with proof: nothing listens at its address, another process does, or its engine says
    so. A worker that is silent, stalled or unreachable may be well.
  * When a worker dies, the requests in their first steps there become suspects, unless a suspect ran alone. After
    MAX_SUSPICIONS such deaths a request runs alone: its worker gets no other request of this router until the first
    steps have passed. If that worker dies too, the request is poison. So a poison request kills MAX_SUSPICIONS + 1
    workers, one more if it was past its first steps at the first death, and never more than MAX_DEATHS.
  * Under EXACT, a request with tokens stays in their numerics class; a request without tokens may go anywhere.
  * A sequence that a worker returns unstarted, or that was never written to a worker, was no attempt (rule S9).
"""

from __future__ import annotations

import enum
import itertools
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from common.limits import (
    FIRST_TOKENS,
    LEASE_S,
    LOST_SERIES_S,
    MAX_ATTEMPTS,
    MAX_ATTEMPTS_IN_ALL,
    MAX_DEATHS,
    MAX_SUSPICIONS,
    STALL_PREFILLS,
    STALL_TIMEOUT_S,
    WORKER_WAIT_S,
)


class FailoverPolicy(enum.Enum):
    """Rule for where a request that already has tokens may continue."""

    EXACT = "exact"
    """Only on a worker of the same numerics class, which continues with exactly the same tokens."""
    ANY = "any"
    """On any worker of the same weights; the finish says `exact = false` when the class differs."""


@dataclass(frozen=True, slots=True)
class FailoverOptions:
    """Policy for requests whose worker is lost; times in seconds.

    Attributes:
        policy: where a request that already has tokens may continue.
        worker_wait_s: how long a request waits while no worker can serve it.
        stall_timeout_s: an engine step that runs longer counts as stalled.
        lease_s: how long workers keep the sequences of a broken stream.
    """

    policy: FailoverPolicy = FailoverPolicy.EXACT
    worker_wait_s: float = WORKER_WAIT_S
    stall_timeout_s: float = STALL_TIMEOUT_S
    lease_s: float = LEASE_S


DEFAULT_FAILOVER: Final = FailoverOptions()


class Loss(enum.Enum):
    """Why an attempt ended before its request."""

    DIED = "died"
    """The worker's process has ended: nothing listens at its address, or another process does."""
    UNREACHABLE = "unreachable"
    """The connection broke and could not be made again in time."""
    UNREADY = "unready"
    """The worker says that it accepts no work now, or this router may no longer use it."""
    SILENT = "silent"
    """No frame for several heartbeats (rule S10)."""
    STALLED = "stalled"
    """The engine step has been running for too long (rule S10)."""
    ENGINE_FAILED = "engine_failed"
    """The engine has failed; the worker process ends."""
    VIOLATED = "violated"
    """The worker broke the protocol, and again after the stream was resumed."""
    DRAINED = "drained"
    """The worker drains or ends the request in good order."""
    HANDED_OVER = "handed_over"
    """The prompt is computed, and a worker for decodes continues."""
    FORGOTTEN = "forgotten"
    """The worker no longer has the sequence: its lease had ended, or it had never arrived (rule S4)."""
    REFUSED = "refused"
    """The worker says that it cannot run the request."""
    CUT_SHORT = "cut_short"
    """The worker's own length limit ended the sequence before the request's limit."""


class LossCounts:
    """Number of lost attempts by worker and loss.

    A worker's counts end some time after it has left, so that they do not grow with the workers that ever were.

    Attributes:
        counts: number of lost attempts by worker id and `Loss`.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        # When each worker that has left was first missing.
        self._left: dict[str, float] = {}

    def add(self, worker_id: str, loss: Loss) -> None:
        """Counts one attempt."""
        self.counts[worker_id, loss.value] += 1

    def of_loss(self, loss: Loss) -> int:
        """Number of attempts that were lost like this."""
        return sum(count for (_, value), count in self.counts.items() if value == loss.value)

    def forget_departed(self, known: Collection[str], now: float) -> None:
        """Drops the counts of workers that left LOST_SERIES_S ago.

        Args:
            known: ids of the workers in the list.
            now: monotonic seconds.
        """
        gone = {worker_id for worker_id, _ in self.counts if worker_id not in known}
        self._left = {worker_id: self._left.get(worker_id, now) for worker_id in gone}
        expired = {worker_id for worker_id, since in self._left.items() if now - since >= LOST_SERIES_S}
        for key in [key for key in self.counts if key[0] in expired]:
            del self.counts[key]


_DEATHS = frozenset({Loss.DIED, Loss.ENGINE_FAILED})


class Verdict(enum.Enum):
    """Decision about a request whose attempt was lost."""

    RESUBMIT = enum.auto()
    ALONE = enum.auto()
    """Resubmit to a worker that gets no other request until the first steps have passed."""
    POISON = enum.auto()
    """The request kills workers, and must not reach another one."""
    GIVE_UP = enum.auto()
    """No attempt is left."""


@dataclass(slots=True)
class Attempt:
    """A request on one worker. Times in monotonic seconds; `tokens` counts those that this attempt generated.

    `alone`: the worker gets no other request of this router. `excused`: a suspect that ran alone explains the death.
    """

    worker_id: str
    numerics: str
    began: float
    began_with: int
    tokens: int = 0
    ended: float | None = None
    loss: Loss | None = None
    alone: bool = False
    excused: bool = False

    @property
    def is_death(self) -> bool:
        """True if the attempt ended because the worker died."""
        return self.loss in _DEATHS


@dataclass(frozen=True, slots=True)
class Wait:
    """Time without a worker, monotonic seconds.

    `worker_id` is the next worker, "" for none; `loss` is how the attempt before was lost, None before the first.
    """

    began: float
    ended: float
    worker_id: str
    loss: Loss | None


class Attempts:
    """The attempts of one request, oldest first.

    Args:
        resumed_from: numerics class of the tokens that the client resends to resume a stream, "" if unknown; None for
            a new stream.
    """

    def __init__(self, resumed_from: str | None = None) -> None:
        self._resumed_from = resumed_from
        self._attempts: list[Attempt] = []

    def __len__(self) -> int:
        return len(self._attempts)

    @property
    def all(self) -> Sequence[Attempt]:
        """The attempts, oldest first; the last one is under way while its `ended` is None."""
        return self._attempts

    def begin(self, worker_id: str, numerics: str, num_tokens: int, now: float, *, alone: bool = False) -> None:
        """Starts an attempt on a worker; the router has `num_tokens`, prompt included."""
        self._attempts.append(Attempt(worker_id, numerics, now, num_tokens, alone=alone))

    @property
    def is_alone(self) -> bool:
        """True if the last attempt runs, or ran, alone on its worker."""
        return bool(self._attempts) and self._attempts[-1].alone

    @property
    def is_lost(self) -> bool:
        """True if the last attempt was lost: the request waits for its next worker."""
        return bool(self._attempts) and self._attempts[-1].loss is not None

    def has_passed_first_steps(self, num_tokens: int) -> bool:
        """True if this attempt generated FIRST_TOKENS tokens, which clears it of suspicion."""
        return num_tokens - self._attempts[-1].began_with >= FIRST_TOKENS

    def share(self) -> None:
        """Lets the current attempt's worker get other requests."""
        self._attempts[-1].alone = False

    def return_unstarted(self) -> None:
        """Removes the last attempt: its worker computed nothing."""
        self._attempts.pop()

    def end(self, num_tokens: int, now: float, loss: Loss | None = None, *, excused: bool = False) -> None:
        """Ends the last attempt, with a loss or with the request; the router has `num_tokens`.

        `excused`: another request ran alone on the worker, and is blamed for a death.
        """
        attempt = self._attempts[-1]
        if attempt.ended is None:
            attempt.tokens = num_tokens - attempt.began_with
            attempt.ended, attempt.loss, attempt.excused = now, loss, excused

    def waits(self, opened: float, ended: float) -> list[Wait]:
        """Intervals in which the request was on no worker. Time on a worker that returned it counts as waiting."""
        waits: list[Wait] = []
        since, loss = opened, None
        for attempt in self._attempts:
            waits.append(Wait(since, attempt.began, attempt.worker_id, loss))
            since, loss = ended if attempt.ended is None else attempt.ended, attempt.loss
        if not waits or loss is not None:
            waits.append(Wait(since, ended, "", loss))
        return waits

    def verdict(self) -> Verdict:
        """Decides how the request continues after its last attempt."""
        if self.is_alone and self._attempts[-1].is_death:
            return Verdict.POISON
        fruitless, counted = self._fruitless(), sum(map(_counts, self._attempts))
        if self.deaths >= MAX_DEATHS or fruitless >= MAX_ATTEMPTS or counted >= MAX_ATTEMPTS_IN_ALL:
            return Verdict.GIVE_UP
        return Verdict.ALONE if self._suspicions() >= MAX_SUSPICIONS else Verdict.RESUBMIT

    def _fruitless(self) -> int:
        """Number of counted attempts since the last one that generated a token."""
        return sum(map(_counts, itertools.takewhile(lambda attempt: not attempt.tokens, reversed(self._attempts))))

    def _suspicions(self) -> int:
        """Number of unexcused deaths within the first steps, since an attempt last passed them."""
        latest = itertools.takewhile(lambda attempt: attempt.tokens < FIRST_TOKENS, reversed(self._attempts))
        return sum(attempt.is_death and not attempt.excused for attempt in latest)

    @property
    def numerics(self) -> str:
        """Numerics class of the last attempt's worker; "" before the first one."""
        return self._attempts[-1].numerics if self._attempts else ""

    @property
    def is_handed_over(self) -> bool:
        """True if a worker for prefills had the last attempt, and has completed it."""
        return bool(self._attempts) and self._attempts[-1].loss is Loss.HANDED_OVER

    @property
    def refused(self) -> bool:
        """True if a worker before the last one refused the request."""
        return any(attempt.loss is Loss.REFUSED for attempt in self._attempts[:-1])

    def has_begun(self, num_tokens: int) -> bool:
        """True if the current attempt has generated tokens; the router has `num_tokens`."""
        return num_tokens > self._attempts[-1].began_with

    def numerics_wanted(self, policy: FailoverPolicy, num_tokens: int) -> str | None:
        """Numerics class that the next worker must have, None for any; the router has `num_tokens`."""
        if self._resumed_from:
            return self._resumed_from
        if policy is FailoverPolicy.ANY:
            return None
        for attempt in self._attempts:
            if attempt.tokens or (attempt.ended is None and num_tokens > attempt.began_with):
                return attempt.numerics
        return None

    @property
    def deaths(self) -> int:
        """Number of workers that died while running the request."""
        return sum(attempt.is_death for attempt in self._attempts)

    @property
    def exact(self) -> bool:
        """True if all tokens come from one numerics class; valid after the last attempt has ended."""
        classes = {attempt.numerics for attempt in self._attempts if attempt.tokens}
        return len(classes if self._resumed_from is None else {*classes, self._resumed_from}) <= 1


def _counts(attempt: Attempt) -> bool:
    return attempt.loss not in (Loss.DRAINED, Loss.HANDED_OVER)


def stall_bound_s(stall_timeout_s: float, step_tokens: int, prefill_rate: float) -> float:
    """Longest time that an engine step may run before its worker counts as stalled (rule S10), seconds.

    Args:
        stall_timeout_s: the least that is allowed, whatever the step.
        step_tokens: most tokens in one step.
        prefill_rate: tokens per second, 0 when not known.
    """
    longest_step_s = step_tokens / prefill_rate if prefill_rate > 0 else 0.0
    return max(stall_timeout_s, STALL_PREFILLS * longest_step_s)
