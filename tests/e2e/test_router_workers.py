"""Router and workers as separate processes, workers simulated: one answer from every worker, and nothing left over."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from tests.chaos.support import log_entries, until
from tests.e2e.service import Service, generate, running_service
from tests.e2e.simulated import OPTIONS, request, simulated_model, wait_workers

# Tokens of answers that take seven seconds, and of such as no other test asks for.
LONG, SHORT = 1500, 7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder, in_turn = tmp_path_factory.mktemp("fleet"), ["--placement", "round_robin"]
    told = {"FISSILE_LOG_LEVEL": "debug"}
    with running_service(
        folder, model, workers=3, worker_options=OPTIONS, router_options=in_turn, environment=told
    ) as service:
        wait_workers(service, 3)
        yield service


def whole(fleet: Service) -> list[int]:
    """Tokens of each answer that a worker has made to its end, as the workers' logs say."""
    entries = [entry for worker in fleet.workers for entry in log_entries(worker)]
    ends = [entry for entry in entries if entry["event"] == "sequence ended"]
    return [entry["output_tokens"] for entry in ends if entry["reason"] == "length"]


def assert_none_ran_on(fleet: Service) -> None:
    """Asserts that no worker has anything left, nor made any of the long answers to its end."""
    for index in range(3):
        load = fleet.wait_idle(index)
        assert (load.decoding_seqs, load.waiting_seqs) == (0, 0)
        assert load.free_blocks == load.total_blocks
    before = whole(fleet).count(SHORT)
    for i in range(3):
        generate(fleet.stub, request(i, SHORT))
    # With these lines those of what was there earlier have been written.
    until(lambda: whole(fleet).count(SHORT) == before + 3, what="the logs of the workers")
    assert LONG not in whole(fleet)


def test_same_request_same_answer_on_every_worker_alone_and_together(fleet: Service) -> None:
    alone = [generate(fleet.stub, request(i)) for i in range(12)]
    workers = Counter(a.finish.worker_id for a in alone if a.finish is not None)
    assert workers == {"worker-0": 4, "worker-1": 4, "worker-2": 4}
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda i: generate(fleet.stub, request(i)), range(12)))
    assert [a.token_ids for a in together] == [a.token_ids for a in alone]
    assert all(len(a.token_ids) == 24 for a in alone)


def test_cancelled_streams_free_their_blocks(fleet: Service) -> None:
    def cancelled(i: int) -> grpc.StatusCode:
        call = fleet.stub.Generate(request(i, max_tokens=LONG), timeout=60)
        threading.Timer(random.Random(i).uniform(0, 0.3), call.cancel).start()
        try:
            for _ in call:
                pass
        except grpc.RpcError:
            pass
        code = call.code()
        assert isinstance(code, grpc.StatusCode)
        return code

    with ThreadPoolExecutor(48) as pool:
        assert set(pool.map(cancelled, range(48))) == {grpc.StatusCode.CANCELLED}
    assert_none_ran_on(fleet)


def test_deadline_reaches_the_engine(fleet: Service) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(fleet.stub.Generate(request(1, max_tokens=LONG), timeout=0.3))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert_none_ran_on(fleet)
