"""The paged KV cache's blocks: who holds which, which can be shared, and which dies next.

Invariants, checked by worker/engine/integrity.py:
- a block is free iff its `ref_count` is 0; a free block keeps its identity until it is taken for something else;
- sequences hold whole prefixes and release them from the end, so among free blocks suffixes are older than prefixes and
  die first, and the tree of cached prefixes (worker/engine/prefix_cache.py) stays closed;
- blocks of a sequence that are not published yet are held by it alone;
- the block that a copy is made of is not written before the step that makes the copy: steps run in the order in which
  they are scheduled, and copy first.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from common.config import Config
from common.errors import InvalidFieldError
from worker.engine.batch import BlockCopy
from worker.engine.block_digests import BlockDigests
from worker.engine.prefix_cache import UNSALTED_ROOT, Block, PrefixCache
from worker.engine.sequence import Sequence

__all__ = ["Block", "BlockManager", "OutOfBlocksError"]


class OutOfBlocksError(Exception):
    """A caller did not ask `can_allocate` or `can_append` first."""


@dataclass(slots=True)
class _Chain:
    """A sequence's way down the tree: how many of its blocks are cached, and the last one's node."""

    num_published: int = 0
    node: int = UNSALTED_ROOT


class BlockManager:
    """Hands out blocks in O(1) each and publishes those that are full.

    Sequences are told apart by their ids; one that waits may be asked about any number of times. `deallocate` ends what
    is known about it.

    Attributes:
        block_size: tokens per block.
        enable_prefix_caching: True if prefixes are shared.
        blocks: the pool, by id.
        prefixes: the cached prefixes.
        hash_to_block_id: of `prefixes`.
        digests: of published blocks.
        free_block_ids: from the next to be taken to the last: blocks that hold nothing, then cached ones, least
            recently used first.

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
        self.free_block_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._chains: dict[int, _Chain] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return len(self.blocks)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds, cached ones among them."""
        return len(self.free_block_ids)

    def can_allocate(self, seq: Sequence, cached: list[int] | None = None, reserve: int = 0) -> bool:
        """True if `allocate` finds the blocks for all tokens of `seq`, and leaves `reserve` free.

        Cached blocks in use cost nothing, cached blocks that are free leave the free list.
        """
        cached = self.prefixes.cached_blocks(seq) if cached is None else cached
        in_use = sum(self.blocks[b].ref_count > 0 for b in cached)
        return seq.num_blocks - in_use + reserve <= self.num_free_blocks

    def allocate(self, seq: Sequence, cached: list[int] | None = None) -> BlockCopy | None:
        """Gives `seq` blocks for all its tokens, `cached` first, and sets `num_cached_tokens`, `num_computed_tokens`.

        Returns:
            What the sequence's first step has to copy before anything else: the block whose beginning is the part of
            its prompt behind `cached`, but for the last token. None for nothing.

        Raises:
            OutOfBlocksError: there are too few; nothing has changed.
        """
        cached = self.prefixes.cached_blocks(seq) if cached is None else cached
        if seq.block_table or not self.can_allocate(seq, cached):
            raise OutOfBlocksError(f"sequence {seq.id}: {seq.num_blocks} blocks, {self.num_free_blocks} free")
        tail = self.prefixes.cached_tail(seq, cached)
        # Hits first: else a fresh block might evict one of them. The tail may be evicted, even be among the new ones.
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
        """Takes back all blocks of `seq`, the last first. It need not have any."""
        for block_id in reversed(seq.block_table):
            self._release(block_id)
        seq.block_table = []
        seq.num_slots, seq.publish_at = 0, math.inf
        self._chains.pop(seq.id, None)

    def can_append(self, seq: Sequence, num_new_tokens: int = 1) -> bool:
        """True if `may_append` finds the blocks it needs."""
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
        """Makes the blocks that are full up to `num_computed_tokens` findable; call when their KV has been written."""
        if seq.num_computed_tokens < seq.publish_at:
            return
        chain = self._chains[seq.id]
        while seq.publish_at <= seq.num_computed_tokens:
            self._publish_next(seq, chain)

    def publish_tail(self, seq: Sequence) -> None:
        """Makes the beginning of a prompt's last block findable; call when the prompt's first token has come, after
        `publish`."""
        self.prefixes.add_tail(seq)

    def prove(self, seq: Sequence) -> None:
        """Notes that a token has come out of what `seq` has published or found. O(1) amortized over blocks."""
        for i in range(self.num_published(seq) - 1, -1, -1):
            block = self.blocks[seq.block_table[i]]
            if block.is_proved or block.hash is None:
                return
            block.is_proved = True

    def num_published(self, seq: Sequence) -> int:
        """Blocks of `seq` that it has found in the cache or published."""
        chain = self._chains.get(seq.id)
        return 0 if chain is None else chain.num_published

    def forget_unproved(self, seq: Sequence) -> int:
        """Forgets the blocks of the cached prefix of `seq` that are not proved, and all that follow them: a step that
        read them gave no number, and so would each that finds them. Who holds them goes on, but publishes nothing more.

        Returns:
            How many they were. O(cached blocks) unless that is none.
        """
        found = (self.blocks[block_id] for block_id in self.prefixes.cached_blocks(seq))
        first = next((block for block in found if not block.is_proved), None)
        if first is None:
            return 0
        gone = self.prefixes.unproved_from(first)
        for block in gone:
            self.prefixes.forget(block)
            if block.ref_count == 0:
                self.free_block_ids.move_to_end(block.block_id, last=False)
        return len(gone)

    def flush(self) -> int:
        """Forgets the cached blocks that no sequence holds; how many full ones that were. O(blocks).

        The tree stays closed: sequences hold whole prefixes, so no block that is held has a parent that is not.
        """
        cached = [block for block_id in self.free_block_ids if (block := self.blocks[block_id]).is_cached]
        num_full = sum(block.hash is not None for block in cached)
        for block in cached:
            self.prefixes.forget(block)
        return num_full

    def _publish_next(self, seq: Sequence, chain: _Chain) -> None:
        i, prefixes = chain.num_published, self.prefixes
        if i and self.blocks[seq.block_table[i - 1]].node != chain.node:
            # Its parent was evicted while it was held.
            seq.publish_at = math.inf
            return
        block_hash, tokens = prefixes.hashes(seq)[i], prefixes.tokens(seq, i)
        if block_hash not in self.hash_to_block_id:
            block = self.blocks[seq.block_table[i]]
            prefixes.add(block, block_hash, tokens, chain.node, i + 1)
            self.digests.published(seq, i, tokens)
        else:
            found = prefixes.find(block_hash, tokens, chain.node)
            if found is None:
                # Another prefix owns the key, or the same one whose salt is forgotten: neither this block nor what
                # follows it can be found until that one is evicted. It costs hits, never an answer.
                seq.publish_at = math.inf
                return
            block = found
            self._go_on_with(seq, i, block.block_id)
        chain.num_published = i + 1
        seq.publish_at = (i + 2) * self.block_size
        if block.node is not None:
            chain.node = block.node

    def _go_on_with(self, seq: Sequence, i: int, present: int) -> None:
        """Swaps a block for the one that was published with the same content before; the tree stays closed thereby.

        In a new table: batches in flight hold the old one.
        """
        self._claim(present)
        self._release(seq.block_table[i])
        seq.block_table = [*seq.block_table[:i], present, *seq.block_table[i + 1 :]]

    def _claim(self, block_id: int) -> None:
        """One more holder of a cached block. Unlike `_take` it keeps the block's identity."""
        block = self.blocks[block_id]
        if block.ref_count == 0:
            del self.free_block_ids[block_id]
        block.ref_count += 1

    def _take(self) -> int:
        """The next free block, evicted from the cache if it was in it."""
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
        # The one place that decides it, for the check and for the act.
        missing = seq.next_position + num_new_tokens - seq.num_slots
        return -(-missing // self.block_size) if missing > 0 else 0
