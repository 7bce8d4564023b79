"""The door for smg with the stubs of its own package, against a worker process: answers, aborts, load and KV events."""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import signal
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from fissile.seed import derive_seed
from fissile.v1 import inference_pb2 as fpb
from fissile.worker.v1 import worker_pb2 as wpb
from fissile.worker.v1.worker_pb2_grpc import WorkerServiceStub
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from common.text.tokenizer import Tokenizer
from common.wire.block_hash import hash_chain
from tests.e2e.service import REPOSITORY, Process, Service, free_port, running, running_service
from tests.e2e.simulated import OPTIONS, simulated_model

DEMO = REPOSITORY / "deploy" / "demo" / "checkpoint"
LIMIT_S = 60.0
LONGEST = 200_000
QUESTION = "What is 12 + 7?"
# What smg sends beside the fields that a client gave.
SMG: dict[str, Any] = {"top_p": 1.0, "repetition_penalty": 1.0, "skip_special_tokens": True, "n": 1}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("door")
    with running_service(folder, DEMO, worker_options=["--doors", "vllm-engine", "--dtype", "float32"]) as found:
        yield found


@pytest.fixture(scope="module")
def stub(service: Service) -> Iterator[VllmEngineStub]:
    with grpc.insecure_channel(service.workers[0].address) as channel:
        yield VllmEngineStub(channel)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A simulated worker, without a router, whose `endless` answers take a quarter of an hour."""
    folder, port = tmp_path_factory.mktemp("slow"), free_port()
    arguments = ["worker", "--model", str(simulated_model(folder / "model", LONGEST)), "--port", str(port), *OPTIONS]
    worker = Process("worker", [*arguments, "--doors", "vllm-engine"], port, folder / "worker.log")
    with running([worker]), grpc.insecure_channel(worker.address) as channel:
        yield Service(worker, [worker], channel)


@pytest.fixture(scope="module")
def slow_stub(slow: Service) -> VllmEngineStub:
    return VllmEngineStub(slow.channel)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(DEMO)


def asked(prompt: list[int], *, stream: bool = True, request_id: str = "", **given: Any) -> pb.GenerateRequest:
    params = pb.SamplingParams(**{**SMG, **given})
    tokenized = pb.TokenizedInput(input_ids=prompt)
    return pb.GenerateRequest(request_id=request_id, tokenized=tokenized, sampling_params=params, stream=stream)


def answers(stub: VllmEngineStub, request: pb.GenerateRequest) -> dict[int, pb.GenerateComplete]:
    """The last messages of a call, whose chunks must add up to them."""
    chunks: dict[int, list[int]] = {}
    last: dict[int, pb.GenerateComplete] = {}
    for response in stub.Generate(request, timeout=LIMIT_S):
        if response.HasField("chunk"):
            chunks.setdefault(response.chunk.index, []).extend(response.chunk.token_ids)
        else:
            last[response.complete.index] = response.complete
    if request.stream:
        assert chunks == {index: list(each.output_ids) for index, each in last.items()}
    return last


def fissile_tokens(service: Service, prompt: list[int], params: fpb.SamplingParams) -> dict[int, list[int]]:
    """Fissile's own answers through its router, by index."""
    plain = fpb.SamplingParams(top_p=1.0, repetition_penalty=1.0)
    plain.MergeFrom(params)
    request = fpb.GenerateRequest(token_ids=fpb.TokenIds(ids=prompt), sampling_params=plain)
    request.output_options.return_token_ids = True
    found: dict[int, list[int]] = {}
    for part in service.stub.Generate(request, timeout=LIMIT_S):
        found.setdefault(part.index, []).extend(part.token_ids)
    return found


def sampling_defaults() -> dict[str, float]:
    """What the model's generation_config.json says of sampling."""
    config = json.loads((DEMO / "generation_config.json").read_text())
    return {name: config[name] for name in ("temperature", "top_k", "top_p", "min_p") if name in config}


def is_healthy(stub: VllmEngineStub) -> bool:
    """True if the worker says that it takes requests."""
    try:
        return bool(stub.HealthCheck(pb.HealthCheckRequest(), timeout=LIMIT_S).healthy)
    except grpc.RpcError:
        return False


