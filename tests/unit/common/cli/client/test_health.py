"""`fissile health` against a real server: its output and exit code."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.cli.client.health import serving_status
from common.cli.core.errors import CommandError
from common.rpc.server import LIVENESS, READINESS, GrpcServer

ROOT = Path(__file__).resolve().parents[5]
SERVICE = "fissile.v1.InferenceService"
# Run as a program, because an installed `fissile` may belong to another checkout.
PROGRAM = "import sys; from common.cli.client.health import health; sys.exit(health(standalone_mode=False))"


@pytest.fixture
async def server() -> GrpcServer:
    return GrpcServer("127.0.0.1", 0, [SERVICE])


async def probe(*arguments: str, **environment: str) -> tuple[int, str]:
    """Exit code and output of the command in a separate process."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, *arguments,
        cwd=ROOT, env={**os.environ, "FISSILE_HEALTH_TIMEOUT": "60s", **environment}, stdout=subprocess.PIPE,
    )  # fmt: skip
    output, _ = await child.communicate()
    return child.returncode or 0, output.decode()


@pytest.mark.slow
async def test_exit_code_follows_health(server: GrpcServer) -> None:
    await server.start()
    try:
        waiting = await asyncio.gather(
            probe("--address", server.address),
            probe("--address", server.address, "--service", LIVENESS),
        )
        await server.set_serving(True)
        serving = await probe(FISSILE_ADDRESS=server.address, FISSILE_HEALTH_SERVICE=SERVICE)
    finally:
        await server.stop(0)
    assert list(waiting) == [
        (1, f"readiness at {server.address}: NOT_SERVING\n"),
        (0, f"liveness at {server.address}: SERVING\n"),
    ]
    assert serving == (0, f"{SERVICE} at {server.address}: SERVING\n")


async def test_every_service_name_is_known(server: GrpcServer) -> None:
    await server.start()
    try:
        for name in (LIVENESS, READINESS, SERVICE, ""):
            expected = "SERVING" if name == LIVENESS else "NOT_SERVING"
            assert await serving_status(server.address, name, 60.0) == expected
        with pytest.raises(CommandError, match=r"no health of a service 'nope'; try readiness or liveness") as unknown:
            await serving_status(server.address, "nope", 60.0)
    finally:
        await server.stop(0)
    assert unknown.value.exit_code == 1


async def test_unreachable_health_is_one_line_and_exit_code_1(server: GrpcServer) -> None:
    await server.start()
    await server.stop(0)
    with pytest.raises(CommandError, match=rf"no health from {server.address}: UNAVAILABLE") as refused:
        await serving_status(server.address, READINESS, 60.0)
    assert refused.value.exit_code == 1
