"""Planted causes of a slow request over real processes: its ledger finds them and blames the right request.

Whether a request is still running when its cause is planted depends on the machine, so a test asks again until it was.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fissile.client import AsyncClient
from fissile.client.messages import REQUEST_START, clock_name
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub

from common.rpc.durations import to_seconds
from common.telemetry.names import Stage
from tests.chaos.proxy import proxied
from tests.chaos.support import client_of, log_entries, until
from tests.e2e.fake_worker import FakeWorker
from tests.e2e.router_bench import FILES, SMALL_WINDOW, bench, collect, request, running
from tests.e2e.router_bench import until as until_true
from tests.e2e.service import Answer, Process, Service, free_port, generate, running_service
from tests.e2e.service import running as running_processes
from tests.e2e.simulated import simulated_model

# Steps of 1.3 ms; a prompt of 30,000 tokens takes a good 200 ms.
SIMULATED = ["--simulate", "mi300x-qwen3-0.6b"]
MAX_MODEL_LEN = 40_000


def _request(name: str, prompt: int, answer: int) -> pb.GenerateRequest:
    # Prompts of two requests share no prefix.
    first = sum(name.encode())
    ids = [(first + i * 7) % 250 for i in range(prompt)]
    made = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), request_id=name)
    made.sampling_params.max_tokens = answer
    made.sampling_params.ignore_eos = True
    return made


def _parts(answer: Answer) -> dict[str, pb.TimePart]:
    """Parts of an answer, which add up to its time."""
    assert answer.finish is not None
    timings = answer.finish.timings
    total = sum(to_seconds(part.duration) for part in timings.parts) + to_seconds(timings.unexplained)
    assert total == pytest.approx(to_seconds(timings.total), abs=1e-3)
    assert to_seconds(timings.unexplained) == 0
    return {part.stage: part for part in timings.parts}


def _beside(stub: InferenceServiceStub, mine: pb.GenerateRequest, plant: Callable[[], None]) -> Answer:
    """The answer to `mine`; plants a cause after its first message."""
    answer = Answer()
    for part in stub.Generate(mine, timeout=120):
        answer.add(part)
        if answer.messages == 1:
            plant()
    assert answer.finish is not None
    return answer


def _until_planted(attempt: Callable[[int], bool]) -> None:
    """Tries until the cause came in time."""
    end, number = time.monotonic() + 60, 0
    while not attempt(number):
        number += 1
        assert time.monotonic() < end, "the cause never came while the request ran"


@contextmanager
def _service(folder: Path, *options: str, workers: int = 1) -> Iterator[Service]:
    model = simulated_model(folder / "model", MAX_MODEL_LEN)
    with running_service(folder, model, workers=workers, worker_options=[*SIMULATED, *options]) as service:
        yield service


@pytest.mark.proto_field(
    "Timings.parts",
    "Timings.unexplained",
    "TimePart.stage",
    "TimePart.duration",
    "TimePart.blame",
    "Blame.request_id",
    "Blame.duration",
    "Blame.is_other_tenant",
)
def test_neighbours_long_prompt_is_found_and_blamed(tmp_path: Path) -> None:
    """By its id for a request of the same tenant; the id of another tenant's is in the router's log alone."""
    with _service(tmp_path) as service, ThreadPoolExecutor(1) as pool:

        def attempt(number: int, tenant: str) -> bool:
            long, asked = _request(f"long-{tenant}-{number}", 30_000, 1), list[Future[Answer]]()

            def plant() -> None:
                asked.append(pool.submit(generate, service.stub, long, metadata=(("x-fissile-tenant", tenant),)))

            mine = _beside(service.stub, _request(f"mine-{tenant}-{number}", 20, 400), plant)
            alone = _parts(asked[0].result())
            part = _parts(mine).get(Stage.OTHERS_PREFILL)
            if part is None:
                return False
            known = "" if tenant else long.request_id
            assert (part.blame.is_other_tenant, part.blame.request_id) == (bool(tenant), known)
            assert to_seconds(part.blame.duration) <= to_seconds(part.duration)
            line = _line(service, f"mine-{tenant}-{number}")
            assert {Stage.WIRE, Stage.PREFILL, Stage.DECODE} <= set(line["parts_ms"])
            blamed = line["blamed"][Stage.OTHERS_PREFILL]
            assert (blamed["request_id"], blamed["tenant"]) == (long.request_id, tenant)
            return to_seconds(part.duration) >= to_seconds(alone[Stage.PREFILL].duration) / 2

        for tenant in ("", "reports"):
            _until_planted(partial(attempt, tenant=tenant))
        _check_answer_that_the_router_ends(service.stub)


def _line(service: Service, request_id: str) -> dict[str, Any]:
    """The line of an ended request in the router's log, once it is there."""
    found: list[dict[str, Any]] = []

    def is_there() -> bool:
        found[:] = [each for each in log_entries(service.router) if each.get("request_id") == request_id]
        return bool(found)

    until(is_there)
    return found[-1]


