"""`fissile list` and `fissile rm` of what an interrupted download leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from huggingface_hub import constants

from worker.cli.hub_models import list_models, remove


def test_interrupted_download_is_listed_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    blobs = tmp_path / "models--org--tiny" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "abc.incomplete").write_bytes(b"weights")
    listed = CliRunner().invoke(list_models, ["--json"])
    (row,) = json.loads(listed.stdout)
    assert (row["name"], row["size"], row["served"]) == ("org/tiny", 7, "its download is not complete")
    assert "org/tiny" in CliRunner().invoke(list_models, []).stdout
    removed = CliRunner().invoke(remove, ["org/tiny", "--json"])
    assert json.loads(removed.stdout) == {"removed": [], "freed_bytes": 7}
    assert not list(tmp_path.iterdir())
