"""`fissile list` and `fissile rm` of interrupted downloads and damaged folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from huggingface_hub import constants

from common.cli.core.errors import CommandError
from worker.cli.hub_models import list_models, remove

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the Hub, which this process uses."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def rows() -> list[dict[str, object]]:
    """The rows of `fissile list`."""
    found: list[dict[str, object]] = json.loads(CliRunner().invoke(list_models, ["--json"]).stdout)
    return found


@pytest.mark.parametrize("snapshots", [[], ["snapshots"], [f"snapshots/{COMMIT}"]])
@pytest.mark.parametrize("names", [["org/tiny"], ["org/tiny", "org/tiny"]])
def test_interrupted_download_is_listed_and_removed(cache: Path, snapshots: list[str], names: list[str]) -> None:
    blobs = cache / "models--org--tiny" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "abc.incomplete").write_bytes(b"weights")
    for name in snapshots:
        (blobs.parent / name).mkdir(parents=True)
    (row,) = rows()
    assert (row["name"], row["size"], row["served"]) == ("org/tiny", 7, "its download is not complete")
    assert "org/tiny" in CliRunner().invoke(list_models, []).stdout
    removed = CliRunner().invoke(remove, [*names, "--json"])
    assert json.loads(removed.stdout) == {"removed": [], "freed_bytes": 7}
    assert not list(cache.iterdir())


def complete(cache: Path) -> Path:
    """A repository with one complete file; returns its folder."""
    folder = cache / "models--org--tiny"
    for each in ("blobs", f"snapshots/{COMMIT}", "refs"):
        (folder / each).mkdir(parents=True)
    (folder / "refs/main").write_text(COMMIT)
    (folder / "blobs/abc").write_bytes(b"weights")
    (folder / f"snapshots/{COMMIT}/model.safetensors").symlink_to("../../blobs/abc")
    return folder


@pytest.mark.parametrize("damage", ["ref to no commit", "link to no content", "file beside the snapshots"])
def test_damaged_folder_with_weights_is_never_removed(cache: Path, damage: str) -> None:
    folder = complete(cache)
    if damage == "ref to no commit":
        (folder / "refs/main").write_text("f" * 40)
    elif damage == "link to no content":
        (folder / f"snapshots/{COMMIT}/config.json").symlink_to("../../blobs/none")
    else:
        (folder / "snapshots/stray").write_bytes(b"")
    (row,) = rows()
    assert (row["name"], row["size"], row["served"]) == ("org/tiny", stored(folder), "its folder is damaged")
    for name in ("org/tiny", f"org/tiny@{COMMIT}"):
        refused = CliRunner().invoke(remove, [name], standalone_mode=False)
        assert isinstance(refused.exception, CommandError)
        assert str(folder) in str(refused.exception).removesuffix(f"mend {folder}, or remove it yourself")
        assert str(refused.exception).endswith(f"mend {folder}, or remove it yourself")
    assert (folder / "blobs/abc").read_bytes() == b"weights"


def test_commit_named_twice_is_removed_once(cache: Path) -> None:
    folder = complete(cache)
    removed = CliRunner().invoke(remove, ["org/tiny", "org/tiny@main", "org/tiny", "--json"])
    assert json.loads(removed.stdout) == {"removed": [COMMIT], "freed_bytes": 7}
    assert not folder.exists()


def test_file_of_a_repository_is_refused_with_the_name_to_remove(cache: Path) -> None:
    complete(cache)
    refused = CliRunner().invoke(remove, ["org/tiny:Q4_K_M"], standalone_mode=False)
    assert str(refused.exception) == (
        "org/tiny:Q4_K_M: a file cannot be removed alone; valid: org/tiny, with all its files"
    )


@pytest.mark.parametrize(("count", "shown"), [(7, "0.0 MB"), (99_000_000, "99.0 MB"), (1_230_000_000, "1.23 GB")])
def test_sizes_of_small_models_are_in_megabytes(cache: Path, count: int, shown: str) -> None:
    with (complete(cache) / "blobs/abc").open("r+b") as stream:
        stream.truncate(count)
    assert shown in CliRunner().invoke(list_models, []).stdout


def test_unknown_name_removes_nothing(cache: Path) -> None:
    folder = complete(cache)
    refused = CliRunner().invoke(remove, ["org/tiny", "org/none"], standalone_mode=False)
    assert isinstance(refused.exception, CommandError)
    assert (folder / "blobs/abc").exists()


def stored(folder: Path) -> int:
    """Bytes of a folder's files and links."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
