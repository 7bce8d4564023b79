"""OpenEngine over sockets: a generated client, and a worker with the demo model; its own Generate is the reference."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from fissile.peers.openengine.v1 import openengine_pb2 as pb
from fissile.peers.openengine.v1.openengine_pb2_grpc import ControlStub, InferenceStub
from fissile.worker.v1 import worker_pb2 as wpb
from fissile.worker.v1.worker_pb2_grpc import WorkerServiceStub
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2
from structlog.testing import capture_logs

from common.rpc.unsupported_fields import field_paths
from tests.e2e.test_mangled import is_field_of
from tests.e2e.test_worker_process import Process
from tests.e2e.worker_bench import folder, options, running
from tests.mangled import Mangler
from tests.unit.worker.doors.support import CONFIG, DEMO, NUM_BLOCKS, demo_worker
from worker.llm_engine import LLMEngine
from worker.server import Worker
from worker.simulation.cost_model import FixedCost

__all__ = ["folder"]

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "Once upon a time there was a"
ENDLESS = {"max_tokens": 900, "ignore_eos": True}
GREEDY = pb.SamplingParams(temperature=0.0)


@dataclass
class Site:
    """A worker and a peer's stubs."""

    worker: Worker
    inference: Any
    control: Any
    own: Any
    channel: grpc.aio.Channel


@dataclass
class Answer:
    """The messages of one stream, checked and joined."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    infos: dict[int, list[pb.TokenInfo]] = field(default_factory=dict)
    finished: dict[int, pb.GenerationFinished] = field(default_factory=dict)
    prompt: pb.PromptOutput | None = None
    error: pb.EngineError | None = None
    usage: pb.Usage | None = None

    def add(self, response: pb.GenerateResponse) -> None:
        assert self.error is None
        # Only the last message has it.
        assert self.usage is None
        kind = response.WhichOneof("event")
        if kind == "token":
            output = response.token
            assert output.HasField("output_index")
            assert output.output_index not in self.finished
            self.tokens.setdefault(output.output_index, []).extend(each.token_id for each in output.tokens)
            self.infos.setdefault(output.output_index, []).extend(output.tokens)
            self.text[output.output_index] = self.text.get(output.output_index, "") + output.text
        elif kind == "finished":
            assert response.finished.HasField("output_index")
            assert response.finished.output_index not in self.finished
            self.finished[response.finished.output_index] = response.finished
        elif kind == "prompt":
            assert self.prompt is None
            self.prompt = response.prompt
        else:
            assert kind == "error"
            self.error = response.error
        if response.HasField("usage"):
            self.usage = response.usage


async def answer_to(call: Any) -> Answer:
    """Reads a stream that ends with OK."""
    answer = Answer()
    async with asyncio.timeout(60):
        while (response := await call.read()) is not grpc.aio.EOF:
            answer.add(response)
    assert await call.code() is grpc.StatusCode.OK
    assert answer.usage is not None
    return answer


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    """Status and details of a call that fails."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        await (call.read() if hasattr(call, "read") else call)
    code: grpc.StatusCode = await call.code()
    assert code is not grpc.StatusCode.OK
    return code, str(await call.details())


def stopping(**fields: Any) -> pb.StoppingOptions:
    return pb.StoppingOptions(**fields)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[Site]:
    async with (
        demo_worker(doors=("openengine",)) as (worker, _),
        grpc.aio.insecure_channel(worker.server.address) as channel,
    ):
        yield Site(worker, InferenceStub(channel), ControlStub(channel), WorkerServiceStub(channel), channel)


