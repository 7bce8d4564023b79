"""Engine doors of a worker with TLS: who may call them, new certificates, and what the log says of calls."""

from __future__ import annotations

import functools
import json
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from cryptography import x509
from fissile.peers.openengine.v1 import openengine_pb2 as opb
from fissile.peers.openengine.v1 import openengine_pb2_grpc as openengine
from fissile.peers.vllm import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as vpb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from common.params.names import DOORS
from tests.certificates import Pair
from tests.e2e.secure import ROUTER_IDENTITY, WORKER_NAME, Pki, tls_channel
from tests.e2e.service import Process, free_port, running
from tests.e2e.simulated import OPTIONS, simulated_model

LIMIT_S = 60.0
PROMPT = [7, 8, 9]


def openengine_answer(channel: grpc.Channel, limit_s: float | None = LIMIT_S) -> list[int]:
    stopping = opb.StoppingOptions(max_tokens=3, ignore_eos=True)
    request = opb.GenerateRequest(model="test", token_ids=opb.TokenIds(ids=PROMPT), stopping=stopping)
    found = openengine.InferenceStub(channel).Generate(request, timeout=limit_s)
    return [token.token_id for each in found for token in each.token.tokens]


def vllm_engine_answer(channel: grpc.Channel, limit_s: float | None = LIMIT_S) -> list[int]:
    params = vpb.SamplingParams(max_tokens=3, ignore_eos=True, top_p=1, repetition_penalty=1, n=1, temperature=0)
    tokenized = vpb.TokenizedInput(input_ids=PROMPT)
    request = vpb.GenerateRequest(tokenized=tokenized, sampling_params=params, stream=True)
    found = VllmEngineStub(channel).Generate(request, timeout=limit_s)
    return [token for each in found if each.HasField("chunk") for token in each.chunk.token_ids]


def vllm_inference_answer(channel: grpc.Channel, limit_s: float | None = LIMIT_S) -> list[int]:
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=PROMPT),
        stopping=inference_pb2.StoppingCriteria(max_new_tokens=3, ignore_eos=True),
        response=inference_pb2.ResponseOptions(output_token_ids=True),
    )
    found = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=limit_s)
    return list(found.outputs.token_ids)


ANSWERS: dict[str, Callable[..., list[int]]] = {
    "openengine": openengine_answer,
    "vllm-engine": vllm_engine_answer,
    "vllm-inference": vllm_inference_answer,
}
FACTS: dict[str, Callable[[grpc.Channel], Any]] = {
    "openengine": lambda channel: openengine.ControlStub(channel).GetServerInfo(
        opb.GetServerInfoRequest(), timeout=LIMIT_S
    ),
    "vllm-engine": lambda channel: VllmEngineStub(channel).HealthCheck(vpb.HealthCheckRequest(), timeout=LIMIT_S),
    "vllm-inference": lambda channel: control_pb2_grpc.ControlStub(channel).GetServerInfo(
        control_pb2.GetServerInfoRequest(), timeout=LIMIT_S
    ),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Process, Pki]]:
    """A simulated worker with all doors, which asks callers for a certificate of a router."""
    folder = tmp_path_factory.mktemp("doors")
    pki, port, health_port = Pki(folder), free_port(), free_port()
    arguments = ["worker", "--model", str(simulated_model(folder / "model")), "--model-name", "test", *OPTIONS]
    arguments += ["--port", str(port), "--health-port", str(health_port), "--doors", ",".join(DOORS)]
    arguments += ["--tls-cert", str(pki.worker.cert), "--tls-key", str(pki.worker.key)]
    arguments += ["--tls-client-ca", str(pki.routers.cert), "--router-identity", ROUTER_IDENTITY]
    log = {"FISSILE_LOG_FORMAT": "json"}
    worker = Process("worker", arguments, port, folder / "worker.log", log, health_port)
    with running([worker]):
        yield worker, pki


def called(site: tuple[Process, Pki], pair: Pair | None, call: Callable[[grpc.Channel], Any]) -> Any:
    worker, pki = site
    with tls_channel(worker.address, pki.servers, pair, WORKER_NAME) as channel:
        return call(channel)


def test_every_door_is_asked(site: tuple[Process, Pki]) -> None:
    assert ANSWERS.keys() == FACTS.keys() == set(DOORS)


@pytest.mark.parametrize("door", ANSWERS)
def test_door_serves_the_certificate_of_a_router_alone(site: tuple[Process, Pki], door: str) -> None:
    pki = site[1]
    assert len(called(site, pki.router_client, ANSWERS[door])) == 3
    stranger = pki.routers.issue("stranger", "spiffe://fissile.test/stranger")
    for pair, code in (
        (stranger, grpc.StatusCode.PERMISSION_DENIED),
        (pki.client, grpc.StatusCode.UNAVAILABLE),
        (None, grpc.StatusCode.UNAVAILABLE),
    ):
        for call in (ANSWERS[door], FACTS[door]):
            with pytest.raises(grpc.RpcError) as caught:
                called(site, pair, call)
            assert caught.value.code() is code
    with grpc.insecure_channel(site[0].address) as channel, pytest.raises(grpc.RpcError) as caught:
        ANSWERS[door](channel)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("door", ANSWERS)
def test_trace_and_deadline_that_a_door_gets_not_are_said_once(site: tuple[Process, Pki], door: str) -> None:
    def said(least: int) -> Counter[str]:
        """What the log has said of the door, when it has at least `least` lines: a thread writes it."""
        end = time.monotonic() + LIMIT_S
        while (found := lines()).total() < least:
            assert time.monotonic() < end
            time.sleep(0.02)
        return found

    def lines() -> Counter[str]:
        *whole, _ = site[0].log.read_text().split("\n")
        entries = [json.loads(line) for line in whole if line.startswith("{")]
        return Counter(entry["event"] for entry in entries if entry.get("door") == door)

    called(site, site[1].router_client, ANSWERS[door])
    assert said(1) == {"a peer's call has no traceparent": 1}
    for _ in range(2):
        called(site, site[1].router_client, functools.partial(ANSWERS[door], limit_s=None))
    assert said(2) == {"a peer's call has no traceparent": 1, "a peer's call has no deadline": 1}


def test_new_certificate_of_a_worker_serves_the_next_call_of_every_door(site: tuple[Process, Pki]) -> None:
    worker, pki = site

    def serial() -> int:
        pem = ssl.get_server_certificate(("127.0.0.1", worker.port), timeout=LIMIT_S)
        return x509.load_pem_x509_certificate(pem.encode()).serial_number

    old = serial()
    pki.servers.issue("worker", WORKER_NAME)
    assert serial() != old
    assert [len(called(site, pki.router_client, answer)) for answer in ANSWERS.values()] == [3] * len(DOORS)
