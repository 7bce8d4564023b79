"""Waits of prompts for KV blocks from slower tiers, and the blocks on their way from the pool and to it. Pure.

A waiting prompt asks the tiers for the blocks behind its cached prefix. What they have is published in free blocks, as
if a sequence had computed it, and the next step writes it there before it computes. So for everything else a block
from a tier is a cached block. A prompt waits for tiers at most as long as it would take to compute those blocks,
however often it asks.

A block's name in a tier is a cryptographic digest of all that its bytes depend on: the weights, the numerics class,
which the dtype and the layout of the KV cache belong to, the block size, the cache salt, and all tokens up to the
block's end. So a name has one right content, whichever worker computed it.

A block that has been published goes down with the next step, which reads it before it writes anything: the bytes are
final then, even if the block is evicted meanwhile. So eviction writes no bytes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple, Protocol

from common.wire.block_hash import GRANULE_BLOCKS
from worker.engine.batch import ScheduledBatch
from worker.engine.block_manager import BlockManager
from worker.engine.lifecycle import Lifecycle
from worker.engine.sequence import Sequence, SequenceStatus

# Domain of the names; another layout of blocks or values needs another number.
_DOMAIN: Final = b"fissile kv block 1\n"
NAME_BYTES: Final = 24
# Added to the hash of a granule, which has 64 bits, where it is in host memory and not in the pool.
IN_MEMORY: Final = 1 << 64
# Granules on their way to host memory whose hashes are kept.
_MOST_NOTED: Final = 1 << 15
# Waiting prompts that may look up blocks at once.
_MOST_LOOKUPS: Final = 64
# Cached blocks after which a step begins no further lookup, because looking one up takes 1 us.
_MOST_BLOCKS: Final = 4096
# Longest wait for tiers while no step has shown how fast prompts are computed, and the shortest bound of any wait.
_UNKNOWN_WAIT_S: Final = 1.0
_LEAST_WAIT_S: Final = 0.02
# One in this number of new prompts that fit into a step is computed without tiers, and its blocks are compared with
# theirs.
_AUDIT_EVERY: Final = 256
# Time after which blocks that another worker has just computed are asked for again.
_ASK_AGAIN_S: Final = 0.01


def root_name(facts: Iterable[object]) -> bytes:
    """Name before the first block of prompts without a salt.

    Args:
        facts: all that the bytes of a block depend on besides its tokens and salt; each has a stable `repr`.
    """
    return _digest(_DOMAIN, repr(tuple(facts)).encode())


def salted_name(root: bytes, salt: bytes) -> bytes:
    """Name before the first block of prompts with this cache salt."""
    return _digest(b"salt", root, salt) if salt else root


def next_name(before: bytes, tokens: bytes | bytearray) -> bytes:
    """Name of the block with these packed tokens, behind the block or root named `before`."""
    return _digest(b"block", before, tokens)


class Fetch(Protocol):
    """Blocks on their way from a tier (worker/kv_tiers/tiers.py)."""

    num_names: int
    blocks: list[bytes]
    results: Counter[tuple[str, str]]
    is_done: bool

    def close(self) -> None:
        """Gives the blocks' memory back."""
        ...


class BlockStore(Protocol):
    """The tiers."""

    def audit(self, names: Iterable[bytes]) -> None:
        """Compares these blocks, and no longer earlier ones, with the tiers' when they are stored."""
        ...

    def has(self, name: bytes) -> bool:
        """True if a block need not be stored."""
        ...

    def watch_memory(self) -> bool:
        """Makes `take_memory_changes` report changes of host memory. False if no tier is in host memory."""
        ...

    @property
    def has_memory_changes(self) -> bool:
        """True if `take_memory_changes` has changes."""
        ...

    def take_memory_changes(self) -> list[tuple[bytes, bool]]:
        """Changes of host memory since the last call, in order: a name, and True if its granule is whole now."""
        ...

    @property
    def memory_rate(self) -> float:
        """Blocks read from host memory per second; 0 if unknown."""
        ...

    def fetch(self, names: Many[bytes], parent: bytes) -> Fetch | None:
        """Begins to read blocks behind the block `parent`; None if there is no room for any now."""
        ...

    def store(self, blocks: Iterable[tuple[bytes, bytes, bytes]]) -> None:
        """Writes blocks: name, name of the block before, bytes."""
        ...

    def note_late(self) -> None:
        """Counts a fetch that took too long."""
        ...

    def note_dropped(self) -> None:
        """Counts a block that a step cannot read, because it reads `most_waiting` others."""
        ...

    @property
    def most_waiting(self) -> int:
        """Most blocks that may be on their way at once, in each direction."""
        ...

    @property
    def is_resting(self) -> bool:
        """True if prompts do not wait now, because the last fetches took too long."""
        ...

    def drop(self, names: Many[bytes]) -> None:
        """Forgets blocks, in the order of `store`."""
        ...

    def flush(self) -> None:
        """Drops the blocks that no other engine uses."""
        ...

    def counts(self) -> Mapping[tuple[str, str], int]:
        """Blocks since the start, by tier and by what became of them."""
        ...

    def traffic(self) -> Mapping[tuple[str, str], tuple[int, float]]:
        """Bytes and seconds since the start, by tier and operation."""
        ...

    def close(self) -> None:
        """Ends its threads."""
        ...


