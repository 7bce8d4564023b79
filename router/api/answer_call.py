"""One Generate or Chat from its checked request to the end of its last answer.

Nothing is sent before the first token, not even initial metadata, so that standard client retries work. Every request
leaves the router's tables on every path: finished, failed, cancelled, past its deadline. UNAVAILABLE is said only while
the client has got nothing of any answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import TypeAlias, TypeVar

import grpc

from common.errors import (
    ApiError,
    NoWorkerError,
    RouterEndingError,
    WorkerLostError,
)
from common.telemetry import names
from common.telemetry.tracing import RequestSpan, Tracing
from router.answers.stream_assembly import StreamAssembly
from router.api.answers import Answers
from router.api.asked import Asked, Kind
from router.api.request_builder import RequestBuilder
from router.api.responses import decode_s, fill_response, finish_name, one_of_each_prompt, times_of, usage_of
from router.model_registry import ModelRegistry, ServedModel
from router.requests.request_router import RequestRouter
from router.requests.stream import ReplacedError, RequestStream, RoutedRequest
from router.scheduling.failover import Wait
from router.telemetry.metrics import RequestMeasure
from router.workers.expected_workers import ExpectedWorkers

# Trailing metadata: what all answers together have cost, as bytes of a Usage.
USAGE_METADATA = "fissile-usage-bin"


# Turn of an answer that shares its call with no other.
_ALONE = contextlib.nullcontext()
T = TypeVar("T")
# Opens the streams of a call for a model; given those of an earlier try.
Begin: TypeAlias = Callable[[ServedModel, Sequence[RequestStream]], Awaitable[Sequence[RequestStream]]]
# Reads the streams of a call for a model.
Read: TypeAlias = Callable[[ServedModel, Sequence[RequestStream]], Awaitable[T]]
# Is told of a request, its model and its answers when all of these have been sent.
AnswerObserver: TypeAlias = Callable[[Kind, Asked, ServedModel, Sequence[RequestStream]], None]


class Answering:
    """Has requests answered by the fleet.

    Attributes:
        on_answered: are told of requests whose answers have all been sent.

    Args:
        requests: sends requests on their way.
        expected: workers that have never been up.
        registry: the models.
        builder: makes of a request what workers get.
        tracing: says whether waits are worth a span.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        requests: RequestRouter,
        expected: ExpectedWorkers,
        registry: ModelRegistry,
        builder: RequestBuilder,
        tracing: Tracing,
        clock: Callable[[], float],
    ) -> None:
        self._requests = requests
        self._expected = expected
        self._registry = registry
        self._builder = builder
        self._tracing = tracing
        self._clock = clock
        self.on_answered: Sequence[AnswerObserver] = ()

    async def run(self, kind: Kind, asked: Asked, measure: RequestMeasure, answers: Answers) -> None:
        """Has a request answered; prepares it once more where its weights go before it has begun.

        Raises:
            ApiError: the request is refused, or an answer has failed.
        """

        async def begin(model: ServedModel, earlier: Sequence[RequestStream]) -> Sequence[RequestStream]:
            model.check_generates()
            choices = await self._builder.choices(kind, asked, model)
            # Of a call that this router has had itself no other one has left anything.
            if asked.request.HasField("resume") and not asked.call.took_over:
                await self._requests.wait_for_orphans(choice.adoption_key for choice in choices)
            return self.open(asked, self._builder.answers(kind, choices, model, asked), earlier, one_prompt=True)

        async def send(model: ServedModel, streams: Sequence[RequestStream]) -> None:
            await self._send_all(kind, streams, asked, measure, answers)
            for answered in self.on_answered:
                # What only observes may fail by itself.
                with contextlib.suppress(Exception):
                    answered(kind, asked, model, streams)

        await self.carry(asked, measure, begin, send)

    async def carry(self, asked: Asked, measure: RequestMeasure, begin: Begin, read: Read[T]) -> T:
        """Carries a call from the wait for its model to the end of its streams, and accounts for it however it ends.

        Args:
            asked: the call.
            measure: of the call.
            begin: prepares it for a model, and opens its streams with `open`, behind those of an earlier try.
            read: reads them to their end. Where their weights go before anything has come, all is begun once more.

        Raises:
            ApiError: the request is refused, or a stream has failed.
        """
        streams: Sequence[RequestStream] = ()
        try:
            await self._wait_for_model(asked)
            while True:
                # A session keeps its weights while they are rolled, because its requests build on earlier answers.
                model = self._model(asked)
                asked.record.model = asked.call.model = model.name
                measure.model(model.name)
                streams = await begin(model, streams)
                try:
                    return await read(model, streams)
                except ReplacedError:
                    continue
                finally:
                    self._close(streams)
        finally:
            # What only observes may fail by itself.
            with contextlib.suppress(Exception):
                if streams:
                    self._account(asked, measure, streams)

    def open(
        self,
        asked: Asked,
        requests: Iterable[tuple[RoutedRequest, StreamAssembly]],
        earlier: Sequence[RequestStream],
        *,
        one_prompt: bool = False,
        beside: list[RequestStream] | None = None,
    ) -> list[RequestStream]:
        """Sends requests on their way, all or none.

        Args:
            asked: their call.
            requests: each with what takes its answer.
            earlier: streams of an earlier try, whose places they take again.
            one_prompt: True if all have the prompt of the first.
            beside: streams of the call that are open already, to which these are added; who has them closes these too.
        """
        asked.call.opened = asked.call.opened or self._clock()
        streams: list[RequestStream] = [] if beside is None else beside
        try:
            for request, assembly in requests:
                before = earlier[len(streams)] if len(streams) < len(earlier) else None
                lead = streams[0] if one_prompt and streams else None
                streams.append(self._requests.open(request, assembly, asked.span.submitted, before, lead))
        except BaseException:
            if beside is None:
                self._close(streams)
            raise
        asked.call.streams = streams
        return streams

    def _close(self, streams: Iterable[RequestStream]) -> None:
        for stream in streams:
            self._requests.close(stream)

    async def _wait_for_model(self, asked: Asked) -> None:
        """Waits for workers that are expected where no worker has the model yet."""
        if not self._registry.knows(asked.request.model):
            with self._builder.interruptible(asked.call):
                await self._expected.wait_for_model(asked.request.model)

    def _model(self, asked: Asked) -> ServedModel:
        """The model of a request, with the weights that answer it.

        Raises:
            ApiError: it is not known, or is not served as a stream that is resumed needs it.
        """
        request = asked.request
        resume = request.resume
        if resume.weights_digest or resume.numerics:
            return self._registry.resumable(request.model, resume.weights_digest, resume.numerics)
        # Routers choose alike: without a word on it the answer most likely began with these weights.
        return self._registry.choose(request.model, request.session_id or asked.call.request_id)

    async def _send_all(
        self,
        kind: Kind,
        streams: Sequence[RequestStream],
        asked: Asked,
        measure: RequestMeasure,
        answers: Answers,
    ) -> None:
        """Writes all answers, as their parts come; the first that fails ends the others.

        Raises:
            ApiError: of the first answer that has failed.
            ReplacedError: nothing has been sent, and the request has to be prepared once more.
        """
        try:
            if len(streams) == 1:
                await self._send(streams[0], asked, measure, answers)
            else:
                has_prompt = streams[0].request.params.prompt_logprobs is not None
                began = asyncio.Event() if has_prompt else None
                await self._send_side_by_side(streams, asked, measure, answers, began)
        except ReplacedError:
            if answers.has_sent:
                raise WorkerLostError(streams[0].assembly.worker_id, usage_of(streams).completion_tokens) from None
            raise
        except ApiError as error:
            raise as_seen(error, streams, has_sent=answers.has_sent) from None
        finally:
            asked.scope.add_trailing(USAGE_METADATA, usage_of(streams).SerializeToString())

    async def _send_side_by_side(
        self,
        streams: Sequence[RequestStream],
        asked: Asked,
        measure: RequestMeasure,
        answers: Answers,
        began: asyncio.Event | None = None,
    ) -> None:
        """Several answers at once, whose messages take turns on the one call; `began` as of `_send`."""
        turn = asyncio.Lock()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._send(stream, asked, measure, answers, turn, began)) for stream in streams
                ]
        except BaseExceptionGroup as errors:
            raise first_of(errors) from None
        # A task that finds the client gone cancels itself, which a group takes for an end like any other.
        if any(task.cancelled() for task in tasks):
            raise asyncio.CancelledError

    async def _send(
        self,
        stream: RequestStream,
        asked: Asked,
        measure: RequestMeasure,
        answers: Answers,
        turn: asyncio.Lock | None = None,
        began: asyncio.Event | None = None,
    ) -> None:
        """Writes parts as they come, as fast as the client reads; what comes meanwhile is merged.

        Others wait until the answer that brings logprobs of the prompt has `began`: those come before any text.
        """
        # One message for all parts, where they are sent.
        message = answers.new_message(stream.request.request_id, stream.request.choice)
        while True:
            part = await stream.next()
            if began is not None and stream.request.params.prompt_logprobs is None:
                await began.wait()
            async with _ALONE if turn is None else _turn_of(stream, turn):
                is_first = not answers.has_begun
                if is_first:
                    ttft_s = times_of(stream, self._clock()).ttft_s or 0.0
                    asked.span.first_token(ttft_s)
                    measure.first_token(ttft_s)
                    answers.begin(asked.scope)
                fill_response(message, part, stream, self._clock, has_info=is_first)
                await stream.written(answers.write(message))
            stream.note_written()
            if began is not None and not stream.assembly.has_prompt_logprobs:
                began.set()
            if part.ending is not None:
                asked.record.finish = finish_name(part.ending)
                measure.finished(decode_s(stream), message.finish.usage.completion_tokens)
                return

    def _account(self, asked: Asked, measure: RequestMeasure, streams: Sequence[RequestStream]) -> None:
        """Says what has come of a request, however it ended: in its record, its figures and its span."""
        record, span, now = asked.record, asked.span, self._clock()
        written = sum(stream.written_tokens for stream in streams)
        # Of several answers the one that began first tells where the time went.
        first = min(streams, key=lambda stream: stream.assembly.first_token_time or now)
        assembly = first.assembly
        prompts = one_of_each_prompt(streams)
        input_tokens = sum(stream.assembly.prompt_tokens for stream in prompts)
        cached_tokens = sum(stream.assembly.start.cached_tokens for stream in prompts)
        record.times, record.worker_id = times_of(first, now), assembly.worker_id
        record.attempts = max(len(stream.attempts) for stream in streams)
        record.exact = all(stream.attempts.exact for stream in streams)
        record.adopted = any(stream.is_adopted for stream in streams)
        record.completion_tokens = written
        if record.times.first_token is not None:
            record.cached_tokens = cached_tokens
            measure.usage(input_tokens, cached_tokens, written)
        for stream in streams:
            self._trace_attempts(span, stream)
        if self._tracing.enabled:
            _trace_waits(span, first.attempts.waits(asked.call.opened, record.times.ended))
        span.usage(
            input_tokens=input_tokens,
            output_tokens=written,
            cached_tokens=cached_tokens,
            worker_id=assembly.worker_id,
            attempts=record.attempts,
        )
        if record.finish:
            span.finish([record.finish])

    def _trace_attempts(self, span: RequestSpan, stream: RequestStream) -> None:
        """Says in the trace where a request has been that needed more than one worker."""
        attempts = stream.attempts.all
        for number, attempt in enumerate(attempts if len(attempts) > 1 else (), start=1):
            span.attempt(
                number,
                attempt.worker_id,
                began=attempt.began,
                ended=self._clock() if attempt.ended is None else attempt.ended,
                tokens=attempt.tokens,
                loss="" if attempt.loss is None else attempt.loss.value,
            )


