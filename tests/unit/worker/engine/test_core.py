"""EngineCore on the simulated runner under random workloads: whatever happens, every stream is the reference stream."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from common.config import SCHEDULING_POLICIES, Config, SpeculativeConfig
from common.errors import PromptTooLongError
from common.params.sampling_params import SamplingParams
from tests.covering import slow_but
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.core import EngineCore, EngineDeadError
from worker.engine.outputs import RequestOutput
from worker.engine.sequence import EndReason, Priority, Sequence
from worker.simulation.cost_model import FixedCost
from worker.simulation.runner import SimulatedRunner

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
    """Steps until the engine is idle; returns each sequence's streamed tokens."""
    streams: dict[int, list[int]] = {}
    for _ in range(max_steps):
        if not core.has_unfinished():
            return streams
        result = core.step()
        for output in result.outputs:
            streams.setdefault(output.request_id, []).extend(output.output_tokens)
    raise AssertionError("no end")


def test_streams_equal_reference() -> None:
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


def test_ended_deadlines_leave_heap() -> None:
    clock = Clock()
    core, _ = engine(clock)
    for i in range(1000):
        core.add_request(Sequence([1], SIZE, SamplingParams(max_tokens=1), deadline=1e9 + i % 3))
        core.step()
    assert len(core._deadlines._heap) <= 2 + 64


def test_failed_runner_ends_every_sequence_once() -> None:
    core, runner = engine()
    seqs = [Sequence([i, 2], SIZE) for i in range(3)]
    core.add_group(seqs)
    core.step()
    core.add_request(waits := Sequence([9], SIZE))
    runner.fails = True
    with pytest.raises(EngineDeadError, match="RuntimeError: out of memory"):
        core.step()
    with pytest.raises(EngineDeadError, match="before"):
        core.step()
    outputs = core.abort_all(EndReason.ERROR)
    assert [o.request_id for o in outputs] == [*(s.id for s in seqs), waits.id]
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


def test_small_prefill_does_not_lower_measured_speed() -> None:
    clock = Clock()
    core, runner = engine(clock, max_num_batched_tokens=64, num_kvcache_blocks=64)
    runner.runner = SimulatedRunner(
        VOCAB, EOS, FixedCost(0.5), num_blocks=64, clock=clock, sleep=lambda s: setattr(clock, "now", clock.now + s)
    )
    rates = []
    for first, length in enumerate((2, 60, 2, 30, 60)):
        core.add_request(Sequence([first] * length, SIZE, SamplingParams(max_tokens=1)))
        core.step()
        rates.append(core.load().prefill_rate)
    assert rates == [0.0, 120.0, 120.0, 105.0, 108.75]


def test_refused_group_leaves_no_state() -> None:
    core, _ = engine(max_model_len=32)
    with pytest.raises(PromptTooLongError):
        core.add_group([Sequence([1], SIZE), Sequence([1] * 32, SIZE)])
    assert not core.has_unfinished()


def random_engine(rnd: random.Random, clock: Clock) -> tuple[EngineCore, Recorder]:
    size = rnd.choice([1, 16])
    num_blocks = rnd.randint(3, 10) * (16 // size)
    return engine(
        clock,
        eos_every=30,
        k=rnd.choice([0, 0, 1, 3]),
        kv_cache_block_size=size,
        num_kvcache_blocks=num_blocks,
        max_model_len=rnd.randint(20, num_blocks * size),
        enable_prefix_caching=rnd.random() < 0.7,
        max_num_seqs=rnd.randint(1, 6),
        max_num_batched_tokens=rnd.choice([7, 24, 64, 500]),
        scheduling_policy=rnd.choice(SCHEDULING_POLICIES),
        scheduler_delay_factor=rnd.choice([0.0, 0.5]),
        deferred_output=rnd.random() < 0.5,
    )


def random_sequence(rnd: random.Random, core: EngineCore, now: float) -> Sequence:
    prompt = [5] * rnd.choice([0, 16, 40]) + [rnd.randrange(1, VOCAB) for _ in range(rnd.randint(1, 20))]
    return Sequence(
        prompt[: core.scheduler.limits.max_model_len - 1],
        core.config.kv_cache_block_size,
        SamplingParams(max_tokens=rnd.randint(1, 30), ignore_eos=rnd.random() < 0.5),
        seed=rnd.randrange(3),
        arrive_time=now,
        deadline=rnd.choice([None, None, now + 9]),
        priority=rnd.choice(list(Priority)),
    )


def random_outputs(rnd: random.Random, core: EngineCore, clock: Clock, seqs: list[Sequence]) -> Iterator[RequestOutput]:
    """All outputs of an engine that runs the sequences and aborts some of them, until it is idle."""
    waiting = list(seqs)
    while waiting or core.has_unfinished():
        clock.now += rnd.choice([0.0, 0.1, 1.0])
        if waiting and rnd.random() < 0.5:
            seq = waiting.pop()
            core.add_group([seq]) if rnd.random() < 0.5 else core.add_request(seq)
        if rnd.random() < 0.03:
            core.abort(rnd.choice(seqs).id)
        yield from core.step().outputs
        core.scheduler.check_integrity()


@pytest.mark.parametrize("number", slow_but(set(range(60)), range(200)))
def test_streams_equal_reference_under_any_event(number: int) -> None:
    """What a step may contain is the oracle's matter (oracle.py); here are executors, deadlines, the other runner."""
    rnd, clock = random.Random(number), Clock()
    core, runner = random_engine(rnd, clock)
    seqs = [random_sequence(rnd, core, clock.now) for _ in range(rnd.randint(1, 8))]
    streams: dict[int, list[int]] = {seq.id: [] for seq in seqs}
    ends: dict[int, EndReason | None] = {}
    for output in random_outputs(rnd, core, clock, seqs):
        assert output.request_id not in ends
        streams[output.request_id] += output.output_tokens
        if output.finished:
            ends[output.request_id] = output.end_reason
    assert set(ends) == set(streams)
    assert core.load().free_blocks == core.load().total_blocks
    for seq in seqs:
        stream = streams[seq.id]
        assert stream == seq.output_tokens
        assert stream == runner.runner.reference(seq.prompt_token_ids, len(stream), seq.seed)
        if ends[seq.id] is EndReason.LENGTH:
            assert len(stream) == min(seq.max_tokens, core.scheduler.limits.max_model_len - seq.num_prompt_tokens)
