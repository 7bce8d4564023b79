"""A worker on real sockets: in this process, and as a process of its own that gets signals."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from fissile.worker.v1 import worker_pb2 as wpb
from structlog.testing import capture_logs

from common.cli.core.errors import CommandError
from common.process.tasks import task_failures
from common.text.tokenizer import tokenizer_files
from tests.e2e.worker_bench import (
    ENDLESS,
    NUM_BLOCKS,
    REFERENCE,
    Site,
    folder,
    options,
    request,
    running,
    site,
    status_of,
)
from tests.e2e.worker_client import VOCAB_SIZE, RouterEnd, make_model_folder, sequence
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.core import EngineCore
from worker.server import Worker, WorkerOptions, run_worker
from worker.session.router_state import RouterSequences
from worker.simulation.cost_model import INSTANT

__all__ = ["folder", "site"]

pytestmark = pytest.mark.usefixtures("stays_frozen")


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


class PausingRunner:
    """Makes so many steps, and the next one when it is let go."""

    def __init__(self, inner: Any, steps: int) -> None:
        self._inner = inner
        self._steps = steps
        self.go = threading.Event()

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        self._steps -= 1
        if self._steps < 0:
            self.go.wait()
        output: ScheduledBatchOutput = self._inner.forward(batch)
        return output


class PausingWorker(Worker):
    """Its runner pauses in the middle of what it is given."""

    def _build(self) -> EngineCore:
        core = super()._build()
        self.runner = core.runner = PausingRunner(core.runner, 20)
        return core


class FailingWorker(Worker):
    """Its runner can be made to fail."""

    def _build(self) -> EngineCore:
        core = super()._build()
        self.runner = core.runner = FailingRunner(core.runner)
        return core


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
    assert sorted(files) == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert files == tokenizer_files(folder)
    digest = hashlib.sha256()
    for name, data in sorted(files.items()):
        digest.update(name.encode() + b"\0" + len(data).to_bytes(8, "little") + data)
    assert sha256 == worker.tokenizer_sha256 == digest.hexdigest()


async def test_loading_worker_answers_calls_and_refuses_work(folder: Path) -> None:
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


async def test_stop_ends_loading_worker(folder: Path) -> None:
    worker = HeldWorker(options(folder))
    async with running(worker, ready=False) as site:
        site.stop.set()
        assert await asyncio.wait_for(site.serving, 60) == 0
        worker.go.set()


async def test_session_streams_tokens_of_several_sequences(site: Site) -> None:
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


async def test_long_prompt_arrives_in_pieces(site: Site) -> None:
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


async def test_storm_of_cancels_frees_everything(site: Site) -> None:
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


async def test_expired_lease_cancels_sequences_and_closes_session(site: Site) -> None:
    silent, other = await site.router("silent", lease_ms=1500), await site.router("other", lease_ms=60_000)
    await silent.submit(1, sequence(1, max_tokens=ENDLESS))
    await other.submit(1, sequence(1, [7], max_tokens=700))
    assert await silent.read_to_end() is grpc.StatusCode.ABORTED
    assert "1500" in (await silent.call.details()) or "1.5" in (await silent.call.details())
    await other.read_until(lambda: other.ends)
    assert other.tokens[1][1:] == REFERENCE.reference([7], 700, seed=1)
    await site.until_free()


class Clock:
    """The worker's clock for leases: it stands unless the test moves it."""

    def __init__(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.monotonic()
        monkeypatch.setattr(site.worker.service, "_clock", lambda: self.now)


async def until(condition: Callable[[], object]) -> None:
    """Waits for what nothing tells of."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # no event
            await asyncio.sleep(0.005)


async def test_lanes_renew_the_lease(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(site, monkeypatch)
    router = await site.router(lease_ms=1000)
    await router.submit(1, sequence(1, max_tokens=ENDLESS))
    reading = asyncio.create_task(router.read_until(lambda: router.ends))
    state = site.worker.service._sessions["r"].state
    for _ in range(12):
        clock.now += 0.9
        await router.lane()
        await until(lambda: state.lease_left(clock.now) == 1.0)
    await router.cancel(1)
    await reading
    assert router.reasons() == {1: wpb.END_REASON_CANCELLED}


async def test_closed_session_ends_its_sequences_at_once(site: Site) -> None:
    router = await site.router()
    await router.submit(1, *(sequence(rid, max_tokens=ENDLESS) for rid in range(1, 9)))
    await router.read_until(lambda: len(router.tokens[8]) > 5)
    await router.call.done_writing()
    assert await router.read_to_end() is grpc.StatusCode.OK
    await site.until_free()
    assert site.worker.engine.num_live == 0


async def test_sequences_of_broken_session_run_for_one_lease(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(site, monkeypatch)
    router = await site.router(lease_ms=500)
    await router.submit(1, *(sequence(rid, max_tokens=ENDLESS) for rid in range(1, 9)))
    await router.read_until(lambda: len(router.tokens[8]) > 5)
    router.call.cancel()
    await until_detached(site, "r")
    # Longer than the lease, but for the clock.
    await asyncio.sleep(0.6)
    assert "r" in site.worker.service._routers
    assert site.worker.engine.num_live == 8
    clock.now += 0.5
    await until_let_go(site, "r")
    await site.until_free()


async def until_detached(site: Site, router: str) -> None:
    """Waits until the worker knows that the router's stream is gone."""
    await until(lambda: router not in site.worker.service._sessions)


async def until_let_go(site: Site, router: str) -> None:
    """Waits until the worker knows the router no more, and has ended what it had of it."""
    await until(lambda: router not in site.worker.service._routers and not site.worker.engine.num_live)


async def test_reconnecting_router_continues_its_sequences(site: Site) -> None:
    router = await site.router("back")
    await router.submit(1, *(sequence(rid, [rid], 300) for rid in range(1, 5)))
    await router.read_until(lambda: len(router.tokens[4]) > 20)
    router.call.cancel()
    await until_detached(site, "back")
    again = RouterEnd(site.channel, "back", live={rid: len(router.tokens[rid]) for rid in (1, 2)} | {77: 3})
    again.tokens = {rid: router.tokens[rid] for rid in (1, 2)}
    assert list((await again.open()).unknown) == [77]
    await again.read_until(lambda: len(again.ends) == 2)
    for rid in (1, 2):
        assert again.tokens[rid][1:] == REFERENCE.reference([rid], 300, seed=rid)
    assert site.worker.engine.num_live == 0
    await site.until_free()


async def test_new_session_of_router_ends_its_older_one(site: Site) -> None:
    older = await site.router("same")
    await older.submit(1, sequence(1, max_tokens=ENDLESS))
    newer = await site.router("same")
    assert await older.read_to_end() is grpc.StatusCode.ABORTED
    await newer.submit(1, sequence(2, [8], max_tokens=5))
    await newer.read_until(lambda: newer.ends)
    assert newer.tokens[2][1:] == REFERENCE.reference([8], 5, seed=2)
    await site.until_free()


async def test_paused_reader_gets_merged_frames(folder: Path) -> None:
    async with running(Worker(options(folder, simulate=INSTANT))) as site:
        # A small window, so that the worker's write blocks.
        window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 2048)]
        async with grpc.aio.insecure_channel(site.worker.server.address, options=window) as channel:
            router = RouterEnd(channel, "slow", lease_ms=60_000)
            await router.open()
            lengths: dict[int, int] = {}
            outbox = site.worker.service._routers["slow"].outbox

            async def run(max_tokens: int) -> None:
                rids = range(len(lengths) + 1, len(lengths) + 65)
                serial = rids[0] // 64 + 1
                lengths.update(dict.fromkeys(rids, max_tokens))
                await router.submit(serial, *(sequence(rid, [rid], max_tokens) for rid in rids))
                # An engine that has not begun is idle too. Others would be given back beside these, which fill it.
                while outbox.submit_seen < serial:  # noqa: ASYNC110  # no event
                    await asyncio.sleep(0.01)
                await asyncio.wait_for(site.worker.engine.wait_idle(), 240)

            # How much gRPC and the kernel take without a reader depends on the pace; then the worker's write blocks.
            while not outbox.num_unsent:
                assert len(lengths) < 64 * 20, "a million tokens have gone out that nobody has read"
                await run(800)
                await asyncio.sleep(0.2)
            await run(20)
            await router.read_until(lambda: len(router.ends) == len(lengths), timeout_s=120)
    for rid, length in lengths.items():
        assert router.tokens[rid][1:] == REFERENCE.reference([rid], length, seed=rid)
    assert max(len(frame.step_output.token_ids) for frame in router.frames) > 1000


