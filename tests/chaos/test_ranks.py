"""Ranks of a tensor-parallel worker that are killed and frozen while they compute: real processes, a real model.

The engine fails while its worker lives.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb
from fissile.worker.v1.worker_pb2_grpc import WorkerServiceStub

from tests.chaos.conftest import Report
from tests.chaos.scale import FULL, SCALE
from tests.chaos.support import until
from tests.checkpoints import make_checkpoint
from tests.e2e.service import Process, Service, free_port, generate, running_service
from tests.e2e.simulated import outcome, request, wait_workers
from tests.processes import is_alive
from worker.engine.core import EngineDeadError
from worker.llm_engine import LLMEngine, default_config
from worker.ranks.rank_client import RankGroup

OPTIONS = ["--tp-size", "2", "--kv-cache-memory", "16MiB", "--max-model-len", "1024", "--dtype", "float32"]
# A step of two ranks takes milliseconds here, so this is some seconds.
LONG = 900
# Long enough to be there when both workers compute.
MOVED = 500
# The wait for another worker included.
NOTICED_S = 60.0
RECOVERED_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def spare(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Process:
    """A second worker that the router knows of; not running."""
    folder, port = tmp_path_factory.mktemp("spare"), free_port()
    arguments = ["worker", "--model", str(model), "--model-name", "test", "--port", str(port), "--worker-id", "spare"]
    return Process("spare", [*arguments, *OPTIONS], port, folder / "spare.log", {"OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def service(model: Path, spare: Process, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    router = ["--worker", spare.address, "--worker-wait", "1s", "--placement", "round_robin"]
    with running_service(
        tmp_path_factory.mktemp("ranks"), model, worker_options=OPTIONS, router_options=router
    ) as running:
        wait_workers(running, 1)
        yield running


def rank_pids(worker: Process) -> dict[int, int]:
    """Process ids of the worker's ranks, by rank."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"worker.ranks.rank_process" in command and parent_of(folder) == worker.running.pid:
            found[int(command[command.index(b"worker.ranks.rank_process") + 1])] = int(folder.name)
    return found


