"""One direct Generate call: tokens merge while the client is slow, and everything ends with the call."""

from __future__ import annotations

import asyncio

import grpc
from fissile.worker.v1 import worker_pb2 as wpb

from common.errors import ApiError
from worker.outputs import End, SequenceOutput, Start
from worker.router_sequences import Live, failure

# Ends with which the call is OK.
_FINISHES = frozenset(
    {wpb.END_REASON_EOS, wpb.END_REASON_STOP_TOKEN, wpb.END_REASON_STOP_SEQUENCE, wpb.END_REASON_LENGTH}
)


class DirectCall:
    """The engine's Listener of one sequence."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._token_ids: list[int] = []
        self._start: Start | None = None
        self._end: End | None = None
        self._news = asyncio.Event()

    def on_output(self, output: SequenceOutput) -> None:
        """Takes new tokens."""
        self._token_ids.extend(output.token_ids)
        if output.start is not None:
            self._start = output.start
            self._live.cached_tokens = output.start.cached_tokens
        if output.end is not None:
            assert output.times is not None
            self._end = output.end
            self._live.end(output.end, output.times)

    def on_step(self, step: int, submit_seen: int | None) -> None:
        """Wakes the call."""
        self._news.set()

    async def next_response(self) -> wpb.GenerateResponse:
        """What came since the last call; the last one has `end`.

        Raises:
            ApiError: the sequence did not end by itself, and all its tokens have been handed out.
        """
        await self._news.wait()
        self._news.clear()
        response = wpb.GenerateResponse(token_ids=self._token_ids)
        self._token_ids = []
        if self._start is not None:
            response.start.CopyFrom(self._start.to_proto(self._live.rid))
            self._start = None
        if self._end is not None:
            self._finish(response, self._end)
        return response

    def _finish(self, response: wpb.GenerateResponse, end: End) -> None:
        if end.reason in _FINISHES:
            response.end.CopyFrom(end.to_proto(self._live.rid))
        elif response.token_ids:
            # The tokens first; the next call raises.
            self._news.set()
        else:
            error = failure(end)
            raise error if isinstance(error, ApiError) else ApiError(grpc.StatusCode.CANCELLED, "cancelled")
