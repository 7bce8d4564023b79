"""A request as the dispatcher knows it, and the priority classes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from common.params.names import PRIORITIES

LOW: Final = 1
NORMAL: Final = 2
HIGH: Final = 3
"""Classes, with the numbers of the protos' Priority; a higher one goes first."""
CLASSES: Final = (HIGH, NORMAL, LOW)
CLASS_NAMES: Final = {number: name for name, number in PRIORITIES.items()}


class Place(Protocol):
    """The lane that a waiting request is bound to, as far as the request's charge depends on it."""

    @property
    def worker(self) -> str:
        """The worker's address or id."""

    @property
    def caches_prefixes(self) -> bool:
        """True if the worker shares the KV of equal prefixes."""


@dataclass(slots=True)
class PrefixLookup:
    """Result of a placement's last look at a waiting request.

    Attributes:
        time: monotonic seconds.
        depth: granules of the longest prefix that anybody had.
        hits: granules that each candidate had.
    """

    time: float = -math.inf
    depth: int = 0
    hits: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class QueuedRequest:
    """A request as the dispatcher knows it.

    Attributes:
        key: number of the request in this router.
        model: identity of the model that must serve it.
        tokens: tokens to compute before the next one: the prompt, and what an earlier attempt has generated.
        arrival: monotonic seconds of its arrival.
        deadline: monotonic seconds after which it is dropped, None for never.
        lane: that of the worker it will go to as things stand, None when there is none; nothing is promised before its
            release.
        numerics: class that the worker must be of, None for any.
        parked: monotonic seconds since when there has been no worker for it, None while there is one.
        tenant: who pays for it; "" for nobody in particular.
        priority: LOW, NORMAL or HIGH.
        is_retry: whether it has been with a worker already.
        session: its session in the model, "" for none.
        granules: names of the granules of its prompt, as in `prefix_index`.
        granule_tokens: tokens of a granule.
        most_tokens: tokens that it has at its end at most, prompt and answer; 0 when nobody has said.
        grammar_engine: library that its worker must compile grammars with; "" for a request without one.
        work: `tokens` less what the worker that it was placed on is likely to have cached; fixed while it is on a lane.
        excluded_worker: a worker that it does not go to if there is another, "" for none.
        only_worker: the one worker that it may go to, "" for any.
        alone: whether the worker that it goes to gets no other requests until its first steps have passed.
        lookup: what its placement has found out about it; the placement's own.
        output: output tokens that its tenant has been charged for.
        lead: the first answer's request, of the others to the same prompt; they go where that is or has been.
        shared_tokens: tokens of the prompt that an answer takes over from `lead` on the same worker.
        worker: that which it was last bound to; "" before.
    """

    key: int
    model: str
    tokens: int
    arrival: float
    deadline: float | None = None
    lane: Place | None = None
    numerics: str | None = None
    parked: float | None = None
    tenant: str = ""
    priority: int = NORMAL
    is_retry: bool = False
    session: str = ""
    granules: Sequence[int] = ()
    granule_tokens: int = 0
    most_tokens: int = 0
    grammar_engine: str = ""
    work: int = 0
    excluded_worker: str = ""
    only_worker: str = ""
    alone: bool = False
    lookup: PrefixLookup = field(default_factory=PrefixLookup)
    output: int = 0
    lead: QueuedRequest | None = None
    shared_tokens: int = 0
    worker: str = ""

    @property
    def charged_tokens(self) -> int:
        """Tokens that its tenant is charged when it goes to the worker of its lane: cached ones too, but none that the
        first answer to the same prompt was charged for and has left there."""
        lane = self.lane
        if self.lead is None or lane is None or lane.worker != self.lead.worker or not lane.caches_prefixes:
            return self.tokens
        return self.tokens - self.shared_tokens
