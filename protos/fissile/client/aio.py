"""The client for programs on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc

from fissile.client.calls import (
    Event,
    Messages,
    Prompt,
    Result,
    chat_request,
    events_of,
    generate_request,
    result_of,
    split,
)
from fissile.client.connections import Connection, Metadata
from fissile.client.errors import FissileError, again, cancelled, error_of
from fissile.client.progress import Progress, Request
from fissile.client.retries import Retries
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub


class _Attempts:
    """Calls of one stream, one after the other.

    Knows nothing of its `AsyncStream`: of one that nobody holds any more the loop ends the generator `events`, which
    cancels the call.
    """

    def __init__(self, client: AsyncClient, request: Request, timeout_s: float | None, metadata: Metadata) -> None:
        self.progress = Progress(request)
        self.trailing_metadata: Mapping[str, str | bytes] = {}
        self.num_calls = 0
        self._client = client
        self._request = request
        self._metadata = client.connection.metadata_of(metadata)
        self._end = None if timeout_s is None else time.monotonic() + timeout_s
        self._retries = client.retries()
        self._call: Any = None
        self._cancelled = asyncio.Event()

    def cancel(self) -> None:
        """Ends the call."""
        self._cancelled.set()
        if self._call is not None:
            self._call.cancel()

    async def events(self) -> AsyncIterator[Event]:
        """Events of all attempts; begins the first one."""
        request = self._request
        while True:
            try:
                async for part in self._open(request):
                    self._retries.progress()
                    self.progress.add(part)
                    for event in events_of(part):
                        yield event
                self.trailing_metadata = dict(await self._call.trailing_metadata() or ())
                return
            except grpc.aio.AioRpcError as error:
                if self.progress.is_whole:
                    return
                wait_s = self._retries.failed(error_of(error), time.monotonic())
                if wait_s is None or self._is_late(wait_s) or not self.progress.may_go_on:
                    raise error_of(error) from None
            except asyncio.CancelledError:
                if _is_task_cancelled():
                    raise
                # gRPC's word for a call that `cancel` or `AsyncClient.close` has ended; the task that reads goes on.
                raise cancelled() from None
            finally:
                if self._call is not None:
                    self._call.cancel()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._cancelled.wait(), wait_s)
            request = self.progress.going_on()

    def _open(self, request: Request) -> Any:
        self.num_calls += 1
        if self._cancelled.is_set():
            raise cancelled()
        stub = self._client.stub(self._retries.target)
        method = stub.Chat if isinstance(request, pb.ChatRequest) else stub.Generate
        left_s = None if self._end is None else max(0.001, self._end - time.monotonic())
        self._call = method(request, timeout=left_s, metadata=self._metadata)
        return self._call

    def _is_late(self, wait_s: float) -> bool:
        return self._end is not None and time.monotonic() + wait_s >= self._end


class AsyncStream:
    """Events of the answers to one request; goes on at another router by itself where the stream breaks.

    Iterate over it once. Leaving its `async with` block, cancelling the task that reads it, `cancel`, or dropping it
    (as `break` does where nothing else holds it) frees what it holds.

    Attributes:
        progress: what has come.
    """

    def __init__(self, attempts: _Attempts) -> None:
        self.progress = attempts.progress
        self._attempts = attempts
        self._events = attempts.events()
        # Why it has ended before its end: one that is asked again must not look whole.
        self._failure: FissileError | None = None

    async def __aenter__(self) -> AsyncStream:
        """Begins nothing: the call begins with the first event that is asked for."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Cancels what is left."""
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

    @property
    def num_calls(self) -> int:
        """Calls that the stream has taken so far: 1 for one that never broke."""
        return self._attempts.num_calls

    @property
    def trailing_metadata(self) -> Mapping[str, str | bytes]:
        """Trailing metadata of a stream that has ended with OK, such as `traceresponse`; empty before."""
        return self._attempts.trailing_metadata

    def cancel(self) -> None:
        """Ends the call; what it held is free."""
        self._attempts.cancel()

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


