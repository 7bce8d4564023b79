"""DPEngineCoreProc: engines that share experts make the same steps, each with its own requests; and DPMetadata."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.config import Config, ParallelConfig
from common.params.sampling_params import SamplingParams
from common.wire.block_hash import GRANULE_BLOCKS
from worker.engine import core as engine_core
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.core import DPEngineCoreProc, EngineDeadError
from worker.engine.executor import TimedOutput
from worker.engine.sequence import Sequence
from worker.engine.tier_lookups import Tiers, root_name
from worker.engine.turns import EngineTurns, Submit, TicketReceipt
from worker.kv_tiers.memory_tier import MemoryTier
from worker.kv_tiers.shared_tiers import FileTier
from worker.kv_tiers.tiers import HEADER_BYTES, HIT, STORED, KvTiers
from worker.model.forward_context import DPMetadata
from worker.model.sharding import Alone, DataParallel
from worker.session import engine_thread
from worker.session.engine_thread import EngineThread
from worker.simulation.runner import SimulatedRunner

ENGINES = 3


@dataclass
class Meeting:
    """A barrier for engines that are threads: every engine must arrive before any continues."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(ENGINES, timeout=60))
    said: dict[int, bool] = field(default_factory=dict)

    def count(self, rank: int, value: bool) -> int:
        self.said[rank] = value
        self.barrier.wait()
        answer = sum(self.said.values())
        self.barrier.wait()
        return answer


@dataclass
class Group:
    """An engine's ranks: a simulated model whose every step needs all engines."""

    rank: int
    rounds: Meeting
    steps: Meeting
    runner: SimulatedRunner = field(default_factory=lambda: SimulatedRunner(50, 49, num_blocks=64))
    made: list[str] = field(default_factory=list)
    lost: bool = False
    num_others_with_work: int = 0

    def count_engines_with_work(self, has_work: bool) -> int:
        if self.lost:
            self.rounds.barrier.abort()
        count = self.rounds.count(self.rank, has_work)
        self.num_others_with_work = count - has_work
        return count

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        self.steps.count(self.rank, True)
        self.made.append("dummy" if batch.is_dummy_run else "batch")
        return self.runner.forward(batch)

    def submit(self, batch: ScheduledBatch) -> Future[TimedOutput]:
        future: Future[TimedOutput] = Future()
        try:
            future.set_result(TimedOutput(self.forward(batch), 0.001))
        except Exception as error:
            future.set_exception(error)
        return future

    def failure(self) -> Exception | None:
        return None

    def close(self) -> None:
        pass


def engines(
    deferred: bool = False, tiers: Many[Tiers | None] = (None,) * ENGINES
) -> tuple[list[DPEngineCoreProc], list[Group]]:
    rounds, steps = Meeting(), Meeting()
    groups = [Group(rank, rounds, steps) for rank in range(ENGINES)]
    config = Config(
        num_kvcache_blocks=64,
        max_model_len=256,
        max_num_batched_tokens=64,
        eos_token_id=49,
        enable_expert_parallel=True,
        deferred_output=deferred,
        parallel_config=ParallelConfig(ENGINES),
        enable_prefix_caching=tiers[0] is not None,
    )
    made = zip(groups, tiers, strict=True)
    return [DPEngineCoreProc(config, group, lambda: 0.0, tiers=each) for group, each in made], groups


def requests(rank: int) -> list[Sequence]:
    """None at rank 0; some that begin at different rounds at the others."""
    rnd = random.Random(rank)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    return [Sequence([rnd.randrange(49)] * rnd.randrange(1, 90), 16, params) for _ in range(2 * rank)]


def turns(core: DPEngineCoreProc, mine: list[Sequence], count: int) -> None:
    """What the engine thread does, with a new request every fifth turn."""
    for turn in range(count):
        if turn % 5 == 0 and mine:
            core.add_request(mine.pop())
        if core.has_unfinished() or core.check():
            core.step()


