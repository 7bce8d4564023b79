"""vLLM's `POST /inference/v1/generate`: token ids to a call of Generate, and its events to token ids. Pure.

Trainers and renderers call it. Its sampling parameters are an object of their own, with vLLM's names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from fissile.client import Delta, Event, Finished, Result
from fissile.client.progress import Progress
from fissile.v1 import inference_pb2 as pb

from common.errors import at_path
from facade.http.bodies import Body, TokenIdList, UInt32, decode, refuse_given
from facade.http.errors import HttpError
from facade.http.parts import ReceiptField, fissile_facts
from facade.http.runner import AnswerPlan
from facade.http.sse import data_frame
from facade.openai.logprobs import LogprobForm
from facade.openai.sampling import (
    DONE,
    AnswerBody,
    StreamOptions,
    StructuredOutputs,
    UsageSum,
    call_arguments,
    error_body,
    finish_reason,
    sampling_params,
    stop_reason,
)

# Beginning of a path in fissile.v1 -> field of the body.
NAMES: Final = {
    "sampling_params": "sampling_params*",
    "sampling_params.stop_strings": "sampling_params.stop",
    "sampling_params.include_stop_string": "sampling_params.include_stop_str_in_output",
    "sampling_params.constraint": "sampling_params.structured_outputs",
    "output_options": "sampling_params*",
    "token_ids": "token_ids",
}
# Field of the parameters -> values that do not change the answer. Texts are not returned, so how they are made is one.
_HARMLESS: Final[Mapping[str, Collection[Any] | None]] = {
    "detokenize": None,
    "skip_special_tokens": None,
    "spaces_between_special_tokens": None,
    "output_kind": None,
    "extra_args": (),
}


class TokenSamplingParams(Body):
    """vLLM's sampling parameters that are served."""

    n: UInt32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: UInt32 | None = None
    min_tokens: UInt32 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIdList | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: TokenIdList | None = None
    logit_bias: dict[str, float] | None = None
    structured_outputs: StructuredOutputs | None = None
    logprobs: UInt32 | None = None
    prompt_logprobs: UInt32 | None = None
    # Harmless with some values: see _HARMLESS.
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    output_kind: int | None = None
    extra_args: Any = None


class TokenBody(Body):
    """The fields of a request for token ids that are served."""

    token_ids: TokenIdList
    sampling_params: TokenSamplingParams
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    receipt: bool | ReceiptField | None = None
    # Harmless with some values.
    priority: int | None = None
    features: Any = None
    kv_transfer_params: Any = None


def parse(body: bytes, created: int) -> AnswerPlan:
    """The call for a body. Without `max_tokens` an answer may fill the model's length.

    Args:
        body: JSON.
        created: Unix seconds; responses of this path have none.

    Raises:
        ApiError: a field is invalid, or not served.
    """
    given = decode(body, TokenBody)
    refuse_given(given, {"priority": (0,), "features": (), "kv_transfer_params": ()})
    params = given.sampling_params
    output = pb.OutputOptions(return_token_ids=True)
    with at_path("sampling_params"):
        refuse_given(params, _HARMLESS)
        shared = {
            name: value
            for name in AnswerBody.__struct_fields__
            if name in TokenSamplingParams.__struct_fields__ and (value := getattr(params, name)) is not None
        }
        whole = AnswerBody(model=given.model or "", request_id=given.request_id, **shared)
        whole.cache_salt, whole.receipt, whole.skip_special_tokens = given.cache_salt, given.receipt, None
        if params.logprobs is not None:
            output.logprobs, output.token_bytes = params.logprobs, True
        arguments = {**call_arguments(whole, output), "sampling_params": sampling_params(whole, params.max_tokens)}
    encoder = TokenEncoder(given)
    return AnswerPlan([given.token_ids], False, arguments, encoder, bool(given.stream), NAMES)


class TokenEncoder:
    """Makes the chunks of an answer in token ids, or the whole one.

    Args:
        body: the request.
    """

    def __init__(self, body: TokenBody) -> None:
        self._has_logprobs = body.sampling_params.logprobs is not None
        self._has_prompt_logprobs = body.sampling_params.prompt_logprobs is not None
        self._has_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        # Callers have no tokenizer.
        self._form = LogprobForm(as_ids=True)
        self._usage = UsageSum()
        self._head: dict[str, Any] = {}
        self._of_prompt: dict[str, Any] = {}

    def begin(self, number: int, progress: Progress) -> bytes:
        """Takes the id; the first chunk has the prompt's logprobs."""
        self._head = {"request_id": progress.request_id}
        self._of_prompt = self._prompt(progress.prompt_logprobs)
        return b""

    def event(self, number: int, event: Event) -> bytes:
        """The chunk of an event."""
        choice: dict[str, Any] = {"index": event.index, "logprobs": None, "finish_reason": None, "token_ids": []}
        if isinstance(event, Finished):
            self._usage.add(number, event.finish.usage)
            choice |= _ending(event.finish)
        elif isinstance(event, Delta):
            choice |= self._tokens(event.token_ids, event.logprobs)
        chunk, self._of_prompt = {**self._head, "choices": [choice], **self._of_prompt}, {}
        return data_frame(chunk)

    def end(self) -> bytes:
        """The chunk of usage, if the request asks for it, and the end mark."""
        usage = data_frame({**self._head, "choices": [], "usage": self._usage.fields}) if self._has_usage else b""
        return usage + DONE

    def failure(self, error: HttpError) -> bytes:
        """The event of a failure."""
        return data_frame(error_body(error))

    def whole(self, results: Sequence[Result]) -> Mapping[str, Any]:
        """All answers."""
        result = results[0]
        choices = []
        for answer in result.answers:
            assert answer.finish is not None
            self._usage.add(0, answer.finish.usage)
            tokens = self._tokens(answer.token_ids, answer.logprobs)
            choices.append({"index": answer.index, **tokens, **_ending(answer.finish)})
        prompt = {"prompt_logprobs": None, **self._prompt(result.prompt_logprobs)}
        return {"request_id": result.request_id, "choices": choices, "usage": self._usage.fields, **prompt}

    def _tokens(self, ids: Sequence[int], entries: Sequence[pb.TokenLogprobs]) -> dict[str, Any]:
        return {"logprobs": self._form.chat(entries) if self._has_logprobs else None, "token_ids": [*ids]}

    def _prompt(self, entries: Sequence[pb.TokenLogprobs]) -> dict[str, Any]:
        return {"prompt_logprobs": self._form.of_prompt(entries)} if self._has_prompt_logprobs else {}


def _ending(finish: pb.Finish) -> dict[str, Any]:
    return {
        "finish_reason": finish_reason(finish),
        "stop_reason": stop_reason(finish),
        "fissile": fissile_facts(finish),
    }