@pytest.mark.parametrize(
    ("sampling", "own"),
    [
        (GREEDY, wpb.SamplingParams(top_p=1, repetition_penalty=1)),
        (
            pb.SamplingParams(temperature=0.9, seed=11, top_k=-1),
            wpb.SamplingParams(temperature=0.9, top_p=1, repetition_penalty=1),
        ),
        (
            pb.SamplingParams(temperature=0.8, seed=2**63 + 5, top_k=30, top_p=0.9, repetition_penalty=1.1, min_p=0.01),
            wpb.SamplingParams(temperature=0.8, top_k=30, top_p=0.9, repetition_penalty=1.1, min_p=0.01),
        ),
    ],
)
async def test_tokens_equal_the_workers_own_at_the_same_seed(
    site: Site, sampling: pb.SamplingParams, own: wpb.SamplingParams
) -> None:
    ids = list(range(300, 330))
    own.max_tokens = 40
    request = pb.GenerateRequest(
        model="demo", token_ids=pb.TokenIds(ids=ids), sampling=sampling, stopping=stopping(max_tokens=40)
    )
    answer = await answer_to(site.inference.Generate(request))
    expected: list[int] = []
    async for response in site.own.Generate(wpb.GenerateRequest(token_ids=ids, params=own, seed=sampling.seed)):
        expected += response.token_ids
    assert answer.tokens == {0: expected}
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (30, len(expected))
    assert answer.usage.total_tokens == 30 + len(expected)


async def test_answers_with_logprobs_equal_the_engines(site: Site) -> None:
    request = pb.GenerateRequest(
        request_id="logprobs",
        prompt=PROMPT,
        sampling=pb.SamplingParams(temperature=0.7, num_sequences=2),
        stopping=stopping(max_tokens=12),
        response=pb.ResponseOptions(
            return_prompt_logprobs=True,
            return_output_logprobs=True,
            prompt_candidates=pb.CandidateTokenSelection(top_n=2),
            output_candidates=pb.CandidateTokenSelection(top_n=3),
        ),
    )
    answer = await answer_to(site.inference.Generate(request))
    engine = LLMEngine(CONFIG)
    params = {"temperature": 0.7, "n": 2, "max_tokens": 12, "logprobs": 3, "prompt_logprobs": 2}
    expected = engine.generate([PROMPT], params, request_ids=["logprobs"])
    engine.close()
    for one in expected:
        index = one["index"]
        assert answer.tokens[index] == one["token_ids"]
        assert answer.text[index] == one["text"]
        for info, entry in zip(answer.infos[index], one["logprobs"], strict=True):
            assert (info.logprob, info.rank) == (entry["logprob"], entry["rank"])
            assert [(each.token_id, each.logprob) for each in info.candidates] == list(entry["top"])
            assert [each.rank for each in info.candidates] == [1, 2, 3]
            assert info.token
    assert answer.prompt is not None
    first, *others = answer.prompt.tokens
    assert first == pb.TokenInfo(token_id=first.token_id, token=first.token)
    for info, entry in zip(others, expected[0]["prompt_logprobs"], strict=True):
        assert (info.token_id, info.logprob) == (entry["token_id"], entry["logprob"])
        assert len(info.candidates) == 2


async def test_stops_are_matched_and_shown_on_request(site: Site) -> None:
    plain = pb.GenerateRequest(prompt=PROMPT, sampling=GREEDY, stopping=stopping(max_tokens=30))
    whole = await answer_to(site.inference.Generate(plain))
    assert whole.finished[0].reason == pb.FINISH_REASON_LENGTH
    text, token = whole.text[0][10:16], whole.tokens[0][6]
    for is_included in (False, True):
        conditions = [pb.StopCondition(stop_text=text)]
        request = pb.GenerateRequest(
            prompt=PROMPT,
            sampling=GREEDY,
            stopping=stopping(**ENDLESS, conditions=conditions, include_stop_in_output=is_included),
        )
        answer = await answer_to(site.inference.Generate(request))
        assert answer.finished[0].stop_match.stop_text == text
        end = whole.text[0].index(text) + len(text) * is_included
        assert answer.text[0] == whole.text[0][:end]
        request.stopping.conditions[0].CopyFrom(pb.StopCondition(stop_token_id=token))
        answer = await answer_to(site.inference.Generate(request))
        assert answer.finished[0].stop_match.stop_token_id == token
        assert answer.tokens[0] == whole.tokens[0][: whole.tokens[0].index(token) + 1]
    ended = await answer_to(site.inference.Generate(pb.GenerateRequest(prompt=PROMPT, sampling=GREEDY)))
    assert ended.finished[0].stop_match.eos_token_id == ended.tokens[0][-1]


