"""Finds cached prefixes: which block holds the KV of a prompt's next tokens behind a prefix that is verified.

A block is published once its KV is fully written and its tokens are final, and it is found by the hash of the whole
prefix up to it. The hash is only a hint: a hit needs equal tokens and, as parent, the node id of the block that was
verified before it. Equal parent hashes would not do: after a collision a child computed under another prefix matches
them. Node ids are minted at publication and never used twice, which closes the argument by induction from the root. A
root is interned per cache salt and compared whole.

Invariants, checked by worker/engine/integrity.py:
- `hash_to_block_id[h] == b` iff `blocks[b].hash == h`: eviction drops the entry;
- the tree of cached blocks is closed: the parent of a cached block is cached, or a root;
- what a proved block follows is proved, so what `unproved_from` finds is all behind one place;
- what `take_granule_changes` has said so far, put together, is `cached_granules`.
"""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict
from typing import Final

from common.block_hash import GRANULE_BLOCKS, hash_chain
from common.config import Config
from common.limits import MAX_CACHE_SALTS
from worker.engine.sequence import Sequence

# Roots have node ids <= 0, blocks > 0.
UNSALTED_ROOT: Final = 0
# Format of a packed token id, in this machine's byte order.
_ID_CODE: Final = "I"
_ID_BYTES: Final = array(_ID_CODE).itemsize


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


class PrefixCache:
    """The published blocks. A prompt is hashed once, or never if it brings its hashes.

    Args:
        config: block size, hash seed, and whether prefixes are cached at all.
        blocks: of the pool, by id.

    Attributes:
        hash_to_block_id: the published blocks by hash.
    """

    def __init__(self, config: Config, blocks: list[Block]) -> None:
        self._is_on = config.enable_prefix_caching
        self._block_size = config.kv_cache_block_size
        self._hash_seed = config.hash_seed
        self._blocks = blocks
        self.hash_to_block_id: dict[int, int] = {}
        self._salts: OrderedDict[bytes, int] = OrderedDict()
        self._next_node = itertools.count(1)
        self._next_root = itertools.count(-1, -1)
        self._granule_changes: list[int] | None = None

    # Parts of a prompt.

    def hashes(self, seq: Sequence) -> list[int]:
        """Hashes of all full blocks of `seq`; tokens are only ever appended, so what is hashed stays."""
        hashes = seq.block_hashes
        done = len(hashes) * self._block_size
        if seq.num_tokens - done >= self._block_size:
            parent = hashes[-1] if hashes else seq.hash_root
            hashes += hash_chain(seq.token_ids[done:], self._block_size, root=parent, seed=self._hash_seed)
        return hashes

    def tokens(self, seq: Sequence, i: int) -> bytearray:
        """Tokens of full block `i`; those are packed that have come since."""
        packed, width = seq.packed_ids, _ID_BYTES * self._block_size
        if len(packed) < (i + 1) * width:
            packed += array(_ID_CODE, seq.token_ids[len(packed) // _ID_BYTES :]).tobytes()
        return packed[i * width : (i + 1) * width]

    def hashes_in(self, seq: Sequence, start: int, end: int) -> list[int]:
        """Hashes of the full blocks that tokens [start, end) lie in, wholly or in part."""
        if not self._is_on:
            return []
        return self.hashes(seq)[start // self._block_size : -(-end // self._block_size)]

    def hittable_hash(self, seq: Sequence, place: int) -> int | None:
        """Hash of the block at a place of the prompt, if `seq` can have it from the cache; else None."""
        if not self._is_on or place >= self._hittable(seq):
            return None
        return self.hashes(seq)[place]

    def root(self, cache_salt: bytes) -> int:
        """Node of a salt. A forgotten salt gets a new node, so its old blocks cannot be found again."""
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
        """The longest cached prefix of a sequence without blocks, as block ids, as far as it may be used again."""
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

    def find(self, block_hash: int, tokens: bytearray, parent: int) -> Block | None:
        """The block with these tokens behind the verified block `parent`."""
        block_id = self.hash_to_block_id.get(block_hash)
        if block_id is None:
            return None
        block = self._blocks[block_id]
        return block if block.parent == parent and block.tokens == tokens else None

    def unproved_from(self, first: Block) -> list[Block]:
        """A block that is not proved, and all that follow it. O(cached blocks)."""
        blocks = (self._blocks[block_id] for block_id in self.hash_to_block_id.values())
        deeper = sorted((b for b in blocks if b.depth > first.depth and not b.is_proved), key=lambda b: b.depth)
        nodes, found = {first.node}, [first]
        for block in deeper:
            if block.parent in nodes:
                nodes.add(block.node)
                found.append(block)
        return found

    # Changes of the cache.

    def add(self, block: Block, block_hash: int, tokens: bytearray, parent: int, depth: int) -> None:
        """Publishes a block behind `parent`, of which no other has the hash."""
        block.update(block_hash, bytes(tokens), next(self._next_node), parent, depth)
        self.hash_to_block_id[block_hash] = block.block_id
        if depth % GRANULE_BLOCKS == 0 and self._granule_changes is not None:
            self._granule_changes.append(block_hash)

    def forget(self, block: Block) -> None:
        """Takes a block out of the cache; a no-op when it is not in it."""
        if block.hash is not None:
            del self.hash_to_block_id[block.hash]
            if block.depth % GRANULE_BLOCKS == 0 and self._granule_changes is not None:
                self._granule_changes.append(~block.hash)
            block.reset()

    def watch_granules(self) -> None:
        """From now on `take_granule_changes` says what comes to the cache and what leaves it."""
        self._granule_changes = self.cached_granules()

    def take_granule_changes(self) -> list[int]:
        """Changes since the last call, in order: the hash of a granule that can be found now, its complement
        (`~hash`, negative) for one that cannot be any more. The two alternate for each hash."""
        if not self._granule_changes:
            return []
        changes, self._granule_changes = self._granule_changes, []
        return changes

    def cached_granules(self) -> list[int]:
        """Hashes of the cached blocks that end a granule. O(blocks)."""
        return [b.hash for b in self._blocks if b.hash is not None and b.depth % GRANULE_BLOCKS == 0]

    def _hittable(self, seq: Sequence) -> int:
        return seq.num_reusable_tokens // self._block_size
