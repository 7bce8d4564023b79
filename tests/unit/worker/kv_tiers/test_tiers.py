"""The tiers one by one: what they keep, what leaves first, and what wrong values, full disks and hanging stores do."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from common.config import Config
from common.errors import InvalidFieldError
from common.params.sampling_params import SamplingParams
from common.wire.block_hash import GRANULE_BLOCKS
from tests.checkpoints import make_checkpoint
from tests.unit.worker.engine.small_engine import BLOCK, engine, prompts
from worker import engine_factory
from worker.config.model_config import ModelConfig
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.sequence import EndReason, Sequence
from worker.engine.tier_lookups import NAME_BYTES, Tiers, next_name, root_name, salted_name
from worker.engine_factory import EngineOptions, build_engine
from worker.kv_tiers.memory_tier import MemoryTier
from worker.kv_tiers.shared_tiers import FileTier
from worker.kv_tiers.tier_option import open_tiers, shared_stores
from worker.kv_tiers.tiers import (
    DAMAGED,
    DROPPED,
    FAILED,
    HEADER_BYTES,
    LATE,
    MAX_WAITING_BYTES,
    MISS,
    STORED,
    KvFetch,
    KvTiers,
    pack,
    unpack,
)
from worker.progress import Silence
from worker.simulation.presets import cost_model
from worker.simulation.runner import SimulatedRunner

BYTES = 32
VALUE = HEADER_BYTES + BYTES


def name(*place: int) -> bytes:
    return bytes(place).ljust(NAME_BYTES, b"\0")


def value(*place: int) -> bytes:
    return pack(name(*place), bytes(place).ljust(BYTES, b"-"))


def until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.001)


def until_read(fetch: KvFetch) -> None:
    until(lambda: fetch.is_done)


def test_value_is_read_only_whole_undamaged_and_under_its_own_name() -> None:
    packed = value(1)
    assert unpack(name(1), packed, BYTES) == bytes([1]).ljust(BYTES, b"-")
    assert unpack(name(2), packed, BYTES) is None
    assert unpack(name(1), packed, BYTES + 1) is None
    assert all(unpack(name(1), packed[:length], BYTES) is None for length in range(len(packed)))
    for bit in range(8 * len(packed)):
        damaged = bytearray(packed)
        damaged[bit // 8] ^= 1 << bit % 8
        assert unpack(name(1), bytes(damaged), BYTES) is None


def test_name_says_all_that_a_block_depends_on() -> None:
    root = root_name(["weights", "numerics", 16])
    roots = [root, root_name(["other weights", "numerics", 16]), root_name(["weights", "numerics", 32])]
    roots += [salted_name(root, b"a"), salted_name(root, b"b")]
    names = [next_name(each, tokens) for each in roots for tokens in (b"\1\0\0\0", b"\2\0\0\0")]
    names += [next_name(names[0], b"\1\0\0\0"), *roots]
    assert len(set(names)) == len(names)
    assert salted_name(root, b"") == root


def test_memory_keeps_most_recently_used_chains_with_their_beginnings() -> None:
    tier = MemoryTier(4 * VALUE, VALUE)
    for chain in (1, 2):
        tier.put(name(chain), b"", value(chain))
        tier.put(name(chain, 1), name(chain), value(chain, 1))
    # Chain 1 was used last, so chain 2 gives up its end, then its beginning.
    assert tier.get(name(1)) == value(1)
    assert tier.get(name(1, 1)) == value(1, 1)
    tier.put(name(3), b"", value(3))
    assert [tier.has(each) for each in (name(2), name(2, 1))] == [True, False]
    tier.put(name(3, 1), name(3), value(3, 1))
    assert [tier.has(each) for each in (name(1), name(1, 1), name(2), name(3))] == [True, True, False, True]
    assert len(tier) == 4


def test_memory_keeps_each_new_block_under_random_use() -> None:
    rnd = random.Random(5)
    tier, names = MemoryTier(9 * VALUE, VALUE), set[bytes]()
    for _ in range(5000):
        number = rnd.randrange(6)
        places = [(number, *[1] * depth) for depth in range(rnd.randint(1, 8))]
        chain = [name(*place) for place in places]
        for place, before, each in zip(places, [b"", *chain], chain, strict=False):
            names.add(each)
            if not tier.has(each):
                # Also behind a block that has left: the engine has that one in its pool.
                tier.put(each, before, value(*place))
                assert tier.has(each)
            assert tier.get(each) == value(*place)
        assert len(tier) <= 9
        if not rnd.randrange(20):
            tier.drop(rnd.choice(sorted(names)))
    tier.clear()
    assert len(tier) == 0


def test_memory_reports_each_granule_that_is_whole_and_no_other() -> None:
    """Brute force over random use: blocks also come back in front of kept ones, and leave from the middle."""
    rnd = random.Random(6)
    tier, reported, seen = MemoryTier(40 * VALUE, VALUE), set[bytes](), set[bytes]()
    tier.watch()
    parents = {name(): b""}
    for number in range(1, 60):
        parents[name(number)] = rnd.choice([each for each in list(parents)[-3:] if each != name()] or [b""])
    del parents[name()]

    def is_whole(each: bytes) -> bool:
        chain = [each]
        while parents.get(chain[-1]) and len(chain) < GRANULE_BLOCKS:
            chain.append(parents[chain[-1]])
        return len(chain) == GRANULE_BLOCKS and all(tier.has(block) for block in chain)

    for _ in range(4000):
        each = rnd.choice(list(parents))
        use = rnd.random()
        if use < 0.01:
            tier.clear()
        elif use < 0.05:
            tier.drop(each)
        elif use < 0.15:
            tier.get(each)
        else:
            assert tier.put(each, parents[each], bytes(VALUE))
        for block, is_new in tier.take_changes():
            assert (block in reported) != is_new
            reported.symmetric_difference_update({block})
        assert reported == set(filter(is_whole, parents))
        seen |= reported
    assert len(seen) > 30


def test_blocks_from_slower_tier_leave_memory_from_their_end(tmp_path: Path) -> None:
    """Without the first block of a chain all others are of no use."""
    memory, files = MemoryTier(6 * VALUE, VALUE), FileTier(tmp_path, 1 << 20)
    chain = [name(1, *[1] * depth) for depth in range(5)]
    for depth, each in enumerate(chain):
        files.put(each, b"", value(1, *[1] * depth))
    tiers = KvTiers({"memory": memory, "files": files}, BYTES)
    for start, count in ((0, 2), (2, 3)):
        fetch = tiers.fetch(chain[start : start + count], chain[start - 1] if start else b"")
        assert fetch is not None
        until_read(fetch)
        fetch.close()
    for number in (2, 3, 4):
        memory.put(name(number), b"", value(number))
    assert [memory.has(each) for each in chain] == [True, True, True, False, False]
    tiers.close()


def test_files_stay_within_their_room_oldest_first(tmp_path: Path) -> None:
    tier = FileTier(tmp_path / "kv", 8 * VALUE)
    for i in range(8):
        tier.put(name(i), b"", value(i))
        os.utime(next((tmp_path / "kv").glob(f"*/{name(i).hex()}.kv")), (i, i))
    assert tier.get(name(0)) == value(0)
    tier.put(name(8), b"", value(8))
    assert [i for i in range(9) if tier.get(name(i)) is not None] == [0, 3, 4, 5, 6, 7, 8]
    assert sum(each.stat().st_size for each in (tmp_path / "kv").glob("*/*")) <= 8 * VALUE
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    # Another process finds them, and their size.
    other = FileTier(tmp_path / "kv", 8 * VALUE)
    assert other.get(name(8)) == value(8)


def test_full_disk_leaves_no_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = FileTier(tmp_path, 8 * VALUE)

    def write_half(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_half)
    with pytest.raises(OSError, match="No space"):
        tier.put(name(1), b"", value(1))
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == []
    assert tier.get(name(1)) is None


class Hanging:
    """A tier that answers when it is told to."""

    def __init__(self) -> None:
        self.answers = threading.Event()

    def get(self, name: bytes) -> bytes | None:
        assert self.answers.wait(60)
        return None

    def put(self, name: bytes, parent: bytes, value: bytes) -> bool:
        return self.answers.wait(60)

    def drop(self, name: bytes) -> None:
        assert self.answers.wait(60)

    def close(self) -> None:
        assert self.answers.wait(60)


def test_hanging_tier_holds_up_no_request() -> None:
    tier = Hanging()
    tiers = KvTiers({"hanging": tier}, 16 * BLOCK)
    core = engine(tiers=Tiers(tiers, root_name(["simulated"])))
    seqs = [Sequence(tokens, BLOCK) for tokens in prompts(40)]
    for seq in seqs:
        core.add_request(seq)
    until(lambda: bool(core.step()) and not core.has_unfinished())
    assert all(seq.num_completion_tokens for seq in seqs)
    waits = [seq.ledger.tier_wait for seq in seqs if seq.ledger.tier_wait is not None]
    assert 0 < sum(wait.is_late for wait in waits) <= tiers.counts()["", LATE]
    tier.answers.set()
    tiers.close()


def test_prompt_that_waits_for_blocks_is_not_returned_to_its_router() -> None:
    tier = Hanging()
    tiers = KvTiers({"hanging": tier}, 16 * BLOCK)
    core = engine(tiers=Tiers(tiers, root_name(["simulated"])))
    # So slow that the prompt waits for its blocks rather than to be computed.
    core.scheduler.meter.rate = 1e-3
    seq = Sequence(prompts(40)[0], BLOCK, arrive_time=time.monotonic(), may_return=True)
    core.add_request(seq)
    until(lambda: bool(core.step()) and seq.ledger.tier_wait is not None)
    behind = Sequence(prompts(40)[0][::-1], BLOCK, arrive_time=time.monotonic(), may_return=True)
    behind.waits_for_kv = True
    core.scheduler.lifecycle.waiting.append(behind)
    assert core.scheduler.overdue(time.monotonic() + 60, 0.25) == [behind]
    core.scheduler.lifecycle.waiting.remove(behind)
    seq.waits_for_kv = False
    assert core.scheduler.overdue(time.monotonic() + 120, 0.25) == [seq]
    tier.answers.set()
    tiers.close()


def test_aborted_prompt_leaves_no_lookup_behind() -> None:
    tier = Hanging()
    tiers = KvTiers({"hanging": tier}, 16 * BLOCK)
    core = engine(tiers=Tiers(tiers, root_name(["simulated"])))
    seq = Sequence(prompts(40)[0], BLOCK)
    core.add_request(seq)
    assert core.tiers is not None
    lookups = core.tiers
    until(lambda: bool(core.step()) and bool(lookups._lookups))
    core.abort(seq.id)
    while core.has_unfinished():
        core.step()
    assert not lookups._lookups
    tier.answers.set()
    until(lambda: tiers._num_read == 0)
    tiers.close()


def test_what_cannot_be_written_soon_is_dropped_and_counted() -> None:
    tier, size = Hanging(), MAX_WAITING_BYTES // 4
    tiers = KvTiers({"hanging": tier}, size)
    tiers.store((name(i), b"", b"") for i in range(6))
    assert tiers.counts()["", DROPPED] == 2
    tier.answers.set()
    until(lambda: tiers.counts().get(("hanging", STORED)) == 4)
    tiers.close()


def test_tier_that_fails_rests_and_is_asked_again() -> None:
    now, calls = [0.0], list[float]()

    class Failing(Hanging):
        def get(self, name: bytes) -> bytes | None:
            calls.append(now[0])
            if now[0] < 5:
                raise OSError("no route")
            return None

    tiers = KvTiers({"failing": Failing()}, BYTES, lambda: now[0])
    for now[0] in (0.0, 0.5, 1.5, 2.5, 4.0, 6.0, 9.0, 9.1):
        fetch = tiers.fetch([name(1)])
        assert fetch is not None
        until_read(fetch)
        assert fetch.blocks == []
        fetch.close()
    assert calls == [0.0, 1.5, 4.0, 9.0, 9.1]
    assert tiers.counts()["failing", FAILED] == 3
    assert tiers.counts()["failing", MISS] == 8
    tiers.close()


def test_memory_of_read_blocks_is_bounded_and_given_back() -> None:
    tier, size = MemoryTier(1 << 20, VALUE), MAX_WAITING_BYTES // 2
    tiers = KvTiers({"memory": tier}, size)
    first = tiers.fetch([name(1), name(2), name(3)])
    assert first is not None
    assert first.num_names == 2
    assert tiers.fetch([name(4)]) is None
    first.close()
    first.close()
    until(lambda: (again := tiers.fetch([name(4), name(5), name(6)])) is not None and again.num_names == 2)
    tiers.close()


def test_tier_rests_after_late_prompts_whose_reads_end_later() -> None:
    class Slow(Hanging):
        asked = threading.Event()

        def get(self, name: bytes) -> bytes | None:
            self.asked.set()
            super().get(name)
            self.answers.clear()
            return None

    tier = Slow()
    tiers = KvTiers({"slow": tier}, BYTES)

    def read(*, is_late: bool) -> None:
        tier.asked.clear()
        fetch = tiers.fetch([name(1)])
        assert fetch is not None
        if is_late:
            # A fetch that is closed before a thread takes it never asks the tier.
            assert tier.asked.wait(60)
            tiers.note_late()
            fetch.close()
        tier.answers.set()
        until_read(fetch)
        fetch.close()
        until(lambda: tiers._num_read == 0)

    for _ in range(2):
        read(is_late=True)
    read(is_late=False)
    until(lambda: tiers._late_in_row == 0)
    for i in range(3):
        assert not tiers.is_resting, i
        read(is_late=True)
    assert tiers.is_resting
    tiers.close()


@pytest.mark.parametrize("how", ["abort", "abort_all", "return_overdue"])
def test_ended_sequences_give_read_blocks_back_without_another_step(how: str) -> None:
    tier = Hanging()
    tiers = KvTiers({"hanging": tier}, MAX_WAITING_BYTES // 2)
    core = engine(tiers=Tiers(tiers, root_name(["simulated"])))
    seq = Sequence(prompts(48)[0], BLOCK, may_return=True)
    core.add_request(seq)
    # The first step queues it, the second one asks.
    for _ in range(2):
        core.step()
    assert tiers.fetch([name(1)]) is None
    if how == "abort":
        core.abort(seq.id)
    elif how == "abort_all":
        core.abort_all(EndReason.CANCELLED)
    else:
        # A prompt without room keeps its blocks, and waits for room.
        seq.waits_for_kv = False
        core.return_overdue(time.monotonic() + 1e6)
    assert seq.is_finished
    tier.answers.set()
    until(lambda: tiers.fetch([name(1)]) is not None)
    tiers.close()


@pytest.mark.parametrize("fails", ["start", "tier"])
def test_failed_start_of_engine_leaves_no_thread(fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, before = make_checkpoint(tmp_path / "model"), set(threading.enumerate())
    model_config = ModelConfig.from_folder(str(folder))
    config = Config(str(folder), max_model_len=64, enable_prefix_caching=True, kv_tiers="memory:64MiB")
    if fails == "start":
        monkeypatch.setattr(engine_factory, "EngineCore", partial(raising, RuntimeError("no engine")))
    else:
        config = replace(config, kv_tiers=f"memory:64MiB,files:{tmp_path / 'file' / 'kv'}:64MiB")
        (tmp_path / "file").write_text("")
    with pytest.raises((RuntimeError, InvalidFieldError), match=r"no engine|cannot be opened"):
        build_engine(EngineOptions(config, model_config, simulate=cost_model("instant")), Silence())
    until(lambda: not any(thread.name.startswith("kv ") for thread in {*threading.enumerate()} - before))


def raising(error: Exception, *arguments: object, **named: object) -> None:
    del arguments, named
    raise error


def test_last_blocks_go_down_without_another_step() -> None:
    """The step that fills them is the last one, so an idle engine reads them."""
    tier = MemoryTier(1 << 20, HEADER_BYTES + 16 * BLOCK)
    tiers = KvTiers({"memory": tier}, 16 * BLOCK)
    core = engine(tiers=Tiers(tiers, root_name(["simulated"])))
    core.add_request(Sequence(prompts(48)[0][:48], BLOCK, SamplingParams(max_tokens=1)))
    until(lambda: bool(core.step()) and not core.has_unfinished())
    until(lambda: len(tier) == 3)
    tiers.close()


def test_interrupted_step_leaves_no_block_unwritten() -> None:
    """A block that was published for a tier, and whose step is interrupted, is written by the next step."""
    tier = MemoryTier(1 << 20, HEADER_BYTES + 16 * BLOCK)
    tiers = KvTiers({"memory": tier}, 16 * BLOCK)
    core = engine(tiers=Tiers(tiers, root_name(["simulated"])))
    tokens, params = prompts(40)[0], SamplingParams(max_tokens=9)
    for _ in range(2):
        core.add_request(Sequence(tokens, BLOCK, params))
        until(lambda: bool(core.step()) and not core.has_unfinished())
    until(lambda: len(tier) > 0)
    core.scheduler.block_manager.flush()
    seq = Sequence(tokens, BLOCK, params)
    core.add_request(seq)
    runner, interrupted = core.runner, list[ScheduledBatch]()
    assert isinstance(runner, SimulatedRunner)

    class Interrupts:
        def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
            interrupted.append(batch)
            raise KeyboardInterrupt

    core.runner = Interrupts()
    with pytest.raises(KeyboardInterrupt):
        until(lambda: bool(core.step()) and not core.has_unfinished())
    assert interrupted[0].blocks_up
    core.runner = runner
    until(lambda: bool(core.step()) and not core.has_unfinished())
    assert seq.completion_token_ids == runner.reference(tokens, seq.max_tokens)
    tiers.close()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("memory", "memory"),
        ("memory:", "size"),
        ("memory:lots", "size"),
        ("memory:1GiB,memory:2GiB", "twice"),
        ("files:/tmp", "files"),
        ("s3://user:secret@bucket", "names 's3'"),
        ("disk:/tmp:1GiB", "names 'disk'"),
        ("memory:40", "at least two blocks"),
        ("redis://", "host"),
        ("mooncake://master", "names a Mooncake store wrongly; valid: mooncake://MASTER:PORT"),
        ("mooncake://:50051", "wrongly"),
        ("mooncake://master:50051?segment=lots", "'lots' is not a size"),
        ("mooncake://master:50051?protocol=smoke", "wrongly"),
        ("mooncake://master:50051?segments=1GiB", "wrongly"),
        ("mooncake://master:50051?segment", "wrongly"),
        ("mooncake://user:secret@master:50051", "wrongly"),
        ("mooncake://master:50051", "the package mooncake-transfer-engine-non-cuda is not installed"),
    ],
)
def test_wrong_option_names_field_and_what_is_valid(text: str, problem: str) -> None:
    with pytest.raises(InvalidFieldError, match=problem) as caught:
        open_tiers(text, BYTES)
    assert "kv_tiers" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_damaged_value_leaves_its_tier_and_is_written_again(tmp_path: Path) -> None:
    """Otherwise a tier that keeps values as they are would give the damaged one for ever."""
    for tier in (MemoryTier(4 * VALUE, VALUE), FileTier(tmp_path, 4 * VALUE)):
        tiers = KvTiers({"tier": tier}, BYTES)
        # Values of another block, also in front of a block that stays.
        tier.put(name(1), b"", value(9))
        tier.put(name(1, 1), name(1), value(1, 1))
        first = tiers.fetch([name(1)])
        assert first is not None
        until_read(first)
        assert first.blocks == []
        assert tiers.counts().get(("tier", DAMAGED), 0) == 1
        tiers.store([(name(1), b"", bytes([1]).ljust(BYTES, b"-"))])
        until(lambda tiers=tiers: tiers.counts().get(("tier", STORED), 0) == 1)  # type: ignore[misc]
        second = tiers.fetch([name(1), name(1, 1)])
        assert second is not None
        until_read(second)
        assert len(second.blocks) == 2
        tiers.close()


def test_damaged_value_that_an_audit_finds_is_counted_and_replaced(tmp_path: Path) -> None:
    tier = FileTier(tmp_path, 4 * VALUE)
    tier.put(name(1), b"", value(1)[:-1])
    tiers = KvTiers({"files": tier}, BYTES)
    tiers.audit([name(1)])
    tiers.store([(name(1), b"", bytes([1]).ljust(BYTES, b"-"))])
    until(lambda: tiers.counts()["files", STORED] == 1)
    assert tiers.counts()["files", DAMAGED] == 1
    assert tier.get(name(1)) == value(1)
    tiers.close()


def test_option_opens_tiers_fastest_first(tmp_path: Path) -> None:
    tiers = open_tiers(f" files:{tmp_path / 'a:b'}:1MiB , memory:1MiB", BYTES)
    assert list(tiers) == ["memory", "files"]
    assert (tmp_path / "a:b").is_dir()
    assert open_tiers("", BYTES) == {}


def test_shared_store_is_named_by_its_place_alone(tmp_path: Path) -> None:
    files = f"files:{tmp_path}/"
    (first,) = shared_stores(f"{files}:1MiB,memory:1MiB")
    assert shared_stores(f"files:{tmp_path}:2GiB") == (first,)
    (second,) = shared_stores("redis://cache:6379/0")
    assert shared_stores("rediss://user:secret@cache:6379/0") == (second,)
    assert shared_stores("redis://cache:6379/1") != (second,)
    lent, borrowed = (shared_stores(f"mooncake://master:50051{size}") for size in ("?segment=1GiB", "/"))
    assert lent == borrowed
    assert lent[0].startswith("mooncake:")
    assert shared_stores(f"redis://cache:6379/0,{files}:1MiB") == (second, first)
    assert first.startswith("files:")
    assert shared_stores("memory:1MiB") == shared_stores("") == ()


def test_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidFieldError, match="cannot be opened"):
        open_tiers(f"files:{tmp_path / 'file' / 'kv'}:1MiB", BYTES)