async def test_answer_without_text_has_the_same_tokens(site: Site) -> None:
    request = pb.GenerateRequest(prompt=PROMPT, sampling=GREEDY, stopping=stopping(max_tokens=9))
    whole = await answer_to(site.inference.Generate(request))
    request.extra.update({"detokenize": False})
    answer = await answer_to(site.inference.Generate(request))
    assert answer.tokens == whole.tokens
    assert answer.text == {0: ""}


async def test_reset_of_the_stream_frees_the_engine(site: Site) -> None:
    call = site.inference.Generate(pb.GenerateRequest(request_id="reset", prompt=PROMPT, stopping=stopping(**ENDLESS)))
    await call.read()
    call.cancel()
    await until(lambda: site.worker.engine.num_live == 0)
    # Peers abort too, behind the reset.
    aborted = await site.control.Abort(pb.AbortRequest(request_id="reset"))
    assert aborted.status == pb.ABORT_STATUS_ALREADY_FINISHED


async def test_abort_ends_each_answer_as_cancelled(site: Site) -> None:
    request = pb.GenerateRequest(
        request_id="aborted",
        prompt=PROMPT,
        sampling=pb.SamplingParams(num_sequences=2),
        stopping=stopping(**ENDLESS),
    )
    call = site.inference.Generate(request)
    await call.read()
    assert (await site.control.Abort(pb.AbortRequest(request_id="aborted"))).status == pb.ABORT_STATUS_ABORTED
    answer = await answer_to(call)
    assert {each.reason for each in answer.finished.values()} == {pb.FINISH_REASON_CANCELLED}
    assert len(answer.finished) == 2
    calls = [site.inference.Generate(pb.GenerateRequest(prompt=PROMPT, stopping=stopping(**ENDLESS))) for _ in "ab"]
    for each in calls:
        await each.read()
    await site.control.Abort(pb.AbortRequest(all_requests=pb.AllRequests()))
    for each in calls:
        assert (await answer_to(each)).finished[0].reason == pb.FINISH_REASON_CANCELLED


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (pb.AbortRequest(), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.AbortRequest(request_id=""), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.AbortRequest(request_id="never"), grpc.StatusCode.NOT_FOUND),
        (pb.AbortRequest(kv_session=pb.KvSessionRef(session_id="s")), grpc.StatusCode.NOT_FOUND),
    ],
)
async def test_abort_of_an_unknown_target(site: Site, request_: pb.AbortRequest, code: grpc.StatusCode) -> None:
    assert (await status_of(site.control.Abort(request_)))[0] is code


async def test_unknown_model_and_duplicate_id_are_statuses(site: Site) -> None:
    other = pb.GenerateRequest(prompt=PROMPT, model="other")
    assert (await status_of(site.inference.Generate(other)))[0] is grpc.StatusCode.NOT_FOUND
    twice = pb.GenerateRequest(request_id="twice", prompt=PROMPT, stopping=stopping(**ENDLESS))
    call = site.inference.Generate(twice)
    await call.read()
    assert (await status_of(site.inference.Generate(twice)))[0] is grpc.StatusCode.ALREADY_EXISTS
    call.cancel()
    await until(lambda: site.worker.engine.num_live == 0)


