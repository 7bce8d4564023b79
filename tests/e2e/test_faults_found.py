"""Real workers of which one begins to compute wrongly while they serve: it is found, and nobody else is blamed.

A hundredth of the answers is audited, and a sixteenth of the KV blocks compared, as an operator would have it.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from fissile.receipts import contradiction
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub
from safetensors.torch import load_file, save_file

from tests.e2e.faulty_worker import FAULTS
from tests.e2e.service import REPOSITORY, Process, free_port, running

DEMO = REPOSITORY / "deploy" / "demo" / "checkpoint"
WORKERS, AT_ONCE = 3, 6
BEGINNING = "Once upon a time there was a small fox. " * 6
# The longest that a fault may go unnoticed, on a machine that has other things to do as well.
FOUND_WITHIN_S = 60.0
WORDS = ("wolf", "river", "boat", "morning", "garden", "letter", "stone", "winter")
EMBEDDINGS = "model.embed_tokens.weight"
ALARMS = ("audit: a worker gives wrong answers", "kv audit: a worker computes wrongly")
CORDONED = "audit: worker cordoned"
DOUBTS = ("audit: two workers differ", "kv audit: two workers differ")


def with_ties(folder: Path) -> Path:
    """The demo model with each token of the lower half of its vocabulary once more in the upper half."""
    shutil.copytree(DEMO, folder)
    tensors = load_file(folder / "model.safetensors")
    rows = tensors[EMBEDDINGS]
    half = len(rows) // 2
    tensors[EMBEDDINGS] = torch.cat((rows[:half], rows[:half]))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Fleet:
    """Three workers that can have faults, and a router that audits.

    Attributes:
        router: the router.
        asked: requests that have been answered.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        environment = {"OMP_NUM_THREADS": "1", "FISSILE_LOG_LEVEL": "info"}
        self._folder = folder
        self.workers = []
        for i in range(WORKERS):
            port, name = free_port(), f"worker-{i}"
            (folder / name).mkdir()
            arguments = ["tests.e2e.faulty_worker", str(folder / name), "worker", "--model", str(model)]
            arguments += ["--model-name", "test", "--port", str(port), "--worker-id", name, "--dtype", "float32"]
            arguments += ["--kv-cache-memory", "16MiB", "--max-model-len", "512"]
            self.workers.append(Process(name, arguments, port, folder / f"{name}.log", environment))
        port = free_port()
        targets = [part for worker in self.workers for part in ("--worker", worker.address)]
        audit = ["--audit", "1%", "--audit-dir", str(folder / "audit"), "--placement", "round_robin"]
        self.router = Process(
            "router", ["router", "--port", str(port), *targets, *audit], port, folder / "router.log", environment
        )
        self.asked = 0

    def said(self, *events: str) -> list[dict[str, Any]]:
        """Lines of the router's log."""
        lines = (json.loads(line) for line in self.router.log.read_text().splitlines() if line.startswith("{"))
        return [line for line in lines if line["event"] in events]

    def wait(self, condition: Any) -> None:
        end = time.monotonic() + 90
        while not condition():
            assert time.monotonic() < end, self.router.log.read_text()[-4000:]
            time.sleep(0.05)

    def break_worker(self, name: str, fault: str) -> None:
        """Makes a fault and waits until it is there."""
        request = self._folder / name / fault
        request.touch()
        self.wait(lambda: not request.exists())

    def proofs(self) -> list[Path]:
        """What has been kept."""
        return sorted((self._folder / "audit").glob("*.json"))


@pytest.fixture
def fleet(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path, with_ties(tmp_path / "model") if request.param == "ties" else DEMO)
    with running([*fleet.workers, fleet.router]):
        fleet.wait(lambda: len(fleet.said("worker up")) == WORKERS)
        yield fleet


def made(number: int) -> pb.GenerateRequest:
    """A prompt whose beginning others have too, with blocks of its own behind it; all of its logits are digested."""
    rnd = random.Random(number)
    text = BEGINNING + " ".join(rnd.choice(WORDS) for _ in range(24))
    params = pb.SamplingParams(max_tokens=4, temperature=0.8, top_k=rnd.choice([1, 3]), seed=number, ignore_eos=True)
    request = pb.GenerateRequest(request_id=f"r{number}", text=text, sampling_params=params)
    request.output_options.receipt.logits_every = 1
    return request


def ask(fleet: Fleet, numbers: Iterator[int], enough: threading.Event) -> None:
    """One client that asks until it is told to end."""
    with grpc.insecure_channel(fleet.router.address) as channel:
        stub = InferenceServiceStub(channel)
        while not enough.is_set():
            response = stub.GenerateOnce(made(next(numbers)), timeout=60)
            assert contradiction(response.answers[0].finish.receipt) == ""
            fleet.asked += 1


@pytest.mark.long
@pytest.mark.parametrize(("fleet", "fault"), [(fault, fault) for fault in FAULTS], indirect=["fleet"])
def test_audit_finds_worker_that_starts_to_compute_wrongly(fleet: Fleet, fault: str) -> None:
    faulty = f"worker-{random.Random(fault).randrange(WORKERS)}"
    numbers, enough = itertools.count(), threading.Event()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        clients = [pool.submit(ask, fleet, numbers, enough) for _ in range(AT_ONCE)]
        try:
            # Common beginnings are in all caches, and nobody is blamed.
            fleet.wait(lambda: fleet.asked >= 200 or any(client.done() for client in clients))
            assert not fleet.said(*ALARMS, *DOUBTS)
            fleet.break_worker(faulty, fault)
            began, before = time.monotonic(), fleet.asked
            while not fleet.said(CORDONED) and time.monotonic() < began + FOUND_WITHIN_S:
                time.sleep(0.05)
            found_s, requests = time.monotonic() - began, fleet.asked - before
            assert fleet.said(CORDONED), f"not within {FOUND_WITHIN_S} s, {requests} requests"
            # Goes on without the worker, and blames nobody else.
            fleet.wait(lambda: fleet.asked >= before + requests + 100 or any(client.done() for client in clients))
        finally:
            enough.set()
    for client in clients:
        client.result()
    # A comparison of KV blocks says so when it has made its proof. Audits of what was answered before say it again.
    fleet.wait(lambda: fleet.said(*ALARMS) and fleet.proofs())
    print(f"\n{fault}: {found_s:.1f} s, {requests} requests, {fleet.said(*ALARMS)[0]['event']}")
    assert not fleet.said(*DOUBTS)
    assert {line["worker_id"] for line in fleet.said(*ALARMS)} == {faulty}
    assert [(line["worker_id"], line["evicted"]) for line in fleet.said(CORDONED)] == [(faulty, True)]
