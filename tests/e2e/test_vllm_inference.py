"""vllm.Inference and vllm.Control of a worker process; Generate of its router is the reference."""

from __future__ import annotations

import functools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from fissile.peers.vllm import control_pb2 as cpb
from fissile.peers.vllm import inference_pb2 as pb
from fissile.peers.vllm.control_pb2_grpc import ControlStub
from fissile.peers.vllm.inference_pb2_grpc import InferenceStub
from fissile.v1 import inference_pb2 as own
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.e2e.service import Service, running_service
from tests.mangled import Mangler
from worker.doors.vllm_inference import SERVICES
from worker.doors.vllm_inference_messages import SERVED

DEMO = Path(__file__).resolve().parents[2] / "deploy" / "demo" / "checkpoint"
PROMPT = "Once upon a time there was a"
# The last one: masks leave a constraint no token.
REFUSALS = ("INVALID_ARGUMENT", "UNIMPLEMENTED", "OUT_OF_RANGE", "NOT_FOUND", "RESOURCE_EXHAUSTED")
ENDLESS: dict[str, Any] = {"max_new_tokens": 900, "ignore_eos": True}
ALL: dict[str, Any] = {"output_token_ids": True, "output_logprobs": True, "output_candidates": {"top_n": 3}}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    options = ["--doors", "vllm-inference", "--prefix-caching", "--constraints", "--max-model-len", "1024"]
    with running_service(tmp_path_factory.mktemp("service"), DEMO, worker_options=options) as service:
        yield service


@pytest.fixture(scope="module")
def channel(service: Service) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(service.workers[0].address) as channel:
        yield channel


def asked(**fields: Any) -> pb.GenerateRequest:
    given: dict[str, Any] = {"text": PROMPT, "response": ALL, **fields}
    return pb.GenerateRequest(**given)


def streamed(channel: grpc.Channel, request: pb.GenerateRequest) -> dict[int, pb.SequenceOutput]:
    """The answers of GenerateStream by index, each checked and joined."""
    answers: dict[int, pb.SequenceOutput] = {}
    for number, response in enumerate(InferenceStub(channel).GenerateStream(request, timeout=60)):
        assert response.HasField("prompt_info") == (number == 0)
        if not response.HasField("outputs"):
            continue
        part = response.outputs
        assert part.num_tokens == len(part.token_ids) == len(part.logprobs) == len(part.candidate_tokens)
        answer = answers.setdefault(part.index, pb.SequenceOutput())
        assert not answer.HasField("finish_info")
        text, tokens = answer.text + part.text, answer.num_tokens + part.num_tokens
        answer.MergeFrom(part)
        answer.text, answer.num_tokens = text, tokens
    for answer in answers.values():
        assert answer.finish_info.num_output_tokens == answer.num_tokens
    return answers


def reference(service: Service, **params: Any) -> list[own.GeneratedText]:
    options = own.OutputOptions(return_token_ids=True, logprobs=3)
    request = own.GenerateRequest(text=PROMPT, output_options=options)
    for name, value in params.items():
        if isinstance(value, list):
            getattr(request.sampling_params, name).extend(value)
        else:
            setattr(request.sampling_params, name, value)
    return list(service.stub.GenerateOnce(request, timeout=60).answers)


def test_tokens_are_those_of_generate(service: Service, channel: grpc.Channel) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"temperature": 0, "max_tokens": 20}),
        (
            {"temperature": 0.8, "sampling": {"seed": 7, "num_sequences": 3}, "stopping": {"max_new_tokens": 30}},
            {"temperature": 0.8, "seed": 7, "n": 3, "max_tokens": 30},
        ),
        (
            {
                "temperature": 1.0,
                "sampling": {"seed": 5, "top_k": 40, "top_p": 0.9},
                "decoding": {"repetition_penalty": 1.2, "presence_penalty": 0.5},
                "stopping": {"max_new_tokens": 200, "stop_strings": ["."], "include_stop_strings": True},
            },
            {
                **{"temperature": 1.0, "seed": 5, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.2},
                **{"presence_penalty": 0.5, "max_tokens": 200, "stop_strings": ["."], "include_stop_string": True},
            },
        ),
    ]
    for given, params in cases:
        expected = reference(service, **params)
        answers = streamed(channel, asked(**given))
        assert [list(answers[i].token_ids) for i in sorted(answers)] == [list(each.token_ids) for each in expected]
        assert [answers[i].text for i in sorted(answers)] == [each.text for each in expected]
        rows = [[row.logprob for row in each.logprobs] for each in expected]
        assert [list(answers[i].logprobs) for i in sorted(answers)] == rows
        if len(expected) == 1:
            whole = InferenceStub(channel).Generate(asked(**given), timeout=60)
            assert list(whole.outputs.token_ids) == list(expected[0].token_ids)
            assert (whole.outputs.text, whole.prompt_info.num_prompt_tokens) == (
                expected[0].text,
                expected[0].finish.usage.prompt_tokens,
            )
    service.wait_idle()