def _check_answer_that_the_router_ends(stub: InferenceServiceStub) -> None:
    """The router finds a stop string, and the worker's end comes too late for the finish."""
    stopped = _request("stopped", 20, 2000)
    stopped.sampling_params.stop_strings.extend("aeiou")
    stopped.sampling_params.min_tokens = 100
    answer = generate(stub, stopped)
    assert answer.finish is not None
    assert answer.finish.stop.stop_string
    parts = _parts(answer)
    assert {Stage.WIRE, Stage.PREFILL, Stage.DECODE, Stage.DETOKENIZE} <= parts.keys()
    assert max(parts.values(), key=lambda part: to_seconds(part.duration)).stage == Stage.DECODE


@pytest.mark.slow
def test_full_worker_is_found_and_its_request_blamed(tmp_path: Path) -> None:
    with _service(tmp_path, "--max-num-seqs", "1") as service, ThreadPoolExecutor(1) as pool:

        def attempt(number: int) -> bool:
            second: list[Future[Answer]] = []

            def plant() -> None:
                second.append(pool.submit(generate, service.stub, _request(f"second-{number}", 5, 1)))

            _beside(service.stub, _request(f"first-{number}", 20, 300), plant)
            parts = _parts(second[0].result())
            waits = [parts[stage] for stage in (Stage.OWN_QUEUE, Stage.WORKER_QUEUE) if stage in parts]
            largest = max(parts.values(), key=lambda part: to_seconds(part.duration))
            if largest not in waits:
                return False
            return largest.blame.request_id == f"first-{number}"

        _until_planted(attempt)


@pytest.mark.parametrize("unit", [1, 1e3, 1e6])
async def test_way_to_the_router_is_inbound_if_the_client_says_when_it_called(unit: float) -> None:
    async with bench(FakeWorker(FILES)) as b:
        own, other = f"t={{:f}};clock={clock_name()}", "t={:f};clock=0123456789abcdef"
        known = [(5.0, written) for written in ("t={:f}", "{:.0f}", own)]
        unknown = [(3600.0, "t={:f}"), (-5.0, "t={:f}"), (3600.0, own), (-5.0, own), (5.0, other), (0.0, "soon")]
        for age_s, written in (*known, *unknown):
            sent = ((REQUEST_START, written.format((time.time() - age_s) * unit)),)
            finish = (await collect(b.stub.Generate(request(), metadata=sent)))[-1].finish
            parts = {part.stage: to_seconds(part.duration) for part in finish.timings.parts}
            inbound = parts.pop(Stage.INBOUND, 0.0)
            assert inbound >= 3.9 if (age_s, written) in known else inbound == 0
            total = sum(parts.values()) + to_seconds(finish.timings.unexplained)
            assert total == pytest.approx(to_seconds(finish.timings.total), abs=1e-3)


async def test_python_client_on_the_same_machine_says_when_it_called() -> None:
    async with bench(FakeWorker(FILES)) as b, AsyncClient(b.router.server.address) as client:
        for metadata, least_s in (((), 0.0), ({REQUEST_START: f"t={time.time() - 5:f}"}, 3.9)):
            finish = (await client.generate("say", max_tokens=2, metadata=metadata)).answers[0].finish
            assert finish is not None
            (inbound,) = [part for part in finish.timings.parts if part.stage == Stage.INBOUND]
            assert to_seconds(inbound.duration) > least_s


async def test_client_that_stops_reading_is_found() -> None:
    pause_s = 0.2
    worker = FakeWorker(FILES, tokens_per_step=2048, max_model_len=2_000_000)
    # More text than fits in the buffers on the way.
    async with bench(worker, max_unread_tokens=1 << 30) as b, b.another_client(SMALL_WINDOW) as client:
        slow = client.Generate(request(params={"max_tokens": 100_000}))
        await slow.read()
        await until_true(lambda: not running(b.router) and not worker.running)
        await asyncio.sleep(pause_s)
        timings = (await collect(slow))[-1].finish.timings
        waited = {part.stage: to_seconds(part.duration) for part in timings.parts}[Stage.CLIENT_WAIT]
        assert waited >= pause_s


