"""Bytes that are no request, requests that are too large, and parameters that make no sense.

They go to the router's public port, its admin port and a worker's port; each must go on serving, and say little.
"""

from __future__ import annotations

import contextlib
import math
import random
import socket
import struct
import time
import unicodedata
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from fissile.v1 import inference_pb2 as pb
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.limits import MAX_ANSWERS
from tests.chaos.conftest import Report
from tests.chaos.raw_http2 import PREFACE, Outcome, RawClient, frame
from tests.chaos.scale import SCALE
from tests.chaos.support import detail, quantile, reason_of
from tests.e2e.service import Answer, Service, free_port, generate, running_service
from tests.e2e.simulated import CONFIG, OPTIONS, request, simulated_model, wait_workers
from tests.processes import cpu_s

INVALID, INTERNAL = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL
EXHAUSTED, UNIMPLEMENTED = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNIMPLEMENTED
TOO_LONG = grpc.StatusCode.OUT_OF_RANGE
MAX_LEN = 2048


@dataclass(frozen=True)
class Target:
    """A port, a method on it, and the log of its process."""

    address: str
    path: str
    log: Path

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture(scope="module")
def admin_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, admin_port: int) -> Iterator[Service]:
    model = simulated_model(tmp_path_factory.mktemp("model"), MAX_LEN)
    folder = tmp_path_factory.mktemp("malformed")
    options = ["--admin-port", str(admin_port)]
    with running_service(folder, model, worker_options=OPTIONS, router_options=options) as running:
        wait_workers(running, 1)
        yield running


@pytest.fixture(params=["public", "admin", "worker", "session", "health", "reflection"])
def target(request: pytest.FixtureRequest, service: Service, admin_port: int) -> Target:
    router, worker = service.router, service.workers[0]
    return {
        "public": Target(router.address, "/fissile.v1.InferenceService/Generate", router.log),
        "admin": Target(f"127.0.0.1:{admin_port}", "/fissile.admin.v1.AdminService/DrainWorker", router.log),
        "worker": Target(worker.address, "/fissile.worker.v1.WorkerService/Generate", worker.log),
        "session": Target(worker.address, "/fissile.worker.v1.WorkerService/Session", worker.log),
        "health": Target(router.address, "/grpc.health.v1.Health/Check", router.log),
        "reflection": Target(
            router.address, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", router.log
        ),
    }[request.param]


def assert_serves(service: Service) -> None:
    """Router and worker live, and answer as before."""
    for process in (service.router, *service.workers):
        assert process.running.poll() is None
    assert len(generate(service.stub, request(5, 16)).token_ids) == 16


def ask(target: Target, body: bytes, headers: tuple[tuple[str, str], ...] = (), path: str = "") -> Outcome:
    client = RawClient(target.address)
    try:
        return client.request(path or target.path, body, headers=headers)
    finally:
        client.close()


# Body, headers and allowed statuses of each malformed message. gRPC itself answers a compression flag without an
# encoding with INTERNAL.
NOT_MESSAGES: dict[str, tuple[bytes, tuple[tuple[str, str], ...], set[grpc.StatusCode]]] = {
    "no protobuf": (frame(b"\x0a\xff\xff\xff\xff\x0f"), (), {INVALID}),
    "truncated message": (frame(b"abc", length=100), (), {INVALID}),
    "truncated prefix": (b"\0\0", (), {INVALID}),
    "no message": (b"", (), {INVALID}),
    "length of 2 GiB": (frame(b"abc", length=2**31), (), {EXHAUSTED}),
    "compressed, no encoding": (frame(b"abc", flag=1), (), {INTERNAL}),
    "unknown encoding": (frame(b"abc", flag=1), (("grpc-encoding", "snappier"),), {INTERNAL, UNIMPLEMENTED}),
    "compressed": (frame(b"abc", flag=1), (("grpc-encoding", "gzip"),), {UNIMPLEMENTED}),
}


def test_malformed_message_gets_status(service: Service, target: Target) -> None:
    """M1: malformed protobuf, truncated frames and bad compression: the right status soon, and a line a request."""
    before = len(target.lines())
    for what, (body, headers, expected) in NOT_MESSAGES.items():
        outcome = ask(target, body, headers)
        truncated_stream = target.path.endswith("Info") and body in (b"", b"\0\0", frame(b"abc", length=100))
        # A stream of no requests is a stream.
        wanted = {grpc.StatusCode.OK} if truncated_stream else expected
        assert outcome.code in wanted, (what, outcome)
    # Some lines may be on their way: those of this test, and of the one before.
    assert len(target.lines()) - before <= len(NOT_MESSAGES) + 1
    assert "Traceback" not in target.log.read_text()
    assert_serves(service)