def test_idle_lockstep_engines_synchronize_less_often() -> None:
    """Former fault: polls every 20 ms took 6 % of a core of each idle worker. All engines count the same rounds."""
    cores, _ = engines()
    with ThreadPoolExecutor(ENGINES) as pool:
        list(pool.map(lambda core: turns(core, [], engine_core._LOCKSTEP_AWAKE_ROUNDS - 1), cores))
        assert {core.idle_check_s for core in cores} == {0.02}
        list(pool.map(lambda core: turns(core, [], 1), cores))
        assert {core.idle_check_s for core in cores} == {0.1}
        mine = [[Sequence([3, 4], 16, SamplingParams(max_tokens=1, ignore_eos=True))], [], []]
        list(pool.map(lambda core, seqs: turns(core, seqs, 1), cores, mine))
        assert {core.idle_check_s for core in cores} == {0.0}
        assert [core.others_have_work for core in cores] == [False, True, True], "one without busy others may sleep"
        list(pool.map(lambda core: turns(core, [], 1), cores))
    assert {core.idle_check_s for core in cores} == {0.02}


@pytest.mark.parametrize("deferred", [False, True])
def test_every_engine_makes_every_step(deferred: bool) -> None:
    cores, groups = engines(deferred)
    mine = [requests(rank) for rank in range(ENGINES)]
    kept = [list(each) for each in mine]
    with ThreadPoolExecutor(ENGINES) as pool:
        list(pool.map(lambda rank: turns(cores[rank], mine[rank], 80), range(ENGINES)))
    lengths = {len(group.made) for group in groups}
    assert len(lengths) == 1
    assert set(groups[0].made) == {"dummy"}
    assert {"dummy", "batch"} == set(groups[1].made)
    assert lengths.pop() < 80, "rounds without work make no step"
    for group, seqs in zip(groups, kept, strict=True):
        for seq in seqs:
            assert seq.is_finished
            expected = group.runner.reference(seq.prompt_token_ids, 9, seed=seq.seed)
            assert seq.completion_token_ids == expected
    assert not any(core.others_have_work for core in cores)


@pytest.mark.parametrize("deferred", [False, True])
def test_lockstep_engine_finds_blocks_of_another_in_shared_tier(deferred: bool, tmp_path: Path) -> None:
    """Blocks also move in the dummy steps that an engine makes for the others."""
    size = SimulatedRunner(50, 49, num_blocks=64).kv_block_bytes
    stores = [KvTiers({"files": FileTier(tmp_path, 1 << 20)}, size) for _ in range(ENGINES)]
    cores, groups = engines(deferred, [Tiers(store, root_name(["simulated"])) for store in stores])
    end = time.monotonic() + 60

    def run_until(is_true: Callable[[], bool]) -> None:
        while not is_true():
            assert time.monotonic() < end
            list(pool.map(lambda core: turns(core, [], 3), cores))

    with ThreadPoolExecutor(ENGINES) as pool:
        for core in cores[1:]:
            seq = Sequence([7] * 40, 16, SamplingParams(max_tokens=9, ignore_eos=True), arrive_time=0.0)
            core.add_request(seq)
            run_until(lambda seq=seq: seq.is_finished)  # type: ignore[misc]
            run_until(lambda: stores[1].counts()["files", STORED] >= 2)
            assert seq.completion_token_ids == groups[1].runner.reference([7] * 40, 9, seed=seq.seed)
    assert [seq.num_cached_tokens, stores[2].counts()["files", HIT]] == [32, 2]
    for store in stores:
        store.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


class LateMemory(MemoryTier):
    """Host memory that keeps blocks once `may_write` is set."""

    def __init__(self, num_bytes: int, value_bytes: int) -> None:
        super().__init__(num_bytes, value_bytes)
        self.may_write = threading.Event()

    def put(self, name: bytes, parent: bytes, value: bytes) -> bool:
        return self.may_write.wait(60) and super().put(name, parent, value)


def test_idle_lockstep_engine_reports_blocks_that_memory_gets_late() -> None:
    """Former fault: with every engine idle, routers did not hear of granules that were written after the last step."""
    size = SimulatedRunner(50, 49, num_blocks=64).kv_block_bytes
    memory = LateMemory(1 << 20, size + HEADER_BYTES)
    store = KvTiers({"memory": memory}, size)
    cores, _ = engines(tiers=[Tiers(store, root_name(["simulated"])), None, None])
    reporter = EngineTurns(cores[0], lambda: 0.0)
    seq = Sequence([7] * (16 * GRANULE_BLOCKS + 1), 16, SamplingParams(max_tokens=2, ignore_eos=True), arrive_time=0.0)
    cores[0].add_request(seq)
    end = time.monotonic() + 60
    with ThreadPoolExecutor(ENGINES) as pool:
        while not seq.is_finished or cores[0].idle_check_s == 0.0:
            assert time.monotonic() < end
            list(pool.map(lambda core: turns(core, [], 3), cores))
        reporter.report()
        memory.may_write.set()
        until(lambda: store.has_memory_changes)
        assert list(pool.map(lambda core: core.check(), cores)) == [True, False, False]
        assert len(reporter.run([]).granules) == 1
        assert list(pool.map(lambda core: core.check(), cores)) == [False] * ENGINES
    store.close()


