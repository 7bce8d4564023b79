"""The real thread with a real engine on SimulatedRunner."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

import pytest
from structlog.testing import capture_logs

from common.config import Config
from common.errors import EngineError
from common.params.sampling_params import SamplingParams
from tests.unit.worker.session.support import BLOCK_SIZE, CONFIG, NUM_BLOCKS, Heard, simulated_runner, submit_group
from worker.engine import core
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.core import EngineCore
from worker.engine.executor import InlineExecutor
from worker.engine.outputs import RequestOutput
from worker.engine.sequence import EndReason, Sequence
from worker.engine.turns import Turn
from worker.session.engine_loop import EngineLoop, EngineState
from worker.simulation.runner import SimulatedRunner

pytestmark = pytest.mark.usefixtures("stays_frozen")


class Listener:
    """Keeps everything, and checks the order."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, EndReason] = {}
        self.seen: list[int] = []
        self.steps = 0
        self.thread: int | None = None
        self._stepped = asyncio.Event()

    async def until(self, condition: Callable[[], object]) -> None:
        """Waits until a step makes `condition` true."""
        async with asyncio.timeout(60):
            while not condition():
                self._stepped.clear()
                await self._stepped.wait()

    def on_output(self, output: RequestOutput) -> None:
        assert output.request_id not in self.ends
        tokens = self.tokens.setdefault(output.request_id, [])
        assert (output.start is not None) == (not tokens and bool(output.output_tokens))
        tokens += output.output_tokens
        if output.end is not None:
            assert output.end.end_pos == output.first_pos + len(output.output_tokens)
            self.ends[output.request_id] = output.end.reason
        self.thread = threading.get_ident()

    def on_step(self, step: int, submit_seen: int | None) -> None:
        self.steps += 1
        if submit_seen is not None:
            self.seen.append(submit_seen)
        self._stepped.set()


@dataclass
class WatchedRunner:
    """A SimulatedRunner that remembers what was in each batch, can be held, and can fail.

    In the step after `holds_after` others it holds itself, and says so by `held`.
    """

    inner: SimulatedRunner = field(default_factory=lambda: simulated_runner(step_s=0.002))
    batches: list[list[int]] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)
    holds_after: int | None = None
    held: threading.Event = field(default_factory=threading.Event)
    fail: bool = False

    def __post_init__(self) -> None:
        self.go.set()

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        if len(self.batches) == self.holds_after:
            self.go.clear()
            self.held.set()
        self.entered.set()
        self.go.wait()
        if self.fail:
            raise RuntimeError("the accelerator\nis gone")
        self.batches.append(batch.req_ids)
        return self.inner.forward(batch)


def sequence(num_tokens: int = 20, max_tokens: int = 10, **fields: float) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens)
    return Sequence([3] * num_tokens, BLOCK_SIZE, params, arrive_time=time.monotonic(), **fields)  # type: ignore[arg-type]


@dataclass
class Clock:
    """A clock that advances only by hand."""

    now: float = field(default_factory=time.monotonic)

    def __call__(self) -> float:
        return self.now