class MemoryGranules:
    """Granules in host memory, by the hashes that routers know.

    A tier names blocks by digests. So the hash of a granule's last block is noted when the block goes to host memory,
    for the newest _MOST_NOTED granules. Older ones are not reported, which only costs hits.
    """

    def __init__(self) -> None:
        self._noted: dict[bytes, int] = {}
        self._held: dict[bytes, int] = {}

    def note(self, name: bytes, granule: int) -> None:
        """Notes the hash of a granule whose last block has a name."""
        self._noted.pop(name, None)
        self._noted[name] = granule
        if len(self._noted) > _MOST_NOTED:
            del self._noted[next(iter(self._noted))]

    def apply(self, changes: Iterable[tuple[bytes, bool]]) -> list[int]:
        """Applies changes of host memory; returns them as `PrefixCache.take_granule_changes` does, with IN_MEMORY."""
        found: list[int] = []
        for name, is_kept in changes:
            if not is_kept:
                if (granule := self._held.pop(name, None)) is not None:
                    found.append(~(granule | IN_MEMORY))
            elif name in self._noted and name not in self._held:
                granule = self._held[name] = self._noted[name]
                found.append(granule | IN_MEMORY)
        return found


class Tiers(NamedTuple):
    """The tiers of an engine, and the name before the first block of its prompts without a salt (`root_name`)."""

    store: BlockStore
    root: bytes


class BlockKey(NamedTuple):
    """Name of a block in the tiers, and that of the block before."""

    name: bytes
    parent: bytes


@dataclass(slots=True)
class _Lookup:
    """One waiting prompt's wait for tiers.

    `start` is the place of the first block asked for next, and `asked_end` the place behind all blocks asked for. The
    wait ends at `until`: once computing the blocks that are still missing takes less time than was left. Time without
    room in the pool, from `paused_at` on, does not count. Tiers are not asked before `ask_at` (monotonic seconds).
    """

    seq: Sequence
    start: int
    until: float
    asked_end: int = 0
    paused_at: float = 0.0
    ask_at: float = 0.0
    fetch: Fetch | None = None

    def close(self) -> None:
        """Ends the fetch, and adds its results to the sequence's trace."""
        if self.fetch is not None:
            if (wait := self.seq.ledger.tier_wait) is not None:
                wait.results.update(dict(self.fetch.results))
                wait.num_bytes += sum(map(len, self.fetch.blocks))
            self.fetch.close()
            self.fetch = None


