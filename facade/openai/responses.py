"""OpenAI's Responses API: requests of `/v1/responses` as calls of the client library. Pure.

Answers are written by facade/openai/response_events.py. Conversations are not stored: a request has its whole input.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import msgspec

from common.errors import InvalidFieldError, UnservedFieldError, at_path
from facade.http.bodies import Body, Names, UInt32, decode, decode_part, refuse_given
from facade.http.conversation import ConversationBuilder, with_tools
from facade.http.parts import (
    ABSENT,
    ReceiptField,
    is_given,
    object_text,
    receipt_argument,
    type_of,
    unserved_type,
    unsigned_seed,
)
from facade.http.runner import AnswerPlan
from facade.openai.response_events import ResponseEncoder
from facade.openai.sampling import effort_arguments

# Field -> its values that have no effect here; every other value is refused. None: all values have no effect.
HARMLESS_FIELDS: Final[Mapping[str, Collection[Any] | None]] = {
    "background": (False,),
    "client_metadata": None,
    "conversation": (),
    "max_tool_calls": None,
    "metadata": None,
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_retention": None,
    "safety_identifier": None,
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream_options": None,
    "truncation": ("disabled",),
    "user": None,
}
# Values of `include` that have no effect: reasoning is sent in plain, and no tool runs on the server.
_HARMLESS_INCLUDES: Final = (
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
)
# Field of `fissile.v1` -> field of this API, as for `param_of`.
NAMES: Final[Names] = {
    "messages": "input",
    "output_options": "include",
    "reasoning": "reasoning",
    "sampling_params": "",
    "sampling_params.constraint": "text.format.schema",
    "sampling_params.max_tokens": "max_output_tokens",
    "sampling_params.seed": "seed",
    "sampling_params.temperature": "temperature",
    "sampling_params.top_p": "top_p",
    "session_id": "prompt_cache_key",
    "template_arguments_json": "reasoning.effort",
    "tools": "tools*",
    "tools.parameters_json": "tools*.parameters",
}


class ReasoningBody(Body):
    """`reasoning` of a request; summaries are not made, so how they are asked for has no effect."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextBody(Body):
    """`text` of a request."""

    format: msgspec.Raw = ABSENT
    verbosity: str | None = None


class SchemaFormatBody(Body):
    """A form of answers that a JSON Schema describes."""

    type: str
    schema: msgspec.Raw
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class FunctionToolBody(Body):
    """A tool; `strict` is false unless a request says otherwise."""

    type: str
    name: str
    description: str | None = None
    parameters: msgspec.Raw = ABSENT
    strict: bool | None = None


class NamespaceToolBody(Body):
    """Tools with a common prefix, as Codex has them; the model does not read the namespace's description."""

    type: str
    name: str
    tools: list[msgspec.Raw]
    description: str | None = None


class NamedToolBody(Body):
    """The tool that has to be called."""

    type: str
    name: str | None = None


class ResponsesBody(Body):
    """A request of `/v1/responses`. `receipt`, `request_id` and `seed` are additions of Fissile."""

    input: str | list[msgspec.Raw]
    model: str = ""
    include: list[str] | None = None
    instructions: str | None = None
    max_output_tokens: UInt32 | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    reasoning: ReasoningBody | None = None
    receipt: bool | ReceiptField | None = None
    request_id: str | None = None
    seed: int | None = None
    stream: bool | None = None
    temperature: float | None = None
    text: TextBody | None = None
    tool_choice: str | NamedToolBody | None = None
    tools: list[msgspec.Raw] | None = None
    top_logprobs: UInt32 | None = None
    top_p: float | None = None
    background: Any = None
    client_metadata: Any = None
    conversation: Any = None
    max_tool_calls: Any = None
    metadata: dict[str, str] | None = None
    previous_response_id: Any = None
    prompt: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: str | None = None
    service_tier: Any = None
    store: Any = None
    stream_options: Any = None
    truncation: Any = None
    user: str | None = None


