"""Runs the calls that a translator has made of a request, and writes what its encoder makes of their events.

A door is a pure translator with two halves. `parse(body, created)` makes an `AnswerPlan`: the calls of the client
library, and an `AnswerEncoder` for their events. The runner does the rest: status and headers, silence, slow readers,
disconnects, deadlines and failures. Until the first event, a failure is a status; after it, one event of the stream.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from fissile.client import AsyncClient, AsyncStream, Event, Result
from fissile.client.messages import Unary
from fissile.client.progress import Progress

from common.errors import MalformedRequestError
from common.limits import SSE_PING_S
from facade.http import sse
from facade.http.bodies import Names
from facade.http.errors import ErrorForm, HttpError, http_error, server_ending
from facade.http.exchange import Exchange
from facade.http.uploads import ClientGoneError

T = TypeVar("T")


class AnswerEncoder(Protocol):
    """Makes the response of one request: a stream of frames, or the whole body. Pure.

    `number` is the place of a call in `AnswerPlan.prompts`.
    """

    def begin(self, number: int, progress: Progress) -> bytes:
        """Frames before the first event of a call; `progress.prompt_info` is known."""
        ...

    def event(self, number: int, event: Event) -> bytes:
        """Frames of an event; may be empty."""
        ...

    def end(self) -> bytes:
        """Frames after the last event of all calls."""
        ...

    def failure(self, error: HttpError) -> bytes:
        """Frames that end the stream with a failure."""
        ...

    def whole(self, results: Sequence[Result]) -> Mapping[str, Any]:
        """The JSON of a response without a stream."""
        ...


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """Calls and encoder that a translator has made of a body.

    Attributes:
        prompts: of each call the conversation, the text or the token ids.
        is_chat: True calls Chat, False Generate.
        arguments: of each call, as the client library takes them; without metadata and deadline.
        encoder: makes the response.
        is_stream: True answers with server-sent events.
        names: of fields in errors of the router, as for `param_of`.
        idle: makes the frames of a stream with nothing to send, of the progress of its first call.
    """

    prompts: Sequence[Any]
    is_chat: bool
    arguments: Mapping[str, Any]
    encoder: AnswerEncoder
    is_stream: bool
    names: Names = field(default_factory=dict)
    idle: Callable[[Progress], bytes] = sse.ping


@dataclass(frozen=True, slots=True)
class QuestionPlan(Generic[T]):
    """Call that a translator has made of a body that asks for no generated text.

    Attributes:
        asked: the call with one answer.
        shown: makes the JSON of the answer.
        names: of fields in errors of the router, as for `param_of`.
        beside: further calls, whose answers `shown` takes too.
    """

    asked: Unary[T]
    shown: Callable[..., Mapping[str, Any]]
    names: Names = field(default_factory=dict)
    beside: Sequence[Unary[Any]] = ()


class AnswerRunner:
    """Answers requests with the calls of one client.

    Args:
        client: calls the routers.
        default_key: API key of callers that send none.
    """

    def __init__(self, client: AsyncClient, default_key: str = "") -> None:
        self._client = client
        self._default_key = default_key
        self._writers: set[_StreamWriter] = set()

    @property
    def in_flight(self) -> int:
        """Number of requests that are being answered."""
        return len(self._writers)

    def end_all(self) -> None:
        """Ends all requests with a failure that says that this process ends."""
        for writer in self._writers:
            writer.fail(server_ending())

    async def answer(self, exchange: Exchange, parse: Callable[[bytes, int], AnswerPlan], form: ErrorForm) -> None:
        """Reads the body, runs its calls and responds.

        Args:
            exchange: the request.
            parse: translator of the door: body and Unix time in, plan out. Raises ApiError.
            form: makes the body of a failure before the first event.

        Raises:
            ClientGoneError: the client has closed the connection, or does not read.
        """
        names: Names = {}
        try:
            plan = parse(await exchange.body(), int(time.time()))
            names = plan.names
            await self._run(exchange, plan, self._open(exchange, plan))
        except ClientGoneError:
            raise
        except Exception as error:
            await self._refuse(exchange, error, names, form)

    async def ask(self, exchange: Exchange, parse: Callable[[bytes], QuestionPlan[Any]], form: ErrorForm) -> None:
        """Reads the body, makes its call with one answer, and responds.

        Args:
            exchange: the request.
            parse: translator of the door. Raises ApiError, and ValueError for an argument.
            form: makes the body of a failure.

        Raises:
            ClientGoneError: the client has closed the connection, or does not read.
        """
        names: Names = {}
        try:
            plan = _question(parse, await exchange.body())
            names = plan.names
            metadata = exchange.metadata(self._default_key)
            timeout_s = exchange.timeout_s
            calls = (self._client.ask(each, timeout_s, metadata) for each in (plan.asked, *plan.beside))
            answers = await exchange.unless_closed(asyncio.ensure_future(_all_answers(calls)))
            await exchange.respond_json(plan.shown(*answers))
        except ClientGoneError:
            raise
        except Exception as error:
            await self._refuse(exchange, error, names, form)

    async def _refuse(self, exchange: Exchange, error: Exception, names: Names, form: ErrorForm) -> None:
        if exchange.status:
            # A part of the response is out: the server closes the connection, so that it does not look whole.
            raise error
        failure = http_error(error, names)
        await exchange.fail(failure, form(failure))
        if failure.reason == "FACADE_ERROR":
            raise error

    def _open(self, exchange: Exchange, plan: AnswerPlan) -> list[AsyncStream]:
        call: Any = self._client.chat_stream if plan.is_chat else self._client.generate_stream
        more = {"timeout_s": exchange.timeout_s, "metadata": exchange.metadata(self._default_key)}
        arguments = dict(plan.arguments)
        try:
            return self._streams(call, plan.prompts, arguments, more)
        except ValueError as error:
            # The client library names the argument.
            raise MalformedRequestError(str(error)) from None

    def _streams(
        self, call: Any, prompts: Sequence[Any], arguments: dict[str, Any], more: Mapping[str, Any]
    ) -> list[AsyncStream]:
        if len(prompts) > 1 and (given := arguments.pop("request_id", None)):
            # An id names one call.
            return [call(p, request_id=f"{given}-{i}", **arguments, **more) for i, p in enumerate(prompts)]
        return [call(prompt, **arguments, **more) for prompt in prompts]

    async def _run(self, exchange: Exchange, plan: AnswerPlan, streams: Sequence[AsyncStream]) -> None:
        exchange.facts.update(model=plan.arguments.get("model"), request_id=streams[0].progress.request_id)
        writer = _StreamWriter(exchange, plan, streams)
        self._writers.add(writer)
        try:
            await (writer.stream() if plan.is_stream else writer.whole())
        finally:
            self._writers.discard(writer)
            await writer.close()
            exchange.facts.update(_usage(streams))


async def _all_answers(calls: Iterable[Coroutine[Any, Any, Any]]) -> Sequence[Any]:
    """Answers of calls; if one fails, the others end."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _question(parse: Callable[[bytes], QuestionPlan[Any]], body: bytes) -> QuestionPlan[Any]:
    try:
        return parse(body)
    except ValueError as error:
        # The client library names the argument.
        raise MalformedRequestError(str(error)) from None


