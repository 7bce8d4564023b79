"""Workers and routers that are killed, frozen, drained and restarted under load."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from tests.e2e.service import Service, generate, running_service
from tests.e2e.simulated import OPTIONS, outcome, request, simulated_model, wait_workers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running_service(tmp_path_factory.mktemp("fleet"), model, workers=3, worker_options=OPTIONS) as service:
        wait_workers(service, 3)
        yield service


def test_killed_worker_ends_its_streams_at_once_and_comes_back(fleet: Service) -> None:
    with ThreadPoolExecutor(30) as pool:
        running = [pool.submit(outcome, fleet.stub, i, 600) for i in range(30)]
        time.sleep(0.6)
        fleet.workers[1].stop(signal.SIGKILL)
        killed = time.monotonic()
        lost = [f for f in running if f.result()[0] is not grpc.StatusCode.OK]
        assert Counter(f.result()[0] for f in running) == {grpc.StatusCode.OK: 20, grpc.StatusCode.ABORTED: 10}
    assert all(0 < f.result()[1] < 600 for f in lost)
    wait_workers(fleet, 2, within_s=0.5)
    assert time.monotonic() - killed < 20
    fleet.workers[1].start()
    fleet.workers[1].wait_serving()
    begin = time.monotonic()
    wait_workers(fleet, 3)
    assert time.monotonic() - begin < 1.0
    answers = [generate(fleet.stub, request(i, max_tokens=4)) for i in range(6)]
    assert len({a.finish.worker_id for a in answers if a.finish is not None}) == 3


def test_drained_worker_costs_no_request(fleet: Service) -> None:
    stop = threading.Event()
    outcomes: list[grpc.StatusCode] = []

    def client(i: int) -> None:
        rnd = random.Random(i)
        while not stop.is_set():
            outcomes.append(outcome(fleet.stub, rnd.randrange(10**6, 10**9), 30)[0])

    threads = [threading.Thread(target=client, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    assert fleet.workers[2].stop(signal.SIGTERM) == 0
    fleet.workers[2].start()
    fleet.workers[2].wait_serving()
    wait_workers(fleet, 3)
    time.sleep(0.2)
    stop.set()
    for thread in threads:
        thread.join()
    assert len(outcomes) > 20
    assert set(outcomes) == {grpc.StatusCode.OK}


def test_drain_timeout_of_the_only_worker_aborts_what_still_runs(model: Path, tmp_path: Path) -> None:
    options = [*OPTIONS, "--drain-timeout", "0.3"]
    with running_service(tmp_path, model, worker_options=options) as service, ThreadPoolExecutor(6) as pool:
        running = [pool.submit(outcome, service.stub, i, 1500) for i in range(6)]
        time.sleep(0.5)
        assert service.workers[0].stop(signal.SIGTERM) == 0
        results = [f.result() for f in running]
    assert {code for code, _ in results} == {grpc.StatusCode.ABORTED}
    assert all(0 < tokens < 1500 for _, tokens in results)


def test_router_finishes_streams_on_sigterm(model: Path, tmp_path: Path) -> None:
    with running_service(tmp_path, model, worker_options=OPTIONS) as service:
        with ThreadPoolExecutor(8) as pool:
            running = [pool.submit(outcome, service.stub, i, 300) for i in range(8)]
            time.sleep(0.5)
            assert service.router.stop(signal.SIGTERM) == 0
            assert [f.result() for f in running] == [(grpc.StatusCode.OK, 300)] * 8
        assert service.wait_idle().decoding_seqs == 0
        log = service.router.log.read_text()
        assert "Traceback" not in log
        assert log.count("request finished") == 8


def test_frozen_worker_is_given_up_and_taken_back(fleet: Service) -> None:
    frozen = fleet.workers[0]
    with ThreadPoolExecutor(9) as pool:
        running = [pool.submit(outcome, fleet.stub, i, 400) for i in range(9)]
        time.sleep(0.5)
        frozen.running.send_signal(signal.SIGSTOP)
        try:
            codes = Counter(f.result()[0] for f in running)
            wait_workers(fleet, 2, within_s=4.0)
            assert codes == {grpc.StatusCode.OK: 6, grpc.StatusCode.ABORTED: 3}
            assert {outcome(fleet.stub, 100 + i, 8)[0] for i in range(6)} == {grpc.StatusCode.OK}
        finally:
            frozen.running.send_signal(signal.SIGCONT)
    wait_workers(fleet, 3, within_s=4.0)
    load = fleet.wait_idle(0)
    assert (load.decoding_seqs, load.free_blocks) == (0, load.total_blocks)


def test_killed_router_leaves_nothing_on_the_workers(model: Path, tmp_path: Path) -> None:
    with running_service(tmp_path, model, workers=2, worker_options=OPTIONS) as service:
        wait_workers(service, 2)
        with ThreadPoolExecutor(20) as pool:
            running = [pool.submit(outcome, service.stub, i, 1500) for i in range(20)]
            time.sleep(0.5)
            service.router.stop(signal.SIGKILL)
            assert {f.result()[0] for f in running} == {grpc.StatusCode.UNAVAILABLE}
        for index in range(2):
            load = service.wait_idle(index, timeout=7.0)
            assert (load.decoding_seqs, load.free_blocks) == (0, load.total_blocks)
        service.router.start()
        service.router.wait_serving()
        wait_workers(service, 2)
        assert outcome(service.stub, 1, 8) == (grpc.StatusCode.OK, 8)
