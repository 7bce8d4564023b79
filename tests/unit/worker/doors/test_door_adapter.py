"""DoorAdapter on a real engine with the demo model; LLMEngine on the same checkpoint is the reference."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any
from unittest.mock import AsyncMock, Mock

import grpc
import numpy as np
import pytest
import pytest_asyncio
from fissile.peers.openengine.v1 import openengine_pb2 as openengine
from structlog.testing import capture_logs

from common.errors import ApiError
from common.telemetry.request_record import RequestRecord, begin_record
from tests.unit.worker.doors.support import CONFIG, DOOR, NUM_BLOCKS, answered, demo_worker, fake_context
from worker.doors.door_adapter import DoorAdapter
from worker.doors.door_request import (
    AbortResult,
    DoorFinish,
    DoorPrompt,
    DoorRequest,
    DoorState,
    EmbeddingRequest,
    EngineDoor,
    FinishKind,
)
from worker.doors.openengine_service import OpenEngineControl
from worker.llm_engine import LLMEngine
from worker.server import Worker

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "Once upon a time there was a"
ENDLESS = {"max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    made = LLMEngine(CONFIG)
    yield made
    made.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[tuple[Worker, DoorAdapter]]:
    async with demo_worker() as made:
        yield made


@pytest.fixture
def adapter(served: tuple[Worker, DoorAdapter]) -> DoorAdapter:
    return served[1]


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0, "max_tokens": 24},
        {"temperature": 0.9, "seed": 7, "max_tokens": 24, "n": 3},
        {"seed": 5, "max_tokens": 24, "top_k": 20, "repetition_penalty": 1.2, "min_tokens": 20, "top_p": 0.9},
        {"temperature": 0.0, "max_tokens": 24, "logprobs": 3, "prompt_logprobs": 2, "n": 2},
        {"seed": 9, "max_tokens": 24, "logit_bias": {300: 4.0}, "bad_words": ("the",), "ignore_eos": True},
        {"temperature": 0.0, "max_tokens": 24, "constraint": {"regex": "[a-z]{3,5} [0-9]+"}},
    ],
)
async def test_answers_equal_those_of_the_engine_alone(
    adapter: DoorAdapter, engine: LLMEngine, params: Mapping[str, Any]
) -> None:
    found = await answered(adapter, DoorRequest(PROMPT, params))
    expected = engine.generate([PROMPT], params)
    assert [found.tokens[i] for i in range(len(expected))] == [one["token_ids"] for one in expected]
    assert [found.text[i] for i in range(len(expected))] == [one["text"] for one in expected]
    for i, one in enumerate(expected):
        assert [entry.logprob for entry in found.logprobs[i]] == [e["logprob"] for e in one.get("logprobs", [])]
    assert found.prompt is not None
    given = expected[0].get("prompt_logprobs", [])
    assert [entry.raw for entry in found.prompt.logprobs] == [entry["raw"] for entry in given]
    assert found.usage is not None
    assert found.usage.prompt_tokens == expected[0]["num_tokens_input"]
    assert found.usage.completion_tokens == sum(len(one["token_ids"]) for one in expected)


async def test_answers_of_different_lengths_finish_once_each(adapter: DoorAdapter, engine: LLMEngine) -> None:
    params = {"temperature": 1.2, "seed": 3, "n": 8}
    found = await answered(adapter, DoorRequest(PROMPT, params))
    expected = engine.generate([PROMPT], {**params, "max_tokens": 1000})
    assert [found.tokens[i] for i in range(8)] == [one["token_ids"] for one in expected]
    assert len({len(each) for each in found.tokens.values()}) > 1


async def test_request_id_gives_the_seed_as_everywhere(adapter: DoorAdapter, engine: LLMEngine) -> None:
    params = {"temperature": 1.0, "max_tokens": 16}
    found = await answered(adapter, DoorRequest(PROMPT, params, request_id="mine"))
    (expected,) = engine.generate([PROMPT], params, request_ids=["mine"])
    assert found.tokens[0] == expected["token_ids"]
    other = await answered(adapter, DoorRequest(PROMPT, params, request_id="other"))
    assert other.tokens[0] != found.tokens[0]


@pytest.mark.parametrize("include", [False, True])
async def test_stop_string_ends_the_answer_and_frees_the_engine(
    adapter: DoorAdapter, engine: LLMEngine, served: tuple[Worker, DoorAdapter], include: bool
) -> None:
    (whole,) = engine.generate([PROMPT], {"temperature": 0.0, "max_tokens": 60})
    stop = whole["text"][20:26]
    params = {"temperature": 0.0, **ENDLESS, "stop_strings": (stop,), "include_stop_string": include}
    found = await answered(adapter, DoorRequest(PROMPT, params))
    end = whole["text"].index(stop) + (len(stop) if include else 0)
    assert found.text[0] == whole["text"][:end]
    assert found.finishes[0] == DoorFinish(FinishKind.STOP, stop_string=stop)
    assert found.tokens[0] == whole["token_ids"][: len(found.tokens[0])]
    await until(lambda: served[0].engine.num_live == 0)


@pytest.mark.parametrize("keeps", [False, True])
async def test_stop_token_is_told_and_its_text_kept_on_request(
    adapter: DoorAdapter, engine: LLMEngine, keeps: bool
) -> None:
    (whole,) = engine.generate([PROMPT], {"temperature": 0.0, "max_tokens": 12})
    stop = whole["token_ids"][5]
    at = whole["token_ids"].index(stop)
    request = DoorRequest(PROMPT, {"temperature": 0.0, "stop_token_ids": (stop,)}, keeps_stop_token=keeps)
    found = await answered(adapter, request)
    assert found.tokens[0] == whole["token_ids"][: at + 1]
    assert found.finishes[0] == DoorFinish(FinishKind.STOP, stop_token_id=stop)
    shown = whole["token_ids"][: at + keeps]
    stream = adapter.text.tokenizer.decode_stream(behind=engine.io.tokenizer.encode(PROMPT))  # type: ignore[union-attr]
    assert found.text[0] == stream.push(shown) + stream.flush()


async def test_answer_ends_with_the_models_own_token_or_length(adapter: DoorAdapter) -> None:
    found = await answered(adapter, DoorRequest(PROMPT, {"temperature": 0.0}))
    eos = found.tokens[0][-1]
    assert eos in adapter.facts.eos_token_ids
    assert found.finishes[0] == DoorFinish(FinishKind.STOP, eos_token_id=eos)
    found = await answered(adapter, DoorRequest(PROMPT, {"temperature": 0.0, "ignore_eos": True}))
    assert found.finishes[0] == DoorFinish(FinishKind.LENGTH)
    assert found.usage is not None
    assert found.usage.prompt_tokens + found.usage.completion_tokens == adapter.facts.max_model_len


@pytest.mark.parametrize(
    ("constraint", "is_fine"),
    [
        ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
        ({"choices": ("red", "green")}, lambda text: text in ("red", "green")),
        ({"grammar": 'start: "yes" | "no"'}, lambda text: text in ("yes", "no")),
        ({"json_schema": '{"type":"integer","maximum":99,"minimum":10}'}, lambda text: 10 <= json.loads(text) <= 99),
    ],
)
async def test_constraints_hold(adapter: DoorAdapter, constraint: Mapping[str, Any], is_fine: Any) -> None:
    params = {"seed": 3, "max_tokens": 200, "constraint": constraint, "frequency_penalty": 1.0}
    found = await answered(adapter, DoorRequest(PROMPT, params))
    assert found.finishes[0].kind is FinishKind.STOP
    assert is_fine(found.text[0].strip())


async def test_cached_tokens_are_counted_and_bypassed(adapter: DoorAdapter) -> None:
    ids = list(range(300, 380))
    params = {"temperature": 0.0, "max_tokens": 4}
    usages = []
    for request in (
        DoorRequest(ids, params, cache_salt="a"),
        DoorRequest(ids, params, cache_salt="a"),
        DoorRequest(ids, params, cache_salt="b", reads_cache=False),
        DoorRequest(ids, {**params, "n": 2}, cache_salt="a", reads_cache=False),
        DoorRequest(ids, params, cache_salt="b"),
    ):
        found = await answered(adapter, request)
        assert found.usage is not None
        assert found.prompt is not None
        assert found.prompt.cached_tokens == found.usage.cached_tokens
        usages.append(found.usage.cached_tokens)
    assert usages == [0, 64, 0, 0, 64]


async def test_abort_by_id_tells_unknown_from_finished(
    adapter: DoorAdapter, served: tuple[Worker, DoorAdapter]
) -> None:
    assert adapter.abort("nobody") is AbortResult.UNKNOWN
    async with adapter.call(DOOR, DoorRequest(PROMPT, {**ENDLESS, "n": 2}, request_id="one"), fake_context()) as call:
        assert isinstance((await call.next_events())[0], DoorPrompt)
        assert adapter.abort("one") is AbortResult.ABORTED
        finishes = []
        while not call.is_done:
            finishes += [event.finish for event in await call.next_events() if not isinstance(event, DoorPrompt)]
        assert [each for each in finishes if each] == [DoorFinish(FinishKind.ABORTED)] * 2
        assert adapter.abort("one") is AbortResult.ALREADY_FINISHED
    assert adapter.abort("one") is AbortResult.ALREADY_FINISHED
    await until(lambda: served[0].engine.num_live == 0)


async def test_leaving_the_block_frees_the_engine(adapter: DoorAdapter, served: tuple[Worker, DoorAdapter]) -> None:
    async with adapter.call(DOOR, DoorRequest(PROMPT, ENDLESS), fake_context()) as call:
        await call.next_events()
        assert adapter.load.running_seqs == 1
        assert adapter.load.used_blocks > 0
    await until(lambda: served[0].engine.num_live == 0 and adapter.load.running_seqs == 0)
    assert adapter.load.used_blocks == 0
    assert adapter.load.total_blocks == NUM_BLOCKS


async def test_deadline_ends_the_answer(adapter: DoorAdapter) -> None:
    with pytest.raises(ApiError) as raised:
        await answered(adapter, DoorRequest(PROMPT, ENDLESS), fake_context(left_s=0.05))
    assert raised.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize(
    ("bad", "path"),
    [
        (DoorRequest("", {}), "text"),
        (DoorRequest([], {}), "token_ids.ids"),
        (DoorRequest([1, 1 << 20], {}), "token_ids.ids[1]"),
        (DoorRequest([1] * 5000, {}), "token_ids.ids"),
        (DoorRequest(PROMPT, {"temperature": -1.0}), "sampling.temperature"),
        (DoorRequest(PROMPT, {"stop_token_ids": (1 << 20,)}), "stop_token_ids[0]"),
        (DoorRequest(PROMPT, {"n": 65}), "n"),
        (DoorRequest(PROMPT, {"n": 0}), "n"),
        (DoorRequest(PROMPT, {"constraint": {"regex": "("}}), "guided.regex"),
        (DoorRequest(PROMPT, {"prompt_logprobs": 1, "prompt_logprobs_start": 500}), "prompt_logprobs_start"),
        (DoorRequest(PROMPT, {}, request_id="x" * 200), "request_id"),
        (DoorRequest(PROMPT, {}, cache_salt="x" * 500), "cache_salt"),
        (DoorRequest(PROMPT, {"min_tokens": 9, "max_tokens": 3}), "min_tokens"),
    ],
)
async def test_refusal_names_the_peers_field(
    adapter: DoorAdapter, served: tuple[Worker, DoorAdapter], bad: DoorRequest, path: str
) -> None:
    with pytest.raises(ApiError) as raised:
        await answered(adapter, bad)
    assert raised.value.code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE)
    assert raised.value.violations[0].path == path
    assert raised.value.message.startswith(path)
    assert served[0].engine.num_live == 0


async def test_id_of_a_live_request_is_refused(adapter: DoorAdapter) -> None:
    async with adapter.call(DOOR, DoorRequest(PROMPT, ENDLESS, request_id="twice"), fake_context()):
        with pytest.raises(ApiError) as raised:
            await answered(adapter, DoorRequest(PROMPT, {}, request_id="twice"))
    assert raised.value.code is grpc.StatusCode.ALREADY_EXISTS
    await answered(adapter, DoorRequest(PROMPT, {"max_tokens": 2}, request_id="twice"))


async def test_subscriber_that_leaves_during_a_write_is_no_fault(adapter: DoorAdapter) -> None:
    context = fake_context()
    context.send_initial_metadata = AsyncMock()
    context.write = AsyncMock(side_effect=grpc.aio.InternalError("the peer is gone"))
    with pytest.raises(asyncio.CancelledError):
        await OpenEngineControl(adapter).SubscribeKvEvents(
            openengine.SubscribeKvEventsRequest(include_snapshot=True), context
        )


async def test_request_that_cannot_be_submitted_leaves_its_id_free(
    adapter: DoorAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(adapter.engine, "submit", Mock(side_effect=RuntimeError("no engine")))
        with pytest.raises(RuntimeError):
            await answered(adapter, DoorRequest(PROMPT, {}, request_id="again"))
    await answered(adapter, DoorRequest(PROMPT, {"max_tokens": 2}, request_id="again"))


async def test_too_many_sequences_are_refused(adapter: DoorAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.session.service.MAX_WAITING_CALLS", 1)
    wide = DoorRequest(PROMPT, {**ENDLESS, "n": 64})
    async with contextlib.AsyncExitStack() as calls:
        for _ in range(1 + adapter.facts.max_num_seqs // 64):
            await calls.enter_async_context(adapter.call(DOOR, wide, fake_context()))
        with pytest.raises(ApiError) as raised:
            await answered(adapter, DoorRequest(PROMPT, {}))
    assert raised.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    await answered(adapter, DoorRequest(PROMPT, {"max_tokens": 2}))


async def test_embedding_equals_that_of_the_engine_alone(adapter: DoorAdapter, engine: LLMEngine) -> None:
    vector, count = await adapter.embed(DOOR, EmbeddingRequest(PROMPT, pooling="mean", dimensions=8), fake_context())
    (expected,) = engine.embed([PROMPT], "mean", dimensions=8)
    np.testing.assert_array_equal(vector, expected)
    assert count == len(engine.io.tokenizer.encode(PROMPT))  # type: ignore[union-attr]
    with pytest.raises(ApiError) as raised:
        await adapter.embed(DOOR, EmbeddingRequest(PROMPT, dimensions=100_000), fake_context())
    assert raised.value.violations[0].path == "dimensions"


async def test_missing_metadata_is_said_once_for_each_door(adapter: DoorAdapter) -> None:
    trace = (("traceparent", "00-" + "1" * 32 + "-" + "2" * 16 + "-01"),)
    request = DoorRequest(PROMPT, {"max_tokens": 1})
    with capture_logs() as logs:
        for context in (fake_context(60.0, trace), fake_context(60.0), fake_context(), fake_context()):
            async with adapter.call(EngineDoor("other"), request, context):
                pass
    said = [(each["event"], each["door"]) for each in logs if "door" in each]
    assert said == [("a peer's call has no traceparent", "other"), ("a peer's call has no deadline", "other")]


async def test_state_and_facts(adapter: DoorAdapter) -> None:
    assert adapter.state is DoorState.READY
    assert adapter.facts.model == "demo"
    assert adapter.default_pooling == "last"
    assert re.fullmatch(r"\S+", adapter.text.token_text(300).strip())


@pytest.mark.parametrize(("is_done", "status"), [(True, grpc.StatusCode.OK), (False, grpc.StatusCode.CANCELLED)])
async def test_peer_that_leaves_with_the_last_message_has_not_cancelled(
    served: tuple[Worker, DoorAdapter], is_done: bool, status: grpc.StatusCode
) -> None:
    """Regression: Dynamo resets a stream before its status, and complete answers were logged as CANCELLED."""
    _, adapter = served
    record = RequestRecord()

    async def answer() -> None:
        begin_record(record)
        request = DoorRequest(PROMPT, {"max_tokens": 3} if is_done else ENDLESS)
        async with adapter.call(DOOR, request, fake_context()) as call:
            await call.next_events()
            while is_done and not call.is_done:
                await call.next_events()
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError) as left:
        await asyncio.create_task(answer())
    record.end(left.value, 0.0, None)
    assert record.code is status
