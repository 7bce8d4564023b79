"""A real router on real sockets, with scripted workers: every status, every path out, nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, cast

import grpc
import pytest
from fissile.admin.v1 import admin_pb2 as apb
from fissile.admin.v1.admin_pb2_grpc import AdminServiceStub
from fissile.seed import derive_seed
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub
from fissile.worker.v1 import worker_pb2 as wpb
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from common.block_hash import hash_chain, salt_root
from common.limits import MAX_FRAME_TOKENS, PROBATION_SEQS
from common.rpc.durations import to_duration
from common.rpc.unsupported_fields import field_paths
from router.app import Router
from router.options import RouterOptions
from router.requests.stream import RequestStream
from router.scheduling.failover import FailoverOptions, FailoverPolicy
from router.validation import CHAT_SERVED, GENERATE_SERVED
from router.workers.session import Session, WorkerState
from tests.e2e.fake_worker import FakeWorker, letters, short
from tests.otlp_receiver import OtlpReceiver
from tests.unit.router.support import EOS, small_tokenizer, tokenizer_files

if TYPE_CHECKING:
    from fissile.v1.inference_pb2_grpc import InferenceServiceAsyncStub

TOKENIZER = small_tokenizer()
FILES = tokenizer_files()


class Bench:
    """A router, its workers, and a client."""

    def __init__(self, router: Router, workers: list[FakeWorker], channel: grpc.aio.Channel) -> None:
        self.router = router
        self.workers = workers
        self.channel = channel
        self.stub: InferenceServiceAsyncStub = InferenceServiceStub(channel)

    async def ready(self, count: int | None = None) -> None:
        await until(lambda: self.ready_workers() == (len(self.workers) if count is None else count))

    def ready_workers(self) -> int:
        return sum(self.router.registry.ready_workers(m.name) for m in self.router.registry.models)

    def sessions(self) -> list[Session]:
        return list(self.router.pool.sessions())

    async def health(self) -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        return int((await stub.Check(health_pb2.HealthCheckRequest())).status)

    async def wait_health(self, status: int) -> None:
        stub = health_pb2_grpc.HealthStub(self.channel)
        async for answer in stub.Watch(health_pb2.HealthCheckRequest(), timeout=60):
            if answer.status == status:
                return

    @contextlib.asynccontextmanager
    async def another_client(self, options: list[tuple[str, int]]) -> AsyncIterator[InferenceServiceAsyncStub]:
        async with grpc.aio.insecure_channel(self.router.server.address, options=options) as channel:
            yield InferenceServiceStub(channel)

    async def empty(self) -> None:
        """Waits until nothing is left of any request, and asserts it."""
        with contextlib.suppress(AssertionError):
            await until(lambda: not any(leftovers(self.router)))
        assert leftovers(self.router) == [0] * 8
        assert self.router.requests.in_flight == 0
        await until(lambda: not any(worker.running for worker in self.workers))


def leftovers(router: Router) -> list[int]:
    """Sizes of every table that a request could leave something in."""
    tables, dispatcher, sessions = router.requests.tables(), router.dispatcher, router.pool.sessions()
    return [
        tables["streams"],
        tables["sequences"],
        len(dispatcher),
        sum(len(lane) + lane.bound_tokens for lane in dispatcher.lanes),
        sum(len(session.state.live) for session in sessions),
        sum(len(session.state._groups) + len(session.state._cancels) for session in sessions),
        router.service.in_flight,
        len(router._encoder),
    ]


def running(router: Router) -> list[RequestStream]:
    """The requests that workers have."""
    return [cast("RequestStream", each) for session in router.pool.sessions() for each in session.state.live.values()]


async def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + within_s
    while not condition():
        assert loop.time() < end, "condition not reached"
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def bench(*workers: FakeWorker, start: bool = True, **options: Any) -> AsyncIterator[Bench]:
    fleet = list(workers or [FakeWorker(FILES)])
    addresses = [await worker.start() for worker in fleet]
    router = Router(RouterOptions(workers=addresses, **{"port": 0, **options}))
    await router.start()
    channel = grpc.aio.insecure_channel(router.server.address, options=[("grpc.enable_retries", 0)])
    made = Bench(router, fleet, channel)
    try:
        if start:
            await made.ready()
        yield made
    finally:
        await channel.close()
        await router.stop()
        for worker in fleet:
            await worker.stop()


def request(text: str = "say", **fields: Any) -> pb.GenerateRequest:
    params = pb.SamplingParams(**{"max_tokens": 5, **fields.pop("params", {})})
    made = pb.GenerateRequest(text=text, sampling_params=params, **fields)
    made.output_options.return_token_ids = True
    return made


async def collect(call: Any) -> list[Any]:
    """All messages; `read` because a call cannot mix it with `async for`."""
    parts = []
    while (part := await call.read()) is not grpc.aio.EOF:
        parts.append(part)
    return parts


async def error_of(call: Any) -> grpc.aio.AioRpcError:
    try:
        async with asyncio.timeout(60):
            result = await (collect(call) if hasattr(call, "read") else call)
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError(f"the call succeeded: {result}")


def detail(error: grpc.aio.AioRpcError, kind: type[Message]) -> Any:
    status = rpc_status.from_call(error)
    found = kind()
    assert any(packed.Unpack(found) for packed in status.details), status
    return found


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


async def test_absent_parameters_come_from_the_generation_config() -> None:
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


async def test_long_prompts_come_in_extend_frames_with_the_hash_of_their_chain() -> None:
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


async def test_stop_string_at_the_router_cancels_the_worker_and_is_not_billed() -> None:
    async with bench(FakeWorker(FILES, tokens_per_step=16)) as b:
        parts = await collect(b.stub.Generate(request(params={"max_tokens": 1000, "stop_strings": ["mn"]})))
        assert "".join(p.text for p in parts) == "hijkl"
        finish = parts[-1].finish
        assert (finish.stop.stop_string, finish.usage.completion_tokens) == ("mn", 7)
        await until(lambda: b.workers[0].cancelled == [b.workers[0].submitted[0].rid])
        await b.empty()


async def test_round_robin_over_three_workers() -> None:
    async with bench(*(FakeWorker(FILES, worker_id=f"w{i}", answer=short) for i in range(3))) as b:
        answers = [await collect(b.stub.Generate(request())) for _ in range(9)]
        assert sorted(parts[-1].finish.worker_id for parts in answers) == ["w0"] * 3 + ["w1"] * 3 + ["w2"] * 3


async def test_not_serving_until_a_worker_comes_up() -> None:
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


async def test_restarted_worker_starts_with_a_clean_lane() -> None:
    worker = FakeWorker(FILES, room_seqs=1)
    async with bench(worker, failover=FailoverOptions(worker_wait_s=0.1)) as b:
        slow = b.stub.Generate(request(params={"max_tokens": 4000}))
        await slow.read()
        await worker.stop()
        assert (await error_of(slow)).code() is grpc.StatusCode.ABORTED
        again = FakeWorker(FILES, answer=short, port=worker.port, instance_id="second")
        b.workers[0] = again
        await again.start()
        await until(lambda: b.ready_workers() == 1)
        assert (await collect(b.stub.Generate(request())))[-1].HasField("finish")
        await b.empty()
        await again.stop()


async def test_lost_worker_costs_no_stream_a_token() -> None:
    one, two = FakeWorker(FILES, worker_id="w0"), FakeWorker(FILES, worker_id="w1")
    async with bench(one, two) as b:
        calls = [b.stub.Generate(request(params={"max_tokens": 700, "stop_strings": ["never"]})) for _ in range(6)]
        firsts = [await call.read() for call in calls]
        await one.stop()
        for first, call in zip(firsts, calls, strict=True):
            parts = [first, *await collect(call)]
            ids = [i for part in parts for i in part.token_ids]
            assert ids == one.answer(one.submitted[0])[:700]
            assert "".join(part.text for part in parts) == TOKENIZER.decode(ids)
            finish = parts[-1].finish
            assert (finish.usage.completion_tokens, finish.worker_id, finish.exact) == (700, "w1", True)
            assert finish.usage.prompt_tokens == 3
            assert finish.usage.cached_tokens == parts[0].prompt_info.cached_tokens
        moved = [s for s in two.submitted if len(s.token_ids) > 3]
        assert len(moved) == len(one.submitted) > 0
        assert {(s.prompt_len, tuple(s.token_ids[:3])) for s in moved} == {(3, tuple(TOKENIZER.encode("say")))}
        first_seeds = {s.seed for s in one.submitted}
        assert {s.seed for s in moved} == first_seeds
        assert not {s.rid for s in moved} & {s.rid for s in one.submitted}
        await b.empty()


async def test_without_a_worker_streams_end_after_a_bounded_wait_by_what_the_client_has() -> None:
    worker = FakeWorker(FILES)
    async with bench(worker, failover=FailoverOptions(worker_wait_s=0.4)) as b:
        begun = b.stub.Generate(request(params={"max_tokens": 4000}))
        await begun.read()
        worker.step_s = 60.0
        # The step that is under way ends without the next request.
        await asyncio.sleep(0.2)
        waiting = b.stub.Generate(request(params={"max_tokens": 4000}))
        await until(lambda: len(worker.submitted) == 2)
        await worker.stop()
        begin = asyncio.get_running_loop().time()
        error = await error_of(begun)
        assert error.code() is grpc.StatusCode.ABORTED
        assert detail(error, error_details_pb2.ErrorInfo).reason == "WORKER_LOST"
        error = await error_of(waiting)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert detail(error, error_details_pb2.RetryInfo).retry_delay.seconds == 1
        error = await error_of(b.stub.Generate(request()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "for 0.4 s now" in (error.details() or "")
        assert asyncio.get_running_loop().time() - begin > 0.7
        await until(lambda: leftovers(b.router) == [0] * 8)


async def test_what_waits_goes_to_a_worker_that_returns() -> None:
    worker = FakeWorker(FILES)
    async with bench(worker) as b:
        call = b.stub.Generate(request(params={"max_tokens": 700}))
        first = await call.read()
        await worker.stop()
        fresh = b.stub.Generate(request(params={"max_tokens": 5}))
        await asyncio.sleep(0.5)
        b.workers[0] = again = FakeWorker(FILES, worker_id="w9", port=worker.port, instance_id="second")
        await again.start()
        await until(lambda: len(again.submitted) == 2)
        parts = [first, *await collect(call)]
        assert [i for part in parts for i in part.token_ids] == worker.answer(worker.submitted[0])[:700]
        assert (parts[-1].finish.worker_id, parts[-1].finish.attempts) == ("w9", 2)
        assert (await collect(fresh))[-1].finish.attempts == 1
        await again.stop()


@pytest.mark.parametrize("policy", list(FailoverPolicy))
async def test_numerics_classes(policy: FailoverPolicy) -> None:
    workers = [FakeWorker(FILES, worker_id=c, description={"numerics": c}) for c in "xy"]
    async with bench(*workers, failover=FailoverOptions(policy, worker_wait_s=0.3)) as b:
        call = b.stub.Generate(request(params={"max_tokens": 400}))
        first = await call.read()
        (lost,) = [worker for worker in workers if worker.submitted]
        await lost.stop()
        if policy is FailoverPolicy.EXACT:
            assert (await error_of(call)).code() is grpc.StatusCode.ABORTED
        else:
            parts = [first, *await collect(call)]
            finish = parts[-1].finish
            assert (finish.usage.completion_tokens, finish.attempts, finish.exact) == (400, 2, False)
        # What has no token yet may go anywhere.
        assert (await collect(b.stub.Generate(request())))[-1].finish.exact


async def test_other_weights_take_over_nothing() -> None:
    worker = FakeWorker(FILES)
    async with bench(worker, failover=FailoverOptions(FailoverPolicy.ANY, worker_wait_s=1.0)) as b:
        call = b.stub.Generate(request(params={"max_tokens": 4000}))
        await call.read()
        await worker.stop()
        swapped = FakeWorker(FILES, port=worker.port, instance_id="second", description={"weights_digest": "other"})
        b.workers[0] = swapped
        await swapped.start()
        await until(lambda: swapped.calls and b.ready_workers() == 1)
        assert (await collect(b.stub.Generate(request())))[-1].HasField("finish")
        assert (await error_of(call)).code() is grpc.StatusCode.ABORTED
        assert len(swapped.submitted) == 1
        await swapped.stop()


async def test_a_request_that_kills_every_worker_is_stopped_after_it_killed_one_alone() -> None:
    """R5, X8: two deaths make a suspect, the third one, with nothing beside it, the verdict."""
    workers = [FakeWorker(FILES, worker_id=f"w{i}") for i in range(5)]
    async with bench(*workers) as b:
        for worker in workers:
            worker.answer = lambda _: []
        call = b.stub.Generate(request(params={"max_tokens": 4000}))
        for _ in range(3):
            await until(lambda: any(worker.running for worker in workers))
            (ill,) = [worker for worker in workers if worker.running]
            await ill.stop()
            await until(lambda: not ill.running)  # noqa: B023
        error = await error_of(call)
        assert error.code() is grpc.StatusCode.INTERNAL
        assert detail(error, error_details_pb2.ErrorInfo).reason == "POISON_REQUEST"
        assert sum(len(worker.submitted) for worker in workers) == 3
        await until(lambda: b.ready_workers() == 2)
        for worker in workers:
            worker.answer = short
        assert (await collect(b.stub.Generate(request())))[-1].finish.attempts == 1
        await b.empty()


async def test_a_suspect_has_its_worker_for_itself_until_its_first_steps_are_over() -> None:
    """R5: what comes meanwhile goes elsewhere; an innocent one ends as if nothing had been."""
    workers = [FakeWorker(FILES, worker_id=f"w{i}") for i in range(4)]
    async with bench(*workers) as b:
        for worker in workers:
            worker.step_s = 0.3
        call = b.stub.Generate(request(params={"max_tokens": 40}))
        alive = list(workers)
        for _ in range(2):
            await until(lambda: any(worker.running for worker in alive))
            (ill,) = [worker for worker in alive if worker.running]
            alive.remove(ill)
            await ill.stop()
        await until(lambda: any(worker.running for worker in alive))
        (alone,) = [worker for worker in alive if worker.running]
        for worker in alive:
            worker.answer = letters
        others = [b.stub.Generate(request(params={"max_tokens": 2})) for _ in range(8)]
        for other in others:
            assert (await collect(other))[-1].finish.worker_id != alone.worker_id
        assert len(alone.submitted) == 1
        alone.step_s = 0.001
        finish = (await collect(call))[-1].finish
        assert (finish.usage.completion_tokens, finish.attempts, finish.exact) == (40, 3, True)
        await asyncio.gather(*(collect(b.stub.Generate(request(params={"max_tokens": 2}))) for _ in range(8)))
        assert len(alone.submitted) > 1
        await b.empty()


def have_passed_first_steps(router: Router, address: str) -> bool:
    """True if there are requests on a worker, and all of them are."""
    there = [stream for stream in running(router) if stream.session and stream.session.address == address]
    return bool(there) and all(s.attempts.has_passed_first_steps(s.assembly.num_tokens) for s in there)


@pytest.mark.slow
async def test_long_answers_outlive_any_two_workers() -> None:
    """R5: deaths beside many other requests, after the first steps."""
    workers = [FakeWorker(FILES, worker_id=f"w{i}", step_s=0.01) for i in range(4)]
    async with bench(*workers) as b:
        calls = [b.stub.Generate(request(params={"max_tokens": 300})) for _ in range(12)]
        for ill in workers[:3]:
            address = f"127.0.0.1:{ill.port}"
            await until(lambda: have_passed_first_steps(b.router, address))  # noqa: B023
            await ill.stop()
        for call in calls:
            parts = await collect(call)
            assert [i for part in parts for i in part.token_ids] == letters(wpb.SubmitSequence())[:300]
        await b.empty()


@pytest.mark.slow
async def test_workers_that_cannot_be_reached_for_a_while_cost_no_stream_anything() -> None:
    """R5: two workers freeze one after the other, each for longer than the router waits."""
    workers = [FakeWorker(FILES, worker_id=f"w{i}", step_s=0.3) for i in range(3)]
    async with bench(*workers) as b:
        calls = [b.stub.Generate(request(params={"max_tokens": 20})) for _ in range(9)]
        for frozen in workers[:2]:
            await until(lambda: frozen.running)  # noqa: B023
            frozen.silent = True
            await until(lambda: not any(s.worker_id == frozen.worker_id for s in b.sessions()))  # noqa: B023
            frozen.silent = False
        for call in calls:
            assert (await collect(call))[-1].finish.usage.completion_tokens == 20
        assert b.router.requests.running.lost["silent"] >= 2
        await b.empty()


async def test_silent_worker_is_given_up_and_its_streams_go_on() -> None:
    one, two = FakeWorker(FILES, worker_id="w0"), FakeWorker(FILES, worker_id="w1")
    async with bench(one, two) as b:
        call = b.stub.Generate(request(params={"max_tokens": 800}))
        first = await call.read()
        (silent,) = [worker for worker in (one, two) if worker.submitted]
        silent.silent = True
        parts = [first, *await collect(call)]
        assert [i for part in parts for i in part.token_ids] == one.answer(silent.submitted[0])[:800]
        assert parts[-1].finish.attempts == 2
        silent.silent = False
        await b.ready(2)


async def test_a_worker_that_dies_young_each_time_is_on_probation() -> None:
    """R13: when it comes back it draws no more requests than it may kill."""
    well = FakeWorker(FILES, worker_id="well")
    bad = FakeWorker(FILES, worker_id="bad", instance_id="0")
    async with bench(well, bad) as b:
        for life in range(1, 4):
            await bad.stop()
            await until(lambda: b.ready_workers() == 1)
            bad = b.workers[1] = FakeWorker(FILES, worker_id="bad", instance_id=str(life), port=bad.port, step_s=0.02)
            await bad.start()
            await until(lambda: b.ready_workers() == 2)
        calls = [asyncio.ensure_future(collect(b.stub.Generate(request(params={"max_tokens": 8})))) for _ in range(24)]
        most = 0
        while not all(call.done() for call in calls):
            most = max(most, len(bad.running))
            await asyncio.sleep(0.002)
        assert all(call.result()[-1].HasField("finish") for call in calls)
        assert 1 <= most <= PROBATION_SEQS
        await b.empty()


async def test_a_stalled_step_is_given_up_and_a_long_prefill_is_not() -> None:
    one, two = FakeWorker(FILES, worker_id="w0"), FakeWorker(FILES, worker_id="w1")
    async with bench(one, two, failover=FailoverOptions(stall_timeout_s=1.0)) as b:
        call = b.stub.Generate(request(params={"max_tokens": 900}))
        await call.read()
        (busy,) = [worker for worker in (one, two) if worker.submitted]
        # 2048 tokens at 10 000 a second: ten of the longest prefills take 2.05 s.
        busy.busy_ms = 1900
        await asyncio.sleep(0.5)
        assert (b.ready_workers(), len(one.submitted) + len(two.submitted)) == (2, 1)
        busy.busy_ms = 2100
        parts = await collect(call)
        assert (parts[-1].finish.attempts, parts[-1].finish.usage.completion_tokens) == (2, 900)
        await asyncio.sleep(0.6)
        assert b.ready_workers() == 1
        busy.busy_ms = 0
        await b.ready(2)


async def test_an_aborted_request_is_not_submitted_again() -> None:
    worker = FakeWorker(FILES)
    async with bench(worker) as b:
        calls = [b.stub.Generate(request(params={"max_tokens": 4000}), timeout=t) for t in (20, 1.0)]
        for call in calls:
            await call.read()
        await worker.stop()
        calls[0].cancel()
        assert (await error_of(calls[1])).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        again = FakeWorker(FILES, port=worker.port, instance_id="second")
        b.workers[0] = again
        await again.start()
        await b.ready()
        await asyncio.sleep(0.2)
        assert again.submitted == []
        await b.empty()
        await again.stop()


async def test_cancel_and_deadline_reach_the_worker() -> None:
    async with bench() as b:
        worker = b.workers[0]
        call = b.stub.Generate(request(params={"max_tokens": 4000}))
        await call.read()
        call.cancel()
        await until(lambda: worker.cancelled == [worker.submitted[0].rid])
        late = b.stub.Generate(request(params={"max_tokens": 4000}), timeout=0.3)
        assert (await error_of(late)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert 1 <= worker.submitted[1].deadline_left_ms <= 300
        await until(lambda: worker.cancelled == [s.rid for s in worker.submitted])
        await b.empty()


async def test_duplicate_request_id() -> None:
    async with bench() as b:
        call = b.stub.Generate(request(request_id="same", params={"max_tokens": 4000}))
        await call.read()
        error = await error_of(b.stub.Generate(request(request_id="same")))
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        call.cancel()
        await b.empty()
        assert await collect(b.stub.Generate(request(request_id="same")))


async def test_each_tenant_has_request_ids_of_its_own() -> None:
    """R11, X7: an id in flight is neither refused to another tenant nor held for it; equal ids draw equal numbers."""
    async with bench() as b:
        calls = [
            b.stub.Generate(
                request(request_id="same", params={"max_tokens": 4000}), metadata=(("x-fissile-tenant", tenant),)
            )
            for tenant in ("gold", "iron")
        ]
        firsts: list[Any] = [await call.read() for call in calls]
        assert {first.prompt_info.seed for first in firsts} == {str(derive_seed("same"))}
        again = b.stub.Generate(request(request_id="same"), metadata=(("x-fissile-tenant", "iron"),))
        assert (await error_of(again)).code() is grpc.StatusCode.ALREADY_EXISTS
        calls[1].cancel()
        await until(lambda: b.router.service.in_flight == 1)
        again = b.stub.Generate(request(request_id="same"), metadata=(("x-fissile-tenant", "iron"),))
        assert (await collect(again))[-1].HasField("finish")
        calls[0].cancel()
        await b.empty()


async def test_full_queue_says_when_to_come_back() -> None:
    async with bench(FakeWorker(FILES, room_seqs=1), queue_size=2) as b:
        running = b.stub.Generate(request(params={"max_tokens": 4000}))
        await running.read()
        queued = [b.stub.Generate(request()) for _ in range(2)]
        await until(lambda: leftovers(b.router)[2] == 2)
        error = await error_of(b.stub.Generate(request()))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 50 <= detail(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() <= 30_000
        assert detail(error, error_details_pb2.ErrorInfo).reason == "QUEUE_FULL"
        running.cancel()
        for parts in await asyncio.gather(*(collect(call) for call in queued)):
            assert parts[-1].HasField("finish")
        await b.empty()


async def test_deadline_in_the_queue() -> None:
    async with bench(FakeWorker(FILES, room_seqs=0, decoding=1)) as b:
        error = await error_of(b.stub.Generate(request(), timeout=0.2))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await b.empty()
        assert b.workers[0].submitted == []


# A reader with a small window: otherwise gRPC itself takes megabytes before the router's write blocks.
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16_384)]


async def test_slow_client_is_dropped_and_does_not_slow_its_neighbour() -> None:
    worker = FakeWorker(FILES, tokens_per_step=2048, max_model_len=2_000_000)
    async with bench(worker, max_unread_tokens=20_000) as b, b.another_client(SMALL_WINDOW) as client:
        slow = client.Generate(request(params={"max_tokens": 700_000}))
        await slow.read()
        neighbour = await collect(b.stub.Generate(request(params={"max_tokens": 10_000})))
        assert neighbour[-1].finish.usage.completion_tokens == 10_000
        await until(lambda: worker.cancelled)
        # Nothing of it is held until the client reads again, which it may never do.
        await b.empty()
        error = await error_of(slow)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert detail(error, error_details_pb2.ErrorInfo).reason == "SLOW_CLIENT"
        await b.empty()


# Only time drops these clients.
UNREAD: dict[str, Any] = {"max_unread_tokens": 1 << 30, "slow_client_timeout_s": 0.5}


@pytest.mark.parametrize("tokens", [60_000, 700_000])
async def test_a_client_that_reads_nothing_for_long_is_dropped(tokens: int) -> None:
    """R4, X9: after the answer's end too, when only the last messages wait for it."""
    worker = FakeWorker(FILES, tokens_per_step=2048, max_model_len=2_000_000)
    async with bench(worker, **UNREAD) as b, b.another_client(SMALL_WINDOW) as client:
        slow = client.Generate(request(params={"max_tokens": tokens}, request_id="same"))
        parts: list[Any] = [await slow.read()]
        await until(lambda: not b.router.service.in_flight)
        await b.empty()
        again = b.stub.Generate(request(params={"max_tokens": 1}, request_id="same"))
        assert (await collect(again))[-1].HasField("finish")
        with contextlib.suppress(grpc.aio.AioRpcError):
            while (part := await slow.read()) is not grpc.aio.EOF:
                parts.append(part)
        assert not any(part.HasField("finish") for part in parts)
        error = await error_of(slow)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert detail(error, error_details_pb2.ErrorInfo).reason == "SLOW_CLIENT"


