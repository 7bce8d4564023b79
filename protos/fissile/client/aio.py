"""The client for programs on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
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


class _AsyncCalls:
    """The calls of one stream, one at a time.

    It does not refer to its `AsyncStream`: when that is dropped, the loop ends the generator `events`, which cancels
    the call.
    """

    def __init__(self, client: AsyncClient, attempts: StreamAttempts) -> None:
        self.attempts = attempts
        self.trailing_metadata: Mapping[str, str | bytes] = {}
        self._client = client
        self._call: Any = None
        self._cancelled = asyncio.Event()

    def cancel(self) -> None:
        """Ends the call."""
        self._cancelled.set()
        if self._call is not None:
            self._call.cancel()

    async def events(self) -> AsyncIterator[Event]:
        """Events of all attempts; begins the first one."""
        while True:
            try:
                async for part in self._open():
                    for event in self.attempts.received(part):
                        yield event
                self.trailing_metadata = dict(await self._call.trailing_metadata() or ())
                break
            except grpc.aio.AioRpcError as error:
                if self.attempts.progress.is_whole:
                    break
                wait_s = self.attempts.failed(error_of(error), time.monotonic())
            except asyncio.CancelledError:
                if _is_task_cancelled():
                    raise
                # gRPC raises this for a call that `cancel` or `AsyncClient.close` has ended; the reading task
                # continues.
                raise cancelled() from None
            finally:
                if self._call is not None:
                    self._call.cancel()
            await _wait(self._cancelled, wait_s)
        await self._check_receipts()

    async def _check_receipts(self) -> None:
        progress, left_s = self.attempts.progress, self.attempts.left_s(time.monotonic())
        timeout_s = QUESTION_TIMEOUT_S if left_s is None else min(QUESTION_TIMEOUT_S, left_s)
        try:
            told = [await self._client.ask(question, timeout_s) for question in progress.questions]
        except FissileError:
            # The answers are whole, and their receipts are of them: no router says more.
            return
        progress.check_request(told)

    def _open(self) -> Any:
        call = self.attempts.next(time.monotonic())
        if self._cancelled.is_set():
            raise cancelled()
        method = getattr(self._client.stub(call.target), call.method)
        self._call = method(call.request, timeout=call.timeout_s, metadata=call.sent_metadata(time.time()))
        return self._call


class AsyncStream(BaseStream):
    """Events of the answers to one request. If the stream breaks, it continues at another router.

    Iterate over it once. Leaving its `async with` block, cancelling the task that reads it, `cancel`, or dropping the
    last reference (as `break` may) frees its resources.

    Examples:
        ```python
        async with AsyncClient("10.0.0.1:50051") as client, client.chat_stream("Tell me a story.", seed=7) as stream:
            async for event in stream:
                if isinstance(event, Delta):
                    print(event.text, end="", flush=True)
        ```

    Attributes:
        progress: the answers so far.
    """

    def __init__(self, calls: _AsyncCalls) -> None:
        super().__init__(calls)
        self._events = calls.events()
        # Why it has ended before its end: one that is asked again must not look whole.
        self._failure: FissileError | None = None

    async def __aenter__(self) -> AsyncStream:
        """Does not start the call: it starts with the first event that is read."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Cancels the call if it has not ended."""
        self.cancel()

    def __aiter__(self) -> AsyncIterator[Event]:
        """The events, in order."""
        return self

    async def __anext__(self) -> Event:
        """Waits for the next event.

        Raises:
            FissileError: the call has failed, and cannot go on, or has been cancelled.
        """
        try:
            return await anext(self._events)
        except StopAsyncIteration:
            if self._failure is not None:
                raise again(self._failure) from None
            raise
        except BaseException as error:
            self._failure = again(error)
            raise

    async def result(self) -> Result:
        """Reads to the end; the answers from their beginning.

        Raises:
            FissileError: the call has failed, and cannot go on.
        """
        async for _ in self:
            pass
        return result_of(self.progress)


def _is_task_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _wait(end: asyncio.Event, wait_s: float) -> None:
    """Waits `wait_s` seconds.

    Raises:
        FissileError: `end` was set.
    """
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(end.wait(), wait_s)
        raise cancelled()


