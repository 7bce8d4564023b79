"""The benchmarks' pure parts: floors against the figures of the performance notes, sizes, budget, tables, lines."""

from __future__ import annotations

import json

import pytest

from common.cli.bench.figures import CpuShares, Setting, figures_of
from common.cli.bench.records import Record
from common.cli.bench.workload import Work
from tests.bench.peers import install, noise, plan, report
from tests.bench.peers.checkpoint import SHAPES
from tests.bench.peers.floors import Machine, Shape, closed_loop_bound, decode_floor, prefill_floor
from tests.bench.peers.runs import Job, Run, WrongWorkError, check

SHAPE = Shape.of(SHAPES["qwen3-0.6b"])
# Section 1 of the notes: 35 GB/s, and enough arithmetic that reading limits decode; 5.2 TFLOP/s for prefill.
NOTES = Machine(35e9, 5.2e12)


@pytest.mark.parametrize(("batch", "milliseconds"), [(1, 34.9), (8, 40.8), (32, 60.9)])
def test_decode_floor_equals_published_figures(batch: int, milliseconds: float) -> None:
    assert decode_floor(SHAPE, NOTES, batch, 256, 2.0) * 1e3 == pytest.approx(milliseconds, rel=0.01)


def test_prefill_floor_equals_published_figure() -> None:
    assert SHAPE.prefill_flops(512) == pytest.approx(481e9, rel=0.005)
    assert prefill_floor(SHAPE, NOTES, 512, 2.0) * 1e3 == pytest.approx(93, rel=0.01)


@pytest.mark.parametrize(("concurrency", "overlapped", "series"), [(1, 28.8, 28.8), (8, 208, 191), (32, 620, 500)])
def test_closed_loop_bound_equals_published_figures(concurrency: int, overlapped: float, series: float) -> None:
    bound = closed_loop_bound(SHAPE, NOTES, concurrency, 144, 64, 2.0)
    assert bound.overlapped == pytest.approx(overlapped, rel=0.02)
    # The notes omit the prefill time of a lone request.
    assert bound.in_series == pytest.approx(series, rel=0.05)


def test_with_little_arithmetic_operations_are_the_floor() -> None:
    slow = Machine(27e9, 199e9)
    assert decode_floor(SHAPE, slow, 32, 256, 2.0) == pytest.approx(SHAPE.decode_flops(32, 256) / 199e9)
    assert decode_floor(SHAPE, slow, 1, 256, 1.0) < decode_floor(SHAPE, slow, 1, 256, 2.0)


def test_peer_turns_are_interleaved() -> None:
    turns = list(plan.turns(["a", "b"], [1, 8], 2))
    assert turns[:4] == [plan.Turn(0, c, peer) for c in (1, 8) for peer in ("a", "b")]
    assert [turn.repeat for turn in turns] == [0] * 4 + [1] * 4


def test_peers_get_the_same_requests_and_repetitions_others() -> None:
    source = plan.workload(0, 32000)
    one, other = (plan.works(source, plan.Turn(0, 8, peer), 5) for peer in ("a", "b"))
    assert one == other
    assert all(32 <= len(work.token_ids) <= 256 and work.output_tokens == 64 for work in one)
    again = plan.works(source, plan.Turn(1, 8, "a"), 5)
    assert [len(work.token_ids) for work in again] == [len(work.token_ids) for work in one]
    assert not {work.token_ids for work in again} & {work.token_ids for work in one}
    assert not {work.token_ids for work in plan.warm_up(source, 5)} & {work.token_ids for work in one}


def test_sizes_fit_the_time() -> None:
    machine = Machine(27e9, 199e9)
    full = plan.fitting_requests([1, 8, 32], 3, 1e6, machine, SHAPE)
    assert full == {1: 6, 8: 32, 32: 96}
    less = plan.fitting_requests([1, 8, 32], 14, 3600.0, machine, SHAPE)
    assert all(max(c, 2) <= less[c] <= full[c] for c in full)
    assert sum(less.values()) < sum(full.values())
    assert plan.fitting_requests([1, 8, 32], 14, 1.0, machine, SHAPE) == {1: 2, 8: 8, 32: 32}


def test_row_beyond_time_budget_is_not_started() -> None:
    budget, turn = plan.Budget(end=100.0, row_limit_s=60.0), plan.Turn(0, 8, "a")
    assert budget.limit(turn, 10.0) == 60.0
    assert budget.limit(turn, 70.0) == 30.0
    budget.note(turn, 31.0)
    assert budget.limit(turn, 70.0) == 0.0
    assert budget.limit(plan.Turn(0, 32, "a"), 70.0) == 30.0
    assert budget.limit(turn, 101.0) == 0.0
    assert plan.Budget(None, 60.0).limit(turn, 1e9) == 60.0