class MessageItem(Body):
    """A message of the input; `id`, `status` and `phase` describe an earlier answer and have no effect."""

    role: str
    content: str | list[msgspec.Raw]
    type: str = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class ReasoningItem(Body):
    """Reasoning of an earlier answer."""

    type: str
    id: str | None = None
    summary: list[msgspec.Raw] | None = None
    content: list[msgspec.Raw] | None = None
    encrypted_content: str | None = None
    status: str | None = None


class FunctionCallItem(Body):
    """A tool call of an earlier answer."""

    type: str
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    id: str | None = None
    status: str | None = None


class FunctionOutputItem(Body):
    """The result of a tool call."""

    type: str
    call_id: str
    output: str | list[msgspec.Raw]
    id: str | None = None
    name: str | None = None
    namespace: str | None = None
    status: str | None = None


class InputTextPart(Body):
    """A part of a content; annotations and logprobs of an earlier answer have no effect."""

    type: str
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


def parse(data: bytes, created: int) -> AnswerPlan:
    """Reads a request.

    Args:
        data: the body.
        created: Unix time of the response.

    Raises:
        ApiError: a field is missing, not served or not valid.
    """
    body = decode(data, ResponsesBody)
    refuse_given(body, HARMLESS_FIELDS)
    for i, name in enumerate(body.include or ()):
        if name not in _HARMLESS_INCLUDES:
            raise UnservedFieldError(f"include[{i}]")
    if body.top_logprobs:
        raise UnservedFieldError("top_logprobs")
    tools, namespaces = _tools(body.tools or ())
    arguments: dict[str, Any] = {
        "model": body.model,
        "request_id": body.request_id,
        "receipt": receipt_argument(body.receipt),
        "session_id": body.prompt_cache_key,
        "seed": unsigned_seed(body.seed),
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "constraint": _constraint(body.text),
        "template_arguments_json": effort_arguments(
            "reasoning.effort", None if body.reasoning is None else body.reasoning.effort
        ),
        "tools": tools or None,
    }
    choice = _tool_choice(body.tool_choice)
    arguments = with_tools(arguments, choice, is_parallel=body.parallel_tool_calls is not False)
    encoder = ResponseEncoder(_repeated(body, created), namespaces)
    return AnswerPlan([_messages(body)], True, arguments, encoder, bool(body.stream), NAMES, encoder.idle)


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    conversation = ConversationBuilder(joins_turns=False)
    if body.instructions:
        conversation.add_system(body.instructions)
    if isinstance(body.input, str):
        conversation.add_user(body.input)
        return conversation.messages
    for i, item in enumerate(body.input):
        _add_item(conversation, f"input[{i}]", item)
    return conversation.messages


def _add_item(conversation: ConversationBuilder, path: str, item: msgspec.Raw) -> None:
    with at_path(path):
        kind = type_of(item, "message")
        if kind == "message":
            _add_message(conversation, decode_part(item, MessageItem))
        elif kind == "reasoning":
            conversation.add_reasoning(_reasoning(decode_part(item, ReasoningItem)))
        elif kind == "function_call":
            call = decode_part(item, FunctionCallItem)
            conversation.add_call(call.call_id, _full_name(call.namespace, call.name), call.arguments)
        elif kind == "function_call_output":
            result = decode_part(item, FunctionOutputItem)
            text = _text("output", result.output, ("input_text",))
            conversation.add_result("call_id", result.call_id, text)
        else:
            raise unserved_type(kind, "message, reasoning, function_call or function_call_output")


def _add_message(conversation: ConversationBuilder, item: MessageItem) -> None:
    if item.role == "user":
        conversation.add_user(_text("content", item.content, ("input_text",)))
    elif item.role in ("system", "developer"):
        conversation.add_system(_text("content", item.content, ("input_text",)))
    elif item.role == "assistant":
        conversation.add_answer(_text("content", item.content, ("output_text", "input_text")))
    else:
        raise InvalidFieldError("role", f"is {item.role[:64]!r}", "user, assistant, system or developer")


