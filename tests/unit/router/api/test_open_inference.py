"""The Open Inference Protocol as requests of Generate and Embed, and answers as tensors."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
import pytest
from fissile.peers.inference import open_inference_pb2 as oip
from fissile.seed import derive_seed
from fissile.v1 import inference_pb2 as pb
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ApiError, InvalidFieldError
from router.api.open_inference_messages import InferAnswers, InferRequest, describe, failure, named_as_sent
from router.api.open_inference_tensors import BOOL, BYTES, FP32, UINT32, add_output, read_inputs

TYPES = {"a": BYTES, "b": BOOL, "c": FP32, "d": UINT32}
NUMPY = {BOOL: np.bool_, FP32: np.float32, UINT32: np.uint32}


def infer_request(text: str = "say", *, inputs: dict[str, Any] | None = None, **fields: Any) -> oip.ModelInferRequest:
    """A request with contents; values of inputs and parameters say their types."""
    parameters = fields.pop("parameters", {})
    made = oip.ModelInferRequest(model_name="m", **fields)
    for name, value in {"text_input": text, **(inputs or {})}.items():
        if isinstance(value, bool):
            tensor = made.inputs.add(name=name, datatype=BOOL, shape=[1])
            tensor.contents.bool_contents.append(value)
        else:
            tensor = made.inputs.add(name=name, datatype=BYTES, shape=[1])
            tensor.contents.bytes_contents.append(value.encode())
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(value)]
        setattr(made.parameters[name], kind, value)
    return made


def read(message: oip.ModelInferRequest) -> pb.GenerateRequest:
    made = InferRequest.from_proto(message, embeds=False).request
    assert isinstance(made, pb.GenerateRequest)
    return made


def refused(message: oip.ModelInferRequest, *, embeds: bool = False) -> ApiError:
    with pytest.raises(ApiError) as caught:
        InferRequest.from_proto(message, embeds=embeds)
    return caught.value


def values_of(response: oip.ModelInferResponse, name: str) -> list[Any]:
    """Elements of an output tensor, from contents."""
    (tensor,) = [tensor for tensor in response.outputs if tensor.name == name]
    return [element for _, elements in tensor.contents.ListFields() for element in elements]


ELEMENTS = {
    BYTES: st.binary(max_size=9),
    BOOL: st.booleans(),
    FP32: st.floats(width=32, allow_nan=False),
    UINT32: st.integers(0, 2**32 - 1),
}
tensors = st.sampled_from(sorted(TYPES)).flatmap(
    lambda name: st.tuples(st.just(name), st.lists(ELEMENTS[TYPES[name]], max_size=6))
)


@settings(max_examples=200)
@given(st.lists(tensors, max_size=4, unique_by=lambda pair: pair[0]), st.booleans())
def test_tensors_read_as_they_were_written(given_tensors: list[tuple[str, list[Any]]], is_raw: bool) -> None:
    response = oip.ModelInferResponse()
    for name, values in given_tensors:
        add_output(response, name, TYPES[name], values, is_raw=is_raw)
    request = oip.ModelInferRequest(raw_input_contents=response.raw_output_contents)
    for tensor in response.outputs:
        contents = tensor.contents if tensor.HasField("contents") else None
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape, contents=contents)
    assert read_inputs(request, TYPES) == dict(given_tensors)


@pytest.mark.parametrize("datatype", NUMPY)
def test_raw_outputs_are_numpy_arrays(datatype: str) -> None:
    values: Sequence[Any] = [True, False, True] if datatype == BOOL else [1, 0, 3]
    response = oip.ModelInferResponse()
    add_output(response, "x", datatype, values, is_raw=True)
    assert np.frombuffer(response.raw_output_contents[0], NUMPY[datatype]).tolist() == values


@settings(max_examples=200)
@given(st.binary(max_size=40), st.sampled_from(sorted(TYPES)), st.lists(st.integers(-2, 4), max_size=10))
def test_any_raw_bytes_are_read_or_refused_by_name(data: bytes, name: str, shape: list[int]) -> None:
    request = oip.ModelInferRequest(raw_input_contents=[data])
    request.inputs.add(name=name, datatype=TYPES[name], shape=shape)
    problem = ""
    try:
        values = read_inputs(request, TYPES)[name]
    except InvalidFieldError as error:
        problem = error.violations[0].path
    if problem:
        assert problem.startswith(f"inputs.{name}")
        return
    again = oip.ModelInferResponse()
    add_output(again, name, TYPES[name], values, is_raw=True)
    if TYPES[name] != BOOL:
        assert list(again.raw_output_contents) == [data]


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda r: r.raw_input_contents.append(b""), "inputs.text_input.contents"),
        (lambda r: r.raw_input_contents.extend([b"", b""]), "raw_input_contents"),
        (lambda r: r.inputs.append(r.inputs[0]), "inputs.text_input"),
        (lambda r: r.inputs.add(name="image", datatype=BYTES, shape=[1]), "inputs[1].name"),
        (lambda r: setattr(r.inputs[0], "datatype", "FP32"), "inputs.text_input.datatype"),
        (lambda r: r.inputs[0].shape.append(2), "inputs.text_input"),
        (lambda r: r.inputs[0].shape.append(-1), "inputs.text_input.shape"),
        (lambda r: r.inputs[0].contents.bool_contents.append(True), "inputs.text_input.contents.bool_contents"),
        (lambda r: r.inputs[0].contents.bytes_contents.__setitem__(0, b"\xff"), "inputs.text_input"),
        (lambda r: r.inputs[0].contents.bytes_contents.__setitem__(0, b""), "inputs.text_input"),
        (lambda r: r.inputs[0].parameters["x"].SetInParent(), "inputs.parameters"),
        (lambda r: r.parameters["x"].SetInParent(), "parameters.x"),
        (lambda r: setattr(r, "model_version", "2"), "model_version"),
        (lambda r: setattr(r, "id", "x" * 120), "id"),
        (lambda r: r.outputs.add(name="logprobs"), "outputs[0].name"),
        (lambda r: [r.outputs.add(name="text_output") for _ in range(2)], "outputs[1].name"),
        (lambda r: r.ClearField("inputs"), "inputs.text_input"),
    ],
)
def test_bad_tensors_are_refused_by_name(change: Any, path: str) -> None:
    message = infer_request()
    change(message)
    error = refused(message)
    assert error.violations[0].path == path
    assert error.message.startswith(path)


def test_sampling_parameters_are_those_of_vllm() -> None:
    """From the request, and as texts in JSON, as examples of Triton write them."""
    wanted = pb.SamplingParams(
        temperature=0.5, top_p=0.25, top_k=0, seed=7, max_tokens=9, n=2, ignore_eos=True, include_stop_string=True
    )
    wanted.stop_strings.append("end")
    plain = {"temperature": 0.5, "top_p": 0.25, "top_k": -1, "seed": 7, "max_tokens": 9, "n": 2, "ignore_eos": True}
    same = {"include_stop_str_in_output": True, "stop": "end"}
    assert read(infer_request(parameters={**plain, **same})).sampling_params == wanted
    texts = {name: str(value) if not isinstance(value, bool) else value for name, value in plain.items()}
    given_json = json.dumps({**texts, **same, "stop": ["end"]})
    assert read(infer_request(inputs={"sampling_parameters": given_json})).sampling_params == wanted
    more = {
        "stop_token_ids": [3, 4],
        "allowed_token_ids": [5.0],
        "bad_words": ["no"],
        "logit_bias": {"3": 1.5},
        "structured_outputs": {"json": {"type": "object"}},
        "skip_special_tokens": False,
        "best_of": 2,
    }
    made = read(infer_request(inputs={"sampling_parameters": json.dumps(more)}))
    params = made.sampling_params
    assert (list(params.stop_token_ids), list(params.allowed_token_ids)) == ([3, 4], [5])
    assert (list(params.bad_words), dict(params.logit_bias), params.best_of) == (["no"], {3: 1.5}, 2)
    assert json.loads(params.constraint.json_schema) == {"type": "object"}
    assert made.output_options.keep_special_tokens


@pytest.mark.parametrize(
    ("parameters", "path", "code"),
    [
        ({"temperature": "warm"}, "parameters.temperature", "INVALID_ARGUMENT"),
        ({"temperature": True}, "parameters.temperature", "INVALID_ARGUMENT"),
        ({"max_tokens": 1.5}, "parameters.max_tokens", "INVALID_ARGUMENT"),
        ({"max_tokens": -1}, "parameters.max_tokens", "INVALID_ARGUMENT"),
        ({"seed": 2**64}, "parameters.seed", "INVALID_ARGUMENT"),
        ({"ignore_eos": "yes"}, "parameters.ignore_eos", "INVALID_ARGUMENT"),
        ({"stop": [1]}, "parameters.stop", "INVALID_ARGUMENT"),
        ({"stop_token_ids": 3}, "parameters.stop_token_ids", "INVALID_ARGUMENT"),
        ({"logit_bias": [1]}, "parameters.logit_bias", "INVALID_ARGUMENT"),
        ({"structured_outputs": {"json": "{}", "regex": "a"}}, "parameters.structured_outputs", "INVALID_ARGUMENT"),
        ({"structured_outputs": {"regex": 1}}, "parameters.structured_outputs.regex", "INVALID_ARGUMENT"),
        ({"logprobs": 1}, "parameters.logprobs", "UNIMPLEMENTED"),
        ({"lora_name": "x"}, "parameters.lora_name", "UNIMPLEMENTED"),
        ([1], "inputs.sampling_parameters", "INVALID_ARGUMENT"),
    ],
)
def test_bad_parameters_are_refused_by_name(parameters: Any, path: str, code: str) -> None:
    error = refused(infer_request(inputs={"sampling_parameters": json.dumps(parameters)}))
    assert (error.violations[0].path, error.code.name) == (path, code)


def test_parameter_given_twice_is_refused() -> None:
    message = infer_request(inputs={"sampling_parameters": '{"seed": 1}'}, parameters={"seed": 1})
    assert refused(message).violations[0].path == "parameters.seed"


@pytest.mark.parametrize(
    ("value", "priority"), [(0, pb.PRIORITY_UNSPECIFIED), (1, pb.PRIORITY_HIGH), (3, pb.PRIORITY_LOW)]
)
def test_priority_one_is_the_highest(value: int, priority: int) -> None:
    assert read(infer_request(parameters={"priority": value})).priority == priority
    assert refused(infer_request(parameters={"priority": 4})).violations[0].path == "parameters.priority"


def test_requests_with_one_id_have_one_seed_and_different_ids() -> None:
    first, second = (read(infer_request(id="same")) for _ in range(2))
    assert first.sampling_params.seed == second.sampling_params.seed == derive_seed("same")
    assert first.request_id.startswith("same-")
    assert first.request_id != second.request_id
    assert not read(infer_request()).sampling_params.HasField("seed")
    assert read(infer_request(id="same", parameters={"seed": 3})).sampling_params.seed == 3


def test_outputs_are_those_named_or_asked_for() -> None:
    def outputs(**fields: Any) -> tuple[str, ...]:
        return InferRequest.from_proto(infer_request(**fields), embeds=False).outputs

    assert outputs() == ("text_output", "finish_reason")
    assert outputs(inputs={"return_finish_reason": False, "return_num_output_tokens": True}) == (
        "text_output",
        "num_output_tokens",
    )
    assert outputs(inputs={"return_cumulative_logprob": True})[-1] == "cumulative_logprob"
    assert outputs(outputs=[{"name": "cumulative_logprob"}]) == ("cumulative_logprob",)
    assert read(infer_request(outputs=[{"name": "cumulative_logprob"}])).output_options.HasField("logprobs")


def test_prompt_comes_back_only_when_asked_and_whole() -> None:
    assert not read(infer_request()).output_options.echo
    assert read(infer_request(inputs={"exclude_input_in_output": False})).output_options.echo
    message = infer_request(inputs={"exclude_input_in_output": False, "stream": True})
    assert refused(message).violations[0].path == "inputs.exclude_input_in_output"


def test_texts_of_a_model_without_output_head_are_embedded() -> None:
    message = oip.ModelInferRequest(model_name="m", id="e")
    tensor = message.inputs.add(name="text_input", datatype=BYTES, shape=[2])
    tensor.contents.bytes_contents.extend([b"a", b"b"])
    infer = InferRequest.from_proto(message, embeds=True)
    assert isinstance(infer.request, pb.EmbedRequest)
    assert [one.text for one in infer.request.inputs] == ["a", "b"]
    assert infer.outputs == ("embedding",)
    answered = pb.EmbedResponse(embeddings=[pb.Embedding(values=[1, 2, 3]), pb.Embedding(values=[4, 5, 6])])
    response = InferAnswers(infer).vectors(answered, "m")
    assert list(response.outputs[0].shape) == [2, 3]
    assert values_of(response, "embedding") == [1, 2, 3, 4, 5, 6]
    assert refused(infer_request(parameters={"seed": 1}), embeds=True).violations[0].path == "parameters.seed"
    assert refused(infer_request(inputs={"stream": True}), embeds=True).violations[0].path == "inputs.stream"
    tensor.contents.bytes_contents[1] = b""
    assert refused(message, embeds=True).violations[0].path == "inputs.text_input"


def test_parts_have_an_element_for_each_answer() -> None:
    flags = {"stream": True, "return_num_output_tokens": True, "return_num_input_tokens": True}
    message = infer_request(id="r", inputs=flags, parameters={"n": 2})
    answers = InferAnswers(InferRequest.from_proto(message, embeds=False))
    info = pb.PromptInfo(prompt_tokens=4, seed="9")
    first = answers.part(pb.GenerateResponse(index=1, text="ab", token_ids=[1, 2], prompt_info=info), "m")
    assert (first.id, first.model_name, first.model_version) == ("r", "m", "1")
    assert values_of(first, "text_output") == [b"", b"ab"]
    assert values_of(first, "num_output_tokens") == [0, 2]
    assert values_of(first, "num_input_tokens") == [4]
    assert first.parameters["seed"].string_param == "9"
    finish = pb.Finish(reason=pb.FINISH_REASON_STOP)
    second = answers.part(pb.GenerateResponse(index=1, text="c", finish=finish), "m")
    assert values_of(second, "finish_reason") == [b"", b"stop"]
    last = answers.part(pb.GenerateResponse(index=0, finish=finish), "m")
    flags_of = [part.parameters["triton_final_response"].bool_param for part in (first, second, last)]
    assert flags_of == [False, False, True]


def test_raw_request_gets_raw_answers() -> None:
    data = b"say"
    message = oip.ModelInferRequest(raw_input_contents=[struct.pack("<I", len(data)) + data])
    message.inputs.add(name="text_input", datatype=BYTES, shape=[1, 1])
    infer = InferRequest.from_proto(message, embeds=False)
    assert isinstance(infer.request, pb.GenerateRequest)
    assert infer.request.text == "say"
    answer = pb.GeneratedText(text="é", finish=pb.Finish(reason=pb.FINISH_REASON_LENGTH))
    response = InferAnswers(infer).whole(pb.GenerateOnceResponse(answers=[answer]), "m")
    assert not response.outputs[0].HasField("contents")
    assert list(response.raw_output_contents) == [b"\2\0\0\0\xc3\xa9", b"\6\0\0\0length"]


def test_errors_name_fields_as_the_client_does() -> None:
    for path, sent in {
        "sampling_params.stop_strings": "parameters.stop",
        "sampling_params.constraint.regex": "parameters.structured_outputs.regex",
        "text": "inputs.text_input",
        "inputs[3].text": "inputs.text_input",
        "id": "id",
    }.items():
        with pytest.raises(InvalidFieldError) as caught, named_as_sent():
            raise InvalidFieldError(path, "is bad", "good")
        assert caught.value.message == f"{sent} is bad; valid: good"


def test_failed_request_of_a_stream_is_named_by_its_id() -> None:
    error = InvalidFieldError("id", "is bad", "good")
    message = failure(oip.ModelInferRequest(id="x", model_name="m"), error)
    assert message.error_message == "INVALID_ARGUMENT: id is bad; valid: good"
    assert (message.infer_response.id, message.infer_response.model_name) == ("x", "m")
    parameters = message.infer_response.parameters
    assert parameters["triton_final_response"].bool_param
    assert parameters["status"].string_param == grpc.StatusCode.INVALID_ARGUMENT.name


def test_metadata_of_a_model_lists_what_it_answers() -> None:
    both = describe("m", embeds=False, embedding_size=8)
    assert {"text_input", "stream", "sampling_parameters"} <= {tensor.name for tensor in both.inputs}
    assert {"text_output", "embedding"} <= {tensor.name for tensor in both.outputs}
    vectors = describe("m", embeds=True, embedding_size=8)
    assert [(tensor.name, list(tensor.shape)) for tensor in vectors.outputs] == [("embedding", [-1, 8])]
    assert [tensor.name for tensor in vectors.inputs] == ["text_input"]