@pytest.mark.slow
async def test_a_slow_worker_drops_no_client() -> None:
    worker = FakeWorker(FILES, step_s=1.2)
    async with bench(worker, **UNREAD) as b:
        assert (await collect(b.stub.Generate(request(params={"max_tokens": 3}))))[-1].HasField("finish")


async def test_a_drain_does_not_wait_for_a_client_that_does_not_read() -> None:
    """R4: neither while its message waits, for longer than a slow client may, nor for its status."""
    worker = FakeWorker(FILES, tokens_per_step=2048, max_model_len=2_000_000)
    async with bench(worker, drain_timeout_s=60.0, **UNREAD) as b, b.another_client(SMALL_WINDOW) as client:
        slow = client.Generate(request(params={"max_tokens": 60_000}))
        await slow.read()
        begin = asyncio.get_running_loop().time()
        await b.router.drain()
        # Else as long as the drain may last.
        assert asyncio.get_running_loop().time() - begin < 60.0


async def test_slow_client_gets_merged_deltas_and_loses_nothing() -> None:
    worker = FakeWorker(FILES, tokens_per_step=512, max_model_len=2_000_000)
    async with bench(worker, max_unread_tokens=700_000) as b, b.another_client(SMALL_WINDOW) as client:
        call = client.Generate(request(params={"max_tokens": 300_000}))
        parts: list[Any] = [await call.read()]
        await until(lambda: not worker.running)
        parts += await collect(call)
        ids = [i for part in parts for i in part.token_ids]
        assert ids == worker.answer(worker.submitted[0])[:300_000]
        assert "".join(part.text for part in parts) == TOKENIZER.decode(ids)
        assert len(parts) < 0.8 * 300_000 / 512