class Site:
    """An engine that runs."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.engine = EngineLoop(self.clock)
        self.runner = WatchedRunner()
        self.listener = Listener()

    def core(self, config: Config = CONFIG) -> EngineCore:
        return EngineCore(config, self.runner, self.clock)

    async def idle(self) -> None:
        await asyncio.wait_for(self.engine.wait_idle(), 60)

    async def in_step_behind(self, count: int) -> None:
        """Lets the engine run up to the step after `count` others; that step ends when the runner may continue."""
        self.runner.holds_after = count
        self.runner.held.clear()
        self.runner.go.set()
        assert await asyncio.to_thread(self.runner.held.wait, 60)

    async def in_the_second_step(self, seqs: list[Sequence]) -> None:
        """Gives a group to the engine, and has it in its second step."""
        self.runner.go.clear()
        submit_group(self.engine, self.listener, 1, seqs)
        await self.in_step_behind(1)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    made = Site()
    made.engine.start(made.core)
    await asyncio.wait_for(made.engine.wait_started(), 60)
    yield made
    made.runner.go.set()
    made.engine.stop()
    assert made.engine.join(60)


async def test_tokens_arrive_in_order_on_event_loop(site: Site) -> None:
    seqs = [sequence(num_tokens=n) for n in (1, 16, 100)]
    submit_group(site.engine, site.listener, 7, seqs)
    assert site.engine.num_live == 3
    await site.idle()
    expected = {seq.id: site.runner.inner.reference([3] * seq.num_prompt_tokens, 10) for seq in seqs}
    assert site.listener.tokens == expected
    assert set(site.listener.ends.values()) == {EndReason.LENGTH}
    assert site.listener.seen == [7]
    assert site.listener.thread == threading.get_ident()


async def test_flush_drops_cache_before_next_step(site: Site) -> None:
    def cached() -> int:
        return site.engine.figures.cached_tokens if site.engine.figures is not None else -1

    for flush, expected in ((False, 0), (False, 96), (True, 96), (False, 192)):
        if flush:
            assert await asyncio.wait_for(site.engine.flush(), 60) > 0
            assert await asyncio.wait_for(site.engine.flush(), 60) == 0
        site.engine.submit(Heard(sequence(num_tokens=100), site.listener))
        await site.idle()
        assert cached() == expected


async def test_flush_of_failing_engine_is_an_error(site: Site) -> None:
    site.runner.go.clear()
    site.runner.fail = True
    site.engine.submit(Heard(sequence(), site.listener))
    assert await asyncio.to_thread(site.runner.entered.wait, 60)
    flushing = asyncio.create_task(site.engine.flush())
    await asyncio.sleep(0)
    site.runner.go.set()
    with pytest.raises(EngineError, match="the accelerator is gone"):
        await asyncio.wait_for(flushing, 60)
    with pytest.raises(EngineError, match="the engine is failed"):
        await site.engine.flush()


async def test_group_shares_first_batch_after_inbox_is_emptied(site: Site) -> None:
    site.runner.go.clear()
    submit_group(site.engine, site.listener, 1, [sequence()])
    assert await asyncio.to_thread(site.runner.entered.wait, 60)
    site.clock.now += 0.5
    assert site.engine.busy_s(site.clock()) == 0.5
    group = [sequence() for _ in range(3)]
    late = sequence()
    submit_group(site.engine, site.listener, 2, group)
    submit_group(site.engine, site.listener, 3, [late])
    site.engine.cancel([group[1].id])
    site.runner.go.set()
    await site.idle()
    assert site.engine.busy_s(site.clock()) == 0
    assert site.runner.batches[1] == [group[0].id, group[2].id, late.id]
    assert site.listener.seen == [1, 3]
    assert site.listener.ends[group[1].id] == EndReason.CANCELLED


async def test_event_loop_wakes_once_per_step(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, calls = asyncio.get_running_loop(), []
    original = loop.call_soon_threadsafe

    def counting(*arguments: object, **named: object) -> object:
        calls.append(arguments[-1])
        return original(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "call_soon_threadsafe", counting)
    submit_group(site.engine, site.listener, 1, [sequence(max_tokens=30) for _ in range(8)])
    await site.idle()
    turns = [event for event in calls if isinstance(event, Turn)]
    assert len(turns) == len(calls)
    assert len(turns) == len(site.runner.batches) == site.engine.num_steps


async def test_idle_engine_does_not_spin(site: Site) -> None:
    submit_group(site.engine, site.listener, 1, [sequence()])
    await site.idle()
    assert site.engine._thread is not None
    # The processor time of its thread: others of this process may have work of other tests.
    own = time.pthread_getcpuclockid(site.engine._thread._thread.ident or 0)
    before = time.clock_gettime(own)
    await asyncio.sleep(0.3)
    assert time.clock_gettime(own) - before < 0.1


async def test_cancel_frees_at_the_next_turn(site: Site) -> None:
    seqs = [sequence(max_tokens=900) for _ in range(8)]
    await site.in_the_second_step(seqs)
    site.engine.cancel([seq.id for seq in seqs] + [10**9])
    site.runner.go.set()
    await site.idle()
    # The first sequence's prompt was computed in the first step, the prompts that share it in the second.
    assert [len(site.listener.tokens[seq.id]) for seq in seqs] == [1] * 8
    assert set(site.listener.ends.values()) == {EndReason.CANCELLED}
    load = site.engine.load
    assert load is not None
    assert (load.free_blocks, load.decoding_seqs) == (NUM_BLOCKS, 0)


async def test_deadline_ends_sequence_in_engine(site: Site) -> None:
    seq = sequence(max_tokens=900, deadline=site.clock() + 1)
    await site.in_the_second_step([seq])
    site.clock.now += 1
    site.runner.go.set()
    await site.idle()
    assert site.listener.ends == {seq.id: EndReason.DEADLINE}
    assert len(site.listener.tokens[seq.id]) == 2


async def test_unrunnable_sequence_ends_alone(site: Site) -> None:
    bad, good = sequence(num_tokens=2000), sequence()
    submit_group(site.engine, site.listener, 1, [bad, good])
    await site.idle()
    assert site.listener.ends == {bad.id: EndReason.INVALID, good.id: EndReason.LENGTH}


async def test_resumed_finished_stream_ends_at_once(site: Site) -> None:
    seq = Sequence([3] * 30, BLOCK_SIZE, SamplingParams(max_tokens=10), num_prompt_tokens=20)
    submit_group(site.engine, site.listener, 1, [seq])
    await site.idle()
    assert site.listener.ends == {seq.id: EndReason.LENGTH}
    assert site.listener.tokens == {seq.id: []}


async def test_empty_group_acknowledges_serial(site: Site) -> None:
    submit_group(site.engine, site.listener, 5, [])
    await site.listener.until(lambda: site.listener.seen)
    assert site.listener.seen == [5]


async def test_end_all_ends_live_sequences(site: Site) -> None:
    await site.in_the_second_step([sequence(max_tokens=900) for _ in range(4)])
    site.engine.end_all("drained")
    site.runner.go.set()
    await site.idle()
    assert list(site.listener.ends.values()) == [EndReason.CANCELLED] * 4
    submit_group(site.engine, site.listener, 2, [sequence()])
    await site.idle()
    assert EndReason.LENGTH in site.listener.ends.values()


async def test_failed_engine_ends_current_and_later_sequences(site: Site) -> None:
    await site.in_the_second_step([sequence(max_tokens=900) for _ in range(4)])
    site.runner.fail = True
    site.runner.go.set()
    message = await asyncio.wait_for(site.engine.wait_failed(), 60)
    assert message == "RuntimeError: the accelerator is gone"
    await site.idle()
    later = sequence()
    submit_group(site.engine, site.listener, 2, [later])
    site.engine.submit(Heard(sequence(), site.listener))
    await site.idle()
    assert set(site.listener.ends.values()) == {EndReason.ERROR}
    assert len(site.listener.ends) == 6
    assert site.engine.state is EngineState.FAILED


async def test_after_a_failure_another_engine_can_be_started(site: Site) -> None:
    site.runner.fail = True
    site.engine.submit(Heard(sequence(), site.listener))
    await asyncio.wait_for(site.engine.wait_failed(), 60)
    await site.idle()
    assert await asyncio.to_thread(site.engine.join, 60)
    site.runner.fail = False
    site.engine.start(site.core)
    assert (site.engine.state, site.engine.load, site.engine.num_steps) == (EngineState.STARTING, None, 0)
    await asyncio.wait_for(site.engine.wait_started(), 60)
    seq = sequence()
    site.engine.submit(Heard(seq, site.listener))
    await site.idle()
    assert site.listener.ends[seq.id] == EndReason.LENGTH
    assert site.engine.state is EngineState.RUNNING


class LostExecutor(InlineExecutor):
    """Computes in this process, until it is lost."""

    lost = False
    closed = False

    def failure(self) -> Exception | None:
        return RuntimeError("rank 1 is gone") if self.lost else None

    def close(self) -> None:
        self.closed = True


async def test_idle_engine_detects_lost_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "_IDLE_CHECK_S", 0.02)
    engine, runner = EngineLoop(), simulated_runner()
    executor = LostExecutor(runner.forward, time.monotonic)
    engine.start(lambda: EngineCore(CONFIG, runner, executor=executor))
    await asyncio.wait_for(engine.wait_started(), 60)
    executor.lost = True
    assert await asyncio.wait_for(engine.wait_failed(), 60) == "RuntimeError: rank 1 is gone"
    assert engine.state is EngineState.FAILED
    assert executor.closed


class Failing(Listener):
    """Can not take outputs, or ends alone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def on_output(self, output: RequestOutput) -> None:
        if self.kind == "output" or (self.kind == "end" and output.end is not None):
            raise ValueError("a mistake")

    def on_step(self, step: int, submit_seen: int | None) -> None:
        if self.kind == "step":
            raise ValueError("a mistake")


