"""OpenEngine's KV sessions: a prefill worker names the blocks of a prompt, and a decode worker finds them."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from fissile.peers.openengine.v1 import openengine_pb2 as pb
from fissile.peers.openengine.v1.openengine_pb2_grpc import ControlStub, InferenceStub

from tests.e2e.test_openengine import Answer, answer_to, status_of, until
from tests.unit.worker.doors.support import CONFIG, DEMO, demo_worker
from worker.server import Worker
from worker.simulation.cost_model import FixedCost

pytestmark = pytest.mark.asyncio(loop_scope="module")

SIZE = CONFIG.kv_cache_block_size
PROMPT = [5 + i * 31 % 200 for i in range(5 * SIZE + 3)]
CONTEXT_ONLY: dict[str, Any] = {"request_type": "context_only", "detokenize": False}


@dataclass
class Half:
    """A worker for one half of the work, and a peer's stubs."""

    worker: Worker
    inference: Any
    control: Any


@dataclass
class Fleet:
    """A worker of each role, and the folder in which the first two share blocks."""

    prefill: Half
    decode: Half
    whole: Half
    folder: Path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    folder = tmp_path_factory.mktemp("kv")
    shared = replace(CONFIG, kv_tiers=f"files:{folder}:256MiB")
    async with AsyncExitStack() as stack:
        halves = []
        for role, config in (("prefill", shared), ("decode", shared), ("both", CONFIG)):
            worker, _ = await stack.enter_async_context(demo_worker(config, doors=("openengine",), role=role))
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(worker.server.address))
            halves.append(Half(worker, InferenceStub(channel), ControlStub(channel)))
        prefill, decode, whole = halves
        yield Fleet(prefill, decode, whole, folder)
        for half in halves:
            await until(lambda half=half: half.worker.engine.num_live == 0)  # type: ignore[misc]
            load = await half.control.GetLoad(pb.GetLoadRequest())
            assert (load.used_kv_blocks, load.active_kv_sessions) == (0, 0)


def request(tokens: list[int] = PROMPT, **fields: Any) -> pb.GenerateRequest:
    made = pb.GenerateRequest(token_ids=pb.TokenIds(ids=tokens), **fields)
    if not made.HasField("stopping"):
        made.stopping.max_tokens = 12
        made.stopping.ignore_eos = True
    return made


async def prefilled(fleet: Fleet, given: pb.GenerateRequest) -> pb.KvSessionRef:
    """The session of a prefill."""
    wanted = pb.GenerateRequest()
    wanted.CopyFrom(given)
    wanted.extra.update(CONTEXT_ONLY)
    call = fleet.prefill.inference.Generate(wanted)
    responses = [each async for each in call]
    assert await call.code() is grpc.StatusCode.OK
    (ready,) = responses
    assert ready.WhichOneof("event") == "prefill_ready"
    assert ready.usage.prompt_tokens == len(given.token_ids.ids)
    session: pb.KvSessionRef = ready.prefill_ready.kv_session
    return session


async def decoded(fleet: Fleet, given: pb.GenerateRequest, session: pb.KvSessionRef) -> Answer:
    wanted = pb.GenerateRequest()
    wanted.CopyFrom(given)
    wanted.kv.session.CopyFrom(session)
    return await answer_to(fleet.decode.inference.Generate(wanted))


def requests() -> Iterator[pb.GenerateRequest]:
    """Requests that use each part of an answer that a prefill could get wrong."""
    yield request(sampling=pb.SamplingParams(temperature=0.0))
    yield request(
        sampling=pb.SamplingParams(temperature=1.0, seed=7), response=pb.ResponseOptions(return_output_logprobs=True)
    )
    yield request(sampling=pb.SamplingParams(temperature=0.9, seed=8, num_sequences=3))
    yield request(sampling=pb.SamplingParams(temperature=1.0, seed=9, frequency_penalty=0.5, repetition_penalty=1.2))
    yield request(guided=pb.GuidedDecoding(regex="[ab]{4,8}"))
    yield request(kv=pb.KvOptions(cache_salt="tenant"))
    yield request(response=pb.ResponseOptions(return_prompt_logprobs=True))
    yield request(stopping=pb.StoppingOptions(max_tokens=1))
    yield request(stopping=pb.StoppingOptions(max_tokens=9, min_tokens=4))
    yield request(PROMPT[:3])


async def test_answers_with_session_equal_those_of_one_worker(fleet: Fleet) -> None:
    for number, given in enumerate(requests()):
        given.request_id = f"equal-{number}"
        wanted = await answer_to(fleet.whole.inference.Generate(given))
        session = await prefilled(fleet, given)
        assert session.transfer_backend == "files"
        assert session.attributes_struct["num_blocks"] == len(given.token_ids.ids) // SIZE
        answer = await decoded(fleet, given, session)
        assert (answer.tokens, answer.text, answer.infos) == (wanted.tokens, wanted.text, wanted.infos)
        assert (answer.finished, answer.prompt) == (wanted.finished, wanted.prompt)


async def test_decode_worker_finds_the_blocks_of_the_session(fleet: Fleet) -> None:
    # On a busy machine the blocks of one prompt may come too late.
    for number in range(60):
        given = request([number, *PROMPT])
        answer = await decoded(fleet, given, await prefilled(fleet, given))
        assert answer.usage is not None
        if answer.usage.cached_prompt_tokens == 5 * SIZE:
            return
    raise AssertionError("no session has brought its blocks")


