"""An engine with KV tiers: whatever the tiers do, every stream is the reference stream."""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from common.config import SCHEDULING_POLICIES, Config, SpeculativeConfig
from common.params.sampling_params import SamplingParams
from common.wire.block_hash import GRANULE_BLOCKS
from tests.covering import slow_but
from tests.redis_server import running_redis
from worker.engine.core import EngineCore
from worker.engine.sequence import Sequence
from worker.engine.tier_lookups import IN_MEMORY, Tiers, root_name
from worker.engine.turns import EngineTurns, Flush, Submit
from worker.kv_tiers import shared_tiers
from worker.kv_tiers.memory_tier import MemoryTier
from worker.kv_tiers.shared_tiers import FileTier, RedisTier
from worker.kv_tiers.tiers import DAMAGED, FAILED, HEADER_BYTES, HIT, STORED, KvTier, KvTiers
from worker.simulation.runner import SimulatedRunner

VOCAB, SIZE = 40, 16
BLOCK_BYTES = 16 * SIZE
VALUE_BYTES = HEADER_BYTES + BLOCK_BYTES
REQUESTS = 300


class Liar:
    """A tier that gives some of its values back wrong: another bit, cut off, of another name, or an error."""

    def __init__(self, rnd: random.Random, share: float) -> None:
        self.rnd = rnd
        self.share = share
        self.values: dict[bytes, bytes] = {}
        self.lies = 0

    def get(self, name: bytes) -> bytes | None:
        value = self.values.get(name)
        if value is None or self.rnd.random() >= self.share:
            return value
        self.lies += 1
        match self.rnd.randrange(4):
            case 0:
                place = self.rnd.randrange(len(value))
                return value[:place] + bytes([value[place] ^ 1 << self.rnd.randrange(8)]) + value[place + 1 :]
            case 1:
                return value[: self.rnd.randrange(len(value))]
            case 2:
                return self.values[self.rnd.choice([each for each in self.values if each != name] or [b""])]
            case _:
                raise OSError("no answer")

    def put(self, name: bytes, parent: bytes, value: bytes) -> bool:
        del parent
        if self.rnd.random() < self.share:
            raise OSError("no room")
        self.values[name] = value
        return True

    def drop(self, name: bytes) -> None:
        self.values.pop(name, None)

    def close(self) -> None:
        self.values.clear()


def engine(tiers: Mapping[str, KvTier], rnd: random.Random) -> EngineCore:
    """An engine whose few blocks make it evict and preempt."""
    drafts = rnd.choice([0, 2])
    config = Config(
        num_kvcache_blocks=rnd.choice([9, 12, 20]),
        kv_cache_block_size=SIZE,
        max_model_len=9 * SIZE,
        max_num_seqs=rnd.choice([2, 8]),
        max_num_batched_tokens=rnd.choice([24, 64, 200]),
        scheduling_policy=rnd.choice(SCHEDULING_POLICIES),
        enable_prefix_caching=True,
        deferred_output=rnd.random() < 0.3,
        speculative_config=SpeculativeConfig(drafts) if drafts else None,
    )
    runner = SimulatedRunner(VOCAB, None, block_size=SIZE, num_blocks=config.num_kvcache_blocks, num_drafts=drafts)
    # A clock that is past every rest, so that a tier that fails is asked again at once.
    clock = itertools.count(0.0, 100.0)
    store = KvTiers(tiers, BLOCK_BYTES, lambda: next(clock))
    return EngineCore(config, runner, tiers=Tiers(store, root_name(["simulated"])))


def prompts(rnd: random.Random, count: int) -> list[tuple[list[int], bytes]]:
    """Prompts that share beginnings, and their salts."""
    shared = [[rnd.randrange(VOCAB) for _ in range(n)] for n in (16, 40, 64, 80)]
    return [
        (
            [*rnd.choice(shared), *(rnd.randrange(VOCAB) for _ in range(rnd.randint(1, 30)))],
            rnd.choice([b"", b"", b"a"]),
        )
        for _ in range(count)
    ]