class AsyncClient:
    """Calls routers of one fleet, on one event loop.

    Args:
        targets: addresses of routers, `HOST:PORT`, or one of them: streams that break go on at the next one.
        give_up_s: how long a call is made again while nothing comes; 0 makes no call again.
        connection: further options of `Connection`, such as `api_key` and `tls_ca`.
    """

    def __init__(self, targets: str | Sequence[str], *, give_up_s: float = 30.0, **connection: Any) -> None:
        self.connection = Connection([targets] if isinstance(targets, str) else [*targets], **connection)
        self._give_up_s = give_up_s
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._running = weakref.WeakSet[_Attempts]()
        self._is_closed = False
        self._next = 0

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
        self._is_closed = True
        for attempts in [*self._running]:
            attempts.cancel()
        while self._channels:
            await self._channels.popitem()[1].close()

    def chat_stream(
        self, messages: Messages, *, timeout_s: float | None = 600.0, metadata: Metadata = (), **arguments: Any
    ) -> AsyncStream:
        """Answers a conversation; arguments as of `Client.chat_stream`."""
        return self._stream(chat_request(messages, *split(arguments)), timeout_s, metadata)

    def generate_stream(
        self, prompt: Prompt, *, timeout_s: float | None = 600.0, metadata: Metadata = (), **arguments: Any
    ) -> AsyncStream:
        """Continues a prompt, a text or token ids; arguments as of `Client.chat_stream`."""
        return self._stream(generate_request(prompt, *split(arguments)), timeout_s, metadata)

    async def chat(self, messages: Messages, **arguments: Any) -> Result:
        """Answers a conversation, whole; arguments as of `Client.chat_stream`.

        Raises:
            FissileError: the call has failed, and cannot go on.
        """
        return await self.chat_stream(messages, **arguments).result()

    async def generate(self, prompt: Prompt, **arguments: Any) -> Result:
        """Continues a prompt, whole; arguments as of `Client.chat_stream`.

        Raises:
            FissileError: the call has failed, and cannot go on.
        """
        return await self.generate_stream(prompt, **arguments).result()

    async def models(self, *, timeout_s: float = 60.0) -> list[pb.Model]:
        """The models that can be asked for.

        Raises:
            FissileError: no router answers.
        """
        return [*(await self._once("ListModels", pb.ListModelsRequest(), timeout_s)).models]

    async def model(self, name: str = "", *, timeout_s: float = 60.0) -> pb.Model:
        """A model; "" is the only one that is served.

        Raises:
            FissileError: there is none of this name, or no router answers.
        """
        found: pb.Model = (await self._once("GetModel", pb.GetModelRequest(model=name), timeout_s)).model
        return found

    async def count_tokens(self, messages: Messages, *, model: str = "", timeout_s: float = 60.0) -> int:
        """Prompt tokens of a conversation.

        Raises:
            FissileError: the conversation is refused, or no router answers.
        """
        asked = pb.CountTokensRequest(chat=chat_request(messages, {}, {"model": model}))
        return int((await self._once("CountTokens", asked, timeout_s)).prompt_tokens)

    def retries(self) -> Retries:
        """Attempts of a new call, which begin at the next router."""
        self._next += 1
        return Retries(self.connection.targets, self._give_up_s, self._next - 1)

    def stub(self, target: str) -> Any:
        """Stub of a router, on a channel that is kept.

        Raises:
            FissileError: the client has been closed.
        """
        if self._is_closed:
            raise cancelled()
        if target not in self._channels:
            self._channels[target] = self._channel(target)
        return InferenceServiceStub(self._channels[target])

    def _stream(self, request: Request, timeout_s: float | None, metadata: Metadata) -> AsyncStream:
        attempts = _Attempts(self, request, timeout_s, metadata)
        self._running.add(attempts)
        return AsyncStream(attempts)

    def _channel(self, target: str) -> grpc.aio.Channel:
        credentials, options = self.connection.credentials, self.connection.channel_options
        if credentials is None:
            return grpc.aio.insecure_channel(target, options=options)
        return grpc.aio.secure_channel(target, credentials, options=options)

    async def _once(self, method: str, request: Any, timeout_s: float) -> Any:
        retries, end = self.retries(), time.monotonic() + timeout_s
        metadata = self.connection.metadata_of()
        while True:
            left_s = max(0.001, end - time.monotonic())
            try:
                return await getattr(self.stub(retries.target), method)(request, timeout=left_s, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                wait_s = retries.failed(error_of(error), time.monotonic())
                if wait_s is None or time.monotonic() + wait_s >= end:
                    raise error_of(error) from None
            except asyncio.CancelledError:
                if _is_task_cancelled():
                    raise
                # gRPC's word for a call that `close` has ended.
                raise cancelled() from None
            await asyncio.sleep(wait_s)
