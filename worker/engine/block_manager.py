"""The paged KV cache's blocks: who holds which, which can be shared, and which dies next.

Prefix cache. A block is published once its KV is fully written and its tokens are final, and it is found by
the hash of the whole prefix up to it. The hash is only a hint: a hit needs equal tokens and, as parent, the
node id of the block that was verified before it. Equal parent hashes would not do: after a collision a child computed
under another prefix matches them. Node ids are minted at publication and never used twice, which closes the argument by
induction from the root. A root is interned per cache salt and compared whole.

Invariants, checked by `check_integrity`:
- a block is free iff its `ref_count` is 0; a free block keeps its identity until it is taken for something else;
- `hash_to_block_id[h] == b` iff `blocks[b].hash == h`: eviction drops the entry;
- the tree of cached blocks is closed: the parent of a cached block is cached, or a root. Sequences hold whole prefixes
  and release them from the end, so among free blocks suffixes are older than prefixes and die first;
- blocks of a sequence that are not published yet are held by it alone;
- what a proved block follows is proved, so what `forget_unproved` takes away from a prefix is all behind one place;
- what `take_granule_changes` has said so far, put together, is `cached_granules`.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from common.block_hash import GRANULE_BLOCKS, hash_chain
from common.config import Config
from common.errors import InvalidFieldError
from common.limits import MAX_CACHE_SALTS
from worker.engine.sequence import Sequence

# Roots have node ids <= 0, blocks > 0.
_UNSALTED_ROOT = 0
# Of a packed token id, in this machine's byte order.
_ID_CODE = "I"
_ID_BYTES = array(_ID_CODE).itemsize


class OutOfBlocksError(Exception):
    """A caller did not ask `can_allocate` or `can_append` first."""


class IntegrityError(Exception):
    """An invariant of the engine's bookkeeping is broken."""


class Block:
    """One KV block.

    Attributes:
        block_id: its place in the KV cache.
        ref_count: sequences that hold it.
        hash: of its prefix up to and with this block; None while it is not published.
        tokens: its tokens when published, as uint32: a twelfth of the memory of numbers, and compared at once.
        node: its id in the tree of cached prefixes, None while it is not published.
        parent: node id of the block before it, or of the root.
        depth: number of blocks of its prefix, itself included; 0 while it is not published.
        is_proved: True if a token has come out of a step that read it; before, its KV may be NaN.
    """

    __slots__ = ("block_id", "depth", "hash", "is_proved", "node", "parent", "ref_count", "tokens")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.reset()

    def update(self, hash: int, tokens: bytes, node: int, parent: int, depth: int) -> None:
        """Publishes the block."""
        self.depth = depth
        self.is_proved = False
        self.hash: int | None = hash
        self.tokens = tokens
        self.node: int | None = node
        self.parent: int | None = parent

    def reset(self) -> None:
        """Forgets what it held."""
        self.hash = self.node = self.parent = None
        self.tokens = b""
        self.depth = 0
        self.is_proved = False


@dataclass(slots=True)
class _Chain:
    """A sequence's way down the tree: how many of its blocks are cached, and the last one's node."""

    num_published: int = 0
    node: int = _UNSALTED_ROOT


