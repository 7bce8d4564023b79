"""One Generate or Chat from its checked request to the end of its last answer.

Nothing is sent before the first token, not even initial metadata, so that standard client retries work. Every request
leaves the router's tables on every path: finished, failed, cancelled, past its deadline. UNAVAILABLE is said only while
the client has got nothing of any answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import grpc
from fissile.receipts import RequestDigest, canonical_params, confining
from fissile.seed import derive_seed
from fissile.v1 import inference_pb2 as pb

from common.adoption import AdoptionKeys
from common.block_hash import GRANULE_BLOCKS
from common.errors import (
    ApiError,
    NoTokenizerError,
    NoWorkerError,
    ResumeMismatchError,
    RouterEndingError,
    UnservedByWorkersError,
    WorkerLostError,
)
from common.limits import MAX_SENT_LOGPROBS
from common.receipts import LogitChain
from common.sampling_masks import check_tokens_left
from common.sampling_params import SamplingParams
from common.telemetry import names
from common.telemetry.request_record import RequestRecord
from common.telemetry.tracing import RequestSpan, Tracing
from common.text.stop_strings import StopStrings
from router.api.answers import AnswerResponse, Answers
from router.api.in_flight import InFlightCall
from router.api.responses import decode_s, fill_response, finish_name, one_of_each_prompt, times_of, usage_of
from router.api.rpc_scope import Context, RpcScope
from router.api.shutdown import OpenCalls
from router.model_registry import ModelRegistry, ServedModel
from router.requests.request_router import RequestRouter
from router.requests.stream import ReceiptTerms, ReplacedError, RequestStream, RoutedRequest
from router.scheduling.failover import Wait
from router.telemetry.metrics import RequestMeasure
from router.text.answer_logprobs import AnswerLogprobs
from router.text.delivered_text import DeliveredText
from router.text.delivered_tokens import DeliveredTokens
from router.text.prompts import Prompt, PromptEncoder
from router.text.reading import ChannelReader, Reading
from router.text.stream_assembly import StreamAssembly
from router.text.stream_chunk import Echo
from router.validation import (
    check_prompt_logprobs,
    check_resumed_ids,
    clip_to_length,
    sampling_params,
    with_candidates,
    with_logprobs,
)
from router.workers.expected_workers import ExpectedWorkers

AnswerRequest: TypeAlias = pb.GenerateRequest | pb.ChatRequest
# Makes a prompt for a model, of a tenant, with the salt in force.
Encode: TypeAlias = Callable[[ServedModel, str, bytes], Awaitable[Prompt]]
# Trailing metadata: what all answers together have cost, as bytes of a Usage.
USAGE_METADATA = "fissile-usage-bin"


@dataclass(frozen=True, slots=True)
class Kind:
    """Differences between Generate and Chat.

    Attributes:
        operation: its name in traces and figures.
        response: makes its messages.
        continues: True if the answer's text continues the prompt's, False if it is a text of its own: a message has no
            space before its first word, whatever its template ends with.
    """

    operation: str
    response: Callable[..., AnswerResponse]
    continues: bool


GENERATE = Kind(names.TEXT_COMPLETION, pb.GenerateResponse, continues=True)
CHAT = Kind(names.CHAT, pb.ChatResponse, continues=False)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that has passed the checks that need no model.

    Attributes:
        request: as it came.
        call: its place among the calls in flight.
        encode: makes its prompt.
        context: of its call.
        cache_salt: the salt in force.
        span: of its call.
        record: content of its log line.
        scope: sends its trailing metadata.
    """

    request: AnswerRequest
    call: InFlightCall
    encode: Encode
    context: Context
    cache_salt: bytes
    span: RequestSpan
    record: RequestRecord
    scope: RpcScope


