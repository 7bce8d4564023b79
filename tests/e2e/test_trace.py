"""One trace follows a request from the client, across the hop, to the last token."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from fissile.v1 import inference_pb2 as pb

from tests.e2e.service import REPOSITORY, Service, chat, running_service
from tests.otlp_receiver import OtlpReceiver, ReceivedSpan

DEMO = REPOSITORY / "deploy" / "demo" / "checkpoint"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CLIENT_SPAN = "b7ad6b7169203331"


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as running:
        yield running


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, receiver: OtlpReceiver) -> Iterator[Service]:
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        # The trace must not depend on the log level.
        "FISSILE_LOG_LEVEL": "error",
    }
    with running_service(tmp_path_factory.mktemp("trace"), DEMO, environment=environment) as running:
        yield running


def chat_request(max_tokens: int = 12) -> pb.ChatRequest:
    message = pb.ChatMessage(role="user", content="Tell me a story about a fox.")
    params = pb.SamplingParams(temperature=0, max_tokens=max_tokens)
    return pb.ChatRequest(messages=[message], sampling_params=params)


def trace_of(receiver: OtlpReceiver, trace_id: str, awaited: str) -> list[ReceivedSpan]:
    """The spans of a trace, once one of the awaited name and one from the client's own hop are there."""
    end = time.monotonic() + 60
    while True:
        spans = [s for s in receiver.spans if s.trace_id == trace_id]
        if {awaited} <= {s.name for s in spans} and CLIENT_SPAN in {s.parent_id for s in spans}:
            return spans
        assert time.monotonic() < end, f"no {awaited} in {[s.name for s in spans]}"
        time.sleep(0.05)


def test_router_and_worker_spans_share_trace(service: Service, receiver: OtlpReceiver) -> None:
    metadata = (("traceparent", f"00-{TRACE_ID}-{CLIENT_SPAN}-01"),)
    parts = list(service.stub.Chat(chat_request(), metadata=metadata, timeout=60))
    spans = trace_of(receiver, TRACE_ID, "worker.generate")
    (router,) = [s for s in spans if s.parent_id == CLIENT_SPAN]
    (worker,) = [s for s in spans if s.parent_id == router.span_id and s.service == "fissile-worker"]
    assert (router.service, router.name) == ("fissile-router", "fissile.v1.InferenceService/Chat")
    assert {s.name for s in spans if s.parent_id == router.span_id} == {"tokenize", "queue", "worker.generate"}
    children = {s.name: s for s in spans if s.parent_id == worker.span_id}
    assert children.keys() == {"queue", "prefill", "decode"}
    usage = parts[-1].finish.usage
    for span in (router, worker):
        assert span.attributes["gen_ai.usage.input_tokens"] == usage.prompt_tokens
        assert span.attributes["gen_ai.usage.output_tokens"] == usage.completion_tokens
    # An attribute has the same meaning on both sides of the hop.
    assert router.attributes["gen_ai.response.id"] == parts[0].request_id
    assert "gen_ai.response.id" not in worker.attributes
    assert re.fullmatch("[0-9a-f]{1,16}", str(worker.attributes["fissile.rid"]))
    # A chat on both sides of the hop.
    assert {s.attributes["gen_ai.operation.name"] for s in (router, worker)} == {"chat"}
    # Why decoding took as long as it did.
    decode = children["decode"].attributes
    assert decode["fissile.decode.steps"] >= usage.completion_tokens - 1
    assert (decode["fissile.decode.mean_batch"], decode["fissile.decode.preemptions"]) == (1.0, 0)
    assert router.attributes["gen_ai.request.model"] == "test"
    assert not any("fox" in str(value) for s in spans for value in s.attributes.values())
    assert router.start_ns <= worker.start_ns <= worker.end_ns <= router.end_ns + 5_000_000


def test_cancelled_request_line_says_cancelled(service: Service, receiver: OtlpReceiver) -> None:
    trace_id = TRACE_ID[::-1]
    metadata = (("traceparent", f"00-{trace_id}-{CLIENT_SPAN}-01"),)
    call = service.stub.Chat(chat_request(max_tokens=400), metadata=metadata, timeout=60)
    next(iter(call))
    call.cancel()
    service.wait_idle()
    spans = trace_of(receiver, trace_id, "worker.generate")
    assert {s.service for s in spans} == {"fissile-router", "fissile-worker"}
    router = next(s for s in spans if s.parent_id == CLIENT_SPAN)
    assert router.attributes["rpc.response.status_code"] == "CANCELLED"


def test_failed_request_line_says_failed(service: Service, receiver: OtlpReceiver) -> None:
    trace_id = "1" + TRACE_ID[1:]
    metadata = (("traceparent", f"00-{trace_id}-{CLIENT_SPAN}-01"),)
    with pytest.raises(grpc.RpcError) as caught:
        list(service.stub.Generate(pb.GenerateRequest(text=""), metadata=metadata, timeout=60))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    (span,) = trace_of(receiver, trace_id, "fissile.v1.InferenceService/Generate")
    assert span.attributes["rpc.response.status_code"] == "INVALID_ARGUMENT"
    assert span.parent_id == CLIENT_SPAN


@pytest.mark.slow
def test_dead_collector_costs_one_warning_and_a_second(tmp_path: Path) -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_BSP_SCHEDULE_DELAY": "100"}
    with running_service(tmp_path, DEMO, environment=environment) as service:
        chat(service.stub, chat_request())
        for process in (service.router, *service.workers):
            assert process.stop(timeout=60) == 0
            log = process.log.read_text().lower()
            assert log.count("collector") == 1, log
            assert "traceback" not in log
