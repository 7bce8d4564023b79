"""Builds the worker requests and the answer assemblies of a checked request, also of one that resumes a broken stream.

Checks that need the model or the length of the prompt are made here, before the request is queued.
"""

from __future__ import annotations

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
from common.text.answer_text import AnswerText
from common.text.detokenizer import TokenBytes
from common.text.stop_strings import StopStrings
from common.wire.block_hash import GRANULE_BLOCKS
from router.answers.answer_logprobs import AnswerLogprobs
from router.answers.channel_reader import ChannelReader, ChannelTerms
from router.answers.delivered import DeliveredText, DeliveredTokens
from router.answers.logit_digests import LogitChain
from router.answers.stream_assembly import StreamAssembly
from router.answers.stream_chunk import Echo
from router.api.answers import AnswerRequest
from router.api.in_flight import InFlightCall
from router.model_registry import ServedModel
from router.prompts.prompts import Prompt, PromptEncoder
from router.requests.adoption_keys import AdoptionKeys
from router.requests.request_router import RequestRouter
from router.requests.stream import ReceiptTerms, RoutedRequest
from router.scheduling.queued_request import CLASS_NAMES
from router.telemetry.request_span import RequestFacts
from router.validation import (
    check_prompt_logprobs,
    check_resumed_ids,
    clip_to_length,
    sampling_params,
    with_candidates,
    with_logprobs,
)


def continues_prompt(request: AnswerRequest) -> bool:
    """True for Generate, whose answer continues the prompt's text.

    The answer of Chat is a text of its own: it has no space before its first word, whatever its template ends with.
    """
    return isinstance(request, pb.GenerateRequest)


