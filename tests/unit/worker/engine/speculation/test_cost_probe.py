"""Step costs measured before anything is served: right by the clock, and without a trace in what is served later."""

from __future__ import annotations

import pytest

from common.config import Config, SpeculativeConfig
from common.params.config_parts import DRAFT_MODEL, NGRAM
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.core import EngineCore
from worker.engine.speculation import cost_probe
from worker.engine.speculation.cost_probe import measure_costs
from worker.engine.speculation.step_costs import Proposal

SIZE = 16


class Timed:
    """Steps that take a hundredth of a second and a thousandth for each row, more with drafts; seconds are virtual."""

    def __init__(self) -> None:
        self.now = 0.0
        self.shapes: list[tuple[int, int]] = []

    def __call__(self) -> float:
        return self.now

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        assert all(len(table) * SIZE >= end for table, end in zip(batch.tables, batch.context_lens, strict=True))
        used = [block for table in batch.tables for block in table]
        assert len(used) == len(set(used)), "two sequences write a block"
        self.shapes.append((len(batch.req_ids), batch.total_tokens_num))
        self.now += 0.01 + 0.001 * batch.total_tokens_num + 0.005 * (batch.num_spec_step > 0)
        if batch.feeds_draft_model:
            self.now += 0.002 + 0.003 * max(batch.drafts_wanted.values())
        return ScheduledBatchOutput(dict.fromkeys(batch.req_ids, (7,)))


def engine(runner: Timed, num_blocks: int = 500, *, adaptive: bool = True, method: str = NGRAM) -> EngineCore:
    spec = SpeculativeConfig(3, method, "" if method == NGRAM else "model", adaptive=adaptive)
    config = Config(eos_token_id=0, num_kvcache_blocks=num_blocks, max_model_len=96, speculative_config=spec)
    return EngineCore(config, runner, runner)


def test_measured_step_costs_equal_clock() -> None:
    core = engine(Timed())
    costs = measure_costs(core.config, core.executor)
    assert costs.table == pytest.approx({rows: 0.01 + 0.001 * rows for rows in costs.table})
    assert {1, 8, 32} <= costs.table.keys()
    assert costs.drafting_s(8) == pytest.approx(0.023)


def test_cost_of_making_drafts_is_measured_apart() -> None:
    core = engine(Timed(), method=DRAFT_MODEL)
    costs = measure_costs(core.config, core.executor)
    assert costs.decode(8) == pytest.approx(0.018)
    assert [costs.making_s(Proposal(rows, rows, 2)) for rows in (1, 8, 32)] == pytest.approx([0.008] * 3)
    assert measure_costs(engine(runner := Timed()).config, engine(runner).executor).making_s(Proposal(8, 8, 2)) == 0.0


def test_measured_sizes_fit_in_block_pool() -> None:
    core = engine(Timed(), 40)
    assert max(measure_costs(core.config, core.executor).table) == 12


def test_cost_probe_ends_at_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_probe, "_MOST_S", 0.05)
    runner = Timed()
    core = engine(runner)
    assert measure_costs(core.config, core.executor).table.keys() == {1, 2, 4, 8}
    assert runner.now < 0.1


def test_measured_costs_reach_controller_and_free_all_blocks() -> None:
    runner = Timed()
    core = engine(runner)
    core.measure_step_costs()
    assert core.scheduler.drafter.controller.costs.decode(8) == pytest.approx(0.018)
    assert not core.has_unfinished()
    assert core.scheduler.block_manager.num_free_blocks == 500
    core.scheduler.check_integrity()


def test_engine_that_verifies_all_drafts_measures_no_costs() -> None:
    runner = Timed()
    engine(runner, adaptive=False).measure_step_costs()
    assert not runner.shapes
