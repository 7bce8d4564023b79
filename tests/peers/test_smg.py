"""The real smg over Fissile's workers: OpenAI requests through it give Fissile's own answers.

`smg` is the router of another project, written in Rust. It finds a worker by the RPCs of its own protocol, reads the
tokenizer from the worker, renders the conversation itself, and turns tokens into text itself.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from fissile.v1 import inference_pb2 as fpb
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from common.limits import MAX_ANSWERS as ANSWERS
from common.limits import MAX_WAITING_CALLS
from deploy.demo.questions import questions
from tests.e2e.service import REPOSITORY, Process, Service, chat, free_port, running, running_service
from tests.peers.smg import LIMIT_S, MODEL, RunningSmg, has_tokenizer, running_smg, wait_until

pytestmark = pytest.mark.long

DEMO = REPOSITORY / "deploy" / "demo" / "checkpoint"
DOOR = ["--doors", "vllm-engine", "--dtype", "float32"]
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "seed": 5, "max_tokens": 40}
STORY = "Tell me a story about a fox."


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Two workers whose checkpoint nobody else can read, and a router of our own for comparison."""
    folder = tmp_path_factory.mktemp("fissile")
    model = shutil.copytree(DEMO, folder / "model")
    with running_service(folder, model, workers=2, worker_options=DOOR) as found:
        shutil.rmtree(model)
        yield found


@pytest.fixture(scope="module")
def smg(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSmg]:
    with running_smg(service.workers, tmp_path_factory.mktemp("smg")) as found:
        yield found


def own(service: Service, question: str, **params: Any) -> str:
    """Fissile's own answer."""
    message = fpb.ChatMessage(role="user", content=question)
    request = fpb.ChatRequest(messages=[message], sampling_params=fpb.SamplingParams(**params))
    return chat(service.stub, request, LIMIT_S).text


def ask(smg: RunningSmg, question: str, **given: Any) -> Any:
    messages: Any = [{"role": "user", "content": question}]
    return smg.client.chat.completions.create(model=MODEL, messages=messages, **given)


@pytest.mark.client("smg", "chat completions, whole: Fissile's own answers")
def test_chat_gives_fissiles_own_answers(service: Service, smg: RunningSmg) -> None:
    """Greedy and sampled, 32 at a time."""
    asked = [one.user for one in questions()[::8]] + [STORY, "Wer bist du? 🦊"]
    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40}
    for params in (greedy, SAMPLED):
        with ThreadPoolExecutor(32) as pool:
            answers = list(pool.map(lambda one: ask(smg, one, **params), asked))  # noqa: B023 - mapped in this turn
        for question, answer in zip(asked, answers, strict=True):
            assert answer.choices[0].message.content == own(service, question, **params), question


@pytest.mark.client("smg", "chat completions, streamed")
def test_stream_has_the_whole_answer(service: Service, smg: RunningSmg) -> None:
    stream = ask(smg, STORY, stream=True, stream_options={"include_usage": True}, **SAMPLED)
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == own(service, STORY, **SAMPLED)
    whole = ask(smg, STORY, **SAMPLED)
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in reasons if reason] == [whole.choices[0].finish_reason]


@pytest.mark.client("smg", "several answers (`n`) of a seed")
def test_several_answers_are_those_of_their_seed(service: Service, smg: RunningSmg) -> None:
    choices = ask(smg, STORY, n=3, **SAMPLED).choices
    message = fpb.ChatMessage(role="user", content=STORY)
    request = fpb.ChatRequest(messages=[message], sampling_params=fpb.SamplingParams(n=3, **SAMPLED))
    texts: dict[int, str] = {}
    for part in service.stub.Chat(request, timeout=LIMIT_S):
        texts[part.index] = texts.get(part.index, "") + part.delta.content
    assert {choice.index: choice.message.content for choice in choices} == texts


@pytest.mark.client("smg", "stop strings, whole and streamed")
def test_stop_string_ends_the_answer(service: Service, smg: RunningSmg) -> None:
    whole = own(service, STORY, **SAMPLED)
    stop = whole[12:16]
    for stream in (False, True):
        answer = ask(smg, STORY, stop=[stop], stream=stream, **SAMPLED)
        if stream:
            chunks = list(answer)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            reason = chunks[-1].choices[0].finish_reason
        else:
            text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
        assert (text, reason) == (whole[: whole.find(stop)], "stop")


@pytest.mark.client("smg", "logprobs, whole and streamed")
def test_logprobs_are_fissiles_own(service: Service, smg: RunningSmg) -> None:
    message = fpb.ChatMessage(role="user", content=STORY)
    request = fpb.ChatRequest(messages=[message], sampling_params=fpb.SamplingParams(**SAMPLED))
    request.output_options.logprobs = 2
    rows = [row for part in service.stub.Chat(request, timeout=LIMIT_S) for row in part.logprobs]
    for stream in (False, True):
        answer = ask(smg, STORY, logprobs=True, top_logprobs=2, stream=stream, **SAMPLED)
        parts = [chunk.choices[0].logprobs for chunk in answer] if stream else [answer.choices[0].logprobs]
        given = [row for part in parts if part for row in part.content or ()]
        assert [row.logprob for row in given] == pytest.approx([row.logprob for row in rows], abs=1e-6)
        for row, reference in zip(given, rows, strict=True):
            expected = [each.logprob for each in reference.top]
            assert [each.logprob for each in row.top_logprobs] == pytest.approx(expected, abs=1e-6)


