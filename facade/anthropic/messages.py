"""Anthropic's Messages API: requests of `/v1/messages` and `count_tokens` as calls of the client library. Pure.

Answers are written by facade/anthropic/message_events.py. Markers of Anthropic's prompt cache (`cache_control`) have no
effect: routers send a prompt to the worker that has its beginning in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec
from fissile.client.calls import chat_request
from fissile.client.messages import Unary
from fissile.v1 import inference_pb2 as pb

from common.errors import InvalidFieldError, UnservedFieldError, at_path
from facade.anthropic.message_events import PING, MessageEncoder
from facade.http.bodies import Body, Names, UInt32, decode, decode_part, refuse_given
from facade.http.conversation import ConversationBuilder, join_texts, with_tools
from facade.http.parts import (
    ReceiptField,
    object_text,
    receipt_argument,
    type_of,
    unserved_type,
    unsigned_seed,
)
from facade.http.runner import AnswerPlan, QuestionPlan

# Field -> its values that have no effect here; every other value is refused. None: all values have no effect.
HARMLESS_FIELDS: Final[Mapping[str, Collection[Any] | None]] = {
    "cache_control": None,
    "container": (),
    "diagnostics": None,
    "inference_geo": (),
    "mcp_servers": ([],),
    "metadata": None,
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
}
# The only edit of a conversation that changes nothing: Claude Code sends it.
_KEPT_THINKING: Final = {"type": "clear_thinking_20251015", "keep": "all"}
_EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")
# Field of `fissile.v1` -> field of this API, as for `param_of`.
NAMES: Final[Names] = {
    "messages": "messages",
    "reasoning": "thinking",
    "reasoning.max_tokens": "thinking.budget_tokens",
    "sampling_params": "",
    "sampling_params.constraint": "output_config.format.schema",
    "sampling_params.max_tokens": "max_tokens",
    "sampling_params.seed": "seed",
    "sampling_params.stop_strings": "stop_sequences*",
    "sampling_params.temperature": "temperature",
    "sampling_params.top_k": "top_k",
    "sampling_params.top_p": "top_p",
    "template_arguments_json": "output_config.effort",
    "tools": "tools*",
    "tools.parameters_json": "tools*.input_schema",
}


class ThinkingBody(Body):
    """`thinking` of a request."""

    type: str
    budget_tokens: UInt32 | None = None
    display: str | None = None


class FormatBody(Body):
    """The form of an answer: a JSON Schema."""

    type: str
    schema: msgspec.Raw


class OutputBody(Body):
    """`output_config` of a request."""

    effort: str | None = None
    format: FormatBody | None = None


class ContextBody(Body):
    """`context_management` of a request."""

    edits: list[dict[str, Any]] | None = None


class ToolChoiceBody(Body):
    """`tool_choice` of a request."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ToolBody(Body):
    """A tool that the client runs. `eager_input_streaming` has no effect: arguments are always sent as they arrive."""

    name: str
    input_schema: msgspec.Raw
    type: str | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None


class PromptBody(Body):
    """The fields of a request that make its prompt: all that `count_tokens` has."""

    messages: list[msgspec.Raw]
    model: str
    context_management: ContextBody | None = None
    output_config: OutputBody | None = None
    output_format: FormatBody | None = None
    system: str | list[msgspec.Raw] | None = None
    thinking: ThinkingBody | None = None
    tool_choice: ToolChoiceBody | None = None
    tools: list[msgspec.Raw] | None = None
    cache_control: Any = None
    mcp_servers: Any = None
    speed: Any = None


class MessagesBody(PromptBody, kw_only=True):
    """A request of `/v1/messages`. `receipt`, `request_id` and `seed` are additions of Fissile."""

    max_tokens: UInt32
    receipt: bool | ReceiptField | None = None
    request_id: str | None = None
    seed: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: UInt32 | None = None
    top_p: float | None = None
    container: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    metadata: Any = None
    service_tier: Any = None


class MessageBody(Body):
    """A message of the conversation."""

    role: str
    content: str | list[msgspec.Raw]


class TextBlock(Body):
    """A text."""

    type: str
    text: str
    cache_control: Any = None
    citations: list[Any] | None = None


