"""Published blocks whose KV is digested, and the digests that have come.

A block is digested by the first step that is scheduled after its publication, before that step writes anything: its
bytes are final then, and nobody has written to it since, even if it has been evicted meanwhile and is to be written by
that very step. Steps in flight at the publication write only behind it.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.config import Config
from common.wire.kv_digests import block_name, is_chosen
from worker.engine.sequence import Sequence


class BlockDigests:
    """The digests of one pool's blocks.

    Args:
        config: the share of blocks that are digested, their size, and the hash seed.
    """

    def __init__(self, config: Config) -> None:
        self._below = round(config.kv_digests * 2**64)
        self._block_size = config.kv_cache_block_size
        self._hash_seed = config.hash_seed
        self._wanted: dict[int, bytes] = {}
        self._came: list[tuple[bytes, int]] = []

    def published(self, seq: Sequence, place: int, tokens: bytes | bytearray) -> None:
        """Notes that a sequence's block at `place`, with these tokens, can be found from now on."""
        if self._below and is_chosen(tokens, self._below):
            prefix = memoryview(seq.packed_ids)[: (place + 1) * len(tokens)]
            self._wanted[seq.block_table[place]] = block_name(prefix, self._block_size, self._hash_seed)

    def take_wanted(self) -> dict[int, bytes]:
        """By id, the names of the blocks that the next step digests."""
        wanted, self._wanted = self._wanted, {}
        return wanted

    def add(self, digests: Iterable[tuple[bytes, int]]) -> None:
        """Takes names and digests that a step has made."""
        self._came += digests

    def take(self) -> list[tuple[bytes, int]]:
        """Names and digests that have come since the last call."""
        came, self._came = self._came, []
        return came
