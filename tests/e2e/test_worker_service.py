"""A worker on real sockets: in this process, and as a process of its own that gets signals."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from fissile.seed import derive_seed
from fissile.worker.v1 import worker_pb2 as wpb
from fissile.worker.v1.worker_pb2_grpc import WorkerServiceStub
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from common.cli.core.errors import CommandError
from common.config import Config
from common.limits import DRAIN_TIMEOUT_S
from common.process.tasks import task_failures
from tests.e2e.service import free_port
from tests.e2e.worker_client import EOS_ID, VOCAB_SIZE, RouterEnd, make_model_folder, sequence
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.core import EngineCore
from worker.server import Worker, WorkerOptions, run_worker
from worker.session.router_state import RouterSequences
from worker.simulation.cost_model import INSTANT, FixedCost
from worker.simulation.runner import SimulatedRunner

ROOT = Path(__file__).resolve().parents[2]
SERVING = health_pb2.HealthCheckResponse.SERVING
NUM_BLOCKS = 1024
REFERENCE = SimulatedRunner(VOCAB_SIZE, EOS_ID)
# Of a sequence that runs until somebody ends it.
ENDLESS = 3000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "tiny")


def options(folder: Path, **changes: Any) -> WorkerOptions:
    config = Config(model=str(folder), max_num_seqs=64, max_num_batched_tokens=512, enable_prefix_caching=True)
    # 1024 blocks of 16 tokens, 2 layers, 2 heads of 16 numbers, K and V in 4 bytes each.
    config = replace(config, kv_cache_memory=NUM_BLOCKS * 16 * 2 * 2 * 16 * 2 * 4)
    made = WorkerOptions(config, "tiny", port=0, worker_id="w0", simulate=FixedCost(0.001))
    return replace(made, **changes)


class Site:
    """A worker in this process, and a channel to it."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.stop = asyncio.Event()

    async def start(self, *, ready: bool = True) -> None:
        await self.worker.start()
        self.serving = asyncio.create_task(self.worker.serve(self.stop))
        self.channel = grpc.aio.insecure_channel(self.worker.server.address)
        self.stub = WorkerServiceStub(self.channel)
        if ready:
            await self.until_serving()

    async def until_serving(self) -> None:
        watch = health_pb2_grpc.HealthStub(self.channel).Watch(health_pb2.HealthCheckRequest(service="readiness"))
        async with asyncio.timeout(60):
            while (await watch.read()).status != SERVING:
                pass
        watch.cancel()

    async def health(self, name: str = "") -> bool:
        stub = health_pb2_grpc.HealthStub(self.channel)
        return bool((await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == SERVING)

    async def router(self, router_id: str = "r", lease_ms: int = 5000) -> RouterEnd:
        end = RouterEnd(self.channel, router_id, lease_ms)
        await end.open()
        return end

    async def load(self) -> wpb.Load:
        """The load as a new session sees it."""
        end = RouterEnd(self.channel, f"probe-{random.random()}")
        welcome = await end.open()
        end.call.cancel()
        return welcome.load

    async def until_free(self) -> None:
        """Waits until nothing runs and no block is in use."""
        async with asyncio.timeout(60):
            while True:
                load = await self.load()
                if load.free_blocks == NUM_BLOCKS and load.decoding_seqs == load.waiting_seqs == 0:
                    return
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        await self.channel.close()
        self.stop.set()
        await asyncio.wait_for(self.serving, 60)
        assert self.worker.engine.join(60)


@contextlib.asynccontextmanager
async def running(worker: Worker, *, ready: bool = True) -> AsyncIterator[Site]:
    site = Site(worker)
    await site.start(ready=ready)
    try:
        yield site
    finally:
        await site.close()


@pytest.fixture
async def site(folder: Path) -> AsyncIterator[Site]:
    async with running(Worker(options(folder))) as made:
        yield made


class HeldWorker(Worker):
    """Loads its model until it is let go."""

    def __init__(self, given: WorkerOptions) -> None:
        super().__init__(given)
        self.go = threading.Event()

    def _build(self) -> EngineCore:
        self.go.wait()
        return super()._build()


class FailingRunner:
    """Fails when it is told to."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.fail = False

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        if self.fail:
            raise RuntimeError("the accelerator is gone")
        output: ScheduledBatchOutput = self._inner.forward(batch)
        return output


class FailingWorker(Worker):
    """Its runner can be made to fail."""

    def _build(self) -> EngineCore:
        core = super()._build()
        self.runner = core.runner = FailingRunner(core.runner)
        return core


# Description.


async def test_description_and_tokenizer(site: Site, folder: Path) -> None:
    worker = await site.stub.GetWorker(wpb.GetWorkerRequest())
    assert (worker.worker_id, worker.state, worker.model) == ("w0", wpb.WORKER_STATE_SERVING, "tiny")
    assert (worker.vocab_size, worker.block_size, worker.total_blocks) == (VOCAB_SIZE, 16, NUM_BLOCKS)
    assert (worker.limits.max_model_len, worker.limits.max_num_seqs) == (4096, 64)
    files: dict[str, bytes] = {}
    sha256 = ""
    async for piece in site.stub.GetTokenizer(wpb.GetTokenizerRequest()):
        assert not sha256
        files[piece.name] = files.get(piece.name, b"") + piece.data
        sha256 = piece.sha256
    assert files == {name: (folder / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    digest = hashlib.sha256()
    for name, data in sorted(files.items()):
        digest.update(name.encode() + b"\0" + len(data).to_bytes(8, "little") + data)
    assert sha256 == worker.tokenizer_sha256 == digest.hexdigest()


async def test_a_worker_that_loads_answers_and_takes_no_work(folder: Path) -> None:
    worker = HeldWorker(options(folder))
    async with running(worker, ready=False) as site:
        assert (await site.stub.GetWorker(wpb.GetWorkerRequest())).state == wpb.WORKER_STATE_STARTING
        assert [await site.health(name) for name in ("liveness", "readiness", "")] == [True, False, False]
        assert [piece async for piece in site.stub.GetTokenizer(wpb.GetTokenizerRequest())]
        refused = RouterEnd(site.channel)
        assert await refused.read_to_end() is grpc.StatusCode.UNAVAILABLE
        worker.go.set()
        await site.until_serving()
        assert (await site.stub.GetWorker(wpb.GetWorkerRequest())).state == wpb.WORKER_STATE_SERVING


async def test_a_stop_while_it_loads(folder: Path) -> None:
    worker = HeldWorker(options(folder))
    async with running(worker, ready=False) as site:
        site.stop.set()
        assert await asyncio.wait_for(site.serving, 60) == 0
        worker.go.set()


# Sessions.


async def test_a_session(site: Site) -> None:
    router = RouterEnd(site.channel)
    welcome = await router.open()
    assert (welcome.worker_id, welcome.limits.max_model_len) == ("w0", 4096)
    prompts = {1: [1, 2, 3], 2: list(range(100)), 3: list(range(100))}
    await router.submit(9, *(sequence(rid, prompt, 20) for rid, prompt in prompts.items()))
    await router.read_until(lambda: len(router.ends) == 3)
    for rid, prompt in prompts.items():
        assert router.tokens[rid][len(prompt) :] == REFERENCE.reference(prompt, 20, seed=rid)
    assert set(router.reasons().values()) == {wpb.END_REASON_LENGTH}
    assert router.submit_seen == 9
    await router.read_until(lambda: router.kinds[-2:] == ["heartbeat", "heartbeat"])
    assert router.load.free_blocks == router.load.total_blocks == NUM_BLOCKS


async def test_a_long_prompt_in_pieces(site: Site) -> None:
    router = await site.router()
    prompt = [i % VOCAB_SIZE for i in range(4000)]
    whole = sequence(1, prompt, 3)
    router.tokens[1] = list(prompt)
    first = wpb.SubmitSequence()
    first.CopyFrom(whole)
    del first.token_ids[1000:]
    first.more = True
    await router.call.write(wpb.SessionRequest(submit=wpb.Submit(serial=1, seqs=[first])))
    for start in range(1000, 4000, 1500):
        piece = prompt[start : start + 1500]
        extend = wpb.Extend(rid=1, token_ids=piece, more=start + 1500 < 4000)
        await router.call.write(wpb.SessionRequest(extend=extend))
    await router.read_until(lambda: router.ends)
    assert router.tokens[1][4000:] == REFERENCE.reference(prompt, 3, seed=1)


async def test_a_storm_of_cancels_leaves_nothing(site: Site) -> None:
    router = await site.router()
    chance = random.Random(1)
    pending = list(range(1, 129))
    await router.submit(1, *(sequence(rid, [rid] * (1 + rid % 50), ENDLESS, keep=True) for rid in pending))
    reading = asyncio.create_task(router.read_until(lambda: len(router.ends) == 128))
    while pending:
        batch = [pending.pop(chance.randrange(len(pending))) for _ in range(min(len(pending), 5))]
        await asyncio.sleep(chance.random() * 0.01)
        await router.cancel(*batch)
    await reading
    assert set(router.reasons().values()) == {wpb.END_REASON_CANCELLED}
    for rid, tokens in router.tokens.items():
        prompt = [rid] * (1 + rid % 50)
        made = tokens[len(prompt) :]
        assert made == REFERENCE.reference(prompt, len(made), seed=rid)
    assert (router.load.decoding_seqs, router.load.waiting_seqs) == (0, 0)
    assert router.load.free_blocks == NUM_BLOCKS
    assert site.worker.engine.num_live == 0


async def test_deadlines_end_in_the_engine(site: Site) -> None:
    router = await site.router()
    await router.submit(1, sequence(1, max_tokens=ENDLESS, deadline_left_ms=150), sequence(2, max_tokens=5))
    await router.read_until(lambda: len(router.ends) == 2)
    assert router.reasons() == {1: wpb.END_REASON_DEADLINE, 2: wpb.END_REASON_LENGTH}
    await site.until_free()


async def test_the_end_of_the_lease_cancels_and_closes(site: Site) -> None:
    silent, other = await site.router("silent", lease_ms=300), await site.router("other")
    await silent.submit(1, sequence(1, max_tokens=ENDLESS))
    await other.submit(1, sequence(1, [7], max_tokens=700))
    assert await silent.read_to_end() is grpc.StatusCode.ABORTED
    assert "300" in (await silent.call.details()) or "0.3" in (await silent.call.details())
    await other.read_until(lambda: other.ends)
    assert other.tokens[1][1:] == REFERENCE.reference([7], 700, seed=1)
    await site.until_free()


async def test_lanes_renew_the_lease(site: Site) -> None:
    router = await site.router(lease_ms=1000)
    await router.submit(1, sequence(1, max_tokens=ENDLESS))
    reading = asyncio.create_task(router.read_until(lambda: router.ends))
    for _ in range(7):
        await asyncio.sleep(0.2)
        await router.lane()
    await router.cancel(1)
    await reading
    assert router.reasons() == {1: wpb.END_REASON_CANCELLED}


async def test_a_stream_that_its_router_closes_ends_its_sequences_at_once(site: Site) -> None:
    router = await site.router()
    await router.submit(1, *(sequence(rid, max_tokens=ENDLESS) for rid in range(1, 9)))
    await router.read_until(lambda: len(router.tokens[8]) > 5)
    await router.call.done_writing()
    assert await router.read_to_end() is grpc.StatusCode.OK
    await site.until_free()
    assert site.worker.engine.num_live == 0


async def test_the_sequences_of_a_broken_stream_run_on_for_a_lease(site: Site) -> None:
    router = await site.router(lease_ms=600)
    await router.submit(1, *(sequence(rid, max_tokens=ENDLESS) for rid in range(1, 9)))
    await router.read_until(lambda: len(router.tokens[8]) > 5)
    router.call.cancel()
    await asyncio.sleep(0.3)
    assert site.worker.engine.num_live == 8
    await asyncio.sleep(0.5)
    assert site.worker.engine.num_live == 0
    await site.until_free()


async def test_a_router_that_comes_back_goes_on_where_it_was(site: Site) -> None:
    router = await site.router("back")
    await router.submit(1, *(sequence(rid, [rid], 300) for rid in range(1, 5)))
    await router.read_until(lambda: len(router.tokens[4]) > 20)
    router.call.cancel()
    await asyncio.sleep(0.2)
    again = RouterEnd(site.channel, "back", live={rid: len(router.tokens[rid]) for rid in (1, 2)} | {77: 3})
    again.tokens = {rid: router.tokens[rid] for rid in (1, 2)}
    assert list((await again.open()).unknown) == [77]
    await again.read_until(lambda: len(again.ends) == 2)
    for rid in (1, 2):
        assert again.tokens[rid][1:] == REFERENCE.reference([rid], 300, seed=rid)
    assert site.worker.engine.num_live == 0
    await site.until_free()


async def test_the_newest_stream_of_a_router_fences_its_older_one(site: Site) -> None:
    older = await site.router("same")
    await older.submit(1, sequence(1, max_tokens=ENDLESS))
    newer = await site.router("same")
    assert await older.read_to_end() is grpc.StatusCode.ABORTED
    await newer.submit(1, sequence(2, [8], max_tokens=5))
    await newer.read_until(lambda: newer.ends)
    assert newer.tokens[2][1:] == REFERENCE.reference([8], 5, seed=2)
    await site.until_free()


async def test_a_reader_that_pauses_gets_merged_frames(folder: Path) -> None:
    async with running(Worker(options(folder, simulate=INSTANT))) as site:
        # A small window, so that the worker's write blocks.
        window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 2048)]
        async with grpc.aio.insecure_channel(site.worker.server.address, options=window) as channel:
            router = RouterEnd(channel, "slow", lease_ms=60_000)
            await router.open()
            await router.submit(1, *(sequence(rid, [rid], 800) for rid in range(1, 65)))
            await asyncio.wait_for(site.worker.engine.wait_idle(), 60)
            await router.read_until(lambda: len(router.ends) == 64)
    for rid in range(1, 65):
        assert router.tokens[rid][1:] == REFERENCE.reference([rid], 800, seed=rid)
    assert max(len(frame.step_output.token_ids) for frame in router.frames) > 1000


@pytest.mark.parametrize("thaws", [True, False])
async def test_a_router_that_freezes_in_the_middle_of_a_write_is_let_go(
    site: Site, thaws: bool, caplog: pytest.LogCaptureFixture
) -> None:
    window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 2048)]
    async with grpc.aio.insecure_channel(site.worker.server.address, options=window) as channel:
        router = RouterEnd(channel, "frozen", lease_ms=1000)
        await router.open()
        await router.submit(1, *(sequence(rid, [rid], ENDLESS) for rid in range(1, 41)))
        await asyncio.sleep(1.5)
        assert site.worker.engine.num_live == 0
        await site.until_free()
        if thaws:
            assert await router.read_to_end() is grpc.StatusCode.ABORTED
    await site.worker.service.finish(5)
    assert not caplog.records


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (wpb.SessionRequest(extend=wpb.Extend(token_ids=[1] * 20_000)), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (wpb.SessionRequest(), grpc.StatusCode.INVALID_ARGUMENT),
        (wpb.SessionRequest(hello=wpb.Hello(router_id="r", lease_ms=5000)), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_a_bad_frame_ends_its_session_only(site: Site, frame: wpb.SessionRequest, code: grpc.StatusCode) -> None:
    bad, other = await site.router("bad"), await site.router("other")
    await bad.submit(1, sequence(1, max_tokens=ENDLESS))
    await bad.call.write(frame)
    assert await bad.read_to_end() is code
    await other.submit(1, sequence(1, max_tokens=5))
    await other.read_until(lambda: other.ends)
    await site.until_free()


async def test_a_hello_that_can_not_be_served(site: Site) -> None:
    call = site.stub.Session()
    await call.write(wpb.SessionRequest(hello=wpb.Hello(router_id="r", lease_ms=1)))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "hello.lease_ms is 1" in str(raised.value.details())


async def test_every_session_that_is_refused_with_its_welcome_under_way_has_a_status(site: Site) -> None:
    """X4: with the first frame under way no status could be sent, and some streams stayed open for ever."""

    async def refused(i: int) -> grpc.StatusCode:
        call = site.stub.Session()
        hello = wpb.SessionRequest(hello=wpb.Hello(router_id=f"refused-{i}", lease_ms=5000))
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call.write(hello)
            await call.write(hello)
            while await call.read() is not grpc.aio.EOF:
                pass
        return await call.code()

    async with asyncio.timeout(60):
        for _ in range(10):
            codes = await asyncio.gather(*(refused(i) for i in range(30)))
            assert set(codes) == {grpc.StatusCode.INVALID_ARGUMENT}


# Direct calls.


def request(max_tokens: int = 5, **fields: Any) -> wpb.GenerateRequest:
    params = wpb.SamplingParams(top_p=1, repetition_penalty=1, max_tokens=max_tokens)
    return wpb.GenerateRequest(**{"token_ids": [1, 2, 3], "params": params, "seed": 4, **fields})


async def status_of(call: Any) -> grpc.StatusCode:
    """Reads a direct call to its end."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    code: grpc.StatusCode = await call.code()
    return code


async def test_a_direct_call(site: Site) -> None:
    answers = [answer async for answer in site.stub.Generate(request(20))]
    assert [token for answer in answers for token in answer.token_ids] == REFERENCE.reference([1, 2, 3], 20, seed=4)
    assert [answer.HasField("start") for answer in answers] == [True] + [False] * (len(answers) - 1)
    assert [answer.HasField("end") for answer in answers] == [False] * (len(answers) - 1) + [True]
    assert answers[-1].end.reason == wpb.END_REASON_LENGTH


async def test_a_direct_call_without_a_seed(site: Site) -> None:
    """W14: the seed was 0, so that one prompt had one "random" answer for everybody."""
    call = request(20, request_id="mine")
    call.ClearField("seed")
    first, again = [[answer async for answer in site.stub.Generate(call)] for _ in range(2)]
    tokens = [[token for answer in answers for token in answer.token_ids] for answers in (first, again)]
    assert tokens == [REFERENCE.reference([1, 2, 3], 20, seed=derive_seed("mine"))] * 2
    assert [answer.HasField("seed") for answer in first] == [True] + [False] * (len(first) - 1)
    call.request_id = ""
    first, again = [[answer async for answer in site.stub.Generate(call)] for _ in range(2)]
    assert first[0].seed != again[0].seed
    call.seed = 0
    answers = [answer async for answer in site.stub.Generate(call)]
    assert answers[0].seed == 0


async def test_more_direct_calls_than_may_wait(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W12: any number of direct calls waited, each with its prompt."""
    monkeypatch.setattr("worker.session.service.MAX_WAITING_CALLS", 2)
    given = options(folder)
    async with running(Worker(replace(given, config=replace(given.config, max_num_seqs=1)))) as site:
        calls = [site.stub.Generate(request(ENDLESS)) for _ in range(3)]
        await asyncio.wait([asyncio.ensure_future(call.read()) for call in calls], return_when="FIRST_COMPLETED")
        while site.worker.engine.num_live < 3:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)
        refused = site.stub.Generate(request())
        assert await status_of(refused) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "queue is full" in str(await refused.details())
        for call in calls:
            call.cancel()


async def test_sessions_of_a_failed_engine_end_before_another_starts(site: Site) -> None:
    """W7: one whose router did not read outlived the engine, and knew the cache of the old one."""
    router = await site.router()
    site.worker.service.break_sessions()
    try:
        await router.submit(1, sequence(1, max_tokens=ENDLESS))
    except grpc.aio.AioRpcError:  # on a busy machine the write finds the call ended; gRPC's own status is then INTERNAL
        assert router.call.done()
    else:
        assert await router.read_to_end() is grpc.StatusCode.UNAVAILABLE
    assert site.worker.engine.num_live == 0


async def test_a_direct_call_that_is_given_up(site: Site) -> None:
    call = site.stub.Generate(request(ENDLESS))
    await call.read()
    call.cancel()
    await site.until_free()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in site.stub.Generate(request(ENDLESS), timeout=0.3):
            pass
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await site.until_free()


@pytest.mark.parametrize(
    ("bad", "code", "field"),
    [
        (request(token_ids=[]), grpc.StatusCode.INVALID_ARGUMENT, "token_ids"),
        (request(token_ids=[1, VOCAB_SIZE]), grpc.StatusCode.INVALID_ARGUMENT, "token_ids[1]"),
        (request(token_ids=[1] * 4096), grpc.StatusCode.OUT_OF_RANGE, "token_ids"),
        (request(0), grpc.StatusCode.INVALID_ARGUMENT, "params.max_tokens"),
        (wpb.GenerateRequest(token_ids=[1]), grpc.StatusCode.INVALID_ARGUMENT, "params.top_p"),
        (request(request_id="x" * 129), grpc.StatusCode.INVALID_ARGUMENT, "request_id"),
        (
            request(params=wpb.SamplingParams(top_p=1, max_tokens=1, repetition_penalty=101)),
            grpc.StatusCode.INVALID_ARGUMENT,
            "params.repetition_penalty",
        ),
    ],
)
async def test_a_bad_direct_call(site: Site, bad: wpb.GenerateRequest, code: grpc.StatusCode, field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await site.stub.Generate(bad).read()
    assert raised.value.code() is code
    assert str(raised.value.details()).startswith(f"{field} ")


# Failure and end.


async def test_an_engine_that_fails_ends_everything_and_the_process(folder: Path) -> None:
    worker = FailingWorker(options(folder))
    async with running(worker) as site:
        router = await site.router()
        await router.submit(1, *(sequence(rid, max_tokens=ENDLESS) for rid in range(1, 5)))
        await router.read_until(lambda: len(router.tokens[4]) > 5)
        direct = site.stub.Generate(request(ENDLESS))
        await direct.read()
        worker.runner.fail = True
        assert await router.read_to_end() is grpc.StatusCode.OK
        assert set(router.reasons().values()) == {wpb.END_REASON_ERROR}
        assert router.ends[1].message == "RuntimeError: the accelerator is gone"
        assert await status_of(direct) is grpc.StatusCode.INTERNAL
        assert await asyncio.wait_for(site.serving, 60) == 1


async def test_a_worker_that_can_not_hand_out_its_output_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """X1: it went on with health SERVING, and what had lost an output never ended."""
    async with running(Worker(options(folder))) as site:
        direct = site.stub.Generate(request(ENDLESS))
        await direct.read()

        def fail(*_: object) -> None:
            raise ValueError("a mistake")

        monkeypatch.setattr(site.worker.engine.kv_log, "append", fail)
        assert await status_of(direct) is grpc.StatusCode.INTERNAL
        assert await asyncio.wait_for(site.serving, 60) == 1


@pytest.mark.slow
async def test_a_lease_whose_end_fails_is_logged_and_counted(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """X1: the event loop told its own log alone; the worker goes on."""
    router = await site.router(lease_ms=300)
    await router.submit(1, sequence(1, max_tokens=ENDLESS))
    await router.read_until(lambda: len(router.tokens[1]) > 5)

    def fail(_: object) -> None:
        raise ValueError("a mistake")

    before = task_failures().get("lease", 0)
    monkeypatch.setattr(RouterSequences, "end", fail)
    with capture_logs() as logs:
        router.call.cancel()
        async with asyncio.timeout(60):
            while task_failures().get("lease", 0) == before:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    assert [line["router"] for line in logs if line["event"] == "callback failed"] == ["r"]
    monkeypatch.undo()
    call = site.stub.Generate(request(3))
    assert await status_of(call) is grpc.StatusCode.OK
    assert await site.health()


async def test_the_drain_rpc_ends_the_worker(site: Site) -> None:
    router = await site.router()
    await router.submit(1, sequence(1, max_tokens=200))
    await router.read_until(lambda: len(router.tokens[1]) > 5)
    assert (await site.stub.Drain(wpb.DrainRequest())).sequences == 1
    await router.read_until(lambda: "draining" in router.kinds)
    assert not await site.health()
    assert (await site.stub.GetWorker(wpb.GetWorkerRequest())).state == wpb.WORKER_STATE_DRAINING
    await router.submit(2, sequence(2))
    assert await router.read_to_end() is grpc.StatusCode.OK
    assert router.tokens[1][3:] == REFERENCE.reference([1, 2, 3], 200, seed=1)
    assert router.returned == [2]
    assert await asyncio.wait_for(site.serving, 60) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "/nowhere"}, r"^model folder /nowhere does not exist; give a Hugging Face checkpoint folder$"),
        ({"max_model_len": 5000}, r"^max_model_len is 5000; valid: at most the model's own 4096$"),
        ({"max_model_len": 4096, "kv_cache_memory": 1 << 18}, r"^max_model_len is 4096; valid: at most 512"),
    ],
)
async def test_what_must_be_changed_is_one_line(folder: Path, change: dict[str, Any], message: str) -> None:
    given = options(folder)
    with pytest.raises(CommandError, match=message) as raised:
        await run_worker(replace(given, config=replace(given.config, **change)))
    assert raised.value.exit_code == 2


async def test_bad_checkpoints_and_a_taken_port_are_one_line(site: Site, tmp_path: Path, folder: Path) -> None:
    no_tokenizer = make_model_folder(tmp_path / "no_tokenizer", tokenizer=False)
    with pytest.raises(CommandError, match=r"no_tokenizer has no tokenizer.json"):
        await run_worker(options(no_tokenizer))
    unsupported = make_model_folder(tmp_path / "gpt2", architecture="GPT2LMHeadModel")
    with pytest.raises(CommandError, match=r"^architecture not supported: GPT2LMHeadModel; supported: Qwen3"):
        await run_worker(options(unsupported))
    with pytest.raises(CommandError, match=rf"^port {site.worker.server.port} on 127.0.0.1 is in use"):
        await run_worker(options(folder, port=site.worker.server.port))


async def test_the_length_is_lowered_to_what_the_cache_holds(folder: Path) -> None:
    given = options(folder)
    small = replace(given.config, kv_cache_memory=given.config.kv_cache_memory // 8)
    async with running(Worker(replace(given, config=small))) as site:
        worker = await site.stub.GetWorker(wpb.GetWorkerRequest())
        assert (worker.limits.max_model_len, worker.total_blocks) == (2048, 128)


# As a process.


class Process:
    """`python -m worker --simulate fixed:2ms` on a free port."""

    def __init__(self, folder: Path, log: Path, *arguments: str) -> None:
        self.port = free_port()
        self.log = log
        command = [
            sys.executable,
            "-m",
            "worker",
            "--model",
            str(folder),
            "--port",
            str(self.port),
            "--simulate",
            "fixed:2ms",
        ]
        with log.open("wb") as stream:
            self.child = subprocess.Popen([*command, *arguments], cwd=ROOT, stdout=stream, stderr=stream)

    async def channel(self) -> grpc.aio.Channel:
        """Waits until it serves."""
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}")
        health = health_pb2_grpc.HealthStub(channel)
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    if (await health.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)).status == SERVING:
                        return channel
                await asyncio.sleep(0.02)

    async def exit_code(self, timeout_s: float = 10.0) -> int:
        return await asyncio.to_thread(self.child.wait, timeout_s)


@pytest.fixture
def process(folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Process]:
    made = Process(folder, tmp_path / "log", *getattr(request, "param", ()))
    yield made
    if made.child.poll() is None:
        made.child.kill()
        made.child.wait()


async def test_sigterm_lets_sequences_finish(process: Process) -> None:
    async with await process.channel() as channel:
        router = RouterEnd(channel)
        await router.open()
        await router.submit(1, sequence(1, max_tokens=200))
        await router.read_until(lambda: len(router.tokens[1]) > 5)
        process.child.send_signal(signal.SIGTERM)
        assert await router.read_to_end() is grpc.StatusCode.OK
        assert "draining" in router.kinds
        assert router.tokens[1][3:] == REFERENCE.reference([1, 2, 3], 200, seed=1)
        assert await process.exit_code() == 0
    assert "Traceback" not in process.log.read_text()


@pytest.mark.parametrize("process", [("--drain-timeout", "0.3")], indirect=True)
async def test_the_drain_timeout_ends_what_still_runs(process: Process) -> None:
    async with await process.channel() as channel:
        router = RouterEnd(channel)
        await router.open()
        await router.submit(1, sequence(1, max_tokens=ENDLESS))
        await router.read_until(lambda: len(router.tokens[1]) > 5)
        started = time.monotonic()
        process.child.send_signal(signal.SIGINT)
        assert await router.read_to_end() is grpc.StatusCode.OK
        assert router.reasons() == {1: wpb.END_REASON_CANCELLED}
        assert await process.exit_code() == 0
        # Else as long as drains last without the option.
        assert time.monotonic() - started < DRAIN_TIMEOUT_S


@pytest.mark.slow
async def test_a_second_signal_ends_at_once(process: Process) -> None:
    async with await process.channel() as channel:
        router = RouterEnd(channel)
        await router.open()
        await router.submit(1, sequence(1, max_tokens=ENDLESS))
        await router.read_until(lambda: len(router.tokens[1]) > 5)
        process.child.send_signal(signal.SIGTERM)
        await router.read_until(lambda: "draining" in router.kinds)
        process.child.send_signal(signal.SIGTERM)
        assert await process.exit_code(2.0) == 128 + signal.SIGTERM


def test_a_refused_start_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "worker",
        "--simulate",
        "fixed:2ms",
        "--model",
        str(tmp_path / "nowhere"),
        "--port",
        "0",
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert run.returncode == 2
    assert run.stdout == ""
    [line] = run.stderr.splitlines()
    assert line.startswith("error: model folder ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--kv-cache-memory", "lots"], "use for example 2GiB", marks=pytest.mark.slow),
        (["--block-size", "5"], "kv_cache_block_size is 5; valid: 1 or a multiple of 16"),
        pytest.param(["--port", "70000"], "70000 is not in the range", marks=pytest.mark.slow),
    ],
)
def test_a_bad_option_is_one_line_and_exit_code_2(folder: Path, arguments: list[str], message: str) -> None:
    command = [sys.executable, "-m", "worker", "--simulate=fixed:2ms", "--model", str(folder), *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert run.returncode == 2
    [line] = run.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_a_simulated_worker_needs_no_torch() -> None:
    code = "import sys, worker.cli.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=30, check=False).returncode == 0
