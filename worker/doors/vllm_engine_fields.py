"""Field table of `vllm.grpc.engine.VllmEngine`: its requests to DoorRequests, DoorEvents to its responses. Pure.

Every scalar of this protocol is a given value: `top_p` 0 is 0, which is refused, and not an absent one. Only `optional`
fields can be absent; then the model's default holds, and `max_tokens` is the rest of the model's length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from common.errors import InvalidFieldError
from common.rpc.unsupported_fields import refuse_unserved
from common.wire.logprob_rows import TokenLogprobs
from worker.doors.door_request import (
    DoorEvent,
    DoorFinish,
    DoorOutput,
    DoorPrompt,
    DoorRequest,
    EmbeddingRequest,
    EngineDoor,
    FinishKind,
)

SERVICE: Final = "vllm.grpc.engine.VllmEngine"
# The peer's field of SamplingParams by our name.
_SCALARS: Final = {
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "min_tokens": "min_tokens",
    "ignore_eos": "ignore_eos",
    "include_stop_string": "include_stop_str_in_output",
    "n": "n",
}
_OPTIONALS: Final = {
    "temperature": "temperature",
    "max_tokens": "max_tokens",
    "logprobs": "logprobs",
    "prompt_logprobs": "prompt_logprobs",
    "seed": "seed",
}
_LISTS: Final = {"stop_strings": "stop", "stop_token_ids": "stop_token_ids"}
# The form of a constraint by the peer's field.
_CONSTRAINTS: Final = {
    "json_schema": "json_schema",
    "regex": "regex",
    "grammar": "grammar",
    "json_object": "json_object",
    "choice": "choices",
}
_SAMPLING: Final = {**_SCALARS, **_OPTIONALS, **_LISTS, "logit_bias": "logit_bias"}
DOOR: Final = EngineDoor(
    "vllm-engine",
    {
        "token_ids": "tokenized.input_ids",
        **{ours: f"sampling_params.{theirs}" for ours, theirs in _SAMPLING.items()},
        **{f"constraint.{form}": f"sampling_params.{theirs}" for theirs, form in _CONSTRAINTS.items()},
        "constraint.choices.texts": "sampling_params.choice.choices",
    },
)
_PROMPT: Final = frozenset({"request_id", "tokenized", "tokenized.original_text", "tokenized.input_ids"})
# A constraint starts with the first token in any case. The peer turns tokens into text, so how it shows special tokens
# concerns the search for stop strings alone.
_ALWAYS_SO: Final = ("grammar_from_first_token", "skip_special_tokens", "spaces_between_special_tokens")
GENERATE: Final = (
    _PROMPT
    | {"text", "stream", "sampling_params", "sampling_params.choice.choices", "data_parallel_rank"}
    | {f"sampling_params.{name}" for name in (*_SAMPLING.values(), *_CONSTRAINTS, *_ALWAYS_SO)}
)
_REASONS: Final = {FinishKind.STOP: "stop", FinishKind.LENGTH: "length", FinishKind.ABORTED: "abort"}


def door_request(request: pb.GenerateRequest) -> DoorRequest:
    """The request as Fissile takes it.

    Raises:
        ApiError: a field is not served, or the prompt is missing.
    """
    refuse_unserved(request, GENERATE)
    if request.WhichOneof("input") is None:
        raise InvalidFieldError("input", "is missing", "tokenized or text")
    if request.data_parallel_rank:
        raise InvalidFieldError("data_parallel_rank", f"is {request.data_parallel_rank}", "0, a worker's only rank")
    given = request.sampling_params
    return DoorRequest(
        prompt=request.text if request.HasField("text") else request.tokenized.input_ids[:],
        params=_params(given) if request.HasField("sampling_params") else {},
        request_id=request.request_id,
        returns_text=False,
        keeps_special_tokens=not given.skip_special_tokens,
    )


def embedding_request(request: pb.EmbedRequest) -> EmbeddingRequest:
    """The request as Fissile takes it.

    Raises:
        ApiError: a field is not served.
    """
    refuse_unserved(request, _PROMPT)
    return EmbeddingRequest(request.tokenized.input_ids[:], request.request_id)


def _params(given: pb.SamplingParams) -> dict[str, Any]:
    params = {ours: getattr(given, theirs) for ours, theirs in _SCALARS.items()}
    params |= {ours: getattr(given, theirs) for ours, theirs in _OPTIONALS.items() if given.HasField(theirs)}
    params |= {ours: tuple(getattr(given, theirs)) for ours, theirs in _LISTS.items()}
    params["logit_bias"] = dict(given.logit_bias)
    form = given.WhichOneof("constraint")
    if form is not None:
        content = getattr(given, form)
        params["constraint"] = {_CONSTRAINTS[form]: tuple(content.choices) if form == "choice" else content}
    return params


class AnswerMessages:
    """Responses to one Generate call: chunks and a last message for each answer if it streams, else the last messages.

    A chunk counts its own tokens, as vLLM's servicer does, and a last message all of them. The logprobs of a streamed
    answer are in its chunks alone. The first chunk of each answer has the logprobs of the prompt.

    Args:
        request: of the call.
    """

    def __init__(self, request: pb.GenerateRequest) -> None:
        self._streams = request.stream
        self._top = request.sampling_params.logprobs
        self._prompt_top = request.sampling_params.prompt_logprobs
        self._wants_prompt = request.sampling_params.HasField("prompt_logprobs")
        self._prompt = DoorPrompt((), 0)
        self._answers: dict[int, DoorOutput] = {}

    def responses(self, event: DoorEvent) -> Iterator[pb.GenerateResponse]:
        """The responses that an event adds."""
        if isinstance(event, DoorPrompt):
            self._prompt = event
            return
        whole = self._answers.setdefault(event.index, DoorOutput(event.index))
        is_first = not whole.token_ids
        whole.token_ids += event.token_ids
        if not self._streams:
            whole.logprobs += event.logprobs
        elif event.token_ids:
            yield pb.GenerateResponse(chunk=self._chunk(event, is_first=is_first))
        if event.finish is not None:
            yield pb.GenerateResponse(complete=self._complete(whole, event.finish))

    def _chunk(self, output: DoorOutput, *, is_first: bool) -> pb.GenerateStreamChunk:
        return pb.GenerateStreamChunk(
            token_ids=output.token_ids,
            completion_tokens=len(output.token_ids),
            output_logprobs=_output_logprobs(output, self._top),
            **self._of_prompt(with_logprobs=is_first),
            index=output.index,
        )

    def _complete(self, whole: DoorOutput, finish: DoorFinish) -> pb.GenerateComplete:
        return pb.GenerateComplete(
            output_ids=whole.token_ids,
            finish_reason=_REASONS[finish.kind],
            completion_tokens=len(whole.token_ids),
            output_logprobs=_output_logprobs(whole, self._top),
            **self._of_prompt(with_logprobs=not (self._streams and whole.token_ids)),
            index=whole.index,
            matched_token_id=finish.stop_token_id,
            matched_stop_str=finish.stop_string,
        )

    def _of_prompt(self, *, with_logprobs: bool) -> dict[str, Any]:
        """Fields of the prompt, which chunks and last messages have in common."""
        prompt, logprobs = self._prompt, None
        if with_logprobs and self._wants_prompt and prompt.token_ids:
            logprobs = _input_logprobs(prompt, self._prompt_top)
        return {
            "prompt_tokens": len(prompt.token_ids),
            "cached_tokens": prompt.cached_tokens,
            "input_logprobs": logprobs,
        }


def _output_logprobs(output: DoorOutput, top: int) -> pb.OutputLogProbs | None:
    if not output.logprobs:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[each.logprob for each in output.logprobs],
        token_ids=output.token_ids,
        top_logprobs=_tops(output.logprobs, top),
    )


def _input_logprobs(prompt: DoorPrompt, top: int) -> pb.InputLogProbs:
    """Logprobs of the prompt's tokens; the first one has none."""
    first = [pb.InputTokenLogProb()] * prompt.logprobs_start
    return pb.InputLogProbs(
        token_logprobs=[*first, *(pb.InputTokenLogProb(value=each.logprob) for each in prompt.logprobs)],
        token_ids=prompt.token_ids,
        top_logprobs=[*([pb.TopLogProbs()] * len(first) if top else ()), *_tops(prompt.logprobs, top)],
    )


def _tops(rows: Sequence[TokenLogprobs], top: int) -> list[pb.TopLogProbs]:
    """The `top` most likely tokens at each position, best first."""
    if not top:
        return []
    return [
        pb.TopLogProbs(token_ids=[token for token, _ in row.top], values=[logprob for _, logprob in row.top])
        for row in rows
    ]
