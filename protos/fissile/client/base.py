"""Common parts of the synchronous and the asyncio client: everything except waiting."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar, Unpack

from fissile.client.arguments import (
    CallArguments,
    ChatArguments,
    ConnectionArguments,
    GenerateArguments,
    Messages,
    Metadata,
    Prompt,
    ReceiptArguments,
    spelled_out,
)
from fissile.client.attempts import CallAttempts, StreamAttempts
from fissile.client.calls import chat_request, embed_request, generate_request, rerank_request, score_request
from fissile.client.connections import Connection
from fissile.client.embeddings import Embeddings
from fissile.client.fields import fill, items, number
from fissile.client.messages import Request, Unary
from fissile.client.receipts import Receipt, Verification, contradiction_of, replay
from fissile.client.retries import Retries
from fissile.v1 import inference_pb2 as pb

StreamT = TypeVar("StreamT")
ANSWER_TIMEOUT_S = 600.0
QUESTION_TIMEOUT_S = 60.0


class Calls(Protocol):
    """The calls of one stream, as the stream needs them."""

    attempts: StreamAttempts
    trailing_metadata: Mapping[str, str | bytes]

    def cancel(self) -> None:
        """Ends the call."""
        ...


class BaseStream:
    """A stream without its reading loop.

    Attributes:
        progress: the answers so far.
    """

    def __init__(self, calls: Calls) -> None:
        self.progress = calls.attempts.progress
        self._calls = calls

    @property
    def num_calls(self) -> int:
        """Number of calls that the stream has made: 1 if it never broke."""
        return self._calls.attempts.num_calls

    @property
    def trailing_metadata(self) -> Mapping[str, str | bytes]:
        """Trailing metadata of a stream that has ended with OK, such as `traceresponse`; empty before."""
        return self._calls.trailing_metadata

    def cancel(self) -> None:
        """Ends the call and frees its resources."""
        self._calls.cancel()

    def __repr__(self) -> str:
        """Shows the answers so far."""
        progress = self.progress
        answers = ", ".join(map(repr, progress.answers.values()))
        return f"{type(self).__name__}({answers}, calls={self.num_calls}, request_id={progress.request_id!r})"


class BaseClient(ABC, Generic[StreamT]):
    """A client without its waiting; arguments as for `Client`."""

    def __init__(
        self, targets: str | Sequence[str], *, give_up_s: float = 30.0, **connection: Unpack[ConnectionArguments]
    ) -> None:
        given = [targets] if isinstance(targets, str) else items(targets, "targets")
        self.connection = Connection(given, **connection)
        self._give_up_s = number("give_up_s", give_up_s)
        # Calls begin at the routers in turn.
        self._turns = itertools.count()

    def __repr__(self) -> str:
        """Shows the routers' addresses, and whether the client is closed; never the API key."""
        closed = ", closed" if self._is_closed else ""
        return f"{type(self).__name__}({', '.join(map(repr, self.connection.targets))}{closed})"

    @property
    @abstractmethod
    def _is_closed(self) -> bool:
        """True if the client has been closed."""

    @spelled_out(ChatArguments)
    def chat_stream(self, messages: Messages, **arguments: Unpack[ChatArguments]) -> StreamT:
        """Answers a conversation.

        Args:
            messages: a text, or messages with `role` and `content`.
            arguments: `timeout_s`, the deadline of the whole answer, later attempts included (None sets no deadline);
                `metadata` of this call, such as `traceparent`; `receipt`, True for receipts, which the client checks
                (`Answer.receipt`); and the fields of ChatRequest, SamplingParams and OutputOptions by their names.

        Raises:
            ValueError: an argument is unknown, or its value does not fit.
        """
        of_call, of_request = _apart(arguments)
        return self._stream(chat_request(messages, of_request), **of_call)

    @spelled_out(GenerateArguments)
    def generate_stream(self, prompt: Prompt, **arguments: Unpack[GenerateArguments]) -> StreamT:
        """Continues a prompt, which is a text or token ids; same arguments and errors as `chat_stream`."""
        of_call, of_request = _apart(arguments)
        return self._stream(generate_request(prompt, of_request), **of_call)

    @abstractmethod
    def _begin(self, attempts: StreamAttempts) -> StreamT:
        """A stream that makes its first call when it is read."""

    def _stream(
        self,
        request: Request,
        timeout_s: float | None = ANSWER_TIMEOUT_S,
        metadata: Metadata = (),
        receipt: bool | ReceiptArguments | pb.ReceiptOptions = False,
    ) -> StreamT:
        if not isinstance(receipt, bool | Mapping | pb.ReceiptOptions):
            raise ValueError(f"receipt is {receipt!r}; give True, False, or a mapping with logits_every")
        if not isinstance(receipt, bool):
            fill(request.output_options, {"receipt": receipt})
        sent, end = self.connection.metadata_of(metadata), _end(timeout_s)
        return self._begin(StreamAttempts(request, self._retries(), sent, end, has_receipts=receipt is not False))

    def _attempts(self, call: Unary[Any], timeout_s: float | None, metadata: Metadata) -> CallAttempts:
        sent = self.connection.metadata_of(metadata)
        return CallAttempts(call.method, call.request, self._retries(), sent, _end(timeout_s))

    def _retries(self) -> Retries:
        turn = next(self._turns)
        return Retries(self.connection.targets, self._give_up_s, turn, self.connection.waits_when_full)