# Turn of an answer that shares its call with no other.
_ALONE = contextlib.nullcontext()
T = TypeVar("T")
# Opens the streams of a call for a model; given those of an earlier try.
Begin: TypeAlias = Callable[[ServedModel, Sequence[RequestStream]], Awaitable[Sequence[RequestStream]]]
# Reads the streams of a call for a model.
Read: TypeAlias = Callable[[ServedModel, Sequence[RequestStream]], Awaitable[T]]
# Is told of a request, its model and its answers when all of these have been sent.
OnAnswered: TypeAlias = Callable[[Kind, Asked, ServedModel, Sequence[RequestStream]], None]


class Answering:
    """Has requests answered by the fleet.

    Attributes:
        on_answered: are told of requests whose answers have all been sent.

    Args:
        requests: sends requests on their way.
        expected: workers that have never been up.
        registry: the models.
        encoder: makes token ids of bad words, and text of echoed prompts.
        tracing: says whether waits are worth a span.
        clock: monotonic seconds.
        max_unread_tokens: a client that leaves more unread is dropped.
        calls: knows the calls that have to end with the router.
        default_max_tokens: longest answer to a request that does not say; 0 is all that the model's length leaves.
    """

    def __init__(
        self,
        requests: RequestRouter,
        expected: ExpectedWorkers,
        registry: ModelRegistry,
        encoder: PromptEncoder,
        tracing: Tracing,
        clock: Callable[[], float],
        max_unread_tokens: int,
        calls: OpenCalls,
        default_max_tokens: int = 0,
    ) -> None:
        self._requests = requests
        self._expected = expected
        self._registry = registry
        self._encoder = encoder
        self._tracing = tracing
        self._clock = clock
        self._max_unread_tokens = max_unread_tokens
        self._calls = calls
        self._default_max_tokens = default_max_tokens
        self.on_answered: Sequence[OnAnswered] = ()

    async def run(self, kind: Kind, asked: Asked, measure: RequestMeasure, answers: Answers) -> None:
        """Has a request answered; prepares it once more where its weights go before it has begun.

        Raises:
            ApiError: the request is refused, or an answer has failed.
        """

        async def begin(model: ServedModel, earlier: Sequence[RequestStream]) -> Sequence[RequestStream]:
            model.check_generates()
            choices = _choices(await self.prepare(kind, asked, model), asked)
            # Of a call that this router has had itself no other one has left anything.
            if asked.request.HasField("resume") and not asked.call.took_over:
                await self._requests.wait_for_orphans(choice.adoption_key for choice in choices)
            return self._open(kind, choices, model, asked, earlier)

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
                asked.record.model = model.name
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
            with self.interruptible(asked.call):
                await self._expected.wait_for_model(asked.request.model)

    @contextlib.contextmanager
    def interruptible(self, call: InFlightCall) -> Iterator[None]:
        """Lets the end of the router, and that of the call, interrupt what is done here."""
        with self._calls.interruptible(), call.interruptible():
            yield

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

    async def prepare(self, kind: Kind, asked: Asked, model: ServedModel) -> RoutedRequest:
        """Makes of a request what workers with the weights of `model` get.

        Raises:
            ApiError: the request is refused.
        """
        request, call = asked.request, asked.call
        params = _asked_params(request, model)
        began = self._clock()
        try:
            with self.interruptible(call):
                prompt = await asked.encode(model, call.tenant, asked.cache_salt)
                if params.bad_words:
                    ids = await self._encoder.bad_words(params.bad_words, model, call.tenant)
                    params = replace(params, bad_words_token_ids=ids)
                grammar = await self._encoder.answer_grammar(
                    params.constraint, prompt, model, is_message=not kind.continues, tenant=call.tenant
                )
                params = replace(params, constraint=None, grammar=grammar)
                prompt_text = await self._prompt_text(request.output_options, prompt, model, call.tenant)
        finally:
            asked.span.phase(names.TOKENIZE_SPAN, began, self._clock())
        check_tokens_left(params, model.num_ids, model.eos_token_ids)
        asked.record.prompt_tokens = call.prompt_tokens = len(prompt.token_ids)
        check_prompt_logprobs(params, len(prompt.token_ids))
        if not request.sampling_params.HasField("max_tokens"):
            room = model.max_model_len - len(prompt.token_ids)
            params = replace(params, max_tokens=max(params.min_tokens, min(room, self._default_max_tokens or room)))
        params = clip_to_length(params, len(prompt.token_ids), model.max_model_len)
        asked.span.request(model=model.name, request_id=call.request_id, params=params)
        remaining = asked.context.time_remaining()
        seed = derive_seed(call.request_id) if params.seed is None else params.seed
        return RoutedRequest(
            model=model.name,
            identity=model.identity,
            request_id=call.request_id,
            token_ids=prompt.token_ids,
            params=params,
            seed=seed,
            chain_hash=prompt.chain_hash,
            cache_salt=asked.cache_salt,
            priority=call.priority,
            tenant=call.tenant,
            session_id=request.session_id,
            granules=prompt.granules,
            granule_tokens=GRANULE_BLOCKS * model.block_size,
            arrival=call.arrived,
            deadline=None if remaining is None else self._clock() + remaining,
            traceparent=asked.span.traceparent,
            tracestate=asked.span.tracestate,
            weights_digest=model.weights_digest,
            receipt=receipt_terms(kind, request, model, prompt.token_ids, params, seed, prompt.reading)
            if request.output_options.HasField("receipt")
            else None,
            prompt_text=prompt_text,
            keeps_special_tokens=request.output_options.keep_special_tokens,
            reading=prompt.reading,
        )

    async def _prompt_text(
        self, options: pb.OutputOptions, prompt: Prompt, model: ServedModel, tenant: str
    ) -> str | None:
        """Text that answers begin with; None where nobody wants it."""
        if not options.echo:
            return None
        return await self._encoder.echo(
            prompt.token_ids, model, keep_special=options.keep_special_tokens, tenant=tenant
        )

    def _open(
        self,
        kind: Kind,
        choices: Iterable[RoutedRequest],
        model: ServedModel,
        asked: Asked,
        earlier: Sequence[RequestStream],
    ) -> list[RequestStream]:
        """Sends all answers of a request on their way; those of `earlier` take their places again."""
        points = {point.index: point for point in asked.request.resume.answers}
        # All answers have one prompt: what is known of it goes with the first of them, unless its client has it.
        wants_prompt = not any(point.finished or _has_received(point) for point in points.values())
        return_token_ids = asked.request.output_options.return_token_ids

        def answers() -> Iterator[tuple[RoutedRequest, StreamAssembly]]:
            for number, choice in enumerate(choices):
                point = points.get(choice.choice)
                comes_again = point is not None and self._comes_again(choice, point)
                params = _params_of(choice, None if comes_again else point, wants_prompt=wants_prompt and number == 0)
                answer = replace(choice, params=params)
                assembly = self.assembly(
                    kind, answer, model, point, return_token_ids=return_token_ids, comes_again=comes_again
                )
                yield answer, assembly

        return self.open(asked, answers(), earlier, one_prompt=True)

    def _comes_again(self, answer: RoutedRequest, point: pb.ResumePoint) -> bool:
        """True if an answer is sent from its beginning, and what its client has is left out: of text nothing else could
        be known, digests of logits begin with the answer, and a worker that still runs it has its logprobs."""
        if point.HasField("text") or answer.logits_every:
            return True
        few = len(point.token_ids.ids) <= MAX_SENT_LOGPROBS
        return answer.params.wants_logprobs and few and self._requests.may_adopt(answer.adoption_key)

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

    def assembly(
        self,
        kind: Kind,
        request: RoutedRequest,
        model: ServedModel,
        point: pb.ResumePoint | None = None,
        *,
        return_token_ids: bool = False,
        comes_again: bool = False,
    ) -> StreamAssembly:
        """Assembly that takes an answer.

        Args:
            kind: of the request.
            request: the request.
            model: its model.
            point: what its client has got of it; None for nothing.
            return_token_ids: True if the client gets token ids.
            comes_again: True if what it has got comes from the worker once more.

        Raises:
            ApiError: the model cannot search for stop strings, or `point` cannot be true.
        """
        params, tokenizer = request.params, model.text.tokenizer
        if params.stop_strings and tokenizer is None:
            raise NoTokenizerError(model.name)
        stops = StopStrings(params.stop_strings, params.include_stop_string) if params.stop_strings else None
        behind = request.token_ids if kind.continues else ()
        received = _received_ids(request, point, return_token_ids=return_token_ids)
        check_resumed_ids(received, model.vocab_size, params.max_tokens)
        skip, reading = not request.keeps_special_tokens, request.reading
        keep = frozenset[int]() if reading is None else reading.form.kept_ids
        assembly = StreamAssembly(
            len(request.token_ids),
            detokenizer=None
            if tokenizer is None
            else tokenizer.decode_stream(skip_special=skip, keep=keep, behind=behind),
            stop_strings=stops,
            min_tokens=params.min_tokens,
            return_token_ids=return_token_ids,
            max_unread_tokens=self._max_unread_tokens,
            delivered_text=_delivered_text(point),
            delivered_tokens=_delivered_tokens(point, received) if comes_again else None,
            echo=None if request.prompt_text is None else Echo(request.prompt_text, request.token_ids),
            keeps_special_tokens=request.keeps_special_tokens,
            logprobs=_logprobs(request, 0 if comes_again else len(received)),
            logit_chain=_logit_chain(request),
            reader=None if reading is None else ChannelReader(reading),
        )
        if point is not None and point.token_ids.ids and not comes_again:
            assembly.resume_behind(received)
        return assembly


