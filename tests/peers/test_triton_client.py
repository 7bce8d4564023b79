"""The real `tritonclient` on a router: examples/triton_client.py prints the text of Generate, whole and in parts."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fissile.v1 import inference_pb2 as pb

from tests.clients import PINNED
from tests.e2e.service import REPOSITORY, Service, running_service
from tests.peers.environment import peer_environment, peer_variables

pytestmark = pytest.mark.long

EXAMPLE = REPOSITORY / "examples" / "triton_client.py"
PACKAGES = (PINNED["tritonclient"],)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running_service(tmp_path_factory.mktemp("fissile"), REPOSITORY / "deploy" / "demo" / "checkpoint") as service:
        yield service


def run_example(address: str, prompt: str) -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = [peer_environment("triton", PACKAGES) / "python", EXAMPLE, address, prompt]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=peer_variables(), check=False)


@pytest.mark.parametrize("prompt", ["Once upon a time", "Où est le chat ?"])
@pytest.mark.client("tritonclient", "Open Inference: whole and streamed text")
def test_example_prints_the_text_of_generate_twice(service: Service, prompt: str) -> None:
    request = pb.GenerateRequest(text=prompt)
    request.sampling_params.max_tokens, request.sampling_params.temperature, request.sampling_params.seed = 64, 0.8, 7
    (answer,) = service.stub.GenerateOnce(request, timeout=60).answers
    reason = pb.FinishReason.Name(answer.finish.reason)[14:].lower()
    done = run_example(service.router.address, prompt)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{answer.text}\n{answer.text}\n{reason}\n"


@pytest.mark.client("tritonclient", "Open Inference: a refused request")
def test_example_names_the_status_of_a_refusal(service: Service) -> None:
    done = run_example(service.router.address, "")
    assert done.returncode == 1
    assert "INVALID_ARGUMENT" in done.stderr
    assert "inputs.text_input is empty" in done.stderr
