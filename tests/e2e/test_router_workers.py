"""Router and workers as separate processes, workers simulated: what a fleet does when its parts come and go."""

from __future__ import annotations

import json
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
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub

from tests.e2e.service import Service, generate, running_service
from tests.unit.router.support import EOS, save, tokenizer_files

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 300,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "eos_token_id": EOS,
    "bos_token_id": None,
    "torch_dtype": "float32",
}
OPTIONS = ["--simulated", "--simulated-step", "0.005"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = {**tokenizer_files(), "config.json": json.dumps(CONFIG).encode()}
    return save(files, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running_service(tmp_path_factory.mktemp("fleet"), model, workers=3, worker_options=OPTIONS) as service:
        wait_workers(service, 3)
        yield service


def wait_workers(service: Service, count: int, within_s: float = 10.0) -> None:
    end = time.monotonic() + within_s
    while service.stub.GetModel(pb.GetModelRequest(), timeout=5).model.ready_workers != count:
        assert time.monotonic() < end, f"not {count} workers"
        time.sleep(0.02)


def request(i: int, max_tokens: int = 24) -> pb.GenerateRequest:
    ids = [random.Random(i).randrange(256) for _ in range(1 + i * 7 % 90)]
    made = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), request_id=f"r{i}")
    made.sampling_params.max_tokens = max_tokens
    made.sampling_params.ignore_eos = True
    made.output_options.return_token_ids = True
    return made


def outcome(stub: InferenceServiceStub, i: int, max_tokens: int) -> tuple[grpc.StatusCode, int]:
    """Status of one stream, and how many tokens came."""
    tokens = 0
    call = stub.Generate(request(i, max_tokens), timeout=30)
    try:
        for part in call:
            tokens += len(part.token_ids)
    except grpc.RpcError:
        pass
    code = call.code()
    assert isinstance(code, grpc.StatusCode)
    return code, tokens


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
        call = fleet.stub.Generate(request(i, max_tokens=1500), timeout=30)
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