async def test_overload_is_refused_before_acceptance(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.session.service.MAX_WAITING_CALLS", 1)
    wide = pb.GenerateRequest(prompt=PROMPT, sampling=pb.SamplingParams(num_sequences=64), stopping=stopping(**ENDLESS))
    calls = [site.inference.Generate(wide) for _ in range(1 + CONFIG.max_num_seqs // 64)]
    await until(lambda: site.worker.engine.num_live == 64 * len(calls))
    code, details = await status_of(site.inference.Generate(pb.GenerateRequest(prompt=PROMPT)))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "queue is full" in details
    for call in calls:
        call.cancel()
    await until(lambda: site.worker.engine.num_live == 0)


async def test_deadline_ends_the_call(site: Site) -> None:
    request = pb.GenerateRequest(prompt=PROMPT, stopping=stopping(**ENDLESS))
    assert (await status_of(site.inference.Generate(request, timeout=0.3)))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: site.worker.engine.num_live == 0)


async def test_each_request_has_one_log_line(site: Site) -> None:
    request = pb.GenerateRequest(request_id="logged", prompt=PROMPT, stopping=stopping(max_tokens=5, ignore_eos=True))
    with capture_logs() as logs:
        await answer_to(site.inference.Generate(request))
        await until(lambda: any(each["event"] == "request ended" for each in logs))
    (line,) = [each for each in logs if each["event"] == "request ended"]
    assert (line["method"], line["request_id"]) == ("openengine.v1.Inference/Generate", "logged")
    assert (line["status"], line["reason"], line["completion_tokens"]) == ("OK", "length", 5)
    assert PROMPT not in str(logs)


async def test_facts_of_server_and_model(site: Site) -> None:
    info = await site.control.GetServerInfo(pb.GetServerInfoRequest())
    assert (info.schema_revision, info.minimum_client_revision) == (1, 1)
    assert info.schema_release == "768a93c7b44e40f28c692ad0b471a8f2"
    assert (info.engine_name, info.engine_role) == ("fissile", pb.ENGINE_ROLE_AGGREGATED)
    assert list(info.supported_models) == ["demo"]
    assert info.capacity.total_kv_blocks == NUM_BLOCKS
    assert not info.kv_connector.enabled
    for name in ("demo", str(DEMO)):
        model = await site.control.GetModelInfo(pb.GetModelInfoRequest(model=name))
        assert (model.model_id, model.served_model_name) == ("demo", "demo")
        assert model.supports_token_ids_input
        assert model.max_context_length == 1024
        assert model.generation.guided_decoding.supported
        assert pb.GUIDED_DECODING_MODE_STRUCTURAL_TAG not in model.generation.guided_decoding.modes
        assert model.HasField("supports_lora")
        assert not model.supports_lora
    for bad, code in (("", grpc.StatusCode.INVALID_ARGUMENT), ("x", grpc.StatusCode.NOT_FOUND)):
        assert (await status_of(site.control.GetModelInfo(pb.GetModelInfoRequest(model=bad))))[0] is code


async def test_load_and_health(site: Site) -> None:
    call = site.inference.Generate(pb.GenerateRequest(prompt=PROMPT, stopping=stopping(**ENDLESS)))
    await call.read()
    load = await site.control.GetLoad(pb.GetLoadRequest(include_per_rank=True))
    assert (load.running_requests, load.queued_requests, load.total_kv_blocks) == (1, 0, NUM_BLOCKS)
    assert load.used_kv_blocks > 0
    assert [(each.data_parallel_rank, each.running_requests) for each in load.ranks] == [(0, 1)]
    assert not load.HasField("running_tokens")
    call.cancel()
    await until(lambda: site.worker.engine.num_live == 0)
    health = await site.control.Health(pb.HealthRequest(include_inference_probe=True, role=99))  # type: ignore[arg-type]
    assert health.state == pb.HEALTH_STATE_READY
    assert [each.name for each in health.checks] == ["model", "inference_probe"]
    health = await site.control.Health(pb.HealthRequest(role=pb.ENGINE_ROLE_PREFILL))
    assert health.state == pb.HEALTH_STATE_NOT_READY


async def test_lora_is_refused_as_by_an_engine_without_it(site: Site) -> None:
    for call in (
        site.control.LoadLora(pb.LoadLoraRequest(adapter=pb.LoraAdapter(lora_id=1, lora_name="a", source_path="/a"))),
        site.control.UnloadLora(pb.UnloadLoraRequest(lora_name="a")),
        site.control.ListLoras(pb.ListLorasRequest()),
    ):
        assert (await status_of(call))[0] is grpc.StatusCode.FAILED_PRECONDITION


async def test_kv_events_add_up_to_the_cache(site: Site) -> None:
    ids = list(range(400, 480))
    await site.own.FlushCache(wpb.FlushCacheRequest())
    short = stopping(max_tokens=1)
    await answer_to(site.inference.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids[:16]), stopping=short)))
    call = site.control.SubscribeKvEvents(pb.SubscribeKvEventsRequest(include_snapshot=True))
    cached: dict[bytes, bytes] = {}
    numbers: list[int] = []

    async def read() -> None:
        batch = (await call.read()).batch
        numbers.append(batch.sequence_number)
        for event in batch.events:
            if event.WhichOneof("event") == "all_blocks_cleared":
                cached.clear()
            elif event.WhichOneof("event") == "block_removed":
                for each in event.block_removed.block_hashes:
                    del cached[each.value]
            else:
                stored, parent = event.block_stored, event.block_stored.parent_block_hash.value
                assert parent in ("", b"") or parent in cached
                assert len(stored.token_ids) == 16 * len(stored.block_hashes)
                for each in stored.block_hashes:
                    cached[each.value] = parent
                    parent = each.value

    async with asyncio.timeout(60):
        while len(cached) < 1:
            await read()
        secret = pb.KvOptions(cache_salt="secret")
        for kv in (secret, pb.KvOptions()):
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), stopping=short, kv=kv)
            await answer_to(site.inference.Generate(request))
        while len(cached) < 5:
            await read()
        await site.own.FlushCache(wpb.FlushCacheRequest())
        while cached:
            await read()
    assert numbers == sorted(numbers)
    call.cancel()
    behind = site.control.SubscribeKvEvents(pb.SubscribeKvEventsRequest(start_sequence_number=numbers[-1]))
    assert (await behind.read()).batch.sequence_number == numbers[-1]
    behind.cancel()
    wrong = site.control.SubscribeKvEvents(pb.SubscribeKvEventsRequest(data_parallel_ranks=[3]))
    assert (await status_of(wrong))[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert not (await site.control.GetKvEventSources(pb.GetKvEventSourcesRequest())).sources


DOCUMENTED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
}


