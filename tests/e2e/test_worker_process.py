"""A worker as a process of its own, which gets signals."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from fissile.worker.v1 import worker_pb2 as wpb
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.e2e.service import free_port
from tests.e2e.worker_bench import ENDLESS, REFERENCE, ROOT, SERVING, folder
from tests.e2e.worker_client import RouterEnd, sequence

__all__ = ["folder"]


class Process:
    """`python -m worker --simulate fixed:2ms` on a free port."""

    def __init__(self, folder: Path, log: Path, *arguments: str) -> None:
        self.port = free_port()
        self.log = log
        command = [
            sys.executable,
            "-m",
            "worker",
            "--model",
            str(folder),
            "--port",
            str(self.port),
            "--simulate",
            "fixed:2ms",
        ]
        with log.open("wb") as stream:
            self.child = subprocess.Popen([*command, *arguments], cwd=ROOT, stdout=stream, stderr=stream)

    async def channel(self) -> grpc.aio.Channel:
        """Waits until it serves."""
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}")
        health = health_pb2_grpc.HealthStub(channel)
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    if (await health.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)).status == SERVING:
                        return channel
                await asyncio.sleep(0.02)

    async def exit_code(self, timeout_s: float = 60.0) -> int:
        return await asyncio.to_thread(self.child.wait, timeout_s)


@pytest.fixture
def process(folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Process]:
    made = Process(folder, tmp_path / "log", *getattr(request, "param", ()))
    yield made
    if made.child.poll() is None:
        made.child.kill()
        made.child.wait()


async def test_sigterm_lets_sequences_finish(process: Process) -> None:
    async with await process.channel() as channel:
        router = RouterEnd(channel)
        await router.open()
        await router.submit(1, sequence(1, max_tokens=200))
        await router.read_until(lambda: len(router.tokens[1]) > 5)
        process.child.send_signal(signal.SIGTERM)
        assert await router.read_to_end() is grpc.StatusCode.OK
        assert "draining" in router.kinds
        assert router.tokens[1][3:] == REFERENCE.reference([1, 2, 3], 200, seed=1)
        assert await process.exit_code() == 0
    assert "Traceback" not in process.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("process", [("--drain-timeout", "0.3")], indirect=True)
async def test_drain_timeout_ends_running_requests(process: Process) -> None:
    async with await process.channel() as channel:
        router = RouterEnd(channel)
        await router.open()
        await router.submit(1, sequence(1, max_tokens=ENDLESS))
        await router.read_until(lambda: len(router.tokens[1]) > 5)
        process.child.send_signal(signal.SIGINT)
        assert await router.read_to_end() is grpc.StatusCode.OK
        # Else it would have come to its end.
        assert router.reasons() == {1: wpb.END_REASON_CANCELLED}
        assert await process.exit_code() == 0


@pytest.mark.slow
async def test_second_signal_ends_worker_at_once(process: Process) -> None:
    async with await process.channel() as channel:
        router = RouterEnd(channel)
        await router.open()
        await router.submit(1, sequence(1, max_tokens=ENDLESS))
        await router.read_until(lambda: len(router.tokens[1]) > 5)
        process.child.send_signal(signal.SIGTERM)
        await router.read_until(lambda: "draining" in router.kinds)
        process.child.send_signal(signal.SIGTERM)
        # A drain would end with 0.
        assert await process.exit_code() == 128 + signal.SIGTERM


def test_failed_worker_start_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "worker",
        "--simulate",
        "fixed:2ms",
        "--model",
        str(tmp_path / "nowhere"),
        "--port",
        "0",
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 2
    assert run.stdout == ""
    [line] = run.stderr.splitlines()
    assert line.startswith(f"error: {tmp_path / 'nowhere'} does not exist; give ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--kv-cache-memory", "lots"], "use for example 2GiB", marks=pytest.mark.slow),
        (["--block-size", "5"], "kv_cache_block_size is 5; valid: 1 or a multiple of 16"),
        pytest.param(["--port", "70000"], "70000 is not in the range", marks=pytest.mark.slow),
    ],
)
def test_bad_worker_option_is_one_line_and_exit_code_2(folder: Path, arguments: list[str], message: str) -> None:
    command = [sys.executable, "-m", "worker", "--simulate=fixed:2ms", "--model", str(folder), *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 2
    [line] = run.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_simulated_worker_imports_no_torch() -> None:
    code = "import sys, worker.cli.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=240, check=False).returncode == 0
