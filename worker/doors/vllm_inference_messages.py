"""Converts messages of vllm.Inference and vllm.Control to and from door requests and events. Pure.

A field that the engine does not serve is refused by its name. Absent values are those of vLLM: without a temperature
an answer is greedy, and without `max_new_tokens` it has at most 20 tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import grpc
from fissile.peers.vllm import control_pb2 as cpb
from fissile.peers.vllm import inference_pb2 as pb
from google.protobuf.message import Message

from common.constraints.forms import CHOICES, GRAMMAR, JSON_OBJECT, JSON_SCHEMA, REGEX, Constraint
from common.errors import ApiError, InvalidFieldError
from common.limits import MAX_REQUEST_BYTES
from common.rpc.unsupported_fields import refuse_unserved
from common.wire.logprob_rows import TokenLogprobs
from worker.doors.door_request import DoorEvent, DoorFinish, DoorOutput, DoorPrompt, DoorRequest, EngineDoor, FinishKind
from worker.engine.sequence import Priority
from worker.session.worker_info import WorkerFacts

_API_VERSION: Final = "vllm"
_DEFAULT_NEW_TOKENS: Final = 20
# Our names of parameters, by the peer's field. In these 0 stands for an absent value.
_ZERO_IS_ABSENT: Final[Mapping[str, str]] = {
    "sampling.num_sequences": "n",
    "sampling.top_k": "top_k",
    "sampling.top_p": "top_p",
    "sampling.min_p": "min_p",
    "decoding.presence_penalty": "presence_penalty",
    "decoding.frequency_penalty": "frequency_penalty",
    "decoding.repetition_penalty": "repetition_penalty",
    "stopping.min_new_tokens": "min_tokens",
    "stopping.include_stop_strings": "include_stop_string",
    "stopping.ignore_eos": "ignore_eos",
}
_LISTS: Final[Mapping[str, str]] = {
    "decoding.allowed_token_ids": "allowed_token_ids",
    "stopping.stop_token_ids": "stop_token_ids",
    "stopping.stop_strings": "stop_strings",
}
_FORMS: Final[Mapping[str, str]] = {
    "json": JSON_SCHEMA,
    "regex": REGEX,
    "choice": CHOICES,
    "grammar": GRAMMAR,
    "json_object": JSON_OBJECT,
}
DOOR: Final = EngineDoor(
    "vllm-inference",
    {
        **{ours: path for path, ours in {**_ZERO_IS_ABSENT, **_LISTS}.items()},
        **{f"constraint.{ours}": f"decoding.{name}" for name, ours in _FORMS.items()},
        "constraint.choices.texts": "decoding.choice.choices",
        "constraint": "decoding.structured_output",
        "max_tokens": "stopping.max_new_tokens",
        "seed": "sampling.seed",
        "logit_bias": "decoding.logit_bias",
        "token_ids": "token_ids.ids",
        "logprobs": "response.output_candidates.top_n",
        "logprob_token_ids": "response.output_candidates.token_ids",
        "prompt_logprobs": "response.prompt_candidates.top_n",
        "cache_salt": "kv.cache_salt",
    },
)
SERVED: Final = frozenset(
    (
        *("request_id", "model", "text", "token_ids", "token_ids.ids", "temperature", "priority"),
        *("sampling", "sampling.seed", "decoding", "decoding.logit_bias", "decoding.choice.choices"),
        *("stopping", "stopping.max_new_tokens", "kv", "kv.bypass_prefix_cache", "kv.cache_salt"),
        *(f"decoding.{name}" for name in _FORMS),
        *_ZERO_IS_ABSENT,
        *_LISTS,
        "response",
        *(f"response.{field.name}" for field in pb.ResponseOptions.DESCRIPTOR.fields),
        *(f"response.{kind}_candidates.top_n" for kind in ("prompt", "output")),
        "response.output_candidates.token_ids",
        "response.output_candidates.token_ids.ids",
    )
)
_RANK_KEY: Final = "x-data-parallel-rank"
_FINISHES: Final = {
    FinishKind.STOP: pb.FinishInfo.STOP,
    FinishKind.LENGTH: pb.FinishInfo.LENGTH,
    FinishKind.ABORTED: pb.FinishInfo.ABORTED,
}


def read_request(request: pb.GenerateRequest) -> DoorRequest:
    """The request as doors have it; values are checked later.

    Raises:
        ApiError: a field is not served or cannot be read; named as in `request`.
    """
    refuse_unserved(request, SERVED)
    if request.WhichOneof("prompt") is None:
        raise InvalidFieldError("prompt", "is missing", "text or token_ids")
    params: dict[str, Any] = {
        "temperature": request.temperature if request.HasField("temperature") else 0.0,
        "max_tokens": request.stopping.max_new_tokens or _DEFAULT_NEW_TOKENS,
        **{ours: value for path, ours in _ZERO_IS_ABSENT.items() if (value := _at(request, path))},
        # A router adds end-of-sequence tokens to those of its client, so some come twice.
        **{ours: tuple(dict.fromkeys(values)) for path, ours in _LISTS.items() if (values := _at(request, path))},
        **_logprobs(request.response),
    }
    if request.sampling.HasField("seed"):
        params["seed"] = request.sampling.seed
    if request.decoding.logit_bias:
        params["logit_bias"] = dict(request.decoding.logit_bias)
    if (constraint := _constraint(request.decoding)) is not None:
        params["constraint"] = constraint
    response = request.response
    return DoorRequest(
        request.text if request.WhichOneof("prompt") == "text" else request.token_ids.ids,
        params,
        request_id=request.request_id,
        cache_salt=request.kv.cache_salt,
        reads_cache=not request.kv.bypass_prefix_cache,
        priority=_priority(request.priority),
        returns_text=not response.HasField("output_text") or response.output_text,
        keeps_special_tokens=response.HasField("skip_special_tokens") and not response.skip_special_tokens,
        keeps_stop_token=request.stopping.include_stop_strings,
    )


def check_rank(metadata: Iterable[tuple[str, str | bytes]], dp_rank: int) -> None:
    """Refuses a call for an engine of another data-parallel rank than `dp_rank`.

    Raises:
        InvalidFieldError: the metadata names another one, or none.
    """
    for key, value in metadata:
        if key == _RANK_KEY and value != str(dp_rank):
            raise InvalidFieldError(f"metadata {_RANK_KEY}", f"is {value[:40]!r}", f"{dp_rank}, this engine's rank")


def _at(request: Message, path: str) -> Any:
    """Value of a field by its path."""
    value: Any = request
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _logprobs(response: pb.ResponseOptions) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind, ours in (("output", "logprobs"), ("prompt", "prompt_logprobs")):
        candidates: pb.CandidateTokens = getattr(response, f"{kind}_candidates")
        if getattr(response, f"{kind}_logprobs"):
            found[ours] = candidates.top_n
        elif candidates.WhichOneof("select") is not None:
            raise InvalidFieldError(
                f"response.{kind}_candidates", f"is set without {kind}_logprobs", "both, or none of them"
            )
    if response.output_candidates.token_ids.ids:
        found["logprob_token_ids"] = tuple(response.output_candidates.token_ids.ids)
    return found


def _constraint(decoding: pb.DecodingParameters) -> Constraint | None:
    name = decoding.WhichOneof("structured_output")
    if name is None or (name == "json_object" and not decoding.json_object):
        return None
    form = _FORMS[name]
    if form == JSON_OBJECT:
        return Constraint(form)
    return Constraint(form, tuple(decoding.choice.choices) if form == CHOICES else (getattr(decoding, name),))


def _priority(value: int) -> Priority:
    """The class of a number; as in vLLM, lower ones come first."""
    return Priority.NORMAL if not value else Priority.HIGH if value < 0 else Priority.LOW


class OutputEncoder:
    """Makes the responses to one request.

    Args:
        response: what they contain.
    """

    def __init__(self, response: pb.ResponseOptions) -> None:
        self._options = response
        self._ids = list(response.output_candidates.token_ids.ids)
        self._num_tokens: dict[int, int] = {}

    def response(self, event: DoorEvent) -> pb.GenerateResponse:
        """The response with one event.

        Raises:
            ApiError: the logprobs of the prompt do not fit in a message.
        """
        if isinstance(event, DoorPrompt):
            response = pb.GenerateResponse(prompt_info=self._prompt(event))
            if (size := response.ByteSize()) > MAX_REQUEST_BYTES:
                message = f"response.prompt_logprobs asks for {size} bytes, which fit in no message"
                raise ApiError(grpc.StatusCode.OUT_OF_RANGE, message, reason="TOO_LONG")
            return response
        return pb.GenerateResponse(outputs=self._output(event))

    def _prompt(self, event: DoorPrompt) -> pb.PromptInfo:
        info = pb.PromptInfo(num_prompt_tokens=len(event.token_ids))
        if self._options.prompt_token_ids:
            info.token_ids.extend(event.token_ids)
        if self._options.prompt_logprobs:
            info.logprobs.append(0.0)
            info.ranks.append(0)
            info.candidate_tokens.add()
            _add_rows(info, event.token_ids[1:], event.logprobs, ())
        return info

    def _output(self, event: DoorOutput) -> pb.SequenceOutput:
        count = self._num_tokens[event.index] = self._num_tokens.get(event.index, 0) + len(event.token_ids)
        output = pb.SequenceOutput(index=event.index, text=event.text, num_tokens=len(event.token_ids))
        if self._options.HasField("output_text") and not self._options.output_text:
            output.text = ""
        if self._options.output_token_ids:
            output.token_ids.extend(event.token_ids)
        if self._options.output_logprobs:
            _add_rows(output, event.token_ids, event.logprobs, self._ids)
        if event.finish is not None:
            output.finish_info.CopyFrom(_finish(event.finish, count))
        return output


def _add_rows(
    message: pb.PromptInfo | pb.SequenceOutput,
    token_ids: Sequence[int],
    rows: Sequence[TokenLogprobs],
    named: Sequence[int],
) -> None:
    """Adds the logprobs of tokens, with the further ones at each position."""
    for token_id, row in zip(token_ids, rows, strict=True):
        message.logprobs.append(row.logprob)
        message.ranks.append(row.rank)
        message.candidate_tokens.add(tokens=_candidates(token_id, row, named))


def _candidates(token_id: int, row: TokenLogprobs, named: Sequence[int]) -> Iterator[pb.CandidateTokenInfo.TokenInfo]:
    for rank, (other, logprob) in enumerate(row.top, start=1):
        if other != token_id:
            yield pb.CandidateTokenInfo.TokenInfo(id=other, logprob=logprob, rank=rank)
    for other, logprob in zip(named, row.given if named else (), strict=True):
        if other != token_id:
            yield pb.CandidateTokenInfo.TokenInfo(id=other, logprob=logprob)


def _finish(finish: DoorFinish, num_tokens: int) -> pb.FinishInfo:
    info = pb.FinishInfo(num_output_tokens=num_tokens, finish_reason=_FINISHES[finish.kind])
    for name in ("stop_token_id", "eos_token_id", "stop_string"):
        if (matched := getattr(finish, name)) is not None:
            setattr(info, name, matched)
    return info


def joined(responses: Iterable[pb.GenerateResponse]) -> pb.GenerateResponse:
    """One response with all parts of one answer."""
    whole, texts = pb.GenerateResponse(), []
    for response in responses:
        texts.append(response.outputs.text)
        tokens = whole.outputs.num_tokens + response.outputs.num_tokens
        whole.MergeFrom(response)
        whole.outputs.num_tokens = tokens
    whole.outputs.text = "".join(texts)
    return whole


def server_info(facts: WorkerFacts, dp_rank: int, dp_size: int) -> cpb.ServerInfo:
    """The engine's description, with the model loaded."""
    return cpb.ServerInfo(
        engine_version=facts.version,
        api_version=_API_VERSION,
        instance_id=facts.instance_id,
        parallelism=cpb.ParallelismInfo(
            tensor_parallel_size=facts.tp_size,
            pipeline_parallel_size=1,
            data_parallel_size=dp_size,
            data_parallel_rank=dp_rank,
            decode_context_parallel_size=1,
            world_size=facts.tp_size,
            data_parallel_size_local=1,
        ),
        max_model_len=facts.max_model_len,
        kv_block_size=facts.block_size,
        total_kv_blocks=facts.total_blocks,
        max_running_requests=facts.max_num_seqs,
        max_batched_tokens=facts.max_num_batched_tokens,
        effective_attention_block_size=facts.block_size,
    )


def model_info(facts: WorkerFacts, folder: str, *, has_tokenizer: bool) -> cpb.ModelInfo:
    """The model's description.

    Args:
        facts: of the worker, with the model loaded.
        folder: of the checkpoint, where a router finds tokenizer and chat template.
        has_tokenizer: whether prompts may be text.
    """
    return cpb.ModelInfo(
        model_id=folder,
        served_model_name=facts.model,
        supports_text_input=has_tokenizer,
        supports_token_ids_input=True,
    )
