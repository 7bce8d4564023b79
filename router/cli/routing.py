"""`fissile routing` and `fissile reload`: show and change how a running router admits and places requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import click
from fissile.admin.v1 import admin_pb2 as apb
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask

from common.cli.core import output
from common.cli.core.errors import CommandError
from common.cli.core.modes import ModalCommand, Mode
from common.cli.core.options import options
from common.params.options.types import seconds
from common.rpc.durations import to_duration, to_seconds
from router.cli.connection import Admin, with_admin


def _duration(text: str) -> Duration:
    return to_duration(seconds(text))


def _milliseconds(duration: Duration) -> str:
    return f"{round(1000 * to_seconds(duration), 3):g}ms"


def _by_tenant(number: Callable[[str], float]) -> Callable[[str], dict[str, float]]:
    """Reads `TENANT=NUMBER,...`; a number alone is for all other tenants, an empty text has no entry."""

    def read(text: str) -> dict[str, float]:
        entries = (entry.rpartition("=") for entry in text.split(",") if entry)
        return {tenant: number(value) for tenant, _, value in entries}

    return read


def _classes_by_tenant(text: str) -> dict[str, str]:
    """Reads `TENANT=PRIORITY,...`; a priority alone is for all other tenants, an empty text has no entry."""
    entries = (entry.rpartition("=") for entry in text.split(",") if entry)
    return {tenant: name for tenant, _, name in entries}


def _entries(by_tenant: Mapping[str, float | str]) -> str:
    texts = {tenant: value if isinstance(value, str) else f"{value:g}" for tenant, value in by_tenant.items()}
    shown = (f"{tenant}={text}" if tenant else text for tenant, text in sorted(texts.items()))
    return ",".join(shown) or "-"


@dataclass(frozen=True, slots=True)
class _Option:
    """A reloadable option of the router: its field of Routing, and how its text is read and shown."""

    field: str
    read: Callable[[str], Any]
    show: Callable[[Any], str]
    example: str


OPTIONS: Final = {
    "placement": _Option("placement", str, str, "least_loaded"),
    "delay-factor": _Option("delay_factor", float, "{:g}".format, "0.5"),
    "max-hold": _Option("max_hold", _duration, _milliseconds, "100ms"),
    "queue-size": _Option("queue_size", int, str, "1000"),
    "tenant-weight": _Option("tenant_weight", _by_tenant(float), _entries, "gold=4,trial=0.5"),
    "tenant-concurrency": _Option("tenant_concurrency", _by_tenant(int), _entries, "32,trial=2"),
    "tenant-max-priority": _Option("tenant_max_priority", _classes_by_tenant, _entries, "normal,gold=high"),
}
"""Options by name, without the leading dashes."""


def changes(texts: tuple[str, ...]) -> apb.SetRoutingRequest:
    """The request for changes `NAME=VALUE`, where NAME is an option of the router.

    Raises:
        CommandError: a change has an unknown name or a bad value.
    """
    request = apb.SetRoutingRequest(update_mask=FieldMask())
    for text in texts:
        name, equals, value = text.partition("=")
        if name not in OPTIONS or not equals:
            raise CommandError(f"{text!r} is not a setting; use NAME=VALUE with one of {', '.join(OPTIONS)}")
        known = OPTIONS[name]
        try:
            request.routing.MergeFrom(apb.Routing(**{known.field: known.read(value)}))
        except (ValueError, TypeError):
            raise CommandError(f"{value!r} is not a value of {name}; for example {name}={known.example}") from None
        request.update_mask.paths.append(known.field)
    return request


def as_table(routing: apb.Routing, version: int) -> str:
    """The routing as a table of options, and its version."""
    rows = [(name, known.show(getattr(routing, known.field))) for name, known in OPTIONS.items()]
    return output.aligned([*rows, ("version", str(version))])


_MODES: Final = (
    Mode(
        "without NAME=VALUE",
        lambda given: not given["changed"],
        "nothing is changed",
        unused=frozenset({"if_version"}),
    ),
)


@click.command(cls=ModalCommand, modes=_MODES)
@click.argument("changed", nargs=-1, metavar="[NAME=VALUE]...")
@options("routing")
@with_admin
def routing(changed: tuple[str, ...], if_version: int, admin: Admin, as_json: bool) -> None:
    """Show how a running router admits and places requests; with NAME=VALUE, change it first.

    Names and values are those of `fissile router`, without dashes:

    \b
      fissile routing placement=least_loaded delay-factor=0.5 max-hold=100ms
      fissile routing tenant-weight=gold=4,trial=0.5 tenant-concurrency=32,trial=2
      fissile routing tenant-max-priority=normal,gold=high

    The changes of one command are made together or not at all. They last until the router ends or reads its
    configuration again (`fissile reload`, SIGHUP). The version counts all changes since the router's start.
    """
    shown: apb.SetRoutingResponse | apb.GetRoutingResponse
    if changed:
        request = changes(changed)
        request.if_version = if_version
        shown = admin.ask(lambda stub: stub.SetRouting, request)
    else:
        shown = admin.ask(lambda stub: stub.GetRouting, apb.GetRoutingRequest())
    if as_json:
        click.echo(json.dumps(output.as_fields(shown), ensure_ascii=False))
    else:
        click.echo(as_table(shown.routing, shown.version))


@click.command()
@options("reload")
@with_admin
def reload(admin: Admin, as_json: bool) -> None:
    """Make a running router read its configuration again, as SIGHUP does. A reload is all or nothing.

    Settings that can change while it runs: worker, placement, delay-factor, max-hold, queue-size, tenant-weight,
    tenant-concurrency, tenant-max-priority and log-level. The answer names other options that have changed and need a
    restart, and settings of `fissile routing` that the reload has overridden.
    """
    done = admin.ask(lambda stub: stub.Reload, apb.ReloadRequest())
    if as_json:
        click.echo(json.dumps(output.as_fields(done), ensure_ascii=False))
        return
    click.echo(f"version {done.version}; changed: {', '.join(done.changed) or 'nothing'}")
    if done.undone:
        click.echo(f"undone, because `fissile routing` had set it: {', '.join(done.undone)}", err=True)
    if done.needs_restart:
        click.echo(f"needs a restart of the router: {', '.join(done.needs_restart)}", err=True)
