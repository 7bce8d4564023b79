"""Two ranks over a cable that delays, loses and drops packets: equal tokens, and the group recovers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fissile.v1 import inference_pb2 as pb

from tests.chaos.support import until
from tests.checkpoints import make_checkpoint
from tests.e2e.service import Service, generate, running_service
from tests.e2e.simulated import request, wait_workers
from tests.networks import Machines, Weather, bad_cable, machines

pytestmark = pytest.mark.slow

# Of each stream; at DELAY_S a step takes at least as long as the packets of its sums, so the streams last.
TOKENS, STREAMS, DELAY_S = 400, 6, 0.005


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


def sampled(i: int, name: str) -> pb.GenerateRequest:
    made = request(i, TOKENS)
    made.sampling_params.seed = i
    made.sampling_params.ignore_eos = True
    made.request_id = f"{name}-{i}"
    return made
