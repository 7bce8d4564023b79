"""`fissile workers`: the workers of a running router, their state and load."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import click
import grpc
from fissile.admin.v1 import admin_pb2 as apb
from fissile.admin.v1.admin_pb2_grpc import AdminServiceStub

from common.cli import listing
from common.cli.client import NO_CREDENTIALS, Credentials, call_failed, open_channel
from common.cli.failure import CommandError
from common.cli.options import json_option, option, timeout_option
from common.cli.security import with_credentials
from common.limits import HEARTBEAT_S, MISSED_HEARTBEATS

DEFAULT_ADMIN = "127.0.0.1:50052"
_REMEDY = "AdminService needs `fissile router --admin-port`; for `fissile serve` set FISSILE_ADMIN_PORT"
_HEADINGS = ("WORKER", "ADDRESS", "MODEL", "STATE", "RUNNING", "QUEUED", "DECODING", "WAITING", "TOKENS", "TOKENS/S")
_SILENT_MS = 1000 * MISSED_HEARTBEATS * HEARTBEAT_S


async def list_workers(
    address: str, timeout_s: float, credentials: Credentials = NO_CREDENTIALS
) -> Sequence[apb.Worker]:
    """The workers of the router whose AdminService is at `address`.

    Raises:
        CommandError: the call failed.
    """
    async with open_channel(address, credentials) as channel:
        stub = AdminServiceStub(channel)
        try:
            asked = apb.ListWorkersRequest()
            return (await stub.ListWorkers(asked, timeout=timeout_s, metadata=credentials.metadata)).workers
        except grpc.aio.AioRpcError as error:
            raise call_failed(error, address, remedy=_REMEDY) from error


def as_table(workers: Sequence[apb.Worker]) -> str:
    """The workers as aligned columns with headings.

    Raises:
        CommandError: there are none (exit code 3).
    """
    if not workers:
        raise CommandError("the router is connected to no worker", 3)
    return listing.aligned([_HEADINGS, *map(_row, workers)])


def _row(worker: apb.Worker) -> tuple[str, ...]:
    numbers = (worker.running, worker.queued, worker.decoding_seqs, worker.waiting_seqs, worker.outstanding_tokens)
    speed = f"{worker.prefill_rate:.0f}" if worker.prefill_rate else "-"
    return (worker.worker_id, worker.address, worker.model, _state(worker), *map(str, numbers), speed)


def _state(worker: apb.Worker) -> str:
    if worker.draining:
        return "draining"
    return "silent" if worker.report_age_ms > _SILENT_MS else "serving"


@click.command()
@option(
    "--admin-address", envvar="FISSILE_ADMIN_ADDRESS", default=DEFAULT_ADMIN, metavar="HOST:PORT",
    help="AdminService of the router: the port that it was given by --admin-port.",
)  # fmt: skip
@with_credentials
@timeout_option
@json_option
def workers(admin_address: str, credentials: Credentials, timeout: float, as_json: bool) -> None:
    """List the workers of a running router.

    RUNNING and QUEUED count requests of this router, DECODING and WAITING sequences of all routers at the worker;
    TOKENS are prompt tokens still to compute, TOKENS/S is the speed of prefill.
    """
    found = asyncio.run(list_workers(admin_address, timeout, credentials))
    click.echo(listing.as_json(found) if as_json else as_table(found))