async def test_gate_holds_prompts_and_releases_them_together() -> None:
    worker = FakeWorker(FILES, decoding=1, latency_us=100_000)
    async with bench(worker, delay_factor=1.0, max_hold_s=0.25) as b:
        calls = [b.stub.Generate(request(params={"max_tokens": 1}))]
        await asyncio.sleep(0.03)
        calls += [b.stub.Generate(request(params={"max_tokens": 1})) for _ in range(3)]
        await asyncio.gather(*(collect(call) for call in calls))
        assert worker.groups == [4]
        assert any(lane.seqs for lane in worker.lanes)
        assert worker.lanes[-1].seqs == 0


async def test_returned_request_is_routed_again_and_counts_once() -> None:
    full, other = FakeWorker(FILES, worker_id="w0", give_back=True), FakeWorker(FILES, worker_id="w1", answer=short)
    async with bench(full, other) as b:
        answers = [await collect(b.stub.Generate(request(params={"max_tokens": 64}))) for _ in range(4)]
        assert {(p[-1].finish.worker_id, p[-1].finish.attempts) for p in answers} == {("w1", 1)}
        assert len({s.rid for s in [*full.submitted, *other.submitted]}) == len(full.submitted) + len(other.submitted)
        await b.empty()


async def code_at_end(call: Any) -> str:
    """Name of a call's status; its messages are read first, because gRPC holds the status back until they are."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        async with asyncio.timeout(60):
            await collect(call)
    return str((await call.code()).name)


async def test_calls_that_come_as_a_router_ends_get_a_status() -> None:
    """X2, R6: gRPC's core ends calls that nobody has accepted when the server stops, as a CANCELLED without a word."""
    async with bench(FakeWorker(FILES, answer=short)) as b, b.another_client([]) as client:
        calls = [client.Generate(request(request_id=f"{i}", params={"max_tokens": 2})) for i in range(400)]
        await until(lambda: b.router.service.in_flight > 0)
        await b.router.stop()
        codes = Counter(await asyncio.gather(*map(code_at_end, calls)))
        assert set(codes) <= {"OK", "UNAVAILABLE", "ABORTED"}, codes


