"""The figures of a turn match the engine's work: tokens, hits, preemptions, drafts, ends."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from common.config import Config, SpeculativeConfig
from common.params.sampling_params import SamplingParams
from common.telemetry.metrics import Metrics
from common.telemetry.prometheus import SeriesTable
from worker.engine.core import EngineCore
from worker.engine.figures import EngineFigures, StepTokens
from worker.engine.sequence import EndReason, Sequence
from worker.engine.turns import Cancel, EngineTurns, Submit, TicketReceipt
from worker.simulation.runner import SimulatedRunner

CONFIG = Config(num_kvcache_blocks=12, max_model_len=96, enable_prefix_caching=True, max_num_batched_tokens=64)


class Nobody:
    """A listener of no interest."""

    def on_step(self, step: int, submit_seen: int | None) -> None: ...


def turns_of(config: Config = CONFIG) -> EngineTurns:
    k = config.speculative_config.num_speculative_tokens if config.speculative_config else 0
    runner = SimulatedRunner(50, 0, num_blocks=config.num_kvcache_blocks, eos_every=10**9, num_drafts=k)
    return EngineTurns(EngineCore(config, runner, clock=lambda: 0.0), lambda: 0.0)


def run(turns: EngineTurns, seqs: list[Sequence]) -> tuple[EngineFigures, list[EngineFigures], int]:
    """The last figures, all figures, and the number of tokens that were handed out."""
    turn = turns.run([Submit(TicketReceipt(Nobody(), 1), seqs)])
    seen, tokens = [turn.figures], sum(len(out.output_tokens) for out in turn.outputs)
    while turns.has_work:
        turn = turns.run([])
        seen.append(turn.figures)
        tokens += sum(len(out.output_tokens) for out in turn.outputs)
    return seen[-1], seen, tokens


def prompt(content: int, length: int = 33, max_tokens: int = 20) -> Sequence:
    return Sequence([content] * length, 16, SamplingParams(max_tokens=max_tokens, ignore_eos=True), seed=content)


def test_figures_of_idle_engine() -> None:
    turns = turns_of()
    assert turns.report().figures == EngineFigures(
        max_running=turns.core.scheduler.max_num_seqs, free_blocks=12, total_blocks=12, block_size=16
    )


def test_tokens_hits_and_ends() -> None:
    turns = turns_of()
    last, seen, tokens = run(turns, [prompt(1), prompt(2, 20)])
    assert (last.prompt_tokens, last.cached_tokens, last.generated_tokens) == (53, 0, tokens) == (53, 0, 40)
    assert max(figures.running for figures in seen) == 2
    assert max(figures.kv_usage for figures in seen) == pytest.approx(7 / 12)
    assert (last.running, last.waiting, last.kv_usage) == (0, 0, 0.0)
    again, _, _ = run(turns, [prompt(1)])
    assert (again.prompt_tokens - last.prompt_tokens, again.cached_tokens) == (33, 32)
    assert again.ended == {"length": 3}
    assert again.steps == turns.core.num_steps > last.steps


def test_cancel_counts_as_end() -> None:
    turns = turns_of()
    seq = prompt(1)
    turns.run([Submit(TicketReceipt(Nobody(), 1), [seq, prompt(2, 200)])])
    turn = turns.run([Cancel([seq.id])])
    assert turn.figures.ended == {"invalid": 1, "cancelled": 1}
    assert [out.end.reason for out in turn.outputs if out.end] == [EndReason.CANCELLED]


def test_blocks_of_preempted_sequence_count_as_no_hit() -> None:
    last, seen, tokens = run(turns_of(), [prompt(content, 40, 50) for content in range(1, 5)])
    assert last.preemptions > 0
    assert (last.cached_tokens, last.prompt_tokens, last.generated_tokens) == (0, 160, tokens) == (0, 160, 200)
    assert max(figures.waiting for figures in seen) > 0


def test_drafts() -> None:
    speculating = replace(CONFIG, speculative_config=SpeculativeConfig(num_speculative_tokens=3, adaptive=False))
    turns = turns_of(speculating)
    last, _, tokens = run(turns, [prompt(1, max_tokens=30), prompt(2, max_tokens=30)])
    stats = turns.core.scheduler.spec_stats
    assert (last.draft_tokens, last.accepted_tokens) == (stats.total_draft_tokens, stats.total_accepted_tokens)
    assert 0 < last.accepted_tokens < last.draft_tokens
    verified, accepted = zip(*last.drafts.values(), strict=True)
    assert [*last.drafts] == [("mtp", position) for position in range(3)]
    assert (sum(verified), sum(accepted)) == (last.draft_tokens, last.accepted_tokens)
    assert list(verified) == sorted(verified, reverse=True)
    assert last.generated_tokens == tokens == 60
    plain, _, _ = run(turns_of(), [prompt(1)])
    assert (plain.draft_tokens, plain.accepted_tokens) == (0, 0)


def test_figures_of_a_turn_do_not_change_later() -> None:
    turns = turns_of()
    _, seen, _ = run(turns, [prompt(1), prompt(2)])
    assert Counter(sum(figures.ended.values()) for figures in seen).keys() == {0, 2}


def test_step_tokens_are_those_of_the_batches() -> None:
    """A prompt of 33 tokens, then 19 decode steps of one token; a new engine counts from 0."""
    table = SeriesTable({})
    steps = StepTokens(Metrics(table=table), {})
    for _ in range(2):
        _, seen, _ = run(turns_of(), [prompt(1)])
        for figures in seen:
            steps.take(figures)
    (family,) = [each for each in table.collect() if each.name == "fissile_engine_step_tokens"]
    (point,) = family.points
    at_most = dict(zip(family.bounds, point.counts, strict=False))
    assert (at_most[1.0], at_most[64.0], sum(point.counts), point.total) == (2 * 19, 2, 2 * 20, 2 * (33 + 19))
