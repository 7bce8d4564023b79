"""Dumps of steps: what is written, what a full disk or a missing folder costs, and which step hangs."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fissile.worker.v1 import worker_pb2 as wpb
from google.protobuf.json_format import ParseDict
from structlog.testing import capture_logs

from common.limits import MAX_STEP_DUMPS
from worker.engine.step_record import StepRecord, StepRing
from worker.step_dumps import FAILED, STALLED, StepDumps, hanging_step, write_dump


def record(number: int, launched: float = 1.0, finished: float | None = None) -> StepRecord:
    made = StepRecord(number, launched, launched, [7], ["r"], [5], [0], [0], 1, 3, 4, 0, 0, [])
    made.waited = made.finished = finished
    return made


def ring(*records: StepRecord) -> StepRing:
    made = StepRing()
    for each in records:
        made.append(each)
    return made


def test_hanging_step_is_oldest_in_flight() -> None:
    steps = ring(record(1, 1.0, 2.0), record(2, 3.0), record(3, 4.0))
    assert hanging_step(steps, 8.0, 5.0) is None
    hanging = hanging_step(steps, 8.1, 5.0)
    assert hanging is not None
    assert hanging.number == 2
    assert hanging_step(ring(record(1, 1.0, 2.0)), 99.0, 5.0) is None


def test_dump_is_read_again_and_only_newest_are_kept(tmp_path: Path) -> None:
    steps = [wpb.Step(number=i, rows=[wpb.StepRow(request_id="r", tokens=i)]) for i in range(1, 4)]
    folder = tmp_path / "dumps"
    other = write_dump(folder, "other", FAILED, steps, 0.0)
    places = [write_dump(folder, "a/b", STALLED, steps, 1e9 + i) for i in range(MAX_STEP_DUMPS + 2)]
    lines = places[-1].read_text("utf-8").splitlines()
    assert [ParseDict(json.loads(line), wpb.Step()) for line in lines] == steps
    assert sorted(folder.iterdir()) == sorted([other, *places[2:]])
    assert places[0].name == "steps-a_b-20010909T014640.000000-stalled.jsonl"
    assert places[-1].stat().st_mode & 0o077 == 0


def written(folder: Path | None, steps: StepRing) -> list[dict[str, object]]:
    """Log lines of one dump."""
    dumps = StepDumps(folder, 30.0)
    dumps.worker_id = "w"
    with capture_logs() as lines:
        asyncio.run(dumps.write(steps, FAILED))
    return [{**line} for line in lines]


def test_dump_of_failed_engine_has_step_in_flight(tmp_path: Path) -> None:
    (line,) = written(tmp_path, ring(record(1, 1.0, 2.0), record(2)))
    assert (line["event"], line["steps"]) == ("steps dumped", 2)
    steps = [json.loads(each) for each in Path(str(line["path"])).read_text("utf-8").splitlines()]
    assert [step.get("in_flight", False) for step in steps] == [False, True]
    assert steps[1]["rows"] == [
        {"sequence": "7", "request_id": "r", "kind": "STEP_ROW_KIND_PREFILL", "tokens": 5},
    ]  # fmt: skip


def test_no_folder_or_no_step_writes_nothing(tmp_path: Path) -> None:
    assert written(None, ring(record(1))) == []
    assert written(tmp_path, ring()) == []
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("case", ["missing", "file"])
def test_unusable_folder_costs_one_warning(case: str, tmp_path: Path) -> None:
    folder = tmp_path / "missing" / "dumps" if case == "missing" else tmp_path / "file"
    (tmp_path / "file").touch()
    (line,) = written(folder, ring(record(1)))
    assert (line["log_level"], line["event"], line["folder"]) == ("warning", "steps not dumped", str(folder))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


FULL_DISK = """
import resource, sys
from pathlib import Path
from tests.unit.worker.test_step_dumps import record, ring, written
steps = ring(*(record(i) for i in range(100)))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
(line,) = written(Path(sys.argv[1]), steps)
assert line["event"] == "steps not dumped", line
assert "too large" in line["error"], line
"""


def test_full_disk_costs_one_warning_and_leaves_no_file(tmp_path: Path) -> None:
    """The limit of a file's size gives the same kind of error, at the same calls, as a disk without space."""
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    subprocess.run(command, check=True, timeout=120, env=dict(os.environ))
    assert [*tmp_path.iterdir()] == []