class NoListener:
    """Hears of no step."""

    def on_step(self, step: int, submit_seen: int | None) -> None:
        pass


class AbsentTier:
    """A tier that says nothing of a block until `answers` is set, and then that it has none."""

    def __init__(self) -> None:
        self.is_asked = threading.Event()
        self.answers = threading.Event()

    def get(self, name: bytes) -> bytes | None:
        self.is_asked.set()
        assert self.answers.wait(120)
        return None

    def put(self, name: bytes, parent: bytes, value: bytes) -> bool:
        return False

    def drop(self, name: bytes) -> None:
        pass

    def close(self) -> None:
        pass


def test_lockstep_engine_that_waits_for_tier_sleeps_unless_others_have_work() -> None:
    """Former faults: it slept in each round, so the others waited for it; and it never slept, and took a whole core."""
    tier, size = AbsentTier(), SimulatedRunner(50, 49, num_blocks=64).kv_block_bytes
    store = KvTiers({"absent": tier}, size)
    cores, groups = engines(tiers=[Tiers(store, root_name(["simulated"])), None, None])
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    waiting, decoding = Sequence([7] * 40, 16, params, arrive_time=0.0), Sequence([8] * 20, 16, params)
    cores[0].add_request(waiting)
    failures, slept_beside = list[Exception](), list[int]()

    class Thread(EngineThread):
        def _wait(self, timeout_s: float) -> bool:
            if timeout_s == engine_thread._GATED_WAIT_S:
                slept_beside.append(groups[threads.index(self)].num_others_with_work)
            return super()._wait(timeout_s)

    threads = [
        Thread([core].pop, started=lambda _: None, turned=lambda _: None, failed=failures.append, clock=time.monotonic)
        for core in cores
    ]
    for thread in threads:
        thread.start()
    assert tier.is_asked.wait(60)
    until(lambda: bool(slept_beside or failures))
    threads[1].put(Submit(TicketReceipt(NoListener(), 1), [decoding]))
    until(lambda: decoding.is_finished or bool(failures))
    assert not failures
    assert not waiting.num_completion_tokens
    tier.answers.set()
    until(lambda: waiting.is_finished or bool(failures))
    assert not failures
    for thread in threads:
        thread.stop()
    groups[0].rounds.barrier.abort()
    groups[0].steps.barrier.abort()
    assert all(thread.join(60) for thread in threads)
    assert set(slept_beside) == {0}


def test_lost_lockstep_engine_fails_others() -> None:
    cores, groups = engines()
    groups[2].lost = True

    def run(rank: int) -> None:
        with pytest.raises(EngineDeadError, match="BrokenBarrierError"):
            turns(cores[rank], requests(rank), 10)
        with pytest.raises(EngineDeadError):
            cores[rank].step()

    with ThreadPoolExecutor(ENGINES) as pool:
        list(pool.map(run, range(ENGINES)))


@given(st.lists(st.integers(1, 500), min_size=1, max_size=5), st.integers(1, 100))
def test_chunks_cover_each_engines_rows_once(counts: list[int], most: int) -> None:
    metadata = DPMetadata.make(list(counts))
    assert metadata.max_tokens_across_dp == max(counts)
    assert metadata.cu_tokens_across_dp[0] == 0
    assert metadata.cu_tokens_across_dp[-1] == sum(counts)
    seen = [0] * len(counts)
    for chunk in range(-(-metadata.max_tokens_across_dp // most)):
        with metadata.chunked_sizes(most, chunk) as sizes:
            assert metadata.local_sizes is sizes
            assert max(sizes) > 0
            assert all(0 <= size <= most for size in sizes)
            seen = [a + b for a, b in zip(seen, sizes, strict=True)]
    assert seen == counts
    assert metadata.local_sizes == counts


def test_every_engine_receives_row_counts_of_all() -> None:
    class Others(Alone):
        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tensor([16.0, 0.0, 2048.0])

    data = DataParallel(1, 3, Others(), Alone())
    assert DPMetadata.num_tokens_across_dp(32, data) == [16, 32, 2048]
