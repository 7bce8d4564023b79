"""A request as the dispatcher knows it, and the priority classes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from common.params.names import PRIORITIES
from common.wire.block_hash import GRANULE_BLOCKS
from router.scheduling.lane_waits import QueueWait

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
    """Cached prefixes of a request's prompt, as the placement last found them.

    Attributes:
        time: monotonic seconds of the lookup.
        depth: granules of the longest prefix cached on any worker.
        hits: granules cached on each candidate worker; those in its memory tier count by the share of time they save.
    """

    time: float = -math.inf
    depth: int = 0
    hits: Mapping[str, float] = field(default_factory=dict)


class PlacementChoice(NamedTuple):
    """Why a placement chose a request's worker.

    Attributes:
        reason: `prefix` (cached prefix), `session`, `load`, `turn`, or `moved`: it waited, and another lane was sooner.
        candidates: number of workers that were compared.
        cached_tokens: prompt tokens that the worker probably has cached, weighted as in `PrefixLookup.hits`.
        estimate_s: expected time to the end of its prefill, seconds; None if the policy compares none.
    """

    reason: str
    candidates: int
    cached_tokens: int = 0
    estimate_s: float | None = None


@dataclass(slots=True)
class QueuedRequest:
    """A request as the dispatcher knows it.

    Attributes:
        key: number of the request in this router.
        model: identity of the model that must serve it.
        tokens: prompt tokens, plus those that an earlier attempt has generated.
        arrival: monotonic seconds of its arrival.
        deadline: monotonic seconds after which it is dropped, None for never.
        lane: the lane it is bound to, None while it has none; it may change its lane until it is released.
        numerics: required numerics class, None for any.
        parked: monotonic seconds at which it was parked, None while a worker can serve it.
        tenant: the tenant that is charged for it; "" for none.
        priority: LOW, NORMAL or HIGH.
        is_retry: True if it has returned from a worker.
        session: its session in the model, "" for none.
        granules: names of the granules of its prompt, as in `prefix_index`.
        granule_tokens: tokens of a granule.
        most_tokens: longest prompt and answer together, tokens; 0 if unknown.
        grammar_engine: library that its worker must compile grammars with; "" for a request without a grammar.
        has_output: True if it has generated tokens, so that a worker for decodes is the best place for it.
        work: `tokens` less what its lane's worker probably has cached; fixed while it is in a lane.
        excluded_worker: a worker to avoid while another one can serve it, "" for none.
        only_worker: the one worker that may serve it, "" for any.
        alone: True if its worker gets no other requests until its first steps have passed.
        lookup: cached prefixes of its prompt; written by the placement.
        output: output tokens that its tenant has been charged for.
        lead: for a further answer to a prompt, the request of the first answer; the answers share a worker if possible.
        shared_tokens: prompt tokens that a further answer takes from `lead` on the same worker.
        worker: the worker that it was last bound to; "" before.
        choice: why the placement chose its lane; written by the placement.
        wait: why it waits.
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
    has_output: bool = False
    work: int = 0
    excluded_worker: str = ""
    only_worker: str = ""
    alone: bool = False
    lookup: PrefixLookup = field(default_factory=PrefixLookup)
    output: int = 0
    lead: QueuedRequest | None = None
    shared_tokens: int = 0
    worker: str = ""
    choice: PlacementChoice | None = None
    wait: QueueWait = field(default_factory=QueueWait)

    @property
    def block_tokens(self) -> int:
        """Tokens of a KV block; 0 if unknown."""
        return self.granule_tokens // GRANULE_BLOCKS

    @property
    def charged_tokens(self) -> int:
        """Tokens that its tenant is charged for on its release, cached ones included.

        A further answer on the worker of the first one is not charged for the tokens that the two share.
        """
        lane = self.lane
        if self.lead is None or lane is None or lane.worker != self.lead.worker or not lane.caches_prefixes:
            return self.tokens
        return self.tokens - self.shared_tokens
