"""Workers and routers that are killed, frozen, drained and restarted under load.

Each docstring begins with the code of its fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import grpc
import pytest
from fissile.admin.v1 import admin_pb2 as apb
from fissile.admin.v1.admin_pb2_grpc import AdminServiceStub
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub

from router.app import Router
from router.options import RouterOptions
from tests.chaos.conftest import Report
from tests.chaos.proxy import proxied
from tests.chaos.scale import SCALE
from tests.chaos.support import log_entries
from tests.e2e.service import REPOSITORY, Answer, Process, Service, free_port, generate, running_service
from tests.e2e.simulated import OPTIONS, outcome, request, wait_workers
from tests.fake_dns import wait_until

DEMO = REPOSITORY / "deploy" / "demo" / "checkpoint"


def answers(service: Service, requests: Sequence[pb.GenerateRequest]) -> list[Answer]:
    """Runs all at once to their ends."""
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda asked: generate(service.stub, asked), requests))


def disturbed(service: Service, requests: Sequence[pb.GenerateRequest], fault: Callable[[], object]) -> list[Answer]:
    """As `answers`, with a fault when all have begun; raises what the fault raises."""
    begun = threading.Semaphore(0)

    def ask(asked: pb.GenerateRequest) -> Answer:
        answer = Answer()
        for part in service.stub.Generate(asked, timeout=60):
            answer.add(part)
            if answer.messages == 1:
                begun.release()
        assert answer.finish is not None
        return answer

    def disturb() -> None:
        assert all(begun.acquire(timeout=60) for _ in requests)
        fault()

    with ThreadPoolExecutor(len(requests) + 1) as pool:
        disturbing = pool.submit(disturb)
        got = list(pool.map(ask, requests))
        disturbing.result()
    return got


def restart(worker: Process) -> None:
    worker.start()
    worker.wait_serving()


def seeded(i: int, max_tokens: int) -> pb.GenerateRequest:
    """Every other one greedy, the others sampled with a seed; stop strings that do not come."""
    made = request(i, max_tokens)
    made.request_id = f"{i}-{random.random()}"
    made.sampling_params.temperature = 0.9 if i % 2 else 0.0
    made.sampling_params.seed = 1000 + i
    made.sampling_params.stop_strings.append("\x01never\x01")
    return made


def attempts(got: Sequence[Answer]) -> set[int]:
    """Numbers of attempts that the answers took."""
    return {answer.finish.attempts for answer in got if answer.finish is not None}


def assert_same(got: Sequence[Answer], undisturbed: Sequence[Answer]) -> None:
    for one, other in zip(got, undisturbed, strict=True):
        assert one.token_ids == other.token_ids
        assert one.text == other.text
        assert one.finish is not None
        assert other.finish is not None
        assert one.finish.reason == other.finish.reason
        assert one.finish.usage.completion_tokens == other.finish.usage.completion_tokens
        assert one.finish.exact


def assert_all_move(service: Service, undisturbed: Sequence[Answer], fault: Callable[[], object]) -> None:
    """Each of six streams has a second attempt behind a fault; the fault comes again where some had ended before it."""
    for _ in range(5):
        got = disturbed(service, [seeded(i, 250) for i in range(6)], fault)
        assert_same(got, undisturbed)
        assert attempts(got) <= {1, 2}
        if attempts(got) == {2}:
            return
    raise AssertionError("some streams had ended before each of five faults")


def test_f1_killed_worker_costs_no_stream_a_token(fleet: Service, report: Report) -> None:
    """F1: SIGKILL in the middle of streams: all complete, with the tokens of a run without the fault."""
    undisturbed = answers(fleet, [seeded(i, SCALE.f1_tokens) for i in range(SCALE.f1_streams)])
    # On a busy machine streams may have ended before the worker is killed.
    for _ in range(5):
        got = disturbed(
            fleet,
            [seeded(i, SCALE.f1_tokens) for i in range(SCALE.f1_streams)],
            lambda: fleet.workers[1].stop(signal.SIGKILL),
        )
        assert_same(got, undisturbed)
        moved = [a for a in got if a.finish is not None and a.finish.attempts == 2]
        assert all(a.finish is not None and a.finish.worker_id != "worker-1" for a in moved)
        wait_workers(fleet, 2)
        restart(fleet.workers[1])
        begin = time.monotonic()
        wait_workers(fleet, 3)
        if len(moved) >= 5:
            break
    assert len(moved) >= 5
    report("F1", streams=len(got), moved=len(moved), back_after_s=time.monotonic() - begin)
    for index in range(3):
        load = fleet.wait_idle(index)
        assert (load.decoding_seqs, load.free_blocks) == (0, load.total_blocks)


@pytest.mark.slow
def test_f1_with_a_real_model(tmp_path: Path) -> None:
    """F1: the demo model: a killed worker's streams, greedy and seeded, go on with the same tokens and text."""

    def asked(i: int) -> pb.ChatRequest:
        params = pb.SamplingParams(temperature=0.8 if i % 2 else 0.0, seed=i, max_tokens=200, ignore_eos=True)
        params.repetition_penalty = 1.1
        question = pb.ChatMessage(role="user", content=f"Tell me a story about {i} foxes.")
        made = pb.ChatRequest(messages=[question], sampling_params=params)
        made.output_options.return_token_ids = True
        return made

    begun = threading.Semaphore(0)

    def ask(stub: InferenceServiceStub, i: int) -> Answer:
        answer = Answer()
        for part in stub.Chat(asked(i), timeout=60):
            answer.add(part)
            if answer.messages == 2:
                begun.release()
        return answer

    options = ["--threads", "1"]
    with running_service(tmp_path, DEMO, workers=2, worker_options=options) as service:
        wait_workers(service, 2)
        with ThreadPoolExecutor(6) as pool:
            undisturbed = list(pool.map(lambda i: ask(service.stub, i), range(6)))
            # On a busy machine streams may have ended before the worker is killed.
            for _ in range(5):
                begun = threading.Semaphore(0)
                running = [pool.submit(ask, service.stub, i) for i in range(6)]
                assert all(begun.acquire(timeout=60) for _ in running)
                busiest = max(range(2), key=lambda index: service.worker_load(index).decoding_seqs)
                service.workers[busiest].stop(signal.SIGKILL)
                got = [f.result() for f in running]
                assert_same(got, undisturbed)
                if 2 in attempts(got):
                    break
                restart(service.workers[busiest])
                wait_workers(service, 2)
    assert 2 in attempts(got)