def wait_until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [True, False])
def test_tokens_equal_those_of_the_router(
    service: Service, stub: VllmEngineStub, tokenizer: Tokenizer, stream: bool
) -> None:
    prompt = tokenizer.encode(QUESTION)
    for given in (
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.8, "top_k": 40, "min_p": 0.05, "n": 3},
        {"temperature": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.25},
        {"temperature": 1.0, "ignore_eos": True, "min_tokens": 5, "logit_bias": {20: 3.5}},
    ):
        got = answers(stub, asked(prompt, stream=stream, seed=11, max_tokens=24, **given))
        own = fissile_tokens(service, prompt, fpb.SamplingParams(seed=11, max_tokens=24, **given))
        assert {index: list(each.output_ids) for index, each in got.items()} == own
        assert {each.prompt_tokens for each in got.values()} == {len(prompt)}


def test_absent_seed_is_derived_from_the_id(service: Service, stub: VllmEngineStub, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(QUESTION)
    got = answers(stub, asked(prompt, request_id="mine", max_tokens=16, temperature=1.0))
    own = fissile_tokens(service, prompt, fpb.SamplingParams(max_tokens=16, temperature=1.0, seed=derive_seed("mine")))
    assert list(got[0].output_ids) == own[0]


def test_text_prompt_gives_the_tokens_of_its_ids(stub: VllmEngineStub, tokenizer: Tokenizer) -> None:
    by_ids = asked(tokenizer.encode(QUESTION), max_tokens=16, temperature=0.0)
    by_text = pb.GenerateRequest(text=QUESTION, sampling_params=by_ids.sampling_params)
    assert answers(stub, by_text)[0].output_ids == answers(stub, by_ids)[0].output_ids


def test_stop_string_and_stop_token_end_an_answer(stub: VllmEngineStub, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("Once upon a time")
    whole = answers(stub, asked(prompt, max_tokens=40, temperature=0.0))[0]
    text = tokenizer.decode(list(whole.output_ids))
    stopped = answers(stub, asked(prompt, max_tokens=40, temperature=0.0, stop=[text[10:14]]))[0]
    assert (stopped.finish_reason, stopped.matched_stop_str) == ("stop", text[10:14])
    assert whole.output_ids[: len(stopped.output_ids)] == stopped.output_ids
    assert tokenizer.decode(list(stopped.output_ids)).find(text[10:14]) == text.find(text[10:14]) >= 0
    token = whole.output_ids[5]
    by_token = answers(stub, asked(prompt, max_tokens=40, temperature=0.0, stop_token_ids=[token]))[0]
    at = list(whole.output_ids).index(token)
    assert (by_token.matched_token_id, list(by_token.output_ids)) == (token, list(whole.output_ids[: at + 1]))


def test_logprobs_of_answer_and_prompt(stub: VllmEngineStub, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(QUESTION)
    request = asked(prompt, stream=False, max_tokens=6, temperature=0.0, logprobs=2, prompt_logprobs=1)
    whole = answers(stub, request)[0]
    assert list(whole.output_logprobs.token_ids) == list(whole.output_ids)
    for token, logprob, top in zip(
        whole.output_ids, whole.output_logprobs.token_logprobs, whole.output_logprobs.top_logprobs, strict=True
    ):
        assert (top.token_ids[0], top.values[0], len(top.values)) == (token, logprob, 2)
    assert list(whole.input_logprobs.token_ids) == prompt
    assert [each.HasField("value") for each in whole.input_logprobs.token_logprobs] == [
        False,
        *[True] * len(prompt[1:]),
    ]
    request.stream = True
    rows: list[float] = []
    with_prompt = 0
    for response in stub.Generate(request, timeout=LIMIT_S):
        rows += response.chunk.output_logprobs.token_logprobs
        with_prompt += response.chunk.HasField("input_logprobs")
    assert (rows, with_prompt) == (list(whole.output_logprobs.token_logprobs), 1)


def test_constraint_shapes_the_answer(stub: VllmEngineStub, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(QUESTION)
    forms: list[tuple[dict[str, Any], str]] = [
        ({"regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"choice": pb.ChoiceConstraint(choices=["yes", "no"])}, "yes|no"),
        ({"json_schema": '{"type": "boolean"}'}, " ?(true|false)"),
        ({"grammar": 'start: "a" "b"'}, "ab"),
    ]
    for form, pattern in forms:
        whole = answers(stub, asked(prompt, max_tokens=16, temperature=1.0, seed=1, **form))[0]
        assert re.fullmatch(pattern, tokenizer.decode(list(whole.output_ids)))
        assert whole.finish_reason == "stop"


def test_bad_requests_name_their_field(stub: VllmEngineStub) -> None:
    code = grpc.StatusCode
    for request, status, named in (
        (asked([1], top_p=0.0), code.INVALID_ARGUMENT, "sampling_params.top_p is 0"),
        (asked([1], n=0), code.INVALID_ARGUMENT, "sampling_params.n is 0"),
        (asked([1], seed=-1), code.INVALID_ARGUMENT, "sampling_params.seed is -1"),
        (asked([1], logprobs=-1), code.INVALID_ARGUMENT, "sampling_params.logprobs is -1"),
        (asked([1], regex="("), code.INVALID_ARGUMENT, "sampling_params.regex"),
        (asked([5_000_000]), code.INVALID_ARGUMENT, "tokenized.input_ids[0] is 5000000"),
        (asked([]), code.INVALID_ARGUMENT, "tokenized.input_ids is empty"),
        (asked([1] * 5000), code.OUT_OF_RANGE, "tokenized.input_ids"),
        (asked([1], structural_tag="{}"), code.UNIMPLEMENTED, "sampling_params.structural_tag"),
        (asked([1], truncate_prompt_tokens=5), code.UNIMPLEMENTED, "sampling_params.truncate_prompt_tokens"),
        (pb.GenerateRequest(), code.INVALID_ARGUMENT, "input is missing"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            answers(stub, request)
        assert (caught.value.code(), named in str(caught.value.details())) == (status, True), caught.value.details()


def test_embedding_is_the_router_s(service: Service, stub: VllmEngineStub, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(QUESTION)
    made = stub.Embed(pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=prompt)), timeout=LIMIT_S)
    request = fpb.EmbedRequest(inputs=[fpb.TextOrTokens(token_ids=fpb.TokenIds(ids=prompt))], normalize=True)
    own = service.stub.Embed(request, timeout=LIMIT_S).embeddings[0]
    assert (list(made.embedding), made.prompt_tokens) == (list(own.values), len(prompt))
    assert made.embedding_dim == len(made.embedding)


# Ends.


def endless(prompt: list[int], request_id: str) -> pb.GenerateRequest:
    """A request that runs until somebody ends it."""
    return asked(prompt, request_id=request_id, ignore_eos=True, max_tokens=1_000_000, temperature=1.0, n=2)


def test_abort_ends_a_stream_with_its_finishes(slow: Service, slow_stub: VllmEngineStub) -> None:
    call = slow_stub.Generate(endless([5, 6, 7], "aborted"), timeout=LIMIT_S)
    next(call)
    slow_stub.Abort(pb.AbortRequest(request_ids=["unknown", "aborted"]), timeout=LIMIT_S)
    finishes = [each.complete for each in call if each.HasField("complete")]
    assert sorted((each.index, each.finish_reason) for each in finishes) == [(0, "abort"), (1, "abort")]
    assert slow.wait_idle().decoding_seqs == 0
    slow_stub.Abort(pb.AbortRequest(request_ids=["aborted"]), timeout=LIMIT_S)


def test_reset_ends_the_sequences_of_a_stream(slow: Service, slow_stub: VllmEngineStub) -> None:
    call = slow_stub.Generate(endless([5, 6, 7], "reset"), timeout=LIMIT_S)
    next(call)
    call.cancel()
    load = slow.wait_idle()
    assert (load.decoding_seqs, load.free_blocks) == (0, load.total_blocks)


def test_id_in_use_is_refused(slow_stub: VllmEngineStub) -> None:
    call = slow_stub.Generate(endless([5, 6, 7], "twice"), timeout=LIMIT_S)
    next(call)
    with pytest.raises(grpc.RpcError) as caught:
        answers(slow_stub, endless([5], "twice"))
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    call.cancel()


# Facts.


def test_facts_are_those_of_the_worker(service: Service, stub: VllmEngineStub) -> None:
    with grpc.insecure_channel(service.workers[0].address) as channel:
        own = WorkerServiceStub(channel).GetWorker(wpb.GetWorkerRequest(), timeout=LIMIT_S)
    model, server = stub.GetModelInfo(pb.GetModelInfoRequest()), stub.GetServerInfo(pb.GetServerInfoRequest())
    assert stub.HealthCheck(pb.HealthCheckRequest()).healthy
    assert (model.served_model_name, model.model_path, model.is_generation) == ("test", str(DEMO), True)
    assert (model.vocab_size, model.max_context_length) == (own.vocab_size, own.limits.max_model_len)
    assert list(model.eos_token_ids) == list(own.eos_token_ids)
    assert (list(model.architectures), model.model_type) == ([own.architecture], "qwen3")
    assert json.loads(model.default_sampling_params_json) == sampling_defaults()
    assert (server.block_size, server.max_num_seqs) == (own.block_size, own.limits.max_num_seqs)
    assert (server.model_dtype, server.kv_cache_dtype) == (own.dtype, "auto")
    assert (server.constrained_decoding_start, server.engine_reasoning_parser) == ("first_token", "")
    assert (server.is_paused, server.kv_connector, server.mm_processor) == (False, "", "")
    assert not model.supports_vision


def test_longest_prompt_is_served_and_one_more_is_not(stub: VllmEngineStub) -> None:
    most = stub.GetModelInfo(pb.GetModelInfoRequest()).max_req_input_len
    assert len(answers(stub, asked([5] * most))[0].output_ids) == 1
    with pytest.raises(grpc.RpcError) as caught:
        answers(stub, asked([5] * (most + 1)))
    assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE


def test_tokenizer_archive_has_its_digest_in_the_last_chunk(stub: VllmEngineStub, tokenizer: Tokenizer) -> None:
    chunks = list(stub.GetTokenizer(common.GetTokenizerRequest(), timeout=LIMIT_S))
    data = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks] == [*[""] * (len(chunks) - 1), hashlib.sha256(data).hexdigest()]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    assert files["tokenizer.json"] == (DEMO / "tokenizer.json").read_bytes()
    assert Tokenizer.from_files(files).encode(QUESTION) == tokenizer.encode(QUESTION)
    again = b"".join(chunk.data for chunk in stub.GetTokenizer(common.GetTokenizerRequest(), timeout=LIMIT_S))
    assert again == data


def test_profiler_is_refused(stub: VllmEngineStub) -> None:
    for call, request in (
        (stub.StartProfile, common.StartProfileRequest()),
        (stub.StopProfile, common.StopProfileRequest()),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call(request, timeout=LIMIT_S)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


# KV events and load.


EMPTY: Mapping[int, list[int]] = {}


class Subscription:
    """A stream of KV events, read by a thread: the cached blocks, and the newest load."""

    def __init__(self, stub: VllmEngineStub, start: int = 0, blocks: Mapping[int, list[int]] = EMPTY) -> None:
        self.blocks = dict(blocks)
        self.number = 0
        self.loads: list[common.EngineLoad] = []
        self.error: grpc.RpcError | None = None
        request = common.SubscribeKvEventsRequest(start_sequence_number=start, load_records_before_first_batch=True)
        self.call = stub.SubscribeKvEvents(request)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for batch in self.call:
                self._apply(batch)
        except grpc.RpcError as error:
            self.error = error

    def _apply(self, batch: common.KvEventBatch) -> None:
        for event in batch.events:
            if event.HasField("cleared"):
                self.blocks = {}
            for block in event.stored.blocks:
                self.blocks[block.block_hash] = list(block.token_ids)
            for gone in event.removed.block_hashes:
                del self.blocks[gone]
        self.number = batch.sequence_number
        self.loads.append(batch.load)

    def close(self) -> None:
        self.call.cancel()
        self._thread.join(LIMIT_S)


def signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def test_kv_events_are_the_blocks_of_the_cache(stub: VllmEngineStub, service: Service) -> None:
    """A subscriber has the hashes that Fissile computes, and what a flush leaves: nothing."""
    with grpc.insecure_channel(service.workers[0].address) as channel:
        own = WorkerServiceStub(channel).GetWorker(wpb.GetWorkerRequest(), timeout=LIMIT_S)
    early = Subscription(stub)
    prompt = list(range(20, 20 + 5 * own.block_size + 3))
    answers(stub, asked(prompt, max_tokens=1))
    chain = [signed(each) for each in hash_chain(prompt, own.block_size, seed=own.hash_seed)]
    wait_until(lambda: set(chain) <= set(early.blocks))
    assert [token for each in chain for token in early.blocks[each]] == prompt[: 5 * own.block_size]
    late, back = Subscription(stub), Subscription(stub, early.number, early.blocks)
    wait_until(lambda: late.blocks == early.blocks)
    service.wait_idle()
    held = len(early.blocks)
    flushed = stub.FlushCache(common.FlushCacheRequest(timeout_s=LIMIT_S), timeout=LIMIT_S)
    assert (flushed.success, flushed.message) == (True, f"dropped {held} cached blocks")
    wait_until(lambda: not early.blocks and not late.blocks)
    wait_until(lambda: late.number == early.number == back.number)
    answers(stub, asked(prompt, max_tokens=1))
    wait_until(lambda: set(early.blocks) == set(late.blocks) == set(back.blocks) == set(chain))
    for each in (early, late, back):
        each.close()


def test_load_is_pushed_and_polled(slow: Service, slow_stub: VllmEngineStub) -> None:
    slow.wait_idle()
    feed = Subscription(slow_stub)
    call = slow_stub.Generate(endless([5, 6, 7], "load"), timeout=LIMIT_S)
    next(call)
    wait_until(lambda: any(each.running_requests == 2 and each.token_usage > 0 for each in feed.loads))
    wait_until(lambda: any(each.gen_throughput > 0 for each in feed.loads))
    polled = slow_stub.GetLoads(pb.GetLoadsRequest(include=["core"]), timeout=LIMIT_S)
    (load,) = polled.loads
    assert (polled.dp_rank_count, load.num_running_reqs, load.num_total_reqs) == (1, 2, 2)
    assert 0 < load.num_used_tokens < load.max_total_num_tokens
    call.cancel()
    wait_until(lambda: feed.loads[-1].running_requests == 0 and not feed.loads[-1].HasField("engine_silence_ms"))
    feed.close()
    assert [each.sample for each in feed.loads] == list(range(1, len(feed.loads) + 1))


def test_flush_beside_running_sequences_says_so(slow: Service, slow_stub: VllmEngineStub) -> None:
    slow.wait_idle()
    call = slow_stub.Generate(endless([5, 6, 7], "flush"), timeout=LIMIT_S)
    next(call)
    flushed = slow_stub.FlushCache(common.FlushCacheRequest(), timeout=LIMIT_S)
    assert (flushed.success, "2 running sequences" in flushed.message) == (False, True)
    call.cancel()
    with pytest.raises(grpc.RpcError) as caught:
        slow_stub.FlushCache(common.FlushCacheRequest(timeout_s=math.nan), timeout=LIMIT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_drain_finishes_answers_and_ends_subscriptions(tmp_path: Path) -> None:
    port = free_port()
    arguments = ["worker", "--model", str(DEMO), "--model-name", "demo", "--port", str(port), "--doors", "vllm-engine"]
    worker = Process("worker", arguments, port, tmp_path / "worker.log", {"OMP_NUM_THREADS": "1"})
    with running([worker]), grpc.insecure_channel(worker.address) as channel:
        stub = VllmEngineStub(channel)
        feed = Subscription(stub)
        wait_until(lambda: bool(feed.loads))
        request = asked([5, 6, 7], ignore_eos=True, max_tokens=900, temperature=1.0)
        call = stub.Generate(request, timeout=LIMIT_S)
        next(call)
        worker.running.send_signal(signal.SIGTERM)
        wait_until(lambda: not is_healthy(stub))
        (complete,) = (each.complete for each in call if each.HasField("complete"))
        assert (complete.completion_tokens, complete.finish_reason) == (900, "length")
        wait_until(lambda: feed.error is not None)
        assert feed.error is not None
        assert feed.error.code() is grpc.StatusCode.UNAVAILABLE
        assert worker.running.wait(LIMIT_S) == 0
        feed.close()


def test_worker_without_the_door_does_not_serve_it(service: Service) -> None:
    with grpc.insecure_channel(service.router.address) as channel, pytest.raises(grpc.RpcError) as caught:
        VllmEngineStub(channel).HealthCheck(pb.HealthCheckRequest(), timeout=LIMIT_S)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
