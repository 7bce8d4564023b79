"""Requests of the Open Inference Protocol as requests of Generate and Embed, and their answers as tensors. Pure.

Names of tensors and parameters are those of Triton's vLLM backend and of Dynamo, so that clients of either work. A
tensor or a parameter that is not served is refused by name.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from fissile.peers.inference import open_inference_pb2 as oip
from fissile.seed import derive_seed
from fissile.v1 import inference_pb2 as pb

from common.errors import ApiError, InvalidFieldError, UnservedFieldError
from common.limits import MAX_REQUEST_ID_BYTES
from common.rpc.unsupported_fields import refuse_unserved
from common.wire.ids import check_id
from router.answers.tools import json_object
from router.api.open_inference_tensors import BOOL, BYTES, FP32, UINT32, add_output, read_inputs
from router.api.responses import finish_name
from router.validation import check_embed, check_generate, check_whole_answers

VERSION: Final = "1"
PLATFORM: Final = "fissile"
TEXT_INPUT: Final = "text_input"
TEXT_OUTPUT: Final = "text_output"
EMBEDDING: Final = "embedding"
_SAMPLING: Final = "sampling_parameters"
_EXCLUDE: Final = "exclude_input_in_output"
# Output tensors of an answer and their types.
_OUTPUTS: Final[Mapping[str, str]] = {
    TEXT_OUTPUT: BYTES,
    "finish_reason": BYTES,
    "cumulative_logprob": FP32,
    "num_input_tokens": UINT32,
    "num_output_tokens": UINT32,
}
# Those that a request gets which names none.
_USUAL: Final = (TEXT_OUTPUT, "finish_reason")
_INPUTS: Final[Mapping[str, str]] = {
    TEXT_INPUT: BYTES,
    "stream": BOOL,
    "streaming": BOOL,
    _SAMPLING: BYTES,
    _EXCLUDE: BOOL,
    **{f"return_{name}": BOOL for name in _OUTPUTS if name != TEXT_OUTPUT},
}
_SERVED: Final = frozenset(
    (
        "model_name",
        "model_version",
        "id",
        "parameters",
        "inputs",
        "inputs.name",
        "inputs.datatype",
        "inputs.shape",
        "inputs.contents",
        *(f"inputs.contents.{field.name}" for field in oip.InferTensorContents.DESCRIPTOR.fields),
        "outputs",
        "outputs.name",
        "raw_input_contents",
    )
)
# Triton asks by it for an empty last message; here the last message of each answer says that it is the last.
_EMPTY_LAST: Final = "triton_enable_empty_final_response"
_IS_LAST: Final = "triton_final_response"
_SUFFIX_BYTES: Final = 9
# Characters of a value that an error quotes.
_QUOTED: Final = 64

# Parameter of vLLM to the field of SamplingParams.
_RENAMED: Final[Mapping[str, str]] = {
    "stop": "stop_strings",
    "include_stop_str_in_output": "include_stop_string",
    "structured_outputs": "constraint",
}
_NUMBERS: Final = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_INTEGERS: Final = ("top_k", "seed", "max_tokens", "min_tokens", "n", "best_of")
_FLAGS: Final = ("ignore_eos", "include_stop_str_in_output")
_TEXT_LISTS: Final = ("stop", "bad_words")
_ID_LISTS: Final = ("stop_token_ids", "allowed_token_ids")
_FORMS: Final[Mapping[str, str]] = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "grammar": "grammar",
    "choice": "choices",
}


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request as the router runs it.

    Attributes:
        request: for Generate or Embed; its request id is the client's with a random end, because the protocol lets
            requests with one id run at a time.
        client_id: the client's id.
        outputs: names of the tensors of the answer.
        is_streamed: True if the answer is sent in parts.
        is_raw: True if tensors are sent as bytes.
    """

    request: pb.GenerateRequest | pb.EmbedRequest
    client_id: str
    outputs: tuple[str, ...]
    is_streamed: bool
    is_raw: bool

    @classmethod
    def from_proto(cls, message: oip.ModelInferRequest, *, embeds: bool) -> InferRequest:
        """Reads a request.

        Args:
            message: as it came.
            embeds: True if its model gives vectors alone.

        Raises:
            ApiError: a field is not served, or invalid; names it as the client does.
        """
        refuse_unserved(message, _SERVED)
        check_version("model_version", message.model_version)
        check_id("id", message.id, MAX_REQUEST_ID_BYTES - _SUFFIX_BYTES)
        tensors = read_inputs(message, _INPUTS)
        texts = [_text(f"inputs.{TEXT_INPUT}", text) for text in tensors.pop(TEXT_INPUT, ())]
        inputs = {name: _only(f"inputs.{name}", values) for name, values in tensors.items()}
        wanted = tuple(output.name for output in message.outputs)
        read = _read_embed if embeds or EMBEDDING in wanted else _read_generate
        request_id = f"{message.id}-{secrets.token_hex(4)}" if message.id else secrets.token_hex(16)
        infer = cls(
            pb.GenerateRequest(model=message.model_name, request_id=request_id),
            message.id,
            wanted,
            is_streamed=inputs.pop("stream", False) | inputs.pop("streaming", False),
            is_raw=bool(message.raw_input_contents),
        )
        with named_as_sent():
            return read(infer, texts, inputs, _values(message.parameters))


