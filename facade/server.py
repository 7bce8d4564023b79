"""`fissile http`, the process of the facade: sockets, TLS, bounds of connections, signals and the drain."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import math
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import click
import h11
import structlog
import uvicorn
import uvloop
from fissile.client import AsyncClient
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from common.cli.core.config_file import ConfigurableCommand, config_option
from common.cli.core.errors import CommandError
from common.cli.core.options import options as options_of_command
from common.limits import (
    CONNECTION_IDLE_S,
    DRAIN_PROPAGATION_S,
    HANDSHAKE_TIMEOUT_S,
    MAX_HTTP_CONNECTIONS,
    MAX_METADATA_BYTES,
    MAX_SMALL_CHUNKS,
    ROUTER_ENDING_S,
    SLOW_CLIENT_TIMEOUT_S,
    SMALL_CHUNK_BYTES,
)
from common.rpc.descriptors import max_connections, raise_descriptor_limit
from common.rpc.tls import TlsError, is_loopback
from common.telemetry.logs import setup_logging
from common.telemetry.output import guard_standard_streams
from facade.app import FacadeApp
from facade.fleet_metrics import FleetMetrics
from facade.http.runner import AnswerRunner
from facade.options import FacadeOptions

log = structlog.get_logger(__name__)

_BAD_REQUEST: Final = (
    b'{"error":{"message":"the request is not valid HTTP, or its headers are too large",'
    b'"type":"invalid_request_error","param":null,"code":"malformed_request"}}'
)


class _BoundedParser(h11.Connection):
    """Parser that refuses a body of many small chunks: each takes 20 us, and the event loop waits."""

    _num_small = 0

    def next_event(self) -> Any:
        """As h11's.

        Raises:
            RemoteProtocolError: the bytes are no HTTP, or the body has more than MAX_SMALL_CHUNKS small chunks.
        """
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_small = 0
        elif isinstance(event, h11.Data) and event.chunk_end and len(event.data) < SMALL_CHUNK_BYTES:
            self._num_small += 1
            if self._num_small > MAX_SMALL_CHUNKS:
                raise h11.RemoteProtocolError("too many small chunks")
        return event


class HttpConnection(H11Protocol):
    """A connection with bounds.

    Its first request arrives in time, heads and chunks cost little, its client reads, and there is a limit of
    connections.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.conn = _BoundedParser(h11.SERVER, MAX_METADATA_BYTES)
        self._reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes the connection; at the limit an idle one is closed for it, or it is refused."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, "connection": self}
        self._wait_for_request()
        if len(self.connections) > min(MAX_HTTP_CONNECTIONS, max_connections()):
            idle = (each for each in self.connections if isinstance(each, HttpConnection) and each.is_idle)
            # One that has sent nothing yet ends before others.
            min(idle, key=HttpConnection.closes_at, default=self).abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends what the connection waits for."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        if self._reading is not None:
            self._reading.cancel()

    def closes_at(self) -> float:
        """Time of the event loop at which the connection ends if nothing arrives."""
        return math.inf if self.timeout_keep_alive_task is None else self.timeout_keep_alive_task.when()

    def data_received(self, data: bytes) -> None:
        """Takes bytes; headers that arrive slowly do not extend their time."""
        # The parser bounds the bytes of a head that is not whole, so it gets no more than that at a time.
        for start in range(0, len(data), MAX_METADATA_BYTES):
            if not self.transport.is_closing():
                self._receive(data[start : start + MAX_METADATA_BYTES])

    def on_response_complete(self) -> None:
        """Waits for the next request, and for the client to read this response."""
        super().on_response_complete()
        self._check_reading(math.inf)

    def _check_reading(self, unsent_before: float) -> None:
        """Ends a connection whose client has read nothing for SLOW_CLIENT_TIMEOUT_S."""
        if self._reading is not None:
            self._reading.cancel()
        unsent = self.transport.get_write_buffer_size()
        if unsent >= unsent_before:
            self.abort()
        elif unsent:
            self._reading = self.loop.call_later(SLOW_CLIENT_TIMEOUT_S, self._check_reading, unsent)

    def _receive(self, data: bytes) -> None:
        timer, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        super().data_received(data)
        if timer is None:
            return
        if self.is_idle and self.timeout_keep_alive_task is None and not timer.cancelled():
            self.timeout_keep_alive_task = timer
        else:
            timer.cancel()

    @property
    def is_idle(self) -> bool:
        """True if no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_paused(self) -> bool:
        """True if a send waits until the client has read."""
        return self.flow.write_paused

    def _wait_for_request(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(HANDSHAKE_TIMEOUT_S, self.timeout_keep_alive_handler)

    def abort(self) -> None:
        """Closes the connection without sending what is left."""
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Refuses bytes that are not an HTTP request: status 400, with a JSON body."""
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=_BAD_REQUEST),
            h11.EndOfMessage(),
        ):
            with contextlib.suppress(h11.LocalProtocolError):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers, and with a bound of the time for TLS to begin."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens at `sockets`."""
        await super().startup([])
        state = {"server_state": self.server_state, "app_state": self.lifespan.state}
        made: Callable[[], HttpConnection] = functools.partial(HttpConnection, config=self.config, **state)
        loop, tls = asyncio.get_running_loop(), self.config.ssl
        timeout_s = None if tls is None else HANDSHAKE_TIMEOUT_S
        for each in sockets or []:
            listening = loop.create_server(
                made, sock=each, ssl=tls, ssl_handshake_timeout=timeout_s, backlog=self.config.backlog
            )
            self.servers.append(await listening)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves the signals to `run_facade`."""
        yield


class Facade:
    """One facade in this process.

    Args:
        options: of its start.

    Attributes:
        address: HOST:PORT that it listens on, once it has started.
        runner: answers requests for generation.

    Raises:
        CommandError: an option cannot work.
    """

    def __init__(self, options: FacadeOptions) -> None:
        self._options = options
        try:
            self._client = _client(options)
        except (ValueError, OSError) as error:
            raise CommandError(str(error)) from None
        self.runner = AnswerRunner(self._client, options.api_key)
        metrics = FleetMetrics(options.router_metrics, options.router_tls) if options.router_metrics else None
        self.app = FacadeApp(self._client, self.runner, options.timeout_s, options.origins, metrics)
        self.address = ""
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listens.

        Raises:
            CommandError: the address is taken, or the certificate cannot be used.
        """
        listener = _listen(self._options.host, self._options.port)
        host, port = listener.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        config = uvicorn.Config(**_settings(self.app.asgi()))
        config.load()
        try:
            config.ssl = None if self._options.tls is None else self._options.tls.ssl_context()
        except TlsError as error:
            raise CommandError(str(error)) from None
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve([listener]), name="http")
        while not self._server.started:
            await asyncio.sleep(0)
            if self._serving.done():
                self._serving.result()
        log.info("http listening", address=self.address, routers=list(self._options.routers))
        self._warn_of_plain_text()

    def _warn_of_plain_text(self) -> None:
        readable = "anybody on the way can read prompts, answers and keys"
        if self._options.tls is None and not is_loopback(self._options.host):
            log.warning(f"PLAIN TEXT outside loopback: {readable}; use --tls-cert", address=self.address)
        if not self._options.connection and not all(map(is_loopback, self._options.routers)):
            log.warning(f"PLAIN TEXT to routers outside loopback: {readable}; use --router-ca")

    async def drain(self) -> None:
        """Accepts no new requests, lets streams finish within the drain timeout, then stops."""
        timeout_s = self._options.drain_timeout_s
        log.info("draining", in_flight=self.runner.in_flight, timeout_s=timeout_s)
        self.app.health.is_ending = True
        await asyncio.sleep(DRAIN_PROPAGATION_S)
        assert self._server is not None
        assert self._serving is not None
        self._server.should_exit = True
        await asyncio.wait([self._serving], timeout=timeout_s)
        await self.stop()

    async def stop(self) -> None:
        """Ends what still runs, each request with its failure. May be called at any time, also twice."""
        if self.runner.in_flight:
            log.warning("ending requests", in_flight=self.runner.in_flight)
        self.runner.end_all()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait([self._serving], timeout=ROUTER_ENDING_S)
            self._server.force_exit = True
            for connection in [*self._server.server_state.connections]:
                connection.transport.abort()
            await self._serving
        await self._client.close()
        log.info("http stopped")