def _reasoning(item: ReasoningItem) -> str:
    """The text of a reasoning item: its content, else its summary."""
    if item.content:
        return _text("content", item.content, ("reasoning_text",))
    if item.encrypted_content:
        problem = "is of another service, and `content` is empty"
        raise InvalidFieldError("encrypted_content", problem, "leave the item out")
    return _text("summary", item.summary or [], ("summary_text",))


def _text(path: str, content: str | list[msgspec.Raw], kinds: Sequence[str]) -> str:
    """The text of a content, whose parts are joined without anything between them."""
    if isinstance(content, str):
        return content
    texts = []
    for j, part in enumerate(content):
        with at_path(f"{path}[{j}]"):
            if (kind := type_of(part)) not in kinds:
                raise unserved_type(kind, " or ".join(kinds))
            texts.append(decode_part(part, InputTextPart).text)
    return "".join(texts)


def _tools(given: Sequence[msgspec.Raw]) -> tuple[list[dict[str, Any]], dict[str, tuple[str, str]]]:
    """The tools, and by the full name of each tool in a namespace: the namespace and the tool's own name."""
    tools: list[dict[str, Any]] = []
    namespaces: dict[str, tuple[str, str]] = {}
    for i, tool in enumerate(given):
        with at_path(f"tools[{i}]"):
            kind = type_of(tool)
            if kind == "function":
                tools.append(_function(tool, None))
            elif kind == "namespace":
                space = decode_part(tool, NamespaceToolBody)
                for j, inner in enumerate(space.tools):
                    with at_path(f"tools[{j}]"):
                        if (kind := type_of(inner)) != "function":
                            raise unserved_type(kind, "function")
                        made = _function(inner, space.name)
                    tools.append(made)
                    namespaces[made["name"]] = (space.name, made["name"].removeprefix(f"{space.name}."))
            else:
                raise unserved_type(kind, "function or namespace")
    return tools, namespaces


def _function(tool: msgspec.Raw, namespace: str | None) -> dict[str, Any]:
    made = decode_part(tool, FunctionToolBody)
    return {
        "name": _full_name(namespace, made.name),
        "description": made.description,
        "parameters_json": object_text("parameters", made.parameters) if is_given(made.parameters) else None,
        "strict": made.strict,
    }


def _full_name(namespace: str | None, name: str) -> str:
    """The name by which the model calls a tool."""
    return f"{namespace}.{name}" if namespace else name


def _tool_choice(choice: str | NamedToolBody | None) -> dict[str, Any] | None:
    if isinstance(choice, NamedToolBody) and choice.type == "function" and choice.name is not None:
        return {"name": choice.name}
    if choice is None or choice in ("auto", "none", "required"):
        return None if choice is None else {"mode": choice}
    shown = choice if isinstance(choice, str) else choice.type
    valid = "auto, none, required, or an object of type function with a name"
    raise InvalidFieldError("tool_choice", f"is {shown[:64]!r}, which is not served", valid)


def _constraint(text: TextBody | None) -> dict[str, Any] | None:
    if text is None:
        return None
    if text.verbosity not in (None, "medium"):
        raise UnservedFieldError("text.verbosity")
    if not is_given(text.format):
        return None
    with at_path("text.format"):
        kind = type_of(text.format)
        if kind == "json_schema":
            return {"json_schema": object_text("schema", decode_part(text.format, SchemaFormatBody).schema)}
        if kind not in ("text", "json_object"):
            raise unserved_type(kind, "text, json_object or json_schema")
        return {"json_object": True} if kind == "json_object" else None


def _repeated(body: ResponsesBody, created: int) -> dict[str, Any]:
    """Fields of a response that its request determines."""
    has_form = body.text is not None and is_given(body.text.format)
    return {
        "object": "response",
        "created_at": created,
        "model": body.model,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": body.temperature,
        "text": {"format": body.text.format if body.text and has_form else {"type": "text"}, "verbosity": "medium"},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
