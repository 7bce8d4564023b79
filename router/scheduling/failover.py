"""Failover decisions: what becomes of a request whose attempt on a worker has ended before the request. Pure.

Invariants:
  * A request ends when MAX_ATTEMPTS attempts in a row have brought no token, and after MAX_ATTEMPTS_IN_ALL in any case;
    those do not count that a worker gave away in good order (a rolling restart may meet it on every one of a fleet).
  * A worker's death is one that is proved: nothing listens, another process does, or the engine says so. One that is
    silent, stalled or cannot be reached may be well.
  * A death throws suspicion on the requests in their first steps there, unless a suspect ran alone. A request that
    MAX_SUSPICIONS deaths throw suspicion on runs alone: the worker gets no other request of this router before its
    first steps have passed. Only one whose worker dies then is a poison, so that a poison kills MAX_SUSPICIONS + 1
    workers, one more if it was old when the first one died, and never more than MAX_DEATHS.
  * An exact move stays inside the numerics class of the tokens that the router has; a request without tokens may go
    anywhere.
  * A sequence that a worker gives back unbegun, or that was never written to one, was no attempt (rule S9).
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from common.limits import (
    FIRST_TOKENS,
    LEASE_S,
    MAX_ATTEMPTS,
    MAX_ATTEMPTS_IN_ALL,
    MAX_DEATHS,
    MAX_SUSPICIONS,
    STALL_PREFILLS,
    STALL_TIMEOUT_S,
    WORKER_WAIT_S,
)


class FailoverPolicy(enum.Enum):
    """Rule for where a request that has tokens already may go on."""

    EXACT = "exact"
    """Only on a worker of the same numerics class, which continues it with exactly the tokens it would have had."""
    ANY = "any"
    """On any worker of the same weights; the finish says `exact = false` when the class differs."""


@dataclass(frozen=True, slots=True)
class FailoverOptions:
    """Policy for requests whose worker is lost; times in seconds.

    Attributes:
        policy: where a request that has tokens may go on.
        worker_wait_s: how long a request waits while there is no worker for it.
        stall_timeout_s: an engine step that runs longer counts as stalled.
        lease_s: how long workers keep the sequences of a stream that broke.
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
    """The worker says itself that it takes no work now, or this router may not use it any more."""
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
    REFUSED = "refused"
    """The worker says that it cannot run it."""
    CUT_SHORT = "cut_short"
    """The worker's own length ended it before it had all tokens that it may have."""


_DEATHS = frozenset({Loss.DIED, Loss.ENGINE_FAILED})


class Verdict(enum.Enum):
    """Decision about a request whose attempt was lost."""

    RESUBMIT = enum.auto()
    ALONE = enum.auto()
    """On a worker that gets nothing else before it is clear whether it kills that one too."""
    POISON = enum.auto()
    """Workers die of it: no other one shall."""
    GIVE_UP = enum.auto()
    """It has been given to as many workers as any request may be."""