async def outcome(site: Site, method: Any, message: Message) -> tuple[grpc.StatusCode, str]:
    """Status of a call with a bad message, and the problem with it; "" for none."""
    kind = site.channel.unary_stream if method.server_streaming else site.channel.unary_unary
    path = f"/{method.containing_service.full_name}/{method.name}"
    call: Any = kind(path, request_serializer=lambda each: each)(message.SerializeToString(), timeout=60)
    try:
        if method.server_streaming:
            first = await call.read()
            is_open = method.name == "SubscribeKvEvents" and first is not grpc.aio.EOF
            while not is_open and await call.read() is not grpc.aio.EOF:
                pass
            call.cancel()
        else:
            await call
    except grpc.aio.AioRpcError as error:
        trailing = dict(error.trailing_metadata() or ())
        status = status_pb2.Status.FromString(bytes(trailing.get("grpc-status-details-bin", b"")))
        bad = error_details_pb2.BadRequest()
        paths = [each.field for detail in status.details if detail.Unpack(bad) for each in bad.field_violations]
        wrong = [each for each in paths if not is_field_of(method.input_type, each)]
        if error.code() not in DOCUMENTED or wrong:
            return error.code(), f"{method.name}: {error.code()} {error.details()} {wrong}"
        return error.code(), ""
    return grpc.StatusCode.OK, ""


