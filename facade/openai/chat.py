"""`POST /v1/chat/completions`: the body to a call of Chat, and its events to chunks or to a whole completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from fissile.client import Delta, Event, Finished, Result
from fissile.client.progress import Progress
from fissile.v1 import inference_pb2 as pb

from common.errors import InvalidFieldError, UnservedFieldError
from facade.http.bodies import Body, UInt32, decode
from facade.http.conversation import with_tools
from facade.http.errors import HttpError
from facade.http.parts import ABSENT, fissile_facts, is_given
from facade.http.runner import AnswerPlan
from facade.http.sse import data_frame
from facade.openai.logprobs import LogprobForm
from facade.openai.sampling import (
    DONE,
    NAMES,
    AnswerBody,
    UsageSum,
    call_arguments,
    effort_arguments,
    error_body,
    finish_reason,
    json_text,
    sampling_params,
    stop_reason,
)

_NAMES: Final = {
    **NAMES,
    "output_options.logprobs": "top_logprobs",
    "messages": "messages*",
    "messages.parts": "messages.content",
    "messages.tool_calls.name": "messages*.tool_calls*.function.name",
    "messages.tool_calls.arguments_json": "messages*.tool_calls*.function.arguments",
    "tools.name": "tools*.function.name",
    "tools.parameters_json": "tools*.function.parameters",
    "tools": "tools*",
    "tool_choice": "tool_choice",
    "template_arguments_json": "chat_template_kwargs",
}
# Templates know `system`; OpenAI's newer name means the same.
_ROLES: Final = {"developer": "system"}


class TextPart(Body):
    """A part of a message's content; only text is served."""

    type: str
    text: str = ""


class FunctionCall(Body):
    """The function that a call names, and its arguments as JSON text."""

    name: str
    arguments: str = ""


class MessageCall(Body):
    """A tool call in a message of the assistant."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"
    index: int | None = None


class Message(Body):
    """A message of the conversation, also one of an earlier answer as clients send it back."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    # Empty in messages that clients send back.
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None


class Function(Body):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: msgspec.Raw = ABSENT
    strict: bool | None = None


class ToolField(Body):
    """A tool; only functions are served."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The tool that has to be called."""

    function: NamedFunction
    type: Literal["function"] = "function"


class ChatBody(AnswerBody, kw_only=True):
    """The fields of a chat completion that are served."""

    messages: list[Message]
    max_completion_tokens: UInt32 | None = None
    logprobs: bool | None = None
    top_logprobs: UInt32 | None = None
    tools: list[ToolField] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: msgspec.Raw = ABSENT
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: Literal[True] | None = None
    modalities: list[Literal["text"]] | None = None


def parse(body: bytes, created: int) -> AnswerPlan:
    """The calls for a body.

    Args:
        body: JSON.
        created: Unix seconds.

    Raises:
        ApiError: a field is invalid, or not served.
    """
    given = decode(body, ChatBody)
    if given.top_logprobs is not None and not given.logprobs:
        raise InvalidFieldError("top_logprobs", "is set without logprobs", "logprobs: true beside it")
    output = pb.OutputOptions()
    if given.logprobs:
        output.logprobs, output.token_bytes = given.top_logprobs or 0, True
    limit = given.max_tokens if given.max_completion_tokens is None else given.max_completion_tokens
    arguments = {
        **call_arguments(given, output),
        "sampling_params": sampling_params(given, limit),
        "tools": [chat_tool(each) for each in given.tools or ()],
        "template_arguments_json": _template_arguments(given),
        "reasoning": None if given.include_reasoning is not False else {"separate": False},
    }
    with_tools(arguments, _tool_choice(given.tool_choice), is_parallel=given.parallel_tool_calls is not False)
    arguments = {name: value for name, value in arguments.items() if value is not None}
    messages = [chat_message(i, message) for i, message in enumerate(given.messages)]
    encoder = ChatEncoder(given, created)
    return AnswerPlan([messages], True, arguments, encoder, bool(given.stream), _NAMES)


def _template_arguments(given: ChatBody) -> str | dict[str, Any] | None:
    if not is_given(given.chat_template_kwargs):
        return effort_arguments("reasoning_effort", given.reasoning_effort)
    if given.reasoning_effort is not None:
        problem = "is set beside chat_template_kwargs"
        raise InvalidFieldError("reasoning_effort", problem, "chat_template_kwargs alone, with reasoning_effort in it")
    return json_text(given.chat_template_kwargs)


def _text_of(raw: msgspec.Raw) -> str | None:
    return json_text(raw) if is_given(raw) else None


def chat_message(place: int, given: Message) -> pb.ChatMessage:
    """A message of fissile.v1; `place` is its index.

    Raises:
        ApiError: it has content other than text.
    """
    for name in ("refusal", "annotations", "audio", "function_call"):
        if getattr(given, name):
            raise UnservedFieldError(f"messages[{place}].{name}")
    made = pb.ChatMessage(role=_ROLES.get(given.role, given.role), name=given.name or "")
    if isinstance(given.content, list):
        made.parts.extend(_part(f"messages[{place}].content[{i}]", part) for i, part in enumerate(given.content))
    else:
        made.content = given.content or ""
    made.reasoning = given.reasoning_content or given.reasoning or ""
    made.tool_call_id = given.tool_call_id or ""
    for call in given.tool_calls or ():
        made.tool_calls.add(id=call.id, name=call.function.name, arguments_json=call.function.arguments)
    return made


def _part(path: str, part: TextPart) -> pb.ContentPart:
    if part.type != "text":
        raise InvalidFieldError(f"{path}.type", f"is {part.type[:64]!r}", "'text': no other content is served")
    return pb.ContentPart(text=part.text)


