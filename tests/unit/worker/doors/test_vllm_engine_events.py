"""KV events and load of `vllm.grpc.engine`: a subscriber that applies what it gets has the blocks of the log."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from smg_grpc_proto.generated import common_pb2 as common

from common.limits import LOAD_HEARTBEAT_S, MAX_KV_FRAME_CHANGES
from worker.doors import vllm_engine_events
from worker.doors.door_request import DoorLoad
from worker.doors.vllm_engine_events import KvEventStream, LoadRecord, LoadRecorder
from worker.engine.figures import EngineFigures
from worker.engine.prefix_cache import BlockChange, StoredBlock
from worker.session.block_log import BlockLog

IDLE = LoadRecord(0, 0, 0, 0.0, 0, 1600, 0.0, 0.0, 8, None)
FIRST = 1_795_735_398_525_081


class Subscriber:
    """A router that applies batches as smg does: numbers without gaps, chunks in order, a child behind its parent."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.number = self.sample = 0
        self.loads: list[common.EngineLoad] = []

    def apply(self, batch: common.KvEventBatch) -> None:
        self.sample += 1
        assert (batch.load.sample, batch.dp_rank, batch.HasField("dp_rank")) == (self.sample, 0, True)
        self.loads.append(batch.load)
        if batch.load.load_only:
            assert (batch.sequence_number, len(batch.events)) == (self.number, 0)
            return
        if batch.HasField("snapshot") and batch.snapshot.index == 0:
            assert batch.events[0].HasField("cleared")
        elif self.sample == 1 and batch.sequence_number == self.number:
            return
        else:
            assert batch.sequence_number == self.number + 1
        self.number = batch.sequence_number
        for event in batch.events:
            self._apply_event(event)
        if batch.HasField("snapshot") and batch.snapshot.index == batch.snapshot.count - 1:
            assert len(self.held) == batch.snapshot.blocks

    def _apply_event(self, event: common.KvCacheEvent) -> None:
        if event.HasField("cleared"):
            self.held.clear()
        elif event.HasField("removed"):
            for block_hash in event.removed.block_hashes:
                del self.held[block_hash]
        else:
            parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
            assert parent is None or parent in self.held
            for block in event.stored.blocks:
                assert block.block_size == len(block.token_ids)
                self.held[block.block_hash] = (parent, tuple(block.token_ids))
                parent = block.block_hash


def signed(value: int) -> int:
    return int.from_bytes(value.to_bytes(8, "little"), "little", signed=True)


def block(block_hash: int, parent: int | None) -> StoredBlock:
    return StoredBlock(block_hash, parent, block_hash.to_bytes(8, "little") * 2)


def expected(log: BlockLog) -> dict[int, tuple[int | None, tuple[int, ...]]]:
    return {
        signed(each.hash): (None if each.parent is None else signed(each.parent), tuple(each.token_ids))
        for each in log.snapshot()
    }


def random_changes(log: BlockLog, rnd: random.Random) -> list[BlockChange]:
    """Changes that a cache may make: chains grow behind cached blocks, and leaves leave."""
    present = {each.hash: each for each in log.snapshot()}
    made: list[BlockChange] = []
    for _ in range(rnd.randrange(6)):
        leaves = set(present) - {each.parent for each in present.values()}
        if present and rnd.random() < 0.4:
            made.append(gone := rnd.choice(sorted(leaves)))
            del present[gone]
        else:
            new = block(rnd.getrandbits(64), rnd.choice([None, *present]))
            made.append(new)
            present[new.hash] = new
    return made


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 20))
def test_subscriber_has_the_blocks_of_the_log(seed: int, capacity: int) -> None:
    """It reads, is slow, loses its stream and comes back with its number."""
    rnd, log = random.Random(seed), BlockLog(FIRST, capacity)
    subscriber, feed, now = Subscriber(), KvEventStream(log, 0), 0.0
    for _ in range(30):
        log.append(random_changes(log, rnd))
        if rnd.random() < 0.2:
            # smg asks for its last batch again, and skips it.
            subscriber.sample, feed = 0, KvEventStream(log, subscriber.number)
        if rnd.random() < 0.6:
            for batch in feed.batches(IDLE, now, 5.0):
                assert batch.timestamp == 5.0
                subscriber.apply(batch)
            assert subscriber.held == expected(log)
            assert subscriber.number == log.number
        now += 0.1