def test_finishes_name_what_matched(service: Service, channel: grpc.Channel) -> None:
    model = service.stub.GetModel(own.GetModelRequest(), timeout=60).model
    (greedy,) = reference(service, temperature=0, max_tokens=20)
    third = greedy.token_ids[2]
    # A router of another project sends the model's end-of-sequence tokens as stop tokens.
    stops = [third, *model.eos_token_ids, third]
    answer = streamed(channel, asked(stopping={"stop_token_ids": stops}))[0]
    assert list(answer.token_ids) == list(greedy.token_ids[: list(greedy.token_ids).index(third) + 1])
    assert (answer.finish_info.finish_reason, answer.finish_info.stop_token_id) == (pb.FinishInfo.STOP, third)
    answer = streamed(channel, asked())[0]
    assert (answer.finish_info.finish_reason, answer.num_tokens) == (pb.FinishInfo.LENGTH, 20)
    ended = streamed(channel, asked(temperature=1.0, sampling={"seed": 3}, stopping={"max_new_tokens": 900}))[0]
    assert ended.finish_info.WhichOneof("stop_reason") in ("eos_token_id", None)
    constrained = streamed(channel, asked(decoding={"choice": {"choices": ["yes", "no"]}}))[0]
    assert constrained.text in ("yes", "no")
    assert constrained.finish_info.finish_reason == pb.FinishInfo.STOP


def test_logprobs_of_the_prompt_have_a_row_for_each_token(channel: grpc.Channel) -> None:
    options = {"prompt_token_ids": True, "prompt_logprobs": True, "prompt_candidates": {"top_n": 2}}
    info = InferenceStub(channel).Generate(asked(response=options), timeout=60).prompt_info
    count = info.num_prompt_tokens
    assert len(info.token_ids) == len(info.logprobs) == len(info.ranks) == len(info.candidate_tokens) == count > 3
    assert (info.logprobs[0], info.ranks[0]) == (0, 0)
    assert all(logprob < 0 for logprob in info.logprobs[1:])


def test_cancel_and_abort_end_the_sequence(service: Service, channel: grpc.Channel) -> None:
    stub = InferenceStub(channel)
    call = stub.GenerateStream(asked(stopping=ENDLESS, sampling={"num_sequences": 2}), timeout=60)
    next(call)
    call.cancel()
    load = service.wait_idle()
    assert load.free_blocks == load.total_blocks
    aborted = stub.GenerateStream(asked(request_id="gone", stopping=ENDLESS), timeout=60)
    next(aborted)
    ControlStub(channel).Abort(cpb.AbortRequest(request_ids=["gone", "unknown"]), timeout=60)
    parts = list(aborted)
    finish = parts[-1].outputs.finish_info
    assert finish.finish_reason == pb.FinishInfo.ABORTED
    assert finish.num_output_tokens < 900
    service.wait_idle()


