"""The client for programs that wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
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
from fissile.client.errors import FissileError, cancelled, error_of
from fissile.client.progress import Progress, Request
from fissile.client.retries import Retries
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub


class Stream:
    """Events of the answers to one request; goes on at another router by itself where the stream breaks.

    Iterate over it, or leave it early: leaving its `with` block, or `cancel`, frees what it holds.

    Attributes:
        progress: what has come.
    """

    def __init__(self, client: Client, request: Request, timeout_s: float | None) -> None:
        self.progress = Progress(request)
        self._client = client
        self._request = request
        self._end = None if timeout_s is None else time.monotonic() + timeout_s
        self._retries = client.retries()
        self._call: Any = None
        self._is_cancelled = False
        self._events = self._run()

    def __enter__(self) -> Stream:
        """Begins nothing: the call begins with the first event that is asked for."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Cancels what is left."""
        self.cancel()

    def __iter__(self) -> Iterator[Event]:
        """The events, in order."""
        return self

    def __next__(self) -> Event:
        """Waits for the next event.

        Raises:
            FissileError: the call has failed, and can not go on, or has been cancelled.
        """
        return next(self._events)

    def cancel(self) -> None:
        """Ends the call, on any thread; what it held is free."""
        self._is_cancelled = True
        if self._call is not None:
            self._call.cancel()

    def result(self) -> Result:
        """Reads to the end; the answers from their beginning.

        Raises:
            FissileError: the call has failed, and can not go on.
        """
        for _ in self:
            pass
        return result_of(self.progress)

    def _run(self) -> Iterator[Event]:
        request = self._request
        while True:
            try:
                for part in self._open(request):
                    self._retries.progress()
                    self.progress.add(part)
                    yield from events_of(part)
                return
            except grpc.RpcError as error:
                if self.progress.is_whole:
                    return
                if self._is_cancelled:
                    raise cancelled() from None
                wait_s = self._retries.failed(error_of(error), time.monotonic())
                if wait_s is None or self._is_late(wait_s):
                    raise error_of(error) from None
            finally:
                if self._call is not None:
                    self._call.cancel()
            time.sleep(wait_s)
            request = self.progress.going_on()

    def _open(self, request: Request) -> Any:
        stub = self._client.stub(self._retries.target)
        method = stub.Chat if isinstance(request, pb.ChatRequest) else stub.Generate
        left_s = None if self._end is None else max(0.001, self._end - time.monotonic())
        self._call = method(request, timeout=left_s, metadata=self._client.connection.call_metadata)
        # Another thread may have cancelled before it could see this call.
        if self._is_cancelled:
            raise cancelled()
        return self._call

    def _is_late(self, wait_s: float) -> bool:
        return self._end is not None and time.monotonic() + wait_s >= self._end


class Client:
    """Calls routers of one fleet. May be used by several threads.

    Args:
        targets: addresses of routers, `HOST:PORT`, or one of them: streams that break go on at the next one.
        give_up_s: how long a call is made again while nothing comes; 0 makes no call again.
        connection: further options of `Connection`, such as `api_key` and `tls_ca`.
    """

    def __init__(self, targets: str | Sequence[str], *, give_up_s: float = 30.0, **connection: Any) -> None:
        self.connection = Connection([targets] if isinstance(targets, str) else [*targets], **connection)
        self._give_up_s = give_up_s
        self._channels: dict[str, grpc.Channel] = {}
        self._is_closed = False
        self._lock = threading.Lock()
        self._next = 0

    def __enter__(self) -> Client:
        """Connects when something is asked."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the connections."""
        self.close()

    def close(self) -> None:
        """Closes the connections for good; calls that run are cancelled."""
        with self._lock:
            self._is_closed = True
            for channel in self._channels.values():
                channel.close()
            self._channels.clear()

    def chat_stream(self, messages: Messages, *, timeout_s: float | None = 600.0, **arguments: Any) -> Stream:
        """Answers a conversation.

        Args:
            messages: a text, or messages with `role` and `content`.
            timeout_s: deadline of the whole answer, later attempts included; None is no deadline.
            arguments: fields of SamplingParams and of ChatRequest, by name.
        """
        return Stream(self, chat_request(messages, *split(arguments)), timeout_s)

    def generate_stream(self, prompt: Prompt, *, timeout_s: float | None = 600.0, **arguments: Any) -> Stream:
        """Continues a prompt, a text or token ids; arguments as of `chat_stream`."""
        return Stream(self, generate_request(prompt, *split(arguments)), timeout_s)

    def chat(self, messages: Messages, *, timeout_s: float | None = 600.0, **arguments: Any) -> Result:
        """Answers a conversation, whole; arguments as of `chat_stream`.

        Raises:
            FissileError: the call has failed, and can not go on.
        """
        return self.chat_stream(messages, timeout_s=timeout_s, **arguments).result()

    def generate(self, prompt: Prompt, *, timeout_s: float | None = 600.0, **arguments: Any) -> Result:
        """Continues a prompt, whole; arguments as of `chat_stream`.

        Raises:
            FissileError: the call has failed, and can not go on.
        """
        return self.generate_stream(prompt, timeout_s=timeout_s, **arguments).result()

    def models(self, *, timeout_s: float = 60.0) -> list[pb.Model]:
        """The models that can be asked for.

        Raises:
            FissileError: no router answers.
        """
        asked = pb.ListModelsRequest()
        return [*self._once(lambda stub: stub.ListModels, asked, timeout_s).models]

    def count_tokens(self, messages: Messages, *, model: str = "", timeout_s: float = 60.0) -> int:
        """Prompt tokens of a conversation.

        Raises:
            FissileError: the conversation is refused, or no router answers.
        """
        asked = pb.CountTokensRequest(chat=chat_request(messages, {}, {"model": model}))
        return int(self._once(lambda stub: stub.CountTokens, asked, timeout_s).prompt_tokens)

    def retries(self) -> Retries:
        """Attempts of a new call, which begin at the next router."""
        with self._lock:
            self._next += 1
            return Retries(self.connection.targets, self._give_up_s, self._next - 1)

    def stub(self, target: str) -> Any:
        """Stub of a router, on a channel that is kept.

        Raises:
            FissileError: the client has been closed.
        """
        with self._lock:
            if self._is_closed:
                raise cancelled()
            if target not in self._channels:
                self._channels[target] = self._channel(target)
            return InferenceServiceStub(self._channels[target])

    def _channel(self, target: str) -> grpc.Channel:
        credentials = self.connection.credentials
        if credentials is None:
            return grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
        return grpc.secure_channel(target, credentials, options=CHANNEL_OPTIONS)

    def _once(self, method: Callable[[Any], Any], request: Any, timeout_s: float) -> Any:
        retries, end = self.retries(), time.monotonic() + timeout_s
        while True:
            left_s = max(0.001, end - time.monotonic())
            try:
                return method(self.stub(retries.target))(
                    request, timeout=left_s, metadata=self.connection.call_metadata
                )
            except grpc.RpcError as error:
                failure: FissileError = error_of(error)
                wait_s = retries.failed(failure, time.monotonic())
                if wait_s is None or time.monotonic() + wait_s >= end:
                    raise failure from None
            time.sleep(wait_s)