def test_unknown_number_gets_a_snapshot() -> None:
    log = BlockLog(FIRST)
    log.append([block(1, None)])
    for start in (0, 5, FIRST + 2, 2**63):
        assert [batch.HasField("snapshot") for batch in KvEventStream(log, start).batches(IDLE, 0.0, 0.0)] == [True]
    assert [b.load.load_only for b in KvEventStream(log, FIRST + 1).batches(IDLE, 2.0, 0.0)] == [True]


def test_snapshot_of_a_full_cache_comes_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    log = BlockLog(FIRST)
    log.append([block(i + 1, i or None) for i in range(25)])
    monkeypatch.setattr(vllm_engine_events, "MAX_KV_FRAME_CHANGES", 10)
    subscriber = Subscriber()
    made = list(KvEventStream(log, 0).batches(IDLE, 0.0, 0.0))
    for batch in made:
        subscriber.apply(batch)
    assert [batch.snapshot.count for batch in made] == [3, 3, 3]
    assert subscriber.held == expected(log)
    assert MAX_KV_FRAME_CHANGES < FIRST, "numbers of chunks stay above 0"


def test_chain_of_blocks_is_one_event() -> None:
    log = BlockLog(FIRST)
    feed = KvEventStream(log, 0)
    list(feed.batches(IDLE, 0.0, 0.0))
    log.append([block(1, None), block(2, 1), block(3, 2), block(4, None), block(5, 1), 3, 5])
    (batch,) = feed.batches(IDLE, 0.0, 0.0)
    assert [len(event.stored.blocks) or len(event.removed.block_hashes) for event in batch.events] == [3, 1, 1, 2]


def test_load_comes_when_it_changes_and_as_a_heartbeat() -> None:
    log, now = BlockLog(FIRST), 10.0
    feed = KvEventStream(log, 0)
    assert len(list(feed.batches(IDLE, now, 0.0))) == 1
    assert list(feed.batches(IDLE, now + 0.1, 0.0)) == []
    (batch,) = feed.batches(replace(IDLE, running=1), now + 0.2, 0.0)
    assert (batch.load.load_only, batch.load.running_requests) == (True, 1)
    assert list(feed.batches(replace(IDLE, running=1), now + 0.2 + LOAD_HEARTBEAT_S / 2, 0.0)) == []
    assert len(list(feed.batches(replace(IDLE, running=1), now + 0.2 + LOAD_HEARTBEAT_S, 0.0))) == 1


def test_record_says_what_the_engine_says() -> None:
    recorder = LoadRecorder(8, 16)
    load = DoorLoad(3, 2, 4, 500, 25, 100, 0.25)
    recorder.record(load, EngineFigures(generated_tokens=100, prompt_tokens=50, cached_tokens=20), 1.0)
    record = recorder.record(load, EngineFigures(generated_tokens=160, prompt_tokens=50, cached_tokens=20), 2.0)
    pushed, polled = record.engine_load(9, load_only=True), record.scheduler_load()
    assert pushed == common.EngineLoad(
        running_requests=3,
        waiting_requests=4,
        waiting_uncached_tokens=500,
        token_usage=0.25,
        active_token_usage=0.25,
        gen_throughput=60.0,
        max_running_requests=8,
        sample=9,
        load_only=True,
        cache_hit_rate=0.4,
        num_used_tokens=400,
        max_total_num_tokens=1600,
        engine_silence_ms=250,
        engine_reports_steps=True,
        prefill_pending_tokens=500,
    )
    assert (polled.num_running_reqs, polled.num_waiting_reqs, polled.num_total_reqs) == (3, 4, 7)
    assert (polled.gen_throughput, polled.token_usage, polled.num_used_tokens) == (60.0, 0.25, 400)
    idle = recorder.record(DoorLoad(total_blocks=100), EngineFigures(generated_tokens=160), 60.0)
    assert (idle.tokens_per_s, idle.silence_ms) == (0.0, None)
    assert not idle.engine_load(1, load_only=True).HasField("engine_silence_ms")


def test_rate_starts_again_with_a_new_engine() -> None:
    recorder = LoadRecorder(8, 16)
    rates = [
        recorder.record(DoorLoad(), EngineFigures(generated_tokens=total), now).tokens_per_s
        for now, total in ((0.0, 0), (1.0, 50), (2.0, 100), (2.5, 10), (3.0, 20))
    ]
    assert rates == [0.0, 50.0, 50.0, 0.0, 20.0]
