"""Blocks of the paged KV cache: allocation, sharing, publication and eviction.

Invariants, checked by worker/engine/integrity.py:
- a block is free iff its `ref_count` is 0; a free block stays in the prefix cache until it is allocated;
- sequences hold whole prefixes and release them from the end. So among free blocks suffixes are evicted before
  prefixes, and the tree of cached prefixes (worker/engine/prefix_cache.py) stays closed;
- unpublished blocks of a sequence have no other holder;
- the source of a block copy is not written before the step that makes the copy: steps run in the order in which they
  are scheduled, and copy before they compute.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from common.config import Config
from common.errors import InvalidFieldError
from common.wire.kv_digests import block_name, is_chosen
from worker.engine.batch import BlockCopy
from worker.engine.prefix_cache import UNSALTED_ROOT, Block, PrefixCache
from worker.engine.sequence import Sequence

__all__ = ["Block", "BlockManager", "OutOfBlocksError"]


class OutOfBlocksError(Exception):
    """Too few free blocks: the caller did not ask `can_allocate` or `can_append` first."""


@dataclass(slots=True)
class _Chain:
    """A sequence's path in the tree of cached prefixes: number of its blocks there, and node of the last one."""

    num_published: int = 0
    node: int = UNSALTED_ROOT


class BlockDigests:
    """Published blocks whose KV the next step digests, and the digests that steps have made.

    A block is digested by the first step scheduled after its publication, before that step writes anything. Its bytes
    are final then. Nothing has been written to it since, even if it was evicted meanwhile and that very step writes to
    it. Steps in flight at the publication write only behind it.

    Args:
        config: the share of blocks that are digested, the block size and the hash seed.
    """

    def __init__(self, config: Config) -> None:
        self._below = round(config.kv_digests * 2**64)
        self._block_size = config.kv_cache_block_size
        self._hash_seed = config.hash_seed
        self._wanted: dict[int, bytes] = {}
        self._digests: list[tuple[bytes, int]] = []

    def published(self, seq: Sequence, place: int, tokens: bytes | bytearray) -> None:
        """Chooses by its tokens whether the block that a sequence has published at `place` is digested."""
        if self._below and is_chosen(tokens, self._below):
            prefix = memoryview(seq.packed_ids)[: (place + 1) * len(tokens)]
            self._wanted[seq.block_table[place]] = block_name(prefix, self._block_size, self._hash_seed)

    def take_wanted(self) -> dict[int, bytes]:
        """Takes the names of the blocks that the next step digests, by block id."""
        wanted, self._wanted = self._wanted, {}
        return wanted

    def add(self, digests: Iterable[tuple[bytes, int]]) -> None:
        """Adds names and digests that a step has made."""
        self._digests += digests

    def take(self) -> list[tuple[bytes, int]]:
        """Takes the names and digests added since the last call."""
        digests, self._digests = self._digests, []
        return digests