def receipt_terms(
    kind: Kind,
    request: AnswerRequest,
    model: ServedModel,
    token_ids: Sequence[int],
    params: SamplingParams,
    seed: int,
    reading: Reading | None,
) -> ReceiptTerms:
    """The part of a request's receipts that is known before its answers.

    Args:
        kind: of the request.
        request: as it was sent.
        model: the model.
        token_ids: the prompt.
        params: in force.
        seed: in force.
        reading: terms on which answers are read; None for content alone.
    """
    canonical = canonical_params(request.sampling_params, params)
    template = None if kind.continues else model.text.template
    return ReceiptTerms(
        RequestDigest(
            token_ids,
            canonical,
            seed,
            continues=kind.continues,
            keeps_special_tokens=request.output_options.keep_special_tokens,
            keeps_delimiters=reading is not None
            and (bool(params.stop_strings) or request.sampling_params.HasField("constraint")),
            ends_with_first_call=reading is not None and reading.ends_with_first_call,
            confined_by=confining(request),
        ),
        model.tokenizer_sha256,
        "" if template is None else template.sha256,
        request.output_options.receipt.logits_every,
    )


def _asked_params(request: AnswerRequest, model: ServedModel) -> SamplingParams:
    """Parameters of a request by itself, without what its prompt has to say of them."""
    params = sampling_params(request.sampling_params, model.text.defaults, model.vocab_size)
    params = with_logprobs(params, request.output_options, model.vocab_size)
    wanted_by = "output_options" if params.wants_logprobs else "sampling_params.best_of"
    params = with_candidates(params, request.sampling_params)
    if params.wants_logprobs and not model.serves_logprobs:
        raise UnservedByWorkersError(wanted_by, model.name)
    return params


