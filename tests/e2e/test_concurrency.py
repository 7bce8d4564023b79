"""Many clients at once, and many that leave: nothing is mixed up, nothing is left behind."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from fissile.v1 import inference_pb2 as pb

from tests.e2e.service import REPOSITORY, Answer, Service, chat, running_service
from tests.fake_dns import wait_until
from tests.otlp_receiver import OtlpReceiver, ReceivedSpan

DEMO = REPOSITORY / "deploy" / "demo" / "checkpoint"
CLIENTS = 64
CHAT_SPAN = "fissile.v1.InferenceService/Chat"
EXPORT_DELAY_MS = 100


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as running:
        yield running


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, receiver: OtlpReceiver) -> Iterator[Service]:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint, "OTEL_BSP_SCHEDULE_DELAY": str(EXPORT_DELAY_MS)}
    with running_service(tmp_path_factory.mktemp("demo"), DEMO, environment=environment) as running:
        yield running


def request(i: int, max_tokens: int = 48) -> pb.ChatRequest:
    params = pb.SamplingParams(temperature=1.0 if i % 2 else 0.0, seed=i, max_tokens=max_tokens)
    message = pb.ChatMessage(role="user", content=f"Tell me a story about {i} foxes.")
    return pb.ChatRequest(messages=[message], sampling_params=params)


def test_concurrent_streams_equal_lone_streams(service: Service) -> None:
    with ThreadPoolExecutor(CLIENTS) as pool:
        together = list(pool.map(lambda i: chat(service.stub, request(i)), range(CLIENTS)))
    for i in random.Random(3).sample(range(CLIENTS), 12):
        assert chat(service.stub, request(i)).text == together[i].text
    assert all(answer.text for answer in together)
    for i, answer in enumerate(together):
        came = answer
        while not is_streamed(came):
            # A router that is behind merges what waits: once more, alone. One that always does so comes to no end.
            came = chat(service.stub, request(i))


def is_streamed(answer: Answer) -> bool:
    """Whether text came in several messages rather than at the end."""
    assert answer.finish is not None
    return answer.finish.usage.completion_tokens < 8 or answer.messages > 2


def test_cancelled_streams_leave_no_state(service: Service, receiver: OtlpReceiver) -> None:
    with ThreadPoolExecutor(CLIENTS) as pool:
        outcomes = list(pool.map(lambda i: cancelled_stream(service, i), range(CLIENTS)))
    assert grpc.StatusCode.CANCELLED in outcomes
    assert set(outcomes) <= {grpc.StatusCode.CANCELLED, grpc.StatusCode.OK}
    load = service.wait_idle()
    assert (load.decoding_seqs, load.waiting_seqs) == (0, 0)
    assert load.free_blocks == load.total_blocks
    time.sleep(8 * EXPORT_DELAY_MS / 1000)
    # A call that is cancelled before the router has read it leaves no trace at all; half of them have had an answer.
    wait_until(lambda: all(is_complete(trace_of(receiver, i)) for i in range(0, CLIENTS, 2)))
    wait_until(lambda: all(is_complete(trace) for i in range(CLIENTS) if (trace := trace_of(receiver, i))))


def trace_of(receiver: OtlpReceiver, i: int) -> list[ReceivedSpan]:
    """The spans of client `i`."""
    return [span for span in receiver.spans if span.trace_id == trace_id(i)]


def is_complete(trace: list[ReceivedSpan]) -> bool:
    """True if the router's span has ended, and the worker's too if the request got there."""
    routers = [span for span in trace if span.name == CHAT_SPAN]
    if len(routers) != 1:
        return False
    (router,) = routers
    workers = [span for span in trace if span.name == "worker.generate"]
    ids = {span.span_id for span in trace}
    children_have_parents = all(span.parent_id in ids for span in trace if span is not router)
    # Submitted, then cancelled before the frame was written: the worker never hears of it.
    return children_have_parents and (len(workers) == 1 or (not workers and "first_token" not in router.events))


def trace_id(i: int) -> str:
    return f"{0xFACADE << 32 | i:032x}"


def cancelled_stream(service: Service, i: int) -> grpc.StatusCode:
    """Starts a stream, cancels it at a random moment, of every other one in its answer, and returns how it ended."""
    metadata = (("traceparent", f"00-{trace_id(i)}-{i + 1:016x}-01"),)
    call = service.stub.Chat(request(i, max_tokens=256), metadata=metadata, timeout=60)
    timer = threading.Timer(random.Random(i).uniform(0.0, 0.6), call.cancel)
    if i % 2:
        timer.start()
    try:
        for count, _ in enumerate(call):
            if not i % 2 and count == i // 4:
                call.cancel()
    except grpc.RpcError:
        pass
    finally:
        timer.cancel()
    code = call.code()
    assert isinstance(code, grpc.StatusCode)
    return code