def check_version(path: str, version: str) -> None:
    """Refuses a version of a model other than the only one.

    Raises:
        InvalidFieldError: there is no such version.
    """
    if version not in ("", VERSION):
        raise InvalidFieldError(path, f"is {version[:_QUOTED]!r}", f"empty or {VERSION!r}")


@contextlib.contextmanager
def named_as_sent() -> Iterator[None]:
    """Renames fields in the errors of the block: `sampling_params.stop_strings` is `parameters.stop` to the client."""
    try:
        yield
    except ApiError as error:
        if error.violations:
            error.violations = tuple(replace(each, path=_sent_path(each.path)) for each in error.violations)
            error.message = str(error.violations[0])
        raise


def _sent_path(path: str) -> str:
    first, _, rest = path.partition(".")
    if first in ("text", "prompt") or first.startswith("inputs[") or path == "inputs":
        return f"inputs.{TEXT_INPUT}"
    if first != "sampling_params":
        return path
    name, dot, rest = rest.partition(".")
    sent = next((old for old, new in _RENAMED.items() if new == name), name)
    return f"parameters.{sent}{dot}{rest}"


def _read_embed(
    infer: InferRequest, texts: Sequence[str], inputs: dict[str, Any], parameters: dict[str, Any]
) -> InferRequest:
    others = [f"inputs.{name}" for name in inputs] + [f"parameters.{name}" for name in parameters if name != "priority"]
    if others:
        raise UnservedFieldError(others[0])
    if infer.is_streamed:
        raise InvalidFieldError("inputs.stream", "is true", "false: vectors are one message")
    _check_outputs(infer.outputs, (EMBEDDING,))
    request = pb.EmbedRequest(
        model=infer.request.model,
        request_id=infer.request.request_id,
        inputs=[pb.TextOrTokens(text=text) for text in texts],
        priority=_priority(parameters),
    )
    check_embed(request)
    return replace(infer, request=request, outputs=(EMBEDDING,))