class _StreamWriter:
    """The tasks of one request: a reader of each stream, a watcher of the connection, and the writer."""

    def __init__(self, exchange: Exchange, plan: AnswerPlan, streams: Sequence[AsyncStream]) -> None:
        self._exchange = exchange
        self._plan = plan
        self._streams = streams
        self._buffer = sse.EventBuffer(len(streams))
        self._begun: set[int] = set()
        self._written_at = time.monotonic()
        self._tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._watch())]

    def fail(self, error: BaseException) -> None:
        """Ends the request with a failure."""
        self._buffer.fail(error)
        for stream in self._streams:
            stream.cancel()

    async def close(self) -> None:
        """Cancels the calls, and ends the tasks."""
        for stream in self._streams:
            stream.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def whole(self) -> None:
        """Responds when all answers are there."""
        reads = asyncio.gather(*(stream.result() for stream in self._streams))
        self._tasks.append(reads)
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        if self._buffer.failure is not None:
            raise self._buffer.failure
        await self._exchange.respond_json(self._plan.encoder.whole(reads.result()))

    async def stream(self) -> None:
        """Responds with the events as they arrive.

        Raises:
            Exception: the failure of a call before anything was sent.
        """
        self._tasks += [asyncio.ensure_future(self._read(i, stream)) for i, stream in enumerate(self._streams)]
        buffer, encoder = self._buffer, self._plan.encoder
        events = await buffer.take(SSE_PING_S)
        if not events and buffer.failure is not None:
            raise buffer.failure
        await self._exchange.start(200, sse.HEADERS)
        while True:
            frames = b"".join(self._frames(number, event) for number, event in events)
            now = time.monotonic()
            if not frames and now - self._written_at >= SSE_PING_S:
                frames = self._plan.idle(self._streams[0].progress)
            if frames:
                await self._exchange.write(frames)
                self._written_at = time.monotonic()
            if buffer.is_over:
                break
            events = await buffer.take(max(0.0, self._written_at + SSE_PING_S - time.monotonic()))
        if isinstance(buffer.failure, ClientGoneError):
            raise buffer.failure
        await self._exchange.write(encoder.end() if buffer.failure is None else self._failure(buffer.failure))
        await self._exchange.end()

    def _frames(self, number: int, event: Event) -> bytes:
        encoder = self._plan.encoder
        if number in self._begun:
            return encoder.event(number, event)
        self._begun.add(number)
        return encoder.begin(number, self._streams[number].progress) + encoder.event(number, event)

    def _failure(self, error: BaseException) -> bytes:
        failure = http_error(error, self._plan.names, has_begun=bool(self._begun))
        self._exchange.note(failure)
        return self._plan.encoder.failure(failure)

    async def _read(self, number: int, stream: AsyncStream) -> None:
        try:
            async for event in stream:
                await self._buffer.put(number, event)
            self._buffer.finish()
        except Exception as error:
            self._buffer.fail(error)

    async def _watch(self) -> None:
        await self._exchange.wait_closed()
        self.fail(ClientGoneError())


def _usage(streams: Sequence[AsyncStream]) -> dict[str, int]:
    """Token counts of all answers so far, for the log."""
    progress = [stream.progress for stream in streams]
    infos = [each.prompt_info for each in progress if each.prompt_info is not None]
    finishes = [answer.finish for each in progress for answer in each.answers.values() if answer.finish is not None]
    return {
        "prompt_tokens": sum(info.prompt_tokens for info in infos),
        "completion_tokens": sum(finish.usage.completion_tokens for finish in finishes),
    }