def parent_of(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def description(worker: Process) -> wpb.GetWorkerResponse:
    with grpc.insecure_channel(worker.address) as channel:
        return WorkerServiceStub(channel).GetWorker(wpb.GetWorkerRequest(), timeout=60)


def ended(pids: list[int], within_s: float = 60.0) -> bool:
    """Whether none of the processes is left."""
    end = time.monotonic() + within_s
    while any(map(is_alive, pids)):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def streams(service: Service, pool: ThreadPoolExecutor) -> list[Future[tuple[grpc.StatusCode, int]]]:
    """Three long streams that have begun."""
    running = [pool.submit(outcome, service.stub, i, LONG) for i in range(3)]
    end = time.monotonic() + 60
    while service.worker_load().decoding_seqs < 3:
        assert time.monotonic() < end, "the streams have not begun"
    return running


def recover(service: Service, lost: wpb.GetWorkerResponse) -> None:
    """The worker serves again, as another instance with an empty cache, in the same numerics class."""
    worker = service.workers[0]
    worker.wait_serving()
    wait_workers(service, 1)
    found = description(worker)
    assert found.worker_id == lost.worker_id
    assert found.instance_id != lost.instance_id
    assert (found.state, found.tp_size, found.numerics) == (wpb.WORKER_STATE_SERVING, 2, lost.numerics)
    load = service.wait_idle()
    assert (load.decoding_seqs, load.free_blocks) == (0, load.total_blocks)


def lose(service: Service, sig: signal.Signals) -> list[tuple[grpc.StatusCode, int]]:
    """Sends a signal to rank 1 in the middle of three streams; how these end, and that health changes at once."""
    worker = service.workers[0]
    with ThreadPoolExecutor(3) as pool:
        running = streams(service, pool)
        os.kill(rank_pids(worker)[1], sig)
        began = time.monotonic()
        outcomes = [each.result() for each in running]
        assert time.monotonic() - began < NOTICED_S
    assert not worker.is_serving()
    assert worker.is_serving("liveness")
    assert description(worker).state != wpb.WORKER_STATE_SERVING
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_rank_of_only_worker_ends_requests_then_recovers(service: Service, sig: signal.Signals) -> None:
    """F1: a rank dies, or hangs, and there is no other worker in time: ABORTED, and the worker has another engine."""
    worker = service.workers[0]
    before = description(worker)
    expected = generate(service.stub, request(5, 32)).token_ids
    pids = rank_pids(worker)
    assert set(pids) == {0, 1}
    outcomes = lose(service, sig)
    assert all(code is grpc.StatusCode.ABORTED and 0 < tokens < LONG for code, tokens in outcomes)
    assert ended(list(pids.values()))
    recover(service, before)
    assert generate(service.stub, request(5, 32)).token_ids == expected
    lines = [line for line in worker.log.read_text().splitlines() if "engine failed" in line]
    how = "rank 1 (process" if sig is signal.SIGKILL else "rank 1 has been silent"
    assert how in lines[-1]


def sampled(i: int) -> pb.GenerateRequest:
    made = greedy(i) if i % 2 else request(i, 64)
    made.sampling_params.seed = i
    made.sampling_params.max_tokens = MOVED
    made.request_id = f"{i}-{time.monotonic()}"
    return made


@pytest.mark.slow
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP] if FULL else [signal.SIGKILL])
def test_streams_of_failed_engine_continue_elsewhere(
    service: Service, spare: Process, sig: signal.Signals, report: Report
) -> None:
    """F1: a rank dies, or hangs, in the middle of streams, greedy and seeded: they go on at the other worker, with the
    tokens of a run without the fault; nothing goes to the worker until it has another engine."""
    count = 2 * SCALE.engine_streams
    # Its engine, not the other worker's, which has been lost twice: three losses within a minute end a worker.
    spare.start()
    try:
        spare.wait_serving()
        wait_workers(service, 2)
        before = description(spare)
        with ThreadPoolExecutor(count) as pool:
            undisturbed = list(pool.map(lambda i: generate(service.stub, sampled(i)), range(count)))
            running = [pool.submit(generate, service.stub, sampled(i), 120) for i in range(count)]
            both = Service(service.router, [*service.workers, spare], service.channel)
            for index in range(2):
                until(lambda: both.worker_load(index).decoding_seqs >= count // 2, what="streams that run")  # noqa: B023
            begin = time.monotonic()
            os.kill(rank_pids(spare)[1], sig)
            got = [each.result() for each in running]
        moved = [a for a in got if a.finish is not None and a.finish.attempts > 1]
        took = time.monotonic() - begin
        report("F1", engine_lost_by=sig.name, streams=count, moved=len(moved), all_ended_after_s=took)
        assert len(moved) == count // 2
        assert {(a.finish.attempts, a.finish.worker_id) for a in moved if a.finish is not None} == {(2, "worker-0")}
        assert [(a.token_ids, a.text) for a in got] == [(a.token_ids, a.text) for a in undisturbed]
        assert all(a.finish is not None and a.finish.exact for a in got)
        assert "Traceback" not in service.router.log.read_text()
        wait_workers(service, 2, within_s=RECOVERED_S)
        assert description(spare).instance_id != before.instance_id
    finally:
        spare.stop(signal.SIGKILL)
    wait_workers(service, 1)


def test_two_ranks_give_same_tokens_as_one(service: Service, model: Path) -> None:
    engine = LLMEngine(default_config(model))
    for i in range(3):
        answer = generate(service.stub, greedy(i))
        alone = engine.generate([list(greedy(i).token_ids.ids)], {"temperature": 0.0, "max_tokens": 64})
        assert answer.token_ids == alone[0]["token_ids"]


@pytest.mark.slow
def test_llm_engine_on_ranks(model: Path) -> None:
    """With deferred output ranks launch steps ahead, and take the token that is in flight from their own last step."""
    prompts = [[7, 8, 9] * n for n in (1, 9, 40, 5)]
    steered = {"temperature": 0.7, "max_tokens": 24, "repetition_penalty": 1.2, "seed": 5, "ignore_eos": True}
    masked: dict[str, Any] = {
        "temperature": 0.0,
        "max_tokens": 30,
        "ignore_eos": True,
        "allowed_token_ids": (10, 11, 12, 13, 14),
    }
    masked |= {"logit_bias": {12: 3.0}, "bad_words_token_ids": ((12, 12), (11, 12), (12, 13), (13, 13), (10, 11, 10))}
    confined = {"constraint": {"regex": "[a-z]{2,5}(,[0-9]{2}){3,8}"}, "temperature": 0.8, "max_tokens": 30, "seed": 4}
    params: list[dict[str, Any]] = [steered, masked, {"temperature": 0.9, "max_tokens": 20, "seed": 3}, confined]
    expected = [answer["token_ids"] for answer in LLMEngine(default_config(model)).generate(prompts, params)]
    config = replace(default_config(model), tensor_parallel_size=2, deferred_output=True)
    engine = LLMEngine(config)
    assert isinstance(engine.core.executor, RankGroup)
    pids = list(engine.core.executor.pids.values())
    assert [answer["token_ids"] for answer in engine.generate(prompts, params)] == expected
    engine.close()
    assert ended(pids)
    with pytest.raises(EngineDeadError, match="the engine has ended its ranks"):
        engine.generate(prompts, params)


def greedy(i: int) -> pb.GenerateRequest:
    made = request(i, 64)
    made.sampling_params.temperature = 0.0
    return made


@pytest.mark.slow
def test_ranks_end_with_drained_worker(service: Service) -> None:
    worker = service.workers[0]
    pids = list(rank_pids(worker).values())
    calls = [service.stub.Generate(request(i, 100), timeout=60) for i in range(2)]
    firsts = [next(call) for call in calls]
    assert worker.stop(signal.SIGTERM) == 0
    for call, first in zip(calls, firsts, strict=True):
        assert sum(len(part.token_ids) for part in (first, *call)) == 100
    assert ended(pids)


def test_ranks_end_with_killed_worker(service: Service) -> None:
    worker = service.workers[0]
    if worker.running.poll() is not None:
        worker.start()
    end = time.monotonic() + 60
    while len(pids := rank_pids(worker)) < 2:
        assert time.monotonic() < end
        time.sleep(0.05)
    worker.stop(signal.SIGKILL)
    assert ended(list(pids.values()))