@pytest.mark.parametrize("thaws", [True, False])
async def test_router_frozen_during_write_loses_session(
    site: Site, thaws: bool, caplog: pytest.LogCaptureFixture
) -> None:
    window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 2048)]
    async with grpc.aio.insecure_channel(site.worker.server.address, options=window) as channel:
        router = RouterEnd(channel, "frozen", lease_ms=1000)
        await router.open()
        await router.submit(1, *(sequence(rid, [rid], ENDLESS) for rid in range(1, 41)))
        await until_let_go(site, "frozen")
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
async def test_bad_frame_ends_only_its_session(site: Site, frame: wpb.SessionRequest, code: grpc.StatusCode) -> None:
    bad, other = await site.router("bad"), await site.router("other")
    await bad.submit(1, sequence(1, max_tokens=ENDLESS))
    await bad.call.write(frame)
    assert await bad.read_to_end() is code
    await other.submit(1, sequence(1, max_tokens=5))
    await other.read_until(lambda: other.ends)
    await site.until_free()


async def test_invalid_hello_is_refused(site: Site) -> None:
    call = site.stub.Session()
    await call.write(wpb.SessionRequest(hello=wpb.Hello(router_id="r", lease_ms=1)))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "hello.lease_ms is 1" in str(raised.value.details())