def _apart(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits arguments into call arguments (`CallArguments`) and fields of the request."""
    of_call = {name: value for name, value in arguments.items() if name in CallArguments.__annotations__}
    return of_call, {name: value for name, value in arguments.items() if name not in of_call}


def _end(timeout_s: float | None) -> float | None:
    """Monotonic time of the deadline after `timeout_s`; None without a deadline."""
    return None if timeout_s is None else time.monotonic() + number("timeout_s", timeout_s)


def list_models() -> Unary[list[pb.Model]]:
    """Asks for the models."""
    return Unary("ListModels", pb.ListModelsRequest(), lambda answer: [*answer.models])


def get_model(name: str) -> Unary[pb.Model]:
    """Asks for a model; "" is the only one."""
    return Unary("GetModel", fill(pb.GetModelRequest(), {"model": name}), lambda answer: answer.model)


def count_tokens(messages: Messages, model: str) -> Unary[int]:
    """Asks how long the prompt of a conversation is."""
    asked = pb.CountTokensRequest(chat=chat_request(messages, {"model": model}))
    return Unary("CountTokens", asked, lambda answer: int(answer.prompt_tokens))


def tokenize(text: str, model: str) -> Unary[pb.TokenizeResponse]:
    """Asks for the tokens of a text."""
    return Unary("Tokenize", fill(pb.TokenizeRequest(), {"model": model, "text": text}), lambda answer: answer)


def detokenize(token_ids: Sequence[int], model: str, *, keep_special_tokens: bool) -> Unary[str]:
    """Asks for the text of token ids."""
    fields = {"model": model, "token_ids": token_ids, "keep_special_tokens": keep_special_tokens}
    return Unary("Detokenize", fill(pb.DetokenizeRequest(), fields), lambda answer: str(answer.text))


def render_prompt(messages: Messages, fields: Mapping[str, Any]) -> Unary[pb.RenderPromptResponse]:
    """Asks for the prompt of a conversation."""
    return Unary("RenderPrompt", pb.RenderPromptRequest(chat=chat_request(messages, fields)), lambda answer: answer)


def embed(inputs: Sequence[Prompt], fields: Mapping[str, Any]) -> Unary[Embeddings]:
    """Asks for vectors."""
    return Unary("Embed", embed_request(inputs, fields), Embeddings)


def rerank(query: str, documents: Sequence[str], fields: Mapping[str, Any]) -> Unary[pb.RerankResponse]:
    """Asks for the order of documents."""
    return Unary("Rerank", rerank_request(query, documents, fields), lambda answer: answer)


def score(
    continuations: Sequence[Prompt], context: Prompt | None, fields: Mapping[str, Any]
) -> Unary[pb.ScoreResponse]:
    """Asks how likely continuations are."""
    return Unary("Score", score_request(continuations, context, fields), lambda answer: answer)


def begin_verification(receipt: Receipt | pb.ReplayRequest, worker_id: str) -> Verification | Unary[Verification]:
    """Result for a receipt, or the call that is to be made for it.

    Raises:
        ReceiptError: the token ids are not of the receipt's answer.
        ValueError: `receipt` is not a receipt; an answer without one has None.
    """
    if not isinstance(receipt, Receipt | pb.ReplayRequest):
        raise ValueError(f"receipt is {receipt!r}; give the receipt of an answer, or a ReplayRequest")
    proof = receipt.proof if isinstance(receipt, Receipt) else receipt
    return contradiction_of(proof) or replay(proof, worker_id)