@contextlib.asynccontextmanager
async def _turn_of(stream: RequestStream, turn: asyncio.Lock) -> AsyncIterator[None]:
    """Holds the call that several answers share."""
    await stream.turn(turn)
    try:
        yield
    finally:
        turn.release()


def _choices(routed: RoutedRequest, asked: Asked) -> list[RoutedRequest]:
    """The answers that are left of a request, each as a request of its own with the parameters of all."""
    points = {point.index: point for point in asked.request.resume.answers}
    left = [i for i in range(routed.params.n) if i not in points or not points[i].finished]
    keys = AdoptionKeys(routed.tenant, routed.request_id, routed.identity, routed.token_ids)
    return [
        replace(
            routed,
            choice=index,
            resumed_from=_resumed_from(asked.request, points.get(index)),
            adoption_key=_adoption_key(keys, replace(routed, choice=index)),
        )
        for index in left
    ]


def _adoption_key(keys: AdoptionKeys, answer: RoutedRequest) -> bytes:
    """Key by which another router may adopt an answer. Empty where it could not: logprobs of a prompt come with one
    answer of several, and once."""
    if answer.params.prompt_logprobs is not None:
        return b""
    return keys.of_answer(answer.to_record(0, must_keep=False, has_generated=False))


def _params_of(answer: RoutedRequest, known: pb.ResumePoint | None, *, wants_prompt: bool) -> SamplingParams:
    """Parameters of one answer: with logprobs of the prompt, or of the given tokens that a resumed answer's sum has.

    Args:
        answer: the answer.
        known: what it goes on behind; None where it comes from its beginning.
        wants_prompt: whether logprobs of the prompt go with it, if there are any.
    """
    params = answer.params
    if wants_prompt or not params.wants_logprobs:
        return params
    if params.logprobs is not None and known is not None and known.token_ids.ids:
        return replace(params, prompt_logprobs=0, prompt_logprobs_start=len(answer.token_ids))
    return params.without_given_logprobs


