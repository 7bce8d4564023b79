"""Envoy asks an endpoint picker by ext_proc, as gateways of the Inference Extension do, for two workers of Fissile."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from tests.deploy.endpoint_picker import DESTINATION, Endpoint, EndpointPicker
from tests.deploy.envoy import Configuration, Envoy, running_envoy
from tests.deploy.tools import tool
from tests.e2e.service import Process, free_port, running
from tests.e2e.simulated import OPTIONS, simulated_model

LIMIT_S = 60.0
LONGEST = 200_000
EXTENSIONS = "type.googleapis.com/envoy.extensions"
H2 = {
    "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
        "@type": f"{EXTENSIONS}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
}


def configuration(picker: int) -> Configuration:
    """Envoy as a gateway makes it: the picker's header names the endpoint. The first cluster is the picker's."""
    processor = {
        "@type": f"{EXTENSIONS}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "60s"},
        "message_timeout": "60s",
        "processing_mode": {
            "request_header_mode": "SEND",
            "response_header_mode": "SKIP",
            "request_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
        },
    }
    router = {"@type": f"{EXTENSIONS}.filters.http.router.v3.Router"}
    manager = {
        "@type": f"{EXTENSIONS}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        "codec_type": "AUTO",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "pool",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "pool", "timeout": "0s"}}],
                }
            ]
        },
        "http_filters": [
            {"name": "envoy.filters.http.ext_proc", "typed_config": processor},
            {"name": "envoy.filters.http.router", "typed_config": router},
        ],
    }
    listener = {
        "name": "gateway",
        "address": {},
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    loopback = {"socket_address": {"address": "127.0.0.1", "port_value": picker}}
    return {
        "admin": {"address": {"socket_address": {"address": "127.0.0.1"}}},
        "static_resources": {
            "listeners": [listener],
            "clusters": [
                {
                    "name": "picker",
                    "type": "STATIC",
                    "load_assignment": {
                        "cluster_name": "picker",
                        "endpoints": [{"lb_endpoints": [{"endpoint": {"address": loopback}}]}],
                    },
                    "typed_extension_protocol_options": H2,
                },
                {
                    "name": "pool",
                    "type": "ORIGINAL_DST",
                    "lb_policy": "CLUSTER_PROVIDED",
                    "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION},
                    "typed_extension_protocol_options": H2,
                },
            ],
        },
    }


@dataclass
class Gateway:
    """Two workers, the picker, and a client of the workers through Envoy."""

    workers: list[Process]
    endpoints: list[Endpoint]
    picker: EndpointPicker
    envoy: Envoy
    stub: VllmEngineStub

    def ask(self, number: int, max_tokens: int = 4) -> int:
        """One short answer; returns its number of tokens."""
        (last,) = [
            each for each in self.stub.Generate(asked(number, max_tokens), timeout=LIMIT_S) if each.HasField("complete")
        ]
        return len(last.complete.output_ids)

    def asks_go_to(self, endpoint: Endpoint) -> bool:
        """True if six answers, one after the other, come from one endpoint, as the picker says and Envoy counts."""
        before = self.requests_of(endpoint)
        assert [self.ask(number) for number in range(6)] == [4] * 6
        return self.picker.picked[-6:] == [endpoint.address] * 6 and self.requests_of(endpoint) == before + 6

    def requests_of(self, endpoint: Endpoint) -> int:
        """Requests that Envoy has sent to an endpoint; it knows one by its first request."""
        known = f"pool::{endpoint.address}::rq_total::" in self.envoy.admin("/clusters")[1]
        return self.envoy.of_host(endpoint.port, "rq_total") if known else 0


def asked(number: int, max_tokens: int) -> pb.GenerateRequest:
    params = pb.SamplingParams(top_p=1.0, repetition_penalty=1.0, n=1, max_tokens=max_tokens, ignore_eos=True)
    tokens = pb.TokenizedInput(input_ids=[1 + number % 200, 2, 3])
    return pb.GenerateRequest(request_id=f"g{number}", tokenized=tokens, sampling_params=params, stream=True)


@contextlib.contextmanager
def busy(worker: Process, count: int) -> Iterator[list[Any]]:
    """Long answers that a worker gives to others, which the picker's metrics alone tell."""
    with grpc.insecure_channel(worker.address) as channel:
        calls = [VllmEngineStub(channel).Generate(asked(900 + i, LONGEST - 9)) for i in range(count)]
        for call in calls:
            next(iter(call))
        try:
            yield calls
        finally:
            for call in calls:
                call.cancel()


def until_load(endpoint: Endpoint, load: float | None) -> None:
    """Waits until the picker sees this load of an endpoint; None is an endpoint that is not ready."""
    end = time.monotonic() + LIMIT_S
    while (found := endpoint.load()) != load:
        assert time.monotonic() < end, f"the load is {found}, not {load}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated_model(tmp_path_factory.mktemp("model"), LONGEST)


@pytest.fixture
def gateway(model: Path, tmp_path: Path) -> Iterator[Gateway]:
    tool("envoy")
    endpoints = [Endpoint(free_port(), free_port()) for _ in range(2)]
    workers = []
    for endpoint in endpoints:
        ports = ["--port", str(endpoint.port), "--metrics-port", str(endpoint.metrics_port)]
        serve = [
            "worker",
            "--model",
            str(model),
            "--model-name",
            "m",
            "--doors",
            "vllm-engine",
            *ports,
            *OPTIONS,
            "--drain-timeout",
            "10m",
        ]
        log = tmp_path / f"{endpoint.port}.log"
        workers.append(Process("worker", serve, endpoint.port, log, {"OMP_NUM_THREADS": "1"}))
    with (
        running(workers),
        EndpointPicker(endpoints) as picker,
        running_envoy(tmp_path, configuration(picker.port), [picker.port]) as envoy,
        grpc.insecure_channel(envoy.address) as channel,
    ):
        yield Gateway(workers, endpoints, picker, envoy, VllmEngineStub(channel))


def test_load_follows_the_metrics_and_a_draining_worker_gets_nothing_new(gateway: Gateway) -> None:
    first, second = gateway.endpoints
    for worker, endpoint, other in ((0, first, second), (1, second, first)):
        with busy(gateway.workers[worker], 3):
            until_load(endpoint, 3)
            assert gateway.asks_go_to(other)
        until_load(endpoint, 0)
    with busy(gateway.workers[0], 1) as answers:
        gateway.workers[0].running.send_signal(signal.SIGTERM)
        until_load(first, None)
        with busy(gateway.workers[1], 3):
            until_load(second, 3)
            # It has less to do, and gets nothing.
            assert gateway.asks_go_to(second)
        # Its own answer goes on meanwhile.
        assert next(iter(answers[0]))
    gateway.workers[1].running.send_signal(signal.SIGTERM)
    until_load(second, None)
    with pytest.raises(grpc.RpcError) as refused:
        gateway.ask(1)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert gateway.picker.picked[-1] == ""
