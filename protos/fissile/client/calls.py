"""Requests from the arguments that people have, and the events and answers that they get."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from fissile.client.arguments import Messages, Prompt
from fissile.client.fields import fill, items
from fissile.client.messages import Response
from fissile.client.progress import Answer, Progress, calls_of, finish_name, reasoning_of, text_of
from fissile.client.receipts import Receipt
from fissile.v1 import inference_pb2 as pb

_AnyRequest = TypeVar("_AnyRequest", pb.ChatRequest, pb.GenerateRequest)
# Name of an argument -> the request's message that has this field. `receipt` is an argument of the call instead.
_SPREAD: Mapping[str, str] = {
    field.name: name
    for name, message in (("sampling_params", pb.SamplingParams), ("output_options", pb.OutputOptions))
    for field in message.DESCRIPTOR.fields
    if field.name != "receipt"
}


@dataclass(frozen=True, slots=True, repr=False)
class Delta:
    """The next part of an answer: its text and, if requested, its token ids and their logprobs.

    For Chat, `text` is content; `reasoning` is separate, and so are the next parts of tool calls: the first part of a
    call has `id` and `name`, and every part has `index` and more of `arguments_json`.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[pb.TokenLogprobs, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[pb.ToolCallDelta, ...] = ()

    def __repr__(self) -> str:
        """Shows the parts that are not empty, in one line."""
        shown = [str(self.index), repr(self.text)]
        if self.reasoning:
            shown.append(f"reasoning={self.reasoning!r}")
        if self.tool_calls:
            shown.append(f"tool_calls={[call.name or call.arguments_json for call in self.tool_calls]}")
        if self.token_ids:
            shown.append(f"token_ids={self.token_ids}")
        if self.logprobs:
            shown.append(f"logprobs={[round(each.logprob, 4) for each in self.logprobs]}")
        return f"Delta({', '.join(shown)})"


@dataclass(frozen=True, slots=True, repr=False)
class Finished:
    """The end of an answer."""

    index: int
    finish: pb.Finish

    def __repr__(self) -> str:
        """Shows the finish reason and the number of tokens."""
        return f"Finished({self.index}, {finish_name(self.finish)}, {self.finish.usage.completion_tokens} tokens)"


Event: TypeAlias = Delta | Finished


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """All answers to a request.

    Examples:
        ```python
        with Client("10.0.0.1:50051") as client:
            result = client.chat("Tell me a story.", n=2, max_tokens=32)
            for answer in result.answers:
                print(answer.text, answer.finish.usage.completion_tokens)
        ```

    Attributes:
        request_id: the id of the request; with it, or with `seed`, the same request gives the same answers.
        prompt_info: facts about the prompt.
        answers: by index.
        prompt_logprobs: of the prompt's tokens, if requested.
    """

    request_id: str
    prompt_info: pb.PromptInfo
    answers: Sequence[Answer]
    prompt_logprobs: Sequence[pb.TokenLogprobs] = ()

    def __repr__(self) -> str:
        """Shows the answers, with shortened texts."""
        return f"Result({', '.join(map(repr, self.answers))}, request_id={self.request_id!r})"

    def _repr_html_(self) -> str:
        """Shows the whole answers in a notebook."""
        texts = [html.escape(answer.text or repr(answer)) for answer in self.answers]
        return "".join(f'<pre style="white-space: pre-wrap">{text}</pre>' for text in texts)

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
        """Checked receipt of the first answer; None if none was requested, and for an answer that is not `exact`."""
        return self.answers[0].receipt

    @property
    def finish(self) -> pb.Finish:
        """End of the first answer."""
        finish = self.answers[0].finish
        assert finish is not None
        return finish


def chat_request(messages: Messages, arguments: Mapping[str, Any]) -> pb.ChatRequest:
    """The request for a conversation; a text alone is a message of the user.

    Args:
        messages: the conversation.
        arguments: `ChatArguments` without `CallArguments`.

    Raises:
        ValueError: an argument is unknown, or its value does not fit.
    """
    given = (
        [{"role": "user", "content": messages}]
        if isinstance(messages, str)
        else items(messages, "messages", "a text, or a list of messages")
    )
    request = pb.ChatRequest(messages=[_message(i, message) for i, message in enumerate(given)])
    return _with_arguments(request, arguments, ("messages",))


def generate_request(prompt: Prompt, arguments: Mapping[str, Any]) -> pb.GenerateRequest:
    """The request for a prompt, a text or token ids; arguments and errors as for `chat_request`."""
    request = fill(pb.GenerateRequest(), _text_or_tokens(prompt, "prompt"))
    return _with_arguments(request, arguments, ("text", "token_ids"))


def tool(name: str, description: str = "", parameters: Mapping[str, Any] | str = "") -> pb.Tool:
    """A tool that a model may call.

    Examples:
        ```python
        weather = tool("weather", "Weather of a city.", {"type": "object", "properties": {"city": {"type": "string"}}})
        with Client("10.0.0.1:50051") as client:
            for call in client.chat("Is it raining in Rome?", tools=[weather], max_tokens=64).tool_calls:
                print(call.name, call.arguments_json)
        ```

    Args:
        name: of the tool.
        description: for the model to read.
        parameters: JSON Schema of its arguments, as text or as a mapping; its order is kept.

    Raises:
        ValueError: an argument has another type.
    """
    return fill(pb.Tool(), {"name": name, "description": description, "parameters_json": parameters})


def embed_request(inputs: Sequence[Prompt], fields: Mapping[str, Any]) -> pb.EmbedRequest:
    """The request for vectors of texts or token ids; `fields` and errors as for `chat_request`."""
    return fill(pb.EmbedRequest(), {"inputs": _texts_or_tokens(inputs, "inputs"), **fields})


def rerank_request(query: str, documents: Sequence[str], fields: Mapping[str, Any]) -> pb.RerankRequest:
    """The request for the order of documents; `fields` and errors as for `chat_request`."""
    return fill(pb.RerankRequest(), {"query": query, "documents": documents, **fields})


def score_request(
    continuations: Sequence[Prompt], context: Prompt | None, fields: Mapping[str, Any]
) -> pb.ScoreRequest:
    """The request for logprobs of texts or token ids; `fields` and errors as for `chat_request`."""
    behind = None if context is None else _text_or_tokens(context, "context")
    given = {"context": behind, "continuations": _texts_or_tokens(continuations, "continuations")}
    return fill(pb.ScoreRequest(), {**given, **fields})


def _texts_or_tokens(given: Sequence[Prompt], path: str) -> list[dict[str, Any]]:
    return [_text_or_tokens(each, f"{path}[{i}]") for i, each in enumerate(items(given, path))]


def _text_or_tokens(given: Prompt, path: str) -> dict[str, Any]:
    if isinstance(given, str):
        return {"text": given}
    ids = items(given, path, "a text, or a list of token ids")
    if any(isinstance(each, str) for each in ids):
        raise ValueError(f"{path} is a list of texts; give one text, or a list of token ids")
    return {"token_ids": {"ids": ids}}


def _message(place: int, message: Mapping[str, Any] | pb.ChatMessage) -> pb.ChatMessage:
    if isinstance(message, pb.ChatMessage):
        return message
    path = f"messages[{place}]"
    if not isinstance(message, Mapping):
        raise ValueError(f"{path} is {message!r}: give a mapping with role and content, or a ChatMessage")
    given, content = dict(message), message.get("content")
    if isinstance(content, list | tuple):
        if given.pop("parts", None) is not None:
            raise ValueError(f"{path}.content and {path}.parts are both given; give one of them")
        del given["content"]
        given["parts"] = [_part(f"{path}.content[{i}]", part) for i, part in enumerate(content)]
    return fill(pb.ChatMessage(), given, f"{path}.")


def _part(path: str, part: Any) -> Any:
    """Converts a part of a message's content; accepts `{"type": "text", "text": ...}` of other services too."""
    if isinstance(part, str):
        return {"text": part}
    if not isinstance(part, Mapping) or "type" not in part:
        return part
    if part["type"] != "text":
        raise ValueError(f"{path}.type is {part['type']!r}; parts of type 'text' alone can be sent")
    return {name: value for name, value in part.items() if name != "type"}


def _with_arguments(request: _AnyRequest, arguments: Mapping[str, Any], own: Sequence[str]) -> _AnyRequest:
    """Sets the arguments in a request; SamplingParams is present even if none of its fields is given.

    Args:
        request: the request, with its prompt.
        arguments: fields of the request, and of its messages in `_SPREAD`.
        own: fields that hold the prompt.

    Raises:
        ValueError: an argument is unknown or given twice, or its value does not fit.
    """
    # Only the digest of the earlier tokens is known here, so the stream could not continue by itself.
    if "resume" in arguments:
        raise ValueError(
            "resume is not an argument: streams go on by themselves; the stubs resume what another program began"
        )
    given = {name: value for name, value in arguments.items() if value is not None}
    if taken := next((name for name in own if name in given), None):
        raise ValueError(f"{taken} is not an argument: it is what the call is given first")
    names = [*_SPREAD, *(name for name in request.DESCRIPTOR.fields_by_name if name not in (*own, "resume"))]
    fill(request, {name: value for name, value in given.items() if name not in _SPREAD}, names=names)
    request.sampling_params.SetInParent()
    spread = [name for name in given if name in _SPREAD]
    for name in spread:
        message = getattr(request, _SPREAD[name])
        if any(field.name == name for field, _ in message.ListFields()):
            raise ValueError(f"{name} is given twice: as an argument and in {_SPREAD[name]}")
    for name in spread:
        fill(getattr(request, _SPREAD[name]), {name: given[name]})
    return request


def events_of(part: Response) -> list[Event]:
    """The events of a message."""
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