class RequestBuilder:
    """Builds what workers get of a request, and the assemblies of its answers.

    Args:
        encoder: makes prompts, token ids of bad words, grammars, and text of echoed prompts.
        requests: knows which answers a worker may still run for another router.
        clock: monotonic seconds.
        max_unread_tokens: a client that leaves more unread is dropped.
        default_max_tokens: longest answer to a request that does not say; 0 is all that the model's length leaves.
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        requests: RequestRouter,
        clock: Callable[[], float],
        max_unread_tokens: int,
        default_max_tokens: int,
    ) -> None:
        self._encoder = encoder
        self._requests = requests
        self._clock = clock
        self._max_unread_tokens = max_unread_tokens
        self._default_max_tokens = default_max_tokens

    async def prompt(self, request: AnswerRequest, model: ServedModel, tenant: str, cache_salt: bytes) -> Prompt:
        """Makes the prompt of a request.

        Raises:
            ApiError: the request is refused.
        """
        if isinstance(request, pb.ChatRequest):
            return await self._encoder.for_chat(request, model, tenant, cache_salt)
        return await self._encoder.for_generate(request, model, tenant, cache_salt)

    async def answers_left(self, call: InFlightCall, request: AnswerRequest, model: ServedModel) -> list[RoutedRequest]:
        """Builds one request for each answer that the client does not have in whole.

        Raises:
            ApiError: the request is refused.
        """
        return _answers_left(request, await self.build(call, request, model))

    async def build(
        self, call: InFlightCall, request: AnswerRequest, model: ServedModel, prompt: Prompt | None = None
    ) -> RoutedRequest:
        """Builds what workers with the weights of `model` get of a request.

        Args:
            call: the call of the request.
            request: the request, checked as far as that needs no model.
            model: its model.
            prompt: its prompt; None if that is still to be made.

        Raises:
            ApiError: the request is refused.
        """
        prompt, prompt_text, params = await self._encode(call, request, model, prompt)
        call.record.prompt_tokens = call.prompt_tokens = len(prompt.token_ids)
        params = self._fit(params, request, prompt, model)
        call.span.request(_facts(call, request, model), params)
        remaining = call.scope.time_remaining()
        seed = derive_seed(call.request_id) if params.seed is None else params.seed
        return RoutedRequest(
            model=model.name,
            identity=model.identity,
            request_id=call.request_id,
            token_ids=prompt.token_ids,
            params=params,
            seed=seed,
            chain_hash=prompt.chain_hash,
            cache_salt=call.cache_salt,
            priority=call.priority,
            tenant=call.tenant,
            session_id=request.session_id,
            granules=prompt.granules,
            granule_tokens=GRANULE_BLOCKS * model.block_size,
            arrival=call.arrived,
            deadline=None if remaining is None else self._clock() + remaining,
            traceparent=call.span.traceparent,
            tracestate=call.span.tracestate,
            weights_digest=model.weights_digest,
            receipt=receipt_terms(request, model, prompt.token_ids, params, seed, prompt.reading)
            if request.output_options.HasField("receipt")
            else None,
            prompt_text=prompt_text,
            keeps_special_tokens=request.output_options.keep_special_tokens,
            token_bytes=_token_bytes(request.output_options, model),
            shows_prompt_ids=request.output_options.prompt_token_ids,
            reading=prompt.reading,
            ledger=call.record.ledger,
        )

    async def _encode(
        self, call: InFlightCall, request: AnswerRequest, model: ServedModel, prompt: Prompt | None
    ) -> tuple[Prompt, str | None, SamplingParams]:
        """Makes the prompt, the text to echo, and the parameters that need a tokenizer."""
        tenant = call.tenant
        params = _requested_params(request, model)
        began = self._clock()
        try:
            with call.interruptible():
                if prompt is None:
                    prompt = await self.prompt(request, model, tenant, call.cache_salt)
                if params.bad_words:
                    ids = await self._encoder.bad_words(params.bad_words, model, tenant)
                    params = replace(params, bad_words_token_ids=ids)
                grammar = await self._encoder.answer_grammar(
                    params.constraint,
                    prompt,
                    model,
                    is_message=not continues_prompt(request),
                    tenant=tenant,
                    cache_salt=call.cache_salt,
                )
                params = replace(params, constraint=None, grammar=grammar)
                prompt_text = await self._prompt_text(request.output_options, prompt, model, tenant)
        finally:
            call.span.phase(names.TOKENIZE_SPAN, began, self._clock())
        check_tokens_left(params, model.num_ids, model.eos_token_ids)
        return prompt, prompt_text, params

    def _fit(
        self, params: SamplingParams, request: AnswerRequest, prompt: Prompt, model: ServedModel
    ) -> SamplingParams:
        """Parameters with `max_tokens` clipped to the room that the prompt leaves of the model's length."""
        length = len(prompt.token_ids)
        check_prompt_logprobs(params, length)
        if not request.sampling_params.HasField("max_tokens"):
            room = model.max_model_len - length
            params = replace(params, max_tokens=max(params.min_tokens, min(room, self._default_max_tokens or room)))
        return clip_to_length(params, length, model.max_model_len)

    async def _prompt_text(
        self, options: pb.OutputOptions, prompt: Prompt, model: ServedModel, tenant: str
    ) -> str | None:
        """Text of the prompt, if answers begin with it."""
        if not options.echo:
            return None
        return await self._encoder.echo(
            prompt.token_ids, model, keep_special=options.keep_special_tokens, tenant=tenant
        )

    def assemblies(
        self, request: AnswerRequest, answers: Sequence[RoutedRequest], model: ServedModel
    ) -> Iterator[tuple[RoutedRequest, StreamAssembly]]:
        """Makes the assembly of each answer, one by one, and sets the parameters of the answer alone.

        Args:
            request: as the client sent it.
            answers: as of `answers_left`.
            model: the model that they were built for.

        Raises:
            ApiError: what the client says it received of an answer cannot be true.
        """
        points = {point.index: point for point in request.resume.answers}
        # The logprobs of the prompt, which all answers share, go with the first one, unless the client has them.
        wants_prompt = not any(point.finished or _has_received(point) for point in points.values())
        return_token_ids = request.output_options.return_token_ids
        for number, each in enumerate(answers):
            point = points.get(each.choice)
            comes_again = point is not None and self._comes_again(each, point)
            params = _params_of(each, None if comes_again else point, wants_prompt=wants_prompt and number == 0)
            answer = replace(each, params=params)
            assembly = self.assembly(
                request, answer, model, point, return_token_ids=return_token_ids, comes_again=comes_again
            )
            yield answer, assembly

    def assembly(
        self,
        request: AnswerRequest,
        answer: RoutedRequest,
        model: ServedModel,
        point: pb.ResumePoint | None = None,
        *,
        return_token_ids: bool = False,
        comes_again: bool = False,
    ) -> StreamAssembly:
        """Makes the assembly of one answer.

        Args:
            request: as the client sent it.
            answer: the answer.
            model: its model.
            point: what the client received of it before its stream broke; None for nothing.
            return_token_ids: True if the client gets token ids.
            comes_again: True if the worker sends the received part once more, and the assembly leaves it out.

        Raises:
            ApiError: the model cannot search for stop strings, or `point` cannot be true.
        """
        params, tokenizer = answer.params, model.text.tokenizer
        if params.stop_strings and tokenizer is None:
            raise NoTokenizerError(model.name)
        behind = answer.token_ids if continues_prompt(request) else ()
        received = _received_ids(answer, point, return_token_ids=return_token_ids)
        check_resumed_ids(received, model.vocab_size, params.max_tokens)
        skip, reading = not answer.keeps_special_tokens, answer.reading
        keep = frozenset[int]() if reading is None else reading.form.kept_ids
        detokenizer = (
            None if tokenizer is None else tokenizer.decode_stream(skip_special=skip, keep=keep, behind=behind)
        )
        stops = StopStrings(params.stop_strings, params.include_stop_string) if params.stop_strings else None
        assembly = StreamAssembly(
            len(answer.token_ids),
            text=AnswerText(detokenizer, stops, params.min_tokens, is_read_per_token=reading is not None),
            return_token_ids=return_token_ids,
            max_unread_tokens=self._max_unread_tokens,
            delivered_text=_delivered_text(point),
            delivered_tokens=_delivered_tokens(point, received) if comes_again else None,
            echo=None if answer.prompt_text is None else Echo(answer.prompt_text, answer.token_ids),
            keeps_special_tokens=answer.keeps_special_tokens,
            logprobs=_logprobs(answer, 0 if comes_again else len(received)),
            logit_chain=_logit_chain(answer),
            reader=None if reading is None else ChannelReader(reading),
        )
        if point is not None and point.token_ids.ids and not comes_again:
            assembly.resume_behind(received)
        return assembly

    def _comes_again(self, answer: RoutedRequest, point: pb.ResumePoint) -> bool:
        """True if the answer is sent from its beginning, and its assembly leaves out what the client has.

        Text alone does not say which tokens it came from, digests of logits begin with the answer, and a worker that
        still runs the answer has its logprobs.
        """
        if point.HasField("text") or answer.logits_every:
            return True
        few = len(point.token_ids.ids) <= MAX_SENT_LOGPROBS
        return answer.params.wants_logprobs and few and self._requests.may_adopt(answer.adoption_key)


