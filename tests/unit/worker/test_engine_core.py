"""EngineCore on the simulated runner under random workloads: whatever happens, every stream is the reference stream."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from common.config import PREFILL_FIRST, SCHEDULING_POLICIES, Config, SpeculativeConfig
from common.errors import PromptTooLongError
from common.sampling_params import SamplingParams
from worker.batch import RequestOutput, ScheduledBatch, ScheduledBatchOutput
from worker.cost_model import FixedCost
from worker.engine_core import EngineCore, EngineDeadError
from worker.sequence import EndReason, Priority, Sequence, SequenceStatus
from worker.simulated import SimulatedRunner

VOCAB, EOS, SIZE = 40, 0, 16


class Recorder:
    """A runner that keeps the batches it has been given, and can fail."""

    def __init__(self, runner: SimulatedRunner) -> None:
        self.runner = runner
        self.batches: list[ScheduledBatch] = []
        self.fails = False

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        self.batches.append(batch)
        if self.fails:
            raise RuntimeError("out of memory")
        return self.runner.forward(batch)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def engine(clock: Clock | None = None, eos_every: int = 0, k: int = 0, **options: Any) -> tuple[EngineCore, Recorder]:
    settings: dict[str, Any] = {"num_kvcache_blocks": 16, "enable_prefix_caching": True, "eos_token_id": EOS}
    if k:
        settings["speculative_config"] = SpeculativeConfig(num_speculative_tokens=k)
    config = Config(**(settings | options))
    blocks, size = config.num_kvcache_blocks, config.kv_cache_block_size
    simulated = SimulatedRunner(VOCAB, EOS, block_size=size, num_blocks=blocks, eos_every=eos_every, num_drafts=k)
    runner = Recorder(simulated)
    return EngineCore(config, runner, clock or Clock()), runner


def run(core: EngineCore, max_steps: int = 5000) -> dict[int, list[int]]:
    """Steps until nothing is left; the tokens of each sequence as streamed."""
    streams: dict[int, list[int]] = {}
    for _ in range(max_steps):
        if not core.has_unfinished():
            return streams
        result = core.step()
        for output in result.outputs:
            streams.setdefault(output.request_id, []).extend(output.output_tokens)
    raise AssertionError("no end")


def test_streams_are_the_references() -> None:
    core, runner = engine()
    seqs = [Sequence([i, 7, 8] * 9, SIZE, SamplingParams(max_tokens=20), seed=i) for i in range(5)]
    for seq in seqs:
        core.add_request(seq)
    streams = run(core)
    for seq in seqs:
        assert streams[seq.id] == runner.runner.reference([seq.seed, 7, 8] * 9, 20, seed=seq.seed)
    assert not core.has_unfinished()
    assert core.step().outputs == []
    assert core.load().free_blocks == core.load().total_blocks == 16


def test_one_step_result() -> None:
    core, _ = engine()
    seq = Sequence([1, 2, 3], SIZE, SamplingParams(max_tokens=1))
    core.add_request(seq)
    result = core.step()
    assert result.new_tokens == {seq.id: tuple(seq.output_tokens)}
    assert result.finished == [seq.id]
    assert result.outputs[0].end_reason is EndReason.LENGTH
    assert core.num_steps == 1


def test_deadlines() -> None:
    clock = Clock()
    core, runner = engine(clock)
    waits, runs, unlimited = (
        Sequence([1, 2], SIZE, deadline=clock.now + 1),
        Sequence([3, 4], SIZE, deadline=clock.now + 2),
        Sequence([5, 6], SIZE, SamplingParams(max_tokens=3)),
    )
    core.add_group([runs, unlimited])
    core.step()
    core.add_request(waits)
    clock.now += 1
    assert core.expire(clock.now) == 1
    assert core.expire(clock.now) == 0
    clock.now += 5
    outputs = core.step().outputs
    ended = {o.request_id: o.end_reason for o in outputs if o.finished}
    assert ended == {waits.id: EndReason.DEADLINE, runs.id: EndReason.DEADLINE}
    assert runner.batches[-1].req_ids == [unlimited.id]
    run(core)
    assert core.load().free_blocks == 16


def test_many_deadlines_leave_no_heap_behind() -> None:
    clock = Clock()
    core, _ = engine(clock)
    for i in range(1000):
        core.add_request(Sequence([1], SIZE, SamplingParams(max_tokens=1), deadline=1e9 + i % 3))
        core.step()
    assert len(core._deadlines._heap) <= 2 + 64


def test_a_failed_runner_ends_everything_once() -> None:
    core, runner = engine()
    seqs = [Sequence([i, 2], SIZE) for i in range(3)]
    core.add_group(seqs)
    core.step()
    core.add_request(Sequence([9], SIZE, id=999))
    runner.fails = True
    with pytest.raises(EngineDeadError, match="RuntimeError: out of memory"):
        core.step()
    with pytest.raises(EngineDeadError, match="before"):
        core.step()
    outputs = core.abort_all(EndReason.ERROR)
    assert [o.request_id for o in outputs] == [*(s.id for s in seqs), 999]
    assert all(o.finished and o.end_reason is EndReason.ERROR for o in outputs)
    assert core.abort_all(EndReason.ERROR) == []
    assert core.load().free_blocks == 16


def test_load_follows_the_steps() -> None:
    clock = Clock()
    core, runner = engine(clock, max_num_batched_tokens=64)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    runner.runner = SimulatedRunner(VOCAB, EOS, FixedCost(0.5), block_size=SIZE, clock=clock, sleep=sleep)
    core.add_group([Sequence([1] * 20, SIZE)])
    assert core.load().waiting_tokens == 20
    core.step()
    load = core.load()
    assert (load.decoding_seqs, load.waiting_seqs, load.room_tokens) == (1, 0, 64)
    assert (load.last_prompt_latency_s, load.prefill_rate) == (0.5, 40.0)
    core.step()
    assert core.load().last_prompt_latency_s == 0.5


def test_a_refused_group_leaves_nothing() -> None:
    core, _ = engine(max_model_len=32)
    with pytest.raises(PromptTooLongError):
        core.add_group([Sequence([1], SIZE), Sequence([1] * 32, SIZE)])
    assert not core.has_unfinished()


class EngineMachine(RuleBasedStateMachine):
    """Tiny pools, shared prefixes, chunks, preemption, aborts, deadlines, resumed sequences, in any order."""

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        draw = data.draw
        self.size = draw(st.sampled_from([1, 16]))
        self.pool = draw(st.integers(3, 12)) * (16 // self.size)
        self.limit = draw(st.integers(20, self.pool * self.size))
        self.caching = draw(st.booleans())
        self.deferred = draw(st.booleans())
        self.clock = Clock()
        self.core, self.runner = engine(
            self.clock,
            eos_every=30,
            k=draw(st.sampled_from([0, 0, 1, 2, 5])),
            deferred_output=self.deferred,
            kv_cache_block_size=self.size,
            num_kvcache_blocks=self.pool,
            max_model_len=self.limit,
            enable_prefix_caching=self.caching,
            max_num_seqs=draw(st.integers(1, 6)),
            max_num_batched_tokens=draw(st.sampled_from([1, 7, 24, 64, 500])),
            scheduler_delay_factor=draw(st.sampled_from([0.0, 0.5])),
            scheduling_policy=draw(st.sampled_from(SCHEDULING_POLICIES)),
            max_consecutive_prefill_steps=draw(st.sampled_from([1, 4])),
        )
        self.seqs: dict[int, Sequence] = {}
        self.streams: dict[int, list[int]] = {}
        self.ends: dict[int, RequestOutput] = {}
        self.idle_steps = 0

    def sequence(self, data: st.DataObject) -> Sequence:
        shared = [5] * data.draw(st.sampled_from([0, 16, 40]))
        prompt = (shared + data.draw(st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=20)))[: self.limit - 1]
        seed = data.draw(st.integers(0, 3))
        reference = self.runner.runner.reference(prompt, 6, seed=seed)
        delivered = reference[: data.draw(st.sampled_from([0, 0, 1, 5]))]
        seq = Sequence(
            prompt + delivered,
            self.size,
            SamplingParams(
                max_tokens=data.draw(st.integers(1, 40)),
                ignore_eos=data.draw(st.booleans()),
                stop_token_ids=data.draw(st.sampled_from([(), (3, 4)])),
            ),
            num_prompt_tokens=len(prompt),
            seed=seed,
            arrive_time=self.clock.now,
            deadline=data.draw(st.sampled_from([None, None, self.clock.now + 5])),
            cache_salt=data.draw(st.sampled_from([b"", b"", b"salt"])),
            priority=data.draw(st.sampled_from(Priority)),
        )
        self.seqs[seq.id] = seq
        return seq

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        self.core.add_request(self.sequence(data))

    @rule(data=st.data(), count=st.integers(1, 4))
    def add_group(self, data: st.DataObject, count: int) -> None:
        self.core.add_group([self.sequence(data) for _ in range(count)])

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.seqs:
            seq = self.seqs[data.draw(st.sampled_from(sorted(self.seqs)))]
            was_live = not seq.is_finished
            assert self.core.abort(seq.id) is was_live

    @rule(seconds=st.sampled_from([0.0, 0.1, 3.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> None:
        scheduler = self.core.scheduler
        waiting = [seq.id for seq in scheduler.waiting]
        gated = [seq.id for seq in scheduler.gated]
        steps = self.core.num_steps
        result = self.core.step()
        self.take(result.outputs)
        scheduler.check_integrity()
        if self.core.num_steps > steps:
            self.idle_steps = 0
            self.core._flights and self.core._flights[-1].result.exception()
            self.check_batch(self.runner.batches[-1], waiting, gated)
        else:
            # No step without progress, but for one that only brings output.
            self.idle_steps += 1
            assert scheduler.num_live == 0 or (self.deferred and self.idle_steps == 1)

    def take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.ends  # exactly one end, and nothing after it
            self.streams.setdefault(output.request_id, []).extend(output.output_tokens)
            if output.finished:
                self.ends[output.request_id] = output

    def check_batch(self, batch: ScheduledBatch, waiting: list[int], gated: list[int]) -> None:
        config = self.core.config
        assert 0 < batch.total_tokens_num == sum(batch.num_scheduled_tokens) <= config.max_num_batched_tokens
        assert 0 < batch.total_seqs_num <= config.max_num_seqs
        if config.scheduling_policy == PREFILL_FIRST:
            assert (batch.total_seqs_num_prefill == 0) != (batch.total_seqs_num_decode == 0)
        still_gated = {seq.id for seq in self.core.scheduler.gated}
        queue = sorted([i for i in waiting + gated if i not in still_gated], key=lambda i: -self.seqs[i].priority)
        started = [i for i in batch.req_ids if i in waiting or i in gated]
        live = [i for i in queue if i not in self.ends or i in started]
        if self.caching:  # a follower of a prefix that is being computed is held, so others may pass it
            assert started == [i for i in live if i in started]
        else:
            assert started == live[: len(started)]

    @invariant()
    def load_is_consistent(self) -> None:
        if hasattr(self, "core"):
            load = self.core.load()
            assert load.decoding_seqs + load.waiting_seqs <= self.core.scheduler.num_live
            assert load.free_blocks <= load.total_blocks

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for _ in range(4000):
            if not self.core.has_unfinished():
                break
            self.step()
        assert not self.core.has_unfinished()
        assert self.core.load().free_blocks == self.pool
        assert self.core.scheduler.block_manager._chains == {}
        assert not self.core.scheduler._computing
        for seq in self.seqs.values():
            self.check_stream(seq)

    def check_stream(self, seq: Sequence) -> None:
        assert seq.status is SequenceStatus.FINISHED
        stream = self.streams[seq.id]
        assert stream == seq.output_tokens
        assert seq.completion_token_ids == self.runner.runner.reference(
            seq.prompt_token_ids, seq.num_completion_tokens, seq.seed
        )
        end = self.ends[seq.id]
        if end.end_reason is EndReason.LENGTH:
            assert seq.num_completion_tokens >= seq.max_tokens or seq.num_tokens >= self.limit
        assert seq.num_tokens <= max(self.limit, seq.num_prompt_tokens + 6)


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
