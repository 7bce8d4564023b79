"""Destinations of the messages of answers: a client that streams, or one response."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias

from fissile.v1 import inference_pb2 as pb

from common.errors import InvalidFieldError
from router.api.responses import reasoning_of, text_of, whole_calls
from router.api.rpc_scope import Context, RpcScope

AnswerRequest: TypeAlias = pb.GenerateRequest | pb.ChatRequest
AnswerResponse: TypeAlias = pb.GenerateResponse | pb.ChatResponse


def request_of(request: pb.ReplayRequest | pb.CountTokensRequest) -> AnswerRequest:
    """The request of Generate or Chat in another request.

    Raises:
        InvalidFieldError: there is none.
    """
    if request.WhichOneof("request") is None:
        raise InvalidFieldError("request", "is missing", "one of generate, chat")
    return request.chat if request.HasField("chat") else request.generate


def field_of(request: AnswerRequest) -> str:
    """The field of Replay and CountTokens that has this request."""
    return "chat" if isinstance(request, pb.ChatRequest) else "generate"


class Answers(Protocol):
    """Takes the messages of all answers to one request.

    Attributes:
        has_begun: True once the first message was written.
        has_sent: True if the client may have received anything.
        is_streamed: True if the client gets the answers in parts.
    """

    is_streamed: bool
    has_begun: bool
    has_sent: bool

    def new_message(self, request_id: str, index: int) -> AnswerResponse:
        """An empty message, which the caller fills with each part of the answer `index` in turn."""

    def begin(self, scope: RpcScope) -> None:
        """Is called before the first message is written."""

    def write(self, message: AnswerResponse) -> Awaitable[None]:
        """Sends a message; the caller may fill it again afterwards."""


class StreamedAnswers:
    """Sends each message to the client.

    Args:
        context: of the call.
        response: makes its messages.
    """

    is_streamed = True

    def __init__(self, context: Context, response: Callable[..., AnswerResponse]) -> None:
        self.has_begun = self.has_sent = False
        self._response = response
        self._write: Callable[[AnswerResponse], Awaitable[None]] = context.write
        self._write_next: Callable[[AnswerResponse], Awaitable[None]] = context.write

    def new_message(self, request_id: str, index: int) -> AnswerResponse:
        """One message for all parts: `write` returns after gRPC has serialized it."""
        return self._response(request_id=request_id, index=index)

    def begin(self, scope: RpcScope) -> None:
        """Has the call's scope write the first message, so that a status can always follow it."""
        self.has_begun = self.has_sent = True
        self._write_next = scope.write_first

    def write(self, message: AnswerResponse) -> Awaitable[None]:
        """Sends a message; waits while the client has no room for it."""
        write, self._write_next = self._write_next, self._write
        return write(message)


class CollectedAnswers:
    """Collects the messages of all answers for one response.

    Args:
        response: type of the streaming RPC's messages.
        request: says which answers are chosen, and whether with logprobs.
    """

    is_streamed = False

    def __init__(self, response: Callable[..., AnswerResponse], request: AnswerRequest) -> None:
        self.has_begun = self.has_sent = False
        self._response = response
        self._params, self._options = request.sampling_params, request.output_options
        self._request_id = ""
        self._prompt_info = pb.PromptInfo()
        self._prompt_logprobs: list[pb.TokenLogprobs] = []
        self._texts: dict[int, list[str]] = {}
        self._reasoning: dict[int, list[str]] = {}
        self._calls: dict[int, list[pb.ToolCallDelta]] = {}
        self._answers: dict[int, pb.GeneratedText] = {}

    def new_message(self, request_id: str, index: int) -> AnswerResponse:
        """Starts an answer, or starts it again."""
        self._request_id = request_id
        self.has_begun = False
        self._prompt_logprobs.clear()
        self._texts[index], self._reasoning[index], self._calls[index] = [], [], []
        self._answers[index] = pb.GeneratedText(index=index)
        return self._response(request_id=request_id, index=index)

    def begin(self, scope: RpcScope) -> None:
        """Notes that the first message is written."""
        self.has_begun = True

    async def write(self, message: AnswerResponse) -> None:
        """Adds the message to its answer."""
        answer = self._answers[message.index]
        self._texts[message.index].append(text_of(message))
        self._reasoning[message.index].append(reasoning_of(message))
        if isinstance(message, pb.ChatResponse):
            # The caller fills the message again.
            self._calls[message.index].extend(copy.deepcopy(part) for part in message.delta.tool_calls)
        answer.token_ids.extend(message.token_ids)
        answer.logprobs.extend(message.logprobs)
        self._prompt_logprobs.extend(message.prompt_logprobs)
        if message.HasField("prompt_info"):
            self._prompt_info.CopyFrom(message.prompt_info)
        if message.HasField("finish"):
            answer.finish.CopyFrom(message.finish)
            answer.text = "".join(self._texts[message.index])

    def _chosen(self) -> list[pb.GeneratedText]:
        """The answers by index; with `best_of` the best `n` answers, the best one first."""
        answers = [self._answers[index] for index in sorted(self._answers)]
        if not self._params.HasField("best_of"):
            return answers
        # The sort is stable: of equals the lower index is first.
        answers.sort(key=_mean_logprob, reverse=True)
        del answers[max(1, self._params.n) :]
        if not self._options.HasField("logprobs"):
            for answer in answers:
                answer.ClearField("logprobs")
                answer.finish.ClearField("logprob")
        return answers

    def generated(self) -> pb.GenerateOnceResponse:
        """The response of GenerateOnce."""
        return pb.GenerateOnceResponse(
            request_id=self._request_id,
            prompt_info=self._prompt_info,
            answers=self._chosen(),
            prompt_logprobs=self._prompt_logprobs,
        )

    def chatted(self) -> pb.ChatOnceResponse:
        """The response of ChatOnce."""
        return pb.ChatOnceResponse(
            request_id=self._request_id,
            prompt_info=self._prompt_info,
            answers=map(self._chat_answer, self._chosen()),
            prompt_logprobs=self._prompt_logprobs,
        )

    def _chat_answer(self, answer: pb.GeneratedText) -> pb.ChatAnswer:
        reasoning = "".join(self._reasoning[answer.index])
        return pb.ChatAnswer(
            index=answer.index,
            message=pb.ChatMessage(
                role="assistant",
                content=answer.text,
                reasoning=reasoning,
                tool_calls=whole_calls(self._calls[answer.index]),
            ),
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            finish=answer.finish,
        )


def _mean_logprob(answer: pb.GeneratedText) -> float:
    return answer.finish.logprob / max(1, answer.finish.usage.completion_tokens)