async def test_mangled_requests_get_a_status_that_names_a_field(site: Site) -> None:
    served = {f"{kind}.{name}" for kind, name in served_fields()}
    mangler, seen = Mangler(random.Random(3), served), Counter[grpc.StatusCode]()
    good = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[300, 301]),
        sampling=pb.SamplingParams(temperature=0.5, num_sequences=1),
        stopping=stopping(max_tokens=3, conditions=[pb.StopCondition(stop_text="x")]),
        response=pb.ResponseOptions(return_output_logprobs=True),
        guided=pb.GuidedDecoding(regex="a+"),
    )
    problems = []
    methods = [each for service in pb.DESCRIPTOR.services_by_name.values() for each in service.methods]
    for method in methods:
        is_generate = method.name == "Generate"
        for i in range(120 if is_generate else 8):
            kind: Any = GetMessageClass(method.input_type)
            message: Any = mangler.changed(good) if is_generate and i % 4 else mangler.random(kind)
            if method.name == "SubscribeKvEvents":
                message.include_snapshot = True
            if is_generate:
                # Long answers of the few good ones would take long.
                message.stopping.max_tokens = min(message.stopping.max_tokens, 3)
            code, problem = await outcome(site, method, message)
            seen[code] += 1
            problems += [problem] if problem else []
    assert not problems, problems[:5]
    assert min(seen[each] for each in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT)) > 5, seen
    await answer_to(site.inference.Generate(good))
    await until(lambda: site.worker.engine.num_live == 0)


def served_fields() -> list[tuple[str, str]]:
    """Messages and names of the fields of a request."""
    paths = field_paths(pb.GenerateRequest.DESCRIPTOR)
    return [("GenerateRequest", path) for path in paths if "." not in path]


def slow_worker(folder: Path) -> Worker:
    """A worker whose endless answers take a minute."""
    return Worker(options(folder, doors=("openengine",), simulate=FixedCost(0.02)))


def endless(channel: grpc.aio.Channel) -> Any:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2]), stopping=stopping(max_tokens=3000, ignore_eos=True))
    return InferenceStub(channel).Generate(request)


async def test_drain_ends_requests_with_one_retryable_error(folder: Path) -> None:
    async with running(slow_worker(folder)) as drained:
        call = endless(drained.channel)
        await call.read()
        await drained.stub.Drain(wpb.DrainRequest(deadline_ms=1))
        answer = await answer_to(call)
        assert answer.error is not None
        assert (answer.error.code, answer.error.retryable) == (pb.ERROR_CODE_DRAINING, True)


async def test_draining_worker_says_so_and_refuses_requests(folder: Path) -> None:
    async with running(slow_worker(folder)) as drained:
        call = endless(drained.channel)
        await call.read()
        await drained.stub.Drain(wpb.DrainRequest(deadline_ms=60_000))
        await until(lambda: drained.worker.service.state == wpb.WORKER_STATE_DRAINING)
        health = await ControlStub(drained.channel).Health(pb.HealthRequest())
        assert health.state == pb.HEALTH_STATE_DRAINING
        async with asyncio.timeout(60):
            while True:
                late = endless(drained.channel)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await late.read()
                    # Load balancers still see the worker as ready.
                    late.cancel()
                    continue
                break
        assert await late.code() is grpc.StatusCode.UNAVAILABLE
        call.cancel()


@pytest.fixture
def process(folder: Path, tmp_path: Path) -> Any:
    made = Process(folder, tmp_path / "log", "--doors", "openengine")
    yield made
    if made.child.poll() is None:
        made.child.kill()
        made.child.wait()


async def test_worker_process_serves_the_door_and_drains(process: Process) -> None:
    async with await process.channel() as channel:
        call = InferenceStub(channel).Generate(
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), stopping=stopping(max_tokens=200, ignore_eos=True))
        )
        await call.read()
        process.child.send_signal(signal.SIGTERM)
        answer = await answer_to(call)
        assert answer.finished[0].reason == pb.FINISH_REASON_LENGTH
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 200
    assert await process.exit_code() == 0
    assert "Traceback" not in process.log.read_text()


async def test_worker_without_the_option_serves_no_door(folder: Path) -> None:
    async with running(Worker(options(folder))) as plain:
        call = ControlStub(plain.channel).GetServerInfo(pb.GetServerInfoRequest())
        assert (await status_of(call))[0] is grpc.StatusCode.UNIMPLEMENTED
