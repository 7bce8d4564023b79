"""The client for programs that wait."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar, Unpack

import grpc

from fissile.client.arguments import (
    ChatArguments,
    ConnectionArguments,
    EmbedArguments,
    GenerateArguments,
    Messages,
    Metadata,
    Prompt,
    PromptArguments,
    RerankArguments,
    ScoreArguments,
    spelled_out,
)
from fissile.client.attempts import StreamAttempts
from fissile.client.base import (
    ANSWER_TIMEOUT_S,
    QUESTION_TIMEOUT_S,
    BaseClient,
    BaseStream,
    begin_verification,
    count_tokens,
    detokenize,
    embed,
    get_model,
    list_models,
    render_prompt,
    rerank,
    score,
    tokenize,
)
from fissile.client.calls import Event, Result, result_of
from fissile.client.embeddings import Embeddings
from fissile.client.errors import FissileError, again, cancelled, error_of
from fissile.client.messages import Unary
from fissile.client.receipts import Receipt, Verification
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub

T = TypeVar("T")


class _SyncCalls:
    """The calls of one stream, one at a time.

    It does not refer to its `Stream`: when that is dropped, the generator `events` ends at once, which cancels the
    call.
    """

    def __init__(self, client: Client, attempts: StreamAttempts) -> None:
        self.attempts = attempts
        self.trailing_metadata: Mapping[str, str | bytes] = {}
        self._client = client
        self._call: Any = None
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Ends the call, on any thread."""
        self._cancelled.set()
        if self._call is not None:
            self._call.cancel()

    def events(self) -> Iterator[Event]:
        """Events of all attempts; begins the first one."""
        while True:
            try:
                for part in self._open():
                    yield from self.attempts.received(part)
                self.trailing_metadata = dict(self._call.trailing_metadata() or ())
                break
            except grpc.RpcError as error:
                if self.attempts.progress.is_whole:
                    break
                if self._cancelled.is_set():
                    raise cancelled() from None
                wait_s = self.attempts.failed(error_of(error), time.monotonic())
            finally:
                if self._call is not None:
                    self._call.cancel()
            if self._cancelled.wait(wait_s):
                raise cancelled()
        self._check_receipts()

    def _check_receipts(self) -> None:
        progress, left_s = self.attempts.progress, self.attempts.left_s(time.monotonic())
        timeout_s = QUESTION_TIMEOUT_S if left_s is None else min(QUESTION_TIMEOUT_S, left_s)
        try:
            told = [self._client.ask(question, timeout_s) for question in progress.questions]
        except FissileError:
            # The answers are whole, and their receipts are of them: no router says more.
            return
        progress.check_request(told)

    def _open(self) -> Any:
        call = self.attempts.next(time.monotonic())
        method = getattr(self._client.stub(call.target), call.method)
        with self._client.cancelled_if_closed():
            self._call = method(call.request, timeout=call.timeout_s, metadata=call.sent_metadata(time.time()))
        # Another thread may have cancelled before it could see this call.
        if self._cancelled.is_set():
            raise cancelled()
        return self._call


class Stream(BaseStream):
    """Events of the answers to one request. If the stream breaks, it continues at another router.

    Iterate over it once, on one thread. Leaving its `with` block, `cancel` on any thread, or dropping the last
    reference (as `break` may) frees its resources.

    Examples:
        ```python
        with Client("10.0.0.1:50051") as client, client.chat_stream("Tell me a story.", max_tokens=32) as stream:
            for event in stream:
                if isinstance(event, Delta):
                    print(event.text, end="", flush=True)
        ```

    Attributes:
        progress: the answers so far.
    """

    def __init__(self, calls: _SyncCalls) -> None:
        super().__init__(calls)
        self._events = calls.events()
        # Why it has ended before its end: one that is asked again must not look whole.
        self._failure: FissileError | None = None

    def __enter__(self) -> Stream:
        """Does not start the call: it starts with the first event that is read."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Cancels the call if it has not ended."""
        self.cancel()

    def __iter__(self) -> Iterator[Event]:
        """The events, in order."""
        return self

    def __next__(self) -> Event:
        """Waits for the next event.

        Raises:
            FissileError: the call has failed, and cannot go on, or has been cancelled.
        """
        try:
            return next(self._events)
        except StopIteration:
            if self._failure is not None:
                raise again(self._failure) from None
            raise
        except BaseException as error:
            self._failure = again(error)
            raise

    def result(self) -> Result:
        """Reads to the end; the answers from their beginning.

        Raises:
            FissileError: the call has failed, and cannot go on.
        """
        for _ in self:
            pass
        return result_of(self.progress)