def _client(options: FacadeOptions) -> AsyncClient:
    # A caller learns of a full queue at once, and decides itself when to ask again.
    return AsyncClient(options.routers, give_up_s=options.give_up_s, waits_when_full=False, **options.connection)


def _settings(app: ASGIApp) -> Mapping[str, Any]:
    """Settings of uvicorn: its bounds, and none of its logs."""
    return {
        "app": app,
        "http": HttpConnection,
        "ws": "none",
        "lifespan": "off",
        "loop": "none",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "timeout_keep_alive": int(CONNECTION_IDLE_S),
        "h11_max_incomplete_event_size": MAX_METADATA_BYTES,
        "backlog": 1024,
    }


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), port), family=family, backlog=1024)
    except OSError as error:
        why = error.strerror or str(error)
        raise CommandError(f"cannot listen on {host}:{port}: {why.lower()}; choose another --port or --host") from None


async def run_facade(options: FacadeOptions) -> None:
    """Serves until SIGTERM or SIGINT, then drains; a second signal ends the drain.

    Raises:
        CommandError: the facade cannot start; one line says what to change.
    """
    ending, at_once = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (at_once if ending.is_set() else ending).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    facade = Facade(options)
    await facade.start()
    await ending.wait()
    drained = asyncio.create_task(facade.drain())
    hurried = asyncio.create_task(at_once.wait())
    await asyncio.wait([drained, hurried], return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if drained.done():
        drained.result()
        return
    drained.cancel()
    await asyncio.gather(drained, return_exceptions=True)
    await facade.stop()


@click.command(cls=ConfigurableCommand, context_settings={"help_option_names": ["-h", "--help"]})
@config_option("http")
@options_of_command("http")
def http(**given: Any) -> None:
    """Run one HTTP facade: the APIs of OpenAI and Anthropic in front of one or more routers.

    \b
    Example:
      fissile serve &
      fissile http --routers 127.0.0.1:50051
      curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
        -d '{"model": "demo", "messages": [{"role": "user", "content": "Tell me a story."}]}'

    An answer continues at the next router, with the same bytes, when its router or worker is lost: name several routers
    of one fleet. API keys belong to the routers. Callers send them as `Authorization: Bearer KEY`. A request's
    deadline is its header x-request-timeout-ms.

    Ends on SIGTERM or Ctrl-C: /health becomes 503, running streams finish, exit code 0.
    """
    guard_standard_streams()
    setup_logging(given["log_level"], service="http")
    raise_descriptor_limit()
    made = FacadeOptions.from_parameters(given)
    gc.freeze()
    uvloop.run(run_facade(made))