async def test_a_router_that_ends_while_its_loop_is_busy_gives_calls_a_status() -> None:
    """X2, R6: one call is accepted per turn of the loop; where turns are long, a quiet time says nothing."""
    async with bench(FakeWorker(FILES, answer=short)) as b, b.another_client([]) as client:
        calls = [client.Generate(request(request_id=f"{i}", params={"max_tokens": 2})) for i in range(100)]
        await until(lambda: b.router.service.in_flight > 0)
        loop = asyncio.get_running_loop()
        for turn in range(20):
            loop.call_later(0.045 * turn, time.sleep, 0.04)
        await b.router.stop()
        codes = Counter(await asyncio.gather(*map(code_at_end, calls)))
        assert set(codes) <= {"OK", "UNAVAILABLE", "ABORTED"}, codes


async def test_workers_that_can_not_be_used_are_refused() -> None:
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


async def test_burst_that_the_workers_can_take_does_not_fill_the_queue() -> None:
    async with bench(FakeWorker(FILES, answer=short), queue_size=1) as b:
        calls = [b.stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]))) for _ in range(32)]
        answers = await asyncio.gather(*(collect(call) for call in calls))
        assert all(parts[-1].HasField("finish") for parts in answers)


async def test_protocol_violation_closes_the_session_only() -> None:
    worker = FakeWorker(FILES, end_with=wpb.SequenceEnd(reason=wpb.END_REASON_LENGTH))
    async with bench(worker) as b:
        worker._advance = lambda step, rid, sequence: step.rid.append(rid)  # type: ignore[method-assign]
        error = await error_of(b.stub.Generate(request()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        del worker._advance
        worker.end_with = None
        await b.ready(1)
        assert (await collect(b.stub.Generate(request())))[-1].HasField("finish")


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (wpb.END_REASON_INVALID, grpc.StatusCode.INTERNAL),
        (wpb.END_REASON_DEADLINE, grpc.StatusCode.DEADLINE_EXCEEDED),
        (wpb.END_REASON_ERROR, grpc.StatusCode.ABORTED),
        (wpb.END_REASON_NOT_A_NUMBER, grpc.StatusCode.INTERNAL),
    ],
)
async def test_failures_at_the_worker(reason: wpb.EndReason.ValueType, code: grpc.StatusCode) -> None:
    worker = FakeWorker(FILES)
    async with bench(worker, failover=FailoverOptions(worker_wait_s=0.3)) as b:
        call = b.stub.Generate(request(params={"max_tokens": 4000}))
        await call.read()
        worker.end_with = wpb.SequenceEnd(reason=reason, message="engine: boom")
        error = await error_of(call)
        assert error.code() is code
        assert len(worker.submitted) == 1
        await b.empty()


