"""Answers of `/v1/messages`: events of the client library as Anthropic's events, or as one message. Pure.

Invariants: each content block is started, filled and stopped before the next one is started; a stream ends with
`message_stop` or with `error`; ids are functions of the request's id.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from fissile.client import Delta, Event, Result
from fissile.client.progress import Progress
from fissile.v1 import inference_pb2 as pb

from facade.http.errors import HttpError
from facade.http.parts import fissile_facts
from facade.http.sse import named_frame

PING: Final = named_frame("ping", {"type": "ping"})
# HTTP status -> type of the error; others are `api_error`.
_ERROR_TYPES: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Numbers of tokens in a router's error.
_TOO_LONG: Final = re.compile(r"has (?:at least )?(\d+) tokens; valid: at most (\d+)")


class MessageEncoder:
    """Writes the answer to one request.

    Args:
        model: name that the request gives.
        max_tokens: of the request.
        shows_thinking: False sends blocks of reasoning without their text.
    """

    def __init__(self, model: str, max_tokens: int, *, shows_thinking: bool) -> None:
        self._model = model
        self._max_tokens = max_tokens
        self._shows_thinking = shows_thinking
        # Index and kind of the open block; text of an open block of reasoning, which its signature needs.
        self._num_blocks = 0
        self._kind = ""
        self._thinking: list[str] = []
        self._finish: pb.Finish | None = None

    def begin(self, _number: int, progress: Progress) -> bytes:
        """Frames that start the message."""
        info = progress.prompt_info or pb.PromptInfo()
        usage = pb.Usage(prompt_tokens=info.prompt_tokens, cached_tokens=info.cached_tokens)
        message = {**self._message(progress.request_id, usage), "content": []}
        return named_frame("message_start", {"type": "message_start", "message": message})

    def event(self, _number: int, event: Event) -> bytes:
        """Frames for an event of the only answer."""
        if not isinstance(event, Delta):
            self._finish = event.finish
            return b""
        frames = []
        if event.reasoning:
            frames.append(self._begin_block("thinking", {"thinking": "", "signature": ""}))
            self._thinking.append(event.reasoning)
            if self._shows_thinking:
                frames.append(self._delta("thinking_delta", thinking=event.reasoning))
        if event.text:
            frames.append(self._begin_block("text", {"text": "", "citations": None}))
            frames.append(self._delta("text_delta", text=event.text))
        for call in event.tool_calls:
            if call.name:
                frames.append(self._stop_block())
                frames.append(self._begin_block("tool_use", {"id": call.id, "name": call.name, "input": {}}))
            if call.arguments_json:
                frames.append(self._delta("input_json_delta", partial_json=call.arguments_json))
        return b"".join(frames)

    def end(self) -> bytes:
        """Frames that end the message."""
        finish = self._finish or pb.Finish()
        change = {"type": "message_delta", "delta": self._stop(finish), "usage": _usage(finish.usage), **_facts(finish)}
        stop = named_frame("message_stop", {"type": "message_stop"})
        return self._stop_block() + named_frame("message_delta", change) + stop

    def failure(self, error: HttpError) -> bytes:
        """The frame that ends a stream that has failed."""
        return named_frame("error", error_form(error))

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        """The message that answers a request without a stream."""
        result = results[0]
        blocks: list[dict[str, Any]] = []
        if result.reasoning:
            signature = _signature(result.reasoning)
            thinking = result.reasoning if self._shows_thinking else ""
            blocks.append({"type": "thinking", "thinking": thinking, "signature": signature})
        if result.text:
            blocks.append({"type": "text", "text": result.text, "citations": None})
        blocks += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": _input_of(call.arguments_json)}
            for call in result.tool_calls
        ]
        message = self._message(result.request_id, result.finish.usage)
        return {**message, "content": blocks, **self._stop(result.finish), **_facts(result.finish)}

    def _message(self, request_id: str, usage: pb.Usage) -> dict[str, Any]:
        return {
            "id": f"msg_{request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "usage": _usage(usage),
        }

    def _begin_block(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        """Frames that make a block of this kind the open one; nothing if it is."""
        if self._kind == kind:
            return b""
        frames = self._stop_block()
        self._kind = kind
        block = {"type": kind, **fields}
        start = {"type": "content_block_start", "index": self._num_blocks, "content_block": block}
        return frames + named_frame("content_block_start", start)

    def _delta(self, kind: str, **fields: Any) -> bytes:
        value = {"type": "content_block_delta", "index": self._num_blocks, "delta": {"type": kind, **fields}}
        return named_frame("content_block_delta", value)

    def _stop_block(self) -> bytes:
        if not self._kind:
            return b""
        frames = b""
        if self._kind == "thinking":
            frames = self._delta("signature_delta", signature=_signature("".join(self._thinking)))
            self._thinking = []
        value = {"type": "content_block_stop", "index": self._num_blocks}
        self._kind = ""
        self._num_blocks += 1
        return frames + named_frame("content_block_stop", value)

    def _stop(self, finish: pb.Finish) -> dict[str, Any]:
        """Why the message has ended."""
        sequence = finish.stop.stop_string if finish.stop.WhichOneof("matched") == "stop_string" else None
        if finish.reason == pb.FINISH_REASON_TOOL_CALLS:
            reason = "tool_use"
        elif finish.reason == pb.FINISH_REASON_LENGTH:
            is_full = finish.usage.completion_tokens < self._max_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        else:
            reason = "end_turn" if sequence is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}


def error_form(error: HttpError) -> dict[str, Any]:
    """The body of a failure."""
    kind = _ERROR_TYPES.get(error.status, "api_error")
    message = error.message
    if error.reason == "TOO_LONG":
        # Claude Code finds these words, and shortens the conversation.
        found = _TOO_LONG.search(message)
        message = f"prompt is too long: {f'{found[1]} tokens > {found[2]} maximum' if found else message}"
    return {"type": "error", "error": {"type": kind, "message": message}}


def _usage(usage: pb.Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def _facts(finish: pb.Finish) -> dict[str, Any]:
    """Fissile's own field, beside Anthropic's."""
    return {"fissile": fissile_facts(finish)}


def _signature(thinking: str) -> str:
    """Signature of a block of reasoning, which clients require: its digest, which nobody checks."""
    return hashlib.sha256(thinking.encode()).hexdigest()


def _input_of(arguments_json: str) -> dict[str, Any]:
    """Arguments of a call as an object; empty for those of an answer that was cut before their end."""
    try:
        value = msgspec.json.decode(arguments_json or "{}")
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}