def line(peer: str, repeat: int, tokens_per_s: float, *, quiet: bool = True) -> report.Line:
    record = Record(0, 0.0, 0.0, ended=64 / tokens_per_s, arrivals=[0.1, 64 / tokens_per_s], output_tokens=64)
    cpu = CpuShares(0.02, 0.9, 0.0, 0.0)
    figures = figures_of([record], Setting(concurrency=1), repeat, cpu=cpu).as_dict()
    head = {"kind": "row", "peer": peer, "concurrency": 1, "repeat": repeat, "complete": True, "quiet": quiet}
    return json.loads(json.dumps({**head, "figures": figures}))  # type: ignore[no-any-return]


def test_ratios_use_same_repetition_without_disturbed_rows() -> None:
    lines = [line("fissile", 0, 30), line("vllm", 0, 10), line("fissile", 1, 50), line("vllm", 1, 25)]
    lines += [line("fissile", 2, 500), line("vllm", 2, 1, quiet=False)]
    cells = report.cells(lines)
    fissile, vllm = cells[1, "fissile"], cells[1, "vllm"]
    assert (vllm.counted, vllm.all) == (2, 3)
    assert vllm.median(report.tokens_per_s) == pytest.approx(17.5)
    assert fissile.ratio(vllm, report.tokens_per_s) == pytest.approx(2.5)
    assert fissile.ratio(None, report.tokens_per_s) is None


def test_figures_of_disturbed_rows_alone_stand_in_brackets() -> None:
    machine = {"kind": "machine", "cpu": "x", "threads": 2, "read": 27e9, "flops": 199e9, "output_tokens": 64}
    machine["config"] = SHAPES["qwen3-0.6b"]
    text = report.text([machine, line("fissile", 0, 30, quiet=False), line("vllm", 0, 10)])
    (row,) = (each for each in text.splitlines() if "| fissile" in each)
    assert "0/1" in row
    assert "(30.0)" in row
    assert "(3.00)" in row


def test_cpu_time_of_others_is_foreign() -> None:
    before, after = noise.Reading(0.0, 1000, 0, 10, 500), noise.Reading(1.0, 1190, 4, 12, 680)
    cpu = noise.shares(before, after, cores=2)
    assert cpu.service == pytest.approx(0.9)
    assert cpu.client == pytest.approx(0.01)
    assert cpu.foreign == pytest.approx(0.04)
    assert cpu.steal == pytest.approx(0.02)
    assert not noise.is_quiet(cpu)
    assert noise.is_quiet(CpuShares(0.0, 1.0, 0.029, 0.0))


def test_peer_answer_of_wrong_length_is_refused() -> None:
    work = Work(64, tuple(range(10)))
    record = Record(3, 0.0, 0.0, input_tokens=10, output_tokens=64)
    assert check(record, work) is record
    record.output_tokens = 63
    with pytest.raises(WrongWorkError, match=r"request 3: .*\(10, 63\).*\(10, 64\)"):
        check(record, work)


def test_jobs_and_runs_survive_their_lines() -> None:
    job = Job([Work(64, (1, 2, 3))], 8, 12.5)
    again = Job.decode(job.encode())
    assert [list(work.token_ids) for work in again.works] == [[1, 2, 3]]
    assert (again.works[0].output_tokens, again.concurrency, again.limit_s) == (64, 8, 12.5)
    run = Run([Record(0, 0.5, 0.5, 2.0, arrivals=[1.0, 2.0], input_tokens=3, output_tokens=64)], True)
    assert Run.decode(run.encode()) == run


def test_requirements_exclude_extras_and_non_text_packages() -> None:
    metadata = (
        "Metadata-Version: 2.4\nName: x\nRequires-Dist: regex\nRequires-Dist: torch==2.13.0+cpu; python_version > '3'\n"
        "Requires-Dist: torchvision\nRequires-Dist: aiohttp>=3.14.3\nRequires-Dist: pandas; extra == 'bench'\n\nbody\n"
    )
    assert install.requirements(metadata) == ["regex", "aiohttp>=3.14.3"]


_LOADS = """    tc.rows[7] = 16;
    _tile_loadconfig(&tc);
    done = true;
"""


def test_tile_shapes_of_llama_cpp_are_written_before_they_are_loaded() -> None:
    mended = install.with_shapes_written(_LOADS)
    before, barrier, after = mended.splitlines()[0], mended.splitlines()[1], mended.splitlines()[2:]
    assert [before, *after] == _LOADS.splitlines()
    assert all(part in barrier for part in ('"memory"', "(&tc)"))
    assert install.with_shapes_written(mended) == mended


@pytest.mark.parametrize("source", ["", _LOADS * 2])
def test_unknown_llama_cpp_source_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match="exactly once"):
        install.with_shapes_written(source)