class Client(BaseClient[Stream]):
    """Calls routers of one fleet. May be used by several threads.

    Examples:
        ```python
        with Client(["10.0.0.1:50051", "10.0.0.2:50051"]) as client:
            print(client.chat("Tell me a story.", seed=7, max_tokens=32).text)
            print(client.count_tokens("Tell me a story."), [model.name for model in client.models()])
        ```

    Args:
        targets: addresses of routers, `HOST:PORT`, or one of them: streams that break go on at the next one.
        give_up_s: how long a call is made again while nothing comes; 0 makes no call again.
        connection: further options of `Connection`, such as `api_key` and `tls_ca`.
    """

    @spelled_out(ConnectionArguments)
    def __init__(
        self, targets: str | Sequence[str], *, give_up_s: float = 30.0, **connection: Unpack[ConnectionArguments]
    ) -> None:
        super().__init__(targets, give_up_s=give_up_s, **connection)
        self._channels: dict[str, grpc.Channel] = {}
        self._running = weakref.WeakSet[_SyncCalls]()
        self._closed = threading.Event()
        self._lock = threading.Lock()

    def __enter__(self) -> Client:
        """Connects when something is asked."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the connections."""
        self.close()

    def close(self) -> None:
        """Closes the connections for good; calls that run are cancelled, on whichever threads."""
        with self._lock:
            self._closed.set()
            running, channels = [*self._running], [*self._channels.values()]
            self._channels.clear()
        for calls in running:
            calls.cancel()
        for channel in channels:
            channel.close()

    @spelled_out(ChatArguments)
    def chat(self, messages: Messages, **arguments: Unpack[ChatArguments]) -> Result:
        """The whole answer to a conversation; arguments as for `chat_stream`.

        Raises:
            FissileError: the call has failed and cannot continue.
        """
        return self.chat_stream(messages, **arguments).result()

    @spelled_out(GenerateArguments)
    def generate(self, prompt: Prompt, **arguments: Unpack[GenerateArguments]) -> Result:
        """The whole continuation of a prompt; arguments as for `chat_stream`.

        Raises:
            FissileError: the call has failed and cannot continue.
        """
        return self.generate_stream(prompt, **arguments).result()

    def models(self, *, timeout_s: float | None = QUESTION_TIMEOUT_S, metadata: Metadata = ()) -> list[pb.Model]:
        """The models that can be asked for.

        Raises:
            FissileError: no router answers.
        """
        return self.ask(list_models(), timeout_s, metadata)

    def model(
        self, name: str = "", *, timeout_s: float | None = QUESTION_TIMEOUT_S, metadata: Metadata = ()
    ) -> pb.Model:
        """Describes a model; "" means the only one that is served.

        Raises:
            FissileError: the name is unknown, or no router answers.
        """
        return self.ask(get_model(name), timeout_s, metadata)

    def count_tokens(
        self,
        messages: Messages,
        *,
        model: str = "",
        timeout_s: float | None = QUESTION_TIMEOUT_S,
        metadata: Metadata = (),
    ) -> int:
        """Prompt tokens of a conversation.

        Raises:
            FissileError: the conversation is refused, or no router answers.
        """
        return self.ask(count_tokens(messages, model), timeout_s, metadata)

    def tokenize(
        self,
        text: str,
        *,
        model: str = "",
        timeout_s: float | None = QUESTION_TIMEOUT_S,
        metadata: Metadata = (),
    ) -> pb.TokenizeResponse:
        """Turns a text into the token ids that `generate` would use: `token_ids`, and `tokens` for people to read.

        Raises:
            FissileError: the text is refused, or no router answers.
        """
        return self.ask(tokenize(text, model), timeout_s, metadata)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        keep_special_tokens: bool = False,
        timeout_s: float | None = QUESTION_TIMEOUT_S,
        metadata: Metadata = (),
    ) -> str:
        """Turns token ids into text.

        Raises:
            FissileError: an id is refused, or no router answers.
        """
        asked = detokenize(token_ids, model, keep_special_tokens=keep_special_tokens)
        return self.ask(asked, timeout_s, metadata)

    @spelled_out(PromptArguments)
    def render_prompt(
        self,
        messages: Messages,
        *,
        timeout_s: float | None = QUESTION_TIMEOUT_S,
        metadata: Metadata = (),
        **arguments: Unpack[PromptArguments],
    ) -> pb.RenderPromptResponse:
        """Renders a conversation with the model's chat template: `text`, and its `token_ids`.

        Args:
            messages: as for `chat`.
            timeout_s: deadline.
            metadata: of this call, such as `traceparent`.
            arguments: fields of ChatRequest that the prompt depends on, by name.

        Raises:
            FissileError: the conversation is refused, or no router answers.
        """
        return self.ask(render_prompt(messages, arguments), timeout_s, metadata)

    @spelled_out(EmbedArguments)
    def embed(
        self,
        inputs: Sequence[Prompt],
        *,
        timeout_s: float | None = ANSWER_TIMEOUT_S,
        metadata: Metadata = (),
        **arguments: Unpack[EmbedArguments],
    ) -> Embeddings:
        """Turns texts, or lists of token ids, into vectors, in the order of `inputs`.

        Args:
            inputs: at most 2,048.
            timeout_s: deadline.
            metadata: of this call, such as `traceparent`.
            arguments: fields of EmbedRequest, by name.

        Raises:
            FissileError: the request is refused or has failed, or no router answers.
        """
        return self.ask(embed(inputs, arguments), timeout_s, metadata)

    @spelled_out(RerankArguments)
    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        timeout_s: float | None = ANSWER_TIMEOUT_S,
        metadata: Metadata = (),
        **arguments: Unpack[RerankArguments],
    ) -> pb.RerankResponse:
        """Orders documents by their relevance to a query: `documents`, the best one first.

        Args:
            query: the query.
            documents: at most 1,024.
            timeout_s: deadline.
            metadata: of this call, such as `traceparent`.
            arguments: fields of RerankRequest, by name.

        Raises:
            FissileError: the model is not a reranker, the request is refused or has failed, or no router answers.
        """
        return self.ask(rerank(query, documents, arguments), timeout_s, metadata)

    @spelled_out(ScoreArguments)
    def score(
        self,
        continuations: Sequence[Prompt],
        context: Prompt | None = None,
        *,
        timeout_s: float | None = ANSWER_TIMEOUT_S,
        metadata: Metadata = (),
        **arguments: Unpack[ScoreArguments],
    ) -> pb.ScoreResponse:
        """Computes how likely continuations, texts or token ids, are after a context: `scores`, in their order.

        Args:
            continuations: at most 128; each is scored separately.
            context: a text if they are texts, otherwise token ids; None scores whole texts.
            timeout_s: deadline.
            metadata: of this call, such as `traceparent`.
            arguments: fields of ScoreRequest, by name.

        Raises:
            FissileError: the request is refused or has failed, or no router answers.
        """
        return self.ask(score(continuations, context, arguments), timeout_s, metadata)

    def verify(
        self, receipt: Receipt | pb.ReplayRequest, *, worker_id: str = "", timeout_s: float | None = ANSWER_TIMEOUT_S
    ) -> Verification:
        """Has the request of a receipt run again, and the answer compared with it to the bit.

        Args:
            receipt: of an answer of this library, or the proof that another has kept.
            worker_id: runs it on this worker; "" is any of the numerics class.
            timeout_s: deadline.

        Raises:
            ReceiptError: the token ids are not of the receipt's answer.
            FissileError: it cannot run, or no router answers.
        """
        begun = begin_verification(receipt, worker_id)
        return begun if isinstance(begun, Verification) else self.ask(begun, timeout_s)

    def stub(self, target: str) -> Any:
        """Stub of a router, on a channel that is kept.

        Raises:
            FissileError: the client has been closed.
        """
        with self._lock:
            if self._closed.is_set():
                raise cancelled()
            if target not in self._channels:
                self._channels[target] = self._channel(target)
            return InferenceServiceStub(self._channels[target])

    @contextlib.contextmanager
    def cancelled_if_closed(self) -> Iterator[None]:
        """Puts into words that a channel was closed between its stub and its call.

        Raises:
            FissileError: it was.
        """
        try:
            yield
        except ValueError:
            if self._closed.is_set():
                raise cancelled() from None
            raise

    @property
    def _is_closed(self) -> bool:
        return self._closed.is_set()

    def _begin(self, attempts: StreamAttempts) -> Stream:
        calls = _SyncCalls(self, attempts)
        with self._lock:
            self._running.add(calls)
        return Stream(calls)

    def _channel(self, target: str) -> grpc.Channel:
        credentials, options = self.connection.credentials, self.connection.channel_options
        if credentials is None:
            return grpc.insecure_channel(target, options=options)
        return grpc.secure_channel(target, credentials, options=options)

    def ask(self, asked: Unary[T], timeout_s: float | None, metadata: Metadata = ()) -> T:
        """Makes a call with one answer, until it has worked.

        Raises:
            FissileError: it has failed for good.
        """
        attempts = self._attempts(asked, timeout_s, metadata)
        while True:
            call = attempts.next(time.monotonic())
            method = getattr(self.stub(call.target), call.method)
            try:
                with self.cancelled_if_closed():
                    return asked.made_of(
                        method(call.request, timeout=call.timeout_s, metadata=call.sent_metadata(time.time()))
                    )
            except grpc.RpcError as error:
                if self._closed.is_set():
                    raise cancelled() from None
                wait_s = attempts.failed(error_of(error), time.monotonic())
            if self._closed.wait(wait_s):
                raise cancelled()
