"""The real Dynamo over workers, by its OpenEngine sidecar: OpenAI requests through it give the answers of Fissile."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from fissile.peers.openengine.v1 import openengine_pb2 as oe
from fissile.peers.openengine.v1.openengine_pb2_grpc import InferenceStub
from fissile.v1 import inference_pb2 as pb

from common.limits import MAX_ANSWERS, MAX_WAITING_CALLS
from common.params.names import ROLES
from tests.e2e.service import REPOSITORY, Process, Service, running_service
from tests.peers.dynamo import LIMIT_S, running_frontend, running_sidecar

pytestmark = pytest.mark.long

DEMO = REPOSITORY / "deploy" / "demo" / "checkpoint"
# The sidecar takes the checkpoint's folder for the model's name.
MODEL = str(DEMO)
PROMPT = "Once upon a time there was a"
CHAT: Any = [{"role": "user", "content": "Tell me a story."}]
ENDLESS: dict[str, Any] = {"max_tokens": 900, "temperature": 0, "stream": True, "extra_body": {"ignore_eos": True}}
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 30},
    {"temperature": 0.9, "top_p": 0.9, "seed": 5, "max_tokens": 40},
    {"temperature": 1.0, "seed": 8, "max_tokens": 200, "stop": ["."]},
    {"temperature": 0.7, "seed": 3, "max_tokens": 300, "frequency_penalty": 0.3, "presence_penalty": 0.2},
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    options = ["--doors", "openengine", "--max-model-len", "1024", "--max-num-seqs", "4"]
    with running_service(tmp_path_factory.mktemp("fissile"), DEMO, workers=2, worker_options=options) as service:
        yield service


@pytest.fixture(scope="module")
def dynamo(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with running_dynamo(service, tmp_path_factory.mktemp("dynamo")) as client:
        yield client


@contextlib.contextmanager
def running_dynamo(service: Service, folder: Path) -> Iterator[openai.OpenAI]:
    """Client of a Dynamo that has a sidecar for each worker."""
    with contextlib.ExitStack() as stack:
        for worker in service.workers:
            sidecar = running_sidecar(folder, worker, "_run_trtllm_sidecar", "--model-path", MODEL)
            stack.enter_context(sidecar)
        yield stack.enter_context(running_frontend(folder, MODEL)).client


def fill(params: pb.SamplingParams, given: dict[str, Any]) -> None:
    for name, value in given.items():
        if name == "stop":
            params.stop_strings.extend(value)
        else:
            setattr(params, name, value)


def own_answer(service: Service, given: dict[str, Any]) -> pb.GeneratedText:
    request = pb.GenerateRequest(text=PROMPT)
    fill(request.sampling_params, given)
    request.output_options.logprobs = 2
    return service.stub.GenerateOnce(request, timeout=LIMIT_S).answers[0]


@pytest.mark.parametrize("given", SAMPLED)
@pytest.mark.client("Dynamo", "OpenEngine: chat and completions, whole and streamed")
def test_texts_are_those_of_our_router(service: Service, dynamo: openai.OpenAI, given: dict[str, Any]) -> None:
    expected = own_answer(service, given)
    whole = dynamo.completions.create(model=MODEL, prompt=PROMPT, **given)
    assert whole.choices[0].text == expected.text
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == expected.finish.usage.prompt_tokens
    parts = list(dynamo.completions.create(model=MODEL, prompt=PROMPT, stream=True, **given))
    assert "".join(part.choices[0].text for part in parts if part.choices) == expected.text
    chat = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="Tell me a story.")])
    fill(chat.sampling_params, given)
    answer = service.stub.ChatOnce(chat, timeout=LIMIT_S).answers[0]
    said = dynamo.chat.completions.create(model=MODEL, messages=CHAT, **given)
    assert said.choices[0].message.content == answer.message.content
    assert said.choices[0].finish_reason == pb.FinishReason.Name(answer.finish.reason)[14:].lower()
    deltas = list(dynamo.chat.completions.create(model=MODEL, messages=CHAT, stream=True, **given))
    text = "".join(part.choices[0].delta.content or "" for part in deltas if part.choices)
    assert text == answer.message.content


@pytest.mark.client("Dynamo", "OpenEngine: logprobs")
def test_logprobs_are_those_of_our_router(service: Service, dynamo: openai.OpenAI) -> None:
    given: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}
    request = pb.GenerateRequest(text=PROMPT)
    fill(request.sampling_params, given)
    request.output_options.logprobs = 2
    own = [entry.logprob for entry in service.stub.GenerateOnce(request, timeout=LIMIT_S).answers[0].logprobs]
    found = dynamo.completions.create(model=MODEL, prompt=PROMPT, logprobs=2, **given).choices[0].logprobs
    assert found is not None
    assert found.token_logprobs == pytest.approx(own, rel=1e-6, abs=1e-8)
    assert found.top_logprobs is not None
    assert [len(each) for each in found.top_logprobs] == [2] * len(own)


def test_refused_value_is_a_client_error(dynamo: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        dynamo.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4, temperature=-1)


@pytest.mark.client("Dynamo", "OpenEngine: closed connection: the worker stops")
def test_closed_connection_ends_the_sequence(service: Service, dynamo: openai.OpenAI) -> None:
    stream = dynamo.completions.create(model=MODEL, prompt=PROMPT, **ENDLESS)
    next(iter(stream))
    stream.close()
    for index in range(2):
        load = service.wait_idle(index)
        assert load.free_blocks == load.total_blocks


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, openai.OpenAI]]:
    """Two workers, whose endless answers take 18 seconds at least, and a Dynamo over them."""
    options = ["--doors", "openengine", "--max-model-len", "1024", "--max-num-seqs", "4", "--simulate", "fixed:20ms"]
    folder = tmp_path_factory.mktemp("slow")
    with (
        running_service(folder, DEMO, workers=2, worker_options=options) as service,
        running_dynamo(service, folder) as client,
    ):
        yield service, client


@pytest.mark.client("Dynamo", "OpenEngine: overload is an error")
def test_overload_is_an_error_and_ends(slow: tuple[Service, openai.OpenAI]) -> None:
    service, dynamo = slow
    request = oe.GenerateRequest(
        prompt=PROMPT,
        sampling=oe.SamplingParams(num_sequences=MAX_ANSWERS),
        stopping=oe.StoppingOptions(max_tokens=900, ignore_eos=True),
    )
    with contextlib.ExitStack() as stack:
        for worker in service.workers:
            channel = stack.enter_context(grpc.insecure_channel(worker.address))
            calls = [InferenceStub(channel).Generate(request) for _ in range(2 + MAX_WAITING_CALLS // MAX_ANSWERS)]
            for call in calls:
                stack.callback(call.cancel)
            # One is refused when all places are taken, and none of the others ends for minutes.
            _wait_until(functools.partial(_has_ended, calls))
            assert {call.code() for call in calls if not call.is_active()} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        with pytest.raises(openai.APIStatusError):
            dynamo.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4)
    for index in range(2):
        service.wait_idle(index)
    _wait_until(lambda: _is_answered(dynamo))


@pytest.mark.client("Dynamo", "OpenEngine: killed worker: its streams fail")
def test_killed_worker_ends_its_streams_with_an_error(slow: tuple[Service, openai.OpenAI]) -> None:
    """The last test: it ends a worker. The other one serves on."""
    service, dynamo = slow
    streams = [dynamo.completions.create(model=MODEL, prompt=PROMPT, **ENDLESS) for _ in range(4)]
    parts = [iter(each) for each in streams]
    for each in parts:
        next(each)
    live = [load.decoding_seqs + load.waiting_seqs for load in map(service.worker_load, range(2))]
    assert sum(live) == len(streams)
    # Dynamo takes workers by turns, and leaves out one that has refused a request, for a while.
    busier = live.index(max(live))
    service.workers[busier].running.kill()
    failed = 0
    for each in parts:
        try:
            for _ in each:
                pass
        except openai.APIError:
            failed += 1
    assert failed == live[busier]
    _wait_until(lambda: _is_answered(dynamo))


def _has_ended(calls: list[Any]) -> bool:
    """True if one of the calls has ended."""
    return not all(call.is_active() for call in calls)


def _is_answered(dynamo: openai.OpenAI) -> bool:
    """True if a request has an answer."""
    with contextlib.suppress(openai.APIStatusError):
        return bool(dynamo.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4).choices[0].text)
    return False


def _wait_until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, openai.OpenAI]]:
    """A worker for prefills and one for decodes, and a Dynamo that places requests on both."""
    folder = tmp_path_factory.mktemp("halves")
    options = ["--doors", "openengine", "--max-model-len", "1024", "--kv-tiers", f"files:{folder / 'kv'}:256MiB"]
    with (
        running_service(folder, DEMO, roles=ROLES[1:], worker_options=options) as service,
        contextlib.ExitStack() as stack,
    ):
        for worker, role in zip(service.workers, ROLES[1:], strict=True):
            given = ["--model-path", MODEL, "--disaggregation-mode", role]
            stack.enter_context(running_sidecar(folder, worker, "_run_trtllm_sidecar", *given))
        yield service, stack.enter_context(running_frontend(folder, MODEL)).client


@pytest.mark.parametrize("given", SAMPLED)
@pytest.mark.client("Dynamo", "OpenEngine: prefill and decode on workers of their own")
def test_prefill_and_decode_placed_by_dynamo(halves: tuple[Service, openai.OpenAI], given: dict[str, Any]) -> None:
    service, dynamo = halves
    expected = own_answer(service, given)
    before = [prefills(worker) for worker in service.workers]
    whole = dynamo.completions.create(model=MODEL, prompt=PROMPT, **given)
    assert whole.choices[0].text == expected.text
    parts = list(dynamo.completions.create(model=MODEL, prompt=PROMPT, stream=True, **given))
    assert "".join(part.choices[0].text for part in parts if part.choices) == expected.text
    # Each request had a prefill at the one worker, and its answer at the other.
    assert [prefills(worker) - count for worker, count in zip(service.workers, before, strict=True)] == [2, 2]
    for index in range(2):
        load = service.wait_idle(index)
        assert load.free_blocks == load.total_blocks


def prefills(worker: Process) -> int:
    """Requests through the door that a worker has ended."""
    return worker.log.read_text().count("openengine.v1.Inference/Generate")
