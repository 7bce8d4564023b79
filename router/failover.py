"""What becomes of a request whose attempt on a worker has ended before the request: pure decisions.

Invariants:
  * A request is given to at most MAX_ATTEMPTS workers, those not counted that gave it away in good order (a rolling
    restart may meet it on every worker of a fleet), and not to a third one when two died with it.
  * An exact move stays inside the numerics class of the tokens that the router has; a request without tokens may go
    anywhere.
  * A sequence that a worker gives back unbegun was no attempt (rule S9).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from common.limits import MAX_ATTEMPTS, MAX_DEATHS, STALL_PREFILLS


class FailoverPolicy(enum.Enum):
    """Where a request that has tokens already may go on."""

    EXACT = "exact"
    """Only on a worker of the same numerics class, which continues it with exactly the tokens it would have had."""
    ANY = "any"
    """On any worker of the same weights; the finish says `exact = false` when the class differs."""


class Loss(enum.Enum):
    """Why an attempt ended before its request."""

    DIED = "died"
    """The worker's process is gone, or can not be reached."""
    SILENT = "silent"
    """No frame for several heartbeats (rule S10)."""
    STALLED = "stalled"
    """The engine step has been running for too long (rule S10)."""
    ENGINE_FAILED = "engine_failed"
    """The engine has failed and the worker ends."""
    VIOLATED = "violated"
    """The worker broke the protocol, again after the stream had been taken up anew."""
    DRAINED = "drained"
    """The worker is going away in good order."""
    FORGOTTEN = "forgotten"
    """The worker has let it go: the lease had ended, or it had not arrived (rule S4)."""


_DEATHS = frozenset({Loss.DIED, Loss.SILENT, Loss.STALLED, Loss.ENGINE_FAILED})


class Verdict(enum.Enum):
    """What to do with a request whose attempt was lost."""

    RESUBMIT = enum.auto()
    POISON = enum.auto()
    """Two workers died with it: a third one shall not."""
    GIVE_UP = enum.auto()
    """It has been given to as many workers as any request may be."""


@dataclass(slots=True)
class Attempt:
    """A request on one worker. Times in monotonic seconds; `tokens` counts those that this attempt has brought."""

    worker_id: str
    numerics: str
    began: float
    have: int
    tokens: int = 0
    ended: float | None = None
    loss: Loss | None = None


class Attempts:
    """The attempts of one request, oldest first."""

    def __init__(self) -> None:
        self._attempts: list[Attempt] = []

    def __len__(self) -> int:
        return len(self._attempts)

    @property
    def all(self) -> Sequence[Attempt]:
        """The attempts, oldest first; the last one is under way while its `ended` is None."""
        return self._attempts

    def begin(self, worker_id: str, numerics: str, have: int, now: float) -> None:
        """The request goes to a worker; the router has `have` tokens of it, prompt included."""
        self._attempts.append(Attempt(worker_id, numerics, now, have))

    def give_back(self) -> None:
        """The worker has computed nothing: that was no attempt."""
        self._attempts.pop()

    def end(self, have: int, now: float, loss: Loss | None = None) -> None:
        """The last attempt is over, the request with it unless there is a loss; the router has `have` tokens."""
        attempt = self._attempts[-1]
        if attempt.ended is None:
            attempt.tokens = have - attempt.have
            attempt.ended, attempt.loss = now, loss

    def verdict(self) -> Verdict:
        """Whether another attempt follows."""
        if sum(attempt.loss in _DEATHS for attempt in self._attempts) >= MAX_DEATHS:
            return Verdict.POISON
        counted = sum(attempt.loss is not Loss.DRAINED for attempt in self._attempts)
        return Verdict.GIVE_UP if counted >= MAX_ATTEMPTS else Verdict.RESUBMIT

    def has_begun(self, have: int) -> bool:
        """Whether the attempt under way has brought tokens; the router has `have` tokens now."""
        return have > self._attempts[-1].have

    def numerics_wanted(self, policy: FailoverPolicy, have: int) -> str | None:
        """The class that the next worker must be of, None for any; the router has `have` tokens now."""
        if policy is FailoverPolicy.ANY:
            return None
        for attempt in self._attempts:
            if attempt.tokens or (attempt.ended is None and have > attempt.have):
                return attempt.numerics
        return None

    @property
    def exact(self) -> bool:
        """Whether all tokens came from one numerics class. To be asked when the last attempt has ended."""
        return len({attempt.numerics for attempt in self._attempts if attempt.tokens}) <= 1


def stall_bound_s(stall_timeout_s: float, step_tokens: int, prefill_rate: float) -> float:
    """How long an engine step may run before its worker counts as stalled (rule S10), seconds.

    Args:
        stall_timeout_s: the least that is allowed, whatever the step.
        step_tokens: most tokens in one step.
        prefill_rate: tokens per second, 0 when not known.
    """
    longest_step_s = step_tokens / prefill_rate if prefill_rate > 0 else 0.0
    return max(stall_timeout_s, STALL_PREFILLS * longest_step_s)
