"""Fields that chat completions and completions share, as parameters of fissile.v1; and the form of errors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from fissile.client.progress import Answer, finish_name
from fissile.v1 import inference_pb2 as pb

from common.errors import InvalidFieldError
from common.limits import MAX_ANSWERS
from facade.http.bodies import Body, TokenIdList, UInt32, refuse_given
from facade.http.errors import HttpError
from facade.http.parts import ABSENT, ReceiptField, is_given, receipt_argument

# Field -> values that do not change the answer; None for any value.
HARMLESS: Final[Mapping[str, Collection[Any] | None]] = {
    "user": None,
    "metadata": None,
    "safety_identifier": None,
    "store": (False,),
    "service_tier": ("auto", "default"),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "spaces_between_special_tokens": (True,),
}
# Beginning of a path in fissile.v1 -> field of OpenAI or vLLM.
NAMES: Final = {
    "sampling_params": "*",
    "sampling_params.max_tokens": "max_tokens",
    "sampling_params.stop_strings": "stop",
    "sampling_params.include_stop_string": "include_stop_str_in_output",
    "sampling_params.constraint": "response_format",
    "output_options": "*",
    "output_options.keep_special_tokens": "skip_special_tokens",
    "session_id": "prompt_cache_key",
    "resume": "request",
}
_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
DONE: Final = b"data: [DONE]\n\n"
_CODES: Final = {
    "TOO_LONG": "context_length_exceeded",
    "UNKNOWN_MODEL": "model_not_found",
    "UNSERVED_FIELD": "unsupported_parameter",
    "INVALID_FIELD": "invalid_value",
    "API_KEY_MISSING": "invalid_api_key",
    "API_KEY_INVALID": "invalid_api_key",
    "QUEUE_FULL": "rate_limit_exceeded",
    "TENANT_LIMIT": "rate_limit_exceeded",
    "DEADLINE_HOPELESS": "rate_limit_exceeded",
}


def error_body(error: HttpError) -> dict[str, Any]:
    """The body of a failure, as OpenAI's clients read it."""
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    code = _CODES.get(error.reason, error.reason.lower()) or None
    return {"error": {"message": error.message, "type": kind, "param": error.param or None, "code": code}}


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None
    include_obfuscation: Literal[False] | None = None


