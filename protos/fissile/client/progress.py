"""The answers that a client has received so far, and the request that continues after them. Pure: no gRPC, no clock.

Invariant: the texts of an index, over all attempts, are the answer's text from its beginning without a gap.
"""

from __future__ import annotations

import copy
import hashlib
import reprlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fissile.client.messages import Request, Response, Unary
from fissile.client.receipts import Receipt, ReceiptCheck, ask_for_receipt
from fissile.v1 import inference_pb2 as pb

# Routers allow far fewer answers. Messages with a larger index are dropped.
_MOST_ANSWERS = 4096
# Shortens texts in reprs, so that a repr fits into a terminal's line.
_SHORT = reprlib.Repr()
_SHORT.maxstring = 60


def finish_name(finish: pb.Finish) -> str:
    """Short name of an answer's finish reason, such as `stop`, `length` or `tool_calls`."""
    return pb.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()


def text_of(part: Response) -> str:
    """Text that a message adds: of Chat the content."""
    return part.delta.content if isinstance(part, pb.ChatResponse) else part.text


def reasoning_of(part: Response) -> str:
    """Reasoning that a message adds."""
    return part.delta.reasoning if isinstance(part, pb.ChatResponse) else ""


def calls_of(part: Response) -> Sequence[pb.ToolCallDelta]:
    """Parts of calls that a message adds."""
    return part.delta.tool_calls if isinstance(part, pb.ChatResponse) else ()


class _GrowingText:
    """A text that grows; parts are joined when they are asked for, not one by one."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def add(self, part: str) -> None:
        """Takes the next part."""
        self._parts.append(part)

    @property
    def whole(self) -> str:
        """The text so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""


@dataclass(slots=True, repr=False)
class Answer:
    """One answer, as far as it was received.

    Attributes:
        index: of the `n` answers.
        token_ids: its tokens, if requested.
        finish: its end; None until then.
        logprobs: of its tokens, if requested.
        receipt: checked; None before the end, if none was requested, and for an answer that is not `exact`.
    """

    index: int
    token_ids: list[int] = field(default_factory=list)
    finish: pb.Finish | None = None
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    receipt: Receipt | None = None
    _text: _GrowingText = field(default_factory=_GrowingText)
    _reasoning: _GrowingText = field(default_factory=_GrowingText)
    _calls: list[tuple[str, str, _GrowingText]] = field(default_factory=list)

    def __repr__(self) -> str:
        """Shows the shortened texts, the names of called tools, the finish reason and the number of tokens."""
        shown = [f"{self.index}, {_SHORT.repr(self.text)}"]
        if self.reasoning:
            shown.append(f"reasoning={_SHORT.repr(self.reasoning)}")
        if self._calls:
            shown.append(f"tool_calls=[{', '.join(name for _, name, _ in self._calls)}]")
        if self.finish is not None:
            shown.append(finish_name(self.finish))
            shown.append(f"{self.finish.usage.completion_tokens} tokens")
        return f"Answer({', '.join(shown)})"

    @property
    def text(self) -> str:
        """Its text so far; for Chat the content."""
        return self._text.whole

    @property
    def reasoning(self) -> str:
        """Its reasoning so far."""
        return self._reasoning.whole

    @property
    def tool_calls(self) -> list[pb.ToolCall]:
        """Its tool calls so far; the last one's arguments may be incomplete."""
        return [pb.ToolCall(id=id, name=name, arguments_json=text.whole) for id, name, text in self._calls]

    @property
    def message(self) -> pb.ChatMessage:
        """All of Chat as a message, to be sent back in the conversation."""
        return pb.ChatMessage(role="assistant", content=self.text, reasoning=self.reasoning, tool_calls=self.tool_calls)

    @property
    def has_any(self) -> bool:
        """True if text of any channel was received."""
        return bool(self.text or self.reasoning or self._calls)

    @property
    def delivered(self) -> bytes:
        """All text so far as a router digests it: the channels, one after another."""
        return "".join([self.reasoning, self.text, *(arguments.whole for _, _, arguments in self._calls)]).encode()

    def add(self, part: Response) -> None:
        """Takes the texts of the next message."""
        self._text.add(text_of(part))
        self._reasoning.add(reasoning_of(part))
        for call in calls_of(part):
            if call.name:
                self._calls.append((call.id, call.name, _GrowingText()))
            self._calls[call.index][2].add(call.arguments_json)


