"""`fissile top`: workers, tenants and requests of a running router in a terminal, refreshed at an interval."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import click
import grpc
from fissile.admin.v1 import admin_pb2 as apb
from fissile.admin.v1.admin_pb2_grpc import AdminServiceStub
from prompt_toolkit.application import Application
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.layout import FormattedTextControl, Layout, Window
from prompt_toolkit.styles import Style

from common.cli.core.client import call_failed, open_channel
from common.cli.core.errors import CommandError
from common.cli.core.options import options
from router.cli.connection import REMEDY, Admin, with_admin
from router.cli.top_frame import Snapshot, View, frame, press

if TYPE_CHECKING:
    # In the type stubs only: at run time the one stub class serves both kinds of channel.
    from fissile.admin.v1.admin_pb2_grpc import AdminServiceAsyncStub

# Rates are means over the snapshots of this time.
_WINDOW_S: Final = 10.0
_MOST_REQUESTS: Final = 1000
# A router that returns is seen within a second; gRPC's own pause grows to two minutes.
_CHANNEL_OPTIONS: Final = (("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 1000))
_KEYS: Final = ("w", "t", "r", "s", "S", "up", "down", "enter", "escape")
_STYLE: Final = Style.from_dict({"heading": "underline", "keys": "reverse", "trouble": "ansired bold"})


class RouterProbe:
    """Takes snapshots of one router over one channel, which reconnects by itself.

    Args:
        admin: how to call its AdminService; `timeout_s` bounds each snapshot.
        stub: of its AdminService.
        clock: monotonic seconds.
    """

    def __init__(self, admin: Admin, stub: AdminServiceAsyncStub, clock: Callable[[], float] = time.monotonic) -> None:
        self._admin = admin
        self._stub = stub
        self._clock = clock

    async def snapshot(self) -> Snapshot:
        """The router's state now.

        Raises:
            CommandError: a call failed.
        """
        stub, timeout_s, metadata = self._stub, self._admin.timeout_s, self._admin.credentials.metadata
        try:
            load, page, routing, info = await asyncio.gather(
                self._load(),
                stub.ListRequests(
                    apb.ListRequestsRequest(page_size=_MOST_REQUESTS), timeout=timeout_s, metadata=metadata
                ),
                stub.GetRouting(apb.GetRoutingRequest(), timeout=timeout_s, metadata=metadata),
                stub.GetServerInfo(apb.GetServerInfoRequest(), timeout=timeout_s, metadata=metadata),
            )
        except grpc.aio.AioRpcError as error:
            raise call_failed(error, self._admin.address, remedy=REMEDY) from error
        return Snapshot(self._clock(), load, page.requests, bool(page.next_page_token), routing.routing, info)

    async def _load(self) -> apb.WatchLoadResponse:
        watched = self._stub.WatchLoad(
            apb.WatchLoadRequest(count=1), timeout=self._admin.timeout_s, metadata=self._admin.credentials.metadata
        )
        async for load in watched:
            return load
        return apb.WatchLoadResponse()


class TopScreen:
    """The full-screen program: keys change the view, and each snapshot replaces the frame.

    Args:
        probe: takes the snapshots.
        first: the first snapshot.
        interval_s: time between two snapshots.
    """

    def __init__(self, probe: RouterProbe, first: Snapshot, interval_s: float) -> None:
        self._probe = probe
        self._interval_s = interval_s
        self._snapshots = deque([first])
        self._view = View()
        self._trouble = ""
        self._app: Application[None] = Application(
            layout=Layout(Window(FormattedTextControl(self._text, focusable=True, show_cursor=False))),
            key_bindings=self._bindings(),
            style=_STYLE,
            full_screen=True,
        )
        # A lone Escape is a key of its own after this time.
        self._app.ttimeoutlen = 0.05

    async def show(self) -> None:
        """Runs until the user ends it."""
        loop = asyncio.get_running_loop()
        refreshing = asyncio.create_task(self._refresh())
        loop.add_signal_handler(signal.SIGTERM, self._exit)
        try:
            await self._app.run_async()
        finally:
            loop.remove_signal_handler(signal.SIGTERM)
            refreshing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await refreshing

    def _exit(self) -> None:
        if self._app.is_running and not self._app.is_done:
            self._app.exit()

    def _bindings(self) -> KeyBindings:
        bindings = KeyBindings()

        def change(event: KeyPressEvent) -> None:
            key = event.key_sequence[0].key
            named = {"c-m": "enter"}.get(key, key)
            self._view = press(named, self._view, self._snapshots[-1], self._snapshots[0])

        for key in _KEYS:
            bindings.add(key)(change)
        for key in ("q", "c-c"):
            bindings.add(key)(lambda _: self._exit())
        return bindings

    def _text(self) -> StyleAndTextTuples:
        size = self._app.output.get_size()
        earlier = self._snapshots[0] if len(self._snapshots) > 1 else None
        lines = frame(
            self._snapshots[-1],
            earlier,
            self._view,
            time.monotonic(),
            columns=size.columns,
            rows=size.rows,
            trouble=self._trouble,
        )
        text: StyleAndTextTuples = []
        for line in lines:
            text += [(line.style, line.text), ("", "\n")]
        return text[:-1]

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                latest = await self._probe.snapshot()
            except CommandError as error:
                self._trouble = str(error)
            else:
                self._trouble = ""
                self._snapshots.append(latest)
                while len(self._snapshots) > 2 and latest.at - self._snapshots[1].at >= _WINDOW_S:
                    self._snapshots.popleft()
            self._app.invalidate()


async def _run(admin: Admin, interval_s: float, *, once: bool) -> None:
    async with open_channel(admin.address, admin.credentials, _CHANNEL_OPTIONS) as channel:
        probe = RouterProbe(admin, AdminServiceStub(channel))
        first = await probe.snapshot()
        if not once:
            await TopScreen(probe, first, interval_s).show()
            return
        await asyncio.sleep(interval_s)
        latest = await probe.snapshot()
        columns = shutil.get_terminal_size().columns
        for line in frame(latest, first, View(), time.monotonic(), columns=columns):
            click.echo(line.text)


@click.command()
@options("top")
@with_admin
def top(admin: Admin, interval: float, once: bool) -> None:
    """Watch workers, tenants and requests of a running router in a terminal.

    RUN are sequences of all routers that decode at a worker, WAIT those that wait there or in this router for it. GATE
    is held while the delay gate keeps requests back. KV is the part of its KV blocks in use. TOK/S, TTFT and TPOT are
    means of this router's answers over the last ten seconds. A value in parentheses is the mean since the router's
    start, because no answer began or ended in that time.

    \b
    q, Ctrl-C   quit            s    sort by the next column
    w, t, r     choose a table  S    reverse the order
    up, down    select a row    enter, esc   look into a row, and back
    """
    if not once and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise CommandError("`fissile top` needs a terminal; with --once it prints one frame as text")
    asyncio.run(_run(admin, interval, once=once))