async def test_refused_session_with_pending_welcome_has_status(site: Site) -> None:
    """Former fault: while the first frame was being written no status could be sent, and some streams stayed open for
    ever."""

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


async def test_sessions_of_a_failed_engine_end_before_another_starts(site: Site) -> None:
    """Former fault: a Session whose router did not read outlived the engine, and knew the cache of the old one."""
    router = await site.router()
    site.worker.service.break_sessions()
    try:
        await router.submit(1, sequence(1, max_tokens=ENDLESS))
    except grpc.aio.AioRpcError:  # on a busy machine the write finds the call ended; gRPC's own status is then INTERNAL
        assert router.call.done()
    else:
        assert await router.read_to_end() is grpc.StatusCode.UNAVAILABLE
    assert site.worker.engine.num_live == 0


async def test_failed_engine_ends_all_sequences_and_process(folder: Path) -> None:
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


async def test_worker_unable_to_deliver_output_exits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Former fault: the worker stayed SERVING, and sequences that had lost an output never ended."""
    async with running(Worker(options(folder))) as site:
        direct = site.stub.Generate(request(ENDLESS))
        await direct.read()

        def fail(*_: object) -> None:
            raise ValueError("a mistake")

        monkeypatch.setattr(site.worker.engine.kv_log, "append", fail)
        assert await status_of(direct) is grpc.StatusCode.INTERNAL
        assert await asyncio.wait_for(site.serving, 60) == 1


@pytest.mark.slow
async def test_failed_lease_end_is_logged_and_counted(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Former fault: only the event loop's own log told of such an error. The worker must go on."""
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


async def test_drain_rpc_ends_worker(folder: Path) -> None:
    worker = PausingWorker(options(folder))
    async with running(worker) as site:
        router = await site.router()
        await router.submit(1, sequence(1, max_tokens=200))
        await router.read_until(lambda: len(router.tokens[1]) > 5)
        try:
            # It cannot end before all has been looked at.
            assert (await site.stub.Drain(wpb.DrainRequest())).sequences == 1
            await router.read_until(lambda: "draining" in router.kinds)
            assert not await site.health()
            assert (await site.stub.GetWorker(wpb.GetWorkerRequest())).state == wpb.WORKER_STATE_DRAINING
            await router.submit(2, sequence(2))
            await router.read_until(lambda: router.returned == [2])
        finally:
            worker.runner.go.set()
        assert await router.read_to_end() is grpc.StatusCode.OK
        assert router.tokens[1][3:] == REFERENCE.reference([1, 2, 3], 200, seed=1)
        assert router.returned == [2]
        assert await asyncio.wait_for(site.serving, 60) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model": "/nowhere"},
            r"^/nowhere does not exist; give a checkpoint folder, a GGUF file, or org/name on the Hub$",
        ),
        ({"max_model_len": 5000}, r"^max_model_len is 5000; valid: at most the model's own 4096$"),
        ({"max_model_len": 4096, "kv_cache_memory": 1 << 18}, r"^max_model_len is 4096; valid: at most 512"),
    ],
)
async def test_startup_problem_is_one_line(folder: Path, change: dict[str, Any], message: str) -> None:
    given = options(folder)
    with pytest.raises(CommandError, match=message) as raised:
        await run_worker(replace(given, config=replace(given.config, **change)))
    assert raised.value.exit_code == 2


async def test_bad_checkpoints_and_a_taken_port_are_one_line(site: Site, tmp_path: Path, folder: Path) -> None:
    no_tokenizer = make_model_folder(tmp_path / "no_tokenizer", tokenizer=False)
    with pytest.raises(CommandError, match=r"no_tokenizer has no tokenizer.json"):
        await run_worker(options(no_tokenizer))
    unsupported = make_model_folder(tmp_path / "gpt2", architecture="GPT2LMHeadModel")
    refusal = r"/gpt2/config.json: architecture not supported: GPT2LMHeadModel; supported: "
    with pytest.raises(CommandError, match=refusal):
        await run_worker(options(unsupported))
    with pytest.raises(CommandError, match=rf"^port {site.worker.server.port} on 127.0.0.1 is in use"):
        await run_worker(options(folder, port=site.worker.server.port))


async def test_model_length_is_lowered_to_cache_size(folder: Path) -> None:
    given = options(folder)
    small = replace(given.config, kv_cache_memory=given.config.kv_cache_memory // 8)
    async with running(Worker(replace(given, config=small))) as site:
        worker = await site.stub.GetWorker(wpb.GetWorkerRequest())
        assert (worker.limits.max_model_len, worker.total_blocks) == (2048, 128)