def chat_tool(given: ToolField) -> pb.Tool:
    """A tool of fissile.v1."""
    function = given.function
    made = pb.Tool(name=function.name, description=function.description or "")
    if is_given(function.parameters):
        made.parameters_json = json_text(function.parameters)
    if function.strict is not None:
        made.strict = function.strict
    return made


def _tool_choice(given: str | NamedTool | None) -> dict[str, Any] | None:
    if given is None:
        return None
    if isinstance(given, NamedTool):
        return {"name": given.function.name}
    if given not in ("auto", "none", "required"):
        valid = "'auto', 'none', 'required', or an object that names a function"
        raise InvalidFieldError("tool_choice", f"is {given[:64]!r}", valid)
    return {"mode": given}


class ChatEncoder:
    """Makes the chunks of a chat completion, or the whole one.

    Args:
        body: the request.
        created: Unix seconds.
    """

    def __init__(self, body: ChatBody, created: int) -> None:
        self._created = created
        self._model = body.model
        self._has_usage = body.has_usage
        self._choices_of = body.choices_of
        self._has_logprobs = bool(body.logprobs)
        self._has_prompt_logprobs = body.prompt_logprobs is not None
        self._form = LogprobForm(as_ids=bool(body.return_tokens_as_token_ids))
        self._has_token_ids = bool(body.return_token_ids)
        self._usage = UsageSum()
        self._head: dict[str, Any] = {}
        # Facts about the prompt for the first chunk.
        self._of_prompt: dict[str, Any] = {}
        self._with_role: set[int] = set()

    def begin(self, number: int, progress: Progress) -> bytes:
        """Takes id and fingerprint; the first chunk of each choice has the role."""
        self._head = self._facts(progress.request_id, progress.prompt_info, "chat.completion.chunk")
        self._of_prompt = self._prompt(progress.prompt_info, progress.prompt_logprobs)
        return b""

    def event(self, number: int, event: Event) -> bytes:
        """The chunk of an event."""
        delta = self._delta(event) if isinstance(event, Delta) else {}
        choice: dict[str, Any] = {"index": event.index, "delta": delta, "logprobs": None, "finish_reason": None}
        if event.index not in self._with_role:
            self._with_role.add(event.index)
            choice["delta"] = {"role": "assistant", "content": "", **delta}
        if isinstance(event, Finished):
            self._usage.add(number, event.finish.usage)
            choice["finish_reason"] = finish_reason(event.finish)
            choice["stop_reason"] = stop_reason(event.finish)
            choice["fissile"] = fissile_facts(event.finish)
        else:
            if self._has_logprobs:
                choice["logprobs"] = self._form.chat(event.logprobs)
            if self._has_token_ids:
                choice["token_ids"] = event.token_ids
        chunk, self._of_prompt = {**self._chunk([choice]), **self._of_prompt}, {}
        return data_frame(chunk)

    def end(self) -> bytes:
        """The chunk of usage, if the request asks for it, and the end mark."""
        if not self._has_usage:
            return DONE
        return data_frame({**self._chunk([]), "usage": self._usage.fields}) + DONE

    def failure(self, error: HttpError) -> bytes:
        """The event that OpenAI's clients raise as an error."""
        return data_frame(error_body(error))

    def whole(self, results: Sequence[Result]) -> Mapping[str, Any]:
        """The completion."""
        result = results[0]
        choices = []
        for answer in result.answers:
            assert answer.finish is not None
            self._usage.add(0, answer.finish.usage)
        for index, answer in enumerate(self._choices_of(result.answers)):
            assert answer.finish is not None
            message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
            if answer.reasoning:
                message["reasoning_content"] = answer.reasoning
            if answer.tool_calls:
                message |= {"content": answer.text or None, "tool_calls": [_call(call) for call in answer.tool_calls]}
            choice = {
                "index": index,
                "message": message,
                "logprobs": self._form.chat(answer.logprobs) if self._has_logprobs else None,
                "finish_reason": finish_reason(answer.finish),
                "stop_reason": stop_reason(answer.finish),
                "fissile": fissile_facts(answer.finish),
            }
            if self._has_token_ids:
                choice["token_ids"] = answer.token_ids
            choices.append(choice)
        head = self._facts(result.request_id, result.prompt_info, "chat.completion")
        prompt = self._prompt(result.prompt_info, result.prompt_logprobs)
        return {**head, "choices": choices, "usage": self._usage.fields, **prompt}

    def _prompt(self, info: pb.PromptInfo | None, logprobs: Sequence[pb.TokenLogprobs]) -> dict[str, Any]:
        """Facts about the prompt that the request asks for."""
        facts: dict[str, Any] = {}
        if self._has_token_ids and info is not None:
            facts["prompt_token_ids"] = [*info.token_ids]
        if self._has_prompt_logprobs:
            facts["prompt_logprobs"] = self._form.of_prompt(logprobs)
        return facts

    def _facts(self, request_id: str, info: pb.PromptInfo | None, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{request_id}",
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": (info.numerics if info is not None else "") or None,
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "choices": choices}
        return {**chunk, "usage": None} if self._has_usage else chunk

    def _delta(self, event: Delta) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if event.text:
            delta["content"] = event.text
        if event.reasoning:
            delta["reasoning_content"] = event.reasoning
        if event.tool_calls:
            delta["tool_calls"] = [_call_delta(call) for call in event.tool_calls]
        return delta


def _call(call: pb.ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}


def _call_delta(call: pb.ToolCallDelta) -> dict[str, Any]:
    """A part of a call: id, type and name in its first part only."""
    if call.name:
        first = pb.ToolCall(id=call.id, name=call.name, arguments_json=call.arguments_json)
        return {"index": call.index, **_call(first)}
    return {"index": call.index, "function": {"arguments": call.arguments_json}}
