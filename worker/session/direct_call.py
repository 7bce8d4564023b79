"""One direct Generate call: tokens merge while the client is slow, and everything ends with the call."""

from __future__ import annotations

import asyncio

import grpc
from fissile.worker.v1 import worker_pb2 as wpb

from common.errors import ApiError
from common.telemetry.request_record import RequestRecord, RequestTimes
from worker.engine.outputs import End, RequestOutput, Start
from worker.engine.sequence import Sequence
from worker.session.output_protos import end_proto, start_proto
from worker.session.request_trace import FINISHES, RequestTrace, failure


class DirectCall:
    """The sequence of one call, and its output that has not been written yet. Implements OwnedSequence."""

    def __init__(self, seq: Sequence, trace: RequestTrace) -> None:
        self.seq = seq
        self.end_pos = seq.num_tokens
        self._trace = trace
        self._seed = seq.seed
        self._token_ids: list[int] = []
        self._start: Start | None = None
        # Like `_start`, but kept after it has been sent.
        self._began: Start | None = None
        self._written = 0
        self._end: End | None = None
        self._news = asyncio.Event()

    @property
    def owner(self) -> DirectCall:
        return self

    def on_output(self, output: RequestOutput) -> None:
        """Takes the output of one step."""
        self._token_ids.extend(output.output_tokens)
        if output.start is not None:
            self._start = self._began = output.start
        self._end = output.end
        self._trace.note(output)

    def on_step(self, step: int, submit_seen: int | None) -> None:
        """Wakes the call, unless the step only had the sequence's stage."""
        if self._token_ids or self._start is not None or self._end is not None:
            self._news.set()

    async def next_response(self) -> wpb.GenerateResponse:
        """The next response: all output since the last call; the last response has `end`.

        Raises:
            ApiError: the sequence did not end by itself, and all its tokens have been returned.
        """
        await self._news.wait()
        self._news.clear()
        response = wpb.GenerateResponse(token_ids=self._token_ids)
        self._token_ids = []
        if self._start is not None:
            response.start.CopyFrom(start_proto(0, self._start))
            response.seed = self._seed
            self._start = None
        if self._end is not None:
            self._finish(response, self._end)
        return response

    def written(self, response: wpb.GenerateResponse) -> None:
        """Notes that a response has been written."""
        self._written += len(response.token_ids)

    def account(self, record: RequestRecord, now: float) -> None:
        """Records the call's tokens and times, however it ended."""
        record.completion_tokens, record.times = self._written, self._times(record.arrived, now)
        if self._began is not None:
            record.cached_tokens = self._began.cached_tokens
        if self._end is not None and self._end.reason in FINISHES:
            record.finish = self._end.reason.name.lower()

    def _times(self, arrived: float, now: float) -> RequestTimes:
        if self._began is None:
            return RequestTimes(arrived, now)
        first = arrived + self._began.queue_s + self._began.prefill_s
        return RequestTimes(
            arrived,
            now,
            first_token=first,
            last_token=now,
            tokens=self._written,
            prefill=self._began.prefill_s,
        )

    def _finish(self, response: wpb.GenerateResponse, end: End) -> None:
        if end.reason in FINISHES:
            response.end.CopyFrom(end_proto(0, end))
        elif response.token_ids:
            # The tokens are sent first; the next call raises.
            self._news.set()
        else:
            error = failure(end)
            raise error if isinstance(error, ApiError) else ApiError(grpc.StatusCode.CANCELLED, "cancelled")
