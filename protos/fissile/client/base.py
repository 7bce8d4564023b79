"""Parts that the client for programs that wait and the one for event loops have in common: all but what waits."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from fissile.client.attempts import Attempts, StreamAttempts
from fissile.client.calls import (
    Messages,
    Prompt,
    chat_request,
    embed_request,
    generate_request,
    rerank_request,
    score_request,
    split,
)
from fissile.client.connections import Connection, Metadata
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
    """A stream, but for the reading.

    Attributes:
        progress: what has come.
    """

    def __init__(self, calls: Calls) -> None:
        self.progress = calls.attempts.progress
        self._calls = calls

    @property
    def num_calls(self) -> int:
        """Calls that the stream has taken so far: 1 for one that never broke."""
        return self._calls.attempts.num_calls

    @property
    def trailing_metadata(self) -> Mapping[str, str | bytes]:
        """Trailing metadata of a stream that has ended with OK, such as `traceresponse`; empty before."""
        return self._calls.trailing_metadata

    def cancel(self) -> None:
        """Ends the call; what it held is free."""
        self._calls.cancel()


class BaseClient(ABC, Generic[StreamT]):
    """A client, but for the waiting; arguments as of `Client`."""

    def __init__(self, targets: str | Sequence[str], *, give_up_s: float = 30.0, **connection: Any) -> None:
        self.connection = Connection([targets] if isinstance(targets, str) else [*targets], **connection)
        self._give_up_s = give_up_s
        # Calls begin at the routers in turn.
        self._turns = itertools.count()

    def chat_stream(
        self,
        messages: Messages,
        *,
        timeout_s: float | None = ANSWER_TIMEOUT_S,
        metadata: Metadata = (),
        receipt: bool = False,
        **arguments: Any,
    ) -> StreamT:
        """Answers a conversation.

        Args:
            messages: a text, or messages with `role` and `content`.
            timeout_s: deadline of the whole answer, later attempts included; None is no deadline.
            metadata: of this call, such as `traceparent`.
            receipt: True asks for receipts, which are checked: `Answer.receipt`.
            arguments: fields of SamplingParams and of ChatRequest, by name.
        """
        return self._stream(chat_request(messages, *split(arguments)), timeout_s, metadata, has_receipts=receipt)

    def generate_stream(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = ANSWER_TIMEOUT_S,
        metadata: Metadata = (),
        receipt: bool = False,
        **arguments: Any,
    ) -> StreamT:
        """Continues a prompt, a text or token ids; arguments as of `chat_stream`."""
        return self._stream(generate_request(prompt, *split(arguments)), timeout_s, metadata, has_receipts=receipt)

    @abstractmethod
    def _begin(self, attempts: StreamAttempts) -> StreamT:
        """A stream that makes its first call when it is read."""

    def _stream(self, request: Request, timeout_s: float | None, metadata: Metadata, *, has_receipts: bool) -> StreamT:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        sent = self.connection.metadata_of(metadata)
        return self._begin(StreamAttempts(request, self._retries(), sent, end, has_receipts=has_receipts))

    def _attempts(self, call: Unary[Any], timeout_s: float) -> Attempts:
        end = time.monotonic() + timeout_s
        return Attempts(call.method, call.request, self._retries(), self.connection.metadata_of(), end)

    def _retries(self) -> Retries:
        return Retries(self.connection.targets, self._give_up_s, next(self._turns))


def list_models() -> Unary[list[pb.Model]]:
    """Asks for the models."""
    return Unary("ListModels", pb.ListModelsRequest(), lambda answer: [*answer.models])


def get_model(name: str) -> Unary[pb.Model]:
    """Asks for a model; "" is the only one."""
    return Unary("GetModel", pb.GetModelRequest(model=name), lambda answer: answer.model)


def count_tokens(messages: Messages, model: str) -> Unary[int]:
    """Asks how long the prompt of a conversation is."""
    asked = pb.CountTokensRequest(chat=chat_request(messages, {}, {"model": model}))
    return Unary("CountTokens", asked, lambda answer: int(answer.prompt_tokens))


def embed(inputs: Sequence[Prompt], fields: Mapping[str, Any]) -> Unary[pb.EmbedResponse]:
    """Asks for vectors."""
    return Unary("Embed", embed_request(inputs, fields), lambda answer: answer)


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
    """
    proof = receipt.proof if isinstance(receipt, Receipt) else receipt
    return contradiction_of(proof) or replay(proof, worker_id)
