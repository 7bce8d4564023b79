"""Makes of a checked request what workers get, and what takes its answers, also those that go on behind what a client
has got.

What only the model can refuse of a request, or the length of its prompt, is refused here, before it is queued.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from fissile.receipts import RequestDigest, canonical_params, confining
from fissile.seed import derive_seed
from fissile.v1 import inference_pb2 as pb

from common.errors import NoTokenizerError, ResumeMismatchError, UnservedByWorkersError
from common.limits import MAX_SENT_LOGPROBS
from common.params.sampling_masks import check_tokens_left
from common.params.sampling_params import SamplingParams
from common.telemetry import names
from common.text.stop_strings import StopStrings
from common.wire.adoption import AdoptionKeys
from common.wire.block_hash import GRANULE_BLOCKS
from router.answers.answer_logprobs import AnswerLogprobs
from router.answers.delivered_text import DeliveredText
from router.answers.delivered_tokens import DeliveredTokens
from router.answers.logit_digests import LogitChain
from router.answers.reading import ChannelReader, Reading
from router.answers.stream_assembly import StreamAssembly
from router.answers.stream_chunk import Echo
from router.api.asked import AnswerRequest, Asked, Kind
from router.api.in_flight import InFlightCall
from router.api.shutdown import OpenCalls
from router.model_registry import ServedModel
from router.prompts.prompts import Prompt, PromptEncoder
from router.requests.stream import ReceiptTerms, RoutedRequest
from router.validation import (
    check_prompt_logprobs,
    check_resumed_ids,
    clip_to_length,
    sampling_params,
    with_candidates,
    with_logprobs,
)


class RequestBuilder:
    """Makes what workers get of requests, and what takes their answers.

    Args:
        encoder: makes token ids of bad words, and text of echoed prompts.
        clock: monotonic seconds.
        calls: knows the calls that have to end with the router.
        may_adopt: True for the key of an answer that a worker may still run for another router.
        max_unread_tokens: a client that leaves more unread is dropped.
        default_max_tokens: longest answer to a request that does not say; 0 is all that the model's length leaves.
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        clock: Callable[[], float],
        calls: OpenCalls,
        may_adopt: Callable[[bytes], bool],
        max_unread_tokens: int,
        default_max_tokens: int = 0,
    ) -> None:
        self._encoder = encoder
        self._clock = clock
        self._calls = calls
        self._may_adopt = may_adopt
        self._max_unread_tokens = max_unread_tokens
        self._default_max_tokens = default_max_tokens

    @contextlib.contextmanager
    def interruptible(self, call: InFlightCall) -> Iterator[None]:
        """Lets the end of the router, and that of the call, interrupt what is done here."""
        with self._calls.interruptible(), call.interruptible():
            yield

    async def choices(self, kind: Kind, asked: Asked, model: ServedModel) -> list[RoutedRequest]:
        """The answers that are left of a request, each as what workers get of it.

        Raises:
            ApiError: the request is refused.
        """
        return _choices(await self.prepare(kind, asked, model), asked)

    async def prepare(self, kind: Kind, asked: Asked, model: ServedModel) -> RoutedRequest:
        """Makes of a request what workers with the weights of `model` get.

        Raises:
            ApiError: the request is refused.
        """
        request, call = asked.request, asked.call
        prompt, prompt_text, params = await self._encode(kind, asked, model)
        asked.record.prompt_tokens = call.prompt_tokens = len(prompt.token_ids)
        params = self._fit(params, request, prompt, model)
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

    async def _encode(self, kind: Kind, asked: Asked, model: ServedModel) -> tuple[Prompt, str | None, SamplingParams]:
        """Prompt, its text where answers begin with it, and parameters with what only a tokenizer can make of them."""
        request, tenant = asked.request, asked.call.tenant
        params = _asked_params(request, model)
        began = self._clock()
        try:
            with self.interruptible(asked.call):
                prompt = await asked.encode(model, tenant, asked.cache_salt)
                if params.bad_words:
                    ids = await self._encoder.bad_words(params.bad_words, model, tenant)
                    params = replace(params, bad_words_token_ids=ids)
                grammar = await self._encoder.answer_grammar(
                    params.constraint,
                    prompt,
                    model,
                    is_message=not kind.continues,
                    tenant=tenant,
                    cache_salt=asked.cache_salt,
                )
                params = replace(params, constraint=None, grammar=grammar)
                prompt_text = await self._prompt_text(request.output_options, prompt, model, tenant)
        finally:
            asked.span.phase(names.TOKENIZE_SPAN, began, self._clock())
        check_tokens_left(params, model.num_ids, model.eos_token_ids)
        return prompt, prompt_text, params

    def _fit(
        self, params: SamplingParams, request: AnswerRequest, prompt: Prompt, model: ServedModel
    ) -> SamplingParams:
        """Parameters of an answer that has to end within the model's length."""
        length = len(prompt.token_ids)
        check_prompt_logprobs(params, length)
        if not request.sampling_params.HasField("max_tokens"):
            room = model.max_model_len - length
            params = replace(params, max_tokens=max(params.min_tokens, min(room, self._default_max_tokens or room)))
        return clip_to_length(params, length, model.max_model_len)

    async def _prompt_text(
        self, options: pb.OutputOptions, prompt: Prompt, model: ServedModel, tenant: str
    ) -> str | None:
        """Text that answers begin with; None where nobody wants it."""
        if not options.echo:
            return None
        return await self._encoder.echo(
            prompt.token_ids, model, keep_special=options.keep_special_tokens, tenant=tenant
        )

    def answers(
        self, kind: Kind, choices: Sequence[RoutedRequest], model: ServedModel, asked: Asked
    ) -> Iterator[tuple[RoutedRequest, StreamAssembly]]:
        """Makes each answer of `choices` one by one: with its own parameters, and what takes it.

        Raises:
            ApiError: what the client says it has got of an answer cannot be true.
        """
        points = {point.index: point for point in asked.request.resume.answers}
        # All answers have one prompt: what is known of it goes with the first of them, unless its client has it.
        wants_prompt = not any(point.finished or _has_received(point) for point in points.values())
        return_token_ids = asked.request.output_options.return_token_ids
        for number, choice in enumerate(choices):
            point = points.get(choice.choice)
            comes_again = point is not None and self._comes_again(choice, point)
            params = _params_of(choice, None if comes_again else point, wants_prompt=wants_prompt and number == 0)
            answer = replace(choice, params=params)
            assembly = self.assembly(
                kind, answer, model, point, return_token_ids=return_token_ids, comes_again=comes_again
            )
            yield answer, assembly

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

    def _comes_again(self, answer: RoutedRequest, point: pb.ResumePoint) -> bool:
        """True if an answer is sent from its beginning, and what its client has is left out: of text nothing else could
        be known, digests of logits begin with the answer, and a worker that still runs it has its logprobs."""
        if point.HasField("text") or answer.logits_every:
            return True
        few = len(point.token_ids.ids) <= MAX_SENT_LOGPROBS
        return answer.params.wants_logprobs and few and self._may_adopt(answer.adoption_key)


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
    if point is None or point.WhichOneof("received") != "text" or not point.text.bytes:
        return None
    return DeliveredText(point.index, point.text.bytes, point.text.sha256)


def _delivered_tokens(point: pb.ResumePoint | None, received: Sequence[int]) -> DeliveredTokens | None:
    """Tokens of an answer that a resumed stream leaves out; None where its client does not know how many it has."""
    if point is None:
        return None
    if received:
        return DeliveredTokens(point.index, len(received), received)
    return DeliveredTokens(point.index, point.text.tokens) if point.text.tokens else None