class AsyncClient(BaseClient[AsyncStream]):
    """Calls routers of one fleet, on one event loop at a time; after that loop has ended, on another one.

    Examples:
        ```python
        async with AsyncClient(["10.0.0.1:50051", "10.0.0.2:50051"]) as client:
            stories = [client.chat("Tell me a story.", seed=seed, max_tokens=32) for seed in range(4)]
            for result in await asyncio.gather(*stories):
                print(result.text)
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
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._running = weakref.WeakSet[_AsyncCalls]()
        self._closed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> AsyncClient:
        """Connects when something is asked."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the connections."""
        await self.close()

    async def close(self) -> None:
        """Closes the connections for good; calls that run are cancelled."""
        self._bind()
        self._closed.set()
        for calls in [*self._running]:
            calls.cancel()
        while self._channels:
            await self._channels.popitem()[1].close()

    @spelled_out(ChatArguments)
    async def chat(self, messages: Messages, **arguments: Unpack[ChatArguments]) -> Result:
        """The whole answer to a conversation; arguments as for `chat_stream`.

        Raises:
            FissileError: the call has failed and cannot continue.
        """
        return await self.chat_stream(messages, **arguments).result()

    @spelled_out(GenerateArguments)
    async def generate(self, prompt: Prompt, **arguments: Unpack[GenerateArguments]) -> Result:
        """The whole continuation of a prompt; arguments as for `chat_stream`.

        Raises:
            FissileError: the call has failed and cannot continue.
        """
        return await self.generate_stream(prompt, **arguments).result()

    async def models(self, *, timeout_s: float | None = QUESTION_TIMEOUT_S, metadata: Metadata = ()) -> list[pb.Model]:
        """The models that can be asked for.

        Raises:
            FissileError: no router answers.
        """
        return await self.ask(list_models(), timeout_s, metadata)

    async def model(
        self, name: str = "", *, timeout_s: float | None = QUESTION_TIMEOUT_S, metadata: Metadata = ()
    ) -> pb.Model:
        """Describes a model; "" means the only one that is served.

        Raises:
            FissileError: the name is unknown, or no router answers.
        """
        return await self.ask(get_model(name), timeout_s, metadata)

    async def count_tokens(
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
        return await self.ask(count_tokens(messages, model), timeout_s, metadata)

    async def tokenize(
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
        return await self.ask(tokenize(text, model), timeout_s, metadata)

    async def detokenize(
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
        return await self.ask(asked, timeout_s, metadata)

    @spelled_out(PromptArguments)
    async def render_prompt(
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
        return await self.ask(render_prompt(messages, arguments), timeout_s, metadata)

    @spelled_out(EmbedArguments)
    async def embed(
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
        return await self.ask(embed(inputs, arguments), timeout_s, metadata)

    @spelled_out(RerankArguments)
    async def rerank(
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
        return await self.ask(rerank(query, documents, arguments), timeout_s, metadata)

    @spelled_out(ScoreArguments)
    async def score(
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
        return await self.ask(score(continuations, context, arguments), timeout_s, metadata)

    async def verify(
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
        return begun if isinstance(begun, Verification) else await self.ask(begun, timeout_s)

    def stub(self, target: str) -> Any:
        """Stub of a router, on its channel.

        Raises:
            FissileError: the client has been closed.
            RuntimeError: the client is in use on another running event loop.
        """
        return InferenceServiceStub(self.channel(target))

    def channel(self, target: str) -> grpc.aio.Channel:
        """Channel to a router, for calls of other services; the client keeps and closes it.

        Raises:
            FissileError: the client has been closed.
            RuntimeError: the client is in use on another running event loop.
        """
        self._bind()
        if self._closed.is_set():
            raise cancelled()
        if target not in self._channels:
            self._channels[target] = self._open_channel(target)
        return self._channels[target]

    def _bind(self) -> None:
        """Binds the client to the current event loop, and drops the channels of an earlier loop that has ended.

        Raises:
            RuntimeError: the client is in use on another running event loop.
        """
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        if self._loop is not None and self._loop.is_running():
            raise RuntimeError("this AsyncClient is at work on another event loop; make one for each loop")
        self._loop = loop
        self._channels.clear()
        if not self._closed.is_set():
            self._closed = asyncio.Event()

    @property
    def _is_closed(self) -> bool:
        return self._closed.is_set()

    def _begin(self, attempts: StreamAttempts) -> AsyncStream:
        calls = _AsyncCalls(self, attempts)
        self._running.add(calls)
        return AsyncStream(calls)

    def _open_channel(self, target: str) -> grpc.aio.Channel:
        credentials, options = self.connection.credentials, self.connection.channel_options
        if credentials is None:
            return grpc.aio.insecure_channel(target, options=options)
        return grpc.aio.secure_channel(target, credentials, options=options)

    async def ask(self, asked: Unary[T], timeout_s: float | None, metadata: Metadata = ()) -> T:
        """Makes a call with one answer, until it has worked.

        Raises:
            FissileError: it has failed for good.
        """
        attempts = self._attempts(asked, timeout_s, metadata)
        while True:
            call = attempts.next(time.monotonic())
            method = getattr(self.stub(call.target), call.method)
            try:
                return asked.made_of(
                    await method(call.request, timeout=call.timeout_s, metadata=call.sent_metadata(time.time()))
                )
            except grpc.aio.AioRpcError as error:
                wait_s = attempts.failed(error_of(error), time.monotonic())
            except asyncio.CancelledError:
                if _is_task_cancelled():
                    raise
                # gRPC's word for a call that `close` has ended.
                raise cancelled() from None
            await _wait(self._closed, wait_s)
