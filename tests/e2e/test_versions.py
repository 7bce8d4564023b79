"""Routers and workers of neighbouring versions of the Session protocol serve together, with the same tokens.

No release has been made. So the version before is the last commit that spoke the minor version before this one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from fissile.v1.inference_pb2_grpc import InferenceServiceStub

from common.wire.protocol import PROTO_MINOR
from tests.e2e.service import REPOSITORY, Process, free_port, generate, running
from tests.e2e.simulated import OPTIONS, request, simulated_model

EARLIER = "dae03c81c3422dba0bc1ac3efc29ad8da6d5a048"
EARLIER_MINOR = 1


class OtherProcess(Process):
    """A process of another checkout."""

    folder: Path

    def start(self) -> None:
        paths = os.pathsep.join([str(self.folder), str(self.folder / "protos")])
        environment = {**os.environ, **self.environment, "PYTHONPATH": paths}
        with self.log.open("ab") as log:
            self.child = subprocess.Popen(
                [sys.executable, "-m", *self.arguments], cwd=self.folder, env=environment, stdout=log, stderr=log
            )


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the version before."""
    folder = tmp_path_factory.mktemp("earlier")
    archive = subprocess.run(["git", "archive", EARLIER], cwd=REPOSITORY, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip("the version before is not in this clone: fetch the whole history")
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated_model(tmp_path_factory.mktemp("model"))


def process(name: str, arguments: list[str], port: int, folder: Path, checkout: Path | None) -> Process:
    made = (Process if checkout is None else OtherProcess)(name, arguments, port, folder / f"{name}.log")
    if isinstance(made, OtherProcess) and checkout is not None:
        made.folder = checkout
    return made


def tokens(folder: Path, model: Path, router: Path | None, worker: Path | None) -> Iterator[list[int]]:
    """The tokens of twelve answers, by a router and a worker of these checkouts; None is this one."""
    folder.mkdir()
    ports = [free_port(), free_port()]
    address = f"127.0.0.1:{ports[0]}"
    serve = ["worker", "--model", str(model), "--model-name", "test", "--port", str(ports[0]), *OPTIONS]
    fleet = [
        process("worker", serve, ports[0], folder, worker),
        process("router", ["router", "--port", str(ports[1]), "--worker", address], ports[1], folder, router),
    ]
    with running(fleet), grpc.insecure_channel(f"127.0.0.1:{ports[1]}") as channel:
        for number in range(12):
            yield generate(InferenceServiceStub(channel), request(number)).token_ids


def test_earlier_version_spoke_the_minor_version_before() -> None:
    assert PROTO_MINOR - EARLIER_MINOR == 1


@pytest.mark.slow
def test_neighbouring_versions_give_the_same_tokens(earlier: Path, model: Path, tmp_path: Path) -> None:
    checkouts = {"new router, old worker": (None, earlier), "old router, new worker": (earlier, None)}
    answers = {name: list(tokens(tmp_path / name, model, *pair)) for name, pair in checkouts.items()}
    answers["new"] = list(tokens(tmp_path / "new", model, None, None))
    for name, found in answers.items():
        assert found == answers["new"], name
    assert all(len(found) == 24 for found in answers["new"])
