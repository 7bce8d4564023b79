"""Writing of the answers to one Generate or Chat: in parts, as fast as the client reads.

UNAVAILABLE is said only while the client has received nothing of any answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import grpc

from common.errors import ApiError, NoWorkerError, RouterEndingError, WorkerLostError
from router.api.answers import Answers
from router.api.in_flight import InFlightCall
from router.api.responses import decode_s, fill_response, finish_name, times_of, usage_of
from router.requests.stream import ReplacedError, RequestStream
from router.telemetry.metrics import RequestMeasure

# Trailing metadata: token counts of all answers together, as bytes of a Usage.
USAGE_METADATA = "fissile-usage-bin"
# Turn of an answer that shares its call with no other.
_ALONE = contextlib.nullcontext()


class AnswerWriter:
    """Writes the answers of one attempt, each until its end.

    Args:
        call: the call.
        measure: measures the call.
        answers: takes the messages.
        streams: the streams of the answers.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        call: InFlightCall,
        measure: RequestMeasure,
        answers: Answers,
        streams: Sequence[RequestStream],
        clock: Callable[[], float],
    ) -> None:
        self._call = call
        self._measure = measure
        self._answers = answers
        self._streams = streams
        self._clock = clock
        # Held by the answer that writes a message, where several share the call.
        self._turn = asyncio.Lock() if len(streams) > 1 else None
        # Set when the logprobs of the prompt are written: only one of several answers has them, before any text.
        self._prompt_written: asyncio.Event | None = None
        if len(streams) > 1 and streams[0].request.params.prompt_logprobs is not None:
            self._prompt_written = asyncio.Event()

    async def write_all(self) -> None:
        """Writes all answers; the first one that fails ends the others.

        Raises:
            ApiError: the error of the first answer that failed.
            ReplacedError: nothing was sent, and the request must be built once more.
        """
        streams, answers = self._streams, self._answers
        try:
            if len(streams) == 1:
                await self._write(streams[0])
            else:
                await self._write_side_by_side()
        except ReplacedError:
            if answers.has_sent:
                raise WorkerLostError(streams[0].assembly.worker_id, usage_of(streams).completion_tokens) from None
            raise
        except ApiError as error:
            raise as_seen(error, streams, has_sent=answers.has_sent) from None
        finally:
            self._call.scope.add_trailing(USAGE_METADATA, usage_of(streams).SerializeToString())

    async def _write_side_by_side(self) -> None:
        """Writes several answers at once, whose messages take turns on the call."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._write(stream)) for stream in self._streams]
        except BaseExceptionGroup as errors:
            raise first_of(errors) from None
        # A task that finds the client gone cancels itself, and a group treats that as a good end.
        if any(task.cancelled() for task in tasks):
            raise asyncio.CancelledError

    async def _write(self, stream: RequestStream) -> None:
        """Writes one answer part by part; what arrives during a write is merged into the next part."""
        call, answers, prompt_written = self._call, self._answers, self._prompt_written
        # One message for all parts, where they are sent.
        message = answers.new_message(stream.request.request_id, stream.request.choice)
        written = 0.0
        while True:
            part = await stream.next()
            if prompt_written is not None and stream.request.params.prompt_logprobs is None:
                await prompt_written.wait()
            async with _ALONE if self._turn is None else _turn_of(stream, self._turn):
                is_first = not answers.has_begun
                if is_first:
                    times = times_of(stream, self._clock())
                    ttft_s = times.ttft_s or 0.0
                    call.span.first_token(ttft_s)
                    self._measure.first_token(ttft_s, stream.assembly.worker_id, times.on_worker_s)
                    answers.begin(call.scope)
                if part.ending is not None:
                    stream.account_end(self._clock(), written)
                fill_response(message, part, stream, self._clock, has_info=is_first)
                await stream.written(answers.write(message))
                written = self._clock()
            stream.note_written()
            if prompt_written is not None and not stream.assembly.unread.has_prompt_logprobs:
                prompt_written.set()
            if part.ending is not None:
                call.record.finish = finish_name(part.ending.reason)
                tokens = message.finish.usage.completion_tokens
                worker_id = stream.assembly.worker_id if len(stream.attempts) == 1 else ""
                self._measure.finished(decode_s(stream), tokens, call.record.finish, worker_id)
                return


@contextlib.asynccontextmanager
async def _turn_of(stream: RequestStream, turn: asyncio.Lock) -> AsyncIterator[None]:
    await stream.turn(turn)
    try:
        yield
    finally:
        turn.release()


def as_seen(error: ApiError, streams: Sequence[RequestStream], *, has_sent: bool) -> ApiError:
    """The error of one answer as the client gets it: UNAVAILABLE if it received nothing, and only then.

    Args:
        error: the error.
        streams: the streams of all answers.
        has_sent: whether the client may have received anything.
    """
    if isinstance(error, RouterEndingError):
        return RouterEndingError(max(1, usage_of(streams).completion_tokens) if has_sent else 0)
    if error.code is grpc.StatusCode.UNAVAILABLE and has_sent:
        return WorkerLostError(streams[0].assembly.worker_id, usage_of(streams).completion_tokens)
    if isinstance(error, WorkerLostError) and not has_sent:
        return NoWorkerError("the worker was lost before the answer was whole")
    return error


def first_of(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended a group of answers; the others were cancelled for it. ReplacedError only if all have it."""
    flat = list(errors.exceptions)
    while flat and isinstance(flat[0], BaseExceptionGroup):
        flat = list(flat[0].exceptions)
    return next((error for error in flat if not isinstance(error, ReplacedError)), flat[0])
