"""deploy/mesh with a real Envoy: clients of two routers over two simulated workers, and a Session through a sidecar."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub
from google.protobuf.json_format import MessageToJson, ParseDict
from google.protobuf.message import Message

from router.api.tenants import TENANT_KEY
from tests.deploy.envoy import Envoy, connection_manager, load, running_envoy
from tests.deploy.tools import DEPLOY, run, tool
from tests.e2e.service import Process, Service, free_port, generate, running_service
from tests.e2e.simulated import OPTIONS, outcome, request, simulated_model, wait_workers
from tests.otlp_receiver import OtlpReceiver, ReceivedSpan

METHOD = "/fissile.v1.InferenceService/Generate"
ORIGIN = "https://app.example.com"
LOST = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL}


@dataclass
class Mesh:
    """Clients' way in, and what is behind it."""

    envoy: Envoy
    routers: list[Process]
    worker: Process
    stub: InferenceServiceStub
    receiver: OtlpReceiver


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated_model(tmp_path_factory.mktemp("model"))


@contextlib.contextmanager
def second_router(service: Service, folder: Path, environment: dict[str, str]) -> Iterator[Process]:
    """Another router with the same workers."""
    port = free_port()
    workers = [part for worker in service.workers for part in ("--worker", worker.address)]
    router = Process("second", ["router", "--port", str(port), *workers], port, folder / "second.log", environment)
    router.start()
    try:
        router.wait_serving()
        yield router
    finally:
        router.running.kill()
        router.running.wait()


