"""The real Dynamo over workers, by its vLLM sidecar: OpenAI requests through it give the answers of Fissile."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from fissile.peers.inference import open_inference_pb2 as oip
from fissile.peers.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from fissile.v1 import inference_pb2 as pb

from tests.e2e.service import REPOSITORY, Service, running_service
from tests.peers.dynamo import running_frontend, running_kserve, running_sidecar

pytestmark = pytest.mark.long

DEMO = REPOSITORY / "deploy" / "demo" / "checkpoint"
PROMPT = "Once upon a time there was a"
ENDLESS: dict[str, Any] = {"max_tokens": 900, "temperature": 0, "stream": True, "extra_body": {"ignore_eos": True}}
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 30},
    {"temperature": 0.9, "top_p": 0.9, "seed": 5, "max_tokens": 40},
    {"temperature": 1.0, "seed": 8, "max_tokens": 200, "stop": ["."]},
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    options = ["--doors", "vllm-inference", "--prefix-caching", "--constraints", "--max-model-len", "1024"]
    with running_service(tmp_path_factory.mktemp("fissile"), DEMO, worker_options=options) as service:
        yield service


@pytest.fixture(scope="module")
def folder(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of a Dynamo that has a sidecar for the worker."""
    folder = tmp_path_factory.mktemp("dynamo")
    with running_sidecar(folder, service.workers[0], "_run_vllm_sidecar"):
        yield folder


@pytest.fixture(scope="module")
def dynamo(folder: Path) -> Iterator[openai.OpenAI]:
    with running_frontend(folder, "test") as frontend:
        yield frontend.client


def fill(params: pb.SamplingParams, given: dict[str, Any]) -> None:
    for name, value in given.items():
        if name == "stop":
            params.stop_strings.extend(value)
        else:
            setattr(params, name, value)


@pytest.mark.parametrize("given", SAMPLED)
@pytest.mark.client("Dynamo", "vllm.Inference: chat and completions, whole and streamed")
def test_texts_are_those_of_our_router(service: Service, dynamo: openai.OpenAI, given: dict[str, Any]) -> None:
    own = pb.GenerateRequest(text=PROMPT)
    fill(own.sampling_params, given)
    expected = service.stub.GenerateOnce(own, timeout=60).answers[0]
    whole = dynamo.completions.create(model="test", prompt=PROMPT, **given)
    assert whole.choices[0].text == expected.text
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == expected.finish.usage.prompt_tokens
    parts = list(dynamo.completions.create(model="test", prompt=PROMPT, stream=True, **given))
    assert "".join(part.choices[0].text for part in parts if part.choices) == expected.text
    chat = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="Tell me a story.")])
    fill(chat.sampling_params, given)
    answer = service.stub.ChatOnce(chat, timeout=60).answers[0]
    messages: Any = [{"role": "user", "content": "Tell me a story."}]
    said = dynamo.chat.completions.create(model="test", messages=messages, **given)
    assert said.choices[0].message.content == answer.message.content
    assert said.choices[0].finish_reason == pb.FinishReason.Name(answer.finish.reason)[14:].lower()


@pytest.mark.client("Dynamo", "vllm.Inference: JSON Schema")
def test_form_of_the_answer_is_kept(dynamo: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["b", "c"]}}, "required": ["a"]}
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {**schema, "additionalProperties": False}},
    }
    messages: Any = [{"role": "user", "content": "Say b."}]
    answer = dynamo.chat.completions.create(model="test", messages=messages, response_format=form, max_tokens=90)
    assert (answer.choices[0].message.content or "").replace(" ", "").replace("\n", "") in ('{"a":"b"}', '{"a":"c"}')


def test_refused_value_is_a_client_error(dynamo: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        dynamo.completions.create(model="test", prompt=PROMPT, max_tokens=4, seed=-5)
    with pytest.raises(openai.BadRequestError):
        dynamo.completions.create(model="test", prompt=PROMPT, max_tokens=4, temperature=1.0, n=2)


@pytest.mark.client("Dynamo", "Open Inference: answers as Fissile's router")
def test_our_open_inference_protocol_answers_as_that_of_dynamo(service: Service, folder: Path) -> None:
    """Dynamo serves no parameters; its defaults are those below. An id that is a UUID names the request to the worker,
    which derives the seed from it."""
    ids = [str(uuid.UUID(int=number)) for number in (1, 2)]
    requests = [oip.ModelInferRequest(model_name="test", id=name) for name in ids]
    for request in requests:
        text = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        text.contents.bytes_contents.append(PROMPT.encode())
    flag = requests[1].inputs.add(name="stream", datatype="BOOL", shape=[1])
    flag.contents.bool_contents.append(True)
    ours = GRPCInferenceServiceStub(service.channel)
    with running_kserve(folder, "test") as theirs:
        expected = theirs.ModelInfer(requests[0], timeout=60)
        parts = [part.infer_response for part in theirs.ModelStreamInfer(iter(requests[1:]), timeout=60)]
        metadata = theirs.ModelMetadata(oip.ModelMetadataRequest(name="test"), timeout=60)
    for request in requests:
        request.parameters["temperature"].int64_param, request.parameters["max_tokens"].int64_param = 1, 20
    got = ours.ModelInfer(requests[0], timeout=60)
    got.ClearField("parameters")
    assert got == expected
    own_parts = [part.infer_response for part in ours.ModelStreamInfer(iter(requests[1:]), timeout=60)]
    assert {part.id for part in (*parts, *own_parts)} == {ids[1]}
    for i, name in enumerate(("text_output", "finish_reason")):
        assert {part.outputs[i].name for part in (*parts, *own_parts)} == {name}
        joined = [b"".join(part.outputs[i].contents.bytes_contents[0] for part in each) for each in (parts, own_parts)]
        assert joined[0] == joined[1] != b""
    described = ours.ModelMetadata(oip.ModelMetadataRequest(name="test"), timeout=60)
    for kind in ("inputs", "outputs"):
        known = {(each.name, each.datatype, *each.shape) for each in getattr(described, kind)}
        assert {(each.name, each.datatype, *each.shape) for each in getattr(metadata, kind)} <= known


@pytest.mark.client("Dynamo", "vllm.Inference: closed connection: the worker stops")
def test_closed_connection_ends_the_sequence(service: Service, dynamo: openai.OpenAI) -> None:
    stream = dynamo.completions.create(model="test", prompt=PROMPT, **ENDLESS)
    next(iter(stream))
    stream.close()
    load = service.wait_idle()
    assert load.free_blocks == load.total_blocks


@pytest.mark.client("Dynamo", "vllm.Inference: killed worker: its streams fail")
def test_killed_worker_ends_its_streams_with_an_error(service: Service, dynamo: openai.OpenAI) -> None:
    """The last test: it ends the worker."""
    stream = dynamo.completions.create(model="test", prompt=PROMPT, **ENDLESS)
    parts = iter(stream)
    next(parts)
    service.workers[0].running.kill()
    with pytest.raises(openai.APIError):
        list(parts)
