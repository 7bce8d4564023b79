"""The secret of ranks comes from a file or from the environment, and is never shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.cli.core.errors import CommandError
from worker.cli.worker import worker
from worker.cli.worker_options import worker_options
from worker.ranks.door import SECRET_VARIABLE
from worker.ranks.topology import Topology

MODEL = Path(__file__).resolve().parents[4] / "deploy" / "demo" / "checkpoint"


def topology(*given: str) -> Topology:
    """What the command makes of its options."""
    command = ["--model", str(MODEL), "--tp-size", "2", "--nnodes", "2", "--dist-init", "tcp://127.0.0.1:4100", *given]
    params = worker.make_context("worker", command).params
    del params["log_level"]
    return worker_options(**params).topology


def test_secret_file_overrides_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    file.write_text("of the file\n")
    assert topology().dist_secret == ""
    monkeypatch.setenv(SECRET_VARIABLE, "of the variable")
    assert topology().dist_secret == "of the variable"
    assert "of the variable" not in repr(topology())
    assert topology("--dist-secret", str(file)).dist_secret == "of the file"


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("nothing", "No such file"),
        ("empty", "is empty"),
        ("pipe", "not a regular file"),
        ("long", "more than 4096 bytes"),
    ],
)
def test_file_without_secret_is_refused(kind: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind != "nothing":
        file.write_text("" if kind == "empty" else "x" * 5000)
    with pytest.raises(CommandError, match=f"--dist-secret: .*{problem}"):
        topology("--dist-secret", str(file))
