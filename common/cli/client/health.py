"""`fissile health`: whether a router or worker serves, as an exit code. For probes outside Kubernetes (HEALTHCHECK)."""

from __future__ import annotations

import asyncio
from typing import Final

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.cli.core.client import Credentials, open_channel
from common.cli.core.errors import CommandError
from common.cli.core.options import options
from common.cli.core.tls_options import with_tls
from common.rpc.tls import ClientTls

_FAILED: Final = 1


async def serving_status(address: str, service: str, timeout_s: float, tls: ClientTls | None = None) -> str:
    """Asks `grpc.health.v1` at `address` for the status of a service: SERVING or NOT_SERVING.

    Raises:
        CommandError: nobody answers there, or the service is unknown there (exit code 1).
    """
    async with open_channel(address, Credentials(tls)) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise _no_answer(error, address, service) from error
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def _no_answer(error: grpc.aio.AioRpcError, address: str, service: str) -> CommandError:
    if error.code() is grpc.StatusCode.NOT_FOUND:
        return CommandError(f"{address} has no health of a service {service!r}; try readiness or liveness", _FAILED)
    reason = (error.details() or "").rpartition(": ")[2]
    return CommandError(f"no health from {address}: {error.code().name} ({reason})", _FAILED)


@click.command()
@options("health")
@with_tls
def health(address: str, tls: ClientTls | None, service: str, timeout: float) -> int:
    """Check the health of a router or worker.

    Exit code 0 if it is SERVING, else 1: NOT_SERVING, no answer, or an unknown service. So it fits HEALTHCHECK of
    container engines, systemd and scripts. --address may be that of a worker.
    """
    status = asyncio.run(serving_status(address, service, timeout, tls))
    click.echo(f"{service or 'server'} at {address}: {status}")
    return 0 if status == "SERVING" else _FAILED