def status_of(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    return error.code().name, error.details()


def test_bad_requests_name_the_field(service: Service, channel: grpc.Channel) -> None:
    stub = InferenceStub(channel)
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"temperature": -1}, "INVALID_ARGUMENT", "temperature"),
        ({"stopping": {"min_new_tokens": 30}}, "INVALID_ARGUMENT", "stopping.min_new_tokens"),
        ({"decoding": {"regex": "("}}, "INVALID_ARGUMENT", "decoding.regex"),
        ({"lora_name": "x"}, "UNIMPLEMENTED", "lora_name"),
        ({"model": "other"}, "NOT_FOUND", "model 'other'"),
        ({"sampling": {"seed": -1}}, "INVALID_ARGUMENT", "sampling.seed"),
        ({"response": {"output_logprobs": True, "output_candidates": {"top_n": 21}}}, "INVALID_ARGUMENT", "response."),
        ({"text": "x" * 9000}, "OUT_OF_RANGE", "text"),
    ]
    for given, code, named in cases:
        got, message = status_of(functools.partial(streamed, channel, asked(**given)))
        assert (got, message.startswith(named)) == (code, True), message
    several = asked(sampling={"num_sequences": 2})
    assert status_of(lambda: stub.Generate(several, timeout=60))[1].startswith("sampling.num_sequences is 2")
    metadata = (("x-data-parallel-rank", "3"),)
    assert status_of(lambda: stub.Generate(asked(), metadata=metadata, timeout=60))[0] == "INVALID_ARGUMENT"
    service.wait_idle()


def test_mangled_requests_get_a_status_that_names_a_field(service: Service, channel: grpc.Channel) -> None:
    seen, problems = Counter[str](), []
    mangler = Mangler(random.Random(7), {f"GenerateRequest.{path}" for path in SERVED if "." not in path})
    good = asked(sampling={"seed": 1}, decoding={"regex": "a+"}, stopping={"max_new_tokens": 3, "stop_strings": ["x"]})
    for i in range(240):
        message: Any = mangler.changed(good) if i % 4 else mangler.random(pb.GenerateRequest)
        message.stopping.max_new_tokens = min(message.stopping.max_new_tokens, 3)
        try:
            InferenceStub(channel).Generate(message, timeout=60)
            code = "OK"
        except grpc.RpcError as error:
            failed: Any = error
            code = failed.code().name
            if code not in REFUSALS or not failed.details():
                problems.append((message, code, failed.details()))
        seen[code] += 1
    assert not problems, problems[:3]
    assert min(seen["OK"], seen["INVALID_ARGUMENT"], seen["UNIMPLEMENTED"]) > 5, seen
    service.wait_idle()


def test_discovery_is_what_a_router_of_dynamo_reads(service: Service, channel: grpc.Channel) -> None:
    control = ControlStub(channel)
    for name in SERVICES:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name), timeout=60)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    info = control.GetServerInfo(cpb.GetServerInfoRequest(), timeout=60)
    assert (info.api_version, info.max_model_len) == ("vllm", 1024)
    sizes = info.parallelism
    assert sizes.tensor_parallel_size == sizes.data_parallel_size == sizes.world_size == 1
    assert info.total_kv_blocks == service.worker_load().total_blocks
    model = control.GetModelInfo(cpb.GetModelInfoRequest(), timeout=60)
    assert (model.served_model_name, Path(model.model_id), model.supports_text_input) == ("test", DEMO, True)
    assert not control.GetKvEventSources(cpb.GetKvEventSourcesRequest(), timeout=60).sources


def test_every_method_of_control_answers(channel: grpc.Channel) -> None:
    served = {"GetServerInfo", "GetModelInfo", "Abort", "GetKvEventSources"}
    (descriptor,) = cpb.DESCRIPTOR.services_by_name.values()
    for method in descriptor.methods:
        request = getattr(cpb, method.input_type.name)()
        call = functools.partial(getattr(ControlStub(channel), method.name), request, timeout=60)
        if method.name in served:
            call()
            continue
        code, message = status_of(call)
        assert (code, message.startswith(f"vllm.Control/{method.name} is not served: ")) == ("UNIMPLEMENTED", True)


def test_calls_are_logged_once_without_prompts(service: Service, channel: grpc.Channel) -> None:
    streamed(channel, asked(request_id="logged", stopping={"max_new_tokens": 3}))
    end = time.monotonic() + 60
    while not (lines := [line for line in service.workers[0].log.read_text().splitlines() if '"logged"' in line]):
        assert time.monotonic() < end
        threading.Event().wait(0.05)
    assert len(lines) == 1
    assert '"completion_tokens": 3' in lines[0]
    assert PROMPT not in service.workers[0].log.read_text()
