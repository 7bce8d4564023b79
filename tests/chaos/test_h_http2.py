"""HTTP/2 as it should not be, pings, and connections that end by age."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub
from fissile.worker.v1 import worker_pb2 as wpb
from fissile.worker.v1.worker_pb2_grpc import WorkerServiceStub
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from common.rpc.server import server_options
from router.workers import session
from tests.chaos.conftest import Report
from tests.chaos.http2_worker import FAULTS, Http2Worker, token_at
from tests.chaos.scale import FULL, SCALE
from tests.chaos.support import code_of, log_entries, until
from tests.chaos.test_come_and_go import router_before
from tests.e2e.service import Answer, Process, Service, free_port, generate, running_service
from tests.e2e.simulated import OPTIONS, request, simulated_model, wait_workers

TOKENS = 40
PROMPT = [1, 2, 3]
# Faults that never stop, one after the other: with some tokens each time, and with none.
BARREN = "rst_after_headers"
LASTING = ("goaway", "rst_during_data", "rst_after_data", "close") if FULL else ("rst_during_data",)


@contextlib.contextmanager
def behind_a_router(folder: Path, worker: Http2Worker) -> Iterator[InferenceServiceStub]:
    worker.start()
    try:
        with (
            router_before(worker.port, folder, "--worker-wait", "10s") as router,
            grpc.insecure_channel(router.address) as channel,
        ):
            yield InferenceServiceStub(channel)
            assert "Traceback" not in router.log.read_text()
    finally:
        worker.stop()


def ask(stub: InferenceServiceStub) -> Answer:
    asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling_params=pb.SamplingParams(max_tokens=TOKENS))
    asked.output_options.return_token_ids = True
    return generate(stub, asked)


def assert_whole(answer: Answer) -> None:
    assert answer.token_ids == [token_at(len(PROMPT) + i) for i in range(TOKENS)]


@pytest.mark.slow
def test_h1_negative_http2_of_a_worker(tmp_path: Path, report: Report) -> None:
    """H1: a Session that ends by GOAWAY, RST_STREAM after its headers, inside or after data, or with its connection:
    the stream goes on over the next one, no token lost or twice, for as long as each brings some; if none brings any, a
    status after a bounded time."""
    worker = Http2Worker()
    with behind_a_router(tmp_path, worker) as stub:
        for fault in FAULTS:
            worker.fault, worker.times = fault, 2
            worker.sever()
            until(lambda: worker.times < 2, what="a session that meets it")
            assert_whole(ask(stub))
            assert worker.times == 0
        for fault in LASTING:
            worker.fault, worker.times = fault, 10**6
            worker.sever()
            until(lambda: worker.times < 10**6, what="a session that meets it")
            assert_whole(ask(stub))
        worker.fault, worker.times = BARREN, 10**6
        worker.sever()
        until(lambda: worker.times < 10**6, what="a session that meets it")
        begin = time.monotonic()
        with pytest.raises(grpc.RpcError) as lost:
            ask(stub)
        report("H1", fault=BARREN, gave_up_after_s=time.monotonic() - begin, code=code_of(lost.value).name)
        assert code_of(lost.value) in (grpc.StatusCode.ABORTED, grpc.StatusCode.UNAVAILABLE)
        worker.times = 0
        until(lambda: whole(stub), what="recovery")


def test_h1_one_stream_a_connection(tmp_path: Path) -> None:
    """H1: a worker that takes one stream a connection."""
    worker = Http2Worker(max_streams=1)
    with behind_a_router(tmp_path, worker) as stub, ThreadPoolExecutor(8) as pool:
        until(lambda: worker.sessions, what="a session")
        for answer in pool.map(lambda _: ask(stub), range(8)):
            assert_whole(answer)


@pytest.mark.slow
def test_h1_padding(tmp_path: Path) -> None:
    """H1: padded DATA frames, which gRPC refuses: a status after a bounded time, and recovery when it stops."""
    worker = Http2Worker()
    with behind_a_router(tmp_path, worker) as stub:
        worker.padding = 200
        with pytest.raises(grpc.RpcError) as lost:
            ask(stub)
        assert code_of(lost.value) in (grpc.StatusCode.ABORTED, grpc.StatusCode.UNAVAILABLE)
        worker.padding = 0
        until(lambda: whole(stub), within_s=60, what="recovery")


def whole(stub: InferenceServiceStub) -> bool:
    try:
        assert_whole(ask(stub))
    except grpc.RpcError:
        return False
    return True


@pytest.mark.slow
def test_h2_pings_through_a_silent_prefill(tmp_path: Path, report: Report) -> None:
    """H2: a prefill that says nothing for long, with pings all the while, at router and worker: no GOAWAY."""
    silent = f"{SCALE.h2_silent_s:g}s"
    model = simulated_model(tmp_path / "model")
    pings = [
        ("grpc.keepalive_time_ms", round(SCALE.h2_ping_s * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    with running_service(
        tmp_path,
        model,
        worker_options=["--simulate", f"fixed:{silent}"],
        router_options=["--stall-timeout", f"{3 * SCALE.h2_silent_s:g}s"],
    ) as service:
        router, worker = service.router.address, service.workers[0].address
        with (
            grpc.insecure_channel(router, options=pings) as at_router,
            grpc.insecure_channel(worker, options=pings) as at_worker,
            ThreadPoolExecutor(1) as pool,
        ):
            begin = time.monotonic()
            through = pool.submit(generate, InferenceServiceStub(at_router), request(1, 1), 200)
            direct = wpb.GenerateRequest(token_ids=[1, 2, 3], params=wpb.SamplingParams(max_tokens=1, top_p=1.0))
            direct.params.repetition_penalty = 1.0
            parts = list(WorkerServiceStub(at_worker).Generate(direct, timeout=200))
            assert sum(len(part.token_ids) for part in parts) == 1
            answer = through.result()
            took = time.monotonic() - begin
        report("H2", silent_s=SCALE.h2_silent_s, pings=int(SCALE.h2_silent_s / SCALE.h2_ping_s), took_s=took)
        assert len(answer.token_ids) == 1
        assert answer.finish is not None
        assert answer.finish.attempts == 1
        assert took >= SCALE.h2_silent_s


def test_h2_our_channel_arguments_exist_in_grpc() -> None:
    """H2: a name that gRPC does not know does nothing, silently."""
    binary = Path(cygrpc.__file__).read_bytes()
    for name, _ in (*server_options(1, 1.0), *session._CHANNEL_OPTIONS):
        assert name.encode() + b"\0" in binary, name
    assert b"grpc.no_such_argument\0" not in binary


def num_connections(router: Process) -> int:
    """Number of connections with workers that a router has had."""
    return sum(entry["event"] == "worker up" for entry in log_entries(router))


@pytest.mark.slow
def test_h3_connections_that_end_by_age(tmp_path: Path, report: Report) -> None:
    """H3: a worker that ends every connection after seconds: streams of any length go on over the next one.

    Only a submission that was under way as its connection ended, and did not arrive, is made again (rule S4).
    """
    model = simulated_model(tmp_path / "model")
    port = free_port()
    arguments = [
        "tests.chaos.aged_worker",
        str(round(SCALE.h3_age_s * 1000)),
        "worker",
        *OPTIONS,
        "--model",
        str(model),
    ]
    arguments += ["--model-name", "test", "--port", str(port), "--worker-id", "aged"]
    worker = Process("aged", arguments, port, tmp_path / "aged.log")
    worker.start()
    stop = threading.Event()
    answers: list[Answer] = []

    def client(stub: InferenceServiceStub, i: int) -> None:
        while not stop.is_set():
            asked = request(i, 100 + 300 * (i % 2))
            asked.request_id = ""
            answers.append(generate(stub, asked))

    try:
        worker.wait_serving()
        with router_before(port, tmp_path, patient=True) as router, grpc.insecure_channel(router.address) as channel:
            service = Service(router, [worker], channel)
            wait_workers(service, 1)
            with ThreadPoolExecutor(6) as pool:
                clients = [pool.submit(client, service.stub, i) for i in range(6)]
                try:
                    # However long they take to come: the streams go on meanwhile.
                    until(lambda: num_connections(router) >= SCALE.h3_connections, what="new connections")
                finally:
                    stop.set()
                for each in clients:
                    each.result()
            entries = log_entries(router)
        connections = num_connections(router)
        lost = [entry for entry in entries if entry["event"] == "attempt lost"]
        report("H3", age_s=SCALE.h3_age_s, requests=len(answers), connections=connections, lost=len(lost), failed=0)
    finally:
        worker.stop()
    assert all((entry["loss"], entry["tokens"]) == ("forgotten", 0) for entry in lost)
    assert sum(a.finish.attempts - 1 for a in answers if a.finish is not None) == len(lost)
    assert {len(a.token_ids) for a in answers} == {100, 400}