async def test_nothing_goes_to_an_engine_that_has_failed() -> None:
    """Its worker may live, and the stream too, until it has made another engine."""
    one, two = FakeWorker(FILES, worker_id="w0"), FakeWorker(FILES, worker_id="w1")
    async with bench(one, two, placement="round_robin") as b:
        calls = [b.stub.Generate(request(params={"max_tokens": 500})) for _ in range(6)]
        firsts = [await call.read() for call in calls]
        assert (len(one.submitted), len(two.submitted)) == (3, 3)
        one.end_with = wpb.SequenceEnd(reason=wpb.END_REASON_ERROR, message="engine: boom")
        for call, first in zip(calls, firsts, strict=True):
            parts = [first, *await collect(call)]
            assert [i for part in parts for i in part.token_ids] == two.answer(two.submitted[0])[:500]
        assert (len(one.submitted), len(two.submitted)) == (3, 6)
        await b.empty()


async def test_an_output_that_is_no_number_ends_its_request_alone() -> None:
    """W6: INTERNAL, not tried elsewhere, where the same weights would give the same; and no loss of the worker."""
    one, two = FakeWorker(FILES, worker_id="w0"), FakeWorker(FILES, worker_id="w1")
    async with bench(one, two) as b:
        call = b.stub.Generate(request(params={"max_tokens": 4000}))
        await call.read()
        (its,) = [worker for worker in (one, two) if worker.submitted]
        its.end_with = wpb.SequenceEnd(reason=wpb.END_REASON_NOT_A_NUMBER, message="the model's output is not a number")
        error = await error_of(call)
        assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "the model's output is not a number")
        its.end_with = None
        assert (len(one.submitted) + len(two.submitted), b.ready_workers()) == (1, 2)
        assert not b.router.requests.running.lost
        for _ in range(2):
            await collect(b.stub.Generate(request()))
        await b.empty()


