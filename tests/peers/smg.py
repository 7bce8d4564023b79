"""The real smg in front of workers, and a client of its OpenAI API."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import openai

from tests.e2e.service import Process, free_port
from tests.peers.environment import SMG_PACKAGES, peer_environment, peer_variables

LIMIT_S: Final = 60.0
# The name that workers of `running_service` give their model.
MODEL: Final = "test"


@dataclass
class RunningSmg:
    """A running smg, and a client of its OpenAI API."""

    client: openai.OpenAI
    pid: int
    port: int
    metrics_port: int

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=LIMIT_S) as answer:
            rows = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", answer.read().decode(), re.M)
        return sum(map(float, rows))

    def get(self, path: str) -> Any:
        """The JSON of one of its own endpoints."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=LIMIT_S) as answer:
            return json.load(answer)


def wait_until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.05)


@contextlib.contextmanager
def running_smg(workers: list[Process], folder: Path, *options: str) -> Iterator[RunningSmg]:
    """Starts smg over workers, and waits until it has found all of them."""
    port, metrics_port = free_port(), free_port()
    command: list[str | Path] = [peer_environment("smg", SMG_PACKAGES) / "smg", "launch", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    command += [*options, "--worker-urls", *(f"grpc://{worker.address}" for worker in workers)]
    with (
        (folder / "smg.log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=peer_variables()) as child,
    ):
        try:
            client = openai.OpenAI(
                base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=LIMIT_S
            )
            smg = RunningSmg(client, child.pid, port, metrics_port)
            wait_until(lambda: child.poll() is None and _num_ready(smg) == len(workers))
            wait_until(lambda: has_tokenizer(client))
            yield smg
        finally:
            child.kill()


def _num_ready(smg: RunningSmg) -> int:
    try:
        return sum(worker["is_healthy"] for worker in smg.get("/workers")["workers"])
    except OSError:
        return 0


def has_tokenizer(client: openai.OpenAI) -> bool:
    """True if smg has the model's tokenizer, and a worker that takes requests."""
    with contextlib.suppress(openai.APIStatusError):
        client.completions.create(model=MODEL, prompt="a", max_tokens=1)
        return True
    return False
