"""The gRPC server shell of router and worker.

Health (grpc.health.v1) has the service names "" and "readiness" (takes work), every service's full name (the same), and
"liveness" (the process answers). Invariant: from start to stop, liveness is SERVING, and all others are equal.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from common.limits import (
    CONNECTION_IDLE_S,
    HANDSHAKE_TIMEOUT_S,
    MAX_HEALTH_MESSAGE_BYTES,
    MAX_HEALTH_WATCHES,
    MAX_METADATA_BYTES,
    MAX_REQUEST_BYTES,
    MAX_SERVICE_NAME_CHARS,
    MAX_SIDE_CONNECTIONS,
    MAX_SIDE_STREAMS_PER_CONNECTION,
    MAX_SIDE_UNACCEPTED_CALLS,
    MAX_SIDE_UNACCEPTED_CALLS_HARD,
    MAX_SIDE_UNREAD_CALLS,
    MAX_STREAMS_PER_CONNECTION,
    MAX_UNACCEPTED_CALLS,
    MAX_UNACCEPTED_CALLS_HARD,
    MAX_UNACCEPTED_S,
    MAX_UNFREED_STREAMS_PER_CONNECTION,
    MAX_UNREAD_CALLS,
    STATUS_FLUSH_S,
    STOP_ACCEPTING_S,
)
from common.rpc.auth import Access, AccessInterceptor
from common.rpc.descriptors import max_connections, max_side_connections
from common.rpc.interceptors import MetadataBound
from common.rpc.reflection import add_reflection
from common.rpc.request_log import RequestLog
from common.rpc.request_reader import RequestReader
from common.rpc.tls import ServerTls, is_loopback

log = structlog.get_logger(__name__)

LIVENESS: Final = "liveness"
READINESS: Final = "readiness"
# Number of idle polls without a new call after which the accept queue counts as empty. After one call others often
# follow: on a busy machine a client with much to send pauses for tens of milliseconds.
_QUIET_LOOKS: Final = 5
_QUIET_LOOKS_AFTER_CALLS: Final = 50
_LOOK_S: Final = 0.005
# Bit 0 of gRPC's set of compression algorithms.
_IDENTITY_ALONE: Final = 1
_HEALTH_SERVICE: Final = "grpc.health.v1.Health"
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def _is_no_garbled_text(record: logging.LogRecord) -> bool:
    """True if a record is not gRPC core's "Invalid encoding". The receiver of the garbled text logs the call it belongs
    to."""
    return not str(record.msg).startswith("Invalid encoding")


def _is_no_ended_call(record: logging.LogRecord) -> bool:
    """True if a record is not about a status that gRPC could not send because it had ended the call.

    gRPC ends calls whose messages cannot be decompressed; a client could fill the log with tracebacks.
    """
    return not (record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError))


# grpc.aio logs exceptions of handlers here. Adding a filter again has no effect.
logging.getLogger("grpc._cython.cygrpc").addFilter(_is_no_ended_call)
logging.getLogger("grpc._cython.cygrpc").addFilter(_is_no_garbled_text)


class PortTakenError(Exception):
    """The address cannot be listened on; the message is one line that says what to change."""


@dataclass(frozen=True, slots=True)
class PortBounds:
    """Bounds on what the callers of one port take together.

    Attributes:
        connections: returns the most connections; further ones are closed as they arrive.
        streams: calls at a time on one connection.
        unfreed: calls of one connection that have ended and are not freed yet.
        unaccepted: calls of all connections that the event loop has not accepted; beyond it gRPC drops some.
        unaccepted_hard: number of such calls beyond which gRPC drops all.
        unread: calls of all connections whose message has not arrived.
    """

    connections: Callable[[], int]
    streams: int
    unfreed: int
    unaccepted: int
    unaccepted_hard: int
    unread: int


MAIN_PORT: Final = PortBounds(
    max_connections,
    MAX_STREAMS_PER_CONNECTION,
    MAX_UNFREED_STREAMS_PER_CONNECTION,
    MAX_UNACCEPTED_CALLS,
    MAX_UNACCEPTED_CALLS_HARD,
    MAX_UNREAD_CALLS,
)
# Bounds for the ports of operators and probes.
SIDE_PORT: Final = PortBounds(
    max_side_connections,
    MAX_SIDE_STREAMS_PER_CONNECTION,
    MAX_SIDE_STREAMS_PER_CONNECTION,
    MAX_SIDE_UNACCEPTED_CALLS,
    MAX_SIDE_UNACCEPTED_CALLS_HARD,
    MAX_SIDE_UNREAD_CALLS,
)


def server_options(
    max_message_bytes: int, max_connection_age_s: float = 0.0, bounds: PortBounds = MAIN_PORT
) -> list[tuple[str, int]]:
    """Channel arguments of a server. A connection past its maximum age takes no new calls; its running calls continue.

    - Ping arguments: without them gRPC closes connections whose clients send keepalive pings on a quiet stream (a
      queued request is one) or without a call. With them only floods of pings end a connection.
    - `so_reuseport` 0: otherwise two servers can share one port silently.
    - Compression off: our clients do not compress requests, and 15 KB could become 15 MB on gRPC's threads.
    """
    age = [("grpc.max_connection_age_ms", round(max_connection_age_s * 1000))] if max_connection_age_s else []
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.compression_enabled_algorithms_bitset", _IDENTITY_ALONE),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", bounds.streams),
        ("grpc.http2.max_deallocating_streams", bounds.unfreed),
        ("grpc.server.max_pending_requests", bounds.unaccepted),
        ("grpc.server.max_pending_requests_hard_limit", bounds.unaccepted_hard),
        ("grpc.server_max_unrequested_time_in_server", MAX_UNACCEPTED_S),
        ("grpc.max_allowed_incoming_connections", bounds.connections()),
        ("grpc.max_connection_idle_ms", round(CONNECTION_IDLE_S * 1000)),
        ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_TIMEOUT_S * 1000)),
        ("grpc.http2.min_ping_interval_without_data_ms", 50),
        ("grpc.http2.max_ping_strikes", 10),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        *age,
    ]


class _Health(HealthServicer):  # type: ignore[misc]  # the library has no types
    """The library's health servicer, with a bounded number of watchers, which can be ended."""

    def __init__(self) -> None:
        super().__init__()
        # The oldest watch first.
        self._watches: dict[asyncio.Task[Any], None] = {}
        self._ended = False

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> Any:
        await _check_name(request, context)
        return await super().Check(request, context)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        """Sends the status whenever it changes."""
        await _check_name(request, context)
        task = asyncio.current_task()
        assert task is not None
        if len(self._watches) >= MAX_HEALTH_WATCHES:
            self._end(next(iter(self._watches)))
        self._watches[task] = None
        try:
            # Sent separately: with a first message that the client does not read, it would delay the status of
            # `end_watches`.
            await context.send_initial_metadata(())
            await super().Watch(request, context)
        except asyncio.CancelledError:
            if task in self._watches and not self._ended:
                raise
            # A handler that is only cancelled leaves the call open, and `stop` would wait for it.
            why = "the server ends" if self._ended else f"{MAX_HEALTH_WATCHES} later watches are open; watch again"
            await context.abort(grpc.StatusCode.UNAVAILABLE, why)
        finally:
            self._watches.pop(task, None)

    def end_watches(self) -> None:
        """Ends all Watch calls."""
        self._ended = True
        for task in list(self._watches):
            self._end(task)

    def _end(self, watch: asyncio.Task[Any]) -> None:
        del self._watches[watch]
        watch.cancel()


