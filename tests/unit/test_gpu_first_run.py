"""The run on a GPU machine: parts in the report, and the counts of checks and traces."""

from __future__ import annotations

import tarfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.gpu_first_run import Folders, Part, Report, keep_cache, run_part, stages
from tests.bench.gpu_trace import traced
from tests.kernels.verify_aiter import Share
from tests.kernels.verify_streams import WAYS, Answer, differences, requests


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path, tmp_path)


def reported(folders: Folders, part: Part, seconds: float = 60.0) -> tuple[str, Report]:
    """The report after one part."""
    report = Report(folders.out / "report.txt", time.monotonic())
    run_part(part, report, folders, time.monotonic() + seconds)
    return report.path.read_text(), report


def test_passed_part_shows_its_last_lines(folders: Folders) -> None:
    text, report = reported(folders, Part("one", ["-c", "print('first'); print('last')"], 60, shown=1))
    assert "one: passed" in text
    assert "last" in text
    assert "first" not in text
    assert report.num_failed == 0


def test_failed_part_shows_its_failures(folders: Folders) -> None:
    code = "print('FAILED rope'); print('ok'); raise SystemExit(3)"
    text, report = reported(folders, Part("one", ["-c", code], 60, shown=1))
    assert "FAILED with exit code 3" in text
    assert "FAILED rope" in text
    assert report.num_failed == 1


@pytest.mark.slow
def test_part_past_limit_is_stopped_with_its_output(folders: Folders) -> None:
    code = "import time; print('begun', flush=True); time.sleep(600)"
    text, report = reported(folders, Part("one", ["-c", code], 3.0))
    assert "STOPPED at its limit" in text
    assert "begun" in text
    assert report.num_failed == 1


def test_part_after_deadline_is_not_started(folders: Folders) -> None:
    text, report = reported(folders, Part("one", ["-c", "print('ran')"], 60), seconds=-1.0)
    assert "not begun" in text
    assert "ran" not in text.splitlines()
    assert report.num_failed == 1


@pytest.mark.parametrize("is_tiny", [True, False])
def test_part_names_are_unique_and_modules_exist(folders: Folders, is_tiny: bool) -> None:
    parts = [part for stage in stages(folders, is_tiny) for part in stage.parts]
    assert len({part.name for part in parts}) == len(parts)
    modules = [part.command[1] for part in parts if part.command[0] == "-m"]
    assert all(Path(*module.split(".")).with_suffix(".py").is_file() for module in modules)


def test_every_stream_way_has_a_part() -> None:
    names = [part.name for stage in stages(Folders(Path(), Path()), is_tiny=False) for part in stage.parts]
    assert {f"streams-{way.replace(' ', '-')}" for way in WAYS} <= set(names)


def test_kernel_cache_is_kept_without_texts_within_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, archive = tmp_path / "cache", tmp_path / "cache.tar.gz"
    folder.mkdir()
    (folder / "kernel.cubin").write_bytes(b"machine code")
    (folder / "kernel.ptx").write_text("text")
    keep_cache(folder, archive)
    with tarfile.open(archive) as packed:
        assert packed.getnames() == ["kernel.cubin"]
    monkeypatch.setattr("scripts.gpu_first_run.CACHE_BYTES", 1)
    keep_cache(folder, archive)
    assert not archive.exists()


def test_shares_divide_the_checks() -> None:
    shares = [Share.parse(f"{number}/3") for number in (1, 2, 3)]
    taken = [[share.takes_next() for share in shares] for _ in range(7)]
    assert all(sum(row) == 1 for row in taken)
    assert [row.index(True) for row in taken] == [0, 1, 2, 0, 1, 2, 0]


def test_differences_name_request_and_place() -> None:
    one: list[Answer] = [{"tokens": [1, 2, 3], "logprobs": ["0x1p-1"]}, {"tokens": [4], "logprobs": []}]
    other: list[Answer] = [{"tokens": [1, 5, 3], "logprobs": ["0x1p-1"]}, {"tokens": [4], "logprobs": []}]
    assert differences(one, one) == []
    assert differences(one, other) == ["request 0: tokens differ at 1 of 3"]
    assert differences(one, one[:1]) == ["1 answers instead of 2"]
    shorter: list[Answer] = [{"tokens": [1, 2], "logprobs": ["0x1p-1"]}, one[1]]
    assert differences(one, shorter) == ["request 0: tokens differ at its length of 3"]


def test_requests_are_the_same_each_time() -> None:
    assert requests(9, 300, 50, 8) == requests(9, 300, 50, 8)
    assert all(1 <= len(prompt) <= 50 and max(prompt) < 300 for prompt, _ in requests(40, 300, 50, 8))


def test_trace_counts_idle_time() -> None:
    def event(name: str, start: float, end: float) -> Any:
        return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))

    found = traced("work", 2, [event("a(int)", 0, 4), event("b", 6, 8), event("a(int)", 8, 10), event("b", 9, 12)])
    assert found.step_us == 6.0
    assert found.busy_share == pytest.approx(10 / 12)
    assert found.kernels == [("a", 1.0, 3.0), ("b", 1.0, 2.5)]
    assert traced("none", 1, []).kernels == []