@contextlib.asynccontextmanager
async def _turn_of(stream: RequestStream, turn: asyncio.Lock) -> AsyncIterator[None]:
    """Holds the call that several answers share."""
    await stream.turn(turn)
    try:
        yield
    finally:
        turn.release()


def as_seen(error: ApiError, streams: Sequence[RequestStream], *, has_sent: bool) -> ApiError:
    """The failure of one answer as the client's of all: UNAVAILABLE while it has got nothing, and only then."""
    if isinstance(error, RouterEndingError):
        return RouterEndingError(max(1, usage_of(streams).completion_tokens) if has_sent else 0)
    if error.code is grpc.StatusCode.UNAVAILABLE and has_sent:
        return WorkerLostError(streams[0].assembly.worker_id, usage_of(streams).completion_tokens)
    if isinstance(error, WorkerLostError) and not has_sent:
        return NoWorkerError("the worker was lost before the answer was whole")
    return error


def first_of(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended a group of answers: the others were cancelled for it."""
    flat = list(errors.exceptions)
    while flat and isinstance(flat[0], BaseExceptionGroup):
        flat = list(flat[0].exceptions)
    return next((error for error in flat if not isinstance(error, ReplacedError)), flat[0])


def _trace_waits(span: RequestSpan, waits: Sequence[Wait]) -> None:
    """Says in the trace when a request had no worker."""
    for wait in waits:
        name = names.QUEUE_SPAN if wait.loss is None else names.WAIT_SPAN
        loss = "" if wait.loss is None else wait.loss.value
        span.phase(name, wait.began, wait.ended, worker_id=wait.worker_id, loss=loss)
