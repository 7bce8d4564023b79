"""`fissile router`: the wiring of one router, its start and its end."""

from __future__ import annotations

import asyncio
import gc
import math
import re
import secrets
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click
import structlog
import uvloop
from fissile.admin.v1.admin_pb2_grpc import add_AdminServiceServicer_to_server
from fissile.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from grpc_channelz.v1 import channelz

from common.cli.core.config_file import ConfigurableCommand, arguments_of, config_option
from common.cli.core.errors import CommandError
from common.cli.core.options import Duration, option
from common.delay_gate import DelayGate
from common.errors import ApiError
from common.limits import (
    DRAIN_PROPAGATION_S,
    DRAIN_TIMEOUT_S,
    HEARTBEAT_S,
    LEASE_S,
    MAX_HOLD_S,
    MAX_LEASE_S,
    MAX_QUEUED_REQUESTS,
    MAX_UNREAD_TOKENS,
    ROUTER_ENDING_S,
    SLOW_CLIENT_TIMEOUT_S,
    STALL_TIMEOUT_S,
    TELEMETRY_SHUTDOWN_S,
    WORKER_WAIT_S,
)
from common.memory import give_memory_back
from common.priority import PRIORITIES
from common.process.tasks import keep_running
from common.rpc.descriptors import max_side_connections, raise_descriptor_limit
from common.rpc.server import GrpcServer, PortTakenError
from common.rpc.tls import Dialer, TlsError
from common.telemetry.exporter import ExportError
from common.telemetry.logs import LEVELS, setup_logging
from common.telemetry.metrics import setup_metrics
from common.telemetry.output import guard_standard_streams
from common.telemetry.tracing import setup_tracing
from common.text.tokenizer import TokenizerError
from router.api import admin
from router.api.inference import InferenceService
from router.api.rpc_scope import SERVICE
from router.api.shutdown import OpenCalls
from router.api.tenants import TENANT_KEY, TenantPolicy
from router.model_registry import ModelRegistry
from router.requests.fleet import FailoverOptions, Fleet
from router.runtime_config import ConfigStore, ReloadedConfig, RoutingConfig, RuntimeConfig
from router.scheduling.dispatcher import Dispatcher
from router.scheduling.failover import FailoverPolicy
from router.scheduling.fair_queue import TenantShares
from router.scheduling.placement import PLACEMENTS
from router.security import RouterSecurity, with_security
from router.telemetry.loop_lag import LoopLag
from router.telemetry.metrics import RouterMetrics, RouterSnapshot
from router.text.prompts import PromptEncoder
from router.text.tokenizer_store import TokenizerStore
from router.workers.addresses import AddressError, FileTarget, parse_targets
from router.workers.discovery import Discovery, read_list

SWITCH_INTERVAL_S: Final = 0.0005

log = structlog.get_logger(__name__)