@pytest.mark.client("smg", "JSON Schema")
def test_json_schema_is_kept(smg: RunningSmg) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer"}},
        "required": ["age"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    for seed in range(5):
        answer = ask(smg, "Describe a person.", response_format=form, temperature=1.0, seed=seed, max_tokens=60)
        if answer.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(answer.choices[0].message.content)["age"], int)


@pytest.mark.client("smg", "embeddings")
def test_embedding_is_fissiles_own(service: Service, smg: RunningSmg) -> None:
    (made,) = smg.client.embeddings.create(model=MODEL, input=STORY, encoding_format="float").data
    request = fpb.EmbedRequest(inputs=[fpb.TextOrTokens(text=STORY)], normalize=True)
    reference = service.stub.Embed(request, timeout=LIMIT_S).embeddings[0].values
    assert made.embedding == pytest.approx(list(reference), abs=1e-6)


@pytest.mark.client("smg", "closed connection: the worker stops")
def test_closed_connection_ends_the_sequence(service: Service, smg: RunningSmg) -> None:
    stream = ask(smg, STORY, stream=True, max_tokens=900, temperature=1.0, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    for index in range(2):
        load = service.wait_idle(index)
        assert (load.decoding_seqs, load.free_blocks) == (0, load.total_blocks)


def test_bad_request_gets_the_workers_reason(smg: RunningSmg) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        smg.client.completions.create(model=MODEL, prompt="a " * 2000, max_tokens=1)
    assert 400 <= caught.value.status_code < 500
    with pytest.raises(openai.APIStatusError) as caught:
        ask(smg, STORY, response_format={"type": "structural_tag", "structures": [], "triggers": []}, max_tokens=1)
    assert 400 <= caught.value.status_code < 502


@pytest.mark.client("smg", "KV events and loads")
def test_router_knows_the_cached_blocks_and_the_load(smg: RunningSmg) -> None:
    ask(smg, STORY * 20, max_tokens=1)
    wait_until(lambda: smg.metric("smg_kv_index_blocks") > 0)
    assert smg.metric("smg_kv_event_gaps_total") == 0
    assert smg.metric("smg_kv_event_stream_errors_total") == 0
    loads = smg.get("/loads")["loads"]
    assert len(loads) == 2
    assert all(load["max_running_requests"] > 0 and load["max_total_num_tokens"] > 0 for load in loads)


@pytest.mark.client("smg", "killed worker: its streams fail, the others do not")
def test_killed_worker_costs_its_own_streams_alone(tmp_path: Path) -> None:
    """smg has no failover: a stream that has begun ends with an error. The next requests go to the other worker."""
    slow = ["--doors", "vllm-engine", "--simulate", "fixed:20ms"]
    with running_service(tmp_path, DEMO, workers=2, worker_options=slow) as service:
        with running_smg(service.workers, tmp_path, "--policy", "round_robin") as smg:
            streams = [
                iter(ask(smg, STORY, stream=True, max_tokens=900, temperature=1.0, extra_body={"ignore_eos": True}))
                for _ in range(4)
            ]
            for stream in streams:
                next(stream)
            service.workers[0].stop(signal.SIGKILL)
            ended = []
            for stream in streams:
                try:
                    ended.append([chunk for chunk in stream if chunk.choices][-1].choices[0].finish_reason)
                except openai.APIError:
                    ended.append("error")
            assert sorted(ended) == ["error", "error", "length", "length"]
            answers = [ask(smg, STORY, **SAMPLED).choices[0].message.content for _ in range(6)]
        assert set(answers) == {own(service, STORY, **SAMPLED)}


@pytest.mark.client("smg", "full worker: status 429")
def test_full_worker_is_an_error_for_the_client(tmp_path: Path) -> None:
    """A worker whose queue is full refuses at once; smg says so, and serves again when there is room."""
    port = free_port()
    arguments = ["worker", "--model", str(DEMO), "--model-name", MODEL, "--port", str(port), *DOOR]
    worker = Process("worker", [*arguments, "--max-num-seqs", "1"], port, tmp_path / "worker.log")
    with running([worker]), running_smg([worker], tmp_path) as smg, grpc.insecure_channel(worker.address) as channel:
        params = pb.SamplingParams(top_p=1.0, repetition_penalty=1.0, n=ANSWERS, ignore_eos=True)
        request = pb.GenerateRequest(text="a", sampling_params=params, stream=True)
        num_calls = MAX_WAITING_CALLS // ANSWERS + 2
        calls = [VllmEngineStub(channel).Generate(request, timeout=LIMIT_S) for _ in range(num_calls)]
        wait_until(lambda: any(call.done() for call in calls))
        (refused,) = (call for call in calls if call.done())
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(openai.RateLimitError, match="the queue is full"):
            ask(smg, STORY, max_tokens=1)
        for call in calls:
            call.cancel()
        wait_until(lambda: has_tokenizer(smg.client))