async def test_what_a_worker_gives_up_goes_on_elsewhere() -> None:
    one, two = FakeWorker(FILES, worker_id="w0"), FakeWorker(FILES, worker_id="w1")
    async with bench(one, two) as b:
        call = b.stub.Generate(request(params={"max_tokens": 500}))
        first = await call.read()
        (leaving,) = [worker for worker in (one, two) if worker.submitted]
        leaving.end_with = wpb.SequenceEnd(reason=wpb.END_REASON_CANCELLED, message="drained")
        await until(lambda: not leaving.running)
        leaving.end_with = None
        parts = [first, *await collect(call)]
        assert [i for part in parts for i in part.token_ids] == one.answer(leaving.submitted[0])[:500]


async def test_no_initial_metadata_before_the_first_token() -> None:
    worker = FakeWorker(FILES, step_s=0.2)
    async with bench(worker) as b:
        call = b.stub.Generate(request())
        waiting = asyncio.ensure_future(call.initial_metadata())
        await until(lambda: worker.submitted)
        assert not waiting.done()
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


async def test_a_worker_that_has_ended_keeps_its_name_in_the_list() -> None:
    """C17: an operator who has drained worker w1 sees w1 as unconnected, and it is not taken for one that serves."""
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
        worker = FakeWorker(FILES)
        async with bench(worker) as b:
            await collect(b.stub.Generate(request(), metadata=metadata))
            cancelled = b.stub.Generate(request(params={"max_tokens": 4000}), metadata=metadata)
            await cancelled.read()
            cancelled.cancel()
            await error_of(b.stub.Generate(request(params={"max_tokens": 4000}), metadata=metadata, timeout=0.2))
            refused = await error_of(b.stub.Generate(request(params={"top_p": 0}), metadata=metadata))
            assert trace in dict(refused.trailing_metadata())["traceresponse"]
            await b.stub.ListModels(pb.ListModelsRequest(), metadata=metadata)
            await until(lambda: b.router._tracing.open_spans() == 0)
        spans = receiver.wait_for("fissile.v1.InferenceService/Generate", 4)
        assert receiver.wait_for("fissile.v1.InferenceService/ListModels")
        assert {(s.trace_id, s.parent_id, s.service) for s in spans} == {(trace, "b7ad6b7169203331", "fissile-router")}
        by_status = {s.attributes["rpc.status_code"]: s for s in spans}
        assert set(by_status) == {"OK", "CANCELLED", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT"}
        done = by_status["OK"]
        assert done.attributes["gen_ai.usage.output_tokens"] == 5
        assert done.events == ("submitted", "first_token")
        assert worker.submitted[0].traceparent == f"00-{trace}-{done.span_id}-01"
        assert worker.submitted[0].tracestate == "k=v"
        assert not any("say" in str(s.attributes) for s in spans)


async def test_the_trace_shows_every_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = "0af7651916cd43dd8448eb211c80319d"
    metadata = (("traceparent", f"00-{trace}-b7ad6b7169203331-01"),)
    with OtlpReceiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        workers = [FakeWorker(FILES, worker_id=f"w{i}") for i in range(2)]
        async with bench(*workers) as b:
            call = b.stub.Generate(request(params={"max_tokens": 400}), metadata=metadata)
            await call.read()
            (lost,) = [worker for worker in workers if worker.submitted]
            await lost.stop()
            parts = await collect(call)
            assert (await collect(b.stub.Generate(request())))[-1].finish.attempts == 1
            await until(lambda: b.router._tracing.open_spans() == 0)
        (request_span, _) = sorted(
            receiver.wait_for("fissile.v1.InferenceService/Generate", 2), key=lambda s: s.trace_id != trace
        )
        spans = sorted(receiver.wait_for("attempt", 2), key=lambda s: s.start_ns)
        assert {(s.trace_id, s.parent_id) for s in spans} == {(trace, request_span.span_id)}
        assert [s.attributes["fissile.worker.id"] for s in spans] == [lost.worker_id, parts[-1].finish.worker_id]
        assert [s.attributes.get("fissile.attempt.loss") for s in spans] == ["died", None]
        assert sum(int(s.attributes["fissile.attempt.tokens"]) for s in spans) == 400
        assert spans[0].end_ns <= spans[1].start_ns <= spans[1].end_ns <= request_span.end_ns + 5_000_000
        # C8: the time between the two is no hole, and neither is what came before the first.
        mine = [s for s in receiver.spans if s.parent_id == request_span.span_id and s.kind == "INTERNAL"]
        tokenize, queue, wait = sorted(mine, key=lambda s: s.start_ns)
        assert [s.name for s in (tokenize, queue, wait)] == ["tokenize", "queue", "wait for worker"]
        assert (wait.attributes["fissile.attempt.loss"], wait.attributes["fissile.worker.id"]) == (
            "died",
            parts[-1].finish.worker_id,
        )
        ends = [(tokenize.end_ns, queue.start_ns), (queue.end_ns, spans[0].start_ns)]
        ends += [(spans[0].end_ns, wait.start_ns), (wait.end_ns, spans[1].start_ns)]
        assert all(abs(one - other) < 5_000_000 for one, other in ends)
        assert request_span.events == ("submitted", "first_token", "submitted")


async def test_storm_leaves_every_table_empty() -> None:
    workers = [FakeWorker(FILES, worker_id=f"w{i}", room_seqs=8) for i in range(2)]
    rnd = random.Random(11)

    async def one(b: Bench, i: int) -> str:
        kind = i % 6
        params: dict[str, Any] = {"max_tokens": rnd.randrange(1, 30)}
        if kind == 1:
            params["stop_strings"] = ["lm"]
        if kind == 2:
            params["temperature"] = -1
        call = b.stub.Generate(request(params=params), timeout=rnd.uniform(0.001, 0.2) if kind == 3 else 20)
        if kind == 4:
            asyncio.get_running_loop().call_later(rnd.uniform(0, 0.2), call.cancel)
        if kind == 5:
            params["max_tokens"] = 4000
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


async def test_drain_finishes_streams_and_refuses_new_ones() -> None:
    async with bench(drain_timeout_s=5.0) as b:
        call = b.stub.Generate(request(params={"max_tokens": 300}))
        await call.read()
        draining = asyncio.ensure_future(b.router.drain())
        await asyncio.sleep(0.05)
        assert await b.health() == health_pb2.HealthCheckResponse.NOT_SERVING
        parts = await collect(call)
        assert parts[-1].finish.usage.completion_tokens == 300
        await draining
        assert leftovers(b.router) == [0] * 8


def details_of(error: grpc.aio.AioRpcError) -> set[str]:
    status = rpc_status.from_call(error)
    return set() if status is None else {packed.TypeName().rpartition(".")[2] for packed in status.details}


def assert_ended_with_router(error: grpc.aio.AioRpcError, tokens: int) -> None:
    """The statuses of a router that ends, by what the client has got."""
    assert detail(error, error_details_pb2.ErrorInfo).reason == "ROUTER_ENDING"
    assert "Cancelling all calls" not in (error.details() or "")
    if tokens:
        assert (error.code(), details_of(error)) == (grpc.StatusCode.ABORTED, {"ErrorInfo"})
        assert detail(error, error_details_pb2.ErrorInfo).metadata["tokens_sent"] == str(tokens)
    else:
        assert (error.code(), details_of(error)) == (grpc.StatusCode.UNAVAILABLE, {"ErrorInfo", "RetryInfo"})


@pytest.mark.parametrize("drains", [True, False])
async def test_a_router_that_ends_says_what_its_streams_have_got(drains: bool) -> None:
    """R6, C10: after the drain timeout, and when the router stops at once."""
    worker = FakeWorker(FILES, room_seqs=1, step_s=0.01)
    async with bench(worker, drain_timeout_s=0.2) as b:
        begun = b.stub.Generate(request(params={"max_tokens": 4000}))
        parts: list[Any] = [await begun.read()]
        waiting = [b.stub.Generate(request(params={"max_tokens": 4000})) for _ in range(3)]
        await until(lambda: len(b.router.dispatcher) == 3)
        ending = asyncio.ensure_future(b.router.drain() if drains else b.router.stop())
        with contextlib.suppress(grpc.aio.AioRpcError):
            while (part := await begun.read()) is not grpc.aio.EOF:
                parts.append(part)
        assert_ended_with_router(await error_of(begun), sum(len(part.token_ids) for part in parts))
        for call in waiting:
            assert_ended_with_router(await error_of(call), 0)
        await ending
        assert leftovers(b.router) == [0] * 8


async def test_what_an_admin_watches_ends_with_the_router() -> None:
    """R6: no call ends with a bare status of gRPC's."""
    async with bench(admin_port=0) as b:
        assert b.router.admin is not None
        async with grpc.aio.insecure_channel(b.router.admin.address) as channel:
            watch = AdminServiceStub(channel).WatchLoad(apb.WatchLoadRequest(interval=to_duration(60)))
            await watch.read()
            ending = asyncio.ensure_future(b.router.stop())
            assert_ended_with_router(await error_of(watch), 0)
            await ending


def router_process(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "router", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "FISSILE_LOG_FORMAT": "json", **(environment or {})},
    )