async def _check_name(request: health_pb2.HealthCheckRequest, context: Any) -> None:
    """Refuses a service name that is too long, since a watch keeps it in memory."""
    if len(request.service) > MAX_SERVICE_NAME_CHARS:
        problem = f"service has {len(request.service)} characters; at most {MAX_SERVICE_NAME_CHARS} are valid"
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)


class HealthServer:
    """A plain-text port that serves the health service alone, beside a GrpcServer or in a process without one.

    Args:
        host: address to listen on.
        port: TCP port; 0 for any free one.
        health: health service of the GrpcServer; None for a process without one.
        max_connection_age_s: seconds after which clients must reconnect; 0 is never.

    Attributes:
        port: the bound port; 0 before `listen`.
    """

    def __init__(self, host: str, port: int, health: _Health | None = None, max_connection_age_s: float = 0.0) -> None:
        options = server_options(MAX_HEALTH_MESSAGE_BYTES, max_connection_age_s, SIDE_PORT)
        interceptors = [MetadataBound(), RequestReader(SIDE_PORT.unread)]
        self._server = grpc.aio.server(options=options, interceptors=interceptors)
        self._health = _Health() if health is None else health
        self._host = host
        self._wanted_port = port
        self.port = 0

    @property
    def address(self) -> str:
        """The bound address, `host:port`."""
        return _join(self._host, self.port)

    async def start(self) -> None:
        """Opens the port in a process without a GrpcServer, with liveness SERVING and readiness NOT_SERVING.

        Raises:
            PortTakenError: the address is in use, or does not belong to this machine.
        """
        await self._health.set(LIVENESS, _SERVING)
        await self.set_serving(False)
        await self.listen()

    async def listen(self) -> None:
        """Opens the port and serves the health service on it.

        Raises:
            PortTakenError: the address is in use, or does not belong to this machine.
        """
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.port = _listen(self._server, self._host, self._wanted_port, option="--health-port")
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        """Sets readiness to SERVING if `serving`, else to NOT_SERVING."""
        for name in ("", READINESS):
            await self._health.set(name, _SERVING if serving else _NOT_SERVING)

    async def close(self) -> None:
        """Ends all watches and closes the port."""
        self._health.end_watches()
        await self._server.stop(0)


