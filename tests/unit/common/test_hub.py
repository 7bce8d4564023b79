"""Names on the Hub, and downloads by `huggingface_hub` from a fake hub on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.hub import HubModel, default_model_name, model_folder
from tests.fake_hub import FakeHub, FakeRepo, fake_hub

ROOT = Path(__file__).resolve().parents[3]
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"pickled",
    "original/model.safetensors": b"the same in another format",
    "onnx/config.json": b"{}",
    "1_Pooling/config.json": b'{"pooling_mode": "mean"}',
    "1_Pooling/old/config.json": b"{}",
    "2_Dense/model.safetensors": b"of a module",
    "README.md": b"# Tiny",
}
WANTED = {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors", "1_Pooling/config.json"}
# The library reads its environment once, so each environment takes a process; it answers for all models.
PROGRAM = """
import json, sys
from common.hub import HubError, model_folder
def found(model, weights):
    try:
        folder = model_folder(model, weights=weights)
        return str(folder), sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    except HubError as error:
        return str(error), []
json.dump([found(model, weights) for model, weights in json.loads(sys.argv[1])], sys.stdout)
"""


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as served:
        served.repos["org/tiny"] = FakeRepo({"main": FILES, "v2": {**FILES, "model.safetensors": b"better"}})
        served.repos["org/gated"] = FakeRepo({"main": FILES}, gated=True)
        served.repos["org/pickled"] = FakeRepo({"main": {"config.json": b"{}", "pytorch_model.bin": b"pickled"}})
        yield served


def fetch(
    home: Path, endpoint: str, *models: str, weights: bool = True, **environment: str
) -> list[tuple[str, list[str]]]:
    """(folder, files) or (error, no files) of each model."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([(model, weights) for model in models])],
        cwd=ROOT,
        env={**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, "FISSILE_LOG_LEVEL": "error", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # structlog prints to standard output too, because logging is not set up.
    results = json.loads(done.stdout.splitlines()[-1])
    return [(found, files) for found, files in results]


@pytest.mark.parametrize(
    ("model", "repo", "name", "revision"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", "Qwen3-0.6B", None),
        ("org/name@v1.0", "org/name", "name", "v1.0"),
        ("org/name@refs/pr/3", "org/name", "name", "refs/pr/3"),
    ],
)
def test_names_on_the_hub(model: str, repo: str, name: str, revision: str | None) -> None:
    assert HubModel.parse(model) == HubModel(repo, name, revision)
    assert str(HubModel.parse(model)) == model
    assert default_model_name(model) == name


@pytest.mark.parametrize(
    "model", ["/models/a", "./org/name", "../name", "name", "a/b/c", "org/", "~/name", "org/na me"]
)
def test_path_like_model_is_a_folder(model: str) -> None:
    assert HubModel.parse(model) is None
    assert model_folder(model) == Path(model)


def test_existing_folder_precedes_hub_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert model_folder("org/name") == Path("org/name")
    assert default_model_name("org/name") == "name"


@pytest.mark.slow
def test_hub_download_fetches_needed_files_once(hub: FakeHub, tmp_path: Path) -> None:
    (main, files), (v2, _) = fetch(tmp_path, hub.endpoint, "org/tiny", "org/tiny@v2")
    assert set(files) == hub.downloaded() == WANTED
    assert Path(main).is_relative_to(tmp_path)
    assert (Path(main) / "model.safetensors").read_bytes() == b"weights"
    assert (Path(v2) / "model.safetensors").read_bytes() == b"better"
    hub.requested.clear()
    assert fetch(tmp_path, hub.endpoint, "org/tiny") == [(main, files)]
    assert hub.downloaded() == set()
    assert fetch(tmp_path, hub.endpoint, "org/tiny", HF_HUB_OFFLINE="1") == [(main, files)]
    # Port 9 is discard; no server listens there.
    assert fetch(tmp_path, "http://127.0.0.1:9", "org/tiny") == [(main, files)]


def test_without_weights(hub: FakeHub, tmp_path: Path) -> None:
    [(folder, files)] = fetch(tmp_path, hub.endpoint, "org/pickled", weights=False)
    assert files == ["config.json"]
    assert Path(folder).is_dir()
    fetch(tmp_path, hub.endpoint, "org/tiny", weights=False)
    assert hub.downloaded() == WANTED - {"model.safetensors"}
    # The cache is incomplete.
    [(error, _)] = fetch(tmp_path, hub.endpoint, "org/tiny", HF_HUB_OFFLINE="1")
    assert error == "org/tiny is neither a folder here nor complete in the cache of the Hub, and HF_HUB_OFFLINE is set"


def test_hub_refusals_are_explained(hub: FakeHub, tmp_path: Path) -> None:
    models = ("org/none", "org/tiny@v9", "org/gated", "org/pickled")
    errors = [error for error, _ in fetch(tmp_path, hub.endpoint, *models)]
    assert errors == [
        f"org/none is neither a folder here nor a model on {hub.endpoint} that HF_TOKEN may read",
        f"org/tiny has no revision 'v9' on {hub.endpoint}",
        f"org/gated is gated: accept its terms on {hub.endpoint}/org/gated and set HF_TOKEN to your token",
        "org/pickled has no safetensors; pickled weights, which may run code, are not loaded",
    ]
    [(_, files)] = fetch(tmp_path, hub.endpoint, "org/gated", HF_TOKEN=hub.token)
    assert set(files) == WANTED


def test_unreachable_hub_is_one_line(hub: FakeHub, tmp_path: Path) -> None:
    [(error, _)] = fetch(tmp_path, "http://127.0.0.1:9", "org/tiny")
    assert error.startswith(
        "org/tiny is not a folder here and not complete in the cache, and http://127.0.0.1:9 cannot be reached: "
    )
    assert "refused" in error
    hub.broken = True
    [(error, _)] = fetch(tmp_path, hub.endpoint, "org/tiny")
    assert "cannot be reached: " in error
    assert "500" in error
    assert "\n" not in error