async def test_session_that_brings_nothing_changes_no_token(fleet: Fleet) -> None:
    given = request([9, *PROMPT], request_id="foreign")
    wanted = await answer_to(fleet.whole.inference.Generate(given))
    session = await prefilled(fleet, given)
    others = [pb.KvSessionRef(session_id="12345", transfer_backend="NIXL", endpoints=[pb.KvEndpoint(host="h", port=1)])]
    for name, value in (("root", "00"), ("root", 7), ("stores", ["files:0"]), ("stores", "files"), ("stores", [None])):
        other = pb.KvSessionRef()
        other.CopyFrom(session)
        other.attributes_struct.update({name: value})
        others.append(other)
    others.append(pb.KvSessionRef())
    others[-1].CopyFrom(session)
    others[-1].dp_rank = 3
    for other in others:
        assert (await decoded(fleet, given, other)).tokens == wanted.tokens
    # The tier has evicted the blocks.
    given = request([8, *PROMPT], request_id="expired")
    wanted = await answer_to(fleet.whole.inference.Generate(given))
    session = await prefilled(fleet, given)
    for path in fleet.folder.iterdir():
        shutil.rmtree(path)
    assert (await decoded(fleet, given, session)).tokens == wanted.tokens


async def test_session_of_other_prompt_or_salt_is_refused(fleet: Fleet) -> None:
    session = await prefilled(fleet, request())
    wrong = [
        ("kv.session.session_id", request(PROMPT[:-SIZE]), session),
        ("kv.session.session_id", request(kv=pb.KvOptions(cache_salt="other")), session),
        ("kv.session.session_id", request(), pb.KvSessionRef()),
        ("kv.session.session_id", request(), pb.KvSessionRef(session_id="x" * 1000)),
    ]
    for path, given, ref in wrong:
        given.kv.session.CopyFrom(ref)
        code, details = await status_of(fleet.decode.inference.Generate(given))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details.startswith(path)


async def test_request_for_another_role_is_refused(fleet: Fleet) -> None:
    context_only = request()
    context_only.extra.update(CONTEXT_ONLY)
    with_session = request(kv=pb.KvOptions(session=pb.KvSessionRef(session_id="x")))
    wrong = [
        (fleet.prefill, request()),
        (fleet.prefill, with_session),
        (fleet.decode, context_only),
        (fleet.whole, context_only),
        (fleet.whole, with_session),
    ]
    for half, given in wrong:
        code, details = await status_of(half.inference.Generate(given))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "this worker's role is" in details
    # Without a session a decode worker computes the prompt itself.
    wanted = await answer_to(fleet.whole.inference.Generate(request(request_id="bypass")))
    assert (await answer_to(fleet.decode.inference.Generate(request(request_id="bypass")))).tokens == wanted.tokens


async def test_abort_of_session_ends_its_request_alone(fleet: Fleet) -> None:
    sessions = [await prefilled(fleet, request(request_id=f"abort-{number}")) for number in range(2)]
    assert sessions[0].session_id != sessions[1].session_id
    # An answer takes 18 seconds at least.
    slow = demo_worker(CONFIG, doors=("openengine",), role="decode", simulate=FixedCost(0.02))
    async with slow as (worker, _), grpc.aio.insecure_channel(worker.server.address) as channel:
        control = ControlStub(channel)
        calls = []
        for session in sessions:
            given = request(stopping=pb.StoppingOptions(max_tokens=900, ignore_eos=True))
            given.kv.session.CopyFrom(session)
            calls.append(InferenceStub(channel).Generate(given))
            await calls[-1].read()
        assert (await control.GetLoad(pb.GetLoadRequest())).active_kv_sessions == 2
        first = pb.AbortRequest(kv_session=sessions[0])
        assert (await control.Abort(first)).status == pb.ABORT_STATUS_ABORTED
        assert (await answer_to(calls[0])).finished[0].reason == pb.FINISH_REASON_CANCELLED
        await until(lambda: worker.engine.num_live == 1)
        assert (await control.Abort(first)).status == pb.ABORT_STATUS_ALREADY_FINISHED
        assert (await control.GetLoad(pb.GetLoadRequest())).active_kv_sessions == 1
        calls[1].cancel()
        await until(lambda: worker.engine.num_live == 0)
        unknown = pb.AbortRequest(kv_session=pb.KvSessionRef(session_id="never"))
        assert (await status_of(control.Abort(unknown)))[0] is grpc.StatusCode.NOT_FOUND
    # The prefill worker holds nothing of a session that it has handed out.
    aborted = await fleet.prefill.control.Abort(pb.AbortRequest(kv_session=sessions[0]))
    assert aborted.status == pb.ABORT_STATUS_ALREADY_FINISHED


async def test_roles_and_connectors_are_told(fleet: Fleet) -> None:
    roles = {
        "prefill": pb.ENGINE_ROLE_PREFILL,
        "decode": pb.ENGINE_ROLE_DECODE,
        "whole": pb.ENGINE_ROLE_AGGREGATED,
    }
    for name, role in roles.items():
        control = getattr(fleet, name).control
        info = await control.GetServerInfo(pb.GetServerInfoRequest())
        assert (info.engine_role, info.supported_models) == (role, ["demo"])
        assert info.kv_connector.enabled == (name != "whole")
        assert info.kv_connector.transfer_backend == ("" if name == "whole" else "files")
        for asked, other in roles.items():
            health = await control.Health(pb.HealthRequest(role=other))
            assert (health.state == pb.HEALTH_STATE_READY) == (asked == name)
    assert str(DEMO) not in str(info)