@pytest.fixture(scope="module")
def mesh(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    tool("envoy")
    folder = tmp_path_factory.mktemp("mesh")
    with OtlpReceiver() as receiver:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100"}
        with (
            running_service(folder, model, workers=2, worker_options=OPTIONS, environment=environment) as service,
            second_router(service, folder, environment) as second,
        ):
            wait_workers(service, 2)
            routers = [service.router, second]
            with (
                running_envoy(folder, load("envoy.yaml"), [router.port for router in routers]) as envoy,
                grpc.insecure_channel(envoy.address) as channel,
            ):
                envoy.wait_healthy(2)
                yield Mesh(envoy, routers, service.workers[0], InferenceServiceStub(channel), receiver)


@pytest.fixture(autouse=True)
def both_routers_run(request: pytest.FixtureRequest) -> None:
    """Starts routers again that an earlier test has ended."""
    if "mesh" not in request.fixturenames:
        return
    mesh: Mesh = request.getfixturevalue("mesh")
    for router in mesh.routers:
        if router.running.poll() is not None:
            router.start()
            router.wait_serving()
    mesh.envoy.wait_healthy(2)


@pytest.mark.parametrize("name", ["envoy.yaml", "envoy-http.yaml", "worker-sidecar.yaml"])
def test_envoy_accepts_shipped_config(name: str) -> None:
    result = run([tool("envoy"), "--mode", "validate", "--log-level", "warn", "-c", DEPLOY / "mesh" / name])
    # Fields that are deprecated are told by a warning.
    assert (result.returncode, result.stderr) == (0, "")


def test_streams_pass_envoy_to_both_routers(mesh: Mesh) -> None:
    before = [mesh.envoy.of_host(router.port, "rq_total") for router in mesh.routers]
    with ThreadPoolExecutor(12) as pool:
        through = list(pool.map(lambda i: generate(mesh.stub, request(i, 40)), range(12)))
    with grpc.insecure_channel(mesh.routers[0].address) as channel:
        stub = InferenceServiceStub(channel)
        direct = [generate(stub, request(i, 40)) for i in range(12)]
    assert [a.token_ids for a in through] == [a.token_ids for a in direct]
    assert [a.text for a in through] == [a.text for a in direct]
    after = [mesh.envoy.of_host(router.port, "rq_total") for router in mesh.routers]
    assert all(now > earlier for now, earlier in zip(after, before, strict=True))


def spans_of(mesh: Mesh, trace_id: str, name: str) -> list[ReceivedSpan]:
    """The spans of a trace with that name, as soon as there is one."""
    end = time.monotonic() + 60
    while not (found := [span for span in mesh.receiver.named(name) if span.trace_id == trace_id]):
        assert time.monotonic() < end, name
        time.sleep(0.05)
    return found


def test_trace_passes_envoy_to_router_and_worker(mesh: Mesh) -> None:
    trace_id, client_span = "5" * 31 + "1", "7" * 16
    metadata = (("traceparent", f"00-{trace_id}-{client_span}-01"),)
    assert list(mesh.stub.Generate(request(900), metadata=metadata, timeout=60))
    (router,) = spans_of(mesh, trace_id, METHOD[1:])
    (worker,) = spans_of(mesh, trace_id, "worker.generate")
    assert router.parent_id == client_span
    assert worker.parent_id == router.span_id


def web_call(
    envoy: Envoy, message: Message, headers: dict[str, str]
) -> tuple[http.client.HTTPResponse, list[bytes], dict[str, str]]:
    """A gRPC-web call over plain HTTP/1.1: the response, its messages, and the trailers in its body."""
    body = message.SerializeToString()
    connection = http.client.HTTPConnection("127.0.0.1", envoy.port, timeout=60)
    with contextlib.closing(connection):
        sent = {"content-type": "application/grpc-web+proto", "x-grpc-web": "1", **headers}
        connection.request("POST", METHOD, struct.pack(">BI", 0, len(body)) + body, sent)
        response = connection.getresponse()
        content = response.read()
    messages, trailers = [], dict(response.getheaders())
    while content:
        flags, length = struct.unpack(">BI", content[:5])
        frame, content = content[5 : 5 + length], content[5 + length :]
        if flags & 0x80:
            pairs = (line.partition(":") for line in frame.decode().splitlines())
            trailers |= {name.strip().lower(): value.strip() for name, _, value in pairs}
        else:
            messages.append(frame)
    return response, messages, trailers


def test_grpc_web_call_from_web_page_succeeds(mesh: Mesh) -> None:
    response, messages, trailers = web_call(mesh.envoy, request(901), {"origin": ORIGIN})
    assert (response.status, trailers["grpc-status"]) == (200, "0")
    assert response.getheader("access-control-allow-origin") == ORIGIN
    parts = [pb.GenerateResponse.FromString(message) for message in messages]
    assert parts[-1].finish.usage.completion_tokens == sum(len(part.token_ids) for part in parts) == 24


def test_web_pages_may_send_client_headers() -> None:
    """A browser may send the headers of API key, trace and tenant."""
    text = (DEPLOY / "mesh" / "envoy.yaml").read_text()
    (allowed,) = re.findall(r'allow_headers: "([^"]+)"', text)
    # A line's end behind a backslash is none, as in YAML.
    allowed = re.sub(r"\\\n\s*", "", allowed)
    assert {"authorization", "traceparent", "tracestate", "grpc-timeout", TENANT_KEY} <= set(allowed.split(","))


def test_web_pages_of_other_origins_cannot_read_answers(mesh: Mesh) -> None:
    response, _, _ = web_call(mesh.envoy, request(902), {"origin": "https://elsewhere.example.com"})
    assert response.getheader("access-control-allow-origin") is None


def by_json(mesh: Mesh, method: str, body: str, query: str = "") -> tuple[int, str]:
    """Status and body of the answer to a JSON POST."""
    connection = http.client.HTTPConnection("127.0.0.1", mesh.envoy.port, timeout=60)
    with contextlib.closing(connection):
        path = f"/fissile.v1.InferenceService/{method}{query}"
        connection.request("POST", path, body.encode(), {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode()


def test_json_request_gets_same_answer_as_grpc(mesh: Mesh) -> None:
    """Clients without gRPC, such as curl, can use JSON."""
    asked = request(41, 30)
    whole = generate(mesh.stub, asked)
    status, once = by_json(mesh, "GenerateOnce", MessageToJson(asked))
    assert status == 200
    answer = ParseDict(json.loads(once), pb.GenerateOnceResponse()).answers[0]
    assert (answer.text, list(answer.token_ids)) == (whole.text, whole.token_ids)
    status, lines = by_json(mesh, "Generate", MessageToJson(asked, preserving_proto_field_name=True))
    parts = [ParseDict(json.loads(line), pb.GenerateResponse()) for line in lines.splitlines() if line]
    assert (status, "".join(part.text for part in parts)) == (200, whole.text)
    assert [part.HasField("finish") for part in parts] == [False] * (len(parts) - 1) + [True]


def test_large_json_request_reaches_the_router(mesh: Mesh) -> None:
    messages = {"messages": [{"role": "user", "content": "é" * 300_000}], "sampling_params": {"max_tokens": 1}}
    status, body = by_json(mesh, "ChatOnce", json.dumps(messages))
    assert (status, json.loads(body)["details"][0]["field_violations"][0]["field"]) == (400, "messages")
    status, body = by_json(mesh, "ListModels", "{}")
    assert (status, json.loads(body)["models"][0]["name"]) == (200, "test")


@pytest.mark.parametrize(
    ("method", "body", "status", "reason", "field"),
    [
        ("GenerateOnce", {"text": "a", "sampling_params": {"top_p": 0}}, 400, "INVALID_FIELD", "sampling_params.top_p"),
        ("Generate", {"text": "a", "sampling_params": {"top_p": 0}}, 400, "INVALID_FIELD", "sampling_params.top_p"),
        ("GetModel", {"model": "other"}, 404, "UNKNOWN_MODEL", None),
        ("ChatOnce", {}, 400, "INVALID_FIELD", "messages"),
        (
            "ChatOnce",
            {"messages": [{"role": "user", "parts": [{"image": {}}]}]},
            501,
            "UNSERVED_FIELD",
            "messages.parts.image",
        ),
    ],
)
def test_refused_json_request_gets_reason_and_field_as_json(
    mesh: Mesh, method: str, body: dict[str, Any], status: int, reason: str, field: str | None
) -> None:
    """Former fault: the body was empty, because the descriptor set lacked the types of error details."""
    got, said = by_json(mesh, method, json.dumps(body))
    details = json.loads(said)["details"]
    assert (got, [each["reason"] for each in details if "reason" in each]) == (status, [reason])
    named = [each["field"] for detail in details for each in detail.get("field_violations", ())]
    assert named == ([] if field is None else [field])


@pytest.mark.parametrize(
    ("method", "body", "query", "status"),
    [("ChatOnce", '{"messages": [', "", 400), ("Nothing", "{}", "", 404), ("ListModels", "{}", "?page=2", 400)],
)
def test_invalid_json_request_is_refused_by_envoy(mesh: Mesh, method: str, body: str, query: str, status: int) -> None:
    assert by_json(mesh, method, body, query)[0] == status


def test_deadline_through_envoy_ends_request_at_router(mesh: Mesh) -> None:
    """The client does not watch its deadline itself; the router ends the running request, and its span says so."""
    trace_id = "5" * 31 + "2"
    headers = {"grpc-timeout": "2500m", "traceparent": f"00-{trace_id}-{'7' * 16}-01"}
    _, messages, trailers = web_call(mesh.envoy, request(903, 1500), headers)
    assert trailers["grpc-status"] == "4", trailers
    assert messages
    (span,) = spans_of(mesh, trace_id, METHOD[1:])
    assert span.attributes["rpc.response.status_code"] == "DEADLINE_EXCEEDED"


class Load:
    """Clients that send one request after the other, until they are told to stop."""

    def __init__(self, stub: InferenceServiceStub, clients: int, max_tokens: int) -> None:
        self.outcomes: list[tuple[grpc.StatusCode, int]] = []
        self._stop = threading.Event()
        self._stub = stub
        self._max_tokens = max_tokens
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, client: int) -> None:
        i = 0
        while not self._stop.is_set():
            i += 1
            self.outcomes.append(outcome(self._stub, 10_000 * (client + 1) + i, self._max_tokens))

    def wait_for(self, count: int) -> None:
        """Waits for so many more outcomes."""
        wanted, end = len(self.outcomes) + count, time.monotonic() + 60
        while len(self.outcomes) < wanted:
            assert time.monotonic() < end
            time.sleep(0.02)


def test_draining_router_loses_no_answer(mesh: Mesh) -> None:
    with Load(mesh.stub, clients=8, max_tokens=40) as clients:
        clients.wait_for(16)
        assert mesh.routers[1].stop(signal.SIGTERM) == 0
        clients.wait_for(16)
    assert Counter(clients.outcomes) == {(grpc.StatusCode.OK, 40): len(clients.outcomes)}


class Streams:
    """Requests that run at once, each with what has come of it."""

    def __init__(self, stub: InferenceServiceStub, count: int, max_tokens: int) -> None:
        self.tokens = [0] * count
        self._stub = stub
        self._max_tokens = max_tokens
        self._pool = ThreadPoolExecutor(count)
        self._codes = [self._pool.submit(self._run, i) for i in range(count)]

    def _run(self, i: int) -> grpc.StatusCode:
        call = self._stub.Generate(request(50_000 + i, self._max_tokens), timeout=60)
        with contextlib.suppress(grpc.RpcError):
            for part in call:
                self.tokens[i] += len(part.token_ids)
        code = call.code()
        assert isinstance(code, grpc.StatusCode)
        return code

    def codes(self) -> list[grpc.StatusCode]:
        """How each has ended, when all have."""
        found = [code.result() for code in self._codes]
        self._pool.shutdown()
        return found


def test_killed_router_ends_only_its_own_streams(mesh: Mesh) -> None:
    streams = Streams(mesh.stub, count=8, max_tokens=600)
    mesh.envoy.wait(lambda: all(streams.tokens), "all streams begun")
    lost = mesh.envoy.of_host(mesh.routers[1].port, "rq_active")
    mesh.routers[1].stop(signal.SIGKILL)
    codes = streams.codes()
    assert 0 < lost < 8
    assert sum(code in LOST for code in codes) == lost
    assert sum(code is grpc.StatusCode.OK for code in codes) == 8 - lost
    assert max(streams.tokens) == 600
    assert outcome(mesh.stub, 60_000, 10) == (grpc.StatusCode.OK, 10)


def test_unstarted_requests_of_lost_router_run_elsewhere(mesh: Mesh) -> None:
    """The router is frozen first, so that it holds requests and has sent nothing."""
    mesh.routers[1].running.send_signal(signal.SIGSTOP)
    streams = Streams(mesh.stub, count=8, max_tokens=20)
    mesh.envoy.wait(lambda: mesh.envoy.of_host(mesh.routers[1].port, "rq_active") > 0, "a request at the frozen router")
    mesh.routers[1].stop(signal.SIGKILL)
    assert streams.codes() == [grpc.StatusCode.OK] * 8
    assert streams.tokens == [20] * 8


@pytest.fixture
def behind_sidecar(mesh: Mesh, tmp_path: Path) -> Iterator[Process]:
    """A router that reaches the first worker through an Envoy which breaks what lasts longer than a second."""
    configuration = load("worker-sidecar.yaml")
    manager = connection_manager(configuration)
    manager["common_http_protocol_options"]["max_connection_duration"] = "1s"
    manager["drain_timeout"] = "0.1s"
    (route,) = manager["route_config"]["virtual_hosts"][0]["routes"]
    route["route"]["max_stream_duration"] = {"max_stream_duration": "1s"}
    with running_envoy(tmp_path, configuration, [mesh.worker.port]) as sidecar:
        port = free_port()
        router = Process(
            "far", ["router", "--port", str(port), "--worker", sidecar.address], port, tmp_path / "far.log"
        )
        router.start()
        try:
            router.wait_serving()
            yield router
        finally:
            router.running.kill()
            router.running.wait()


def test_s4_session_broken_by_sidecar_costs_no_request(mesh: Mesh, behind_sidecar: Process) -> None:
    """With `max_stream_duration` and `max_connection_duration` of a second, streams of two keep their tokens."""
    sessions = behind_sidecar.log.read_text().count('"worker up"')
    with grpc.insecure_channel(behind_sidecar.address) as channel, ThreadPoolExecutor(12) as pool:
        broken = InferenceServiceStub(channel)
        asked = [(stub, request(70_000 + i, 400)) for stub in (broken, mesh.stub) for i in range(6)]
        answers = list(pool.map(lambda pair: generate(*pair), asked))
    got, undisturbed = answers[:6], answers[6:]
    assert [answer.token_ids for answer in got] == [answer.token_ids for answer in undisturbed]
    assert all(answer.finish is not None and answer.finish.attempts == 1 for answer in got)
    assert behind_sidecar.log.read_text().count('"worker up"') > sessions
