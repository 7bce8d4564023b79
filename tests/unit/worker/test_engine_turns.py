"""What a router hears of the groups it has sent, and when: soon enough to fill every step of a burst."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from common.config import MIXED, PREFILL_FIRST, Config
from common.sampling_params import SamplingParams
from router.fair_queue import QueuedRequest, TenantShares
from router.lane import Lane
from router.lane import LoadReport as Report
from worker.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine_core import EngineCore
from worker.engine_turns import Command, EngineTurns, Submit, Turn
from worker.outputs import SequenceOutput
from worker.sequence import Sequence
from worker.simulated import SimulatedRunner

BUDGET = 64
CONFIG = Config(
    num_kvcache_blocks=200, max_model_len=256, max_num_batched_tokens=BUDGET, max_num_seqs=40, scheduling_policy=MIXED
)


@dataclass
class Recorder:
    """A SimulatedRunner that remembers how many prompt tokens each step had."""

    inner: SimulatedRunner = field(default_factory=lambda: SimulatedRunner(50, 0, num_blocks=200, eos_every=10**9))
    prompt_tokens: list[int] = field(default_factory=list)

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        self.prompt_tokens.append(batch.total_tokens_num_prefill)
        return self.inner.forward(batch)


class Nobody:
    """A listener of no interest; one that can be a key."""

    def on_output(self, output: SequenceOutput) -> None: ...

    def on_step(self, step: int, submit_seen: int | None) -> None: ...


class Site:
    """A router's lane and the worker of it. What one sends while a step is computed is there for the next step."""

    def __init__(self, config: Config, prompts: list[int]) -> None:
        self.runner = Recorder()
        self.turns = EngineTurns(EngineCore(config, self.runner, clock=lambda: 0.0), lambda: 0.0)
        self.told: list[tuple[int, Turn]] = []
        # For the next turn, and for the one after it; and where what is sent goes.
        self.arrived: list[Command] = []
        self.under_way: list[Command] = []
        self.sent = self.arrived
        self.seen = 0
        shares = TenantShares()
        self.lane = Lane("w", "m", self.report(self.turns.report()), shares=shares)
        for number, tokens in enumerate(prompts):
            request = QueuedRequest(number, "m", tokens, 0.0)
            shares.enter(request)
            self.lane.bind(request)

    def report(self, turn: Turn) -> Report:
        """As the wire brings it."""
        self.seen = max([self.seen, *(serial for _, serial in turn.seen)])
        load = turn.load
        return Report(
            0.0,
            decoding_seqs=load.decoding_seqs,
            waiting_seqs=load.waiting_seqs,
            waiting_tokens=load.waiting_tokens,
            room_tokens=load.room_tokens,
            room_seqs=load.room_seqs,
            submit_seen=self.seen,
        )

    def hear(self, turn: Turn) -> None:
        """The router takes a report, and sends what fits."""
        self.told.append((len(self.runner.prompt_tokens), turn))
        self.lane.take_report(self.report(turn))
        self.send()

    def send(self) -> None:
        """What fits the room that was reported."""
        group, serial = self.lane.release(0.0)
        if group:
            params = SamplingParams(max_tokens=30, ignore_eos=True)
            self.sent.append(Submit(Nobody(), serial, [Sequence([3] * one.tokens, 16, params) for one in group]))

    def run(self) -> None:
        """To the end. What is sent upon the end of a step is under way when the next one is scheduled."""
        self.send()
        while self.arrived or self.under_way or self.turns.has_work:
            commands, self.arrived, self.under_way = self.arrived, self.under_way, []
            self.sent = self.arrived
            turn = self.turns.run(commands, self.hear)
            self.sent = self.under_way
            self.hear(turn)


@pytest.mark.parametrize("policy", [MIXED, PREFILL_FIRST])
def test_every_step_of_a_burst_is_full(policy: str) -> None:
    site = Site(replace(CONFIG, scheduling_policy=policy, max_consecutive_prefill_steps=100), [16] * 32)
    site.run()
    steps = [tokens for tokens in site.runner.prompt_tokens if tokens]
    assert sum(steps) == 32 * 16
    # Decodes have their share of a mixed step; what that leaves over is there for the next one.
    full = BUDGET - 32 if policy == MIXED else BUDGET
    assert all(tokens >= full for tokens in steps[:-1])
    assert site.runner.prompt_tokens[: len(steps)] == steps


def test_a_group_is_told_once_and_before_its_step() -> None:
    site = Site(CONFIG, [20, 30, 10])
    site.run()
    told = [(steps, serial) for steps, turn in site.told for _, serial in turn.seen]
    assert told == [(0, 1)]


@pytest.mark.parametrize("policy", [MIXED, PREFILL_FIRST])
def test_before_its_step_a_group_waits_and_what_decodes_decodes(policy: str) -> None:
    """Whatever the step has of them: prompts alone, or some of a prompt beside decodes."""
    turns = EngineTurns(EngineCore(replace(CONFIG, scheduling_policy=policy), Recorder()), lambda: 0.0)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    told: list[Turn] = []
    turns.run([Submit(Nobody(), 1, [Sequence([content] * 10, 16, params) for content in (4, 5)])], told.append)
    turns.run([])
    turns.run([Submit(Nobody(), 2, [Sequence([content] * 40, 16, params) for content in (6, 7)])], told.append)
    first, second = (turn.load for turn in told)
    assert (first.decoding_seqs, first.waiting_seqs, first.waiting_tokens, first.room_tokens) == (0, 2, 20, BUDGET)
    # Of 80 tokens a mixed step takes what two decodes leave; one of prompts alone takes a whole one.
    left = 80 - (BUDGET - 2) if policy == MIXED else 40
    assert (second.decoding_seqs, second.waiting_tokens, second.room_tokens) == (2, 80, BUDGET - left)


def test_with_deferred_output_it_is_told_at_the_end_of_the_turn() -> None:
    turns = EngineTurns(EngineCore(replace(CONFIG, deferred_output=True), Recorder()), lambda: 0.0)
    early: list[Turn] = []
    turn = turns.run([Submit(Nobody(), 5, [Sequence([3] * 20, 16, SamplingParams(max_tokens=2))])], early.append)
    while turns.has_work:
        turns.run([], early.append)
    assert (early, [serial for _, serial in turn.seen]) == ([], [5])
