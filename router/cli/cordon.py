"""`fissile cordon`, `uncordon`, `drain` and `flush`: workers out of service and back, as with nodes of Kubernetes."""

from __future__ import annotations

import click
from fissile.admin.v1 import admin_pb2 as apb

from common.cli.core import output
from common.cli.core.errors import CommandError
from common.cli.core.options import argument, options
from common.rpc.durations import to_duration
from router.cli.connection import Admin, with_admin

_HEADINGS = ("WORKER", "BLOCKS", "")


@click.command()
@argument("worker")
@options("cordon")
@with_admin
def cordon(worker: str, evict: bool, admin: Admin) -> None:
    """Stop new work of all routers on WORKER; `fissile uncordon` undoes that.

    The worker keeps running, with its model, its cache and its connections. Running requests finish there, or, with
    --evict, move to workers that can continue them exactly. WORKER is a name in the first column of `fissile workers`.
    A restarted worker takes work again.
    """
    wanted = apb.CordonWorkerRequest(worker_id=worker, evict=evict)
    sequences = admin.ask(lambda stub: stub.CordonWorker, wanted).sequences
    click.echo(f"{worker} is cordoned; {_running(sequences)}")


@click.command()
@argument("worker")
@options("uncordon")
@with_admin
def uncordon(worker: str, admin: Admin) -> None:
    """Let the cordoned WORKER take new work again. A draining worker cannot be brought back: it ends."""
    admin.ask(lambda stub: stub.UncordonWorker, apb.UncordonWorkerRequest(worker_id=worker))
    click.echo(f"{worker} takes work")


@click.command()
@argument("worker")
@options("drain")
@with_admin
def drain(worker: str, deadline: float, admin: Admin) -> None:
    """Drain WORKER and shut it down, as SIGTERM does: no new work, running requests move or finish, exit code 0.

    Kubernetes and `fissile serve` start it again. To keep it, use `fissile cordon --evict`.
    """
    wanted = apb.DrainWorkerRequest(worker_id=worker, deadline=to_duration(deadline) if deadline else None)
    sequences = admin.ask(lambda stub: stub.DrainWorker, wanted).sequences
    click.echo(f"{worker} drains and then ends; {_running(sequences)}")


@click.command()
@argument("worker", required=False, default="")
@options("flush")
@with_admin
def flush(worker: str, admin: Admin, as_json: bool) -> None:
    """Drop the prefix cache of WORKER, or of all workers.

    Blocks of running sequences stay. Answers do not change, only their time to the first token. Exit code 1: a worker
    could not be reached.
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
    """Describes the number of sequences left on the worker, from all routers."""
    if not sequences:
        return "no sequence is left on it"
    return f"{sequences} sequence{'' if sequences == 1 else 's'} still on it, counted over all routers"
