"""`fissile requests`, `fissile cancel` and `fissile info`: the calls in flight of a router, and the router itself."""

from __future__ import annotations

from collections.abc import Sequence

import click
from fissile.admin.v1 import admin_pb2 as apb

from common.cli.core import output
from common.cli.core.options import argument, options
from common.rpc.durations import to_seconds
from router.cli.connection import Admin, with_admin

_HEADINGS = ("REQUEST", "TENANT", "METHOD", "MODEL", "STATE", "AGE", "PROMPT", "OUTPUT", "WORKER", "ATTEMPTS")
_PAGE = 1000


def as_table(requests: Sequence[apb.InFlightRequest]) -> str:
    """The requests as aligned columns with headings; one line if there are none."""
    return output.aligned([_HEADINGS, *map(_row, requests)]) if requests else "no request is in flight"


def _row(request: apb.InFlightRequest) -> tuple[str, ...]:
    state = apb.RequestState.Name(request.state).removeprefix("REQUEST_STATE_").lower()
    numbers = (request.prompt_tokens, request.output_tokens)
    return (
        request.request_id,
        request.tenant or "-",
        request.method,
        request.model or "-",
        state,
        f"{to_seconds(request.age):.1f}s",
        *map(str, numbers),
        request.worker_id or "-",
        str(request.attempts),
    )


def list_all(admin: Admin, tenant: str) -> list[apb.InFlightRequest]:
    """All requests in flight, page after page.

    Raises:
        CommandError: a call failed.
    """
    found: list[apb.InFlightRequest] = []
    wanted = apb.ListRequestsRequest(tenant=tenant, page_size=_PAGE)
    while True:
        page: apb.ListRequestsResponse = admin.ask(lambda stub: stub.ListRequests, wanted)
        found += page.requests
        if not page.next_page_token:
            return found
        wanted.page_token = page.next_page_token


@click.command()
@options("requests")
@with_admin
def requests(tenant: str, admin: Admin, as_json: bool) -> None:
    """List the requests in flight at a router, oldest first.

    STATE is preparing (its prompt is made), queued (waits in the router), submitted (is at a worker, without a token),
    or streaming. Neither prompts nor answers are shown.
    """
    found = list_all(admin, tenant)
    click.echo(output.as_json(found) if as_json else as_table(found))


@click.command()
@argument("request_id")
@options("cancel")
@with_admin
def cancel(request_id: str, tenant: str, admin: Admin) -> None:
    """End a request in flight; its client gets CANCELLED with the reason CANCELLED_BY_OPERATOR."""
    admin.ask(lambda stub: stub.CancelRequest, apb.CancelRequestRequest(request_id=request_id, tenant=tenant))
    click.echo(f"{request_id} ends")


@click.command()
@options("info")
@with_admin
def info(admin: Admin, as_json: bool) -> None:
    """Show version, start and options of a running router."""
    found = admin.ask(lambda stub: stub.GetServerInfo, apb.GetServerInfoRequest())
    if as_json:
        click.echo(output.as_json([found]))
        return
    rows = [
        ("version", found.version),
        ("router", found.router_id),
        ("address", found.address),
        ("started", found.start_time.ToDatetime().isoformat(" ", "seconds") + " UTC"),
        ("uptime", f"{to_seconds(found.uptime):.0f}s"),
        ("in flight", str(found.in_flight)),
        ("configuration", f"version {found.config_version}"),
        *((f"--{name}", value or "-") for name, value in sorted(found.options.items())),
    ]
    click.echo(output.aligned(rows))
