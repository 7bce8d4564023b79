"""Mangled requests of every public method: a documented status that names a field, and the router goes on serving."""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
from collections import Counter
from typing import Any

import grpc
import pytest
from fissile.v1 import errors_pb2
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb
from google.protobuf.descriptor import Descriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2

from scripts.contract_table import served_in_requests
from tests.e2e.fake_worker import FakeWorker, short
from tests.e2e.router_bench import FILES, Bench, bench, collect, request
from tests.e2e.test_receipts import asked_for, receipts
from tests.mangled import Mangler

METHODS = pb.DESCRIPTOR.services_by_name["InferenceService"].methods_by_name
PER_METHOD = 40
AT_ONCE = 16
# A request that makes no sense has no other end (docs/reference/statuses.md).
DOCUMENTED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.NOT_FOUND,
    # Two of one id at once; one that resumes takes over.
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.UNIMPLEMENTED,
}
NAMES_A_FIELD = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED}
REASONS = {name.removeprefix("ERROR_REASON_") for name in errors_pb2.ErrorReason.DESCRIPTOR.values_by_name}


async def good_requests(b: Bench) -> dict[str, list[Message]]:
    """Requests of each method that are answered."""
    plain = asked_for(request(request_id="good", params={"max_tokens": 64, "temperature": 0.5}))
    chat = pb.ChatRequest(request_id="good", messages=[pb.ChatMessage(role="user", content="hi")])
    chat.sampling_params.CopyFrom(plain.sampling_params)
    parts = await collect(b.stub.Generate(plain))
    (receipt,) = receipts(parts).values()
    by_ids, by_text = (pb.GenerateRequest.FromString(plain.SerializeToString()) for _ in range(2))
    by_ids.resume.answers.add().token_ids.ids.extend(parts[0].token_ids[:1])
    by_text.output_options.return_token_ids = False
    digest = pb.TextDigest(bytes=1, sha256=hashlib.sha256(b"h").digest())
    by_text.resume.answers.add().text.CopyFrom(digest)
    return {
        "Generate": [plain, by_ids, by_text],
        "GenerateOnce": [plain],
        "Chat": [chat],
        "ChatOnce": [chat],
        "Replay": [pb.ReplayRequest(receipt=receipt, generate=plain)],
        "Embed": [pb.EmbedRequest(request_id="good", inputs=[pb.TextOrTokens(text="hi")])],
        "ListModels": [pb.ListModelsRequest(page_size=1)],
        "GetModel": [pb.GetModelRequest(model="m")],
        "Tokenize": [pb.TokenizeRequest(text="hi")],
        "Detokenize": [pb.DetokenizeRequest(token_ids=[1, 2])],
        "CountTokens": [pb.CountTokensRequest(chat=chat), pb.CountTokensRequest(generate=plain)],
        "RenderPrompt": [pb.RenderPromptRequest(chat=chat)],
    }


async def outcome(b: Bench, method: MethodDescriptor, message: Message) -> tuple[grpc.StatusCode, status_pb2.Status]:
    """Status of a call, and its details."""
    kind = b.channel.unary_stream if method.server_streaming else b.channel.unary_unary
    call: Any = kind(f"/fissile.v1.InferenceService/{method.name}", request_serializer=lambda each: each)(
        message.SerializeToString(), timeout=60
    )
    try:
        await (collect(call) if method.server_streaming else call)
    except grpc.aio.AioRpcError as error:
        trailing = dict(error.trailing_metadata() or ())
        return error.code(), status_pb2.Status.FromString(bytes(trailing.get("grpc-status-details-bin", b"")))
    return grpc.StatusCode.OK, status_pb2.Status()


def problem_with(method: MethodDescriptor, code: grpc.StatusCode, status: status_pb2.Status) -> str:
    """What is wrong about an outcome; "" for nothing."""
    if code not in DOCUMENTED:
        return f"{code.name} is not documented for a bad request"
    if code is grpc.StatusCode.OK:
        return ""
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for each in status.details:
        _ = each.Unpack(info) or each.Unpack(bad)
    if code is grpc.StatusCode.ABORTED and info.reason != "SUPERSEDED":
        return f"ABORTED {info.reason}"
    if info.domain != "fissile" or info.reason not in REASONS:
        return f"{code.name} has no reason of ErrorReason: {info.reason!r}"
    if code in NAMES_A_FIELD and info.reason != "UNSERVED_METHOD":
        if not bad.field_violations:
            return f"{code.name} {info.reason} names no field"
        for violation in bad.field_violations:
            if not is_field_of(method.input_type, violation.field):
                return f"{violation.field!r} is no field of {method.input_type.name}"
            if not violation.description:
                return f"{violation.field} has no description"
    return ""


def is_field_of(descriptor: Descriptor, path: str) -> bool:
    """True if a path leads to a field, known or by its number; or to a oneof, which may be missing as a whole."""
    name, _, rest = path.partition(".")
    if re.fullmatch(r"\d+( bytes of unknown fields)?", name):
        return True
    name = re.sub(r"\[\d+\]$", "", name)
    if name in descriptor.oneofs_by_name:
        return not rest
    field = descriptor.fields_by_name.get(name)
    if field is None:
        return False
    # Of JSON as text the path goes on in the text.
    inside_text = field.message_type is None and name.endswith("_json")
    return not rest or inside_text or (field.message_type is not None and is_field_of(field.message_type, rest))


async def mangle(seed: int, per_method: int) -> Counter[str]:
    """Sends so many mangled requests of each method, many at once; what came of them, by status."""
    mangler, seen, problems = Mangler(random.Random(seed), served_in_requests()), Counter[str](), list[str]()
    embeds = {"features": ["embed"], "hidden_size": 3, "default_pooling": wpb.POOLING_LAST}
    async with bench(FakeWorker(FILES, answer=short, step_s=0.001, tokens_per_step=64, description=embeds)) as b:
        good, sessions = await good_requests(b), list(b.sessions())
        limit = asyncio.Semaphore(AT_ONCE)

        async def send(method: MethodDescriptor, message: Message) -> None:
            async with limit:
                code, status = await outcome(b, method, message)
            seen[code.name] += 1
            if problem := problem_with(method, code, status):
                problems.append(f"{method.name}: {problem}\n{status.message}\n{message}")

        async with asyncio.TaskGroup() as calls:
            for method in METHODS.values():
                for i in range(per_method):
                    drawn = mangler.random(GetMessageClass(method.input_type))
                    known = good.get(method.name, [])
                    message: Any = mangler.changed(known[i % len(known)]) if known and i % 4 else drawn
                    if i % 8 and getattr(message, "request_id", "") == "good":
                        message.request_id = f"good-{i}"
                    calls.create_task(send(method, message))
        assert not problems, f"seed {seed}, {len(problems)} problems, the first ones:\n" + "\n".join(problems[:5])
        # It serves as before, over the session that it had.
        for name, requests in good.items():
            for each in requests:
                assert (await outcome(b, METHODS[name], each))[0] is grpc.StatusCode.OK, name
        assert list(b.sessions()) == sessions
        await b.empty()
    return seen


async def test_mangled_request_of_any_method_gets_documented_status() -> None:
    seen = await mangle(1, PER_METHOD)
    # The draws reach what they are for.
    assert min(seen[name] for name in ("OK", "INVALID_ARGUMENT", "UNIMPLEMENTED", "NOT_FOUND")) > 5, seen


@pytest.mark.long
@pytest.mark.fresh
async def test_other_mangled_requests_each_time(fresh_seed: int) -> None:
    await mangle(fresh_seed, 2 * PER_METHOD)
