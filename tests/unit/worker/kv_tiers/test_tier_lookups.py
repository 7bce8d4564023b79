"""Waits of prompts for KV tiers: what they take from them, how long they last, and which prompts are audited."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from common.params.sampling_params import SamplingParams
from common.telemetry.names import Stage
from tests.unit.worker.engine.small_engine import BLOCK, engine, prompts
from worker.engine import tier_lookups
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.outputs import sequence_times
from worker.engine.sequence import Sequence
from worker.engine.tier_lookups import Tiers, root_name
from worker.kv_tiers.memory_tier import MemoryTier
from worker.kv_tiers.shared_tiers import FileTier
from worker.kv_tiers.tiers import (
    DIFFERENT,
    EQUAL,
    HEADER_BYTES,
    LATE,
    READ,
    STORED,
    WRITE,
    KvTiers,
    pack,
)


def until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_prompt_without_room_keeps_its_place_and_its_blocks() -> None:
    """Prompts behind it do not pass it over."""
    tier = MemoryTier(1 << 20, HEADER_BYTES + 16 * BLOCK)
    tiers = KvTiers({"memory": tier}, 16 * BLOCK)
    core = engine(tiers=Tiers(tiers, root_name(["simulated"])))
    tokens, short = prompts(48)[0], SamplingParams(max_tokens=1)
    core.add_request(Sequence(tokens, BLOCK, short))
    until(lambda: bool(core.step()) and not core.has_unfinished())
    until(lambda: len(tier) == 3)
    core.scheduler.block_manager.flush()
    core.scheduler.meter.rate = 1e-3
    # Two of five blocks are taken, one more may be needed, and the large prompt needs four.
    core.add_request(Sequence(prompts(0)[2], BLOCK, SamplingParams(max_tokens=28, ignore_eos=True)))
    core.step()
    large, small = Sequence(tokens, BLOCK, short), Sequence([7], BLOCK, short)
    core.add_request(large)
    until(lambda: bool(core.step()) and not large.waits_for_kv)
    assert large.first_scheduled_time is None
    core.add_request(small)
    until(lambda: bool(core.step()) and not core.has_unfinished())
    assert large.first_scheduled_time is not None
    assert small.first_scheduled_time is not None
    assert large.first_scheduled_time <= small.first_scheduled_time
    assert large.num_cached_tokens == 48
    tiers.close()


def test_wait_for_tiers_is_a_stage_and_says_what_was_found() -> None:
    tier, size = MemoryTier(1 << 20, HEADER_BYTES + 16 * BLOCK), 16 * BLOCK
    tiers = KvTiers({"memory": tier}, size)
    core = engine(tiers=Tiers(tiers, root_name(["simulated"])))
    tokens, params = prompts(48)[0], SamplingParams(max_tokens=2)
    core.add_request(Sequence(tokens, BLOCK, params, arrive_time=time.monotonic()))
    until(lambda: bool(core.step()) and not core.has_unfinished())
    until(lambda: len(tier) == 3)
    tier.drop(next(iter(reversed(tier._entries))))
    core.scheduler.block_manager.flush()
    core.scheduler.meter.rate = 1e-3
    seq = Sequence(tokens, BLOCK, params, arrive_time=time.monotonic())
    core.add_request(seq)
    until(lambda: bool(core.step()) and not core.has_unfinished())
    times = sequence_times(seq)
    assert times.tiers is not None
    assert times.arrived <= times.tiers.began <= (times.tiers.ended or 0.0) <= (times.first_scheduled or 0.0)
    assert times.tiers.attributes() == {
        "fissile.kv_tiers.asked": 3,
        "fissile.kv_tiers.bytes": 2 * size,
        "fissile.kv_tiers.late": False,
        "fissile.kv_tiers.memory.hit": 2,
        "fissile.kv_tiers.memory.miss": 1,
    }
    parts = seq.ledger.parts(times.ended)
    assert parts[Stage.KV_WAIT] == pytest.approx((times.tiers.ended or 0.0) - times.tiers.began)
    assert sum(parts.values()) == pytest.approx(times.ended - times.arrived)
    # The block that was missing is stored once more.
    until(lambda: moved(tiers, size) == {READ: 2, WRITE: 4})
    traffic = tiers.traffic()
    assert all(seconds > 0 for _, seconds in traffic.values())
    tiers.close()


def moved(tiers: KvTiers, size: int) -> dict[str, int]:
    """Blocks of `size` bytes that were read and written."""
    traffic = tiers.traffic().items()
    return {operation: num_bytes // (HEADER_BYTES + size) for (_, operation), (num_bytes, _) in traffic}


@pytest.mark.parametrize("place", [None, 0, 1, 2])
def test_audited_prompt_is_computed_and_wrong_blocks_leave_their_tier(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: int | None
) -> None:
    """A block that another worker has computed wrongly has the right digest of the wrong bytes."""
    monkeypatch.setattr(tier_lookups, "_AUDIT_EVERY", 2)
    size, width = 16 * BLOCK, HEADER_BYTES + 16 * BLOCK
    memory, files = MemoryTier(1 << 20, width), FileTier(tmp_path, 1 << 20)
    tiers = KvTiers({"memory": memory, "files": files}, size)
    core = engine(tiers=Tiers(tiers, root_name(["simulated"])))
    tokens, params = prompts(48)[0], SamplingParams(max_tokens=1)
    core.add_request(Sequence(tokens, BLOCK, params))
    until(lambda: bool(core.step()) and not core.has_unfinished())
    until(lambda: tiers.counts()["files", STORED] == 3)
    seq = Sequence(tokens, BLOCK, params)
    assert core.tiers is not None
    names = core.tiers._names(seq, 3)
    if place is not None:
        for tier in (memory, files):
            tier.drop(names[place])
            tier.put(names[place], b"", pack(names[place], bytes(size)))
    core.scheduler.block_manager.flush()
    core.add_request(seq)
    until(lambda: bool(core.step()) and not core.has_unfinished())
    until(lambda: tiers.counts()["files", EQUAL] + tiers.counts()["files", DIFFERENT] == 3)
    assert seq.num_cached_tokens == 0
    for kind, tier in (("memory", memory), ("files", files)):
        assert tiers.counts()[kind, DIFFERENT] == (place is not None)
        assert [tier.get(each) is None for each in names] == [i == place for i in range(3)]
    tiers.close()


@pytest.mark.parametrize("kind", ["new", "expects_kv", "begun", "long"])
def test_only_new_prompts_that_fit_into_a_step_are_audited(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(tier_lookups, "_AUDIT_EVERY", 1)
    tiers = KvTiers({"memory": MemoryTier(1 << 20, HEADER_BYTES + 16 * BLOCK)}, 16 * BLOCK)
    core = engine(tiers=Tiers(tiers, root_name(["simulated"])))
    tokens = prompts(48)[0]
    seq = Sequence(tokens, BLOCK, num_prompt_tokens=len(tokens) - (kind == "begun"), arrive_time=0.0)
    seq.expects_kv = kind == "expects_kv"
    core.scheduler.lifecycle.waiting.append(seq)
    assert core.tiers is not None
    core.tiers.look(0.0, 1.0, 47 if kind == "long" else 48)
    assert seq.waits_for_kv == (kind != "new")
    tiers.close()


@pytest.mark.parametrize(("came", "ends"), [((0.8, 1.6, 2.4, 3.2), 1.0), ((0.1, 0.2, 3.0, 4.0), 0.7)])
def test_whole_wait_is_bounded_by_time_of_computing_missing_blocks(came: tuple[float, ...], ends: float) -> None:
    """Each block that came gave the prompt the time of the whole prompt once more."""
    tier, size = MemoryTier(1 << 20, HEADER_BYTES + 16 * BLOCK), 16 * BLOCK
    tiers = KvTiers({"memory": tier}, size)
    core = engine(tiers=Tiers(tiers, root_name(["simulated"])))
    seq = Sequence(prompts(64)[0], BLOCK, arrive_time=0.0)
    seq.expects_kv = True
    assert core.tiers is not None
    lookups, names = core.tiers, core.tiers._names(seq, 4)
    lookups.enter(seq)
    core.scheduler.lifecycle.waiting.append(seq)
    times = [i / 40 for i in range(200)]
    for now in times:
        for block, at in zip(names, came, strict=True):
            if at <= now and not tier.has(block):
                tier.put(block, b"", pack(block, bytes(size)))
        lookups.look(now, 64.0, 64)
        until(lambda: all(each.fetch is None or each.fetch.is_done for each in lookups._lookups.values()))
        if not seq.waits_for_kv:
            break
    wait = seq.ledger.tier_wait
    assert wait is not None
    assert wait.is_late
    assert tiers.counts()["", LATE] == 1
    assert ends < now <= ends + 0.1
    assert wait.num_asked == 4
    tiers.close()


def test_steps_write_bounded_number_of_blocks_from_tiers() -> None:
    """Also while a prompt waits for further blocks: a frame to a rank has a bound."""
    tier = MemoryTier(1 << 20, HEADER_BYTES + 16 * BLOCK)
    tiers = KvTiers({"memory": tier}, 16 * BLOCK)
    core = engine(tiers=Tiers(tiers, root_name(["simulated"])))
    tokens, params = prompts(64)[0], SamplingParams(max_tokens=1)
    core.add_request(Sequence(tokens, BLOCK, params))
    until(lambda: bool(core.step()) and not core.has_unfinished())
    until(lambda: len(tier) == 4)
    core.scheduler.block_manager.flush()
    core.scheduler.meter.rate = 1e-3
    tiers.most_waiting = 1
    runner, written = core.runner, list[int]()

    class Counts:
        def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
            written.append(len(batch.blocks_up))
            return runner.forward(batch)

    core.runner = Counts()
    seq = Sequence(tokens, BLOCK, params)
    core.add_request(seq)
    core.step()
    assert core.tiers is not None
    lookups = core.tiers
    for _ in range(8):
        lookups.look(time.monotonic(), 1e-3, 64)
        until(lambda: all(each.fetch is None or each.fetch.is_done for each in lookups._lookups.values()))
    assert len(lookups._up) == 1
    until(lambda: bool(core.step()) and not core.has_unfinished())
    assert seq.num_cached_tokens == 64
    assert sum(written) == 4
    assert max(written) == 1
    tiers.close()


def test_prompt_of_several_fetches_takes_one_look_a_fetch() -> None:
    """A look is a step, so that two looks a fetch let the wait end before long prompts have their blocks."""
    tier = MemoryTier(1 << 20, HEADER_BYTES + 16 * BLOCK)
    tiers = KvTiers({"memory": tier}, 16 * BLOCK)
    core = engine(tiers=Tiers(tiers, root_name(["simulated"])))
    seq = Sequence(prompts(64)[0], BLOCK, arrive_time=0.0)
    assert core.tiers is not None
    lookups = core.tiers
    for block in lookups._names(seq, 4):
        tier.put(block, b"", pack(block, bytes(16 * BLOCK)))
    tiers.most_waiting = 1
    lookups.enter(seq)
    core.scheduler.lifecycle.waiting.append(seq)
    moved = []
    for _ in range(5):
        lookups.look(0.0, 1.0, 64)
        until(lambda: all(each.fetch is None or each.fetch.is_done for each in lookups._lookups.values()))
        batch = ScheduledBatch({}, [], 0)
        lookups.move_with(batch)
        moved.append(len(batch.blocks_up))
    assert moved == [0, 1, 1, 1, 1]
    assert not seq.waits_for_kv
    tiers.close()


def test_blocks_that_gave_no_number_leave_the_tiers() -> None:
    tier = MemoryTier(1 << 20, HEADER_BYTES + 16 * BLOCK)
    tiers = KvTiers({"memory": tier}, 16 * BLOCK)
    core = engine(tiers=Tiers(tiers, root_name(["simulated"])))
    tokens = prompts(48)[0]
    core.add_request(Sequence(tokens, BLOCK, SamplingParams(max_tokens=1)))
    until(lambda: bool(core.step()) and not core.has_unfinished())
    until(lambda: len(tier) == 3)
    blocks, seq = core.scheduler.block_manager, Sequence(tokens, BLOCK)
    for block_id in blocks.prefixes.cached_blocks(seq)[1:]:
        blocks.blocks[block_id].is_proved = False
    assert blocks.forget_unproved(seq) == 2
    until(lambda: len(tier) == 1)
    tiers.close()


@pytest.mark.parametrize("expects", [True, False])
def test_only_blocks_that_another_worker_has_just_computed_are_asked_for_again(expects: bool) -> None:
    asked = list[bytes]()

    class Late(MemoryTier):
        """Has a block when it is asked for the second time."""

        def get(self, name: bytes) -> bytes | None:
            asked.append(name)
            return super().get(name) if asked.count(name) > 1 else None

    tier = Late(1 << 20, HEADER_BYTES + 16 * BLOCK)
    tiers = KvTiers({"memory": tier}, 16 * BLOCK)
    core = engine(tiers=Tiers(tiers, root_name(["simulated"])))
    params = SamplingParams(max_tokens=1)
    tokens = prompts(48)[0]
    core.add_request(Sequence(tokens, BLOCK, params))
    until(lambda: bool(core.step()) and not core.has_unfinished())
    until(lambda: len(tier) == 3)
    core.scheduler.block_manager.flush()
    asked.clear()
    seq = Sequence(tokens, BLOCK, params)
    seq.expects_kv = expects
    # As if prompts took long, so that the wait does not end before the test has looked.
    core.scheduler.meter.rate = 1e-3
    core.add_request(seq)
    until(lambda: bool(core.step()) and not core.has_unfinished())
    assert seq.num_cached_tokens == (48 if expects else 0)
    tiers.close()