class ThinkingBlock(Body):
    """Reasoning of an earlier answer; the signature is not checked."""

    type: str
    thinking: str
    signature: str | None = None


class ToolUseBlock(Body):
    """A tool call of an earlier answer."""

    type: str
    id: str
    name: str
    input: msgspec.Raw
    cache_control: Any = None
    caller: Any = None


class ToolResultBlock(Body):
    """The result of a tool call."""

    type: str
    tool_use_id: str
    content: str | list[msgspec.Raw] = ""
    is_error: bool | None = None
    cache_control: Any = None


def parse(data: bytes, _created: int) -> AnswerPlan:
    """Reads a request of `/v1/messages`.

    Raises:
        ApiError: a field is missing, not served or not valid.
    """
    body = decode(data, MessagesBody)
    refuse_given(body, HARMLESS_FIELDS)
    arguments = {
        **_prompt_arguments(body),
        "request_id": body.request_id,
        "receipt": receipt_argument(body.receipt),
        "seed": unsigned_seed(body.seed),
        "max_tokens": body.max_tokens,
        "stop_strings": body.stop_sequences or None,
        "temperature": body.temperature,
        "top_k": body.top_k,
        "top_p": body.top_p,
        "constraint": _constraint(body),
        "reasoning": _reasoning(body.thinking),
    }
    shows_thinking = body.thinking is None or body.thinking.display != "omitted"
    encoder = MessageEncoder(body.model, body.max_tokens, shows_thinking=shows_thinking)
    return AnswerPlan([_messages(body)], True, arguments, encoder, bool(body.stream), NAMES, lambda _: PING)


def parse_count(data: bytes) -> QuestionPlan[int]:
    """Reads a request of `/v1/messages/count_tokens`.

    Raises:
        ApiError: a field is missing, not served or not valid.
    """
    body = decode(data, PromptBody)
    refuse_given(body, {name: values for name, values in HARMLESS_FIELDS.items() if hasattr(body, name)})
    asked = pb.CountTokensRequest(chat=chat_request(_messages(body), _prompt_arguments(body)))
    call = Unary("CountTokens", asked, lambda answer: int(answer.prompt_tokens))
    return QuestionPlan(call, lambda count: {"input_tokens": count}, NAMES)


def _prompt_arguments(body: PromptBody) -> dict[str, Any]:
    for i, edit in enumerate(body.context_management.edits or () if body.context_management else ()):
        if edit != _KEPT_THINKING:
            raise UnservedFieldError(f"context_management.edits[{i}]")
    choice = body.tool_choice
    arguments: dict[str, Any] = {
        "model": body.model,
        "template_arguments_json": _template_arguments(body),
        "tools": [_tool(f"tools[{i}]", tool) for i, tool in enumerate(body.tools or ())] or None,
    }
    is_parallel = choice is None or not choice.disable_parallel_tool_use
    return with_tools(arguments, _tool_choice(choice), is_parallel=is_parallel)


def _messages(body: PromptBody) -> list[dict[str, Any]]:
    conversation = ConversationBuilder(joins_turns=True)
    if body.system:
        conversation.add_system(_text("system", body.system))
    for i, given in enumerate(body.messages):
        with at_path(f"messages[{i}]"):
            _add_message(conversation, decode_part(given, MessageBody))
    if conversation.messages and conversation.messages[-1]["role"] == "assistant":
        problem = "is 'assistant': an answer cannot continue a text of the assistant"
        raise InvalidFieldError(f"messages[{len(body.messages) - 1}].role", problem, "user in the last message")
    return conversation.messages


def _add_message(conversation: ConversationBuilder, message: MessageBody) -> None:
    if message.role == "user":
        _add_user_blocks(conversation, message.content)
    elif message.role == "assistant":
        _add_assistant_blocks(conversation, message.content)
    elif message.role == "system":
        conversation.add_system(_text("content", message.content))
    else:
        raise InvalidFieldError("role", f"is {message.role[:64]!r}", "user, assistant or system")


