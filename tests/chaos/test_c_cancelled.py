"""Clients that cancel, vanish, or are out of time: nothing of them stays behind."""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from fissile.v1.inference_pb2_grpc import InferenceServiceStub

from tests.chaos.conftest import Report
from tests.chaos.scale import SCALE
from tests.chaos.support import log_entries, open_files, quantile, rss_mib, until
from tests.chaos.test_come_and_go import restart, seeded
from tests.e2e.service import Service, running_service
from tests.e2e.simulated import OPTIONS, outcome, wait_workers

GROWTH_MIB = 5.0


def assert_idle(fleet: Service) -> None:
    for index in range(3):
        load = fleet.wait_idle(index)
        assert (load.decoding_seqs, load.waiting_seqs, load.free_blocks) == (0, 0, load.total_blocks)


def test_c1_cancel_storm_leaves_no_memory(fleet: Service, report: Report) -> None:
    """C1: streams cancelled within 0 to 100 ms, round after round: workers empty, memory and files flat."""

    def cancelled(i: int) -> None:
        # Ten seconds long: a busy machine does not end it before its client does.
        call = fleet.stub.Generate(seeded(i, 1900), timeout=60)
        threading.Timer(random.Random(i).uniform(0, 0.1), call.cancel).start()
        with pytest.raises(grpc.RpcError):
            for _ in call:
                pass

    figures: list[tuple[float, int]] = []
    with ThreadPoolExecutor(50) as pool:
        for _ in range(SCALE.c1_rounds + 1):
            list(pool.map(cancelled, range(SCALE.c1_streams)))
            assert_idle(fleet)
            figures.append((rss_mib(fleet.router), open_files(fleet.router)))
    grown = figures[-1][0] - figures[0][0]
    report("C1", rounds=SCALE.c1_rounds, streams=SCALE.c1_streams, router_growth_mib=grown, files=figures[-1][1])
    assert grown < GROWTH_MIB
    assert figures[-1][1] <= figures[0][1] + 3


def test_c3_deadline_storm(fleet: Service, report: Report) -> None:
    """C3: requests of 40 ms with deadlines of 1 to 50 ms: OK, DEADLINE_EXCEEDED or RESOURCE_EXHAUSTED, soon, and the
    workers are empty."""

    def one(i: int) -> tuple[grpc.StatusCode, float]:
        left = random.Random(i).uniform(0.001, 0.05)
        begin = time.monotonic()
        call = fleet.stub.Generate(seeded(i, 8), timeout=left)
        try:
            for _ in call:
                pass
        except grpc.RpcError:
            pass
        code = call.code()
        assert isinstance(code, grpc.StatusCode)
        return code, time.monotonic() - begin - left

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(one, range(SCALE.c3_requests)))
    counts = Counter(code for code, _ in results)
    late = [seconds for code, seconds in results if code is grpc.StatusCode.DEADLINE_EXCEEDED]
    report("C3", requests=len(results), ok=counts[grpc.StatusCode.OK], late_p99_ms=quantile(late, 0.99) * 1000)
    allowed = {grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert set(counts) <= allowed
    assert late
    assert_idle(fleet)
    assert "Traceback" not in fleet.router.log.read_text()


@pytest.mark.slow
def test_cancel_storm_while_workers_restart(fleet: Service) -> None:
    """C1, C2: clients that cancel, or vanish with their connection, while a worker dies: nothing stays behind."""

    def one(i: int) -> None:
        rnd = random.Random(i)
        with grpc.insecure_channel(fleet.router.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            call = InferenceServiceStub(channel).Generate(seeded(i, 1500), timeout=30)
            threading.Timer(rnd.uniform(0, 1.0), channel.close if i % 2 else call.cancel).start()
            with pytest.raises((grpc.RpcError, ValueError)):
                for _ in call:
                    pass

    with ThreadPoolExecutor(24) as pool:
        storm = [pool.submit(one, i) for i in range(120)]
        time.sleep(0.5)
        fleet.workers[2].stop(signal.SIGKILL)
        for future in storm:
            future.result()
    restart(fleet.workers[2])
    wait_workers(fleet, 3)
    for index in range(3):
        load = fleet.wait_idle(index)
        assert (load.decoding_seqs, load.waiting_seqs, load.free_blocks) == (0, 0, load.total_blocks)
    assert "Traceback" not in fleet.router.log.read_text()


def test_c4_abandoned_calls_end_on_the_workers(fleet: Service) -> None:
    """C4: a client that drops its call objects without cancelling them leaves nothing behind."""
    asked = [seeded(i, 1500) for i in range(9)]
    calls = [fleet.stub.Generate(one) for one in asked]
    for call in calls:
        next(iter(call))
    del call
    calls.clear()
    gc.collect()
    ids = {one.request_id for one in asked}

    def ended() -> list[str]:
        """How they ended at the router."""
        lines = [entry for entry in log_entries(fleet.router) if entry["event"] == "request ended"]
        return [entry["status"] for entry in lines if entry.get("request_id") in ids]

    until(lambda: len(ended()) == len(ids), what="the end of the calls")
    assert set(ended()) == {"CANCELLED"}
    for index in range(3):
        load = fleet.wait_idle(index)
        assert (load.decoding_seqs, load.free_blocks) == (0, load.total_blocks)


@pytest.mark.slow
def test_deadlines_pass_without_a_worker(model: Path, tmp_path: Path) -> None:
    """C3: what has a deadline gets DEADLINE_EXCEEDED in time, worker or not; what has expired reaches no worker."""
    options = ["--worker-wait", "20s"]
    with running_service(tmp_path, model, worker_options=OPTIONS, router_options=options) as service:
        service.workers[0].stop(signal.SIGKILL)
        wait_workers(service, 0)

        def one(i: int) -> tuple[grpc.StatusCode, float]:
            begin = time.monotonic()
            with pytest.raises(grpc.RpcError) as raised:
                list(service.stub.Generate(seeded(i, 10), timeout=0.2 + i / 50))
            return raised.value.code(), time.monotonic() - begin - 0.2 - i / 50

        with ThreadPoolExecutor(16) as pool:
            results = list(pool.map(one, range(16)))
        assert {code for code, _ in results} == {grpc.StatusCode.DEADLINE_EXCEEDED}
        # Else as late as the wait for a worker lets them be.
        assert max(late for _, late in results) < 10
        restart(service.workers[0])
        wait_workers(service, 1)
        assert outcome(service.stub, 1, 8) == (grpc.StatusCode.OK, 8)
        load = service.wait_idle()
        assert load.free_blocks == load.total_blocks
        assert "Traceback" not in service.router.log.read_text()
