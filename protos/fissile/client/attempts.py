"""Calls that are made until one has worked. Pure: `now` comes in, and what to call, and how long to wait, goes out."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import Message

from fissile.client.calls import Event, events_of
from fissile.client.errors import FissileError
from fissile.client.messages import Request, Response, SentMetadata, with_start
from fissile.client.progress import Progress
from fissile.client.retries import Retries
from fissile.v1 import inference_pb2 as pb

_SHORTEST_S = 0.001


@dataclass(frozen=True, slots=True)
class Call:
    """A call to make now."""

    target: str
    method: str
    request: Message
    timeout_s: float | None
    metadata: SentMetadata

    def sent_metadata(self, unix_s: float) -> SentMetadata:
        """The metadata, with the time at which the call is sent unless the caller gave one."""
        return with_start(self.metadata, unix_s)


class CallAttempts:
    """The calls for one request, one after the other.

    Args:
        method: name of the method.
        request: its request.
        retries: decides which router is called when.
        metadata: of each call.
        end: monotonic seconds, None for never.

    Attributes:
        num_calls: calls made so far.
    """

    def __init__(
        self, method: str, request: Message, retries: Retries, metadata: SentMetadata, end: float | None
    ) -> None:
        self.num_calls = 0
        self._method = method
        self._request = request
        self._metadata = metadata
        self._end = end
        self._retries = retries

    def next(self, now: float) -> Call:
        """The call to make."""
        self.num_calls += 1
        return Call(self._retries.target, self._method, self._request, self.left_s(now), self._metadata)

    def left_s(self, now: float) -> float | None:
        """Seconds until the deadline, None for none."""
        return None if self._end is None else max(_SHORTEST_S, self._end - now)

    def failed(self, error: FissileError, now: float) -> float:
        """Seconds until the next call.

        Raises:
            FissileError: this error allows no further call.
        """
        wait_s = self._retries.failed(error, now)
        if wait_s is None or (self._end is not None and now + wait_s >= self._end):
            raise error from None
        return wait_s


class StreamAttempts(CallAttempts):
    """The calls of one stream. Each continues after the tokens received so far."""

    def __init__(
        self, request: Request, retries: Retries, metadata: SentMetadata, end: float | None, *, has_receipts: bool
    ) -> None:
        method = "Chat" if isinstance(request, pb.ChatRequest) else "Generate"
        super().__init__(method, request, retries, metadata, end)
        self.progress = Progress(request, has_receipts=has_receipts)

    def received(self, part: Response) -> list[Event]:
        """Takes a message. Returns its events."""
        self._retries.progress()
        self.progress.add(part)
        return events_of(part)

    def failed(self, error: FissileError, now: float) -> float:
        """Seconds until the next call, which continues the stream.

        Raises:
            FissileError: this error allows no further call.
        """
        wait_s = super().failed(error, now)
        self._request = self.progress.going_on()
        return wait_s