def test_m1_unknown_methods_and_verbs(service: Service, target: Target) -> None:
    """M1: a method, a service or a verb that does not exist."""
    before = len(target.lines())
    for path in ("/no.such.Service/Method", target.path + "x", "/", "nothing", "/" + "x" * 4000, "/\x7f//%00/"):
        outcome = ask(target, frame(b""), path=path)
        assert outcome.code is UNIMPLEMENTED or outcome.reset is not None, (path, outcome)
    client = RawClient(target.address)
    assert client.request(target.path, b"", method="GET").reset is not None
    client.close()
    assert len(target.lines()) - before <= 7 + 1
    assert_serves(service)


def random_frame(rnd: random.Random) -> bytes:
    """A frame whose header is mostly valid, with random contents."""
    payload = rnd.randbytes(rnd.randrange(64))
    kind = rnd.randrange(10) if rnd.random() < 0.9 else rnd.randrange(256)
    length = len(payload) if rnd.random() < 0.95 else rnd.randrange(2**24)
    stream = rnd.choice([0, 1, 3, rnd.randrange(2**31)])
    return struct.pack(">I", length)[1:] + bytes([kind, rnd.randrange(256)]) + struct.pack(">I", stream) + payload


def babble(address: str, seed: int, frames: int) -> int:
    """Sends random frames over as many connections as it takes; how many it took."""
    rnd = random.Random(seed)
    sent = connections = 0
    host, _, port = address.rpartition(":")
    while sent < frames:
        connections += 1
        with socket.create_connection((host, int(port)), timeout=60) as sock, contextlib.suppress(OSError):
            if rnd.random() < 0.9:
                sock.sendall(PREFACE + b"\0\0\0\4\0\0\0\0\0")
            for _ in range(rnd.randrange(1, 40)):
                sent += 1
                sock.sendall(random_frame(rnd))
                time.sleep(0 if rnd.random() < 0.9 else 0.002)
    return connections