@pytest.mark.slow
def test_frozen_worker_is_found(tmp_path: Path) -> None:
    with _service(tmp_path, workers=2) as service:

        def attempt(number: int) -> bool:
            frozen = []

            def plant() -> None:
                for worker in service.workers:
                    if service.worker_load(service.workers.index(worker)).decoding_seqs:
                        worker.running.send_signal(signal.SIGSTOP)
                        frozen.append(worker)

            answer = _beside(service.stub, _request(f"mine-{number}", 20, 3000), plant)
            for worker in frozen:
                worker.running.send_signal(signal.SIGCONT)
            assert answer.finish is not None
            if answer.finish.attempts == 1:
                return False
            parts = _parts(answer)
            assert Stage.DECODE in parts
            return to_seconds(parts[Stage.RECOVERING].duration) > 1.0

        _until_planted(attempt)
        until(lambda: all(worker.is_serving() for worker in service.workers))


@pytest.mark.slow
def test_worker_frozen_for_a_moment_is_a_stall(tmp_path: Path) -> None:
    frozen_s = 0.5
    with _service(tmp_path) as service:
        worker = service.workers[0].running

        def plant() -> None:
            worker.send_signal(signal.SIGSTOP)
            time.sleep(frozen_s)
            worker.send_signal(signal.SIGCONT)

        def attempt(number: int) -> bool:
            answer = _beside(service.stub, _request(f"mine-{number}", 20, 300), plant)
            assert answer.finish is not None
            parts = _parts(answer)
            stall = parts.get(Stage.STALL, pb.TimePart())
            return answer.finish.attempts == 1 and to_seconds(stall.duration) >= frozen_s / 2

        _until_planted(attempt)


@pytest.mark.slow
def test_slow_network_is_found_on_the_wire(tmp_path: Path) -> None:
    delay_s = 0.3
    with _service(tmp_path) as service, proxied(service.workers[0].port) as proxy:
        port = free_port()
        options = ["router", "--port", str(port), "--worker", f"127.0.0.1:{proxy.port}"]
        router = Process("far", options, port, tmp_path / "far.log", {"FISSILE_LOG_LEVEL": "info"})
        with running_processes([router]), client_of(router) as stub:
            until(lambda: stub.GetModel(pb.GetModelRequest(), timeout=60).model.ready_workers == 1)
            proxy.delay_s = delay_s
            parts = _parts(generate(stub, _request("mine", 20, 20)))
            largest = max(parts.values(), key=lambda part: to_seconds(part.duration))
            assert largest.stage == Stage.WIRE
            # There and back.
            assert to_seconds(largest.duration) >= 2 * delay_s


@pytest.mark.slow
def test_preemption_is_found_and_the_sequence_with_the_blocks_blamed(tmp_path: Path) -> None:
    # A pool of little more than one sequence.
    model = simulated_model(tmp_path / "model", 4096)
    options = [*SIMULATED, "--gpu-memory-utilization", "0.009"]
    with (
        running_service(tmp_path, model, worker_options=options) as service,
        ThreadPoolExecutor(1) as pool,
    ):

        def attempt(number: int) -> bool:
            mine = _request(f"mine-{number}", 1500, 1000)
            asked: list[Future[Answer]] = []
            plant = lambda: asked.append(pool.submit(generate, service.stub, mine))  # noqa: E731
            _beside(service.stub, _request(f"older-{number}", 2000, 2000), plant)
            part = _parts(asked[0].result()).get(Stage.PREEMPTED)
            return part is not None and part.blame.request_id == f"older-{number}"

        _until_planted(attempt)


@pytest.mark.slow
def test_neighbours_are_found_and_one_is_blamed(tmp_path: Path) -> None:
    # Each sequence makes a step longer.
    with _service(tmp_path) as service, ThreadPoolExecutor(32) as pool:

        def attempt(number: int) -> bool:
            others = [_request(f"other-{number}-{i}", 2000, 500) for i in range(32)]
            asked: list[Future[Answer]] = []
            plant = lambda: asked.extend(pool.submit(generate, service.stub, each) for each in others)  # noqa: E731
            mine = _beside(service.stub, _request(f"mine-{number}", 20, 1000), plant)
            for future in asked:
                future.result()
            part = _parts(mine).get(Stage.NEIGHBOURS)
            return part is not None and part.blame.request_id in {each.request_id for each in others}

        _until_planted(attempt)