@pytest.mark.parametrize("kind", ["output", "end", "step"])
async def test_undeliverable_output_fails_engine(site: Site, kind: str) -> None:
    """Former fault: the rest of the turn was lost silently, and sequences with output in it never ended, with health
    SERVING."""
    bad, others = sequence(max_tokens=3), [sequence(max_tokens=500) for _ in range(3)]
    submit_group(site.engine, Failing(kind), 1, [bad])
    submit_group(site.engine, site.listener, 2, others)
    with capture_logs() as logs:
        assert await asyncio.wait_for(site.engine.wait_failed(), 60) == "a mistake"
    assert "engine failed" in [line["event"] for line in logs if line["log_level"] == "error"]
    assert site.engine.state is EngineState.FAILED
    assert [site.listener.ends.get(seq.id) for seq in others] == [EndReason.ERROR] * 3
    assert site.engine.num_live == 0
    await site.idle()
    assert await asyncio.to_thread(site.engine.join, 60)


async def test_failed_engine_does_not_affect_new_engine(site: Site) -> None:
    """The failed engine's thread runs for one more step after a failure on the event loop."""
    site.runner.go.clear()
    submit_group(site.engine, site.listener, 1, [sequence()])
    old = site.engine._thread
    assert old is not None

    def fail(_: object) -> None:
        raise ValueError("a mistake")

    site.engine._take(site.engine._failed, fail, None)
    assert await asyncio.wait_for(site.engine.wait_failed(), 60) == "a mistake"
    site.engine.start(lambda: EngineCore(CONFIG, WatchedRunner()))
    await asyncio.wait_for(site.engine.wait_started(), 60)
    submit_group(site.engine, site.listener, 2, [sequence() for _ in range(3)])
    site.runner.go.set()
    assert await asyncio.to_thread(old.join, 60)
    await site.idle()
    assert site.engine.state is EngineState.RUNNING
    assert list(site.listener.ends.values()).count(EndReason.LENGTH) == 3


