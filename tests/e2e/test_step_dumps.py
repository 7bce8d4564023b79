"""Workers that dump their steps: one whose step hangs, and one that loses a rank."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from fissile.worker.v1 import worker_pb2 as wpb
from fissile.worker.v1.worker_pb2_grpc import WorkerServiceStub
from google.protobuf.json_format import ParseDict

from router.cli.steps import steps
from tests.checkpoints import make_checkpoint
from tests.e2e.service import Process, free_port
from tests.e2e.simulated import simulated_model
from tests.sockets import descendants

WITHIN_S = 90.0


@contextmanager
def serving(model: Path, folder: Path, *options: str) -> Iterator[tuple[Process, WorkerServiceStub]]:
    """A worker `w` that dumps its steps to `folder`, and its service."""
    port = free_port()
    common = ["worker", "--model", str(model), "--port", str(port), "--worker-id", "w", "--step-dumps", str(folder)]
    worker = Process("w", [*common, *options], port, folder.with_suffix(".log"), {"OMP_NUM_THREADS": "1"})
    worker.start()
    try:
        worker.wait_serving()
        with grpc.insecure_channel(worker.address) as channel:
            yield worker, WorkerServiceStub(channel)
    finally:
        worker.running.kill()
        worker.running.wait()


def asked(max_tokens: int) -> wpb.GenerateRequest:
    made = wpb.GenerateRequest(request_id="mine", token_ids=range(1, 30))
    made.params.max_tokens = max_tokens
    made.params.top_p = made.params.repetition_penalty = 1
    made.params.ignore_eos = True
    return made


def dumped(folder: Path, reason: str, log: Path) -> list[wpb.Step]:
    """The steps of the first dump, once it is there."""
    end = time.monotonic() + WITHIN_S
    while not (found := sorted(folder.glob(f"steps-w-*-{reason}.jsonl"))):
        assert time.monotonic() < end, log.read_text()[-3000:]
        time.sleep(0.05)
    return [ParseDict(json.loads(line), wpb.Step()) for line in found[0].read_text("utf-8").splitlines()]


def test_hanging_step_is_dumped_with_its_batch(tmp_path: Path) -> None:
    model, folder = simulated_model(tmp_path / "model"), tmp_path / "dumps"
    with serving(model, folder, "--simulate", "fixed:600s", "--step-timeout", "200ms") as (worker, stub):
        call: Any = stub.Generate(asked(5), timeout=600)
        (step,) = dumped(folder, "stalled", worker.log)
        call.cancel()
    assert (step.number, step.in_flight, step.forward_us) == (1, True, 0)
    (drawn,) = CliRunner().invoke(steps, ["--file", str(*folder.iterdir())]).output.splitlines()[1:]
    assert drawn.split()[0] == "1"
    assert "+" in drawn.split()[2]
    assert "1: 29" in drawn
    assert step.launch_us + step.wait_us > 200_000
    assert [*step.rows] == [
        wpb.StepRow(sequence=step.rows[0].sequence, request_id="mine", kind=wpb.STEP_ROW_KIND_PREFILL, tokens=29)
    ]


@pytest.mark.slow
def test_steps_before_loss_of_rank_are_dumped(tmp_path: Path) -> None:
    model, folder = make_checkpoint(tmp_path / "model", "qwen3", max_position_embeddings=8192), tmp_path / "dumps"
    options = ["--dtype", "float32", "--max-model-len", "8192", "--kv-cache-memory", "64MiB", "--tp-size", "2"]
    with serving(model, folder, *options) as (worker, stub):
        call: Any = stub.Generate(asked(8000), timeout=600)
        next(call)
        os.kill(descendants(worker.running.pid)[-1], signal.SIGKILL)
        steps = dumped(folder, "failed", worker.log)
        with pytest.raises(grpc.RpcError):
            list(call)
        # It recovers, and its new engine has steps of its own.
        worker.wait_serving()
        assert [*stub.Generate(asked(3), timeout=600)]
    assert steps[0].rows[0].kind == wpb.STEP_ROW_KIND_PREFILL
    assert {row.request_id for step in steps for row in step.rows} == {"mine"}
    assert [step.number for step in steps] == list(range(steps[0].number, steps[0].number + len(steps)))
