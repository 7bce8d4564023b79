"""One call that is answered by streams, from its checked request to the end of its last stream.

Generate and Chat send nothing before the first token, not even initial metadata, so that standard client retries work.
Every stream leaves the router's tables on every path: finished, failed, cancelled, past its deadline.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.telemetry import names
from common.telemetry.names import Stage
from common.telemetry.tracing import SpanFactory
from router.answers.stream_assembly import StreamAssembly
from router.api.answer_writer import AnswerWriter
from router.api.answers import AnswerRequest, Answers
from router.api.in_flight import InFlightCall
from router.api.request_builder import RequestBuilder
from router.api.responses import one_of_each_prompt, times_of
from router.model_registry import ModelRegistry, ServedModel
from router.requests.request_router import RequestRouter
from router.requests.stream import ReplacedError, RequestStream, RoutedRequest
from router.scheduling.failover import Attempt, Wait
from router.telemetry.metrics import RequestMeasure
from router.telemetry.request_span import RequestSpan
from router.workers.expected_workers import ExpectedWorkers


class AnswerObserver(Protocol):
    """Observer of Generate and Chat, such as an audit."""

    def answered(self, request: AnswerRequest, model: ServedModel, streams: Sequence[RequestStream]) -> None:
        """Is shown a request, its model and the streams of its answers, once all answers were sent."""


@dataclass(frozen=True, slots=True)
class AnswerBackend:
    """Collaborators that all AnswerCalls of a router share.

    Attributes:
        requests: runs requests on workers.
        expected: workers that have never been up.
        registry: the models.
        builder: builds what workers get of a request.
        tracing: says whether waits are worth a span.
        clock: monotonic seconds.
        observers: are shown requests whose answers were all sent.
    """

    requests: RequestRouter
    expected: ExpectedWorkers
    registry: ModelRegistry
    builder: RequestBuilder
    tracing: SpanFactory
    clock: Callable[[], float]
    observers: Sequence[AnswerObserver]


@dataclass(slots=True, eq=False, kw_only=True)
class AnswerCall(InFlightCall):
    """One call of Generate, Chat, Score, Embed or Rerank.

    Attributes:
        request: of Generate and Chat the request; else one with the model and the session.
        measure: measures the call.
        backend: the collaborators.
    """

    request: AnswerRequest
    measure: RequestMeasure
    backend: AnswerBackend

    async def answer(self, answers: Answers) -> None:
        """Answers the request of Generate or Chat.

        Weights may be rolled away before the call has begun: then the request is built once more, for other weights.

        Args:
            answers: takes the messages.

        Raises:
            ApiError: the request is refused, or an answer failed.
        """
        with self.accounted():
            await self.wait_for_model()
            while True:
                model = self.choose_model()
                await self._open_answers(model)
                try:
                    await AnswerWriter(self, self.measure, answers, self.streams, self.backend.clock).write_all()
                    self._show_observers(model)
                    return
                except ReplacedError:
                    continue
                finally:
                    self.close_streams()

    @contextlib.contextmanager
    def accounted(self) -> Iterator[None]:
        """Accounts for the call when the block ends, however it ends."""
        try:
            yield
        finally:
            # A fault of the accounts must not fail the call.
            with contextlib.suppress(Exception):
                if self.streams:
                    self._account()
                else:
                    self.span.stages(self.record.ledger, self.backend.clock())

    async def wait_for_model(self) -> None:
        """Waits for expected workers if no worker has the model yet.

        Raises:
            ApiError: the call ended meanwhile.
        """
        if not self.backend.registry.knows(self.request.model):
            self.record.ledger.enter(Stage.MODEL_WAIT, self.backend.clock())
            try:
                with self.interruptible():
                    await self.backend.expected.wait_for_model(self.request.model)
            finally:
                self.record.ledger.enter(Stage.PREPARE, self.backend.clock())

    def choose_model(self) -> ServedModel:
        """Chooses the model, with the weights that answer the call.

        A session keeps its weights while they are rolled, because its requests build on earlier answers.

        Raises:
            ApiError: no such model is served, or not with the weights of a stream that is resumed.
        """
        request, resume, registry = self.request, self.request.resume, self.backend.registry
        if resume.weights_digest or resume.numerics:
            model = registry.resumable(request.model, resume.weights_digest, resume.numerics)
        else:
            # Routers choose alike: a resumed answer without a digest most likely began with these weights.
            model = registry.choose(request.model, request.session_id or self.request_id)
        self.record.model = self.model = model.name
        self.measure.model(model.name)
        return model

    def open_stream(
        self,
        routed: RoutedRequest,
        assembly: StreamAssembly,
        earlier: RequestStream | None,
        lead: RequestStream | None = None,
    ) -> RequestStream:
        """Opens one stream; the caller adds it to `streams`.

        Args:
            routed: what workers get.
            assembly: takes its answer.
            earlier: stream of the same answer whose weights were replaced; the new stream takes its place.
            lead: stream of the first answer, if it has the same prompt.

        Raises:
            ApiError: the queue is full, or the deadline would pass in it.
        """
        self.opened = self.opened or self.backend.clock()
        return self.backend.requests.open(routed, assembly, self.span.submitted, earlier, lead)

    def close_streams(self) -> None:
        """Closes all streams."""
        self._close(self.streams)

    def _close(self, streams: Iterable[RequestStream]) -> None:
        for stream in streams:
            self.backend.requests.close(stream)

    async def _open_answers(self, model: ServedModel) -> None:
        """Opens a stream for each answer, all or none."""
        model.check_generates()
        backend, request, earlier = self.backend, self.request, self.streams
        left = await backend.builder.answers_left(self, request, model)
        # If this router had the broken call itself, no other router left sequences of it.
        if request.HasField("resume") and not self.took_over:
            await backend.requests.wait_for_orphans(answer.adoption_key for answer in left)
        streams: list[RequestStream] = []
        try:
            for answer, assembly in backend.builder.assemblies(request, left, model):
                before = earlier[len(streams)] if len(streams) < len(earlier) else None
                streams.append(self.open_stream(answer, assembly, before, streams[0] if streams else None))
        except BaseException:
            self._close(streams)
            raise
        self.streams = streams

    def _show_observers(self, model: ServedModel) -> None:
        for observer in self.backend.observers:
            # A fault of an observer must not fail the call.
            with contextlib.suppress(Exception):
                observer.answered(self.request, model, self.streams)

    def _account(self) -> None:
        """Writes the outcome of the call into its record, its measure and its span."""
        record, span, streams, now = self.record, self.span, self.streams, self.backend.clock()
        written = sum(stream.written_tokens for stream in streams)
        # The answer that began first shows where the time was spent.
        first = min(streams, key=lambda stream: stream.assembly.first_token_time or now)
        assembly = first.assembly
        prompts = one_of_each_prompt(streams)
        input_tokens = sum(stream.assembly.prompt_tokens for stream in prompts)
        cached_tokens = sum(stream.assembly.start.cached_tokens for stream in prompts)
        record.times, record.worker_id = times_of(first, now), assembly.worker_id
        # What the worker has finished waits for the client, even if that never takes it.
        first.account_end(now, now)
        record.ledger = first.ledger
        span.stages(record.ledger, now)
        record.attempts = max(len(stream.attempts) for stream in streams)
        record.exact = all(stream.attempts.exact for stream in streams)
        record.adopted = any(stream.is_adopted for stream in streams)
        record.completion_tokens = written
        if record.times.first_token is not None:
            record.cached_tokens = cached_tokens
            self.measure.usage(input_tokens, cached_tokens, written)
        for stream in streams:
            _trace_attempts(span, stream.attempts.all, self.backend.clock())
        if self.backend.tracing.enabled:
            _trace_waits(span, first.attempts.waits(self.opened, record.times.ended))
        span.usage(
            input_tokens=input_tokens,
            output_tokens=written,
            cached_tokens=cached_tokens,
            reasoning_tokens=sum(stream.written_reasoning_tokens for stream in streams),
            worker_id=assembly.worker_id,
            attempts=record.attempts,
        )
        if record.finish:
            span.finish([record.finish])


def _trace_attempts(span: RequestSpan, attempts: Sequence[Attempt], now: float) -> None:
    """Adds the attempts of a stream to the trace, if it needed more than one."""
    for number, attempt in enumerate(attempts if len(attempts) > 1 else (), start=1):
        span.attempt(
            number,
            attempt.worker_id,
            began=attempt.began,
            ended=now if attempt.ended is None else attempt.ended,
            tokens=attempt.tokens,
            loss="" if attempt.loss is None else attempt.loss.value,
        )


def _trace_waits(span: RequestSpan, waits: Sequence[Wait]) -> None:
    """Adds the times without a worker to the trace."""
    for wait in waits:
        name = names.QUEUE_SPAN if wait.loss is None else names.WAIT_SPAN
        loss = "" if wait.loss is None else wait.loss.value
        span.phase(name, wait.began, wait.ended, worker_id=wait.worker_id, loss=loss)
