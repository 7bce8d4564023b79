"""Requests from the arguments that people have, and the events and answers that they get."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from google.protobuf.message import Message

from fissile.client.messages import Response
from fissile.client.progress import Answer, Progress, calls_of, reasoning_of, text_of
from fissile.client.receipts import Receipt
from fissile.v1 import inference_pb2 as pb

Messages: TypeAlias = "str | Sequence[Mapping[str, Any] | pb.ChatMessage]"
Prompt: TypeAlias = "str | Sequence[int]"
_AnyRequest = TypeVar("_AnyRequest", pb.ChatRequest, pb.GenerateRequest)
_AnyMessage = TypeVar("_AnyMessage", bound=Message)


@dataclass(frozen=True, slots=True)
class Delta:
    """The next part of an answer: its text and, where they are asked for, its token ids and their logprobs.

    Of Chat `text` is content, and `reasoning` comes apart from it, as do the next parts of calls of tools: of each the
    first has `id` and `name`, and all have `index` and more of `arguments_json`.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[pb.TokenLogprobs, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[pb.ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer."""

    index: int
    finish: pb.Finish


Event: TypeAlias = Delta | Finished


@dataclass(frozen=True, slots=True)
class Result:
    """All answers to a request.

    Attributes:
        request_id: the id of the request; with it, or with `seed`, the same request gives the same answers.
        prompt_info: facts about the prompt.
        answers: by index.
        prompt_logprobs: of the prompt's tokens, where they were asked for.
    """

    request_id: str
    prompt_info: pb.PromptInfo
    answers: Sequence[Answer]
    prompt_logprobs: Sequence[pb.TokenLogprobs] = ()

    @property
    def text(self) -> str:
        """Text of the first answer; of Chat the content."""
        return self.answers[0].text

    @property
    def reasoning(self) -> str:
        """Reasoning of the first answer."""
        return self.answers[0].reasoning

    @property
    def tool_calls(self) -> list[pb.ToolCall]:
        """Calls of tools of the first answer."""
        return self.answers[0].tool_calls

    @property
    def message(self) -> pb.ChatMessage:
        """The first answer of Chat as a message, to be sent back in the conversation."""
        return self.answers[0].message

    @property
    def receipt(self) -> Receipt | None:
        """Receipt of the first answer, checked; None where none was asked for, and of an answer that is not `exact`."""
        return self.answers[0].receipt

    @property
    def finish(self) -> pb.Finish:
        """End of the first answer."""
        finish = self.answers[0].finish
        assert finish is not None
        return finish


def chat_request(messages: Messages, sampling: Mapping[str, Any], fields: Mapping[str, Any]) -> pb.ChatRequest:
    """The request for a conversation; a text alone is a message of the user.

    Args:
        messages: the conversation.
        sampling: fields of SamplingParams.
        fields: further fields of the request.

    Raises:
        ValueError: a field that there is not, or a value of another type.
    """
    given = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    request = pb.ChatRequest(messages=[_message(i, message) for i, message in enumerate(given)])
    return _with_fields(request, sampling, fields)


def generate_request(prompt: Prompt, sampling: Mapping[str, Any], fields: Mapping[str, Any]) -> pb.GenerateRequest:
    """The request for a prompt, a text or token ids; arguments and errors as of `chat_request`."""
    request = pb.GenerateRequest()
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    return _with_fields(request, sampling, fields)


def tool(name: str, description: str = "", parameters: Mapping[str, Any] | str = "") -> pb.Tool:
    """A tool that a model may call.

    Args:
        name: of the tool.
        description: for the model to read.
        parameters: JSON Schema of its arguments, as text or as Python values; their order is kept.
    """
    schema = parameters if isinstance(parameters, str) else json.dumps(parameters, ensure_ascii=False)
    return pb.Tool(name=name, description=description, parameters_json=schema)


def embed_request(inputs: Sequence[Prompt], fields: Mapping[str, Any]) -> pb.EmbedRequest:
    """The request for vectors of texts or token ids; `fields` and errors as of `chat_request`."""
    if isinstance(inputs, str):
        raise ValueError(f"inputs is a list: give [{inputs!r}] for one")
    return _filled(pb.EmbedRequest(inputs=map(_text_or_tokens, inputs)), fields)


def rerank_request(query: str, documents: Sequence[str], fields: Mapping[str, Any]) -> pb.RerankRequest:
    """The request for the order of documents; `fields` and errors as of `chat_request`."""
    return _filled(pb.RerankRequest(), {"query": query, "documents": documents, **fields})


def score_request(
    continuations: Sequence[Prompt], context: Prompt | None, fields: Mapping[str, Any]
) -> pb.ScoreRequest:
    """The request for logprobs of texts or token ids; `fields` and errors as of `chat_request`."""
    if isinstance(continuations, str):
        raise ValueError(f"continuations is a list: give [{continuations!r}] for one")
    behind = None if context is None else _text_or_tokens(context)
    return _filled(pb.ScoreRequest(context=behind, continuations=map(_text_or_tokens, continuations)), fields)


def _text_or_tokens(given: Prompt) -> pb.TextOrTokens:
    return pb.TextOrTokens(text=given) if isinstance(given, str) else pb.TextOrTokens(token_ids=pb.TokenIds(ids=given))


def _message(place: int, message: Mapping[str, Any] | pb.ChatMessage) -> pb.ChatMessage:
    if isinstance(message, pb.ChatMessage):
        return message
    if not isinstance(message, Mapping):
        raise ValueError(f"messages[{place}] is {message!r}: give a mapping with role and content, or a ChatMessage")
    return _filled(pb.ChatMessage(), message, f"messages[{place}].")


def _with_fields(request: _AnyRequest, sampling: Mapping[str, Any], fields: Mapping[str, Any]) -> _AnyRequest:
    """Fills a request in; SamplingParams is there also where nothing of it is given.

    Raises:
        ValueError: a field that is not for arguments, or as of `_filled`.
    """
    # What has come is known by its digest alone: the stream could not go on behind it by itself.
    if "resume" in fields:
        raise ValueError(
            "resume is not an argument: streams go on by themselves; the stubs resume what another program began"
        )
    request.sampling_params.SetInParent()
    _filled(request.sampling_params, _with_constraint(sampling))
    return _filled(request, fields)


def _with_constraint(sampling: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fields with a constraint as the message has it: choices may be given as a list, a schema as a mapping."""
    constraint = sampling.get("constraint")
    if not isinstance(constraint, Mapping):
        return sampling
    made = dict(constraint)
    if isinstance(made.get("json_schema"), Mapping):
        made["json_schema"] = json.dumps(made["json_schema"], ensure_ascii=False)
    if isinstance(made.get("choices"), list | tuple):
        made["choices"] = {"texts": made["choices"]}
    return {**sampling, "constraint": made}


def _filled(message: _AnyMessage, fields: Mapping[str, Any], path: str = "") -> _AnyMessage:
    """Sets fields one by one, so that an error says of which it is.

    Raises:
        ValueError: a field that there is not, or a value of another type.
    """
    for name, value in fields.items():
        # A text is a sequence of texts too, and would become a list of its characters.
        if isinstance(value, str) and hasattr(getattr(message, name, None), "extend"):
            raise ValueError(f"{path}{name} is a list: give [{value!r}] for one")
        try:
            message.MergeFrom(type(message)(**{name: value}))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}{name}={reprlib.repr(value)}: {error}") from None
    return message


def split(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments by name as fields of SamplingParams and fields of the request."""
    known = pb.SamplingParams.DESCRIPTOR.fields_by_name
    sampling = {name: value for name, value in arguments.items() if name in known}
    return sampling, {name: value for name, value in arguments.items() if name not in known}


def events_of(part: Response) -> list[Event]:
    """The events that a message brings."""
    delta = Delta(
        part.index,
        text_of(part),
        tuple(part.token_ids),
        tuple(part.logprobs),
        reasoning_of(part),
        tuple(calls_of(part)),
    )
    has_news = delta.text or delta.token_ids or delta.logprobs or delta.reasoning or delta.tool_calls
    events: list[Event] = [delta] if has_news else []
    return [*events, Finished(part.index, part.finish)] if part.HasField("finish") else events


def result_of(progress: Progress) -> Result:
    """The answers of a stream that has ended with OK."""
    assert progress.prompt_info is not None
    return Result(progress.request_id, progress.prompt_info, [*progress.answers.values()], progress.prompt_logprobs)