def run(
    core: EngineCore,
    rnd: random.Random,
    wanted: Iterable[tuple[list[int], bytes]],
    faults: Mapping[int, Callable[[], object]] | None = None,
) -> int:
    """Runs requests, a few at a time, and compares each with the reference. Returns the tokens found in caches.

    Args:
        core: the engine.
        rnd: chooses when requests come.
        wanted: prompts and their salts.
        faults: called behind the answer of this number.
    """
    left, live, seed, found, due = list(wanted), dict[int, Sequence](), 0, 0, dict(faults or {})
    num_answers = 0
    while left or live or core.has_unfinished():
        while left and len(live) < 6 and rnd.random() < 0.6:
            tokens, salt = left.pop()
            seed += 1
            params = SamplingParams(max_tokens=rnd.randint(1, 20), ignore_eos=True)
            seq = Sequence(tokens, SIZE, params, seed=seed, cache_salt=salt, arrive_time=time.monotonic())
            live[seq.id] = seq
            core.add_request(seq)
        # As if prompts took long, so that no wait ends on a busy machine.
        core.scheduler.meter.rate = 1e-3
        for out in core.step().outputs:
            if out.start is not None:
                found += out.start.cached_tokens
            if out.finished:
                seq = live.pop(out.request_id)
                assert isinstance(core.runner, SimulatedRunner)
                want = core.runner.reference(seq.prompt_token_ids, seq.max_tokens, seed=seq.seed)
                assert seq.completion_token_ids == want
                num_answers += 1
                due.pop(num_answers, lambda: None)()
        if not core.scheduler.in_flight:
            core.scheduler.check_integrity()
        if not rnd.randrange(40):
            core.scheduler.block_manager.flush()
    return found


@pytest.mark.parametrize("seed", slow_but({0, 1}, range(12)))
def test_answers_are_the_same_with_tiers_of_each_kind(tmp_path: Path, seed: int) -> None:
    rnd = random.Random(seed)
    memory = MemoryTier(6 * VALUE_BYTES, VALUE_BYTES)
    files = FileTier(tmp_path, 30 * VALUE_BYTES)
    core = engine({"memory": memory, "files": files}, rnd)
    run(core, rnd, prompts(rnd, REQUESTS))
    assert core.tiers is not None
    counts = core.tiers.store.counts()
    core.close()
    assert counts["memory", HIT] > 0
    assert counts["files", HIT] > 0
    assert not any(count for (_, result), count in counts.items() if result in (DAMAGED, FAILED))


@pytest.mark.parametrize("seed", slow_but({0, 1}, range(12)))
def test_tier_that_lies_changes_no_token_and_fails_no_request(seed: int) -> None:
    rnd = random.Random(seed)
    liar = Liar(random.Random(seed + 1), 0.1)
    core = engine({"liar": liar}, rnd)
    run(core, rnd, prompts(rnd, REQUESTS))
    assert core.tiers is not None
    counts = core.tiers.store.counts()
    core.close()
    assert counts["liar", DAMAGED] + counts["liar", FAILED] >= liar.lies > 0
    assert counts["liar", HIT] > 0


@pytest.mark.parametrize("seed", slow_but({0, 1}, range(12)))
def test_reported_granules_are_those_that_are_whole_in_host_memory(tmp_path: Path, seed: int) -> None:
    """Also behind blocks that came from a slower tier, and after a flush."""
    rnd, size = random.Random(seed), SIZE
    value_bytes = HEADER_BYTES + 16 * size
    memory = MemoryTier(40 * value_bytes, value_bytes)
    store = KvTiers({"memory": memory, "files": FileTier(tmp_path, 400 * value_bytes)}, 16 * size)
    config = Config(
        num_kvcache_blocks=60,
        kv_cache_block_size=size,
        max_model_len=50 * size,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        enable_prefix_caching=True,
    )
    runner = SimulatedRunner(VOCAB, None, block_size=size, num_blocks=60)
    core = EngineCore(config, runner, tiers=Tiers(store, root_name(["simulated"])))
    assert core.tiers is not None
    turns, seqs, reported, told = EngineTurns(core, time.monotonic), list[Sequence](), set[int](), 0
    shared = [[rnd.randrange(VOCAB) for _ in range(8 * size * n)] for n in (1, 2, 3)]

    def apply(changes: list[int]) -> int:
        count = 0
        for change in changes:
            granule = change if change >= 0 else ~change
            if granule >= IN_MEMORY:
                assert (granule in reported) == (change < 0)
                reported.symmetric_difference_update({granule})
                count += 1
        return count

    for _ in range(60):
        tokens = [*rnd.choice(shared), *(rnd.randrange(2) for _ in range(rnd.randint(1, 2 * size)))]
        seqs.append(Sequence(tokens, size, SamplingParams(max_tokens=8 * size, ignore_eos=True)))
        core.scheduler.meter.rate = 1e-3
        told += apply(turns.run([Submit(None, [seqs[-1]])]).granules)
        while turns.has_work and rnd.random() < 0.95:
            told += apply(turns.run([]).granules)
        if not rnd.randrange(20):
            told += apply(turns.run([Flush(lambda blocks: None)]).granules)
    while turns.has_work:
        told += apply(turns.run([]).granules)
    end = time.monotonic() + 60
    while store._num_unwritten:
        assert time.monotonic() < end
        time.sleep(0.001)
    told += apply(turns.report().granules)
    held = set[int]()
    for seq in seqs:
        full = seq.num_tokens // size
        names, hashes = core.tiers._names(seq, full), core.scheduler.block_manager.prefixes.hashes(seq)
        ends = range(GRANULE_BLOCKS, full + 1, GRANULE_BLOCKS)
        held |= {hashes[end - 1] | IN_MEMORY for end in ends if all(map(memory.has, names[end - GRANULE_BLOCKS : end]))}
    assert reported == held
    assert told > len(held) > 0
    core.close()


