"""`fissile list` and `fissile pull` on a cache, without a Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from huggingface_hub import constants, scan_cache_dir

from worker.cli import hub_models
from worker.config.model_config import ModelConfig

COMMIT = "0123456789abcdef" * 2 + "01234567"


def cached(cache: Path, name: str, file: str) -> Path:
    """A file of a model in the cache."""
    path = cache / f"models--org--{name}" / "snapshots" / COMMIT / file
    path.parent.mkdir(parents=True)
    path.write_bytes(b"{}")
    return path


def test_file_that_raises_does_not_end_the_list(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("a", "b"):
        cached(tmp_path, name, "config.json")
    repositories = list(scan_cache_dir(tmp_path).repos)

    def broken(_: Any) -> None:
        raise IndexError

    monkeypatch.setattr(hub_models, "_repositories", lambda: repositories)
    monkeypatch.setattr(ModelConfig, "from_folder", broken)
    done = CliRunner().invoke(hub_models.list_models, ["--json"])
    assert done.exit_code == 0, done.output
    assert [row["served"] for row in json.loads(done.output)] == ["it cannot be read: IndexError"] * 2


def test_pull_prints_the_commit_whatever_the_folders_are_called(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache = tmp_path / "snapshots" / "cache"
    path = cached(cache, "a", "snapshots/x.gguf")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(hub_models, "download", lambda *_, **__: path)
    done = CliRunner().invoke(hub_models.pull, ["org/a:x.gguf"])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-2:] == [f"org/a:x.gguf@{COMMIT}", str(path)]
