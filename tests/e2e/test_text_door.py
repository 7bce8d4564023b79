"""Texts and messages at the router's door, over real connections."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from fissile.admin.v1 import admin_pb2 as apb
from fissile.v1 import inference_pb2 as pb
from google.rpc import error_details_pb2

from common.limits import MAX_TOKENIZE_TEXT_BYTES, TOKENIZE_THREADS
from router.api.tenants import TenantPolicy
from router.prompts.prompts import PromptEncoder, Steps
from tests.e2e.fake_worker import FakeWorker
from tests.e2e.router_bench import FILES, bench, collect, detail, error_of, request, until
from tests.otlp_receiver import OtlpReceiver

UNKNOWN = b"\xf8\x07\x01"  # field 127 = 1


async def test_fields_of_a_later_version_are_refused_by_number() -> None:
    """Former fault: such fields were accepted and ignored."""
    async with bench(FakeWorker(FILES)) as b:
        made = request()
        made.sampling_params.MergeFromString(UNKNOWN)
        error = await error_of(b.stub.Generate(made))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert detail(error, error_details_pb2.BadRequest).field_violations[0].field == "sampling_params.127"
        error = await error_of(b.stub.ListModels(pb.ListModelsRequest.FromString(UNKNOWN)))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert (await collect(b.stub.Generate(request())))[-1].HasField("finish")
        await b.empty()


async def test_no_method_ignores_a_field_of_a_later_version() -> None:
    """In every message, so of each method that there is, and of each that will be."""
    async with bench(FakeWorker(FILES), admin_port=0) as b:
        admin = b.router.admin
        assert admin is not None
        for file, address in ((pb, b.router.server.address), (apb, admin.address)):
            methods = [each for service in file.DESCRIPTOR.services_by_name.values() for each in service.methods]
            async with grpc.aio.insecure_channel(address) as channel:
                for method in methods:
                    made: Any = channel.unary_stream(f"/{method.containing_service.full_name}/{method.name}")
                    error = await error_of(made(UNKNOWN))
                    assert (error.code().name, method.full_name) == ("UNIMPLEMENTED", method.full_name)
                    assert "127 is not served by this version" in str(error.details()), method.full_name


async def test_long_texts_are_refused_without_residue() -> None:
    """OUT_OF_RANGE with the field's name; cancelled texts go."""
    async with bench(FakeWorker(FILES)) as b:
        for call, field in (
            (b.stub.Generate(request("7" * 2_000_000)), "text"),
            (b.stub.Chat(pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="a" * 2_000_000)])), "messages"),
            (b.stub.Tokenize(pb.TokenizeRequest(text="a" * (MAX_TOKENIZE_TEXT_BYTES + 1))), "text"),
        ):
            error = await error_of(call)
            assert error.code() is grpc.StatusCode.OUT_OF_RANGE
            assert detail(error, error_details_pb2.BadRequest).field_violations[0].field == field
        calls = [b.stub.Generate(request("the cat sat " * 100_000)) for _ in range(20)]
        await asyncio.sleep(0.05)
        for cancelled in calls:
            cancelled.cancel()
        await b.empty()


@contextlib.asynccontextmanager
async def busy_text_threads(encoder: PromptEncoder) -> AsyncIterator[None]:
    """No text is tokenized within the block."""
    end = threading.Event()

    def held() -> Steps[None]:
        end.wait()
        return
        yield

    jobs = [asyncio.ensure_future(encoder._run(held(), 1)) for _ in range(TOKENIZE_THREADS)]
    try:
        yield
    finally:
        end.set()
        await asyncio.gather(*jobs)


async def test_tokenize_and_detokenize_count_for_their_tenant() -> None:
    """Former fault: the two calls were outside of all tenants' limits."""
    async with bench(FakeWorker(FILES)) as b:
        b.router.service.set_tenants(TenantPolicy(concurrency=1))
        async with busy_text_threads(b.router._encoder):
            calls = [asyncio.ensure_future(b.stub.Tokenize(pb.TokenizeRequest(text="say"))) for _ in range(2)]
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        done = await asyncio.gather(*calls, return_exceptions=True)
        (refused,) = [each for each in done if isinstance(each, grpc.aio.AioRpcError)]
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert detail(refused, error_details_pb2.ErrorInfo).reason == "TENANT_LIMIT"
        assert (await b.stub.Detokenize(pb.DetokenizeRequest(token_ids=[65]))).text
        await b.empty()


async def test_cancel_while_text_waits_for_thread_has_that_wait_in_its_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    with OtlpReceiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        async with bench(FakeWorker(FILES)) as b, busy_text_threads(b.router._encoder):
            call = b.stub.Generate(request())
            await until(lambda: len(b.router._encoder._queue) > TOKENIZE_THREADS)
            # Longer than the shortest wait that is an event.
            await asyncio.sleep(0.01)
            call.cancel()
            await receiver.until_received("fissile.v1.InferenceService/Generate")
    (root,) = receiver.wait_for("fissile.v1.InferenceService/Generate")
    (below,) = [span for span in receiver.spans if span.parent_id == root.span_id]
    assert (root.attributes["rpc.response.status_code"], below.name) == ("CANCELLED", "tokenize")
    assert root.waits.keys() == {"tokenize_queue"}
    assert root.attributes["fissile.stage.tokenize_queue_ms"] == root.waits["tokenize_queue"] >= 1
    assert root.events == ()
