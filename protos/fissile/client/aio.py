"""The client for programs on an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
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
from fissile.client.connections import CHANNEL_OPTIONS, Connection
from fissile.client.errors import cancelled, error_of
from fissile.client.progress import Progress, Request
from fissile.client.retries import Retries
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub


class AsyncStream:
    """Events of the answers to one request; goes on at another router by itself where the stream breaks.

    Iterate over it once. Leaving its `async with` block, cancelling the task that reads it, or `cancel` frees what it
    holds.

    Attributes:
        progress: what has come.
    """

    def __init__(self, client: AsyncClient, request: Request, timeout_s: float | None) -> None:
        self.progress = Progress(request)
        self._client = client
        self._request = request
        self._end = None if timeout_s is None else time.monotonic() + timeout_s
        self._retries = client.retries()
        self._call: Any = None
        self._is_cancelled = False
        self._events = self._run()

    async def __aenter__(self) -> AsyncStream:
        """Begins nothing: the call begins with the first event that is asked for."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Cancels what is left."""
        self.cancel()

    def __aiter__(self) -> AsyncIterator[Event]:
        """The events, in order.

        Raises (on iteration):
            FissileError: the call has failed, and can not go on, or has been cancelled.
        """
        return self._events

    def cancel(self) -> None:
        """Ends the call; what it held is free."""
        self._is_cancelled = True
        if self._call is not None:
            self._call.cancel()

    async def result(self) -> Result:
        """Reads to the end; the answers from their beginning.

        Raises:
            FissileError: the call has failed, and can not go on.
        """
        async for _ in self:
            pass
        return result_of(self.progress)

    async def _run(self) -> AsyncIterator[Event]:
        request = self._request
        while True:
            try:
                async for part in self._open(request):
                    self._retries.progress()
                    self.progress.add(part)
                    for event in events_of(part):
                        yield event
                return
            except grpc.aio.AioRpcError as error:
                if self.progress.is_whole:
                    return
                wait_s = self._retries.failed(error_of(error), time.monotonic())
                if wait_s is None or self._is_late(wait_s):
                    raise error_of(error) from None
            except asyncio.CancelledError:
                if _is_task_cancelled():
                    raise
                # gRPC's word for a call that `cancel` or `AsyncClient.close` has ended; the task that reads goes on.
                raise cancelled() from None
            finally:
                if self._call is not None:
                    self._call.cancel()
            await asyncio.sleep(wait_s)
            request = self.progress.going_on()

    def _open(self, request: Request) -> Any:
        if self._is_cancelled:
            raise cancelled()
        stub = self._client.stub(self._retries.target)
        method = stub.Chat if isinstance(request, pb.ChatRequest) else stub.Generate
        left_s = None if self._end is None else max(0.001, self._end - time.monotonic())
        self._call = method(request, timeout=left_s, metadata=self._client.connection.call_metadata)
        return self._call

    def _is_late(self, wait_s: float) -> bool:
        return self._end is not None and time.monotonic() + wait_s >= self._end


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
        while self._channels:
            await self._channels.popitem()[1].close()

    def chat_stream(self, messages: Messages, *, timeout_s: float | None = 600.0, **arguments: Any) -> AsyncStream:
        """Answers a conversation; arguments as of `Client.chat_stream`."""
        return AsyncStream(self, chat_request(messages, *split(arguments)), timeout_s)

    def generate_stream(self, prompt: Prompt, *, timeout_s: float | None = 600.0, **arguments: Any) -> AsyncStream:
        """Continues a prompt, a text or token ids; arguments as of `Client.chat_stream`."""
        return AsyncStream(self, generate_request(prompt, *split(arguments)), timeout_s)

    async def chat(self, messages: Messages, *, timeout_s: float | None = 600.0, **arguments: Any) -> Result:
        """Answers a conversation, whole.

        Raises:
            FissileError: the call has failed, and can not go on.
        """
        return await self.chat_stream(messages, timeout_s=timeout_s, **arguments).result()

    async def generate(self, prompt: Prompt, *, timeout_s: float | None = 600.0, **arguments: Any) -> Result:
        """Continues a prompt, whole.

        Raises:
            FissileError: the call has failed, and can not go on.
        """
        return await self.generate_stream(prompt, timeout_s=timeout_s, **arguments).result()

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

    def _channel(self, target: str) -> grpc.aio.Channel:
        credentials = self.connection.credentials
        if credentials is None:
            return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(target, credentials, options=CHANNEL_OPTIONS)