class GrpcServer:
    """One listening grpc.aio server. Add servicers to `server` between construction and `start`.

    Args:
        host: address to listen on.
        port: TCP port; 0 for any free one.
        services: full names of the added services, for health and reflection.
        max_message_bytes: longest message in either direction.
        tls: the server's certificate; None listens in plain text, which is logged as a warning outside loopback.
        access: admits or refuses every call except those of health; None admits all.
        max_connection_age_s: age after which clients must reconnect for new calls; 0 is never.
        health_port: TCP port of health alone, in plain text, for probes without TLS; 0 for any free one, None for no
            such port.
        bounds: what the callers of the port may take together. The health port always has those of SIDE_PORT.

    Attributes:
        server: for `add_...Servicer_to_server`.
        port: the bound port; 0 before `start`.
        health_port: the bound health port; 0 without one, and before `start`.
        is_serving: the status that health reports.
    """

    def __init__(
        self,
        host: str,
        port: int,
        services: Sequence[str],
        *,
        max_message_bytes: int = MAX_REQUEST_BYTES,
        tls: ServerTls | None = None,
        access: Access | None = None,
        max_connection_age_s: float = 0.0,
        health_port: int | None = None,
        bounds: PortBounds = MAIN_PORT,
    ) -> None:
        self._requests = RequestLog()
        # The access check comes before the request is read; every refusal gets its log line.
        checks = [MetadataBound(), *([] if access is None else [AccessInterceptor(access)])]
        interceptors = [self._requests, *checks, RequestReader(bounds.unread)]
        options = server_options(max_message_bytes, max_connection_age_s, bounds)
        self.server = grpc.aio.server(options=options, interceptors=interceptors)
        self._health = _Health()
        self._probed = (
            None if health_port is None else HealthServer(host, health_port, self._health, max_connection_age_s)
        )
        self.port = self.health_port = 0
        self.is_serving = False
        self._host = host
        self._wanted_port = port
        self._services = tuple(services)
        self._tls = tls

    @property
    def address(self) -> str:
        """`host:port` that is listened on."""
        return _join(self._host, self.port)

    async def start(self) -> None:
        """Listens. Health is NOT_SERVING until `set_serving(True)`.

        Raises:
            PortTakenError: the address is in use or is not one of this machine.
            TlsError: the certificate cannot be used.
        """
        credentials = None if self._tls is None else self._tls.credentials()
        await self._health.set(LIVENESS, _SERVING)
        await self.set_serving(False)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        add_reflection(self.server, (*self._services, _HEALTH_SERVICE))
        self.port = _listen(self.server, self._host, self._wanted_port, credentials)
        if self._probed is not None:
            await self._probed.listen()
            self.health_port = self._probed.port
        if credentials is None and not is_loopback(self._host):
            log.warning(
                "PLAIN TEXT outside loopback: anybody on the way can read prompts, answers and keys; use --tls-cert",
                address=self.address,
                services=self._services,
            )
        await self.server.start()

    async def set_serving(self, serving: bool) -> None:
        """Reports to health checks and watchers whether this process takes work."""
        self.is_serving = serving
        status = _SERVING if serving else _NOT_SERVING
        for name in ("", READINESS, *self._services):
            await self._health.set(name, status)

    async def drain(self, propagation_s: float, grace_s: float) -> None:
        """NOT_SERVING, then `propagation_s` seconds in which load balancers notice it, then `stop(grace_s)`.

        New RPCs are still taken in between: `stop` refuses them at once, and proxies do not retry that status.
        """
        await self.set_serving(False)
        await asyncio.sleep(propagation_s)
        await self.stop(grace_s)

    async def stop(self, grace_s: float) -> None:
        """Refuses new RPCs, waits at most `grace_s` seconds for running ones, then cancels them.

        It does not wait for health watchers, which never end by themselves, nor for connections without a call.
        """
        self._health.end_watches()
        self._requests.refuses = True
        await self._accept_all()
        # Runs before gRPC's timer, so a call the server cut is not reported as cancelled by its client.
        ending = asyncio.get_running_loop().call_later(grace_s, self._requests.end_all)
        if not grace_s:
            self._requests.end_all()
        try:
            await self._stop_calls(grace_s)
        finally:
            ending.cancel()
        if self._probed is not None:
            await self._probed.close()

    async def _stop_calls(self, grace_s: float) -> None:
        """Stops the server as soon as no call is left.

        The server alone would also wait for connections: for one that has sent half a request or nothing, and for one
        whose client does not close it when told to.
        """
        tasks = [asyncio.ensure_future(each) for each in (self.server.stop(grace_s), self._quiet())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await self.server.stop(0)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _quiet(self) -> None:
        """Waits until no call is open, and ended calls have had STATUS_FLUSH_S to send their status."""
        await asyncio.sleep(STATUS_FLUSH_S)
        while self._requests.num_open:
            await self._requests.wait_until_none()
            await asyncio.sleep(STATUS_FLUSH_S)

    async def _accept_all(self) -> None:
        """Waits until no new calls arrive, at most STOP_ACCEPTING_S: each is refused with a status.

        gRPC's core ends calls that are not accepted when the server stops with a bare CANCELLED. A poll that comes late
        proves nothing: the loop was busy, and calls may be waiting for it. One call is accepted per turn of the loop.
        """
        loop = asyncio.get_running_loop()
        now = loop.time()
        end = now + STOP_ACCEPTING_S
        quiet, wanted, arrived = 0, _QUIET_LOOKS, self._requests.arrived
        while quiet < wanted and now < end:
            await asyncio.sleep(_LOOK_S)
            before, now = now, loop.time()
            if arrived != self._requests.arrived:
                quiet, wanted, arrived = 0, _QUIET_LOOKS_AFTER_CALLS, self._requests.arrived
            else:
                quiet = quiet + 1 if now - before < 2 * _LOOK_S else 0


def _listen(
    server: grpc.aio.Server,
    host: str,
    port: int,
    credentials: grpc.ServerCredentials | None = None,
    option: str = "--port",
) -> int:
    """Binds the server to a port and returns it; raises PortTakenError, which names the option to change."""
    wanted = _join(host, port)
    try:
        return server.add_insecure_port(wanted) if credentials is None else server.add_secure_port(wanted, credentials)
    except RuntimeError:
        raise PortTakenError(_why_not(host, port, option)) from None


def bound_socket(host: str, port: int, option: str) -> socket.socket:
    """A listening socket that is no gRPC server's.

    Args:
        host: address to listen on.
        port: TCP port; 0 for any free one.
        option: names the port on the command line.

    Raises:
        PortTakenError: the address is in use or is not one of this machine.
    """
    name = host.strip("[]")
    try:
        family = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0][0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        listener = socket.create_server((name, port), family=family, backlog=MAX_SIDE_CONNECTIONS, dualstack_ipv6=both)
    except OSError:
        raise PortTakenError(_why_not(host, port, option)) from None
    listener.setblocking(False)
    return listener


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _why_not(host: str, port: int, option: str) -> str:
    """The reason why the address cannot be bound, and what to change. gRPC itself does not say."""
    name = host.strip("[]")
    try:
        family, kind, _, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        return f"host {host!r} is unknown: change --host"
    try:
        with contextlib.closing(socket.socket(family, kind)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return f"{host} is not an address of this machine: change --host"
        if error.errno == errno.EACCES:
            return f"port {port} needs more rights than this process has: choose another {option}"
    return f"port {port} on {host} is in use: stop what listens there, or choose another {option} (0 takes any)"
