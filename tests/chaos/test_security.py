"""Callers that must not get in, and what must not get out, with mTLS on every hop.

Each docstring begins with the code of its fault; `mTLS:` is the service without one.
"""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from fissile.admin.v1 import admin_pb2 as apb
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub
from fissile.worker.v1 import worker_pb2 as wpb
from fissile.worker.v1.worker_pb2_grpc import WorkerServiceStub
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tests.certificates import LOOPBACK, Authority
from tests.e2e.secure import (
    OTHER_IDENTITY,
    ROUTER_IDENTITY,
    WORKER_NAME,
    SecureService,
    check_health,
    secure_service,
    tls_channel,
)
from tests.e2e.service import REPOSITORY, Answer, Process
from tests.e2e.simulated import OPTIONS, request, simulated_model
from tests.fake_dns import wait_until
from tests.otlp_receiver import OtlpReceiver

PROMPT = "the quarterly numbers of Zanzibar Telecom are worse than anybody knows"


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, collector: OtlpReceiver) -> Iterator[SecureService]:
    model = simulated_model(tmp_path_factory.mktemp("model"))
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    folder = tmp_path_factory.mktemp("secure")
    with secure_service(folder, model, workers=3, worker_options=OPTIONS, environment=environment) as running:
        wait_workers(running, 3)
        yield running


def wait_workers(service: SecureService, count: int) -> None:
    end = time.monotonic() + 60
    with service.channel() as channel:
        stub = InferenceServiceStub(channel)
        while stub.GetModel(pb.GetModelRequest(), timeout=60).model.ready_workers != count:
            assert time.monotonic() < end, f"not {count} workers:\n{service.router.log.read_text()[-3000:]}"
            time.sleep(0.05)


def text_request(text: str, max_tokens: int = 8, **fields: Any) -> pb.GenerateRequest:
    params = pb.SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True)
    output = pb.OutputOptions(return_token_ids=True)
    return pb.GenerateRequest(text=text, sampling_params=params, output_options=output, **fields)


def failure(call: Callable[[], object]) -> grpc.Call:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    return error  # type: ignore[no-any-return]


def status(call: Callable[[], object]) -> grpc.StatusCode | None:
    """None is OK."""
    try:
        call()
    except grpc.RpcError as error:
        code = error.code()
        assert isinstance(code, grpc.StatusCode)
        return code
    return None


def reason(error: grpc.Call) -> str:
    info = error_details_pb2.ErrorInfo()
    status = rpc_status.from_call(error)
    assert status is not None
    assert any(detail.Unpack(info) for detail in status.details)
    return str(info.reason)


def restart(process: Process) -> None:
    process.start()
    process.wait_serving()


# The service as a whole.