class BlockManager:
    """Allocates blocks in O(1) each and publishes full ones in the prefix cache.

    Sequences are known by their ids until `deallocate`.

    Attributes:
        block_size: tokens per block.
        enable_prefix_caching: True if prefixes are shared.
        blocks: the pool, by id.
        prefixes: the cached prefixes.
        hash_to_block_id: the published blocks by hash (PrefixCache).
        digests: digests of published blocks.
        on_published: called with a sequence and the place of a block that it has published; None without KV tiers.
        on_forgotten: called with a sequence and the place of its first unproved block, when that leaves the cache.
        free_block_ids: free blocks in the order of allocation: empty ones, then cached ones, least recently used
            first.

    Raises:
        InvalidFieldError: the pool has no blocks.
    """

    def __init__(self, config: Config) -> None:
        num_blocks = config.num_kvcache_blocks
        if num_blocks < 1:
            raise InvalidFieldError("num_kvcache_blocks", f"is {num_blocks}", "at least 1")
        self.block_size = config.kv_cache_block_size
        self.enable_prefix_caching = config.enable_prefix_caching
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.prefixes = PrefixCache(config, self.blocks)
        self.hash_to_block_id = self.prefixes.hash_to_block_id
        self.digests = BlockDigests(config)
        self.on_published: Callable[[Sequence, int], None] | None = None
        self.on_forgotten: Callable[[Sequence, int], None] | None = None
        self.free_block_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._chains: dict[int, _Chain] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return len(self.blocks)

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks without a holder, cached ones included."""
        return len(self.free_block_ids)

    def can_allocate(self, seq: Sequence, cached: list[int] | None = None, reserve: int = 0) -> bool:
        """True if `allocate` finds blocks for all tokens of `seq`, and leaves `reserve` free.

        Cached blocks in use cost nothing; cached blocks that are free leave the free list.
        """
        cached = self.prefixes.cached_blocks(seq) if cached is None else cached
        in_use = sum(self.blocks[b].ref_count > 0 for b in cached)
        return seq.num_blocks - in_use + reserve <= self.num_free_blocks

    def allocate(self, seq: Sequence, cached: list[int] | None = None) -> BlockCopy | None:
        """Gives `seq` blocks for all its tokens, `cached` first, and sets `num_cached_tokens`, `num_computed_tokens`.

        Returns:
            The copy that the sequence's first step makes before it computes: its source begins with the rest of the
            prompt behind `cached`, without the last token. None without such a block.

        Raises:
            OutOfBlocksError: there are too few; nothing has changed.
        """
        cached = self.prefixes.cached_blocks(seq) if cached is None else cached
        if seq.block_table or not self.can_allocate(seq, cached):
            raise OutOfBlocksError(f"sequence {seq.id}: {seq.num_blocks} blocks, {self.num_free_blocks} free")
        tail = self.prefixes.cached_tail(seq, cached)
        # Hits first, or a new block might evict one of them. The tail may be evicted, or be one of the new blocks.
        for block_id in cached:
            self._claim(block_id)
        seq.block_table = cached + [self._take() for _ in range(seq.num_blocks - len(cached))]
        seq.num_slots = len(seq.block_table) * self.block_size
        seq.num_cached_tokens = seq.num_computed_tokens = len(cached) * self.block_size
        if self.enable_prefix_caching:
            node = self.blocks[cached[-1]].node if cached else None
            root = self.prefixes.root(seq.cache_salt) if node is None else node
            self._chains[seq.id] = _Chain(len(cached), root)
            seq.publish_at = (len(cached) + 1) * self.block_size
        if tail is None:
            return None
        seq.num_cached_tokens = seq.num_computed_tokens = seq.num_reusable_tokens
        return BlockCopy(tail, seq.block_table[len(cached)])

    def deallocate(self, seq: Sequence) -> None:
        """Frees all blocks of `seq`, the last one first; a no-op without blocks."""
        for block_id in reversed(seq.block_table):
            self._release(block_id)
        seq.block_table = []
        seq.num_slots, seq.publish_at = 0, math.inf
        self._chains.pop(seq.id, None)

    def can_append(self, seq: Sequence, num_new_tokens: int = 1) -> bool:
        """True if `may_append` finds enough free blocks."""
        return self._blocks_needed(seq, num_new_tokens) <= len(self.free_block_ids)

    def may_append(self, seq: Sequence, num_new_tokens: int = 1) -> None:
        """Extends the block table so that the next `num_new_tokens` from `next_position` on have slots.

        For a plain decode that position is `num_tokens - 1`: the newest token has no KV yet.

        Raises:
            OutOfBlocksError: there are too few; nothing has changed.
        """
        needed = self._blocks_needed(seq, num_new_tokens)
        if needed > len(self.free_block_ids):
            raise OutOfBlocksError(f"sequence {seq.id}: {needed} more blocks, {self.num_free_blocks} free")
        for _ in range(needed):
            seq.block_table.append(self._take())
        seq.num_slots += needed * self.block_size

    def publish(self, seq: Sequence) -> None:
        """Publishes the blocks that are full up to `num_computed_tokens`; call when their KV has been written."""
        if seq.num_computed_tokens < seq.publish_at:
            return
        chain = self._chains[seq.id]
        while seq.publish_at <= seq.num_computed_tokens:
            self._publish_next(seq, chain)

    def adopt(self, seq: Sequence, cached: list[int], count: int) -> list[int]:
        """Publishes free blocks as the next `count` blocks of a waiting sequence, behind its cached prefix.

        The next step has to write their KV before it computes.

        Returns:
            Ids of the blocks, in order; fewer if the free blocks end, or another prefix has a block's hash.
        """
        # Held meanwhile, or a new block might evict one of them.
        for block_id in cached:
            self._claim(block_id)
        node = self.blocks[cached[-1]].node if cached else self.prefixes.root(seq.cache_salt)
        adopted: list[int] = []
        for i in range(len(cached), len(cached) + count):
            if node is None or not self.free_block_ids or self.prefixes.hashes(seq)[i] in self.hash_to_block_id:
                break
            block = self.blocks[self._take()]
            self.prefixes.add(block, seq, i, self.prefixes.tokens(seq, i), node)
            adopted.append(block.block_id)
            node = block.node
        for block_id in reversed([*cached, *adopted]):
            self._release(block_id)
        return adopted

    def publish_tail(self, seq: Sequence) -> None:
        """Publishes the beginning of a prompt's last block; call after `publish`, with the first token."""
        self.prefixes.add_tail(seq)

    def prove(self, seq: Sequence) -> None:
        """Marks the cached blocks of `seq` as proved: a step that read them gave a token. O(1) amortized."""
        for i in range(self.num_published(seq) - 1, -1, -1):
            block = self.blocks[seq.block_table[i]]
            if block.is_proved or block.hash is None:
                return
            block.is_proved = True

    def num_published(self, seq: Sequence) -> int:
        """Number of blocks that `seq` has found in the cache or published."""
        chain = self._chains.get(seq.id)
        return 0 if chain is None else chain.num_published

    def forget_unproved(self, seq: Sequence) -> int:
        """Removes the unproved blocks of a sequence's cached prefix, and all behind them, from the prefix cache.

        A step that read them gave no number, and so would every other one. Sequences that hold them continue, but
        publish nothing more.

        Returns:
            Number of blocks removed. O(cached blocks) unless it is 0.
        """
        found = (self.blocks[block_id] for block_id in self.prefixes.cached_blocks(seq))
        first = next((block for block in found if not block.is_proved), None)
        if first is None:
            return 0
        if self.on_forgotten is not None:
            self.on_forgotten(seq, first.depth - 1)
        gone = self.prefixes.unproved_from(first)
        for block in gone:
            self.prefixes.forget(block)
            if block.ref_count == 0:
                self.free_block_ids.move_to_end(block.block_id, last=False)
        return len(gone)

    def flush(self) -> int:
        """Removes cached blocks without a holder from the cache. Returns the number of full ones. O(blocks).

        The tree stays closed: sequences hold whole prefixes, so a held block has a held parent.
        """
        cached = [block for block_id in self.free_block_ids if (block := self.blocks[block_id]).is_cached]
        num_full = sum(block.hash is not None for block in cached)
        for block in cached:
            self.prefixes.forget(block)
        return num_full

    def _publish_next(self, seq: Sequence, chain: _Chain) -> None:
        i, prefixes = chain.num_published, self.prefixes
        if i and self.blocks[seq.block_table[i - 1]].node != chain.node:
            # The parent has left the cache while the sequence held it.
            seq.publish_at = math.inf
            return
        block_hash, tokens = prefixes.hashes(seq)[i], prefixes.tokens(seq, i)
        if block_hash not in self.hash_to_block_id:
            block = self.blocks[seq.block_table[i]]
            prefixes.add(block, seq, i, tokens, chain.node)
            self.digests.published(seq, i, tokens)
            if self.on_published is not None:
                self.on_published(seq, i)
        else:
            found = prefixes.find(block_hash, tokens, chain.node)
            if found is None:
                # Another prefix has this hash, or the same prefix with a forgotten salt. Until that one is evicted,
                # neither this block nor those behind it can be found. It costs hits, never an answer.
                seq.publish_at = math.inf
                return
            block = found
            self._go_on_with(seq, i, block.block_id)
        chain.num_published = i + 1
        seq.publish_at = (i + 2) * self.block_size
        if block.node is not None:
            chain.node = block.node

    def _go_on_with(self, seq: Sequence, i: int, present: int) -> None:
        """Replaces a block by a published one with the same content, which keeps the tree closed.

        Makes a new table: batches in flight hold the old one.
        """
        self._claim(present)
        self._release(seq.block_table[i])
        seq.block_table = [*seq.block_table[:i], present, *seq.block_table[i + 1 :]]

    def _claim(self, block_id: int) -> None:
        """Adds a holder to a cached block, which stays cached."""
        block = self.blocks[block_id]
        if block.ref_count == 0:
            del self.free_block_ids[block_id]
        block.ref_count += 1

    def _take(self) -> int:
        """Allocates the next free block; a cached one is evicted."""
        block_id, _ = self.free_block_ids.popitem(last=False)
        block = self.blocks[block_id]
        self.prefixes.forget(block)
        block.ref_count = 1
        return block_id

    def _release(self, block_id: int) -> None:
        block = self.blocks[block_id]
        block.ref_count -= 1
        if block.ref_count == 0:
            self.free_block_ids[block_id] = None
            if not block.is_cached:
                self.free_block_ids.move_to_end(block_id, last=False)

    def _blocks_needed(self, seq: Sequence, num_new_tokens: int) -> int:
        missing = seq.next_position + num_new_tokens - seq.num_slots
        return -(-missing // self.block_size) if missing > 0 else 0
