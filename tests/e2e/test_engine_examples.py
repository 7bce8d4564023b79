"""examples/engine_client.py asks each protocol of other projects, and prints the answer of Generate."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from fissile.v1 import inference_pb2 as pb

from tests.e2e.service import REPOSITORY, Service, running_service

EXAMPLE = REPOSITORY / "examples" / "engine_client.py"
PROMPT = "Once upon a time there was a"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    options = ["--doors", "openengine,vllm-engine"]
    demo = REPOSITORY / "deploy" / "demo" / "checkpoint"
    with running_service(tmp_path_factory.mktemp("service"), demo, worker_options=options) as service:
        yield service


def printed(protocol: str, address: str) -> str:
    command = [sys.executable, str(EXAMPLE), protocol, address, PROMPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_each_protocol_gives_the_answer_of_generate(service: Service) -> None:
    params = pb.SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=64)
    request = pb.GenerateRequest(text=PROMPT, sampling_params=params)
    request.output_options.return_token_ids = True
    (answer,) = service.stub.GenerateOnce(request, timeout=120).answers
    assert len(answer.token_ids) > 8
    worker = service.workers[0].address
    assert printed("openengine", worker) == f"{answer.text}\n"
    assert printed("vllm-engine", worker).split() == [str(token) for token in answer.token_ids]
    assert printed("open-inference", service.router.address) == f"{answer.text}\n"


def test_refusal_names_its_status(service: Service) -> None:
    """The router has no door of a worker's."""
    command = [sys.executable, str(EXAMPLE), "openengine", service.router.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: UNIMPLEMENTED: ")
