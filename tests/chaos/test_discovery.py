"""Workers that join and leave under load, found by DNS and by a file: no request fails."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest
from fissile.v1.inference_pb2_grpc import InferenceServiceStub

from tests.e2e.service import Process, Service, free_port, running
from tests.e2e.simulated import OPTIONS, outcome, simulated_model, wait_workers
from tests.fake_dns import FakeDns, wait_until

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Process]]:
    """Three workers on one port, as the Pods of a headless Service are."""
    folder = tmp_path_factory.mktemp("discovery")
    model, port = simulated_model(folder / "model"), free_port()
    made = []
    for host in HOSTS:
        arguments = ["worker", "--model", str(model), "--model-name", "test", "--host", host, "--port", str(port)]
        made.append(Process(host, [*arguments, "--worker-id", host, *OPTIONS], port, folder / f"{host}.log", host=host))
    with running(made):
        yield made


@contextlib.contextmanager
def routed(target: str, folder: Path) -> Iterator[Service]:
    """A router whose workers are where `target` says."""
    port = free_port()
    router = Process("router", ["router", "--port", str(port), "--worker", target], port, folder / "router.log")
    router.start()
    try:
        router.wait_serving()
        with grpc.insecure_channel(router.address) as channel:
            yield Service(router, [], channel)
    finally:
        router.stop(signal.SIGKILL)


@contextlib.contextmanager
def load(stub: InferenceServiceStub) -> Iterator[list[tuple[grpc.StatusCode, int]]]:
    """Six clients without a pause; how their requests ended."""
    ended, stop = list[tuple[grpc.StatusCode, int]](), threading.Event()

    def client(i: int) -> None:
        rnd = random.Random(i)
        while not stop.is_set():
            ended.append(outcome(stub, rnd.randrange(10**6, 10**9), 60))

    threads = [threading.Thread(target=client, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    try:
        yield ended
    finally:
        stop.set()
        for thread in threads:
            thread.join()


# The lists that follow each other: joins, leaves, and both at once.
STEPS: Sequence[Sequence[str]] = (HOSTS[:1], HOSTS, HOSTS[1:], HOSTS[:1], HOSTS[1:2], HOSTS)


def assert_none_failed(ended: Sequence[tuple[grpc.StatusCode, int]]) -> None:
    assert len(ended) > 10
    assert set(ended) == {(grpc.StatusCode.OK, 60)}


@pytest.mark.slow
def test_dns_answers_change_under_load(workers: list[Process], tmp_path: Path) -> None:
    """Workers join and leave by their addresses; a name server in trouble takes none away."""
    with FakeDns(STEPS[0]) as names, routed(names.target(workers[0].port), tmp_path) as service:
        with load(service.stub) as ended:
            for hosts in STEPS:
                names.addresses = {"A": hosts}
                wait_workers(service, len(hosts))
            names.mute = True
            names.wait_asked(2)
            wait_until(lambda: len(ended) > 10)
        assert_none_failed(ended)
        # A worker that ends in good order while its address is still given, and comes back.
        names.mute = False
        with load(service.stub) as ended:
            assert workers[2].stop(signal.SIGTERM) == 0
            workers[2].start()
            workers[2].wait_serving()
            wait_workers(service, 3)
            wait_until(lambda: len(ended) > 10)
        assert_none_failed(ended)


@pytest.mark.slow
def test_worker_file_changes_under_load_keep_streams(workers: list[Process], tmp_path: Path) -> None:
    """The same by a file; a broken one takes no worker away."""
    path = tmp_path / "workers.yaml"

    def write(text: str) -> None:
        path.with_suffix(".new").write_text(text)
        os.replace(path.with_suffix(".new"), path)

    def listed(hosts: Sequence[str]) -> str:
        return "".join(f"- {host}:{workers[0].port}\n" for host in hosts)

    write(listed(STEPS[0]))
    with routed(f"file:{path}", tmp_path) as service:
        with load(service.stub) as ended:
            for hosts in STEPS:
                write(listed(hosts))
                wait_workers(service, len(hosts))
                write(listed(hosts) + "- broken")
            wait_until(lambda: len(ended) > 10)
        assert_none_failed(ended)