@pytest.mark.slow
def test_f2_rolling_restart_costs_no_request(fleet: Service, report: Report) -> None:
    """F2: SIGTERM of one worker after the other under load: no failed request, exit code 0, soon."""
    stop = threading.Event()
    outcomes: list[tuple[grpc.StatusCode, int]] = []

    def client(i: int) -> None:
        rnd = random.Random(i)
        while not stop.is_set():
            outcomes.append(outcome(fleet.stub, rnd.randrange(10**6, 10**9), 60))

    threads = [threading.Thread(target=client, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    long = [seeded(100 + i, 700) for i in range(3)]
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(generate, fleet.stub, asked) for asked in long]
        time.sleep(0.3)
        stopped_s: list[float] = []
        for worker in fleet.workers[:2] * SCALE.f2_restarts:
            begin = time.monotonic()
            assert worker.stop(signal.SIGTERM) == 0
            stopped_s.append(time.monotonic() - begin)
            restart(worker)
            wait_workers(fleet, 3)
        results = [f.result() for f in running]
    stop.set()
    for thread in threads:
        thread.join()
    report("F2", restarts=len(stopped_s), requests=len(outcomes) + len(long), slowest_stop_s=max(stopped_s))
    # Handed over, not waited for.
    assert any(entry.get("loss") == "drained" for entry in log_entries(fleet.router))
    assert len(outcomes) > 10
    assert set(outcomes) == {(grpc.StatusCode.OK, 60)}
    assert_same(results, answers(fleet, long_again(long)))


@pytest.mark.slow
def test_f2_drain_rpc_moves_streams_and_ends_worker(model: Path, tmp_path: Path, report: Report) -> None:
    """F2: DrainWorker does what SIGTERM does: the streams go on elsewhere, nothing new goes there, and the worker ends
    with exit code 0."""
    port = free_port()
    # So that each worker has half of the streams.
    options = ["--admin-port", str(port), "--placement", "round_robin"]
    with running_service(tmp_path, model, workers=2, worker_options=OPTIONS, router_options=options) as service:
        wait_workers(service, 2)
        # So long that none ends before the workers are listed, on a busy machine too.
        asked = [seeded(i, 1500) for i in range(6)]
        undisturbed = answers(service, long_again(asked))
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            admin = AdminServiceStub(channel)

            def drain() -> None:
                before = admin.ListWorkers(apb.ListWorkersRequest(), timeout=60).workers
                assert [w.state for w in before] == [apb.WORKER_STATE_SERVING] * 2
                assert sum(w.running for w in before) == 6
                assert admin.DrainWorker(apb.DrainWorkerRequest(worker_id="worker-0"), timeout=60).sequences == 3
                told = logged(service.workers[0], "draining")
                heard = logged(service.router, "worker draining")
                # Whatever the machine's load, what comes after that goes elsewhere.
                after = [generate(service.stub, seeded(900 + i, 4)) for i in range(8)]
                assert {a.finish.worker_id for a in after if a.finish is not None} == {"worker-1"}
                report("F2", router_knew_after_ms=1000 * (heard - told))

            assert_same(disturbed(service, asked, drain), undisturbed)
            assert service.workers[0].running.wait(60) == 0
            listed = admin.ListWorkers(apb.ListWorkersRequest(), timeout=60).workers
            gone, left = sorted(listed, key=lambda worker: worker.worker_id)
            assert (left.worker_id, left.running) == ("worker-1", 0)
            assert (gone.address, gone.state) == (service.workers[0].address, apb.WORKER_STATE_UNCONNECTED)
            with pytest.raises(grpc.RpcError, match="no worker is called 'worker-0'; workers: worker-1"):
                admin.DrainWorker(apb.DrainWorkerRequest(worker_id="worker-0"), timeout=60)


def logged(process: Process, event: str, within_s: float = 60.0) -> float:
    """When a process logged an event, in seconds since 1970; waits for it."""
    end = time.monotonic() + within_s
    while True:
        for entry in log_entries(process):
            if entry["event"] == event:
                return datetime.fromisoformat(entry["ts"]).timestamp()
        assert time.monotonic() < end, f"{process.name} has not logged {event!r}"
        time.sleep(0.01)


@pytest.mark.slow
def test_draining_worker_hands_over_to_new_worker(model: Path, tmp_path: Path) -> None:
    """F2: the last worker drains; when its successor serves, the streams move there and the old one ends."""
    with running_service(tmp_path, model, workers=2, worker_options=OPTIONS) as service:
        wait_workers(service, 2)
        old, successor = service.workers
        asked = [seeded(i, 600) for i in range(4)]
        undisturbed = answers(service, long_again(asked))
        successor.stop(signal.SIGKILL)
        wait_workers(service, 1)

        def replace() -> None:
            old.running.send_signal(signal.SIGTERM)
            restart(successor)
            assert old.running.wait(60) == 0

        assert_same(disturbed(service, asked, replace), undisturbed)


def long_again(requests: Sequence[pb.GenerateRequest]) -> list[pb.GenerateRequest]:
    """The same requests under new ids."""
    made = []
    for asked in requests:
        again = pb.GenerateRequest()
        again.CopyFrom(asked)
        again.request_id += "-again"
        made.append(again)
    return made


def test_f3_frozen_worker_is_given_up_and_taken_back(fleet: Service, report: Report) -> None:
    """F3: SIGSTOP: its streams go on elsewhere within seconds; after SIGCONT it is taken back."""
    frozen = fleet.workers[0]
    undisturbed = answers(fleet, [seeded(i, 300) for i in range(9)])
    # On a busy machine streams may have ended before the worker is frozen.
    for _ in range(5):
        begin = time.monotonic()
        try:
            asked = [seeded(i, 300) for i in range(9)]
            got = disturbed(fleet, asked, lambda: frozen.running.send_signal(signal.SIGSTOP))
            assert_same(got, undisturbed)
            wait_workers(fleet, 2)
            assert {outcome(fleet.stub, 100 + i, 8)[0] for i in range(6)} == {grpc.StatusCode.OK}
            time.sleep(max(0.0, begin + SCALE.f3_frozen_s - time.monotonic()))
        finally:
            frozen.running.send_signal(signal.SIGCONT)
        thawed = time.monotonic()
        wait_workers(fleet, 3)
        if 2 in attempts(got):
            break
    assert 2 in attempts(got)
    report("F3", frozen_s=thawed - begin, back_after_s=time.monotonic() - thawed)
    load = fleet.wait_idle(0)
    assert (load.decoding_seqs, load.free_blocks) == (0, load.total_blocks)


@pytest.mark.slow
def test_f4_black_hole_and_broken_connections(model: Path, tmp_path: Path) -> None:
    """F4: a broken connection is taken up again; one that forwards nothing is given up, and dialled until it does."""
    with (
        running_service(tmp_path, model, workers=1, worker_options=OPTIONS) as near,
        proxied(near.workers[0].port) as proxy,
        router_before(proxy.port, tmp_path, "--worker-wait", "200s", patient=True) as router,
        grpc.insecure_channel(router.address) as channel,
    ):
        far = Service(router, near.workers, channel)
        asked = [seeded(i, 250) for i in range(6)]
        undisturbed = answers(near, long_again(asked))
        got = disturbed(far, asked, proxy.break_connections)
        assert_same(got, undisturbed)
        # The same attempt: nothing was computed twice.
        assert attempts(got) == {1}

        def fall_silent() -> None:
            proxy.black_hole()
            threading.Timer(4.0, proxy.forward).start()

        assert_all_move(far, undisturbed, fall_silent)


async def test_dials_to_black_hole_leave_no_state(report: Report) -> None:
    """F4: ports that take connections and say nothing, dialled again and again: no task and no file is left."""
    holes = [socket.create_server(("127.0.0.1", 0)) for _ in range(min(10, SCALE.f4_dials))]
    router = Router(RouterOptions([f"127.0.0.1:{hole.getsockname()[1]}" for hole in holes], port=0))
    await router.start()
    dials = 0

    def accept() -> None:
        # What is taken off the backlog is kept: another dial finds room.
        nonlocal dials
        for hole in holes:
            with contextlib.suppress(BlockingIOError):
                while True:
                    kept.append(hole.accept()[0])
                    dials += 1

    kept: list[socket.socket] = []
    for hole in holes:
        hole.setblocking(False)

    async def after(count: int) -> tuple[int, int]:
        """Tasks and files of the router at a moment when each port has been dialled so often."""
        while dials < count:
            accept()
            await asyncio.sleep(0.01)
        return len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd")) - len(kept)

    before = await after(len(holes))
    at_end = await after(len(holes) + SCALE.f4_dials)
    await router.stop()
    for each in (*holes, *kept):
        each.close()
    report("F4", dials=dials, tasks=f"{before[0]}..{at_end[0]}", files=f"{before[1]}..{at_end[1]}")
    # A dial under way has a task or two more, and a file or two.
    assert at_end[0] <= before[0] + 2 * len(holes)
    assert at_end[1] <= before[1] + 2 * len(holes)
    assert SCALE.f4_dials >= len(holes)


@contextlib.contextmanager
def router_before(worker_port: int, folder: Path, *options: str, patient: bool = False) -> Iterator[Process]:
    """A router with one worker at a port; with `patient` it waits long for a stream that takes up a broken one."""
    port = free_port()
    arguments = ["router", "--port", str(port), "--worker", f"127.0.0.1:{worker_port}", *options]
    if patient:
        arguments.insert(0, "tests.chaos.patient_router")
    router = Process("far", arguments, port, folder / "far.log")
    router.start()
    try:
        router.wait_serving()
        yield router
    finally:
        router.stop(signal.SIGKILL)


@pytest.mark.slow
def test_restarted_worker_is_new_and_takes_over_within_second(model: Path, tmp_path: Path) -> None:
    """F5, F6: the only worker dies and starts anew: what was running goes on there, within a second of its return."""
    options = ["--worker-wait", "200s"]
    with running_service(tmp_path, model, worker_options=OPTIONS, router_options=options) as service:
        asked = [seeded(i, 250) for i in range(6)]
        undisturbed = answers(service, long_again(asked))
        worker = service.workers[0]

        def bounce() -> None:
            worker.stop(signal.SIGKILL)
            restart(worker)
            wait_workers(service, 1)

        assert_all_move(service, undisturbed, bounce)
        load = service.wait_idle()
        assert (load.decoding_seqs, load.free_blocks) == (0, load.total_blocks)


@pytest.mark.slow
def test_killed_router_leaves_no_sequence_on_workers(model: Path, tmp_path: Path) -> None:
    """F7: SIGKILL of the router: after the lease the workers have nothing of it; a new one starts clean."""
    options = ["--lease", "1s"]
    with running_service(tmp_path, model, workers=2, worker_options=OPTIONS, router_options=options) as service:
        wait_workers(service, 2)
        with ThreadPoolExecutor(SCALE.f7_streams) as pool:
            running = [pool.submit(outcome, service.stub, i, 1500) for i in range(SCALE.f7_streams)]
            wait_until(lambda: sum(service.worker_load(i).decoding_seqs for i in range(2)) == SCALE.f7_streams)
            service.router.stop(signal.SIGKILL)
            assert {f.result()[0] for f in running} == {grpc.StatusCode.UNAVAILABLE}
        for index in range(2):
            logged(service.workers[index], "lease ended")
            load = service.wait_idle(index)
            assert (load.decoding_seqs, load.free_blocks) == (0, load.total_blocks)
        service.router.start()
        service.router.wait_serving()
        wait_workers(service, 2)
        assert outcome(service.stub, 1, 8) == (grpc.StatusCode.OK, 8)


@pytest.mark.slow
def test_f8_router_finishes_streams_on_sigterm(model: Path, tmp_path: Path) -> None:
    """F8: SIGTERM of the router: all streams finish, exit code 0, and the workers are free at once."""
    with running_service(tmp_path, model, worker_options=OPTIONS) as service:
        codes = list[int]()
        got = disturbed(
            service, [request(i, 300) for i in range(8)], lambda: codes.append(service.router.stop(signal.SIGTERM))
        )
        assert (codes, [len(answer.token_ids) for answer in got]) == ([0], [300] * 8)
        assert service.wait_idle().decoding_seqs == 0
        log = service.router.log.read_text()
        assert "Traceback" not in log
        assert log.count("request ended") == 8


def test_drain_timeout_of_only_worker_aborts_running(model: Path, tmp_path: Path) -> None:
    """F2: with nobody to hand over to, a drained worker's streams have its drain timeout, then a bounded wait."""
    options = [*OPTIONS, "--drain-timeout", "0.3"]
    waits = ["--worker-wait", "300ms"]
    with running_service(tmp_path, model, worker_options=options, router_options=waits) as service:
        calls = [service.stub.Generate(request(i, 1500), timeout=60) for i in range(6)]
        firsts = [next(call) for call in calls]
        assert service.workers[0].stop(signal.SIGTERM) == 0
        for call, first in zip(calls, firsts, strict=True):
            tokens = len(first.token_ids)
            with contextlib.suppress(grpc.RpcError):
                for part in call:
                    tokens += len(part.token_ids)
            assert call.code() is grpc.StatusCode.ABORTED
            assert 0 < tokens < 1500