class Damages:
    """A tier in which one of 50 values is stored with another bit, or cut off.

    Attributes:
        is_damaging_all: True if readers get each value with another bit.
        wrong: names of wrong values that readers got.
        failed: errors of the tier.
    """

    def __init__(self, tier: KvTier, rnd: random.Random) -> None:
        self.tier = tier
        self.rnd = rnd
        self.right: dict[bytes, bytes] = {}
        self.num_stored = 0
        self.is_damaging_all = False
        # Several threads append.
        self.wrong: list[bytes] = []
        self.failed: list[Exception] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Notes the error of a call."""
        try:
            yield
        except Exception as error:
            self.failed.append(error)
            raise

    def get(self, name: bytes) -> bytes | None:
        with self.noted():
            value = self.tier.get(name)
        if value and self.is_damaging_all:
            value = bytes([value[0] ^ 1]) + value[1:]
        if value is not None and value != self.right[name]:
            self.wrong.append(name)
        return value

    def put(self, name: bytes, parent: bytes, value: bytes) -> bool:
        with self.noted():
            if self.tier.get(name) is not None:
                return True
            self.right[name] = value
            self.num_stored += 1
            if self.num_stored % 50 == 1:
                place = self.rnd.randrange(len(value))
                whole = self.rnd.random() < 0.5
                value = value[:place] + (bytes([value[place] ^ 1]) + value[place + 1 :] if whole else b"")
            return self.tier.put(name, parent, value)

    def drop(self, name: bytes) -> None:
        with self.noted():
            self.tier.drop(name)

    def close(self) -> None:
        self.tier.close()


def run_damaged(kind: str, tier: KvTier, seed: int, faults: Mapping[int, Callable[[], object]] | None = None) -> None:
    """Runs REQUESTS requests over a tier that is damaged; each wrong value and each error is counted."""
    rnd, before = random.Random(seed), set(threading.enumerate())
    damages = Damages(tier, random.Random(seed + 1))
    core, wanted = engine({kind: damages}, rnd), prompts(rnd, REQUESTS)
    run(core, rnd, wanted, faults)
    # Chance may have left all blocks that were damaged unread so far.
    damages.is_damaging_all = True
    core.scheduler.block_manager.flush()
    run(core, rnd, wanted[:20])
    assert core.tiers is not None
    store = core.tiers.store
    core.close()
    end = time.monotonic() + 60
    while any(thread.name.startswith("kv ") for thread in {*threading.enumerate()} - before):
        assert time.monotonic() < end
        time.sleep(0.01)
    counts = store.counts()
    found = {result: counts[kind, result] for result in (STORED, HIT, DAMAGED, FAILED)}
    print(f"{kind}: {REQUESTS} requests, no changed token, none failed; blocks {found}")
    assert found[HIT] > 0
    assert found[DAMAGED] == len(damages.wrong) > 0
    assert found[FAILED] == len(damages.failed)
    assert bool(damages.failed) == bool(faults)


# 3,000 requests over each.
@pytest.mark.parametrize("seed", slow_but({0}, range(10)))
def test_each_damaged_file_is_counted_and_changes_no_token(tmp_path: Path, seed: int) -> None:
    run_damaged("files", FileTier(tmp_path, 1 << 30), seed)


@pytest.mark.parametrize("seed", slow_but({0}, range(10)))
def test_each_fault_of_redis_is_counted_and_changes_no_token(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_tiers, "_TIMEOUT_S", 0.05)
    with running_redis(tmp_path) as server:
        faults: dict[int, Callable[[], object]] = {
            100: lambda: server.send(signal.SIGSTOP),
            110: lambda: server.send(signal.SIGCONT),
            200: lambda: server.send(signal.SIGKILL),
            210: server.start,
        }
        run_damaged("redis", RedisTier(server.url), seed, faults)


@pytest.mark.parametrize("sent", [signal.SIGSTOP, signal.SIGKILL])
def test_redis_that_hangs_or_dies_is_a_counted_failure(tmp_path: Path, sent: signal.Signals) -> None:
    with running_redis(tmp_path) as server:
        tiers = KvTiers({"redis": RedisTier(server.url)}, BLOCK_BYTES)
        server.send(sent)
        fetch = tiers.fetch([bytes(24)])
        end = time.monotonic() + 60
        while fetch is not None and not fetch.is_done:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert fetch is not None
        assert fetch.blocks == []
        assert tiers.counts()["redis", FAILED] == 1
        tiers.close()
