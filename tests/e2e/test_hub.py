"""Every way to run a model takes its name on the Hub; the hub is a fake one on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.covering import slow_but
from tests.e2e.service import free_port
from tests.fake_hub import FakeHub, FakeRepo, fake_hub

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", num_hidden_layers=1)


@pytest.fixture
def hub(folder: Path) -> Iterator[FakeHub]:
    with fake_hub() as served:
        served.repos["org/tiny"] = FakeRepo({"main": {path.name: path.read_bytes() for path in folder.iterdir()}})
        served.repos["org/gated"] = FakeRepo({"main": {"config.json": b"{}"}}, gated=True)
        yield served


def fissile(hub: FakeHub, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "common.cli.main", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(home), "HF_ENDPOINT": hub.endpoint},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


@pytest.mark.slow
def test_offline_answers_as_from_the_folder(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    options = ("--max-tokens", "5", "--ignore-eos", "--temperature", "0", "--json", "hello")
    answers = [fissile(hub, tmp_path, "generate", "--offline", model, *options) for model in ("org/tiny", str(folder))]
    tokens = [json.loads(answer.stdout)["token_ids"] for answer in answers]
    assert len(tokens[0]) == 5
    assert tokens[0] == tokens[1]


@pytest.mark.slow
def test_serve_downloads_once_for_its_workers(hub: FakeHub, tmp_path: Path) -> None:
    port = str(free_port())
    options = ("--workers", "2", "--once", "--simulate", "instant", "--port", port)
    done = fissile(hub, tmp_path, "serve", "--model", "org/tiny", *options)
    assert done.returncode == 0, done.stderr
    assert "model           tiny from" in done.stderr + done.stdout
    # Simulated workers need no weights.
    assert "tokenizer.json" in hub.downloaded()
    assert "model.safetensors" not in hub.downloaded()
    assert sum("revision/main" in line for line in hub.requested) == 1


@pytest.mark.parametrize("command", slow_but({"serve"}, ["worker", "serve"]))
def test_hub_refusal_is_one_line(hub: FakeHub, tmp_path: Path, command: str) -> None:
    done = fissile(hub, tmp_path, command, "--model", "org/gated", "--port", "0")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: org/gated is gated: accept its terms on ")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_unknown_kv_cache_dtype_is_refused(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    done = fissile(hub, tmp_path, "worker", "--model", str(folder), "--port", "0", "--kv-cache-dtype", "fp4")
    assert done.returncode == 2
    assert "kv_cache_dtype is 'fp4'; valid: auto, bfloat16, float16, fp8" in done.stderr
