"""Finds out who waits for a prefix that another sequence computes right now.

Such a follower is neither admitted nor sent away: it hits the prefix soon, instead of computing it again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from worker.engine.prefix_cache import PrefixCache
from worker.engine.sequence import Sequence
from worker.engine.step import Fronts, Step


class PrefixFollowers:
    """Compares what waits with what is being computed.

    Args:
        prefixes: knows the hashes of prompts, and what is cached.
        in_flight: the steps that are being computed, oldest first.
    """

    def __init__(self, prefixes: PrefixCache, in_flight: deque[Step]) -> None:
        self._prefixes = prefixes
        self._in_flight = in_flight

    def fronts(self, prefilling: Iterable[Sequence]) -> Fronts:
        """The first blocks that running prompts have not computed to their ends."""
        fronts: Fronts = {}
        for seq in prefilling:
            self.note_front(fronts, seq, seq.num_computed_tokens)
        return fronts

    def fronts_in_flight(self) -> list[Fronts]:
        """The fronts of the steps that are being computed."""
        return [step.fronts for step in self._in_flight]

    def note_front(self, fronts: Fronts, seq: Sequence, start: int) -> None:
        """Adds the block, and the tail, that a prompt goes on with at `start`, unless it is cached: then nobody waits
        for it."""
        hashes = self._prefixes.hashes_in(seq, start, start + 1)
        if new := [each for each in hashes if each not in self._prefixes.hash_to_block_id]:
            fronts.setdefault(start // seq.block_size, set()).update(new)

    def follows(self, seq: Sequence, fronts: Fronts) -> bool:
        """True if `seq` will find in the cache what one of the fronts computes. Cheap: looks at no cached block."""
        return any(self._prefixes.hittable_hash(seq, place) in hashes for place, hashes in fronts.items())

    def is_computing(self, block_hash: int | None, step: Step) -> bool:
        """True if the step in the making, or one in flight, computes a block."""
        return block_hash in step.computing or any(block_hash in flight.computing for flight in self._in_flight)