class StructuredOutputs(Body):
    """The form of an answer, as vLLM names it; exactly one field."""

    # `json` is a schema, as an object or as text.
    json: msgspec.Raw = ABSENT
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class JsonSchema(Body):
    """A schema with its name, which has no effect."""

    schema: msgspec.Raw
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of an answer, as OpenAI names it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class AnswerBody(Body, kw_only=True):
    """Fields of OpenAI and vLLM that both endpoints have, and Fissile's own (the last ones)."""

    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    n: UInt32 | None = None
    best_of: UInt32 | None = None
    max_tokens: UInt32 | None = None
    min_tokens: UInt32 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIdList | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: TokenIdList | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: UInt32 | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    prompt_cache_key: str | None = None
    priority: Literal["low", "normal", "high"] | None = None
    receipt: bool | ReceiptField | None = None
    # Harmless with some values: see HARMLESS.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    store: bool | None = None
    service_tier: str | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    spaces_between_special_tokens: bool | None = None

    def __post_init__(self) -> None:
        """Refuses values that are not served."""
        refuse_given(self, HARMLESS)
        if self.best_of is None:
            return
        if not self.num_choices <= self.best_of <= MAX_ANSWERS:
            raise InvalidFieldError("best_of", f"is {self.best_of}", f"n or more, at most {MAX_ANSWERS}")
        if self.stream and self.best_of > self.num_choices:
            raise InvalidFieldError("best_of", "is above n in a stream", "stream: false: the best are known at the end")

    @property
    def num_choices(self) -> int:
        """Number of choices of each prompt."""
        return 1 if self.n is None else self.n

    @property
    def has_selection(self) -> bool:
        """True if more answers are generated than the response has choices."""
        return self.best_of is not None and self.best_of > self.num_choices

    def choices_of(self, answers: Sequence[Answer]) -> Sequence[Answer]:
        """Answers of the response; with `best_of` those with the highest mean logprob, the best one first."""
        if not self.has_selection:
            return answers
        # The sort is stable: of equals the lower index is first, as in GenerateOnce.
        return sorted(answers, key=_mean_logprob, reverse=True)[: self.num_choices]

    @property
    def has_usage(self) -> bool:
        """True if the stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def sampling_params(body: AnswerBody, max_tokens: int | None) -> pb.SamplingParams:
    """The sampling parameters of a body.

    Args:
        body: the request.
        max_tokens: from the endpoint's own fields; None for the model's rest.

    Raises:
        ApiError: a value is invalid.
    """
    names = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
    given: dict[str, Any] = {name: getattr(body, name) for name in (*names, "n", "min_tokens", "ignore_eos")}
    if body.has_selection:
        given["n"] = body.best_of
    given["max_tokens"] = max_tokens
    given["include_stop_string"] = body.include_stop_str_in_output
    # vLLM turns the filter off with -1 too.
    given["top_k"] = 0 if body.top_k == -1 else body.top_k
    if body.top_k is not None and body.top_k < -1:
        raise InvalidFieldError("top_k", f"is {body.top_k}", "0 or more, -1 for all")
    # Seeds of other services are signed; the random numbers take 64 bits.
    if body.seed is not None:
        if not -(1 << 63) <= body.seed < 1 << 64:
            raise InvalidFieldError("seed", "has more than 64 bits", "-2^63 to 2^64 - 1")
        given["seed"] = body.seed % (1 << 64)
    made = pb.SamplingParams(**{name: value for name, value in given.items() if value is not None})
    made.stop_strings.extend([body.stop] if isinstance(body.stop, str) else body.stop or ())
    made.stop_token_ids.extend(body.stop_token_ids or ())
    made.bad_words.extend(body.bad_words or ())
    made.allowed_token_ids.extend(body.allowed_token_ids or ())
    for key, bias in (body.logit_bias or {}).items():
        if not key.isdecimal() or int(key) >= 1 << 32:
            raise InvalidFieldError("logit_bias", f"has the key {key[:32]!r}", "token ids as decimal numbers")
        made.logit_bias[int(key)] = bias
    if (constraint := _constraint(body)) is not None:
        made.constraint.CopyFrom(constraint)
    return made


def _constraint(body: AnswerBody) -> pb.Constraint | None:
    form, outputs = body.response_format, body.structured_outputs
    if outputs is not None:
        return _structured(outputs)
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return pb.Constraint(json_object=True)
    if form.json_schema is None:
        raise InvalidFieldError("response_format.json_schema", "is missing", "an object with name and schema")
    return pb.Constraint(json_schema=json_text(form.json_schema.schema))


def _structured(outputs: StructuredOutputs) -> pb.Constraint:
    given = [name for name in ("regex", "choice", "grammar", "json_object") if getattr(outputs, name)]
    given += ["json"] if is_given(outputs.json) else []
    if len(given) != 1:
        raise InvalidFieldError("structured_outputs", f"has {len(given)} forms", "exactly one")
    if is_given(outputs.json):
        return pb.Constraint(json_schema=json_text(outputs.json))
    if outputs.choice:
        return pb.Constraint(choices=pb.Choices(texts=outputs.choice))
    return pb.Constraint(**{given[0]: getattr(outputs, given[0])})


def json_text(raw: msgspec.Raw) -> str:
    """The text of a JSON value as it was written, because the order of names matters; of a string its text."""
    text = bytes(raw).strip()
    return msgspec.json.decode(text, type=str) if text.startswith(b'"') else text.decode()


def effort_arguments(path: str, effort: str | None) -> dict[str, Any] | None:
    """Variables of the chat template for an effort: `reasoning_effort`, or `enable_thinking` false for none.

    Raises:
        InvalidFieldError: the effort, the caller's field `path`, is unknown.
    """
    if effort is None:
        return None
    if effort not in _EFFORTS:
        raise InvalidFieldError(path, f"is {effort[:64]!r}", ", ".join(_EFFORTS))
    return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}


def call_arguments(body: AnswerBody, output: pb.OutputOptions) -> dict[str, Any]:
    """Arguments of the client library that do not depend on the endpoint, without sampling parameters.

    Args:
        body: the request.
        output: options that the endpoint has set; completed here.
    """
    if body.return_token_ids:
        output.return_token_ids = output.prompt_token_ids = True
    if body.prompt_logprobs is not None:
        output.prompt_logprobs, output.token_bytes = body.prompt_logprobs, True
    if body.has_selection and not output.HasField("logprobs"):
        output.logprobs = 0
    if body.skip_special_tokens is not None:
        output.keep_special_tokens = not body.skip_special_tokens
    given = {
        "model": body.model,
        "request_id": body.request_id,
        "session_id": body.prompt_cache_key,
        "cache_salt": body.cache_salt,
        "priority": body.priority,
        "output_options": output,
        "receipt": receipt_argument(body.receipt),
    }
    return {name: value for name, value in given.items() if value is not None}


def finish_reason(finish: pb.Finish) -> str:
    """The finish reason: stop, length or tool_calls."""
    return finish_name(finish)


def stop_reason(finish: pb.Finish) -> str | int | None:
    """The stop string or token id of the request that matched, as vLLM reports it."""
    if finish.stop.WhichOneof("matched") == "stop_string":
        return finish.stop.stop_string
    return finish.stop.stop_token_id if finish.stop.WhichOneof("matched") == "stop_token_id" else None


def _mean_logprob(answer: Answer) -> float:
    assert answer.finish is not None
    return answer.finish.logprob / max(1, answer.finish.usage.completion_tokens)


class UsageSum:
    """Token counts of all answers to a request, as OpenAI's `usage`: the prompt of each call counts once."""

    def __init__(self) -> None:
        self._prompts: dict[int, pb.Usage] = {}
        self._completion = self._reasoning = 0

    def add(self, number: int, usage: pb.Usage) -> None:
        """Adds a finished answer of call `number`."""
        self._prompts[number] = usage
        self._completion += usage.completion_tokens
        self._reasoning += usage.reasoning_tokens

    @property
    def fields(self) -> dict[str, Any]:
        prompt = sum(usage.prompt_tokens for usage in self._prompts.values())
        cached = sum(usage.cached_tokens for usage in self._prompts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion,
            "total_tokens": prompt + self._completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": self._reasoning},
        }