async def test_direct_sequence_waits_for_delay_gate() -> None:
    """The sequence waits as long as the last prompt took, while others decode."""
    site, config = Site(), replace(CONFIG, scheduler_delay_factor=1.0)
    site.engine.start(lambda: site.core(config))
    await asyncio.wait_for(site.engine.wait_started(), 60)
    first, gated = sequence(max_tokens=900), sequence(max_tokens=1)
    site.runner.go.clear()
    site.engine.submit(Heard(first, site.listener))
    await site.in_step_behind(0)
    site.clock.now += 0.2
    await site.in_step_behind(1)
    gated.arrive_time = site.clock()
    site.engine.submit(Heard(gated, site.listener))
    await site.in_step_behind(5)
    site.clock.now += 0.21
    await site.in_step_behind(7)
    assert site.runner.batches == [[first.id]] * 6 + [[gated.id]]
    site.engine.cancel([first.id])
    site.runner.go.set()
    await site.idle()
    assert site.listener.ends == {gated.id: EndReason.LENGTH, first.id: EndReason.CANCELLED}
    site.engine.stop()
    assert await asyncio.to_thread(site.engine.join, 60)


async def test_failed_engine_start_ends_submitted_sequences(site: Site) -> None:
    """Former fault: sequences submitted during the restart of a failed engine stayed live for ever if the restart
    failed."""
    site.runner.fail = True
    site.engine.submit(Heard(sequence(), site.listener))
    await asyncio.wait_for(site.engine.wait_failed(), 60)

    def build() -> EngineCore:
        site.runner.go.wait()
        raise ValueError("no such rank")

    site.runner.go.clear()
    site.engine.start(build)
    seqs = [sequence(), sequence()]
    submit_group(site.engine, site.listener, 1, seqs)
    site.runner.go.set()
    with pytest.raises(ValueError, match="no such rank"):
        await asyncio.wait_for(site.engine.wait_started(), 60)
    await site.idle()
    site.engine.submit(Heard(late := sequence(), site.listener))
    assert [site.listener.ends.get(seq.id) for seq in (*seqs, late)] == [EndReason.ERROR] * 3
    assert site.engine.num_live == 0


async def test_failed_engine_start_is_raised() -> None:
    engine = EngineLoop()

    def build() -> EngineCore:
        raise ValueError("no such model")

    engine.start(build)
    with pytest.raises(ValueError, match="no such model"):
        await asyncio.wait_for(engine.wait_started(), 60)
    assert engine.state is EngineState.FAILED
    assert engine.join(60)
