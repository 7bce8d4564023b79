"""Two ranks over a cable that delays, loses and drops packets: equal tokens, and the group recovers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from fissile.v1 import inference_pb2 as pb

from tests.chaos.support import until
from tests.checkpoints import make_checkpoint
from tests.e2e.service import REPOSITORY, Service, free_port, generate, running_service
from tests.e2e.simulated import request, wait_workers
from tests.networks import Cable, Machines, Weather, bad_cable, machines
from worker.ranks.door import Door, Guest
from worker.ranks.engines import meet

pytestmark = pytest.mark.slow

# Of each stream; at DELAY_S a step takes at least as long as the packets of its sums, so the streams last.
TOKENS, STREAMS, DELAY_S = 400, 6, 0.005
SECRET = "a secret of the test"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def over_cable(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machines, Weather]]:
    names = ["--model-name", "test", "--worker-id", "over-cable"]
    with bad_cable() as (wire, weather), machines(wire, model, tmp_path_factory.mktemp("machines"), *names) as made:
        yield made, weather


def test_delay_and_loss_change_no_token(over_cable: tuple[Machines, Weather]) -> None:
    pair, weather = over_cable
    expected = pair.generate()
    weather.delay_s, weather.loss = DELAY_S, 0.02
    try:
        dropped = weather.dropped
        assert pair.generate() == expected
        assert weather.dropped > dropped
    finally:
        weather.delay_s, weather.loss = 0.0, 0.0


def test_partition_moves_streams_and_group_recovers(
    over_cable: tuple[Machines, Weather], model: Path, tmp_path: Path
) -> None:
    """The router's other worker has two ranks on one machine: the same numerics class."""
    pair, weather = over_cable
    options = ["--tp-size", "2", "--kv-cache-memory", "16MiB", "--max-model-len", "512", "--dtype", "float32"]
    router = ["--worker", pair.first.address, "--placement", "round_robin"]
    before, direct = pair.description(), pair.generate()
    with running_service(tmp_path, model, worker_options=options, router_options=router) as service:
        wait_workers(service, 2)
        expected = [generate(service.stub, sampled(i, "before")).token_ids for i in range(STREAMS)]
        weather.delay_s = DELAY_S
        both = Service(service.router, [*service.workers, pair.first], service.channel)
        with ThreadPoolExecutor(STREAMS) as pool:
            running = [pool.submit(generate, service.stub, sampled(i, "during")) for i in range(STREAMS)]
            until(lambda: both.worker_load(1).decoding_seqs >= STREAMS // 2, what="streams over the cable")
            weather.is_cut = True
            answers = [each.result() for each in running]
        assert [answer.token_ids for answer in answers] == expected
        moved = [answer.finish for answer in answers if answer.finish is not None and answer.finish.attempts > 1]
        assert {finish.worker_id for finish in moved} == {"worker-0"}
        assert not pair.first.is_serving()
        assert "rank 1 has been silent for" in pair.first.log.read_text()
        weather.is_cut, weather.delay_s = False, 0.0
        pair.first.wait_serving()
        wait_workers(service, 2)
    assert pair.description().instance_id != before.instance_id
    assert pair.generate() == direct


def test_frozen_rank_of_another_machine_is_lost_and_returns(over_cable: tuple[Machines, Weather]) -> None:
    pair, _ = over_cable
    before, expected = pair.description(), pair.generate()
    frozen = pair.remote_rank
    os.kill(frozen, signal.SIGSTOP)
    try:
        pair.wait_lost()
    finally:
        os.kill(frozen, signal.SIGCONT)
    pair.first.wait_serving()
    assert pair.description().instance_id != before.instance_id
    assert pair.generate() == expected


# Rank 1 of a meeting in the other namespace; exchanges one tensor after the meeting.
RANK_1 = """
import sys, torch
from worker.ranks.engines import meet
host, port, size, own, secret = sys.argv[1:]
mesh = meet(host, int(port), 1, int(size), own, secret)
print("joined", flush=True)
try:
    mesh.all_gather(torch.zeros(1))
except OSError as error:
    print("lost:", error, flush=True)
"""


@contextlib.contextmanager
def second_engine(wire: Cable, port: int, size: int, log: Path) -> Iterator[None]:
    """Rank 1 of `size` ranks that meet at this end of the cable, as a process at the other end."""
    arguments = [wire.here, str(port), str(size), wire.there, SECRET]
    with log.open("wb") as output:
        child = subprocess.Popen(
            ["ip", "netns", "exec", wire.namespace, sys.executable, "-c", RANK_1, *arguments],
            cwd=REPOSITORY, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        yield
    finally:
        child.kill()
        child.wait()


def test_waiting_rank_notices_that_machine_0_vanished(tmp_path: Path) -> None:
    """Former fault: it waited for ever, since a machine that vanishes ends no connection."""
    port, log = free_port(), tmp_path / "log"
    guests: list[Guest] = []
    with (
        bad_cable() as (wire, weather),
        contextlib.closing(Door(wire.here, port, SECRET)) as door,
        second_engine(wire, port, 3, log),
    ):

        def admit() -> bool:
            guests.extend(each for each in [door.admit({1}, 0.2)] if each is not None)
            return bool(guests)

        until(admit, what="the rank")
        with guests[0].sock as sock:
            sock.settimeout(60)
            assert sock.recv(1)
            weather.is_cut = True
            until(lambda: "waiting for the port of another rank" in log.read_text(), what="another knock")


def test_mesh_fails_on_both_machines_when_the_network_breaks(tmp_path: Path) -> None:
    """Rank 0 has bytes in flight then, which the kernel would repeat for a quarter of an hour."""
    port, log = free_port(), tmp_path / "log"
    with bad_cable() as (wire, weather), second_engine(wire, port, 2, log):
        mesh = meet(wire.here, port, 0, 2, wire.here, SECRET)
        with contextlib.closing(mesh):
            until(lambda: "joined" in log.read_text(), what="the meeting")
            weather.is_cut = True
            with pytest.raises(TimeoutError):
                # Rank 1 may have sent its part of the first exchange, and cannot have ended it.
                list(map(mesh.all_gather, [torch.zeros(1)] * 2))
            until(lambda: "lost:" in log.read_text(), what="the loss at rank 1")


def sampled(i: int, name: str) -> pb.GenerateRequest:
    made = request(i, TOKENS)
    made.sampling_params.seed = i
    made.sampling_params.ignore_eos = True
    made.request_id = f"{name}-{i}"
    return made
