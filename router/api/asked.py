"""Calls of Generate and Chat as they have been asked: checked, but for what needs their model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from fissile.v1 import inference_pb2 as pb

from common.telemetry import names
from common.telemetry.request_record import RequestRecord
from common.telemetry.tracing import RequestSpan
from router.api.answers import AnswerResponse
from router.api.in_flight import InFlightCall
from router.api.rpc_scope import Context, RpcScope
from router.model_registry import ServedModel
from router.prompts.prompts import Prompt

AnswerRequest: TypeAlias = pb.GenerateRequest | pb.ChatRequest
# Makes a prompt for a model, of a tenant, with the salt in force.
Encode: TypeAlias = Callable[[ServedModel, str, bytes], Awaitable[Prompt]]


@dataclass(frozen=True, slots=True)
class Kind:
    """Differences between Generate and Chat.

    Attributes:
        operation: its name in traces and figures.
        response: makes its messages.
        continues: True if the answer's text continues the prompt's, False if it is a text of its own: a message has no
            space before its first word, whatever its template ends with.
    """

    operation: str
    response: Callable[..., AnswerResponse]
    continues: bool


GENERATE = Kind(names.TEXT_COMPLETION, pb.GenerateResponse, continues=True)
CHAT = Kind(names.CHAT, pb.ChatResponse, continues=False)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that has passed the checks that need no model.

    Attributes:
        request: as it came.
        call: its place among the calls in flight.
        encode: makes its prompt.
        context: of its call.
        cache_salt: the salt in force.
        span: of its call.
        record: content of its log line.
        scope: sends its trailing metadata.
    """

    request: AnswerRequest
    call: InFlightCall
    encode: Encode
    context: Context
    cache_salt: bytes
    span: RequestSpan
    record: RequestRecord
    scope: RpcScope
