"""A real router on real sockets, with scripted workers: every status, every path out, nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING, Any, cast

import grpc
import pytest
from fissile.seed import derive_seed
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2

from common.limits import MAX_FRAME_TOKENS
from common.rpc.unsupported_fields import field_paths
from common.wire.block_hash import hash_chain, salt_root
from router.app import Router
from router.options import RouterOptions
from router.scheduling.failover import FailoverOptions
from router.validation import CHAT_SERVED, GENERATE_SERVED
from router.workers.session import WorkerState
from tests.e2e.fake_worker import FakeWorker, short
from tests.e2e.router_bench import (
    FILES,
    TOKENIZER,
    Bench,
    bench,
    collect,
    detail,
    error_of,
    miss_deadline,
    request,
    until,
)
from tests.otlp_receiver import OtlpReceiver
from tests.unit.router.support import EOS, tokenizer_files

if TYPE_CHECKING:
    pass


@pytest.mark.proto_field(
    "GenerateRequest.request_id",
    "GenerateRequest.text",
    "GenerateResponse.request_id",
    "GenerateResponse.text",
    "GenerateResponse.token_ids",
    "GenerateResponse.prompt_info",
    "GenerateResponse.finish",
    "PromptInfo.prompt_tokens",
    "PromptInfo.cached_tokens",
    "PromptInfo.seed",
    "Finish.reason",
    "Finish.stop",
    "Finish.usage",
    "Finish.timings",
    "Finish.worker_id",
    "Finish.attempts",
    "Finish.exact",
    "StopDetail.eos_token_id",
    "Usage.prompt_tokens",
    "Usage.completion_tokens",
    "Timings.queue",
    "Timings.prefill",
    "Timings.ttft",
    "Timings.tpot",
    "Timings.total",
)
async def test_generate_from_end_to_end() -> None:
    async with bench(FakeWorker(FILES, answer=short)) as b:
        call = b.stub.Generate(request(request_id="ä-1", params={"max_tokens": 64}))
        parts = await collect(call)
        assert "".join(p.text for p in parts) == "hello"
        assert [i for p in parts for i in p.token_ids] == [*TOKENIZER.encode("hello"), EOS]
        assert {p.request_id for p in parts} == {"ä-1"}
        assert [p.HasField("prompt_info") for p in parts] == [True] + [False] * (len(parts) - 1)
        assert [p.HasField("finish") for p in parts] == [False] * (len(parts) - 1) + [True]
        info, finish = parts[0].prompt_info, parts[-1].finish
        assert (info.prompt_tokens, info.cached_tokens, info.seed) == (3, 3, str(derive_seed("ä-1")))
        assert (finish.reason, finish.stop.eos_token_id) == (pb.FINISH_REASON_STOP, EOS)
        assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (3, len(TOKENIZER.encode("hello")) + 1)
        assert (finish.worker_id, finish.attempts, finish.exact) == ("w0", 1, True)
        timings = finish.timings
        # The worker says 2 ms, and its first token may have come sooner.
        assert timings.prefill.ToMicroseconds() == min(2000, timings.ttft.ToMicroseconds())
        phases = timings.queue.ToNanoseconds() + timings.prefill.ToNanoseconds()
        assert abs(phases - timings.ttft.ToNanoseconds()) <= 2, "each is rounded by itself"
        assert timings.ttft.ToMicroseconds() + timings.tpot.ToMicroseconds() <= timings.total.ToMicroseconds()
        assert ("x-request-id", "%C3%A4-1") in [tuple(pair) for pair in await call.trailing_metadata()]
        (submitted,) = b.workers[0].submitted
        assert list(submitted.token_ids) == TOKENIZER.encode("say")
        assert submitted.seed == derive_seed("ä-1")
        await b.empty()


@pytest.mark.proto_field(
    "ChatRequest.messages",
    "ChatRequest.template_arguments_json",
)
async def test_chat_uses_the_template() -> None:
    async with bench(FakeWorker(FILES, answer=short)) as b:
        chat = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="hi <|end|>")])
        chat.template_arguments_json = '{"persona": "bot"}'
        parts = await collect(b.stub.Chat(chat))
        assert "".join(p.delta.content for p in parts) == "hello"
        prompt = list(b.workers[0].submitted[0].token_ids)
        assert TOKENIZER.decode(prompt, skip_special=False) == "<|start|>user\nhi <|end|><|end|><|start|>bot\n"
        assert prompt.count(EOS) == 1

        chat.messages[0].role = "bad"
        error = await error_of(b.stub.Chat(chat))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "no such role" in (error.details() or "")
        assert detail(error, error_details_pb2.BadRequest).field_violations[0].field == "messages"


async def test_models_without_template_or_tokenizer() -> None:
    async with bench(FakeWorker(tokenizer_files(chat=False), answer=short)) as b:
        chat = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="hi")])
        assert (await error_of(b.stub.Chat(chat))).code() is grpc.StatusCode.FAILED_PRECONDITION
        assert await collect(b.stub.Generate(request()))
    async with bench(FakeWorker({}, answer=short)) as b:
        error = await error_of(b.stub.Generate(request()))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert detail(error, error_details_pb2.ErrorInfo).reason == "NO_TOKENIZER"
        parts = await collect(b.stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2]))))
        assert "".join(p.text for p in parts) == ""
        assert parts[-1].finish.usage.completion_tokens == len(short(wpb.SubmitSequence()))
        await b.empty()


async def test_tokenize_detokenize_and_models() -> None:
    async with bench() as b:
        answer = await b.stub.Tokenize(pb.TokenizeRequest(text="lo <|end|>"))
        assert list(answer.token_ids) == TOKENIZER.encode("lo <|end|>")
        assert answer.tokens[0] == "lo"
        assert EOS not in answer.token_ids
        ids = [*TOKENIZER.encode("lo"), EOS]
        assert (await b.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text == "lo"
        kept = await b.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids, keep_special_tokens=True, model="m"))
        assert kept.text == "lo<|end|>"
        error = await error_of(b.stub.Detokenize(pb.DetokenizeRequest(token_ids=[1, 300])))
        assert detail(error, error_details_pb2.BadRequest).field_violations[0].field == "token_ids[1]"

        call = b.stub.ListModels(pb.ListModelsRequest())
        (model,) = (await call).models
        assert (model.name, model.ready_workers, model.max_model_len) == ("m", 1, 4096)
        capabilities = (pb.CAPABILITY_GENERATE, pb.CAPABILITY_TEXT, pb.CAPABILITY_CHAT, pb.CAPABILITY_RECEIPTS)
        assert tuple(model.capabilities) == capabilities
        assert (await b.stub.GetModel(pb.GetModelRequest(model="m"))).model == model
        assert (await b.stub.GetModel(pb.GetModelRequest())).model == model
        error = await error_of(b.stub.GetModel(pb.GetModelRequest(model="x")))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        for metadata in (await call.trailing_metadata(), error.trailing_metadata()):
            assert "x-request-id" in [key for key, _ in metadata]


@pytest.mark.parametrize(
    ("code", "path", "bad"),
    [
        ("INVALID_ARGUMENT", "prompt", pb.GenerateRequest()),
        ("INVALID_ARGUMENT", "text", pb.GenerateRequest(text="")),
        ("INVALID_ARGUMENT", "token_ids.ids", pb.GenerateRequest(token_ids=pb.TokenIds())),
        ("INVALID_ARGUMENT", "token_ids.ids[1]", pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 300]))),
        ("OUT_OF_RANGE", "text", pb.GenerateRequest(text="h" * 64)),
        ("OUT_OF_RANGE", "token_ids.ids", pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 64))),
        ("INVALID_ARGUMENT", "sampling_params.temperature", request(params={"temperature": float("nan")})),
        ("INVALID_ARGUMENT", "sampling_params.temperature", request(params={"temperature": -1})),
        ("INVALID_ARGUMENT", "sampling_params.top_p", request(params={"top_p": 0})),
        ("INVALID_ARGUMENT", "sampling_params.max_tokens", request(params={"max_tokens": 0})),
        ("INVALID_ARGUMENT", "sampling_params.stop_token_ids[0]", request(params={"stop_token_ids": [400]})),
        ("INVALID_ARGUMENT", "sampling_params.logit_bias[400]", request(params={"logit_bias": {400: 1}})),
        ("INVALID_ARGUMENT", "sampling_params.allowed_token_ids[0]", request(params={"allowed_token_ids": [400]})),
        (
            "INVALID_ARGUMENT",
            "sampling_params.allowed_token_ids",
            request(params={"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1}),
        ),
        ("INVALID_ARGUMENT", "request_id", request(request_id="x" * 129)),
        ("INVALID_ARGUMENT", "request_id", request(request_id="\x1b[31m")),
        ("INVALID_ARGUMENT", "session_id", request(session_id="\x1b[31m")),
        ("INVALID_ARGUMENT", "priority", request(priority=17)),
        ("INVALID_ARGUMENT", "cache_salt", request(cache_salt="x" * 129)),
        ("INVALID_ARGUMENT", "sampling_params.n", request(params={"n": 65})),
        ("UNIMPLEMENTED", "sampling_params.constraint", request(params={"constraint": {"regex": "a"}})),
    ],
)
async def test_bad_input_names_the_field(code: str, path: str, bad: pb.GenerateRequest) -> None:
    async with bench(FakeWorker(FILES, max_model_len=64)) as b:
        error = await error_of(b.stub.Generate(bad))
        assert error.code().name == code
        violation = detail(error, error_details_pb2.BadRequest).field_violations[0]
        assert violation.field == path
        assert "valid:" in violation.description
        assert "x-request-id" in [key for key, _ in error.trailing_metadata()]
        await b.empty()


@pytest.mark.parametrize(("kind", "served"), [(pb.GenerateRequest, GENERATE_SERVED), (pb.ChatRequest, CHAT_SERVED)])
async def test_every_field_is_served_or_refused_by_name(kind: type[Message], served: frozenset[str]) -> None:
    paths = set(field_paths(cast(Descriptor, kind.DESCRIPTOR)))
    assert served <= paths, "a served field that does not exist"
    async with bench() as b:
        for path in sorted(paths - served):
            bad = with_field(kind(), path)
            method = b.stub.Generate if kind is pb.GenerateRequest else b.stub.Chat
            error = await error_of(method(bad))
            assert error.code() is grpc.StatusCode.UNIMPLEMENTED, path
            violation = detail(error, error_details_pb2.BadRequest).field_violations[0]
            assert path == violation.field or path.startswith(f"{violation.field}."), path
        await b.empty()


def with_field(message: Any, path: str) -> Any:
    """`message` with the field at `path` set to something that asks for something."""
    name, _, rest = path.partition(".")
    descriptor = message.DESCRIPTOR.fields_by_name[name]
    if descriptor.message_type is not None and descriptor.message_type.GetOptions().map_entry:
        getattr(message, name)[3] = 1.0
        return message
    if descriptor.message_type is not None:
        inner = getattr(message, name).add() if descriptor.is_repeated else getattr(message, name)
        inner.SetInParent() if not descriptor.is_repeated else None
        if rest:
            with_field(inner, rest)
        return message
    text: str | bytes = b"x" if descriptor.type == descriptor.TYPE_BYTES else "x"
    value: Any = {descriptor.CPPTYPE_STRING: text, descriptor.CPPTYPE_BOOL: True}.get(descriptor.cpp_type, 2)
    if descriptor.is_repeated:
        getattr(message, name).append(value)
    else:
        setattr(message, name, value)
    return message


@pytest.mark.proto_field(
    "GenerateRequest.sampling_params",
    "GenerateRequest.token_ids",
    "TokenIds.ids",
    "SamplingParams.temperature",
    "SamplingParams.top_k",
    "SamplingParams.top_p",
    "SamplingParams.min_p",
    "SamplingParams.repetition_penalty",
    "SamplingParams.presence_penalty",
    "SamplingParams.frequency_penalty",
    "SamplingParams.seed",
    "SamplingParams.max_tokens",
    "SamplingParams.min_tokens",
    "SamplingParams.ignore_eos",
    "SamplingParams.stop_strings",
    "SamplingParams.include_stop_string",
    "SamplingParams.stop_token_ids",
    "SamplingParams.stop_token_sequences",
    "SamplingParams.logit_bias",
    "SamplingParams.bad_words",
    "SamplingParams.allowed_token_ids",
    "SamplingParams.num_drafts",
    "StopDetail.stop_string",
    "OutputOptions.return_token_ids",
    "GenerateRequest.output_options",
)
async def test_every_served_field_has_its_effect() -> None:
    fields = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.25,
        "min_p": 0.125,
        "repetition_penalty": 1.25,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.75,
        "seed": 2**64 - 1,
        "max_tokens": 9,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [5, 6],
        "stop_token_sequences": [pb.TokenIds(ids=[7, 8])],
        "stop_strings": ["pq"],
        "include_stop_string": True,
        "n": 1,
        "logit_bias": {9: 1.5},
        "bad_words": ["lo"],
        "allowed_token_ids": [4, 3],
        "num_drafts": 0,
    }
    async with bench() as b:
        parts = await collect(b.stub.Generate(request(model="m", request_id="r", params=fields)))
        (submitted,) = b.workers[0].submitted
        params = submitted.params
        got = (params.temperature, params.top_k, params.top_p, params.min_p, params.max_tokens, params.min_tokens)
        assert got == (0.5, 7, 0.25, 0.125, 9, 2)
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        assert penalties == (1.25, -0.5, 0.75)
        assert params.ignore_eos
        assert list(params.stop_token_ids) == [5, 6]
        assert [list(s.ids) for s in params.stop_token_sequences] == [[7, 8]]
        assert dict(params.logit_bias) == {9: 1.5}
        assert list(params.allowed_token_ids) == [4, 3]
        assert params.HasField("num_drafts")
        assert params.num_drafts == 0
        spelled = [tuple(ids.ids) for ids in params.bad_words_token_ids]
        assert [TOKENIZER.decode_stream(behind=[5]).push(ids) for ids in spelled] == ["lo", " lo"]
        assert submitted.seed == 2**64 - 1
        assert parts[0].prompt_info.seed == str(2**64 - 1)
        assert "".join(p.text for p in parts) == "hijklmnpq"
        assert parts[-1].finish.stop.stop_string == "pq"

        plain = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[1, 2, 3]), sampling_params=pb.SamplingParams(max_tokens=2)
        )
        parts = await collect(b.stub.Generate(plain))
        assert not any(p.token_ids for p in parts)
        assert parts[0].request_id
        defaults = b.workers[0].submitted[1].params
        assert (defaults.temperature, defaults.top_k, defaults.top_p, defaults.repetition_penalty) == (1, 0, 1, 1)
        assert (defaults.presence_penalty, defaults.frequency_penalty) == (0, 0)
        assert not defaults.HasField("num_drafts")


async def test_absent_parameters_use_generation_config() -> None:
    own = {"temperature": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.125, "repetition_penalty": 1.25}
    async with bench(FakeWorker(tokenizer_files(generation={**own, "do_sample": False}))) as b:
        await collect(b.stub.Generate(request()))
        await collect(b.stub.Generate(request(params={"repetition_penalty": 1, "min_p": 0})))
        absent, given = (submitted.params for submitted in b.workers[0].submitted)
        assert {name: getattr(absent, name) for name in own} == own
        assert (given.repetition_penalty, given.min_p, given.temperature) == (1.0, 0.0, 0.5)


async def test_max_tokens_is_clipped_to_the_models_length() -> None:
    async with bench(FakeWorker(FILES, max_model_len=20)) as b:
        parts = await collect(b.stub.Generate(request("say", params={"max_tokens": 1000})))
        finish = parts[-1].finish
        assert (finish.reason, finish.usage.completion_tokens) == (pb.FINISH_REASON_LENGTH, 17)


async def test_long_prompts_arrive_in_extend_frames_with_chain_hash() -> None:
    prompt = [random.Random(1).randrange(256) for _ in range(3 * MAX_FRAME_TOKENS + 5)]
    async with bench(FakeWorker(FILES, max_model_len=100_000)) as b:
        given = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling_params=pb.SamplingParams(max_tokens=1))
        await collect(b.stub.Generate(given))
        (submitted,) = b.workers[0].submitted
        assert list(submitted.token_ids) == prompt
        assert submitted.chain_hash == hash_chain(prompt, 16)[-1]


@pytest.mark.proto_field(
    "GenerateRequest.cache_salt",
    "GenerateRequest.priority",
)
async def test_salt_and_class_go_to_the_worker() -> None:
    prompt = list(range(40))
    root = salt_root(b"ww", cache_salt="naïve".encode())
    async with bench(FakeWorker(FILES, answer=short)) as b:
        for given in ({"cache_salt": "naïve", "priority": pb.PRIORITY_HIGH}, {"priority": pb.PRIORITY_LOW}, {}):
            await collect(b.stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), **given)))
        chat = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="hi")], priority=pb.PRIORITY_HIGH)
        await collect(b.stub.Chat(chat))
        submitted = b.workers[0].submitted
        assert [record.cache_salt.decode() for record in submitted] == ["naïve", "", "", ""]
        assert [record.chain_hash for record in submitted[:3]] == [
            hash_chain(prompt, 16, root=root)[-1],
            *[hash_chain(prompt, 16)[-1]] * 2,
        ]
        classes = [wpb.PRIORITY_HIGH, wpb.PRIORITY_LOW, wpb.PRIORITY_NORMAL, wpb.PRIORITY_HIGH]
        assert [record.priority for record in submitted] == classes


async def test_stop_string_cancels_worker_and_is_not_billed() -> None:
    async with bench(FakeWorker(FILES, tokens_per_step=16)) as b:
        parts = await collect(b.stub.Generate(request(params={"max_tokens": 1000, "stop_strings": ["mn"]})))
        assert "".join(p.text for p in parts) == "hijkl"
        finish = parts[-1].finish
        assert (finish.stop.stop_string, finish.usage.completion_tokens) == ("mn", 7)
        await until(lambda: b.workers[0].cancelled == [b.workers[0].submitted[0].rid])
        await b.empty()


async def test_not_serving_until_worker_is_ready() -> None:
    worker = FakeWorker(FILES)
    await worker.start()
    await worker.stop()
    failover = FailoverOptions(worker_wait_s=0.2)
    router = Router(RouterOptions(workers=[f"127.0.0.1:{worker.port}"], port=0, failover=failover))
    await router.start()
    async with grpc.aio.insecure_channel(router.server.address) as channel:
        b = Bench(router, [worker], channel)
        assert await b.health() == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await error_of(b.stub.Generate(request()))).code() is grpc.StatusCode.UNAVAILABLE
        await asyncio.sleep(0.6)
        await worker.start()
        await b.wait_health(health_pb2.HealthCheckResponse.SERVING)
        await worker.stop()
        await until(lambda: not b.router.registry.serving)
        await b.wait_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        error = await error_of(b.stub.Generate(request()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert detail(error, error_details_pb2.RetryInfo).retry_delay.seconds == 1
    await router.stop()


async def test_incompatible_workers_are_refused() -> None:
    good = FakeWorker(FILES)
    bad = [
        FakeWorker(FILES, description={"tokenizer_sha256": "00" * 32}),
        FakeWorker({"tokenizer.json": b"{"}, description={"model": "broken"}),
        FakeWorker(FILES, description={"state": wpb.WORKER_STATE_STARTING}),
    ]
    async with bench(good, *bad, start=False) as b:
        await b.ready(1)
        await asyncio.sleep(0.6)
        assert b.ready_workers() == 1
        assert [m.name for m in b.router.registry.models] == ["m"]
        assert (await collect(b.stub.Generate(request())))[-1].HasField("finish")


async def test_one_worker_under_two_addresses_is_used_once() -> None:
    worker = FakeWorker(FILES)
    address = await worker.start()
    router = Router(RouterOptions(workers=[address, address.replace("127.0.0.1", "localhost")], port=0))
    await router.start()
    async with grpc.aio.insecure_channel(router.server.address) as channel:
        b = Bench(router, [worker], channel)
        await b.ready(1)
        call = b.stub.Generate(request(params={"max_tokens": 300}))
        await asyncio.sleep(0.5)
        assert b.ready_workers() == 1
        assert len(worker.calls) == 1
        assert (await collect(call))[-1].HasField("finish")
    await router.stop()
    await worker.stop()


async def test_no_initial_metadata_before_the_first_token() -> None:
    worker = FakeWorker(FILES)
    async with bench(worker) as b:
        worker.silent = True
        call = b.stub.Generate(request())
        waiting = asyncio.ensure_future(call.initial_metadata())
        await until(lambda: worker.submitted)
        await asyncio.sleep(0.1)
        assert not waiting.done()
        worker.silent = False
        await call.read()
        await waiting
        await collect(call)


async def test_tokenizer_from_a_folder(tmp_path: Any) -> None:
    from tests.unit.router.support import save

    folder = save(FILES, tmp_path / "same")
    async with bench(FakeWorker(FILES, answer=short), tokenizer=folder) as b:
        assert (await collect(b.stub.Generate(request())))[-1].HasField("finish")
    other = save(tokenizer_files(chat=False), tmp_path / "other")
    async with bench(FakeWorker(FILES), FakeWorker({}), tokenizer=other, start=False) as b:
        await b.ready(1)
        await asyncio.sleep(0.3)
        assert b.ready_workers() == 1


async def test_ended_worker_keeps_name_in_list() -> None:
    """An operator who has drained worker w1 sees w1 as not connected, and it does not count as serving."""
    workers = [FakeWorker(FILES, worker_id=f"w{i}") for i in range(2)]
    async with bench(*workers) as b:
        await workers[1].stop()
        await until(lambda: b.ready_workers() == 1)
        listed = {worker.worker_id: worker for worker in b.router.pool.workers()}
        assert {name: worker.state for name, worker in listed.items()} == {
            "w0": WorkerState.SERVING,
            "w1": WorkerState.UNCONNECTED,
        }
        assert listed["w1"].model == "m"
        await until(lambda: all(worker.last_error for worker in b.router.pool.workers() if worker.worker_id == "w1"))
        assert b.router.pool.tables()["workers"] == 2


async def test_spans_end_with_the_status_of_their_call(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    metadata = (("traceparent", f"00-{trace}-b7ad6b7169203331-01"), ("tracestate", "k=v"))
    with OtlpReceiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        worker = FakeWorker(FILES)
        async with bench(worker) as b:
            await collect(b.stub.Generate(request(), metadata=metadata))
            cancelled = b.stub.Generate(request(params={"max_tokens": 4000}), metadata=metadata)
            await cancelled.read()
            cancelled.cancel()
            worker.step_s = 0.05
            await miss_deadline(
                lambda timeout_s: b.stub.Generate(
                    request(params={"max_tokens": 4000}), metadata=metadata, timeout=timeout_s
                ),
                lambda: len(worker.submitted) > 2,
            )
            refused = await error_of(b.stub.Generate(request(params={"top_p": 0}), metadata=metadata))
            assert trace in dict(refused.trailing_metadata())["traceresponse"]
            await b.stub.ListModels(pb.ListModelsRequest(), metadata=metadata)
            await until(lambda: b.router._tracing.open_spans() == 0)
            await receiver.until_received("fissile.v1.InferenceService/Generate", 4)
            await receiver.until_received("fissile.v1.InferenceService/ListModels")
        spans = receiver.wait_for("fissile.v1.InferenceService/Generate", 4)
        assert receiver.wait_for("fissile.v1.InferenceService/ListModels")
        assert {(s.trace_id, s.parent_id, s.service) for s in spans} == {(trace, "b7ad6b7169203331", "fissile-router")}
        by_status = {s.attributes["rpc.response.status_code"]: s for s in spans}
        assert set(by_status) == {"OK", "CANCELLED", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT"}
        done = by_status["OK"]
        assert done.attributes["gen_ai.usage.output_tokens"] == 5
        assert done.events == ("submitted", "first_token")
        assert worker.submitted[0].traceparent == f"00-{trace}-{done.span_id}-01"
        assert worker.submitted[0].tracestate == "k=v"
        assert not any("say" in str(s.attributes) for s in spans)


async def test_storm_leaves_every_table_empty() -> None:
    workers = [FakeWorker(FILES, worker_id=f"w{i}", room_seqs=8) for i in range(2)]
    rnd = random.Random(11)

    async def one(b: Bench, i: int) -> str:
        kind = i % 5
        params: dict[str, Any] = {"max_tokens": rnd.randrange(1, 30)}
        if kind == 1:
            params["stop_strings"] = ["lm"]
        if kind == 2:
            params["temperature"] = -1
        call = b.stub.Generate(request(params=params), timeout=rnd.uniform(0.001, 0.2) if kind == 3 else 60)
        if kind == 4:
            asyncio.get_running_loop().call_later(rnd.uniform(0, 0.2), call.cancel)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            await collect(call)
        return (await call.code()).name

    async with bench(*workers, queue_size=64) as b:
        running = [asyncio.ensure_future(one(b, i)) for i in range(240)]
        await asyncio.sleep(0.3)
        await workers[1].stop()
        outcomes = set(await asyncio.gather(*running))
        assert {"OK", "INVALID_ARGUMENT", "CANCELLED", "DEADLINE_EXCEEDED"} <= outcomes
        assert outcomes <= {
            "OK", "INVALID_ARGUMENT", "CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "ABORTED",
        }  # fmt: skip
        await b.empty()