def _read_generate(
    infer: InferRequest, texts: Sequence[str], inputs: dict[str, Any], parameters: dict[str, Any]
) -> InferRequest:
    if len(texts) != 1:
        raise InvalidFieldError(f"inputs.{TEXT_INPUT}", f"has {len(texts)} elements", "one")
    request = pb.GenerateRequest(
        model=infer.request.model,
        request_id=infer.request.request_id,
        text=texts[0],
        priority=_priority(parameters),
    )
    if (given := inputs.pop(_SAMPLING, None)) is not None:
        path = f"inputs.{_SAMPLING}"
        parameters = _joined(parameters, json_object(path, _text(path, given)))
    _fill_sampling(request, parameters)
    if infer.client_id and not request.sampling_params.HasField("seed"):
        # The seed of Generate with this id; the random end of the id must not count.
        request.sampling_params.seed = derive_seed(infer.client_id)
    if not inputs.get(_EXCLUDE, True):
        if infer.is_streamed:
            raise InvalidFieldError(f"inputs.{_EXCLUDE}", "is false", "true beside stream")
        request.output_options.echo = True
    _check_outputs(infer.outputs, tuple(_OUTPUTS))
    usual = infer.outputs or _USUAL
    outputs = tuple(name for name in _OUTPUTS if inputs.get(f"return_{name}", name in usual))
    if "cumulative_logprob" in outputs:
        request.output_options.logprobs = 0
    if "num_output_tokens" in outputs:
        request.output_options.return_token_ids = True
    check_generate(request)
    check_whole_answers(request, is_streamed=infer.is_streamed)
    return replace(infer, request=request, outputs=outputs)


def _check_outputs(wanted: Sequence[str], served: Sequence[str]) -> None:
    for i, name in enumerate(wanted):
        if name not in served or name in wanted[:i]:
            problem = f"is {name[:_QUOTED]!r}" + (", which is named twice" if name in served else "")
            raise InvalidFieldError(f"outputs[{i}].name", problem, f"each of {', '.join(served)} at most once")


def _only(path: str, values: Sequence[Any]) -> Any:
    """The only element of a tensor."""
    if len(values) != 1:
        raise InvalidFieldError(path, f"has {len(values)} elements", "one")
    return values[0]