def listening_address(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        event = json.loads(line)
        if event["event"] == "router listening":
            return str(event["address"])
    raise AssertionError("the router does not listen")


async def test_process_drains_on_sigterm_and_exits_with_zero() -> None:
    worker = FakeWorker(FILES)
    process = router_process("--worker", await worker.start(), "--port", "0", "--drain-timeout", "5s")
    address = await asyncio.to_thread(listening_address, process)
    async with grpc.aio.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        async for answer in health.Watch(health_pb2.HealthCheckRequest(), timeout=60):
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                break
        call = InferenceServiceStub(channel).Generate(request("secret words", params={"max_tokens": 200}))
        await call.read()
        process.send_signal(signal.SIGTERM)
        assert (await collect(call))[-1].finish.usage.completion_tokens == 200
    assert await asyncio.to_thread(process.wait, 10) == 0
    assert process.stderr is not None
    log = process.stderr.read()
    assert log.count("request ended") == 1
    assert "secret" not in log
    assert "hijkl" not in log
    assert "Traceback" not in log
    await worker.stop()


@pytest.mark.slow
async def test_a_second_signal_ends_a_draining_router_with_the_same_statuses() -> None:
    """R6: nobody gets "Cancelling all calls"; the process ends with 0."""
    worker = FakeWorker(FILES)
    process = router_process("--worker", await worker.start(), "--port", "0", "--drain-timeout", "60s")
    address = await asyncio.to_thread(listening_address, process)
    async with grpc.aio.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        async for answer in health.Watch(health_pb2.HealthCheckRequest(), timeout=60):
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                break
        call = InferenceServiceStub(channel).Generate(request(params={"max_tokens": 4000}))
        parts: list[Any] = [await call.read()]
        process.send_signal(signal.SIGTERM)
        parts += [await call.read() for _ in range(20)]
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(grpc.aio.AioRpcError):
            while (part := await call.read()) is not grpc.aio.EOF:
                parts.append(part)
        assert_ended_with_router(await error_of(call), sum(len(part.token_ids) for part in parts))
    assert await asyncio.to_thread(process.wait, 10) == 0
    assert process.stderr is not None
    process.stderr.close()
    await worker.stop()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no worker is named"),
        pytest.param(["--worker", "nowhere"], "use host:port", marks=pytest.mark.slow),
        (["--worker", "a:1", "--port", "TAKEN"], "is in use"),
        pytest.param(
            ["--worker", "a:1", "--port", "0", "--tokenizer", "/nonexistent"], "tokenizer.json", marks=pytest.mark.slow
        ),
        pytest.param(["--worker", "a:1", "--max-hold", "soon"], "use for example 250ms", marks=pytest.mark.slow),
        pytest.param(["--worker", "a:1", "--placement", "magic"], "round_robin", marks=pytest.mark.slow),
        pytest.param(
            ["--worker", "a:1", "--host", "no.such.host.invalid", "--port", "0"],
            "change --host",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_process_refuses_in_one_line(arguments: list[str], message: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        process = router_process(*(port if a == "TAKEN" else a for a in arguments))
        _, log = process.communicate(timeout=60)
    assert process.returncode == 2
    errors = [line for line in log.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in log


def test_router_needs_neither_torch_nor_the_worker() -> None:
    code = "import sys, router.app; print(sorted({'torch', 'worker', 'kernels', 'transformers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"
