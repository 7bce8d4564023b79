"""Answers of `/v1/responses`: events of the client library as OpenAI's ladder of events, or as one response. Pure.

Invariants: each output item is added, filled and done before the next one is added; `sequence_number` counts the
events of a stream from 0; ids are functions of the request's id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fissile.client import Delta, Event, Result
from fissile.client.progress import Progress
from fissile.v1 import inference_pb2 as pb

from facade.http.errors import HttpError
from facade.http.parts import fissile_facts
from facade.http.sse import named_frame

# Kind of an item -> beginning of its id, and type of its content part.
_ID: Final = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
_PART: Final = {"reasoning": "reasoning_text", "message": "output_text"}


@dataclass(slots=True)
class OutputItem:
    """An item of a response, as far as it was generated.

    Attributes:
        kind: `reasoning`, `message` or `function_call`.
        index: place in the output.
        id: of the item.
        call_id: of a call.
        name: of the called tool.
        namespace: of the called tool; "" for none.
        texts: its text, or a call's arguments, in parts.
    """

    kind: str
    index: int
    id: str
    call_id: str = ""
    name: str = ""
    namespace: str = ""
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)

    @property
    def part(self) -> dict[str, Any]:
        """Its content part; of reasoning or a message."""
        more: dict[str, Any] = {"annotations": [], "logprobs": []} if self.kind == "message" else {}
        return {"type": _PART[self.kind], "text": self.text, **more}

    def shown(self, status: str, *, has_content: bool = True) -> dict[str, Any]:
        """The item as JSON; without its text while it begins."""
        content = [self.part] if has_content and self.kind != "function_call" else []
        made: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "reasoning":
            return {**made, "summary": [], "content": content, "encrypted_content": None}
        if self.kind == "message":
            return {**made, "role": "assistant", "content": content}
        arguments = self.text if has_content else ""
        named = {"name": self.name, **({"namespace": self.namespace} if self.namespace else {})}
        return {**made, "call_id": self.call_id, **named, "arguments": arguments}


class ResponseEncoder:
    """Writes the answer to one request.

    Args:
        repeated: fields of the response that the request determines.
        namespaces: by the full name of a tool, its namespace and its own name.
    """

    def __init__(self, repeated: Mapping[str, Any], namespaces: Mapping[str, tuple[str, str]]) -> None:
        self._repeated = repeated
        self._namespaces = namespaces
        self._request_id = ""
        self._items: list[OutputItem] = []
        self._open: OutputItem | None = None
        self._finish: pb.Finish | None = None
        self._num_events = 0

    def idle(self, progress: Progress) -> bytes:
        """Frames of a stream with nothing to send. Codex ends a stream without events; comments are none for it."""
        return self.begin(0, progress) or self._frame("keepalive")

    def begin(self, _number: int, progress: Progress) -> bytes:
        """Frames that start the response, unless `idle` has started it."""
        if self._num_events:
            return b""
        self._request_id = progress.request_id
        response = self._response("in_progress")
        created = self._frame("response.created", response=response)
        return created + self._frame("response.in_progress", response=response)

    def event(self, _number: int, event: Event) -> bytes:
        """Frames for an event of the only answer."""
        if not isinstance(event, Delta):
            self._finish = event.finish
            return b""
        frames = []
        if event.reasoning:
            frames.append(self._add_text("reasoning", event.reasoning))
        if event.text:
            frames.append(self._add_text("message", event.text))
        frames += [self._add_call(part) for part in event.tool_calls]
        return b"".join(frames)

    def end(self) -> bytes:
        """Frames that end the response."""
        frames = b"" if self._items else self._begin_item("message")
        status = self._status
        return frames + self._end_item(status) + self._frame(f"response.{status}", response=self._response(status))

    def failure(self, error: HttpError) -> bytes:
        """The frame that ends a response which has failed; items that are not done stay incomplete."""
        response = {**self._response("failed"), "error": {"code": _code(error), "message": error.message}}
        return self._frame("response.failed", response=response)

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        """The response to a request that is not a stream."""
        result = results[0]
        self._request_id = result.request_id
        parts = [
            pb.ToolCallDelta(index=i, id=call.id, name=call.name, arguments_json=call.arguments_json)
            for i, call in enumerate(result.tool_calls)
        ]
        self.event(0, Delta(0, result.text, reasoning=result.reasoning, tool_calls=tuple(parts)))
        self._finish = result.finish
        self.end()
        return self._response(self._status)

    @property
    def _status(self) -> str:
        """Status of a response that has ended."""
        has_all = self._finish is None or self._finish.reason != pb.FINISH_REASON_LENGTH
        return "completed" if has_all else "incomplete"

    def _add_text(self, kind: str, text: str) -> bytes:
        frames = self._begin_item(kind) if self._open is None or self._open.kind != kind else b""
        assert self._open is not None
        self._open.texts.append(text)
        return frames + self._text_frame("delta", delta=text)

    def _add_call(self, part: pb.ToolCallDelta) -> bytes:
        frames = self._begin_item("function_call", part.id, part.name) if part.name else b""
        if not part.arguments_json or self._open is None:
            return frames
        self._open.texts.append(part.arguments_json)
        return frames + self._item_frame("response.function_call_arguments.delta", {"delta": part.arguments_json})

    def _begin_item(self, kind: str, call_id: str = "", name: str = "") -> bytes:
        frames = self._end_item("completed")
        index = len(self._items)
        space, own = self._namespaces.get(name, ("", name))
        item = self._open = OutputItem(kind, index, f"{_ID[kind]}_{self._request_id}_{index}", call_id, own, space)
        self._items.append(item)
        shown = item.shown("in_progress", has_content=False)
        frames += self._frame("response.output_item.added", output_index=index, item=shown)
        if kind == "function_call":
            return frames
        return frames + self._item_frame("response.content_part.added", {"content_index": 0, "part": item.part})

    def _end_item(self, status: str) -> bytes:
        item = self._open
        if item is None:
            return b""
        if item.kind == "function_call":
            done = {"name": item.name, "arguments": item.text}
            frames = self._item_frame("response.function_call_arguments.done", done)
        else:
            frames = self._text_frame("done", text=item.text)
            frames += self._item_frame("response.content_part.done", {"content_index": 0, "part": item.part})
        self._open = None
        return frames + self._frame("response.output_item.done", output_index=item.index, item=item.shown(status))

    def _text_frame(self, step: str, **fields: Any) -> bytes:
        """An event of the open item's only content part, which holds text."""
        assert self._open is not None
        logprobs: dict[str, Any] = {"logprobs": []} if self._open.kind == "message" else {}
        return self._item_frame(f"response.{_PART[self._open.kind]}.{step}", {"content_index": 0, **fields, **logprobs})

    def _item_frame(self, name: str, fields: Mapping[str, Any]) -> bytes:
        """An event of the open item."""
        assert self._open is not None
        return self._frame(name, item_id=self._open.id, output_index=self._open.index, **fields)

    def _frame(self, kind: str, /, **fields: Any) -> bytes:
        number = self._num_events
        self._num_events += 1
        return named_frame(kind, {"type": kind, "sequence_number": number, **fields})

    def _response(self, status: str) -> dict[str, Any]:
        is_cut = status == "incomplete"
        last = self._items[-1] if self._items else None
        return {
            "id": f"resp_{self._request_id}",
            **self._repeated,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [
                item.shown(status if item is last and status != "failed" else "completed")
                for item in self._items
                if item is not self._open
            ],
            "usage": None if self._finish is None else _usage(self._finish.usage),
            **({} if self._finish is None else {"fissile": fissile_facts(self._finish)}),
        }


def _usage(usage: pb.Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _code(error: HttpError) -> str:
    """The code of a failed response; clients know these only."""
    if error.status == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if error.status < 429 else "server_error"
