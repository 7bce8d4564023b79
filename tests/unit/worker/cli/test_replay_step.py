"""`fissile replay-step`: which step it chooses, the batch that it makes, and a whole replay of a real engine's dump."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from fissile.worker.v1 import worker_pb2 as wpb

from common.cli.core.errors import CommandError
from common.cli.core.step_dumps import read_steps
from common.config import Config
from common.params.sampling_params import SamplingParams
from tests.checkpoints import make_checkpoint
from tests.unit.worker.engine.small_engine import BLOCK
from worker.cli.replay_step import choose_step, make_batch, replay_step
from worker.engine.block_manager import BlockManager
from worker.engine.core import EngineCore
from worker.engine.sequence import Sequence
from worker.session.step_protos import step_proto
from worker.simulation.runner import SimulatedRunner
from worker.step_dumps import FAILED, write_dump

PREFILL, DECODE, VERIFY = wpb.STEP_ROW_KIND_PREFILL, wpb.STEP_ROW_KIND_DECODE, wpb.STEP_ROW_KIND_VERIFY


def row(sequence: int, kind: wpb.StepRowKind.ValueType, tokens: int, computed: int) -> wpb.StepRow:
    return wpb.StepRow(sequence=sequence, kind=kind, tokens=tokens, computed_tokens=computed)


STEP = wpb.Step(number=4, rows=[row(1, DECODE, 1, 40), row(2, VERIFY, 4, 20), row(3, PREFILL, 30, 16)])


def blocks(count: int = 20) -> BlockManager:
    return BlockManager(Config(num_kvcache_blocks=count, kv_cache_block_size=BLOCK, max_model_len=80))


@pytest.mark.parametrize("goes_on", [True, False])
def test_batch_has_make_up_of_recorded_step(goes_on: bool) -> None:
    later = [wpb.Step(number=5, rows=[row(3, PREFILL, 5, 46)])] if goes_on else []
    batch = make_batch(STEP, later, blocks(), 100, 80)
    assert batch.num_scheduled_tokens == [1, 4, 30]
    assert batch.num_computed_tokens == [40, 20, 16]
    assert (batch.total_tokens_num_prefill, batch.total_tokens_num_decode, batch.num_spec_step) == (30, 5, 3)
    assert list(batch.is_final) == [True, True, not goes_on]
    assert [len(table) * BLOCK >= length for table, length in zip(batch.tables, (41, 24, 46), strict=True)] == [
        True
    ] * 3
    assert len({block for table in batch.tables for block in table}) == sum(map(len, batch.tables))


def test_step_that_does_not_fit_says_which_option_helps() -> None:
    with pytest.raises(CommandError, match="sequence of 46 tokens; the engine takes 45: give a larger --max-model-len"):
        make_batch(STEP, [], blocks(), 100, 46)
    with pytest.raises(CommandError, match="more than the 5 blocks of the KV cache: give a larger --kv-cache-memory"):
        make_batch(STEP, [], blocks(5), 100, 80)


def test_chosen_step_is_hanging_one_then_longest_then_given_one() -> None:
    rows = [row(1, DECODE, 1, 40)]
    steps = [wpb.Step(number=i, wait_us=us, rows=rows) for i, us in ((5, 10), (6, 30), (7, 20))]
    assert choose_step(steps, None).number == 6
    assert choose_step(steps, 7).number == 7
    steps[0].in_flight = True
    assert choose_step(steps, None).number == 5
    with pytest.raises(CommandError, match="--step 9 is not in the dump, which has 5 to 7"):
        choose_step(steps, 9)
    with pytest.raises(CommandError, match="step 1 has no sequences"):
        choose_step([wpb.Step(number=1)], None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no step"),
        ('{"number": "1"}\nnot JSON\n', "line 2 is not a step"),
        ("[]\n", "line 1 is not a step"),
        ('{"number": -1}\n', "line 1 is not a step"),
    ],
)
def test_file_that_is_no_dump_is_refused_by_line(text: str, message: str, tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    with pytest.raises(CommandError, match="cannot be read"):
        read_steps(dump)
    dump.write_text(text, "utf-8")
    with pytest.raises(CommandError, match=message):
        read_steps(dump)


def test_folder_without_model_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"config\.json"):
        CliRunner().invoke(replay_step, [str(recorded(tmp_path)), "--model", str(tmp_path)], catch_exceptions=False)


def recorded(folder: Path) -> Path:
    """The dump of an engine that has computed three prompts, in chunks, and answers to them."""
    config = Config(
        num_kvcache_blocks=40, max_model_len=128, kv_cache_block_size=BLOCK, max_num_batched_tokens=48,
        scheduling_policy="mixed",
    )  # fmt: skip
    core = EngineCore(config, SimulatedRunner(50, None, block_size=BLOCK, num_blocks=40))
    core.add_group([Sequence([i] * 60, BLOCK, SamplingParams(max_tokens=8, ignore_eos=True)) for i in range(3)])
    while core.has_unfinished():
        core.step()
    return write_dump(folder, "w", FAILED, [step_proto(each, 0.0, 1e9) for each in core.steps.newest()], 1e9)


def test_replay_of_dump_prints_operators_and_writes_trace(tmp_path: Path) -> None:
    dump, trace = recorded(tmp_path), tmp_path / "trace.json"
    mixed = next(step for step in read_steps(dump) if {each.kind for each in step.rows} == {DECODE, PREFILL})
    model = make_checkpoint(tmp_path / "model", "qwen3")
    arguments = [str(dump), "--model", str(model), "--step", str(mixed.number), "--trace", str(trace)]
    sizes = ["--dtype", "float32", "--kv-cache-memory", "8MiB", "--threads", "1"]
    result = CliRunner().invoke(replay_step, [*arguments, *sizes], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    decodes = sum(each.kind == DECODE for each in mixed.rows)
    num_tokens = sum(each.tokens for each in mixed.rows)
    assert (
        lines[0] == f"step {mixed.number}: {decodes} decodes, {len(mixed.rows) - decodes} prompts, {num_tokens} tokens"
    )
    table = lines[lines.index("") + 1 : lines.index("", 4)]
    assert table[0].split() == ["OPERATOR", "CALLS", "SELF", "MS", "PART"]
    assert 2 <= len(table) <= 11
    events = {event.get("name", "") for event in json.loads(trace.read_text("utf-8"))["traceEvents"]}
    assert {line.split("  ")[0] for line in table[1:]} <= events
    # The second pass alone: the first one under the profiler takes far longer.
    assert {event for event in events if event.startswith("ProfilerStep")} == {"ProfilerStep#1"}
    assert not any(line.startswith("ProfilerStep") for line in table)
