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

from tests.e2e.service import Service, generate, running_service
from tests.e2e.simulated import OPTIONS, request, simulated_model, wait_workers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder, in_turn = tmp_path_factory.mktemp("fleet"), ["--placement", "round_robin"]
    with running_service(folder, model, workers=3, worker_options=OPTIONS, router_options=in_turn) as service:
        wait_workers(service, 3)
        yield service


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
        call = fleet.stub.Generate(request(i, max_tokens=1500), timeout=60)
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
    for index in range(3):
        load = fleet.wait_idle(index)
        assert (load.decoding_seqs, load.waiting_seqs) == (0, 0)
        assert load.free_blocks == load.total_blocks


def test_deadline_reaches_the_engine(fleet: Service) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(fleet.stub.Generate(request(1, max_tokens=1500), timeout=0.3))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert all(fleet.wait_idle(i).decoding_seqs == 0 for i in range(3))