# Parameters of the command that a reload may change.
_RELOADED = frozenset(
    {
        "workers",
        "placement",
        "delay_factor",
        "max_hold",
        "queue_size",
        "tenant_weights",
        "tenant_concurrency",
        "tenant_max_priority",
        "log_level",
    }
)
_CHANNELZ = "grpc.channelz.v1.Channelz"


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """Options that one router is started with; times in seconds.

    Attributes:
        workers: the workers, in the forms of `addresses`.
        host: address to listen on.
        port: TCP port; 0 takes any.
        delay_factor: of the delay gate; 0 is off.
        max_hold_s: longest that the gate holds a prompt.
        queue_size: most requests that wait for a worker.
        placement: a key of PLACEMENTS.
        tokenizer: folder to take tokenizer and template from, None to ask the workers.
        drain_timeout_s: how long streams may go on after SIGTERM.
        max_unread_tokens: a client that leaves more unread is dropped.
        slow_client_timeout_s: a client that lets a message wait for so long is dropped; 0 is never.
        failover: what happens to requests whose worker is lost.
        admin_port: TCP port of AdminService on `admin_host`; 0 takes any, None is off.
        admin_host: address of AdminService.
        tenants: what tenants get.
        security: TLS and API keys.
        max_connection_age_s: after which clients must connect anew for new calls; 0 is never.
        log_level: least to log.
    """

    workers: Sequence[str]
    host: str = "127.0.0.1"
    port: int = 50051
    delay_factor: float = 0.0
    max_hold_s: float = MAX_HOLD_S
    queue_size: int = MAX_QUEUED_REQUESTS
    placement: str = "prefix_aware"
    tokenizer: Path | None = None
    drain_timeout_s: float = DRAIN_TIMEOUT_S
    max_unread_tokens: int = MAX_UNREAD_TOKENS
    slow_client_timeout_s: float = SLOW_CLIENT_TIMEOUT_S
    failover: FailoverOptions = field(default_factory=FailoverOptions)
    admin_port: int | None = None
    admin_host: str = "127.0.0.1"
    tenants: TenantPolicy = field(default_factory=TenantPolicy)
    security: RouterSecurity = field(default_factory=RouterSecurity)
    max_connection_age_s: float = 0.0
    log_level: str = "info"

    def settings(self) -> RuntimeConfig:
        """Settings that may change while the router runs.

        Raises:
            InvalidFieldError: a value is out of range.
            AddressError: a worker is none.
        """
        others = {"": self.tenants.concurrency} if self.tenants.concurrency else {}
        routing = RoutingConfig(
            self.placement,
            self.delay_factor,
            self.max_hold_s,
            self.queue_size,
            tenant_weight=dict(self.tenants.weights),
            tenant_concurrency={**others, **self.tenants.concurrency_of},
            tenant_max_priority=dict(self.tenants.max_priority_of),
        )
        return RuntimeConfig(routing, tuple(self.workers), self.log_level)