@dataclass(slots=True)
class Attempt:
    """A request on one worker. Times in monotonic seconds; `tokens` counts those that this attempt has brought.

    `alone`: the worker gets no other request of this router meanwhile. `excused`: its death has a better explanation.
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
        """True if the worker died with it."""
        return self.loss in _DEATHS


@dataclass(frozen=True, slots=True)
class Wait:
    """Time without a worker, monotonic seconds: which one ended it (""), and how the one before was lost (None)."""

    began: float
    ended: float
    worker_id: str
    loss: Loss | None


class Attempts:
    """The attempts of one request, oldest first.

    Args:
        resumed_from: numerics class of the tokens that the client brings from a broken stream, "" where it is not
            known; None for a stream that begins here.
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
        """The request goes to a worker; the router has `num_tokens` of it, prompt included."""
        self._attempts.append(Attempt(worker_id, numerics, now, num_tokens, alone=alone))

    @property
    def is_alone(self) -> bool:
        """True if the attempt under way, or the last one, has its worker for itself."""
        return bool(self._attempts) and self._attempts[-1].alone

    def has_passed_first_steps(self, num_tokens: int) -> bool:
        """True if the attempt under way has brought so many of the `num_tokens` there are that it is no suspect."""
        return num_tokens - self._attempts[-1].began_with >= FIRST_TOKENS

    def share(self) -> None:
        """The worker of the attempt under way gets other requests from now on."""
        self._attempts[-1].alone = False

    def return_unstarted(self) -> None:
        """The worker has computed nothing: that was no attempt."""
        self._attempts.pop()

    def end(self, num_tokens: int, now: float, loss: Loss | None = None, *, excused: bool = False) -> None:
        """The last attempt is over, the request with it unless there is a loss; the router has `num_tokens`.

        `excused`: another request ran alone there, so that a death is laid to that one.
        """
        attempt = self._attempts[-1]
        if attempt.ended is None:
            attempt.tokens = num_tokens - attempt.began_with
            attempt.ended, attempt.loss, attempt.excused = now, loss, excused

    def waits(self, opened: float, ended: float) -> list[Wait]:
        """Intervals in which the request was on no worker; time on one that gave it back is part of a wait."""
        waits: list[Wait] = []
        since, loss = opened, None
        for attempt in self._attempts:
            waits.append(Wait(since, attempt.began, attempt.worker_id, loss))
            since, loss = ended if attempt.ended is None else attempt.ended, attempt.loss
        if not waits or loss is not None:
            waits.append(Wait(since, ended, "", loss))
        return waits

    def verdict(self) -> Verdict:
        """Decision on how the request goes on after its last attempt."""
        if self.is_alone and self._attempts[-1].is_death:
            return Verdict.POISON
        fruitless, counted = self._fruitless(), sum(map(_counts, self._attempts))
        if self.deaths >= MAX_DEATHS or fruitless >= MAX_ATTEMPTS or counted >= MAX_ATTEMPTS_IN_ALL:
            return Verdict.GIVE_UP
        return Verdict.ALONE if self._suspicions() >= MAX_SUSPICIONS else Verdict.RESUBMIT

    def _fruitless(self) -> int:
        """Attempts since the last one that brought a token."""
        return sum(map(_counts, itertools.takewhile(lambda attempt: not attempt.tokens, reversed(self._attempts))))

    def _suspicions(self) -> int:
        """Deaths within its first steps since it last passed them."""
        latest = itertools.takewhile(lambda attempt: attempt.tokens < FIRST_TOKENS, reversed(self._attempts))
        return sum(attempt.is_death and not attempt.excused for attempt in latest)

    @property
    def numerics(self) -> str:
        """Numerics class of the last attempt's worker; "" before the first one."""
        return self._attempts[-1].numerics if self._attempts else ""

    @property
    def refused(self) -> bool:
        """True if a worker has refused the request before the last one."""
        return any(attempt.loss is Loss.REFUSED for attempt in self._attempts[:-1])

    def has_begun(self, num_tokens: int) -> bool:
        """True if the attempt under way has brought tokens; the router has `num_tokens` now."""
        return num_tokens > self._attempts[-1].began_with

    def numerics_wanted(self, policy: FailoverPolicy, num_tokens: int) -> str | None:
        """The class that the next worker must be of, None for any; the router has `num_tokens` now."""
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
        """Number of workers that died with it."""
        return sum(attempt.is_death for attempt in self._attempts)

    @property
    def exact(self) -> bool:
        """True if all tokens came from one numerics class. To be asked when the last attempt has ended."""
        classes = {attempt.numerics for attempt in self._attempts if attempt.tokens}
        return len(classes if self._resumed_from is None else {*classes, self._resumed_from}) <= 1


def _counts(attempt: Attempt) -> bool:
    return attempt.loss is not Loss.DRAINED


def stall_bound_s(stall_timeout_s: float, step_tokens: int, prefill_rate: float) -> float:
    """Longest time that an engine step may run before its worker counts as stalled (rule S10), seconds.

    Args:
        stall_timeout_s: the least that is allowed, whatever the step.
        step_tokens: most tokens in one step.
        prefill_rate: tokens per second, 0 when not known.
    """
    longest_step_s = step_tokens / prefill_rate if prefill_rate > 0 else 0.0
    return max(stall_timeout_s, STALL_PREFILLS * longest_step_s)
