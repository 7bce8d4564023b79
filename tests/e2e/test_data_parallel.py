"""Two workers in lockstep that share the experts of one model: their tokens, and the loss of a rank of one."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from fissile.worker.v1 import worker_pb2 as wpb
from fissile.worker.v1.worker_pb2_grpc import WorkerServiceStub

from common.config import ParallelConfig
from common.params.sampling_params import SamplingParams
from tests.chaos.support import until
from tests.checkpoints import make_checkpoint
from tests.e2e.service import Process, free_port, running
from worker.config.model_config import ModelConfig
from worker.engine.core import DPEngineCoreProc
from worker.engine.sequence import Sequence
from worker.llm_engine import LLMEngine, default_config
from worker.progress import StartProgress
from worker.ranks.rank_client import RankGroup
from worker.ranks.rank_setup import load_ranks
from worker.ranks.topology import Topology

pytestmark = pytest.mark.slow

PROMPTS = [[7 + i, 8, 9 + i, 10] * (3 + 5 * i) for i in range(6)]
GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_moe", num_hidden_layers=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logs, and blocks in files."""
    return tmp_path_factory.mktemp("workers")


@pytest.fixture(scope="module")
def workers(model: Path, folder: Path) -> Iterator[list[Process]]:
    meeting = f"tcp://127.0.0.1:{free_port()}"
    made = []
    for rank in range(2):
        port = free_port()
        options = [
            "worker",
            "--model",
            str(model),
            "--port",
            str(port),
            "--dtype",
            "float32",
            "--max-model-len",
            "2048",
        ]
        options += ["--kv-cache-memory", "16MiB", "--enable-expert-parallel", "--dist-init", meeting]
        options += ["--dp-size", "2", "--dp-rank", str(rank), "--kv-tiers", f"files:{folder / 'kv'}:64MiB"]
        made.append(Process(f"dp-{rank}", options, port, folder / f"dp-{rank}.log", {"OMP_NUM_THREADS": "1"}))
    with running(made):
        yield made


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return [answer["token_ids"] for answer in LLMEngine(default_config(model)).generate(PROMPTS, GREEDY)]


def generate(
    worker: Process,
    prompt: list[int],
    max_tokens: int = 24,
    begun: threading.Semaphore | None = None,
    cached: list[int] | None = None,
) -> list[int]:
    """Greedy tokens; `begun` is released with the first of them, and `cached` gets the number of cached tokens."""
    request = wpb.GenerateRequest(token_ids=prompt)
    params = wpb.SamplingParams(temperature=0.0, top_p=1.0, repetition_penalty=1.0, ignore_eos=True)
    params.max_tokens = max_tokens
    request.params.CopyFrom(params)
    tokens: list[int] = []
    with grpc.insecure_channel(worker.address) as channel:
        for part in WorkerServiceStub(channel).Generate(request, timeout=60):
            is_first = not tokens and len(part.token_ids) > 0
            if cached is not None and part.HasField("start"):
                cached.append(part.start.cached_tokens)
            tokens += part.token_ids
            if begun is not None and is_first:
                begun.release()
    return tokens


def instance(worker: Process) -> str:
    with grpc.insecure_channel(worker.address) as channel:
        return WorkerServiceStub(channel).GetWorker(wpb.GetWorkerRequest(), timeout=60).instance_id


def test_lockstep_engine_with_work_beside_idle_one(workers: list[Process], expected: list[list[int]]) -> None:
    """Worker 1 only makes dummy steps, then worker 0 does."""
    assert generate(workers[0], PROMPTS[0]) == expected[0]
    assert generate(workers[1], PROMPTS[3]) == expected[3]


def test_both_at_once(workers: list[Process], expected: list[list[int]]) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        running = [pool.submit(generate, workers[i % 2], prompt) for i, prompt in enumerate(PROMPTS)]
        assert [each.result() for each in running] == expected


def test_engine_in_lockstep_finds_blocks_of_the_other_in_files(workers: list[Process], folder: Path) -> None:
    """Former fault: it found its own. So each prompt is new to worker 1, which computes it if it reads files late.

    After three late reads it waits for no file for 30 s.
    """
    numbers = itertools.count()

    def is_found() -> bool:
        number = next(numbers)
        prompt = [16 + number % 300, 8 + number // 300, 9, 10] * 20
        num_files = len(list(folder.glob("kv/*/*.kv")))
        wanted = generate(workers[0], prompt)
        until(lambda: len(list(folder.glob("kv/*/*.kv"))) >= num_files + len(prompt) // 16)
        cached: list[int] = []
        assert generate(workers[1], prompt, cached=cached) == wanted
        return cached[0] > 0

    until(is_found, 180.0)


def test_lost_rank_restarts_whole_group(workers: list[Process], expected: list[list[int]]) -> None:
    before = [instance(worker) for worker in workers]
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(generate, worker, PROMPTS[0], 1900, begun) for worker in workers]
        assert all(begun.acquire(timeout=60) for _ in workers)
        (lost,) = ranks_of(workers[1])
        os.kill(lost, signal.SIGKILL)
        for each in running:
            error = each.exception()
            assert isinstance(error, grpc.Call)
            assert error.code() is grpc.StatusCode.INTERNAL
            assert "RankLostError: rank 0" in (error.details() or "")
    for worker in workers:
        worker.wait_serving()
    assert all(instance(worker) != old for worker, old in zip(workers, before, strict=True))
    assert generate(workers[0], PROMPTS[1]) == expected[1]


def test_drained_lockstep_engine_waits_for_other(workers: list[Process]) -> None:
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, workers[1], PROMPTS[0], 300, begun)
        assert begun.acquire(timeout=60)
        for worker in workers:
            worker.running.send_signal(signal.SIGTERM)
        assert len(running.result()) == 300
    assert [worker.running.wait(60) for worker in workers] == [0, 0]


def test_engines_in_lockstep_launch_ahead(model: Path, expected: list[list[int]]) -> None:
    """As on GPUs: tokens are the same, and each engine makes the steps of both."""
    meeting = f"tcp://127.0.0.1:{free_port()}"
    # Ranks end with the thread that started them.
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda rank: answers_ahead(model, meeting, rank), range(2)))
    assert found == [expected[:3], expected[3:]]


def answers_ahead(model: Path, meeting: str, rank: int) -> list[list[int]]:
    """The tokens of a half of the prompts, from one of two engines that launch steps ahead."""
    config = replace(
        default_config(model),
        dtype="float32",
        kv_cache_memory=1 << 24,
        enable_expert_parallel=True,
        parallel_config=ParallelConfig(2),
        deferred_output=True,
    )
    progress = StartProgress()
    group = RankGroup(Topology(dp_size=2, dp_rank=rank, dist_init=meeting), str(model), 1, progress)
    config, _ = load_ranks(group, config, ModelConfig.from_folder(model), progress)
    core = DPEngineCoreProc(config, group)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    mine = [Sequence(prompt, config.kv_cache_block_size, params) for prompt in PROMPTS[3 * rank : 3 * rank + 3]]
    try:
        for seq in mine[rank:]:
            core.add_request(seq)
        steps = 0
        while core.has_unfinished() or core.check():
            if rank and steps == 9:
                core.add_request(mine[0])
            core.step()
            steps += 1
        return [seq.completion_token_ids for seq in mine]
    finally:
        core.close()


def ranks_of(worker: Process) -> list[int]:
    children = Path(f"/proc/{worker.running.pid}/task").glob("*/children")
    return [int(child) for task in children for child in task.read_text().split()]