class BlockManager:
    """Hands out blocks in O(1) each and finds cached prefixes.

    Sequences are told apart by their ids; one that waits may be asked about any number of times, its prompt is hashed
    once, or never if it brings its hashes. `deallocate` ends what is known about it.

    Raises:
        InvalidFieldError: the pool has no blocks.
    """

    def __init__(self, config: Config) -> None:
        num_blocks = config.num_kvcache_blocks
        if num_blocks < 1:
            raise InvalidFieldError("num_kvcache_blocks", f"is {num_blocks}", "at least 1")
        self.block_size = config.kv_cache_block_size
        self.enable_prefix_caching = config.enable_prefix_caching
        self.hash_seed = config.hash_seed
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.hash_to_block_id: dict[int, int] = {}
        # From the next to be taken to the last: blocks that hold nothing, then cached ones, least recently used first.
        self.free_block_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._chains: dict[int, _Chain] = {}
        self._salts: OrderedDict[bytes, int] = OrderedDict()
        self._next_node = itertools.count(1)
        self._next_root = itertools.count(-1, -1)
        self._granule_changes: list[int] | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return len(self.blocks)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds, cached ones among them."""
        return len(self.free_block_ids)

    def cached_blocks(self, seq: Sequence) -> list[int]:
        """The longest cached prefix of a sequence without blocks, as block ids. Never its last token, which must be
        computed for its logits (T2)."""
        if not self.enable_prefix_caching:
            return []
        found: list[int] = []
        node = self._root(seq)
        for i, block_hash in enumerate(self._hashes(seq)[: self._hittable(seq)]):
            block = self._find(block_hash, self._tokens(seq, i), node)
            if block is None or block.node is None:
                break
            found.append(block.block_id)
            node = block.node
        return found

    def next_hash(self, seq: Sequence, cached: list[int]) -> int | None:
        """Hash of the first block that `cached` lacks and that might be found later; None when there is none."""
        if not self.enable_prefix_caching or len(cached) >= self._hittable(seq):
            return None
        return self._hashes(seq)[len(cached)]

    def hittable_hash(self, seq: Sequence, place: int) -> int | None:
        """Hash of the block at a place of the prompt, if `seq` can have it from the cache; else None."""
        if not self.enable_prefix_caching or place >= self._hittable(seq):
            return None
        return self._hashes(seq)[place]

    def hashes_in(self, seq: Sequence, start: int, end: int) -> list[int]:
        """Hashes of the full blocks that tokens [start, end) lie in, wholly or in part."""
        if not self.enable_prefix_caching:
            return []
        return self._hashes(seq)[start // self.block_size : -(-end // self.block_size)]

    def can_allocate(self, seq: Sequence, cached: list[int] | None = None, reserve: int = 0) -> bool:
        """True if `allocate` finds the blocks for all tokens of `seq`, and leaves `reserve` free.

        Cached blocks in use cost nothing, cached blocks that are free leave the free list (T3).
        """
        cached = self.cached_blocks(seq) if cached is None else cached
        in_use = sum(self.blocks[b].ref_count > 0 for b in cached)
        return seq.num_blocks - in_use + reserve <= self.num_free_blocks

    def allocate(self, seq: Sequence, cached: list[int] | None = None) -> None:
        """Gives `seq` blocks for all its tokens, `cached` first, and sets `num_cached_tokens`, `num_computed_tokens`.

        Raises:
            OutOfBlocksError: there are too few; nothing has changed.
        """
        cached = self.cached_blocks(seq) if cached is None else cached
        if seq.block_table or not self.can_allocate(seq, cached):
            raise OutOfBlocksError(f"sequence {seq.id}: {seq.num_blocks} blocks, {self.num_free_blocks} free")
        # Hits first: else a fresh block might evict one of them.
        for block_id in cached:
            self._claim(block_id)
        seq.block_table = cached + [self._take() for _ in range(seq.num_blocks - len(cached))]
        seq.num_slots = len(seq.block_table) * self.block_size
        seq.num_cached_tokens = seq.num_computed_tokens = len(cached) * self.block_size
        if self.enable_prefix_caching:
            chain = self._chain(seq)
            chain.num_published = len(cached)
            node = self.blocks[cached[-1]].node if cached else None
            chain.node = self._root(seq) if node is None else node
            seq.publish_at = (len(cached) + 1) * self.block_size

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

    def prove(self, seq: Sequence) -> None:
        """Notes that a token has come out of what `seq` has published or found. O(1) amortized over blocks."""
        chain = self._chains.get(seq.id)
        for i in range(0 if chain is None else chain.num_published - 1, -1, -1):
            block = self.blocks[seq.block_table[i]]
            if block.is_proved or block.hash is None:
                return
            block.is_proved = True

    def forget_unproved(self, seq: Sequence) -> int:
        """Forgets the blocks of the cached prefix of `seq` that are not proved, and all that follow them: a step that
        read them gave no number, and so would each that finds them. Who holds them goes on, but publishes nothing more.

        Returns:
            How many they were. O(cached blocks) unless that is none.
        """
        found = (self.blocks[block_id] for block_id in self.cached_blocks(seq))
        first = next((block for block in found if not block.is_proved), None)
        if first is None:
            return 0
        blocks = (self.blocks[block_id] for block_id in self.hash_to_block_id.values())
        deeper = sorted((b for b in blocks if b.depth > first.depth and not b.is_proved), key=lambda b: b.depth)
        nodes, gone = {first.node}, [first]
        for block in deeper:
            if block.parent in nodes:
                nodes.add(block.node)
                gone.append(block)
        for block in gone:
            self._forget(block)
            if block.ref_count == 0:
                self.free_block_ids.move_to_end(block.block_id, last=False)
        return len(gone)

    def watch_granules(self) -> None:
        """From now on `take_granule_changes` says what comes to the cache and what leaves it."""
        self._granule_changes = self.cached_granules()

    def take_granule_changes(self) -> list[int]:
        """Changes since the last call, in order: the hash of a granule that can be found now, its complement
        (`~hash`, negative) for one that can not be any more. The two alternate for each hash."""
        if not self._granule_changes:
            return []
        changes, self._granule_changes = self._granule_changes, []
        return changes

    def cached_granules(self) -> list[int]:
        """Hashes of the cached blocks that end a granule. O(blocks)."""
        return [b.hash for b in self.blocks if b.hash is not None and b.depth % GRANULE_BLOCKS == 0]

    def flush(self) -> int:
        """Forgets the cached blocks that no sequence holds; how many that were. O(blocks).

        The tree stays closed: sequences hold whole prefixes, so no block that is held has a parent that is not.
        """
        cached = [block for block_id in self.free_block_ids if (block := self.blocks[block_id]).hash is not None]
        for block in cached:
            self._forget(block)
        return len(cached)

    def check_integrity(self, seqs: Iterable[Sequence]) -> None:
        """Checks the module's invariants; `seqs` are all that hold blocks. O(blocks): for tests and idle time.

        Raises:
            IntegrityError: one is broken.
        """
        seqs = list(seqs)
        refs = Counter(b for seq in seqs for b in seq.block_table)
        for block in self.blocks:
            _require(
                block.ref_count == refs[block.block_id], f"block {block.block_id} is held by {refs[block.block_id]}"
            )
            _require(
                (block.ref_count == 0) == (block.block_id in self.free_block_ids), f"block {block.block_id} is lost"
            )
        self._check_tree()
        for seq in seqs:
            chain = self._chains.get(seq.id, _Chain())
            _require(seq.num_slots == len(seq.block_table) * self.block_size, f"slots of sequence {seq.id}")
            own = [self.blocks[b] for b in seq.block_table[chain.num_published :]]
            _require(
                all(b.ref_count == 1 and b.hash is None for b in own), f"sequence {seq.id} shares unwritten blocks"
            )

    def _check_tree(self) -> None:
        cached = {b.node: b for b in self.blocks if b.hash is not None}
        index = {b.hash: b.block_id for b in cached.values()}
        _require(index == self.hash_to_block_id, "the index differs from the blocks' hashes")
        order = {block_id: i for i, block_id in enumerate(self.free_block_ids)}
        for block in cached.values():
            if block.parent is None or block.parent <= _UNSALTED_ROOT:
                _require(block.depth == 1, f"block {block.block_id} begins a prefix at depth {block.depth}")
                continue
            parent = cached.get(block.parent)
            _require(parent is not None, f"block {block.block_id} is cached without its parent")
            _require(parent is None or block.depth == parent.depth + 1, f"depth of block {block.block_id}")
            if parent is not None:
                _require(
                    parent.is_proved or not block.is_proved, f"block {block.block_id} is proved without its parent"
                )
            if parent is not None and parent.ref_count == 0:
                dies_first = block.ref_count == 0 and order[block.block_id] < order[parent.block_id]
                _require(dies_first, f"block {parent.block_id} would be evicted before its child {block.block_id}")

    def _publish_next(self, seq: Sequence, chain: _Chain) -> None:
        i = chain.num_published
        if i and self.blocks[seq.block_table[i - 1]].node != chain.node:
            # What it follows has been forgotten while it was held.
            seq.publish_at = math.inf
            return
        block_hash, tokens = self._hashes(seq)[i], self._tokens(seq, i)
        present = self.hash_to_block_id.get(block_hash)
        if present is None:
            block = self.blocks[seq.block_table[i]]
            block.update(block_hash, bytes(tokens), next(self._next_node), chain.node, i + 1)
            self.hash_to_block_id[block_hash] = block.block_id
            if (i + 1) % GRANULE_BLOCKS == 0 and self._granule_changes is not None:
                self._granule_changes.append(block_hash)
        else:
            found = self._find(block_hash, tokens, chain.node)
            if found is None:
                # Another prefix owns the key, or the same one whose salt is forgotten: neither this block nor what
                # follows it can be found until that one is evicted (section 6). It costs hits, never an answer.
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

    def _find(self, block_hash: int, tokens: bytearray, parent: int) -> Block | None:
        block_id = self.hash_to_block_id.get(block_hash)
        if block_id is None:
            return None
        block = self.blocks[block_id]
        return block if block.parent == parent and block.tokens == tokens else None

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
        self._forget(block)
        block.ref_count = 1
        return block_id

    def _forget(self, block: Block) -> None:
        """Takes a block out of the cache; a no-op when it is not in it."""
        if block.hash is not None:
            del self.hash_to_block_id[block.hash]
            if block.depth % GRANULE_BLOCKS == 0 and self._granule_changes is not None:
                self._granule_changes.append(~block.hash)
            block.reset()

    def _release(self, block_id: int) -> None:
        block = self.blocks[block_id]
        block.ref_count -= 1
        if block.ref_count == 0:
            self.free_block_ids[block_id] = None
            if block.hash is None:
                self.free_block_ids.move_to_end(block_id, last=False)

    def _blocks_needed(self, seq: Sequence, num_new_tokens: int) -> int:
        # The one place that decides it, for the check and for the act.
        missing = seq.next_position + num_new_tokens - seq.num_slots
        return -(-missing // self.block_size) if missing > 0 else 0

    def _hittable(self, seq: Sequence) -> int:
        return (seq.num_tokens - 1) // self.block_size

    def _tokens(self, seq: Sequence, i: int) -> bytearray:
        """Tokens of full block `i`; those are packed that have come since."""
        packed, width = seq.packed_ids, _ID_BYTES * self.block_size
        if len(packed) < (i + 1) * width:
            packed += array(_ID_CODE, seq.token_ids[len(packed) // _ID_BYTES :]).tobytes()
        return packed[i * width : (i + 1) * width]

    def _chain(self, seq: Sequence) -> _Chain:
        return self._chains.setdefault(seq.id, _Chain())

    def _hashes(self, seq: Sequence) -> list[int]:
        """Hashes of all full blocks of `seq`; tokens are only ever appended, so what is hashed stays."""
        hashes = seq.block_hashes
        done = len(hashes) * self.block_size
        if seq.num_tokens - done >= self.block_size:
            parent = hashes[-1] if hashes else seq.hash_root
            hashes += hash_chain(seq.token_ids[done:], self.block_size, root=parent, seed=self.hash_seed)
        return hashes

    def _root(self, seq: Sequence) -> int:
        """Node of the sequence's salt. A forgotten salt gets a new node, so its old blocks can not be found again."""
        if not seq.cache_salt:
            return _UNSALTED_ROOT
        if seq.cache_salt not in self._salts:
            self._salts[seq.cache_salt] = next(self._next_root)
        self._salts.move_to_end(seq.cache_salt)
        while len(self._salts) > MAX_CACHE_SALTS:
            self._salts.popitem(last=False)
        return self._salts[seq.cache_salt]


def _require(ok: bool, problem: str) -> None:
    if not ok:
        raise IntegrityError(problem)
