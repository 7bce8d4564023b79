"""Prefix cache: a tree of published blocks, in which sequences find the KV of their first tokens.

A block is published once its KV is fully written and its tokens are final. It is found by the hash of the whole prefix
up to it. The hash is only a hint: a hit needs equal tokens and, as parent, the node id of the block verified before.
Equal parent hashes are not enough: after a collision they match a block that was computed behind another prefix. Node
ids are made at publication and never used twice, so by induction from the root a hit has the right prefix. Each cache
salt has its own root.

The tail of a prompt is the part of its last block that a further answer to the prompt can reuse: all tokens but the
last. A tail is found by the node before it and by its tokens, and is copied into a block of the sequence that finds it,
because each sequence writes its last token and its answer behind it. Only prompts with several answers have tails: a
sequence waits a step for a tail, which saves less than a block.

Invariants, checked by worker/engine/integrity.py:
- `hash_to_block_id[h] == b` iff `blocks[b].hash == h`: eviction drops the entry;
- the tree of cached blocks is closed: the parent of a cached block is cached, or a root;
- the parent of a proved block is proved, so the unproved blocks of a prefix are all behind one place;
- `_tails[t] == b` iff `blocks[b].tail == t`, and the node before a tail is cached, or a root;
- all changes that `take_granule_changes` has returned add up to `cached_granules`, and those of `take_block_changes` to
  the published blocks without a salt.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, TypeAlias

from common.config import Config
from common.limits import MAX_CACHE_SALTS
from common.wire.block_hash import GRANULE_BLOCKS, hash_chain
from worker.engine.sequence import Sequence

# Node ids of roots are at most 0, those of blocks are above 0.
UNSALTED_ROOT: Final = 0
# Node before a tail, and the tokens of the tail, packed as tokens of a block are.
Tail: TypeAlias = tuple[int, bytes]
# Hashes of blocks, and tails, that running prompts compute next, by their place in the prompt.
Fronts: TypeAlias = dict[int, set[int]]
# Format of a packed token id, in this machine's byte order.
_ID_CODE: Final = "I"
_ID_BYTES: Final = array(_ID_CODE).itemsize


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A published block, for those that follow the cache.

    Attributes:
        hash: of the prefix that ends with the block.
        parent: hash of the block before; None for the first block of a prompt.
        tokens: packed token ids.
    """

    hash: int
    parent: int | None
    tokens: bytes

    @property
    def token_ids(self) -> list[int]:
        """The tokens as numbers."""
        return array(_ID_CODE, self.tokens).tolist()


# A block that is published, or the hash of one that has left the cache.
BlockChange: TypeAlias = StoredBlock | int


class Block:
    """One KV block.

    Attributes:
        block_id: place in the KV cache.
        ref_count: number of sequences that hold the block.
        hash: hash of the prefix that ends with this block; None unless published.
        tokens: its tokens as uint32, when published: a twelfth of the memory of ints, and compared at once.
        node: id in the tree of cached prefixes; None unless published.
        parent: node id of the block before, or of the root.
        depth: number of blocks of the prefix that ends with this block; 0 unless published.
        is_proved: True once a step that read the block has given a token; before, its KV may be NaN.
        tail: tail that the block begins with and is found by; None for none.
    """

    __slots__ = ("block_id", "depth", "hash", "is_proved", "node", "parent", "ref_count", "tail", "tokens")

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
        """Removes everything that publication has set."""
        self.hash = self.node = self.parent = None
        self.tokens = b""
        self.depth = 0
        self.is_proved = False
        self.tail: Tail | None = None

    @property
    def is_cached(self) -> bool:
        """True if sequences can find the block, or a tail in it."""
        return self.hash is not None or self.tail is not None


