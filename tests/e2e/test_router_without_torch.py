"""The router without PyTorch: in an environment where no import of it succeeds, and it serves.

The long form installs the router extra alone, from a wheel into a new environment; it needs the package index that pip
is set up with. The worker runs in the tests' own environment, simulated.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub

from tests.checkpoints import DEFAULT_SHAPE, write_tokenizer
from tests.e2e.service import Process, free_port, generate

ROOT = Path(__file__).resolve().parents[2]
INSTALL_TIMEOUT_S = 300

# The environment is made by the first test.
pytestmark = pytest.mark.timeout(900)


# What the router extra does not bring.
ABSENT = ("torch", "triton")
# Runs before all other imports, so that libraries find none of these packages.
REFUSAL = f"""
import sys
sys.modules.update(dict.fromkeys({ABSENT}))
"""


@dataclass(frozen=True)
class Environment:
    """Folder of an interpreter and of `fissile`, and the variables that they are run with."""

    folder: Path
    variables: dict[str, str]

    def run(self, name: str, *arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Runs a program of the environment to its end."""
        return run(self.folder / name, *arguments, cwd=cwd, variables=self.variables)


def run(*command: str | Path, cwd: Path, variables: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=variables,
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
        check=False,
    )


@pytest.fixture(scope="module", params=["refused", pytest.param("installed", marks=pytest.mark.long)])
def environment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """One without PyTorch: the tests' own, which refuses its import, or a new one with the router extra alone."""
    folder = tmp_path_factory.mktemp("router-only")
    return refusing(folder) if request.param == "refused" else installed(folder)


def refusing(folder: Path) -> Environment:
    """The tests' own environment, in which the packages of `ABSENT` cannot be imported."""
    (folder / "sitecustomize.py").write_text(REFUSAL)
    path = os.pathsep.join(filter(None, [str(folder), str(ROOT), str(ROOT / "protos"), os.environ.get("PYTHONPATH")]))
    return Environment(Path(sys.executable).parent, {**os.environ, "PYTHONPATH": path})


def installed(folder: Path) -> Environment:
    """A new virtual environment with the router extra alone."""
    made = run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    assert made.returncode == 0, made.stderr
    python = folder / "venv" / "bin" / "python"
    done = run(python, "-m", "pip", "install", "--quiet", ROOT / "protos", f"{ROOT}[router]", cwd=folder)
    assert done.returncode == 0, done.stderr
    packages = run(python, "-m", "pip", "list", "--format", "freeze", cwd=folder).stdout
    assert not [line for line in packages.splitlines() if line.startswith(("nvidia", *ABSENT))]
    return Environment(python.parent, dict(os.environ))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder without weights."""
    folder = tmp_path_factory.mktemp("model")
    config = {**DEFAULT_SHAPE, "architectures": ["Qwen3ForCausalLM"], "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, DEFAULT_SHAPE["vocab_size"])
    return folder


@pytest.fixture
def worker(model: Path, tmp_path: Path) -> Iterator[Process]:
    """A worker that makes up its tokens, in the tests' own environment."""
    port = free_port()
    arguments = [
        "worker",
        "--simulate",
        "fixed:2ms",
        "--model",
        str(model),
        "--model-name",
        "test",
        "--port",
        str(port),
    ]
    process = Process("worker", arguments, port, tmp_path / "worker.log")
    process.start()
    try:
        yield process
    finally:
        process.stop()


def test_environment_has_no_torch(environment: Environment, tmp_path: Path) -> None:
    result = environment.run("python", "-c", "import torch", cwd=tmp_path)
    assert "ModuleNotFoundError" in result.stderr


@pytest.mark.parametrize("command", ["worker", "serve"])
def test_missing_torch_error_says_what_to_install(
    command: str, environment: Environment, model: Path, tmp_path: Path
) -> None:
    result = environment.run("fissile", command, "--model", model, "--port", "0", cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    (refusal,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert refusal.startswith(f"error: `fissile {command}` needs ")
    assert "./protos '.[router,worker,cpu]'" in refusal
    assert "Traceback" not in result.stderr


def test_router_without_torch_serves(environment: Environment, worker: Process, tmp_path: Path) -> None:
    port = free_port()
    with (tmp_path / "router.log").open("wb") as log:
        router = subprocess.Popen(
            [environment.folder / "fissile", "router", "--port", str(port), "--worker", worker.address],
            cwd=tmp_path,
            env=environment.variables,
            stdout=log,
            stderr=log,
        )
    try:
        probe = Process("router", [], port, tmp_path / "router.log", child=router)
        probe.wait_serving()
        with grpc.insecure_channel(probe.address) as channel:
            answer = generate(
                InferenceServiceStub(channel),
                pb.GenerateRequest(text="hello", sampling_params=pb.SamplingParams(max_tokens=8, ignore_eos=True)),
            )
        assert answer.finish is not None
        assert answer.finish.usage.completion_tokens == 8
        assert probe.stop() == 0
    finally:
        router.kill()
        router.wait()
