"""The client for programs that wait."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
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

    Knows nothing of its `Stream`: one that nobody holds any more is gone at once, and with it the generator `events`,
    which cancels the call as it ends.
    """

    def __init__(self, client: Client, request: Request, timeout_s: float | None, metadata: Metadata) -> None:
        self.progress = Progress(request)
        self.trailing_metadata: Mapping[str, str | bytes] = {}
        self.num_calls = 0
        self._client = client
        self._request = request
        self._metadata = client.connection.metadata_of(metadata)
        self._end = None if timeout_s is None else time.monotonic() + timeout_s
        self._retries = client.retries()
        self._call: Any = None
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Ends the call, on any thread."""
        self._cancelled.set()
        if self._call is not None:
            self._call.cancel()

    def events(self) -> Iterator[Event]:
        """Events of all attempts; begins the first one."""
        request = self._request
        while True:
            try:
                for part in self._open(request):
                    self._retries.progress()
                    self.progress.add(part)
                    yield from events_of(part)
                self.trailing_metadata = dict(self._call.trailing_metadata() or ())
                return
            except grpc.RpcError as error:
                if self.progress.is_whole:
                    return
                if self._cancelled.is_set():
                    raise cancelled() from None
                wait_s = self._retries.failed(error_of(error), time.monotonic())
                if wait_s is None or self._is_late(wait_s) or not self.progress.may_go_on:
                    raise error_of(error) from None
            finally:
                if self._call is not None:
                    self._call.cancel()
            if self._cancelled.wait(wait_s):
                raise cancelled()
            request = self.progress.going_on()

    def _open(self, request: Request) -> Any:
        self.num_calls += 1
        stub = self._client.stub(self._retries.target)
        method = stub.Chat if isinstance(request, pb.ChatRequest) else stub.Generate
        left_s = None if self._end is None else max(0.001, self._end - time.monotonic())
        with self._client.cancelled_if_closed():
            self._call = method(request, timeout=left_s, metadata=self._metadata)
        # Another thread may have cancelled before it could see this call.
        if self._cancelled.is_set():
            raise cancelled()
        return self._call

    def _is_late(self, wait_s: float) -> bool:
        return self._end is not None and time.monotonic() + wait_s >= self._end


class Stream:
    """Events of the answers to one request; goes on at another router by itself where the stream breaks.

    Iterate over it once, on one thread. Leaving its `with` block, `cancel`, or dropping it (as `break` does where
    nothing else holds it) frees what it holds.

    Attributes:
        progress: what has come.
    """

    def __init__(self, attempts: _Attempts) -> None:
        self.progress = attempts.progress
        self._attempts = attempts
        self._events = attempts.events()
        # Why it has ended before its end: one that is asked again must not look whole.
        self._failure: FissileError | None = None

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

    @property
    def num_calls(self) -> int:
        """Calls that the stream has taken so far: 1 for one that never broke."""
        return self._attempts.num_calls

    @property
    def trailing_metadata(self) -> Mapping[str, str | bytes]:
        """Trailing metadata of a stream that has ended with OK, such as `traceresponse`; empty before."""
        return self._attempts.trailing_metadata

    def cancel(self) -> None:
        """Ends the call, on any thread; what it held is free."""
        self._attempts.cancel()

    def result(self) -> Result:
        """Reads to the end; the answers from their beginning.

        Raises:
            FissileError: the call has failed, and cannot go on.
        """
        for _ in self:
            pass
        return result_of(self.progress)


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
        self._running = weakref.WeakSet[_Attempts]()
        self._closed = threading.Event()
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
        """Closes the connections for good; calls that run are cancelled, on whichever threads."""
        with self._lock:
            self._closed.set()
            running, channels = [*self._running], [*self._channels.values()]
            self._channels.clear()
        for attempts in running:
            attempts.cancel()
        for channel in channels:
            channel.close()

    def chat_stream(
        self, messages: Messages, *, timeout_s: float | None = 600.0, metadata: Metadata = (), **arguments: Any
    ) -> Stream:
        """Answers a conversation.

        Args:
            messages: a text, or messages with `role` and `content`.
            timeout_s: deadline of the whole answer, later attempts included; None is no deadline.
            metadata: of this call, such as `traceparent`.
            arguments: fields of SamplingParams and of ChatRequest, by name.
        """
        return self._stream(chat_request(messages, *split(arguments)), timeout_s, metadata)

    def generate_stream(
        self, prompt: Prompt, *, timeout_s: float | None = 600.0, metadata: Metadata = (), **arguments: Any
    ) -> Stream:
        """Continues a prompt, a text or token ids; arguments as of `chat_stream`."""
        return self._stream(generate_request(prompt, *split(arguments)), timeout_s, metadata)

    def chat(self, messages: Messages, **arguments: Any) -> Result:
        """Answers a conversation, whole; arguments as of `chat_stream`.

        Raises:
            FissileError: the call has failed, and cannot go on.
        """
        return self.chat_stream(messages, **arguments).result()

    def generate(self, prompt: Prompt, **arguments: Any) -> Result:
        """Continues a prompt, whole; arguments as of `chat_stream`.

        Raises:
            FissileError: the call has failed, and cannot go on.
        """
        return self.generate_stream(prompt, **arguments).result()

    def models(self, *, timeout_s: float = 60.0) -> list[pb.Model]:
        """The models that can be asked for.

        Raises:
            FissileError: no router answers.
        """
        return [*self._once("ListModels", pb.ListModelsRequest(), timeout_s).models]

    def model(self, name: str = "", *, timeout_s: float = 60.0) -> pb.Model:
        """A model; "" is the only one that is served.

        Raises:
            FissileError: there is none of this name, or no router answers.
        """
        found: pb.Model = self._once("GetModel", pb.GetModelRequest(model=name), timeout_s).model
        return found

    def count_tokens(self, messages: Messages, *, model: str = "", timeout_s: float = 60.0) -> int:
        """Prompt tokens of a conversation.

        Raises:
            FissileError: the conversation is refused, or no router answers.
        """
        asked = pb.CountTokensRequest(chat=chat_request(messages, {}, {"model": model}))
        return int(self._once("CountTokens", asked, timeout_s).prompt_tokens)

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

    def _stream(self, request: Request, timeout_s: float | None, metadata: Metadata) -> Stream:
        attempts = _Attempts(self, request, timeout_s, metadata)
        with self._lock:
            self._running.add(attempts)
        return Stream(attempts)

    def _channel(self, target: str) -> grpc.Channel:
        credentials, options = self.connection.credentials, self.connection.channel_options
        if credentials is None:
            return grpc.insecure_channel(target, options=options)
        return grpc.secure_channel(target, credentials, options=options)

    def _once(self, method: str, request: Any, timeout_s: float) -> Any:
        retries, end = self.retries(), time.monotonic() + timeout_s
        metadata = self.connection.metadata_of()
        while True:
            left_s = max(0.001, end - time.monotonic())
            call: Callable[..., Any] = getattr(self.stub(retries.target), method)
            try:
                with self.cancelled_if_closed():
                    return call(request, timeout=left_s, metadata=metadata)
            except grpc.RpcError as error:
                wait_s = retries.failed(error_of(error), time.monotonic())
                if wait_s is None or time.monotonic() + wait_s >= end:
                    raise error_of(error) from None
            if self._closed.wait(wait_s):
                raise cancelled()