def _facts(call: InFlightCall, request: AnswerRequest, model: ServedModel) -> RequestFacts:
    form = request.sampling_params.constraint.WhichOneof("form")
    return RequestFacts(
        model=model.name,
        request_id=call.request_id,
        session_id=request.session_id,
        tenant=call.tenant,
        key=call.record.key,
        priority=CLASS_NAMES[call.priority],
        is_json=form in ("json_schema", "json_object"),
    )


def _token_bytes(options: pb.OutputOptions, model: ServedModel) -> TokenBytes | None:
    """Bytes of the tokens of logprobs; None if they are not requested.

    Raises:
        NoTokenizerError: the model has no tokenizer.
    """
    if not options.token_bytes:
        return None
    if model.text.tokenizer is None:
        raise NoTokenizerError(model.name)
    return model.text.tokenizer.pieces


def receipt_terms(
    request: AnswerRequest,
    model: ServedModel,
    token_ids: Sequence[int],
    params: SamplingParams,
    seed: int,
    reading: ChannelTerms | None,
) -> ReceiptTerms:
    """The part of a request's receipts that does not depend on its answers.

    Args:
        request: as the client sent it.
        model: the model.
        token_ids: the prompt.
        params: in force.
        seed: in force.
        reading: how answers are split into channels; None for content alone.
    """
    canonical = canonical_params(request.sampling_params, params)
    template = None if continues_prompt(request) else model.text.template
    return ReceiptTerms(
        RequestDigest(
            token_ids,
            canonical,
            seed,
            continues=continues_prompt(request),
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


def _requested_params(request: AnswerRequest, model: ServedModel) -> SamplingParams:
    """Parameters of a request as far as they do not depend on its prompt."""
    params = sampling_params(request.sampling_params, model.text.defaults, model.vocab_size)
    params = with_logprobs(params, request.output_options, model.vocab_size)
    option = "prompt_logprobs" if params.logprobs is None else "logprobs"
    wanted_by = f"output_options.{option}" if params.wants_logprobs else "sampling_params.best_of"
    params = with_candidates(params, request.sampling_params)
    if params.wants_logprobs and not model.serves_logprobs:
        raise UnservedByWorkersError(wanted_by, model.name)
    return params


def _answers_left(request: AnswerRequest, routed: RoutedRequest) -> list[RoutedRequest]:
    """One request for each answer that has not finished, with the parameters of all answers."""
    points = {point.index: point for point in request.resume.answers}
    left = [i for i in range(routed.params.n) if i not in points or not points[i].finished]
    keys = AdoptionKeys(routed.tenant, routed.request_id, routed.identity, routed.token_ids)
    return [
        replace(
            routed,
            choice=index,
            resumed_from=_resumed_from(request, points.get(index)),
            adoption_key=_adoption_key(keys, replace(routed, choice=index)),
        )
        for index in left
    ]


def _adoption_key(keys: AdoptionKeys, answer: RoutedRequest) -> bytes:
    """Key by which another router may adopt an answer. Empty with logprobs of the prompt, which are sent only once."""
    if answer.params.prompt_logprobs is not None:
        return b""
    return keys.of_answer(answer.to_record(0, must_keep=False, has_generated=False))


def _params_of(answer: RoutedRequest, known: pb.ResumePoint | None, *, wants_prompt: bool) -> SamplingParams:
    """Parameters of one answer, which say whether it brings logprobs of the prompt.

    The cumulative logprob of an answer that continues received tokens needs the logprobs of those.

    Args:
        answer: the answer.
        known: what the client received and the answer continues; None if the answer starts from its beginning.
        wants_prompt: whether the requested logprobs of the prompt come with this answer.
    """
    params = answer.params
    if wants_prompt or not params.wants_logprobs:
        return params
    if params.logprobs is not None and known is not None and known.token_ids.ids:
        return replace(params, prompt_logprobs=0, prompt_logprobs_start=len(answer.token_ids))
    return params.without_given_logprobs


def _logprobs(answer: RoutedRequest, received: int) -> AnswerLogprobs | None:
    """Logprobs of an answer whose client has `received` tokens; None if none are wanted."""
    if not answer.params.wants_logprobs:
        return None
    return AnswerLogprobs(answer.params, answer.token_ids, len(answer.token_ids) + received)


def _logit_chain(answer: RoutedRequest) -> LogitChain | None:
    """Digests of logits for the receipt; None if it has none."""
    return LogitChain(len(answer.token_ids), answer.logits_every) if answer.logits_every else None


def _resumed_from(request: AnswerRequest, point: pb.ResumePoint | None) -> str | None:
    """The numerics class in which an answer continues; "" if its client does not know it, None if it starts here."""
    has_received = point is not None and _has_received(point)
    return request.resume.numerics or ("" if has_received else None)


def _has_received(point: pb.ResumePoint) -> bool:
    """True if the client received a part of an answer. An empty list of token ids is none."""
    return point.HasField("text") or bool(point.token_ids.ids)


def _received_ids(answer: RoutedRequest, point: pb.ResumePoint | None, *, return_token_ids: bool) -> Sequence[int]:
    """Token ids of an answer that the client received, without those of an echoed prompt.

    Raises:
        ResumeMismatchError: they do not begin with the prompt.
    """
    ids = () if point is None else point.token_ids.ids
    if point is None or not ids or answer.prompt_text is None or not return_token_ids:
        return ids
    size = len(answer.token_ids)
    if array("I", ids[:size]) != answer.token_ids:
        raise ResumeMismatchError(point.index, "its token ids do not begin with those of the prompt")
    return ids[size:]


def _delivered_text(point: pb.ResumePoint | None) -> DeliveredText | None:
    """The part of an answer's text that a resumed stream leaves out."""
    if point is None or point.WhichOneof("received") != "text" or not point.text.bytes:
        return None
    return DeliveredText(point.index, point.text.bytes, point.text.sha256)


def _delivered_tokens(point: pb.ResumePoint | None, received: Sequence[int]) -> DeliveredTokens | None:
    """Tokens of an answer that a resumed stream leaves out; None if the client does not know how many it has."""
    if point is None:
        return None
    if received:
        return DeliveredTokens(point.index, len(received), received)
    return DeliveredTokens(point.index, point.text.tokens) if point.text.tokens else None