def _add_user_blocks(conversation: ConversationBuilder, content: str | list[msgspec.Raw]) -> None:
    """Adds results of calls as messages of their own, and the texts before, between and after them as one each."""
    if isinstance(content, str):
        conversation.add_user(content)
        return
    texts: list[str] = []
    for j, block in enumerate(content):
        with at_path(f"content[{j}]"):
            kind = type_of(block)
            if kind == "text":
                texts.append(decode_part(block, TextBlock).text)
            elif kind == "tool_result":
                if texts:
                    conversation.add_user(join_texts(texts))
                    texts = []
                result = decode_part(block, ToolResultBlock)
                mark = "Error: " if result.is_error else ""
                conversation.add_result("tool_use_id", result.tool_use_id, mark + _text("content", result.content))
            else:
                raise unserved_type(kind, "text or tool_result")
    if texts:
        conversation.add_user(join_texts(texts))


def _add_assistant_blocks(conversation: ConversationBuilder, content: str | list[msgspec.Raw]) -> None:
    if isinstance(content, str):
        conversation.add_answer(content)
        return
    for j, block in enumerate(content):
        with at_path(f"content[{j}]"):
            kind = type_of(block)
            if kind == "text":
                conversation.add_answer(decode_part(block, TextBlock).text)
            elif kind == "thinking":
                conversation.add_reasoning(decode_part(block, ThinkingBlock).thinking)
            elif kind == "tool_use":
                call = decode_part(block, ToolUseBlock)
                conversation.add_call(call.id, call.name, object_text("input", call.input))
            else:
                raise unserved_type(kind, "text, thinking or tool_use")


def _text(path: str, content: str | list[msgspec.Raw]) -> str:
    """The text of a content whose blocks are texts."""
    if isinstance(content, str):
        return content
    texts = []
    for j, block in enumerate(content):
        with at_path(f"{path}[{j}]"):
            if (kind := type_of(block)) != "text":
                raise unserved_type(kind, "text")
            texts.append(decode_part(block, TextBlock).text)
    return join_texts(texts)


def _tool(path: str, tool: msgspec.Raw) -> dict[str, Any]:
    with at_path(path):
        if (kind := type_of(tool, "custom")) != "custom":
            raise unserved_type(kind, "custom, or none")
        made = decode_part(tool, ToolBody)
        return {
            "name": made.name,
            "description": made.description,
            "parameters_json": object_text("input_schema", made.input_schema),
            "strict": made.strict,
        }


def _tool_choice(choice: ToolChoiceBody | None) -> dict[str, str] | None:
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidFieldError("tool_choice.name", "is missing", "the name of a tool")
        return {"name": choice.name}
    modes = {"auto": "auto", "any": "required", "none": "none"}
    if choice.type not in modes:
        raise InvalidFieldError("tool_choice.type", f"is {choice.type[:64]!r}", "auto, any, tool or none")
    return {"mode": modes[choice.type]}


def _constraint(body: MessagesBody) -> dict[str, Any] | None:
    form = (body.output_config.format if body.output_config else None) or body.output_format
    if form is None:
        return None
    if form.type != "json_schema":
        raise InvalidFieldError("output_config.format.type", f"is {form.type[:64]!r}", "json_schema")
    return {"json_schema": object_text("output_config.format.schema", form.schema)}


def _reasoning(thinking: ThinkingBody | None) -> dict[str, Any] | None:
    if thinking is None or thinking.budget_tokens is None:
        return None
    return {"max_tokens": thinking.budget_tokens}


def _template_arguments(body: PromptBody) -> dict[str, Any] | None:
    """Variables of the chat template for `thinking` and `effort`."""
    thinking, effort = body.thinking, body.output_config.effort if body.output_config else None
    found: dict[str, Any] = {}
    if thinking is not None:
        if thinking.type not in ("enabled", "disabled", "adaptive"):
            raise InvalidFieldError("thinking.type", f"is {thinking.type[:64]!r}", "enabled, disabled or adaptive")
        if thinking.display not in (None, "summarized", "omitted"):
            raise InvalidFieldError("thinking.display", f"is {thinking.display[:64]!r}", "summarized or omitted")
        if thinking.type == "disabled":
            found["enable_thinking"] = False
    if effort is not None:
        if effort not in _EFFORTS:
            raise InvalidFieldError("output_config.effort", f"is {effort[:64]!r}", ", ".join(_EFFORTS))
        found["reasoning_effort"] = effort
    return found or None