def test_m1_random_frames(service: Service, admin_port: int, report: Report) -> None:
    """M1: thousands of random HTTP/2 frames on every port: all processes live, serve, and log little."""
    ports = [service.router.address, f"127.0.0.1:{admin_port}", service.workers[0].address]
    logs = [service.router.log, service.workers[0].log]
    before = sum(len(log.read_text().splitlines()) for log in logs)
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda at: babble(at[1], at[0], SCALE.m1_frames // 3 + 1), enumerate(ports)))
    assert_serves(service)
    lines = sum(len(log.read_text().splitlines()) for log in logs) - before
    report("M1", frames=3 * (SCALE.m1_frames // 3 + 1), connections=sum(done), log_lines=lines)
    assert lines <= sum(done)
    assert not any("Traceback" in log.read_text() for log in logs)
    with grpc.insecure_channel(ports[1]) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
    assert health.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.slow
def test_too_large_message_is_refused_while_neighbour_streams(service: Service, report: Report) -> None:
    """M2: a million token ids, a message of 64 MiB, texts of 9 and 20 MiB: refused, while a neighbour's tokens flow."""
    large = {
        "million_ids": (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[7] * 1_000_000)), TOO_LONG),
        "text_9_mib": (pb.GenerateRequest(text="word " * (9 * 2**20 // 5)), TOO_LONG),
        "text_20_mib": (pb.GenerateRequest(text="x" * (20 * 2**20)), EXHAUSTED),
        "message_64_mib": (pb.GenerateRequest(text="x" * (64 * 2**20)), EXHAUSTED),
    }
    expected = generate(service.stub, request(9, 600)).token_ids
    times: dict[str, float] = {}
    answer, gaps = Answer(), []
    with (
        grpc.insecure_channel(service.router.address, options=[("grpc.max_send_message_length", -1)]) as channel,
        ThreadPoolExecutor(1) as pool,
    ):
        stub: Any = type(service.stub)(channel)
        neighbour = iter(service.stub.Generate(request(9, 600), timeout=60))
        answer.add(next(neighbour))

        def refuse_all() -> None:
            for what, (asked, code) in large.items():
                begin = time.monotonic()
                with pytest.raises(grpc.RpcError) as refused:
                    list(stub.Generate(asked, timeout=60))
                times[what + "_s"] = time.monotonic() - begin
                assert refused.value.code() is code, what

        refusing = pool.submit(refuse_all)
        last = time.monotonic()
        for part in neighbour:
            now = time.monotonic()
            gaps.append(now - last)
            last = now
            answer.add(part)
        refusing.result()
    report("M2", **times, neighbour_gap_p99_ms=quantile(gaps, 0.99) * 1000, neighbour_gap_max_ms=max(gaps) * 1000)
    assert answer.token_ids == expected
    assert_serves(service)


# M3: what a request's parameters may be, written down once more, apart from the code that checks them.
REAL: dict[str, Callable[[float], bool]] = {
    "temperature": lambda v: 0 <= v <= 100,
    "top_p": lambda v: 0 < v <= 1,
    "min_p": lambda v: 0 <= v <= 1,
    "repetition_penalty": lambda v: 0 < v <= 100,
    "presence_penalty": lambda v: -2 <= v <= 2,
    "frequency_penalty": lambda v: -2 <= v <= 2,
}
VOCAB = CONFIG["vocab_size"]
reals = st.floats(width=32, allow_nan=True) | st.sampled_from([0.0, -0.0, 1.0, math.nan, math.inf, -1.0, 1e-40, 100.5])
ids = st.lists(st.integers(0, 255) | st.sampled_from([299, 300, 2**32 - 1]), max_size=70)


@st.composite
def requests(draw: st.DrawFn) -> pb.GenerateRequest:
    made = pb.GenerateRequest(sampling_params=pb.SamplingParams(max_tokens=3))
    params = made.sampling_params
    for name in draw(st.sets(st.sampled_from(sorted(REAL)), max_size=3)):
        setattr(params, name, draw(reals))
    if draw(st.booleans()):
        params.max_tokens = draw(st.sampled_from([0, 1, 2, 5]))
        params.min_tokens = draw(st.sampled_from([0, 1, 6, 2**32 - 1]))
    if draw(st.integers(0, 4)) == 0:
        params.n = draw(st.sampled_from([0, 1, 2, 129, 2**32 - 1]))
    params.stop_strings.extend(draw(st.just([]) | st.lists(st.text(max_size=300), max_size=20)))
    params.stop_token_ids.extend(draw(st.just([]) | ids))
    params.stop_token_sequences.extend(pb.TokenIds(ids=draw(ids)) for _ in range(draw(st.sampled_from([0, 0, 1, 17]))))
    made.priority = pb.Priority.ValueType(draw(st.sampled_from([0, 1, 2, 3, 7])))
    made.session_id = draw(st.text(max_size=5) | st.just("s" * 129))
    made.cache_salt = draw(st.text(max_size=5) | st.just("é" * 65))
    made.request_id = draw(st.just("") | st.just("r" * 129))
    if draw(st.booleans()):
        made.text = draw(st.text(max_size=40))
    elif draw(st.booleans()):
        made.token_ids.ids.extend(draw(ids))
    return made


def problems(asked: pb.GenerateRequest) -> set[str]:
    """The paths that a refusal may name; empty when the request is good."""
    params, bad = asked.sampling_params, set()
    for field, value in params.ListFields():
        if field.name in REAL and not REAL[field.name](value):
            bad.add(f"sampling_params.{field.name}")
    if params.max_tokens == 0:
        bad.add("sampling_params.max_tokens")
    if params.min_tokens > params.max_tokens:
        bad.add("sampling_params.min_tokens")
    if params.HasField("n") and not 1 <= params.n <= MAX_ANSWERS:
        bad.add("sampling_params.n")
    if len(params.stop_strings) > 16:
        bad.add("sampling_params.stop_strings")
    bad |= {
        f"sampling_params.stop_strings[{i}]"
        for i, text in enumerate(params.stop_strings)
        if not 0 < len(text.encode()) <= 256
    }
    if len(params.stop_token_ids) > 64:
        bad.add("sampling_params.stop_token_ids")
    bad |= unknown_ids("sampling_params.stop_token_ids", params.stop_token_ids)
    if len(params.stop_token_sequences) > 16:
        bad.add("sampling_params.stop_token_sequences")
    for i, sequence in enumerate(params.stop_token_sequences):
        path = f"sampling_params.stop_token_sequences[{i}].ids"
        bad |= unknown_ids(path, sequence.ids) | (set() if 0 < len(sequence.ids) <= 64 else {path})
    bad |= {"priority"} if asked.priority > 3 else set()
    bad |= {name for name in ("session_id", "cache_salt", "request_id") if len(getattr(asked, name).encode()) > 128}
    bad |= {name for name in ("session_id", "request_id") if any(map(steers_a_terminal, getattr(asked, name)))}
    kind = asked.WhichOneof("prompt")
    if kind is None:
        return bad | {"prompt"}
    if kind == "text":
        return bad | ({"text"} if not asked.text else set())
    return (
        bad | unknown_ids("token_ids.ids", asked.token_ids.ids) | (set() if asked.token_ids.ids else {"token_ids.ids"})
    )


def steers_a_terminal(char: str) -> bool:
    """True for control characters, separators of lines, and marks of the direction of text."""
    steers = unicodedata.category(char) in ("Cc", "Zl", "Zp") or char in "\u061c\u200e\u200f"
    return steers or unicodedata.bidirectional(char) in ("LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI")


def unknown_ids(path: str, given_ids: Any) -> set[str]:
    return {f"{path}[{i}]" for i, token in enumerate(given_ids) if token >= VOCAB}


def test_m3_random_parameters(service: Service) -> None:
    """M3: NaN, infinities, zeros, counts and lengths out of range: INVALID_ARGUMENT with the field's path, or an
    answer; never INTERNAL."""

    @settings(max_examples=SCALE.m3_examples, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(requests())
    def check(asked: pb.GenerateRequest) -> None:
        bad = problems(asked)
        if not bad:
            ends = [part.HasField("finish") for part in service.stub.Generate(asked, timeout=60)]
            assert sum(ends) == max(1, asked.sampling_params.n)
            assert ends[-1]
            return
        with pytest.raises(grpc.RpcError) as refused:
            list(service.stub.Generate(asked, timeout=60))
        assert refused.value.code() is INVALID, refused.value.details()
        found = detail(refused.value, error_details_pb2.BadRequest)
        assert found is not None
        assert {violation.field for violation in found.field_violations} <= bad

    check()
    assert "Traceback" not in service.router.log.read_text()
    assert_serves(service)


def entries(message: type[Message], field: str, count: int) -> bytes:
    """A message with so many empty entries in a list: 2 bytes each."""
    number = message.DESCRIPTOR.fields_by_name[field].number
    assert number < 16
    return bytes([number << 3 | 2, 0]) * count


@pytest.mark.parametrize("field", ["stop_strings", "stop_token_ids", "stop_token_sequences"])
def test_m3_a_million_stops(service: Service, field: str) -> None:
    """M3: a million stop strings, stop ids and stop sequences: counted, and not looked at one by one."""
    asked = pb.GenerateRequest(text="x")
    if field == "stop_token_ids":
        asked.sampling_params.stop_token_ids.extend([5] * 1_000_000)
    else:
        asked.sampling_params.MergeFromString(entries(pb.SamplingParams, field, 1_000_000))
    router = service.router.running.pid
    before_s = cpu_s(router)
    with pytest.raises(grpc.RpcError, match="has 1000000 entries; valid: at most") as refused:
        list(service.stub.Generate(asked, timeout=60))
    assert refused.value.code() is INVALID
    found = detail(refused.value, error_details_pb2.BadRequest)
    assert found is not None
    assert [violation.field for violation in found.field_violations] == [f"sampling_params.{field}"]
    # One by one they take 8 s of the processor.
    assert cpu_s(router) - before_s < 4.0
    assert_serves(service)


def test_m3_a_million_messages_and_template_arguments(service: Service) -> None:
    """M3: a chat of a million messages, and of a million template arguments."""
    many = pb.ChatRequest.FromString(entries(pb.ChatRequest, "messages", 1_000_000))
    large = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="x")])
    large.template_arguments_json = f'{{"a": [{", ".join(["null"] * 1_000_000)}]}}'
    for asked, path in ((many, "messages"), (large, "template_arguments_json")):
        with pytest.raises(grpc.RpcError) as refused:
            list(service.stub.Chat(asked, timeout=60))
        assert refused.value.code() is INVALID
        found = detail(refused.value, error_details_pb2.BadRequest)
        assert found is not None
        assert [violation.field for violation in found.field_violations] == [path]
    assert_serves(service)


def test_m3_invalid_utf8_and_types(service: Service) -> None:
    """M3: strings that are no UTF-8, and a field of another wire type than its own."""
    path = "/fissile.v1.InferenceService/Generate"
    call = service.channel.unary_stream(path, lambda data: data, pb.GenerateResponse.FromString)
    model, request_id = b"\x0a", b"\x12"
    for body in (model + b"\x03\xff\xfe\xfd", request_id + b"\x02\xc3\x28"):
        with pytest.raises(grpc.RpcError) as refused:
            list(call(body, timeout=60))
        assert refused.value.code() is INVALID
        assert reason_of(refused.value) == "MALFORMED_REQUEST"
    assert_serves(service)


@pytest.mark.slow
def test_m3_a_request_id_in_flight(service: Service) -> None:
    """M3: an id that is in flight: ALREADY_EXISTS; the first stream goes on, and the id is free when it has ended."""
    first = service.stub.Generate(request(3, 400), timeout=60)
    answer = Answer()
    answer.add(next(iter(first)))
    with pytest.raises(grpc.RpcError) as refused:
        list(service.stub.Generate(request(3, 4), timeout=60))
    assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
    for part in first:
        answer.add(part)
    assert len(answer.token_ids) == 400
    assert len(generate(service.stub, request(3, 4)).token_ids) == 4
