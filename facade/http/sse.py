"""Server-sent events: frames, and the events of answers on their way to a writer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec
from fissile.client import Delta, Event

from common.limits import MAX_BUFFERED_EVENTS

# A comment: clients skip it, and proxies see that the connection lives.
PING: Final = b": ping\n\n"
HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    # Proxies like nginx would collect the events otherwise.
    (b"x-accel-buffering", b"no"),
)
_encode: Final = msgspec.json.Encoder().encode


def ping(_: object) -> bytes:
    """A comment, for APIs without an event for it."""
    return PING


def data_frame(value: Mapping[str, Any]) -> bytes:
    """An event with JSON and without a name, as OpenAI's chat completions have it."""
    return b"data: %b\n\n" % _encode(value)


def named_frame(name: str, value: Mapping[str, Any]) -> bytes:
    """An event with a name, as OpenAI's responses and Anthropic's messages have it."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(value))


class EventBuffer:
    """Events of the answers to a request, from the tasks that read them to the one that writes them.

    Readers wait while MAX_BUFFERED_EVENTS are there, so that a caller who does not read holds back the router, and not
    this process's memory.

    Args:
        num_streams: streams that are read.

    Attributes:
        failure: how a stream has failed; None otherwise.
    """

    def __init__(self, num_streams: int) -> None:
        self.failure: BaseException | None = None
        self._open = num_streams
        self._events: list[tuple[int, Event]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._room = asyncio.Event()
        self._room.set()

    @property
    def is_over(self) -> bool:
        """True if no event is there and none will come."""
        return not self._events and (self._open == 0 or self.failure is not None)

    async def put(self, number: int, event: Event) -> None:
        """Adds an event of stream `number`; waits for room."""
        self._events.append((number, event))
        self._wake()
        if len(self._events) >= MAX_BUFFERED_EVENTS:
            self._room.clear()
            await self._room.wait()

    def finish(self) -> None:
        """Notes that one stream has ended with all its answers."""
        self._open -= 1
        self._wake()

    def fail(self, error: BaseException) -> None:
        """Notes the failure that ends the request; the first one counts."""
        if self.failure is None:
            self.failure = error
        self._wake()

    async def take(self, wait_s: float) -> Sequence[tuple[int, Event]]:
        """All events that are there, texts of one answer joined; waits `wait_s` for the first one."""
        if not self._events and not self.is_over:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(wait_s, self._wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        taken, self._events = self._events, []
        self._room.set()
        return taken if len(taken) < 2 else joined(taken)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def joined(events: Sequence[tuple[int, Event]]) -> Sequence[tuple[int, Event]]:
    """The events, with neighbouring deltas of one answer as one: reasoning is before content, both before calls."""
    found: list[tuple[int, Event]] = []
    for number, event in events:
        last = found[-1] if found else None
        if last is not None and last[0] == number and (both := _joined(last[1], event)) is not None:
            found[-1] = number, both
        else:
            found.append((number, event))
    return found


def _joined(first: Event, second: Event) -> Delta | None:
    """Two deltas as one; None for a finish, and where the order of channels would change."""
    if not isinstance(first, Delta) or not isinstance(second, Delta) or first.index != second.index:
        return None
    if first.tool_calls or (first.text and second.reasoning):
        return None
    return replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        reasoning=first.reasoning + second.reasoning,
    )