class Router:
    """One router in this process.

    Attributes:
        server: its gRPC server.
        fleet: its workers and requests.
        discovery: finds the workers.
        registry: its models.
        service: its public service.
        admin: the gRPC server of AdminService, None when it is off.
        configuration: what may change while the router runs.

    Args:
        options: at the start.
        reread: reads what it was started with again.

    Raises:
        TlsError: the certificate for workers can not be used.
        ExportError: the environment asks for an export that there is not.
    """

    def __init__(self, options: RouterOptions, reread: Callable[[], ReloadedConfig] | None = None) -> None:
        self._options = options
        security = options.security
        dialer = Dialer(security.worker_tls)
        self._serving = asyncio.Event()
        self._health: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._store = TokenizerStore()
        self._encoder = PromptEncoder()
        self._calls = OpenCalls()
        instance = secrets.token_hex(8)
        self._tracing = setup_tracing("fissile-router", instance)
        self._metrics = RouterMetrics(setup_metrics("fissile-router", instance))
        self.server = GrpcServer(
            options.host,
            options.port,
            [SERVICE],
            tls=security.tls,
            access=security.access,
            max_connection_age_s=options.max_connection_age_s,
            health_port=security.health_port,
        )
        self.registry = ModelRegistry()
        gate = DelayGate(options.delay_factor, options.max_hold_s)
        failover, placement = options.failover, PLACEMENTS[options.placement].make()
        shares = TenantShares(options.tenants.weights)
        dispatcher = Dispatcher(gate, placement, options.queue_size, failover.worker_wait_s, shares)
        self._placement, self._log_level = options.placement, options.log_level
        self.fleet = Fleet(
            dispatcher,
            self.registry,
            self._store,
            self._serving.set,
            failover=failover,
            worker_lost=self._refresh,
            dialer=dialer,
            slow_client_timeout_s=options.slow_client_timeout_s,
        )
        self.discovery = Discovery(self.fleet.set_workers)
        self.service = InferenceService(
            self.fleet,
            self.registry,
            self._encoder,
            self._tracing,
            max_unread_tokens=options.max_unread_tokens,
            tenants=options.tenants,
            metrics=self._metrics,
            calls=self._calls,
            has_keys=security.access is not None,
        )

        self.configuration = ConfigStore(options.settings(), self._apply, reread)
        self._loop_lag = LoopLag(self._metrics.lag)
        self.admin: GrpcServer | None = None
        if options.admin_port is not None:
            services, tls, access = [admin.SERVICE, _CHANNELZ], security.admin_tls, security.access
            self.admin = GrpcServer(
                options.admin_host,
                options.admin_port,
                services,
                tls=tls,
                access=access,
                max_connections=max_side_connections(),
            )

    async def start(self) -> None:
        """Listens and begins to dial the workers. Health says SERVING when the first one serves.

        Raises:
            PortTakenError: the address can not be listened on.
            TokenizerError: the tokenizer folder can not be used.
            TlsError: a certificate can not be used.
        """
        if self._options.tokenizer is not None:
            await self._store.read_folder(self._options.tokenizer)
        add_InferenceServiceServicer_to_server(self.service, self.server.server)
        await self.server.start()
        if self.admin is not None:
            service = admin.AdminService(self.fleet, self.configuration, self._tracing, self._calls)
            add_AdminServiceServicer_to_server(service, self.admin.server)
            channelz.add_channelz_servicer(self.admin.server)
            await self.admin.start()
            await self.admin.set_serving(True)
            log.info("admin listening", address=self.admin.address)
        self._health = asyncio.create_task(keep_running("health", self._follow_workers), name="health")
        if self._metrics.enabled:
            self._loop_lag.start()
        watch = keep_running("metrics", lambda: self._metrics.watch(self._figures))
        self._watch = asyncio.create_task(watch, name="metrics")
        self.discovery.follow(parse_targets(self._options.workers))
        log.info("router listening", address=self.server.address, workers=list(self._options.workers))

    async def drain(self) -> None:
        """Takes no new requests, lets streams finish within the drain timeout, then stops."""
        timeout_s = self._options.drain_timeout_s
        log.info("draining", in_flight=self.service.in_flight, timeout_s=timeout_s)
        await self._leave_health()
        stopping = asyncio.create_task(self.server.drain(DRAIN_PROPAGATION_S, timeout_s + ROUTER_ENDING_S))
        idle = asyncio.create_task(self._idle_after(DRAIN_PROPAGATION_S))
        try:
            await asyncio.wait(
                {stopping, idle}, timeout=DRAIN_PROPAGATION_S + timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            await self.stop()
        finally:
            stopping.cancel()
            idle.cancel()
            await asyncio.gather(stopping, idle, return_exceptions=True)

    async def _idle_after(self, propagation_s: float) -> None:
        """Waits until there is no call any more, once clients have had the time to learn of the drain."""
        await asyncio.sleep(propagation_s)
        await self._calls.wait_until_none()

    async def stop(self) -> None:
        """Ends what still runs, and everything else. May be called at any time, twice too."""
        await self._leave_health()
        if self.service.in_flight:
            log.warning("ending requests", in_flight=self.service.in_flight)
        # Before the server does it, with a status that says what the client has got.
        self._calls.end()
        self.fleet.end_streams()
        await self.server.stop(ROUTER_ENDING_S)
        if self.admin is not None:
            await self.admin.stop(ROUTER_ENDING_S)
        await self.discovery.stop()
        await self.fleet.stop()
        self._encoder.close()
        self._loop_lag.stop()
        await self._stop_metrics()
        await asyncio.to_thread(self._tracing.shutdown, TELEMETRY_SHUTDOWN_S)
        log.info("router stopped")

    def reload(self) -> None:
        """Reads the configuration again; what is wrong with it is logged, and changes nothing."""
        try:
            admin.reread(self.configuration)
        except CommandError as error:
            log.error("configuration not reloaded", why=str(error))

    def _apply(self, settings: RuntimeConfig) -> None:
        """Takes settings into force, between two decisions."""
        routing, weights = settings.routing, settings.routing.tenant_weight
        placement = None if routing.placement == self._placement else PLACEMENTS[routing.placement].make()
        self._placement = routing.placement
        gate = DelayGate(routing.delay_factor, routing.max_hold_s)
        self.fleet.configure(gate, placement, routing.queue_size, weights)
        limits = weights, routing.tenant_concurrency, routing.tenant_max_priority
        self.service.set_tenants(self._options.tenants.with_limits(*limits))
        if settings.log_level != self._log_level:
            self._log_level = settings.log_level
            setup_logging(settings.log_level, service="router")
        self.discovery.follow(parse_targets(settings.workers))

    def _figures(self) -> RouterSnapshot:
        fleet = self.fleet
        return RouterSnapshot(
            in_flight=self.service.in_flight,
            queues=tuple(fleet.waiting()),
            lanes=fleet.lanes(),
            workers=tuple(fleet.workers()),
            tables={**fleet.tables(), **self.service.tables()},
            lost=dict(fleet.lost),
            releases=fleet.num_releases,
            released=fleet.num_released,
            failed=dict(self._metrics.failed),
            usage=dict(self._metrics.usage),
            config_version=self.configuration.version,
        )

    async def _stop_metrics(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        self._metrics.take(self._figures())
        await asyncio.to_thread(self._metrics.shutdown, TELEMETRY_SHUTDOWN_S)

    def _refresh(self) -> None:
        self.discovery.refresh()

    async def _follow_workers(self) -> None:
        while True:
            self._serving.clear()
            await self.server.set_serving(self.registry.serving)
            await self._serving.wait()

    async def _leave_health(self) -> None:
        if self._health is not None:
            self._health.cancel()
            await asyncio.gather(self._health, return_exceptions=True)


def run_on_loop(main: Coroutine[Any, Any, None]) -> None:
    """Runs a router's work on the event loop that routers have, in a process that is set up for it."""
    # A thread that makes a prompt keeps the interpreter for so long when the loop wants it; by default 5 ms, each time.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # What is there now stays: a full collection would go through it again and again, and hold the loop meanwhile.
    gc.freeze()
    uvloop.run(main)


async def run_router(options: RouterOptions, reread: Callable[[], ReloadedConfig] | None = None) -> None:
    """Serves until SIGTERM or SIGINT, then drains; a second signal ends the draining. SIGHUP reads the options again.

    Args:
        options: at the start.
        reread: reads them again.

    Raises:
        CommandError: something must be changed; one line.
    """
    ending, at_once = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (at_once if ending.is_set() else ending).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    try:
        router = Router(options, reread)
    except (TlsError, ExportError) as error:
        raise CommandError(str(error)) from None
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, router.reload)
    try:
        await router.start()
    except (PortTakenError, TokenizerError, TlsError) as error:
        await router.stop()
        raise CommandError(str(error)) from None
    await ending.wait()
    drained = asyncio.create_task(router.drain())
    hurried = asyncio.create_task(at_once.wait())
    await asyncio.wait([drained, hurried], return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if drained.done():
        drained.result()
        return
    drained.cancel()
    await asyncio.gather(drained, return_exceptions=True)
    await router.stop()


class Lease(Duration):
    """Seconds that workers take as a lease, and that its renewal in the rhythm of heartbeats can keep."""

    name = "lease"

    def __init__(self) -> None:
        super().__init__(2 * HEARTBEAT_S, MAX_LEASE_S)


class MetadataKey(click.ParamType[str]):
    """The name of a text metadata entry of gRPC."""

    name = "key"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Reads the text of an option."""
        text = str(value).lower()
        if re.fullmatch(r"[0-9a-z_.-]+", text) is None or text.endswith("-bin") or text.startswith("grpc-"):
            self.fail(f"{value!r} is no name of text metadata; use letters, digits, - _ and .", param, ctx)
        return text


class PerTenant(click.ParamType[tuple[str, float]]):
    """`TENANT=NUMBER`, or a whole number alone, which is for the tenants that have none of their own."""

    name = "tenant"

    def __init__(self, kind: type[int] | type[float]) -> None:
        self._kind = kind

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        """Reads the text of an option; the name is "" when there is none."""
        if isinstance(value, tuple):
            return value
        name, named, number = str(value).rpartition("=")
        whole = self._kind is int
        try:
            read = self._kind(number)
        except ValueError:
            self.fail(f"{value!r} is not {'[TENANT=]N' if whole else 'TENANT=WEIGHT'}", param, ctx)
        if not (read >= 0 if whole else 0 < read < math.inf) or (not name and (named or not whole)):
            allowed = "0 or more, after TENANT= or alone" if whole else "more than 0, after TENANT="
            self.fail(f"{value!r} is out of range; use a number {allowed}", param, ctx)
        return name, read


class TenantPriority(click.ParamType[tuple[str, str]]):
    """`TENANT=PRIORITY`, or a priority alone, which is for the tenants that have none of their own."""

    name = "priority"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """Reads the text of an option; the tenant is "" when there is none."""
        if isinstance(value, tuple):
            return value
        tenant, named, priority = str(value).rpartition("=")
        if priority not in PRIORITIES or (named and not tenant):
            self.fail(f"{value!r} is not [TENANT=]PRIORITY, with one of {', '.join(PRIORITIES)}", param, ctx)
        return tenant, priority


@click.command(cls=ConfigurableCommand, context_settings={"help_option_names": ["-h", "--help"]})
@config_option("router")
@option(
    "--worker", "workers", envvar="FISSILE_WORKERS", multiple=True, metavar="TARGET",
    help="Addresses of workers: HOST:PORT; dns:///NAME:PORT for all addresses of a name, such as a headless Service, "
    "looked up again and again; file:PATH for those that a file lists, read again when it changes. Repeat it, or "
    "separate several by commas. Workers may start before or after the router.",
)  # fmt: skip
@option("--host", envvar="FISSILE_HOST", default="127.0.0.1", help="Address to listen on.")
@option(
    "--port", envvar="FISSILE_PORT", default=50051, type=click.IntRange(0, 65535),
    help="Port; 0 takes any free one.",
)  # fmt: skip
@option(
    "--delay-factor", envvar="FISSILE_DELAY_FACTOR", default=0.0, type=click.FloatRange(0),
    help="Hold prompts back for this many prefill durations, so that more of them share a prefill; 0 is off.",
)  # fmt: skip
@option(
    "--max-hold", envvar="FISSILE_MAX_HOLD", default="250ms", type=Duration(),
    help="Longest time that --delay-factor holds a prompt back.",
)  # fmt: skip
@option(
    "--queue-size", envvar="FISSILE_QUEUE_SIZE", default=MAX_QUEUED_REQUESTS, type=click.IntRange(1),
    help="Most requests of one priority class that may wait for a worker. Further ones are refused with "
    "RESOURCE_EXHAUSTED, or displace one of the tenant that has the most waiting for its weight.",
)  # fmt: skip
@option(
    "--tenant-key", envvar="FISSILE_TENANT_KEY", default=TENANT_KEY, type=MetadataKey(), metavar="NAME",
    help="Metadata key whose value names the tenant of a call. Tenants share the queue fairly, by prompt and output "
    "tokens.",
)  # fmt: skip
@option(
    "--tenant-weight", "tenant_weights", envvar="FISSILE_TENANT_WEIGHT", multiple=True, type=PerTenant(float),
    metavar="TENANT=WEIGHT",
    help="Share of a tenant in the queue and the service; the others have 1. Repeat it for several tenants.",
)  # fmt: skip
@option(
    "--tenant-concurrency", envvar="FISSILE_TENANT_CONCURRENCY", multiple=True, type=PerTenant(int),
    metavar="[TENANT=]N",
    help="Most requests that a tenant may have in flight; without a name, the limit of each other tenant. 0 is no "
    "limit.",
)  # fmt: skip
@option(
    "--tenant-max-priority", envvar="FISSILE_TENANT_MAX_PRIORITY", multiple=True, type=TenantPriority(),
    metavar="[TENANT=]PRIORITY",
    help="Highest priority that a tenant's requests may ask for: low, normal or high; without a name, that of each "
    "other tenant. Default: high, or normal with API keys. A key may have a maximum too; the lower one counts.",
)  # fmt: skip
@option(
    "--require-bound-tenant", envvar="FISSILE_REQUIRE_BOUND_TENANT", is_flag=True,
    help="Refuse calls that name a tenant in their metadata unless their API key is bound to it. Otherwise a caller "
    "can pose as another tenant in every call, and have as many shares. Calls of all other keys are one tenant "
    "together.",
)  # fmt: skip
@option(
    "--isolate-tenants", envvar="FISSILE_ISOLATE_TENANTS", is_flag=True,
    help="Share no prefix cache between tenants, whatever cache_salt their requests name. Otherwise the time to the "
    "first token and cached_tokens tell a tenant whether others have asked the same before. Answers stay the same.",
)  # fmt: skip
@option(
    "--placement", envvar="FISSILE_PLACEMENT", default="prefix_aware", type=click.Choice(list(PLACEMENTS)),
    help="Which worker a request goes to. " + "; ".join(f"{name}: {p.what}" for name, p in PLACEMENTS.items()) + ".",
)  # fmt: skip
@option(
    "--failover", envvar="FISSILE_FAILOVER", default=FailoverPolicy.EXACT.value,
    type=click.Choice([policy.value for policy in FailoverPolicy]),
    help="Where an answer that has begun continues when its worker is lost. exact: only on workers of the same "
    "numerics class, with exactly the tokens it would have had; any: on any worker with the same weights.",
)  # fmt: skip
@option(
    "--worker-wait", envvar="FISSILE_WORKER_WAIT", default=f"{WORKER_WAIT_S:g}s", type=Duration(),
    help="How long a request waits for a worker to come up when there is none for it.",
)  # fmt: skip
@option(
    "--stall-timeout", envvar="FISSILE_STALL_TIMEOUT", default=f"{STALL_TIMEOUT_S:g}s", type=Duration(),
    help="Longest time of an engine step, after which its worker is given up; long prefills get more.",
)  # fmt: skip
@option(
    "--lease", envvar="FISSILE_LEASE", default=f"{LEASE_S:g}s", type=Lease(),
    help="How long workers keep this router's requests without hearing from it.",
)  # fmt: skip
@option(
    "--max-unread-tokens", envvar="FISSILE_MAX_UNREAD_TOKENS", default=MAX_UNREAD_TOKENS, type=click.IntRange(1),
    help="Most tokens of a stream that a client may leave unread; beyond that the stream ends with RESOURCE_EXHAUSTED.",
)  # fmt: skip
@option(
    "--slow-client-timeout", envvar="FISSILE_SLOW_CLIENT_TIMEOUT", default=f"{SLOW_CLIENT_TIMEOUT_S:g}s",
    type=Duration(),
    help="Longest time that a client may leave a waiting message unread; then the stream ends with "
    "RESOURCE_EXHAUSTED, and what it held is free again. 0s is never.",
)  # fmt: skip
@option(
    "--tokenizer", envvar="FISSILE_TOKENIZER", default=None, type=click.Path(path_type=Path), metavar="FOLDER",
    help="Folder to take tokenizer and chat template from, instead of from the workers.",
)  # fmt: skip
@option(
    "--drain-timeout", envvar="FISSILE_DRAIN_TIMEOUT", default=f"{DRAIN_TIMEOUT_S:g}s", type=Duration(),
    help="How long streams may continue after SIGTERM.",
)  # fmt: skip
@option(
    "--admin-port", envvar="FISSILE_ADMIN_PORT", default=None, type=click.IntRange(0, 65535),
    help="Port of AdminService, which lists and drains workers; 0 takes any free one. Default: off.",
)  # fmt: skip
@option("--admin-host", envvar="FISSILE_ADMIN_HOST", default="127.0.0.1", help="Address of AdminService.")
@with_security
@option(
    "--max-connection-age", envvar="FISSILE_MAX_CONNECTION_AGE", default="0s", type=Duration(),
    help="Age after which clients must reconnect for new calls, so that they find new routers; running calls "
    "continue. 0s is never.",
)  # fmt: skip
@option(
    "--log-level", envvar="FISSILE_LOG_LEVEL", default="info", type=click.Choice(LEVELS),
    help="Lowest level that is logged.",
)  # fmt: skip
def router(
    workers: tuple[str, ...],
    host: str,
    port: int,
    delay_factor: float,
    max_hold: float,
    queue_size: int,
    tenant_key: str,
    tenant_weights: tuple[tuple[str, float], ...],
    tenant_concurrency: tuple[tuple[str, int], ...],
    tenant_max_priority: tuple[tuple[str, str], ...],
    require_bound_tenant: bool,
    isolate_tenants: bool,
    placement: str,
    failover: str,
    worker_wait: float,
    stall_timeout: float,
    lease: float,
    max_unread_tokens: int,
    slow_client_timeout: float,
    tokenizer: Path | None,
    drain_timeout: float,
    admin_port: int | None,
    admin_host: str,
    security: RouterSecurity,
    max_connection_age: float,
    log_level: str,
) -> None:
    """Run one router: the public gRPC API in front of any number of workers.

    Ends on SIGTERM or Ctrl-C: health becomes NOT_SERVING, running streams finish, exit code 0.
    """
    give_memory_back()
    guard_standard_streams()
    setup_logging(log_level, service="router")
    raise_descriptor_limit()
    context = click.get_current_context()
    _settings(context.params)
    run_on_loop(
        run_router(
            RouterOptions(
                workers=workers,
                host=host,
                port=port,
                delay_factor=delay_factor,
                max_hold_s=max_hold,
                queue_size=queue_size,
                placement=placement,
                tokenizer=tokenizer,
                drain_timeout_s=drain_timeout,
                max_unread_tokens=max_unread_tokens,
                slow_client_timeout_s=slow_client_timeout,
                failover=FailoverOptions(FailoverPolicy(failover), worker_wait, stall_timeout, lease),
                admin_port=admin_port,
                admin_host=admin_host,
                tenants=TenantPolicy(
                    tenant_key, require_bound=require_bound_tenant, isolate=isolate_tenants
                ).with_limits(dict(tenant_weights), dict(tenant_concurrency), dict(tenant_max_priority)),
                log_level=log_level,
                security=security,
                max_connection_age_s=max_connection_age,
            ),
            _rereader(context),
        )
    )


def _rereader(context: click.Context) -> Callable[[], ReloadedConfig]:
    """Reads the options of a router again that was called in `context`: its file has changed, perhaps.

    Raises (what is returned):
        CommandError: a value is not allowed.
    """
    arguments, started = arguments_of(context), dict(context.params)

    def read() -> ReloadedConfig:
        try:
            given = router.make_context("router", list(arguments)).params
        except click.UsageError as error:
            raise CommandError(error.format_message()) from None
        settings = _settings(given)
        fixed = [
            param.opts[0].removeprefix("--")
            for param in router.params
            if param.name in given and param.name not in _RELOADED and given[param.name] != started[param.name]
        ]
        return ReloadedConfig(settings, tuple(fixed))

    return read


def _settings(given: Mapping[str, Any]) -> RuntimeConfig:
    """Settings among the options that may change while the router runs, by parameter name."""
    try:
        _check_workers(given["workers"])
        routing = RoutingConfig(
            given["placement"],
            given["delay_factor"],
            given["max_hold"],
            given["queue_size"],
            tenant_weight=dict(given["tenant_weights"]),
            tenant_concurrency=dict(given["tenant_concurrency"]),
            tenant_max_priority=dict(given["tenant_max_priority"]),
        )
        return RuntimeConfig(routing, tuple(given["workers"]), given["log_level"])
    except (AddressError, ApiError) as error:
        raise CommandError(str(error)) from None


def _check_workers(workers: Sequence[str]) -> None:
    """Refuses what a mistake in the command is the likely reason for: no such form, no such file, no list in it."""
    for target in parse_targets(workers):
        if isinstance(target, FileTarget):
            read_list(target.path)