def _joined(parameters: dict[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of the request and of its tensor `sampling_parameters`."""
    if twice := parameters.keys() & others.keys():
        path = f"parameters.{min(twice)}"
        raise InvalidFieldError(path[: 2 * _QUOTED], f"is also in inputs.{_SAMPLING}", "each parameter once")
    return {**parameters, **others}


def _values(parameters: Mapping[str, oip.InferParameter]) -> dict[str, Any]:
    """The parameters of a request that have a meaning."""
    found = {}
    for name, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise InvalidFieldError(f"parameters.{name[:_QUOTED]}", "is empty", "a value")
        found[name] = getattr(parameter, choice)
    found.pop(_EMPTY_LAST, None)
    return found


def _priority(parameters: dict[str, Any]) -> pb.Priority.ValueType:
    """Takes the priority: as in Triton, 1 is the highest."""
    classes = {0: pb.PRIORITY_UNSPECIFIED, 1: pb.PRIORITY_HIGH, 2: pb.PRIORITY_NORMAL, 3: pb.PRIORITY_LOW}
    given = parameters.pop("priority", 0)
    if isinstance(given, bool) or given not in classes:
        raise InvalidFieldError("parameters.priority", f"is {given!r}"[:_QUOTED], "1 (the highest) to 3, 0 for none")
    return classes[given]


def _fill_sampling(request: pb.GenerateRequest, parameters: Mapping[str, Any]) -> None:
    for name, value in parameters.items():
        path = f"parameters.{name[:_QUOTED]}"
        if name == "skip_special_tokens":
            request.output_options.keep_special_tokens = not _flag(path, value)
            continue
        if name not in _READERS:
            raise UnservedFieldError(path)
        field = _RENAMED.get(name, name)
        try:
            _assign(request.sampling_params, field, _READERS[name](path, value))
        except ValueError:
            raise InvalidFieldError(path, f"is {value!r}"[:_QUOTED], "a value within the range of its type") from None


def _assign(params: pb.SamplingParams, field: str, value: Any) -> None:
    if isinstance(value, list):
        getattr(params, field).extend(value)
    elif isinstance(value, Mapping):
        params.logit_bias.update(value)
    elif isinstance(value, pb.Constraint):
        params.constraint.CopyFrom(value)
    else:
        setattr(params, field, value)


def _number(path: str, value: Any) -> float:
    """A number, or a text with one, as clients of Triton write it."""
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            return float(value)
    raise InvalidFieldError(path, f"is {value!r}"[:_QUOTED], "a number")


def _integer(path: str, value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    with contextlib.suppress(ValueError, OverflowError):
        if isinstance(value, str):
            return int(value[:_QUOTED])
        if isinstance(value, float) and value.is_integer():
            return int(value)
    raise InvalidFieldError(path, f"is {value!r}"[:_QUOTED], "an integer")


def _top_k(path: str, value: Any) -> int:
    """Most likely tokens to sample among; vLLM writes -1 for all of them."""
    number = _integer(path, value)
    return 0 if number == -1 else number


def _flag(path: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise InvalidFieldError(path, f"is {value!r}"[:_QUOTED], "true or false")


def _texts(path: str, value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
        return texts
    raise InvalidFieldError(path, f"is {value!r}"[:_QUOTED], "a text or a list of texts")


def _ids(path: str, value: Any) -> list[int]:
    if isinstance(value, list):
        return [_integer(path, each) for each in value]
    raise InvalidFieldError(path, f"is {value!r}"[:_QUOTED], "a list of token ids")


def _bias(path: str, value: Any) -> dict[int, float]:
    if isinstance(value, Mapping):
        return {_integer(path, token_id): _number(path, bias) for token_id, bias in value.items()}
    raise InvalidFieldError(path, f"is {value!r}"[:_QUOTED], "an object of token ids and numbers")


def _constraint(path: str, value: Any) -> pb.Constraint:
    """A form by its name in vLLM; a schema may be an object."""
    given = {name: form for name, form in value.items() if form is not None} if isinstance(value, Mapping) else {}
    if len(given) != 1 or not given.keys() <= _FORMS.keys():
        raise InvalidFieldError(path, f"is {value!r}"[:_QUOTED], f"an object with one of {', '.join(_FORMS)}")
    ((name, content),) = given.items()
    if name == "json_object":
        return pb.Constraint(json_object=_flag(f"{path}.{name}", content))
    if name == "choice":
        return pb.Constraint(choices=pb.Choices(texts=_texts(f"{path}.{name}", content)))
    if name == "json" and isinstance(content, Mapping):
        content = json.dumps(content, ensure_ascii=False)
    if not isinstance(content, str):
        raise InvalidFieldError(f"{path}.{name}", f"is {content!r}"[:_QUOTED], "a text")
    constraint = pb.Constraint()
    setattr(constraint, _FORMS[name], content)
    return constraint


_READERS: Final[Mapping[str, Callable[[str, Any], Any]]] = {
    **dict.fromkeys(_NUMBERS, _number),
    **dict.fromkeys(_INTEGERS, _integer),
    **dict.fromkeys(_FLAGS, _flag),
    **dict.fromkeys(_TEXT_LISTS, _texts),
    **dict.fromkeys(_ID_LISTS, _ids),
    "top_k": _top_k,
    "logit_bias": _bias,
    "structured_outputs": _constraint,
}


def _text(path: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidFieldError(path, f"is not UTF-8 at byte {error.start}", "UTF-8 text") from None


class InferAnswers:
    """Makes the responses to one request; `model` is the name of its model."""

    def __init__(self, infer: InferRequest) -> None:
        self._infer = infer
        params = infer.request.sampling_params if isinstance(infer.request, pb.GenerateRequest) else pb.SamplingParams()
        self._num_answers = max(1, params.n)
        self._num_finished = 0
        self._logprobs = [0.0] * self._num_answers

    def part(self, message: pb.GenerateResponse, model: str) -> oip.ModelInferResponse:
        """The response with one part of an answer; tensors have an element for each answer, most of them empty."""
        response, index, count = self._response(model), message.index, self._num_answers
        self._logprobs[index] += sum(entry.logprob for entry in message.logprobs)
        if is_finished := message.HasField("finish"):
            self._num_finished += 1
        texts, finishes, tokens = [b""] * count, [b""] * count, [0] * count
        texts[index] = message.text.encode()
        finishes[index] = _finish_reason(message.finish) if is_finished else b""
        tokens[index] = len(message.token_ids)
        values: dict[str, Sequence[Any]] = {
            TEXT_OUTPUT: texts,
            "finish_reason": finishes,
            "cumulative_logprob": self._logprobs,
            "num_output_tokens": tokens,
        }
        if message.HasField("prompt_info"):
            values["num_input_tokens"] = [message.prompt_info.prompt_tokens]
            response.parameters["seed"].string_param = message.prompt_info.seed
        response.parameters[_IS_LAST].bool_param = self._num_finished == count
        self._add(response, values)
        return response

    def whole(self, answered: pb.GenerateOnceResponse, model: str) -> oip.ModelInferResponse:
        """The response with all answers."""
        response, answers, info = self._response(model), answered.answers, answered.prompt_info
        response.parameters["seed"].string_param = info.seed
        response.parameters[_IS_LAST].bool_param = True
        values: dict[str, Sequence[Any]] = {
            TEXT_OUTPUT: [answer.text.encode() for answer in answers],
            "finish_reason": [_finish_reason(answer.finish) for answer in answers],
            "cumulative_logprob": [answer.finish.logprob for answer in answers],
            "num_input_tokens": [info.prompt_tokens],
            "num_output_tokens": [answer.finish.usage.completion_tokens for answer in answers],
        }
        self._add(response, values)
        return response

    def vectors(self, embedded: pb.EmbedResponse, model: str) -> oip.ModelInferResponse:
        """The response with the vectors of texts."""
        response, vectors = self._response(model), embedded.embeddings
        response.parameters[_IS_LAST].bool_param = True
        numbers = [number for vector in vectors for number in vector.values]
        shape = [len(vectors), len(vectors[0].values)]
        add_output(response, EMBEDDING, FP32, numbers, is_raw=self._infer.is_raw, shape=shape)
        return response

    def _response(self, model: str) -> oip.ModelInferResponse:
        return oip.ModelInferResponse(model_name=model, model_version=VERSION, id=self._infer.client_id)

    def _add(self, response: oip.ModelInferResponse, values: Mapping[str, Sequence[Any]]) -> None:
        for name in self._infer.outputs:
            if name in values:
                add_output(response, name, _OUTPUTS[name], values[name], is_raw=self._infer.is_raw)


def failure(request: oip.ModelInferRequest, error: ApiError) -> oip.ModelStreamInferResponse:
    """The message of a stream that ends a request with an error."""
    response = oip.ModelInferResponse(model_name=request.model_name, id=request.id)
    response.parameters[_IS_LAST].bool_param = True
    response.parameters["status"].string_param = error.code.name
    response.parameters["reason"].string_param = error.reason
    return oip.ModelStreamInferResponse(error_message=f"{error.code.name}: {error.message}", infer_response=response)


def describe(name: str, *, embeds: bool, embedding_size: int) -> oip.ModelMetadataResponse:
    """The tensors of a model.

    Args:
        name: of the model.
        embeds: True if it gives vectors alone.
        embedding_size: length of its vectors; 0 if it gives none.
    """
    metadata = oip.ModelMetadataResponse(name=name, versions=[VERSION], platform=PLATFORM)
    if embeds:
        metadata.inputs.add(name=TEXT_INPUT, datatype=BYTES, shape=[-1])
    else:
        for tensor, datatype in _INPUTS.items():
            metadata.inputs.add(name=tensor, datatype=datatype, shape=[1])
        for tensor, datatype in _OUTPUTS.items():
            metadata.outputs.add(name=tensor, datatype=datatype, shape=[1 if tensor == "num_input_tokens" else -1])
    if embedding_size:
        metadata.outputs.add(name=EMBEDDING, datatype=FP32, shape=[-1, embedding_size])
    return metadata


def _finish_reason(finish: pb.Finish) -> bytes:
    return finish_name(finish.reason).encode()
