"""`fissile bench` against a real service with a simulated worker, and offline with the demo model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from common.cli.bench.command import bench
from common.cli.core.errors import CommandError
from tests.e2e.service import REPOSITORY, Service, running_service
from tests.e2e.simulated import OPTIONS, simulated_model

TIMEOUT_S = 120.0
DEMO = REPOSITORY / "deploy" / "demo" / "checkpoint"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    with running_service(folder, simulated_model(folder / "model"), worker_options=OPTIONS) as running:
        yield running


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "common.cli.main", "bench", *arguments],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def serve(service: Service, *arguments: str) -> Result:
    """Runs it in this process."""
    return CliRunner().invoke(bench, ["serve", "--address", service.router.address, *arguments], standalone_mode=False)


def rows(text: str) -> Sequence[dict[str, Any]]:
    made: dict[str, Any] = json.loads(text)
    found: list[dict[str, Any]] = made["rows"]
    return found


def test_closed_loops_through_router_and_workers(service: Service, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    loads = ("--concurrency", "1,4", "--requests", "8", "--output-len", "10", "--prefix-len", "64")
    result = serve(service, *loads, "--json", str(file))
    assert result.exception is None
    heading, *lines = result.stdout.splitlines()
    assert heading.split()[:5] == ["LOAD", "OK", "FAIL", "REQ/S", "OUT/S"]
    assert [line.split()[:3] for line in lines] == [["c=1", "8", "0"], ["c=4", "8", "0"]]
    for row, concurrency in zip(rows(file.read_text()), (1, 4), strict=True):
        assert (row["ok"], row["output_tokens"], row["max_in_flight"]) == (8, 80, concurrency)
        # The prompts of a row share 64 tokens, with those of no other row.
        assert 64 <= row["cached_tokens"] <= 8 * 64
        assert row["cached_tokens"] % 64 == 0
        # A step takes 5 ms: 9 of them behind the first token, which may have come late itself.
        assert row["latency_ms"]["p50"] >= 10 * 4.5
        assert row["ttft_ms"]["mean"] < row["ttft_ms"]["mean"] + 9 * row["tpot_ms"]["mean"] <= row["latency_ms"]["mean"]
        assert row["ttft_ms"]["p50"] >= row["service_ttft_ms"]["p50"] >= row["prefill_ms"]["p50"] >= 4.5
        assert row["workers"] == {"worker-0": 8}
        assert row["cpu"]["service"] is not None


def test_open_loop_at_a_real_deadline(service: Service) -> None:
    """Answers of 67 to 764 tokens: those of more than 400 take longer than they may."""
    loads = ("--rate", "40", "--burstiness", "inf", "--requests", "12", "--warmup", "0", "--output-len", "4:1000")
    # On a busy machine none may be answered in time.
    for timeout_s in (2, 4, 3, 8, 2, 16):
        result = serve(service, *loads, "--timeout", str(timeout_s), "--json", "-")
        (row,) = rows(result.stdout)
        if row["ok"] and row["failed"]:
            break
    assert row["setting"]["rate"] == 40.0
    assert row["ok"] + row["failed"] == 12
    assert row["ok"] >= 1
    ((failure,),) = [row["failures"]]
    assert (failure["status"], failure["count"]) == ("DEADLINE_EXCEEDED", row["failed"])
    assert isinstance(result.exception, CommandError)
    assert result.exception.exit_code == 1
    assert str(result.exception).startswith(
        f"{row['failed']} of 12 requests failed: {row['failed']} DEADLINE_EXCEEDED: "
    )
    # 12 requests at 40/s: the last one is to be sent after 0.3 s, and was not held back by those before it.
    assert row["max_in_flight"] >= 4


@pytest.mark.slow
def test_bench_ctrl_c_prints_results_and_frees_workers(service: Service) -> None:
    loads = ("--concurrency", "2,4", "--duration", "60s", "--output-len", "3:400", "--warmup", "0")
    process = start("serve", "--address", service.router.address, *loads, "--json", "-")
    # Sure to be measuring: a worker has had something to do.
    end = time.monotonic() + TIMEOUT_S
    while not service.worker_load().decoding_seqs:
        assert time.monotonic() < end
        assert process.poll() is None
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, errors
    made = json.loads(output)
    assert made["interrupted"]
    (row,) = made["rows"]
    assert (row["interrupted"], row["failed"]) == (2, 0)
    assert "LOAD" in errors
    assert "interrupted: the last row has only what had ended" in errors
    assert not service.wait_idle().decoding_seqs


@pytest.mark.slow
def test_offline_with_a_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    loads = ("--concurrency", "1,4", "--requests", "4", "--warmup", "1", "--input-len", "4:20", "--output-len", "6")
    drafts = {"method": "eagle3", "model": str(DEMO.parent / "eagle3"), "num_speculative_tokens": 3, "adaptive": False}
    speculation = ("--speculative-config", json.dumps(drafts))
    process = start("offline", "--model", str(DEMO), "--threads", "1", *speculation, *loads, "--json", str(file))
    output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors
    assert [line.split()[:3] for line in output.splitlines()[1:]] == [["c=1", "4", "0"], ["c=4", "4", "0"]]
    made = json.loads(file.read_text())
    assert (made["mode"], made["options"]["engine"]["threads"]) == ("offline", 1)
    assert made["model"]["architecture"] == "Qwen3ForCausalLM"
    for row in made["rows"]:
        assert (row["ok"], row["output_tokens"], row["cached_tokens"], row["queue_ms"]) == (4, 24, None, None)
        assert row["latency_ms"]["p50"] >= row["ttft_ms"]["p50"] > 0
        verified, accepted = ([one[name] for one in row["drafts"]] for name in ("verified", "accepted"))
        assert 1 <= len(verified) <= 3
        assert verified == sorted(verified, reverse=True)
        # Each of the four answers has a token of its prompt's step, and the others of verifications or plain steps.
        assert sum(accepted) <= 4 * 5
