"""Names of models on the Hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.hub import HubModel, default_model_name, hub_model


@pytest.mark.parametrize(
    ("model", "repo", "name", "file", "revision"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", "Qwen3-0.6B", "", None),
        ("org/name@v1.0", "org/name", "name", "", "v1.0"),
        ("org/name@refs/pr/3", "org/name", "name", "", "refs/pr/3"),
        ("org/name:Q4_K_M", "org/name", "name", "Q4_K_M", None),
        ("org/name:UD/a-00001-of-00002.gguf@v2", "org/name", "name", "UD/a-00001-of-00002.gguf", "v2"),
    ],
)
def test_names_on_the_hub(model: str, repo: str, name: str, file: str, revision: str | None) -> None:
    assert HubModel.parse(model) == HubModel(repo, name, file, revision)
    assert str(HubModel.parse(model)) == model
    assert default_model_name(model) == name


@pytest.mark.parametrize(
    "model",
    [
        *("/models/a", "./org/name", "../name", "name", "a/b/c", "org/", "~/name", "org/na me"),
        *("org/name:", "org/name:../a"),
    ],
)
def test_path_like_model_is_a_path(model: str) -> None:
    assert HubModel.parse(model) is None
    assert hub_model(model) is None


def test_path_longer_than_any_file_has_is_a_path() -> None:
    assert hub_model("/" + "a" * 5000) is None
    assert default_model_name("/" + "a" * 5000) == "a" * 5000


def test_existing_folder_precedes_hub_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_model("org/name") is None
    assert default_model_name("org/name") == "name"
    for file in ("name-Q4_K_M.gguf", "name-Q4_K_M-00001-of-00002.gguf"):
        (tmp_path / file).touch()
        assert default_model_name(str(tmp_path / file)) == "name-Q4_K_M"
