"""`fissile workers`: lists the workers of a running router with their state and load, once or repeatedly."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import click
import grpc
from fissile.admin.v1 import admin_pb2 as apb
from fissile.v1 import inference_pb2 as pb

from common.cli.core import output
from common.cli.core.errors import CommandError
from common.cli.core.modes import ModalCommand, Mode
from common.cli.core.options import options
from common.limits import HEARTBEAT_S, MISSED_HEARTBEATS
from common.rpc.durations import to_duration, to_seconds
from router.cli.connection import Admin, with_admin

if TYPE_CHECKING:
    from fissile.admin.v1.admin_pb2_grpc import AdminServiceAsyncStub

_LOAD_HEADINGS = ("RUNNING", "QUEUED", "DECODING", "WAITING", "TOKENS", "TOKENS/S")
_HEADINGS = ("WORKER", "ADDRESS", "MODEL", "STATE", *_LOAD_HEADINGS, "KERNELS")
# Columns of workers that speculate.
_DRAFT_HEADINGS = ("DRAFTS", "ACCEPTED")
_SILENT_S = MISSED_HEARTBEATS * HEARTBEAT_S
# Clears a terminal and its scrollback, and moves to the first line.
_CLEAR = "\x1b[H\x1b[2J\x1b[3J"


def as_table(workers: Sequence[apb.Worker]) -> str:
    """The workers as aligned columns with headings.

    Raises:
        CommandError: there are none (exit code 3).
    """
    if not workers:
        raise CommandError("the router has no worker", 3)
    rows = [_HEADINGS, *map(_row, workers)]
    if any(worker.draft_method for worker in workers):
        drafts = [_DRAFT_HEADINGS, *map(_drafts, workers)]
        rows = [row + further for row, further in zip(rows, drafts, strict=True)]
    return "\n".join([output.aligned(rows), *map(_trouble, filter(_in_trouble, workers))])


def load_as_text(load: apb.WatchLoadResponse) -> str:
    """The workers and the queues of the router as lines."""
    queues = ", ".join(
        f"{_class(queue.priority)} {queue.waiting}"
        + (f" (oldest {to_seconds(queue.oldest_age):.3g} s)" if queue.waiting else "")
        for queue in load.queues
    )
    table = as_table(load.workers) if load.workers else "no workers"
    return f"{table}\n{load.in_flight} requests in flight; waiting in the router: {queues}"


def _row(worker: apb.Worker) -> tuple[str, ...]:
    numbers = (worker.running, worker.queued, worker.decoding_seqs, worker.waiting_seqs, worker.outstanding_tokens)
    speed = f"{worker.prefill_rate:.0f}" if worker.prefill_rate else "-"
    names = (worker.worker_id or "-", worker.address, worker.model or "-", state_of(worker))
    return (*names, *map(str, numbers), speed, worker.kernels or "-")


def _drafts(worker: apb.Worker) -> tuple[str, str]:
    if not worker.draft_method:
        return "-", "-"
    asked = f"{worker.draft_method} {worker.num_speculative_tokens}"
    verified = sum(one.verified for one in worker.drafts)
    if not verified:
        return asked, "-"
    accepted = sum(one.accepted for one in worker.drafts)
    by_position = " ".join(f"{one.accepted / one.verified:.0%}" for one in worker.drafts)
    return asked, f"{accepted / verified:.0%} ({by_position})"


def state_of(worker: apb.Worker) -> str:
    """A worker's state in lower case; `silent` if it serves and its last report is old."""
    if worker.state == apb.WORKER_STATE_SERVING and to_seconds(worker.report_age) > _SILENT_S:
        return "silent"
    return apb.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_").lower()


def _class(priority: pb.Priority.ValueType) -> str:
    return pb.Priority.Name(priority).removeprefix("PRIORITY_").lower()


def _in_trouble(worker: apb.Worker) -> bool:
    return bool(worker.last_error)


def _trouble(worker: apb.Worker) -> str:
    return f"{worker.address}: {worker.last_error}"


async def watch(admin: Admin, interval_s: float, count: int, show: Callable[[apb.WatchLoadResponse], None]) -> None:
    """Shows the load `count` times, 0 for ever.

    Raises:
        CommandError: the call failed.
    """

    async def calls(stub: AdminServiceAsyncStub) -> None:
        wanted = apb.WatchLoadRequest(interval=to_duration(interval_s), count=count)
        call = stub.WatchLoad(wanted, metadata=admin.credentials.metadata)
        try:
            while isinstance(load := await call.read(), apb.WatchLoadResponse):
                show(load)
            # The stream also ends if it failed.
            if await call.code() is not grpc.StatusCode.OK:
                raise grpc.aio.AioRpcError(
                    await call.code(),
                    await call.initial_metadata(),
                    await call.trailing_metadata(),
                    await call.details(),
                )
        finally:
            call.cancel()

    await admin.use(calls)


_MODES: Final = (
    Mode(
        "without --watch",
        lambda given: not given["watching"],
        "the workers are listed once",
        unused=frozenset({"interval", "count"}),
    ),
    Mode(
        "with --watch",
        lambda given: given["watching"],
        "it has no deadline",
        unused=frozenset({"timeout"}),
    ),
)


@click.command(cls=ModalCommand, modes=_MODES)
@options("workers")
@with_admin
def workers(admin: Admin, watching: bool, interval: float, count: int, as_json: bool) -> None:
    """List the workers of a running router.

    RUNNING and QUEUED count requests of this router, DECODING and WAITING the sequences of all routers at the worker;
    TOKENS are the prompt tokens still to compute, TOKENS/S is the prefill speed. KERNELS are those that compute: torch
    takes several times as long as cpu, and the log of the worker says why it serves. Where workers speculate, DRAFTS
    says how, and how many tokens ahead; ACCEPTED which part of the drafts for requests of this router was right, of all
    and by their position behind a token.

    STATE is serving; silent: without a report for a while; cordoned: `fissile uncordon` brings it back; draining: about
    to end; leaving: no longer in the router's list; unconnected: the line below says why.

    --watch also shows the queues of the router; with --json it prints one object per line.
    """
    if not watching:
        listed: apb.ListWorkersResponse = admin.ask(lambda stub: stub.ListWorkers, apb.ListWorkersRequest())
        found = listed.workers
        click.echo(output.as_json(found) if as_json else as_table(found))
        return
    clear = _CLEAR if sys.stdout.isatty() else ""
    looks = itertools.count(1)

    def show(load: apb.WatchLoadResponse) -> None:
        if as_json:
            click.echo(json.dumps(output.as_fields(load), ensure_ascii=False))
        else:
            click.echo(clear + ("\n" if next(looks) > 1 and not clear else "") + load_as_text(load))

    asyncio.run(watch(admin, interval, count, show))
