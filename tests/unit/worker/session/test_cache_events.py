"""KV events: whatever the engine does and however a router reads, breaks off and comes back, it ends with the cache."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from fissile.worker.v1 import worker_pb2 as wpb
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from common.config import Config
from common.limits import KV_EVENTS_S, MAX_FRAME_BYTES, MAX_KV_FRAME_CHANGES
from common.params.sampling_params import SamplingParams
from common.wire.block_hash import GRANULE_BLOCKS, hash_chain
from tests.unit.worker.session.support import simulated_core
from worker.engine.sequence import Sequence as EngineSequence
from worker.engine.tier_lookups import IN_MEMORY
from worker.engine.turns import EngineTurns, StepListener, Submit, TicketReceipt
from worker.session import cache_events
from worker.session.cache_events import KvCursor, KvLog

# Digests of blocks that a log remembers.
DIGESTS_KEPT = 4


class Reader:
    """A router that applies its KV events; `seq` is the position for its next Hello."""

    def __init__(self, log: KvLog) -> None:
        self.held: set[int] = set()
        self.digests: list[tuple[bytes, int]] = []
        self.seq = self.left = self.pool_left = 0
        self.open(log)

    def open(self, log: KvLog) -> None:
        if self.left:
            self.seq = self.left = 0
        if not self.seq:
            self.held.clear()
        self.epoch, self.awaits = 0, False
        self.cursor = KvCursor(log, self.seq, lambda: None)

    def ask(self) -> None:
        self.epoch, self.awaits, self.seq, self.left = self.epoch + 1, True, 0, 0
        self.cursor.restart(self.epoch)

    def read(self, now: float) -> bool:
        frame = self.cursor.take(now)
        if frame is None:
            return False
        assert frame.epoch == self.epoch
        self.digests += [(each.name, each.digest) for each in frame.digests]
        if frame.snapshot:
            self.held.clear()
            self.awaits = False
        else:
            assert not self.awaits, "no answer"
            assert frame.after == self.seq, "a gap"
            left = frame.left + len(frame.stored) + frame.memory_left + len(frame.memory_stored)
            assert self.left == (left if frame.after == frame.seq else 0)
        stored = {*frame.stored, *(granule | IN_MEMORY for granule in frame.memory_stored)}
        evicted = {*frame.evicted, *(granule | IN_MEMORY for granule in frame.memory_evicted)}
        assert self.held.isdisjoint(stored), "stored twice"
        self.held |= stored
        assert self.held.issuperset(evicted), "evicted what was not there"
        self.held -= evicted
        self.seq, self.left = frame.seq, frame.left + frame.memory_left
        # A router of a release before memory tiers counts the pool's granules alone.
        assert frame.snapshot or frame.after != frame.seq or self.pool_left == frame.left + len(frame.stored)
        self.pool_left = frame.left
        return True


class LogMachine(RuleBasedStateMachine):
    """Two routers over one log with a short memory and small frames."""

    @initialize()
    def begin(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(cache_events, "MAX_KV_FRAME_CHANGES", 3)
        self.patch.setattr(cache_events, "MAX_KV_DIGEST_LOG", DIGESTS_KEPT)
        self.log = KvLog(capacity=6)
        self.digests: list[tuple[bytes, int]] = []
        self.now = 0.0
        self.present: set[int] = set()
        self.readers = [Reader(self.log), Reader(self.log)]

    def teardown(self) -> None:
        self.patch.undo()

    @rule(granules=st.lists(st.sampled_from([1, 2, 3, *(IN_MEMORY | granule for granule in (1, 2, 3))]), max_size=6))
    def change(self, granules: list[int]) -> None:
        changes = []
        for granule in granules:
            changes.append(~granule if granule in self.present else granule)
            self.present ^= {granule}
        self.log.append(changes)

    @rule(count=st.integers(1, 2 * DIGESTS_KEPT))
    def digest(self, count: int) -> None:
        new = [(bytes([i % 256]), i) for i in range(len(self.digests), len(self.digests) + count)]
        self.digests += new
        self.log.append_digests(new)

    @rule(which=st.integers(0, 1), times=st.integers(1, 3))
    def read(self, which: int, times: int) -> None:
        for _ in range(times):
            self.now += KV_EVENTS_S
            self.readers[which].read(self.now)

    @rule(which=st.integers(0, 1))
    def come_back(self, which: int) -> None:
        self.readers[which].cursor.close()
        # The worker sends the kept digests once more.
        self.readers[which].digests.clear()
        self.readers[which].open(self.log)

    @rule(which=st.integers(0, 1))
    def ask(self, which: int) -> None:
        self.readers[which].ask()

    @rule(which=st.integers(0, 1))
    def read_all(self, which: int) -> None:
        reader = self.readers[which]
        while reader.cursor.due_in(self.now) < float("inf"):
            self.now += KV_EVENTS_S
            assert reader.read(self.now)
        assert not reader.awaits
        assert reader.held == self.present
        assert reader.seq == self.log.seq
        assert reader.digests[-DIGESTS_KEPT:] == self.digests[-DIGESTS_KEPT:]
        assert not reader.read(self.now + 1)

    @invariant()
    def bounded(self) -> None:
        if hasattr(self, "log"):
            assert len(self.log._changes) <= 2 * 6
            assert len(self.log._digests) <= DIGESTS_KEPT


LogMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestLogMachine = LogMachine.TestCase


def test_frames_are_spaced_and_router_is_woken_once() -> None:
    log, woken = KvLog(), []
    cursor = KvCursor(log, 0, lambda: woken.append(1))
    assert cursor.take(9.0) is None
    log.append([9])
    assert cursor.due_in(10.0) == 0
    assert cursor.take(10.0) is not None
    assert cursor.take(10.0) is None
    assert cursor.due_in(10.0) == float("inf")
    woken.clear()
    log.append([1, 2])
    log.append([3])
    assert len(woken) == 1
    assert cursor.take(10.0 + KV_EVENTS_S / 2) is None
    assert cursor.due_in(10.0 + KV_EVENTS_S / 2) == pytest.approx(KV_EVENTS_S / 2)
    frame = cursor.take(10.0 + KV_EVENTS_S)
    assert frame is not None
    assert (frame.after, frame.seq, list(frame.stored)) == (1, 4, [1, 2, 3])
    assert cursor.take(11.0) is None
    cursor.close()
    log.append([4])
    assert len(woken) == 1


def test_each_snapshot_request_gets_one_snapshot() -> None:
    """Even an empty one, and even in the middle of a snapshot."""
    log = KvLog()
    cursor = KvCursor(log, 0, lambda: None)
    assert cursor.take(0.0) is None
    cursor.restart(1)
    assert cursor.due_in(0.0) == 0
    assert cursor.take(0.0) == wpb.KvEvents(snapshot=True, epoch=1)
    log.append(list(range(1, 2 * MAX_KV_FRAME_CHANGES)))
    first = cursor.take(1.0)
    assert first is not None
    assert (first.after, first.snapshot, first.epoch) == (0, False, 1)
    cursor.restart(2)
    whole = cursor.take(2.0)
    assert whole is not None
    assert (whole.snapshot, whole.left, whole.epoch) == (True, MAX_KV_FRAME_CHANGES - 1, 2)
    cursor.restart(2)
    rest = cursor.take(3.0)
    assert rest is not None
    assert (rest.snapshot, rest.left, rest.epoch) == (False, 0, 2)
    cursor.restart(1)
    assert cursor.take(4.0) is None


def test_frame_omits_blocks_stored_and_evicted_between_reads() -> None:
    log = KvLog()
    log.append([1, 2])
    cursor = KvCursor(log, 2, lambda: None)
    log.append([3, ~3, ~1, 1, ~2, 4])
    frame = cursor.take(0.0)
    assert frame is not None
    assert (list(frame.stored), list(frame.evicted), frame.seq) == ([4], [2], 8)


def test_large_cache_snapshot_fits_frames_under_changes() -> None:
    log, rnd = KvLog(), random.Random(1)
    names = [rnd.getrandbits(64) for _ in range(3 * MAX_KV_FRAME_CHANGES)]
    log.append(names)
    reader, now = Reader(log), 0.0
    size = wpb.KvEvents(seq=2**63, after=2**63, stored=names[:MAX_KV_FRAME_CHANGES], snapshot=True).ByteSize()
    assert size < MAX_FRAME_BYTES
    for i in range(10):
        log.append([~names[i]])
        reader.read(now := now + KV_EVENTS_S)
    assert reader.held == set(names[10:])
    restarted = Reader(log)
    restarted.seq = log.seq + 1
    restarted.open(log)
    restarted.read(now)
    assert restarted.left > 0


class Nobody(StepListener):
    def on_step(self, step: int, submit_seen: int | None) -> None:
        pass


def prompt(parts: Sequence[int]) -> list[int]:
    """A prompt of parts, half a granule each."""
    return [part + i % 7 for part in parts for i in range(8 * GRANULE_BLOCKS)]


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.lists(st.sampled_from([10, 20]), min_size=1, max_size=8), max_size=3), max_size=12),
    st.booleans(),
)
def test_kv_log_equals_engine_cache(groups: list[list[list[int]]], is_deferred: bool) -> None:
    config = Config(
        max_num_seqs=4,
        max_num_batched_tokens=256,
        num_kvcache_blocks=100,
        max_model_len=1024,
        enable_prefix_caching=True,
        deferred_output=is_deferred,
    )
    core = simulated_core(config)
    turns, log, listener = EngineTurns(core, lambda: 0.0), KvLog(), Nobody()
    manager = core.scheduler.block_manager
    for serial, group in enumerate([*groups, []]):
        seqs = [EngineSequence(prompt(parts), 16, SamplingParams(max_tokens=70)) for parts in group]
        for command in [[Submit(TicketReceipt(listener, serial), seqs)]] + [[]] * (serial % 3):
            log.append(turns.run(command).granules)
            assert set(log.snapshot()) == set(manager.prefixes.cached_granules())
    while turns.has_work:
        log.append(turns.run([]).granules)
    assert set(log.snapshot()) == set(manager.prefixes.cached_granules())
    core.scheduler.check_integrity()
    core.close()


def test_granules_are_every_eighth_hash_of_the_chain() -> None:
    core = simulated_core()
    turns, tokens = EngineTurns(core, lambda: 0.0), list(range(1, 16 * 20 + 5))
    turns.run([Submit(TicketReceipt(Nobody(), 1), [EngineSequence(tokens, 16, SamplingParams(max_tokens=1))])])
    while turns.has_work:
        turns.run([])
    chain = hash_chain(tokens, 16, seed=core.config.hash_seed)
    assert set(core.scheduler.block_manager.prefixes.cached_granules()) == {chain[7], chain[15]}


def test_unwatched_engine_keeps_no_changes() -> None:
    core = simulated_core()
    core.add_request(EngineSequence(list(range(1, 300)), 16, SamplingParams(max_tokens=1)))
    while core.has_unfinished():
        core.step()
    manager = core.scheduler.block_manager
    assert manager.prefixes.cached_granules()
    assert manager.prefixes.take_granule_changes() == []
    manager.prefixes.watch_granules()
    assert set(manager.prefixes.take_granule_changes()) == set(manager.prefixes.cached_granules())