class PrefixCache:
    """The published blocks. A prompt is hashed once, or never if it comes with its hashes.

    Args:
        config: block size, hash seed, and whether prefixes are cached at all.
        blocks: all blocks of the KV cache, by id.

    Attributes:
        hash_to_block_id: the published blocks by hash.
    """

    def __init__(self, config: Config, blocks: list[Block]) -> None:
        self._is_on = config.enable_prefix_caching
        self._block_size = config.kv_cache_block_size
        self._hash_seed = config.hash_seed
        self._blocks = blocks
        self.hash_to_block_id: dict[int, int] = {}
        self._tails: dict[Tail, int] = {}
        self._salts: OrderedDict[bytes, int] = OrderedDict()
        self._next_node = itertools.count(1)
        self._next_root = itertools.count(-1, -1)
        self._granule_changes: list[int] | None = None
        self._block_changes: list[BlockChange] | None = None

    # Parts of a prompt.

    def hashes(self, seq: Sequence) -> list[int]:
        """Hashes of all full blocks of `seq`, kept on it: tokens are only appended, so hashes never change."""
        hashes = seq.block_hashes
        done = len(hashes) * self._block_size
        if seq.num_tokens - done >= self._block_size:
            parent = hashes[-1] if hashes else seq.hash_root
            hashes += hash_chain(seq.token_ids[done:], self._block_size, root=parent, seed=self._hash_seed)
        return hashes

    def tokens(self, seq: Sequence, i: int) -> bytearray:
        """Packed tokens of full block `i`; packs the tokens appended since the last call."""
        packed, width = seq.packed_ids, _ID_BYTES * self._block_size
        if len(packed) < (i + 1) * width:
            packed += array(_ID_CODE, seq.token_ids[len(packed) // _ID_BYTES :]).tobytes()
        return packed[i * width : (i + 1) * width]

    def hashes_in(self, seq: Sequence, start: int, end: int) -> list[int]:
        """Hashes of the full blocks that overlap tokens [start, end) of a running sequence.

        With the hash of its tail, if that overlaps them too and is not published yet.
        """
        if not self._is_on:
            return []
        found = self.hashes(seq)[start // self._block_size : -(-end // self._block_size)]
        if seq.shares_prompt and (seq.num_given_tokens - 1) // self._block_size < -(-end // self._block_size):
            tail = self._new_tail_hash(seq)
            if tail is not None:
                found.append(tail)
        return found

    def hittable_hash(self, seq: Sequence, place: int) -> int | None:
        """Hash of the block or tail at a place of the prompt, if `seq` may reuse it from the cache; else None."""
        if not self._is_on or place > self._hittable(seq):
            return None
        if place == self._hittable(seq):
            return self._tail_hash(seq, seq.num_reusable_tokens) if seq.shares_prompt else None
        return self.hashes(seq)[place]

    def add_front(self, fronts: Fronts, seq: Sequence, start: int) -> None:
        """Adds to `fronts` the block, and the tail, that a prompt computes next from token `start` on.

        A block or tail that is cached already is left out: no other sequence waits for it.
        """
        hashes = self.hashes_in(seq, start, start + 1)
        if new := [each for each in hashes if each not in self.hash_to_block_id]:
            fronts.setdefault(start // seq.block_size, set()).update(new)

    def follows(self, seq: Sequence, fronts: Fronts) -> bool:
        """True if a waiting sequence will hit a block that one of the fronts computes now. Looks up no cached block."""
        return any(self.hittable_hash(seq, place) in hashes for place, hashes in fronts.items())

    def root(self, cache_salt: bytes) -> int:
        """Root of a salt, made on first use.

        Beyond MAX_CACHE_SALTS the least recently used salt loses its root, so its blocks cannot be found again.
        """
        if not cache_salt:
            return UNSALTED_ROOT
        if cache_salt not in self._salts:
            self._salts[cache_salt] = next(self._next_root)
        self._salts.move_to_end(cache_salt)
        while len(self._salts) > MAX_CACHE_SALTS:
            self._salts.popitem(last=False)
        return self._salts[cache_salt]

    # Cached blocks.

    def cached_blocks(self, seq: Sequence) -> list[int]:
        """Block ids of the longest cached prefix that a sequence without blocks may reuse."""
        if not self._is_on:
            return []
        found: list[int] = []
        node = self.root(seq.cache_salt)
        for i, block_hash in enumerate(self.hashes(seq)[: self._hittable(seq)]):
            block = self.find(block_hash, self.tokens(seq, i), node)
            if block is None or block.node is None:
                break
            found.append(block.block_id)
            node = block.node
        return found

    def cached_tail(self, seq: Sequence, cached: list[int]) -> int | None:
        """Block that begins with the tail of a sequence whose cached prefix is `cached`; None if it is not cached."""
        if not self._is_on or not seq.shares_prompt or len(cached) < self._hittable(seq):
            return None
        node = self._blocks[cached[-1]].node if cached else self.root(seq.cache_salt)
        tail = self._tail(seq, seq.num_reusable_tokens, node)
        return None if tail is None else self._tails.get(tail)

    def num_cached_tokens(self, seq: Sequence, cached: list[int]) -> int:
        """Number of tokens that a sequence with the cached prefix `cached` need not compute."""
        if self.cached_tail(seq, cached) is not None:
            return seq.num_reusable_tokens
        return len(cached) * self._block_size

    def find(self, block_hash: int, tokens: bytearray, parent: int) -> Block | None:
        """Published block with these tokens behind the verified node `parent`; None if there is none."""
        block_id = self.hash_to_block_id.get(block_hash)
        if block_id is None:
            return None
        block = self._blocks[block_id]
        return block if block.parent == parent and block.tokens == tokens else None

    def unproved_from(self, first: Block) -> list[Block]:
        """An unproved block, and all blocks behind it. O(cached blocks)."""
        blocks = (self._blocks[block_id] for block_id in self.hash_to_block_id.values())
        deeper = sorted((b for b in blocks if b.depth > first.depth and not b.is_proved), key=lambda b: b.depth)
        nodes, found = {first.node}, [first]
        for block in deeper:
            if block.parent in nodes:
                nodes.add(block.node)
                found.append(block)
        return found

    # Changes of the cache.

    def add(self, block: Block, seq: Sequence, i: int, tokens: bytearray, parent: int) -> None:
        """Publishes a block as full block `i` of `seq`, behind `parent`; no published block may have its hash."""
        block_hash = self.hashes(seq)[i]
        block.update(block_hash, bytes(tokens), next(self._next_node), parent, i + 1)
        self.hash_to_block_id[block_hash] = block.block_id
        if block.depth % GRANULE_BLOCKS == 0 and self._granule_changes is not None:
            self._granule_changes.append(block_hash)
        if self._block_changes is not None and not seq.cache_salt:
            before = self.hashes(seq)[i - 1] if i else None
            self._block_changes.append(StoredBlock(block_hash, before, block.tokens))

    def add_tail(self, seq: Sequence) -> None:
        """Publishes the tail of a sequence that has just got its first token, if its prompt has several answers."""
        tail = self._tail_of_running(seq) if self._is_on and seq.shares_prompt else None
        if tail is None or tail in self._tails:
            return
        block = self._blocks[seq.block_table[(seq.num_given_tokens - 1) // self._block_size]]
        if block.tail is None:
            block.tail = tail
            self._tails[tail] = block.block_id

    def forget(self, block: Block) -> None:
        """Removes a block from the cache; a no-op if it is not cached."""
        if block.tail is not None:
            del self._tails[block.tail]
            block.tail = None
        if block.hash is not None:
            del self.hash_to_block_id[block.hash]
            if block.depth % GRANULE_BLOCKS == 0 and self._granule_changes is not None:
                self._granule_changes.append(~block.hash)
            if self._block_changes is not None:
                self._block_changes.append(block.hash)
            block.reset()

    def watch_granules(self) -> None:
        """Makes `take_granule_changes` report changes from now on, and first the granules cached now."""
        self._granule_changes = self.cached_granules()

    def take_granule_changes(self) -> list[int]:
        """Changes since the last call, in order: `hash` of a new granule, `~hash` (negative) of a removed one.

        For each hash the two alternate.
        """
        if not self._granule_changes:
            return []
        changes, self._granule_changes = self._granule_changes, []
        return changes

    def watch_blocks(self) -> None:
        """Makes `take_block_changes` report changes from now on, and first the blocks cached now. O(blocks)."""
        unsalted: dict[int | None, int | None] = {UNSALTED_ROOT: None}
        self._block_changes = []
        for block in sorted((b for b in self._blocks if b.hash is not None), key=lambda b: b.depth):
            if block.hash is not None and block.parent in unsalted:
                unsalted[block.node] = block.hash
                self._block_changes.append(StoredBlock(block.hash, unsalted[block.parent], block.tokens))

    def take_block_changes(self) -> list[BlockChange]:
        """Changes since the last call, in order; a block appears behind its parent.

        Blocks of prompts with a salt do not appear: their tokens are for those with the salt alone. Their hashes are
        reported when they leave, like all others.
        """
        if not self._block_changes:
            return []
        changes, self._block_changes = self._block_changes, []
        return changes

    def cached_granules(self) -> list[int]:
        """Hashes of the cached blocks that end a granule. O(blocks)."""
        return [b.hash for b in self._blocks if b.hash is not None and b.depth % GRANULE_BLOCKS == 0]

    def _hittable(self, seq: Sequence) -> int:
        return seq.num_reusable_tokens // self._block_size

    def _tail(self, seq: Sequence, end: int, node: int | None) -> Tail | None:
        """Tail of the first `end` tokens, behind the node of the last full block; None if it is empty."""
        begin = end - end % self._block_size
        if node is None or begin == end:
            return None
        return node, array(_ID_CODE, seq.token_ids[begin:end]).tobytes()

    def _tail_of_running(self, seq: Sequence) -> Tail | None:
        """Tail of a running sequence's given tokens; None unless the block before it is published."""
        end = seq.num_given_tokens - 1
        place = end // self._block_size
        node = self._blocks[seq.block_table[place - 1]].node if place else self.root(seq.cache_salt)
        return self._tail(seq, end, node)

    def _new_tail_hash(self, seq: Sequence) -> int | None:
        """Hash of the tail that a running sequence will publish; None if it will publish none."""
        # A sequence publishes its tail with its first token, and none if it no longer publishes blocks.
        if seq.first_token_time is not None or seq.publish_at == math.inf:
            return None
        if self._tail_of_running(seq) in self._tails:
            return None
        return self._tail_hash(seq, seq.num_given_tokens - 1)

    def _tail_hash(self, seq: Sequence, end: int) -> int | None:
        """Hash of the first `end` tokens, as if a block ended there; None if `end` is a multiple of the block size."""
        place, size = divmod(end, self._block_size)
        if not size:
            return None
        if seq.tail_hash is None or seq.tail_hash[0] != end:
            parent = self.hashes(seq)[place - 1] if place else seq.hash_root
            tokens = seq.token_ids[end - size : end]
            seq.tail_hash = end, hash_chain(tokens, size, root=parent, seed=self._hash_seed)[0]
        return seq.tail_hash[1]