def fissile(
    service: SecureService, *arguments: str, admin: bool = False, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "common.cli.main", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, **service.cli(admin=admin), **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_commands_call_by_mtls_and_key(service: SecureService) -> None:
    """mTLS: `generate`, `models` and `workers`, and their one line when something is missing."""
    asked = fissile(service, "generate", "hi", "--text", "--max-tokens", "5", "--ignore-eos", "--json")
    assert (asked.returncode, json.loads(asked.stdout)["usage"]["completion_tokens"]) == (0, 5), asked.stderr
    assert json.loads(fissile(service, "models", "--json").stdout)[0]["name"] == "test"
    listed = fissile(service, "workers", "--json", admin=True)
    assert [worker["worker_id"] for worker in json.loads(listed.stdout)] == sorted(
        (worker.name for worker in service.workers), key=lambda name: service.workers[int(name[-1])].address
    )
    for environment, code, message in [
        ({"FISSILE_API_KEY": ""}, 2, "UNAUTHENTICATED: metadata authorization is missing"),
        ({"FISSILE_API_KEY": "fsl_wrong"}, 2, "UNAUTHENTICATED: the API key is not valid"),
        ({"FISSILE_API_KEY": service.keys["ops"]}, 2, "PERMISSION_DENIED: fissile.v1.InferenceService/ListModels"),
        ({"FISSILE_TLS_CA": "", "FISSILE_CLIENT_KEY": "", "FISSILE_CLIENT_CERT": ""}, 3, "no router can be reached"),
        ({"FISSILE_TLS_CA": "/nowhere"}, 2, "/nowhere cannot be read"),
    ]:
        refused = fissile(service, "models", "--timeout", "20", environment=environment)
        assert (refused.returncode, refused.stdout) == (code, ""), refused.stderr
        assert message in refused.stderr
        assert refused.stderr.count("\n") == 1
        assert "fsl_" not in refused.stderr


def asked_all(
    service: SecureService, count: int, max_tokens: int, begun: threading.Event | None = None
) -> list[Answer]:
    """Answers to so many requests at once; `begun` is set with the first message of any."""
    with service.channel() as channel, ThreadPoolExecutor(count) as pool:
        stub = InferenceServiceStub(channel)

        def ask(i: int) -> Answer:
            answer, made = Answer(), request(i, max_tokens)
            made.request_id = f"{i}-{random.random()}"
            made.sampling_params.seed = i
            for part in stub.Generate(made, timeout=90):
                answer.add(part)
                if begun is not None:
                    begun.set()
            return answer

        return list(pool.map(ask, range(count)))


def test_streams_survive_a_killed_worker_and_new_certificates(service: SecureService) -> None:
    """mTLS: with all certificates replaced in the middle, and a worker killed after that, no stream loses a token."""
    undisturbed = asked_all(service, 12, 150)
    pki = service.pki

    def shown(process: Process) -> bytes:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        raw = socket.create_connection(("127.0.0.1", process.port), timeout=60)
        with context.wrap_socket(raw) as wrapped:
            return wrapped.getpeercert(binary_form=True) or b""

    # On a busy machine the streams may have ended before the worker is killed.
    for _ in range(5):
        before = [shown(process) for process in (service.router, service.workers[0])]
        begun = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(asked_all, service, 12, 150, begun)
            assert begun.wait(60)
            pki.servers.issue("router", *LOOPBACK)
            pki.servers.issue("worker", WORKER_NAME)
            pki.routers.issue("router-client", ROUTER_IDENTITY)
            after = [shown(process) for process in (service.router, service.workers[0])]
            service.workers[1].stop(signal.SIGKILL)
            disturbed = running.result()
        assert all(old != new for old, new in zip(before, after, strict=True))
        assert [answer.token_ids for answer in disturbed] == [answer.token_ids for answer in undisturbed]
        # The router dials it with the certificate that it has read since.
        restart(service.workers[1])
        wait_workers(service, 3)
        moved = [answer for answer in disturbed if answer.finish is not None and answer.finish.attempts == 2]
        if moved:
            break
    assert moved


def test_operator_key_drains_worker_and_client_key_may_not(service: SecureService) -> None:
    """mTLS: AdminService passes the wish on by mTLS; a client's key may not, and its certificate does not get there."""
    drain = apb.DrainWorkerRequest(worker_id="worker-2")
    with service.admin("alice") as admin:
        error = failure(lambda: admin.DrainWorker(drain, timeout=60))
    assert (error.code(), reason(error)) == (grpc.StatusCode.PERMISSION_DENIED, "ROLE_MISSING")
    assert "fissile.admin.v1.AdminService/DrainWorker needs role admin-write" in (error.details() or "")
    with tls_channel(service.admin_address, service.pki.servers, service.pki.client) as channel:
        assert failure(lambda: check_health(channel)).code() is grpc.StatusCode.UNAVAILABLE
    with service.admin() as admin:
        admin.DrainWorker(drain, timeout=60)
    assert service.workers[2].running.wait(60) == 0
    restart(service.workers[2])
    wait_workers(service, 3)


def test_plain_text_outside_loopback_is_warned(tmp_path: Path) -> None:
    """mTLS: a router without it warns, once each, of its own ports and of workers that others can listen to."""
    arguments = ["router", "--host", "0.0.0.0", "--admin-host", "0.0.0.0", "--admin-port", "0"]
    for worker in ("192.0.2.1:1", "192.0.2.2:1"):
        arguments += ["--worker", worker]
    router = Process("router", [*arguments, "--port", "0"], 0, tmp_path / "router.log")
    router.start()
    end = time.monotonic() + 60
    while "router listening" not in router.log.read_text() or "PLAIN TEXT to" not in router.log.read_text():
        assert time.monotonic() < end, router.log.read_text()
        time.sleep(0.05)
    assert router.stop() == 0
    warned = [line for line in router.log.read_text().splitlines() if "PLAIN TEXT" in line]
    assert ["PLAIN TEXT to workers" in line for line in warned] == [False, False, True]
    assert all('"level": "warning"' in line for line in warned)


# S1.


def ports(service: SecureService) -> dict[str, tuple[str, Authority, str]]:
    """Address, CA of the callers, and name in the certificate."""
    pki = service.pki
    return {
        "router": (service.router.address, pki.clients, ""),
        "admin": (service.admin_address, pki.operators, ""),
        "worker": (service.workers[0].address, pki.routers, WORKER_NAME),
    }


@pytest.mark.parametrize("port", ["router", "admin", "worker"])
def test_caller_without_valid_certificate_is_refused(port: str, service: SecureService, tmp_path: Path) -> None:
    """S1: wrong CA, expired, wrong SAN, no client certificate, plain text: UNAVAILABLE at the client, no crash."""
    address, callers, name = ports(service)[port]
    servers, stranger = service.pki.servers, Authority(tmp_path, "stranger")
    good = callers.issue("good", ROUTER_IDENTITY)
    channels = {
        "server of a wrong CA": tls_channel(address, stranger, good, name),
        "wrong SAN": tls_channel(address, servers, good, "elsewhere.example"),
        "no certificate": tls_channel(address, servers, None, name),
        "client of a wrong CA": tls_channel(address, servers, stranger.issue("x", ROUTER_IDENTITY), name),
        "expired": tls_channel(address, servers, callers.issue("old", ROUTER_IDENTITY, days=(-2, -1)), name),
        "not yet valid": tls_channel(address, servers, callers.issue("new", ROUTER_IDENTITY, days=(1, 2)), name),
        "plain text": grpc.insecure_channel(address),
    }
    codes = {}
    for what, channel in channels.items():
        with channel:
            codes[what] = failure(lambda channel=channel: check_health(channel)).code()  # type: ignore[misc]
    assert codes == dict.fromkeys(channels, grpc.StatusCode.UNAVAILABLE)
    with tls_channel(address, servers, good, name) as channel:
        check_health(channel)
    assert service.router.running.poll() is None
    assert service.workers[0].running.poll() is None


def test_s1_a_worker_admits_routers_only(service: SecureService) -> None:
    """S1: a certificate of the routers' CA with another name gets health and nothing else."""
    address, routers, name = ports(service)["worker"]
    other = routers.issue("other", "spiffe://fissile.test/router-of-others", "router")
    with tls_channel(address, service.pki.servers, other, name) as channel:
        check_health(channel)
        stub = WorkerServiceStub(channel)
        hello = wpb.SessionRequest(hello=wpb.Hello(router_id="x", lease_ms=5000))
        calls: list[Callable[[], object]] = [
            lambda: stub.GetWorker(wpb.GetWorkerRequest(), timeout=60),
            lambda: stub.Drain(wpb.DrainRequest(), timeout=60),
            lambda: list(stub.GetTokenizer(wpb.GetTokenizerRequest(), timeout=60)),
            lambda: list(stub.Generate(wpb.GenerateRequest(token_ids=[1]), timeout=60)),
            lambda: list(stub.Session(iter([hello]), timeout=60)),
        ]
        for call in calls:
            error = failure(call)
            assert (error.code(), reason(error)) == (grpc.StatusCode.PERMISSION_DENIED, "PEER_NOT_ALLOWED")
    assert service.workers[0].running.poll() is None


def test_s1_router_id_is_bound_to_its_first_certificate(service: SecureService) -> None:
    """S1: another router's certificate cannot take over a Session by its router_id (S11); the Session goes on."""
    address, routers, name = ports(service)["worker"]
    servers, hello = service.pki.servers, wpb.SessionRequest(hello=wpb.Hello(router_id="mine", lease_ms=5000))
    mine, others = routers.issue("mine", ROUTER_IDENTITY), routers.issue("others", OTHER_IDENTITY)
    frames: queue.SimpleQueue[wpb.SessionRequest | None] = queue.SimpleQueue()
    with tls_channel(address, servers, mine, name) as own, tls_channel(address, servers, others, name) as other:
        frames.put(hello)
        session = WorkerServiceStub(own).Session(iter(frames.get, None), timeout=60)
        assert next(session).HasField("welcome")
        error = failure(lambda: list(WorkerServiceStub(other).Session(iter([hello]), timeout=60)))
        assert (error.code(), reason(error)) == (grpc.StatusCode.PERMISSION_DENIED, "ROUTER_ID_TAKEN")
        frames.put(wpb.SessionRequest(lane=wpb.Lane()))
        assert any(frame.HasField("heartbeat") for frame in session)
        frames.put(None)
        list(session)
        assert session.code() is grpc.StatusCode.OK


def spread(latencies: list[float]) -> str:
    p99 = statistics.quantiles(latencies, n=100)[98]
    return f"p50 {statistics.median(latencies):.1f} p99 {p99:.1f} n {len(latencies)}"


def test_handshake_flood_disturbs_no_client(service: SecureService) -> None:
    """S1: during 200 connections that do not come about every healthy call succeeds, old and new connections alike."""

    def took_ms(stub: InferenceServiceStub) -> float:
        began = time.perf_counter()
        stub.GetModel(pb.GetModelRequest(), timeout=60)
        return (time.perf_counter() - began) * 1e3

    intruders = [sys.executable, "-m", "tests.chaos.intruders", service.router.address, "200"]
    with service.channel() as channel, ThreadPoolExecutor(1) as pool:
        stub = InferenceServiceStub(channel)
        quiet = [took_ms(stub) for _ in range(100)]
        streams = pool.submit(asked_all, service, 4, 60)
        flooded: list[float] = []
        made_anew = 0
        with subprocess.Popen(intruders, cwd=REPOSITORY) as flood:
            while flood.poll() is None or len(flooded) < 100:
                flooded.append(took_ms(stub))
                if made_anew < 10:
                    made_anew += 1
                    with service.channel() as fresh:
                        took_ms(InferenceServiceStub(fresh))
        assert flood.returncode == 0
        assert all(answer.finish is not None for answer in streams.result())
    print(f"\nGetModel over TLS, ms: quiet {spread(quiet)}; during 200 bad handshakes {spread(flooded)}")
    assert made_anew == 10
    assert service.router.running.poll() is None


def test_s1_worker_with_wrong_certificate_name_gets_no_prompt(service: SecureService, tmp_path: Path) -> None:
    """S1: what listens at a worker's address without the name of workers is not used, and the log says why."""
    pki = service.pki
    arguments = ["router", "--port", "0", "--worker", service.workers[0].address, "--worker-ca", str(pki.servers.cert)]
    arguments += ["--worker-tls-name", "somebody.else", "--worker-client-cert", str(pki.router_client.cert)]
    arguments += ["--worker-client-key", str(pki.router_client.key)]
    router = Process("router", arguments, 0, tmp_path / "router.log")
    router.start()
    end = time.monotonic() + 60
    while "Hostname Verification Check failed" not in router.log.read_text():
        assert time.monotonic() < end, router.log.read_text()
        time.sleep(0.05)
    assert router.stop() == 0
    assert "worker up" not in router.log.read_text()


# S2.


def test_s2_a_missing_or_bad_key_is_unauthenticated(service: SecureService) -> None:
    """S2: no key, a wrong one, another scheme: UNAUTHENTICATED; another role or tenant: PERMISSION_DENIED."""
    made = text_request(PROMPT)
    with tls_channel(service.router.address, service.pki.servers, service.pki.client) as channel:
        check_health(channel)
        stub = InferenceServiceStub(channel)
        for metadata, why in [
            ([], "API_KEY_MISSING"),
            ([("authorization", service.keys["alice"])], "API_KEY_MISSING"),
            ([("authorization", f"Basic {service.keys['alice']}")], "API_KEY_MISSING"),
            ([("authorization", f"Bearer {service.keys['alice']}x")], "API_KEY_INVALID"),
            ([("authorization", "Bearer fsl_guess")], "API_KEY_INVALID"),
        ]:
            for call in (
                lambda m=metadata: list(stub.Generate(made, timeout=60, metadata=m)),
                lambda m=metadata: stub.ListModels(pb.ListModelsRequest(), timeout=60, metadata=m),
            ):
                error = failure(call)
                assert (error.code(), reason(error)) == (grpc.StatusCode.UNAUTHENTICATED, why)
                assert not any(key in str(error) for key in service.keys.values())
        for name, extra, why in [
            ("ops", [], "ROLE_MISSING"),
            ("alice", [("x-fissile-tenant", "silver")], "TENANT_MISMATCH"),
        ]:
            metadata = [("authorization", f"Bearer {service.keys[name]}"), *extra]
            error = failure(lambda m=metadata: list(stub.Generate(made, timeout=60, metadata=m)))  # type: ignore[misc]
            assert (error.code(), reason(error)) == (grpc.StatusCode.PERMISSION_DENIED, why)
        own = (("authorization", f"Bearer {service.keys['alice']}"), ("x-fissile-tenant", "gold"))
        assert list(stub.Generate(made, timeout=60, metadata=own))


def test_s2_a_revoked_key_ends_within_seconds(service: SecureService) -> None:
    """S2: a line that is gone from the file does not count any more; the router goes on."""
    lines = service.key_file.read_text().splitlines()
    with service.channel("bob") as channel:
        stub = InferenceServiceStub(channel)
        stub.ListModels(pb.ListModelsRequest(), timeout=60)
        service.key_file.write_text("\n".join(line for line in lines if not line.startswith("bob:")))
        end, code = time.monotonic() + 60, None
        while code is None and time.monotonic() < end:
            time.sleep(0.1)
            code = status(lambda: stub.ListModels(pb.ListModelsRequest(), timeout=60))
        assert code is grpc.StatusCode.UNAUTHENTICATED
        service.key_file.write_text("\n".join(lines))
        wait_until(lambda: status(lambda: stub.ListModels(pb.ListModelsRequest(), timeout=60)) is None)


def test_s2_neither_prompts_nor_keys_are_in_logs_or_traces(service: SecureService, collector: OtlpReceiver) -> None:
    """S2: logs of all processes at level debug, and all spans: no hit for prompts, answers, or keys."""
    needles = {*service.keys.values(), PROMPT, "Zanzibar"}
    with service.channel() as channel:
        stub = InferenceServiceStub(channel)
        for i in range(3):
            answer = Answer()
            for part in stub.Generate(text_request(f"{PROMPT} {i}", 40, request_id=f"s2-{i}"), timeout=60):
                answer.add(part)
            needles.add(answer.text)
            assert len(answer.text) > 10
        bad = text_request(PROMPT)
        bad.sampling_params.temperature = -1
        for made in (bad, text_request(PROMPT * 200), text_request(PROMPT, model="nope")):
            assert status(lambda made=made: list(stub.Generate(made, timeout=60)))  # type: ignore[misc]
        assert status(lambda: stub.Tokenize(pb.TokenizeRequest(text=PROMPT, model="nope"), timeout=60))
        cancelled = stub.Generate(text_request(PROMPT, 1000, request_id="s2-cancelled"), timeout=60)
        next(iter(cancelled))
        cancelled.cancel()
    with tls_channel(service.router.address, service.pki.servers, service.pki.client, key="fsl_Zanzibar") as channel:
        stub = InferenceServiceStub(channel)
        assert status(lambda: list(stub.Generate(text_request(PROMPT), timeout=60)))
    end, traces = time.monotonic() + 60, set[str]()
    while len(traces) < 4 or not traces <= {span.trace_id for span in collector.named("worker.generate")}:
        assert time.monotonic() < end, traces
        time.sleep(0.1)
        asked = collector.named("fissile.v1.InferenceService/Generate")
        traces = {span.trace_id for span in asked if "'s2-" in repr(span)}
    spans = "\n".join(map(repr, collector.spans))
    logs = service.logs
    assert "s2-2" in logs
    assert '"level": "debug"' in logs
    found = {needle: (needle in logs, needle in spans) for needle in needles}
    assert found == dict.fromkeys(needles, (False, False))


# S3.


def test_tenant_cannot_observe_cache_of_another(service: SecureService) -> None:
    """S3: the same prompt under another salt, or none, finds nothing in any worker's cache: cached_tokens is 0."""
    ids = [random.Random(77).randrange(256) for _ in range(70)]

    def cached(name: str, salt: str) -> int:
        made = request(0, 3)
        made.token_ids.ids[:] = ids
        made.request_id = str(random.random())
        made.cache_salt = salt
        answer = service.ask(made, name)
        assert answer.finish is not None
        return answer.finish.usage.cached_tokens

    # Four times on three workers: one has it already.
    assert max(cached("alice", "alice's salt") for _ in range(4)) == 64
    assert [cached("bob", f"guess {i}") for i in range(6)] == [0] * 6
    assert cached("bob", "") == 0
    assert max(cached("alice", "alice's salt") for _ in range(4)) == 64