def _logprobs(request: RoutedRequest, received: int) -> AnswerLogprobs | None:
    """Logprobs that an answer comes with, of which its client has so many tokens; None where none are wanted."""
    if not request.params.wants_logprobs:
        return None
    return AnswerLogprobs(request.params, request.token_ids, len(request.token_ids) + received)


def _logit_chain(request: RoutedRequest) -> LogitChain | None:
    """Digests of logits that a receipt wants; None where it wants none."""
    every = 0 if request.receipt is None else request.receipt.logits_every
    return LogitChain(len(request.token_ids), every) if every else None


def _resumed_from(request: AnswerRequest, point: pb.ResumePoint | None) -> str | None:
    """The numerics class that an answer goes on in; "" where its client does not know it, None where it begins here."""
    has_begun = point is not None and _has_received(point)
    return request.resume.numerics or ("" if has_begun else None)


def _has_received(point: pb.ResumePoint) -> bool:
    """True if something of an answer has come: an empty list of token ids is nothing, as is no list."""
    return point.HasField("text") or bool(point.token_ids.ids)


def _received_ids(request: RoutedRequest, point: pb.ResumePoint | None, *, return_token_ids: bool) -> Sequence[int]:
    """Token ids of an answer that its client has got, without those of an echoed prompt, which logprobs do not name.

    Raises:
        ResumeMismatchError: they do not begin with the prompt.
    """
    ids = () if point is None else point.token_ids.ids
    if point is None or not ids or request.prompt_text is None or not return_token_ids:
        return ids
    size = len(request.token_ids)
    if array("I", ids[:size]) != request.token_ids:
        raise ResumeMismatchError(point.index, "its token ids do not begin with those of the prompt")
    return ids[size:]


def _delivered_text(point: pb.ResumePoint | None) -> DeliveredText | None:
    """The part of an answer's text that a resumed stream leaves out."""
    if point is None or point.WhichOneof("received") != "text":
        return None
    return DeliveredText(point.index, point.text.bytes, point.text.sha256)


def _delivered_tokens(point: pb.ResumePoint | None, received: Sequence[int]) -> DeliveredTokens | None:
    """Tokens of an answer that a resumed stream leaves out; None where its client does not know how many it has."""
    if point is None:
        return None
    if received:
        return DeliveredTokens(point.index, len(received), received)
    return DeliveredTokens(point.index, point.text.tokens) if point.text.tokens else None


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