class Progress:
    """The answers to one request.

    Args:
        request: the request; it gets an id if it has none, because the answer is a function of it.
        has_receipts: True requests receipts, and checks them.

    Attributes:
        prompt_info: of the first message; None before.
        prompt_logprobs: of the prompt's tokens, if requested.
        answers: by index.
    """

    def __init__(self, request: Request, *, has_receipts: bool = False) -> None:
        if not request.request_id:
            request.request_id = uuid.uuid4().hex
        if has_receipts:
            ask_for_receipt(request)
        self._check = ReceiptCheck(request) if has_receipts else None
        self._request = request
        self.prompt_info: pb.PromptInfo | None = None
        self.prompt_logprobs: list[pb.TokenLogprobs] = []
        # How many prompt logprobs of the next attempt are already known.
        self._known_prompt_logprobs = 0
        self.answers = {i: Answer(i) for i in range(min(max(1, request.sampling_params.n), _MOST_ANSWERS))}

    @property
    def is_whole(self) -> bool:
        """True if every answer has finished."""
        return all(answer.finish is not None for answer in self.answers.values())

    @property
    def request(self) -> Request:
        """The request, with its id."""
        return self._request

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self._request.request_id

    @property
    def questions(self) -> Sequence[Unary[Any]]:
        """Calls to make after the end; their answers show whether the receipts belong to this request."""
        has_any = any(answer.receipt is not None for answer in self.answers.values())
        return self._check.questions if self._check is not None and has_any else ()

    def check_request(self, told: Sequence[Any]) -> None:
        """Checks receipts against the request with the answers to `questions`.

        Raises:
            ReceiptError: one is of another request.
        """
        for answer in self.answers.values():
            if self._check is not None and answer.receipt is not None and answer.finish is not None:
                answer.receipt = self._check.of_request(answer.receipt, answer.finish, *told)

    def add(self, part: Response) -> None:
        """Adds a message.

        Raises:
            ReceiptError: its receipt is of another answer, or of another request.
        """
        answer = self.answers[part.index]
        answer.add(part)
        # Logprobs name their tokens, which a stream that breaks has to be resumed with.
        answer.token_ids += part.token_ids or [entry.token_id for entry in part.logprobs]
        answer.logprobs += part.logprobs
        self._add_prompt_logprobs(part)
        if part.HasField("prompt_info") and self.prompt_info is None:
            self.prompt_info = part.prompt_info
        if part.HasField("finish"):
            answer.finish = part.finish
            if self._check is not None:
                answer.receipt = self._check.of_answer(answer.index, answer.token_ids, part.finish)

    def _add_prompt_logprobs(self, part: Response) -> None:
        known = min(len(part.prompt_logprobs), self._known_prompt_logprobs)
        self._known_prompt_logprobs -= known
        self.prompt_logprobs += part.prompt_logprobs[known:]

    def going_on(self) -> Request:
        """The request that continues after what was received; it takes over from a call that a router still has."""
        again = copy.deepcopy(self._request)
        # The router sends them from the beginning if nothing else was received.
        self._known_prompt_logprobs = len(self.prompt_logprobs)
        resume = pb.Resume()
        if self.prompt_info is not None:
            resume.weights_digest, resume.numerics = self.prompt_info.weights_digest, self.prompt_info.numerics
        for answer in self.answers.values():
            point = resume.answers.add(index=answer.index, finished=answer.finish is not None)
            options = self._request.output_options
            if options.return_token_ids or options.HasField("logprobs"):
                if answer.token_ids:
                    point.token_ids.ids.extend(answer.token_ids)
            elif data := answer.delivered:
                point.text.bytes, point.text.sha256 = len(data), hashlib.sha256(data).digest()
        again.resume.CopyFrom(resume)
        return again