class TierLookups:
    """Waits of prompts for tiers, and blocks on their way between the pool and the tiers.

    Args:
        lifecycle: the live sequences and the block pool.
        store: the tiers.
        root: name before the first block of a prompt without a salt.

    Attributes:
        store, root: as given.
    """

    def __init__(self, lifecycle: Lifecycle, store: BlockStore, root: bytes) -> None:
        self._lifecycle = lifecycle
        self._blocks: BlockManager = lifecycle.block_manager
        self._prefixes = lifecycle.block_manager.prefixes
        self.store = store
        self.root = root
        self._lookups: dict[int, _Lookup] = {}
        self._down: dict[int, BlockKey] = {}
        self._up: list[tuple[int, bytes]] = []
        self._granules: MemoryGranules | None = None
        # Prompt tokens per second, 0 if unknown, and tokens of a full step.
        self._rate, self._step_tokens = 0.0, 0
        self._num_auditable = 0
        self._blocks.on_published, self._blocks.on_forgotten = self.published, self.forgotten

    def published(self, seq: Sequence, place: int) -> None:
        """Has the block that a sequence has published at `place` stored, unless host memory keeps it."""
        names = self._names(seq, place + 1)
        key = BlockKey(names[place], names[place - 1] if place else b"")
        if len(self._down) >= self.store.most_waiting:
            self.store.note_dropped()
        elif not self.store.has(key.name):
            self._down[seq.block_table[place]] = key
            self._note_granules(seq, range(place, place + 1))

    def watch_granules(self) -> None:
        """Makes `take_granule_changes` report the granules that host memory gets from now on."""
        if self.store.watch_memory():
            self._granules = MemoryGranules()

    def take_granule_changes(self) -> list[int]:
        """Changes of the granules in host memory since the last call (`MemoryGranules.apply`)."""
        return [] if self._granules is None else self._granules.apply(self.store.take_memory_changes())

    @property
    def memory_rate(self) -> float:
        """Tokens per second whose blocks are read from host memory; 0 if unknown."""
        return self.store.memory_rate * self._blocks.block_size

    def _note_granules(self, seq: Sequence, places: range) -> None:
        """Notes the granules that end with blocks of a sequence, which may come into host memory."""
        if self._granules is not None:
            for place in places:
                if (place + 1) % GRANULE_BLOCKS == 0:
                    self._granules.note(self._names(seq, place + 1)[place], self._prefixes.hashes(seq)[place])

    @property
    def has_blocks(self) -> bool:
        """True if published blocks have yet to be read, or blocks from tiers have yet to be written."""
        return bool(self._down or self._up)

    def forgotten(self, seq: Sequence, place: int) -> None:
        """Has the tiers drop the blocks of a sequence from `place` on: a step that read them gave no number."""
        names = self._names(seq, seq.num_tokens // seq.block_size)[place:]
        dropped = set(names)
        self._down = {block: key for block, key in self._down.items() if key.name not in dropped}
        self.store.drop(names)

    def move_with(self, batch: ScheduledBatch) -> None:
        """Has a step read the published blocks before it writes anything, and write blocks before it computes."""
        batch.blocks_down, self._down = self._down, {}
        batch.blocks_up, self._up = self._up, []

    def put_back(self, batch: ScheduledBatch) -> None:
        """Has the next step write the blocks that an interrupted one was to write."""
        self._up = [*batch.blocks_up, *self._up]

    def enter(self, seq: Sequence) -> None:
        """Has a new sequence wait until it has asked the tiers, if they may have any of its blocks."""
        seq.waits_for_kv = self._hittable(seq) > 0

    def close_ended(self) -> None:
        """Ends the waits of sequences that run or have ended. One that is preempted asks anew.

        An engine without work makes no step, so the blocks of sequences that end outside of one are given back here.
        """
        for seq_id, known in list(self._lookups.items()):
            if known.seq.status is not SequenceStatus.WAITING:
                known.seq.waits_for_kv = False
                known.close()
                del self._lookups[seq_id]

    def look(self, now: float, prefill_rate: float, step_tokens: int) -> None:
        """Asks tiers for the blocks of waiting prompts, and publishes those that were read.

        Args:
            now: monotonic seconds.
            prefill_rate: tokens per second of prompts; 0 if it is not known.
            step_tokens: most tokens of a step.
        """
        self._rate, self._step_tokens = prefill_rate, step_tokens
        self.close_ended()
        # Blocks that are on their way; who needs one of them waits for it instead of asking again.
        coming = {self._names(each.seq, each.start + 1)[each.start] for each in self._lookups.values() if each.fetch}
        left, has_room = _MOST_BLOCKS, True
        for seq in list(islice(self._lifecycle.waiting, _MOST_LOOKUPS)):
            lookup = self._lookups.get(seq.id)
            if lookup is None:
                if left <= 0:
                    break
                lookup = self._begin(seq, now)
                left -= lookup.start + 1
            fetch = lookup.fetch
            if fetch is not None and fetch.is_done:
                has_room = self._take_blocks(lookup, fetch, now, has_room=has_room)
                if lookup.fetch is not None:
                    continue
            # A prompt longer than one fetch asks for the next blocks at once: a later look may be a long step away.
            if seq.waits_for_kv:
                self._ask(lookup, coming, now)

    def _begin(self, seq: Sequence, now: float) -> _Lookup:
        start = len(self._prefixes.cached_blocks(seq))
        lookup = self._lookups[seq.id] = _Lookup(seq, start, now + self._wait_s(seq, start))
        has_missing = self._hittable(seq) > start
        self._set_wait(seq, has_missing and not self._is_audited(seq, start) and not self.store.is_resting, now)
        return lookup

    def _wait_s(self, seq: Sequence, start: int) -> float:
        """Time of computing a sequence's missing blocks, from the place `start` on."""
        missing = (self._hittable(seq) - start) * seq.block_size
        return max(_LEAST_WAIT_S, missing / self._rate if self._rate else _UNKNOWN_WAIT_S)

    def _is_audited(self, seq: Sequence, start: int) -> bool:
        """True if a prompt is computed without tiers, so that its blocks are compared with theirs.

        Leaves out streams that have begun and prompts longer than a step, because computing them delays a client.
        """
        missing = (self._hittable(seq) - start) * seq.block_size
        if seq.expects_kv or seq.num_completion_tokens or missing > self._step_tokens:
            return False
        self._num_auditable += 1
        if self._num_auditable % _AUDIT_EVERY:
            return False
        self.store.audit(self._names(seq, self._hittable(seq))[start:])
        return True

    def _set_wait(self, seq: Sequence, waits: bool, now: float) -> None:
        """Begins or ends a sequence's wait, with its stage."""
        seq.waits_for_kv = waits
        account = self._lifecycle.account
        if waits:
            seq.ledger.begin_tier_wait(account, now)
        else:
            seq.ledger.end_tier_wait(account, now)
        self._lifecycle.note_phase(seq)

    def _take_blocks(self, lookup: _Lookup, fetch: Fetch, now: float, *, has_room: bool) -> bool:
        """Publishes blocks that were read, once the pool has room for their prompt and those before it.

        Without room the prompt no longer waits for tiers, but for room like every other one, and keeps the blocks.
        While the next step has as many blocks to write as it may, the prompt waits for the one after it.

        Returns:
            `has_room`, or False if this prompt has none.
        """
        seq = lookup.seq
        if fetch.blocks and not (has_room and self._blocks.can_allocate(seq, None, self._lifecycle.num_growing)):
            if seq.waits_for_kv:
                lookup.paused_at = now
            self._set_wait(seq, False, now)
            return False
        if not self._up or len(self._up) + len(fetch.blocks) <= self.store.most_waiting:
            self._publish(lookup, fetch, now)
        return has_room

    def _ask(self, lookup: _Lookup, coming: set[bytes], now: float) -> None:
        """Asks for a prompt's blocks; ends its wait when it is too long."""
        seq = lookup.seq
        if now > lookup.until:
            self.store.note_late()
            self._set_wait(seq, False, now)
            if seq.ledger.tier_wait is not None:
                seq.ledger.tier_wait.is_late = True
            lookup.close()
        elif lookup.fetch is None and now >= lookup.ask_at:
            known = self._names(seq, self._hittable(seq))
            names = known[lookup.start :]
            if names and names[0] not in coming:
                lookup.fetch = self.store.fetch(names, known[lookup.start - 1] if lookup.start else b"")
                if lookup.fetch is not None:
                    self._note_granules(seq, range(lookup.start, lookup.start + lookup.fetch.num_names))
                    coming.add(names[0])
                    end = lookup.start + lookup.fetch.num_names
                    if seq.ledger.tier_wait is not None:
                        seq.ledger.tier_wait.num_asked += max(0, end - max(lookup.start, lookup.asked_end))
                    lookup.asked_end = max(end, lookup.asked_end)

    def _publish(self, lookup: _Lookup, fetch: Fetch, now: float) -> None:
        """Publishes blocks that have come in free blocks, behind the cached prefix, which may be longer by now."""
        seq, cached = lookup.seq, self._prefixes.cached_blocks(lookup.seq)
        blocks = fetch.blocks[len(cached) - lookup.start :] if len(cached) >= lookup.start else []
        adopted = self._blocks.adopt(seq, cached, len(blocks))
        self._up += zip(adopted, blocks, strict=False)
        reached = len(cached) + len(adopted)
        # A fetch for which there was no more room can have more behind it, and so can one of blocks on their way.
        is_cut = len(fetch.blocks) == fetch.num_names and lookup.start < reached
        may_have_more = (is_cut or seq.expects_kv) and len(adopted) == len(blocks) and reached < self._hittable(seq)
        lookup.close()
        waits = may_have_more and reached >= lookup.start
        if waits:
            if not seq.waits_for_kv:
                lookup.until += now - lookup.paused_at
            lookup.until = min(lookup.until, now + self._wait_s(seq, reached))
            if not (adopted or is_cut):
                lookup.ask_at = now + _ASK_AGAIN_S
            lookup.start = reached
        if waits or seq.waits_for_kv:
            self._set_wait(seq, waits, now)

    def _hittable(self, seq: Sequence) -> int:
        """Number of full blocks that a sequence may take from the cache."""
        return seq.num_reusable_tokens // seq.block_size

    def _names(self, seq: Sequence, count: int) -> list[bytes]:
        """Names of the first `count` full blocks, kept on the sequence: tokens are only appended."""
        names = seq.kv_names
        before = names[-1] if names else salted_name(self.root, seq.cache_salt)
        while len(names) < count:
            before = next_name(before, self._prefixes.tokens(seq, len(names)))
            names.append(before)
        return names


def _digest(*parts: bytes | bytearray) -> bytes:
    digest = hashlib.blake2b(digest_size=NAME_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
