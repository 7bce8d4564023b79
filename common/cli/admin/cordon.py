"""`fissile cordon`, `uncordon`, `drain` and `flush`: workers out of service and back, as with nodes of Kubernetes."""

from __future__ import annotations

import click
from fissile.admin.v1 import admin_pb2 as apb

from common.cli.admin.connection import Admin, admin_options
from common.cli.core import output
from common.cli.core.errors import CommandError
from common.cli.core.options import Duration, json_option, option

_HEADINGS = ("WORKER", "BLOCKS", "")


@click.command()
@click.argument("worker")
@option(
    "--evict/--no-evict", envvar="FISSILE_EVICT", default=False,
    help="Also move what runs there to other workers of its numerics class; clients do not notice.",
)  # fmt: skip
@admin_options
def cordon(worker: str, evict: bool, admin: Admin) -> None:
    """Let WORKER take no new work, of any router; `fissile uncordon` takes that back.

    The worker goes on running and keeps its model, its cache and its connections. What runs there finishes there, or
    moves with --evict, where another worker can continue it exactly. WORKER is a name in the first column of `fissile
    workers`. A worker that is started anew takes work again.
    """
    wanted = apb.CordonWorkerRequest(worker_id=worker, evict=evict)
    sequences = admin.ask(lambda stub: stub.CordonWorker, wanted).sequences
    click.echo(f"{worker} is cordoned; {_running(sequences)}")


@click.command()
@click.argument("worker")
@admin_options
def uncordon(worker: str, admin: Admin) -> None:
    """Let WORKER take work again that was cordoned. One that drains can not be brought back: it ends."""
    admin.ask(lambda stub: stub.UncordonWorker, apb.UncordonWorkerRequest(worker_id=worker))
    click.echo(f"{worker} takes work")


@click.command()
@click.argument("worker")
@option(
    "--deadline", envvar="FISSILE_DRAIN_DEADLINE", default="0s", type=Duration(0, 86_400),
    help="Longest time for what no other worker can take; 0s: the worker's own --drain-timeout.",
)  # fmt: skip
@admin_options
def drain(worker: str, deadline: float, admin: Admin) -> None:
    """Let WORKER end in good order, as SIGTERM does: no new work, what runs moves or finishes, exit code 0.

    Who started it may start it again: Kubernetes does, and `fissile serve`. To keep it, use `fissile cordon --evict`.
    """
    wanted = apb.DrainWorkerRequest(worker_id=worker, deadline_ms=round(1000 * deadline))
    sequences = admin.ask(lambda stub: stub.DrainWorker, wanted).sequences
    click.echo(f"{worker} drains; {_running(sequences)}")


@click.command()
@click.argument("worker", required=False, default="")
@admin_options
@json_option
def flush(worker: str, admin: Admin, as_json: bool) -> None:
    """Drop the prefix cache of WORKER, or of all workers.

    Blocks that running sequences hold stay. Answers do not change by it, only their time to the first token. Exit
    code 1: a worker could not be asked.
    """
    caches = admin.ask(lambda stub: stub.FlushCaches, apb.FlushCachesRequest(worker_id=worker)).caches
    if as_json:
        click.echo(output.as_json(caches))
    elif caches:
        click.echo(output.aligned([_HEADINGS, *((c.worker_id, str(c.blocks), c.error) for c in caches)]))
    failed = [cache.worker_id for cache in caches if cache.error]
    if failed:
        raise CommandError(f"not flushed: {', '.join(failed)}", 1)
    if not caches:
        raise CommandError("the router is connected to no worker", 3)


def _running(sequences: int) -> str:
    return f"{sequences or 'no'} sequence{'' if sequences == 1 else 's'} of all routers run or wait there"
