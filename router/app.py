"""`fissile router`: wires, starts and stops one router."""

from __future__ import annotations

import asyncio
import gc
import secrets
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Final

import click
import structlog
import uvloop
from fissile.admin.v1.admin_pb2_grpc import add_AdminServiceServicer_to_server
from fissile.peers.inference.open_inference_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from fissile.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from grpc_channelz.v1 import channelz

from common.cli.core.config_file import ConfigurableCommand, config_option
from common.cli.core.errors import CommandError
from common.cli.core.options import options
from common.delay_gate import DelayGate
from common.limits import (
    DRAIN_PROPAGATION_S,
    ROUTER_ENDING_S,
    TELEMETRY_SHUTDOWN_S,
)
from common.process.tasks import keep_running
from common.rpc.descriptors import raise_descriptor_limit
from common.rpc.scrape_port import scrape_port
from common.rpc.server import SIDE_PORT, GrpcServer, PortTakenError
from common.rpc.tls import Dialer, TlsError
from common.telemetry.exporter import ExportError
from common.telemetry.logs import setup_logging
from common.telemetry.metrics import setup_metrics
from common.telemetry.output import guard_standard_streams
from common.telemetry.tracing import setup_tracing
from common.text.tokenizer import TokenizerError
from common.text.tokenizer_reading import import_transformers
from router.api import admin, open_inference
from router.api.answer_call import AnswerBackend
from router.api.call_admission import CallAdmission
from router.api.external_scaler import ExternalScalerService, ScalerPort
from router.api.open_inference import OpenInferenceService
from router.api.replay import Replayer
from router.api.request_builder import RequestBuilder
from router.api.rpc_scope import SERVICE
from router.api.service import InferenceService
from router.api.shutdown import OpenCalls
from router.audit.answer_auditor import AnswerAuditor, AuditOptions
from router.audit.kv_auditor import KvAuditor
from router.audit.rerun import Rerunner
from router.audit.verdicts import Verdicts
from router.memory import give_memory_back
from router.model_registry import ModelRegistry
from router.options import ROUTER_MODES, RouterOptions, checked_settings, rereader
from router.prompts.prompts import PromptEncoder
from router.prompts.text_queue import TextQueue
from router.prompts.tokenizer_store import TokenizerStore
from router.requests.request_router import RequestRouter
from router.requests.running import RunningRequests
from router.runtime_config import ConfigStore, ReloadedConfig, RuntimeConfig
from router.scheduling.dispatcher import Dispatcher
from router.scheduling.fair_queue import TenantShares
from router.scheduling.placement import PLACEMENTS
from router.security import RouterSecurity
from router.telemetry.loop_lag import LoopLag
from router.telemetry.metrics import RouterMetrics
from router.telemetry.router_snapshot import RouterSnapshot
from router.workers.addresses import parse_targets
from router.workers.discovery import Discovery
from router.workers.orphans import OrphanTable
from router.workers.worker_pool import WorkerPool

SWITCH_INTERVAL_S: Final = 0.0005

log = structlog.get_logger(__name__)

_CHANNELZ = "grpc.channelz.v1.Channelz"


class Router:
    """One router in this process.

    Attributes:
        server: its gRPC server.
        dispatcher: decides which request goes to which worker, and when.
        requests: its requests.
        pool: its workers.
        discovery: finds the addresses of its workers.
        registry: its models.
        service: its public service.
        admin: the gRPC server of AdminService, None if it is off.
        scrapes: port of its metrics, None if it is off.
        configuration: settings that may change while the router runs.

    Args:
        options: the options at the start.
        reread: reads the configuration again.

    Raises:
        TlsError: the certificate for workers cannot be used.
        ExportError: the environment names an unknown exporter.
    """

    def __init__(self, options: RouterOptions, reread: Callable[[], ReloadedConfig] | None = None) -> None:
        self._options = options
        security = options.security
        dialer = Dialer(security.worker_tls)
        self._serving = asyncio.Event()
        self._health: asyncio.Task[None] | None = None
        self._store = TokenizerStore()
        self._encoder = PromptEncoder(TextQueue())
        self._calls = OpenCalls()
        instance = secrets.token_hex(8)
        self._tracing = setup_tracing("fissile-router", instance, options.trace_slow)
        is_scraped = options.metrics_port is not None
        spans = self._tracing.open_spans
        metrics = setup_metrics("fissile-router", instance, is_scraped=is_scraped, open_spans=spans)
        self._metrics = RouterMetrics(metrics)
        self.server, self.admin = _public_server(options), _admin_server(options)
        self.scrapes = scrape_port(
            options.host, options.metrics_port, self._metrics.table, self.server, options.security.tls
        )
        self.registry = ModelRegistry()
        self.dispatcher = _dispatcher(options)
        self._placement, self._log_level = options.placement, options.log_level
        orphans = OrphanTable(time.monotonic)
        self.requests = RequestRouter(
            self.dispatcher,
            self.registry,
            orphans,
            failover=options.failover,
            slow_client_timeout_s=options.slow_client_timeout_s,
        )
        self.pool = WorkerPool(
            self.dispatcher,
            self.registry,
            self._store,
            self.requests.running,
            orphans,
            dialer,
            self._serving.set,
            failover=options.failover,
            worker_lost=self._refresh,
        )
        self.discovery = Discovery(self.pool.set_workers)
        builder = RequestBuilder(
            self._encoder, self.requests, time.monotonic, options.max_unread_tokens, options.default_max_tokens
        )
        replayer = Replayer(builder, self.requests, self.registry)
        running = self.requests.running
        self._auditor, self._kv_auditor = _auditors(
            options.audit, Rerunner(builder, replayer, running), running, dialer
        )
        has_keys = security.access is not None
        self._admission = CallAdmission(options.tenants, self._calls, time.monotonic, has_keys=has_keys)
        self.service = self._make_service(builder, replayer)
        self.pool.expected.names = frozenset(options.expect_models)
        self._scaler = self._make_scaler()
        if self._kv_auditor is not None:
            self.pool.on_kv_digests = self._kv_auditor.take
        self.configuration = ConfigStore(options.settings(), self._apply, reread)
        self._loop_lag = LoopLag(self._metrics.lag)

    def _make_service(self, builder: RequestBuilder, replayer: Replayer) -> InferenceService:
        observers = [auditor for auditor in (self._auditor, self._kv_auditor) if auditor is not None]
        backend = AnswerBackend(
            self.requests, self.pool.expected, self.registry, builder, self._tracing, time.monotonic, observers
        )
        self._encoder.set_weights(self._options.tenants.weights)
        service = InferenceService(self._admission, backend, replayer, self._encoder, self._metrics)
        add_InferenceServiceServicer_to_server(service, self.server.server)
        others = OpenInferenceService(service, backend, self._encoder, self._calls)
        add_GRPCInferenceServiceServicer_to_server(others, self.server.server)
        return service

    def _make_scaler(self) -> ScalerPort | None:
        options = self._options
        if options.scaler_port is None:
            return None
        service = ExternalScalerService(self.service.calls, self.pool)
        return ScalerPort(options.host, options.scaler_port, options.security.tls, service)

    async def start(self) -> None:
        """Listens, and starts to dial the workers. Health becomes SERVING with the first ready worker.

        Raises:
            PortTakenError: the address cannot be listened on.
            TokenizerError: the tokenizer folder cannot be used.
            TlsError: a certificate cannot be used.
        """
        if self._options.tokenizer is not None:
            await self._store.read_folder(self._options.tokenizer)
        await self.server.start()
        if self.admin is not None:
            shown = admin.shown_options(self._options)
            info = admin.ServerInfo(self.pool.router_id, self.server.address, shown, time.monotonic(), time.time_ns())
            service = admin.AdminService(
                self.pool, self.requests, self.configuration, self._tracing, self._calls, self.service.calls, info
            )
            add_AdminServiceServicer_to_server(service, self.admin.server)
            channelz.add_channelz_servicer(self.admin.server)
            await self.admin.start()
            await self.admin.set_serving(True)
            log.info("admin listening", address=self.admin.address)
        if self._scaler is not None:
            await self._scaler.start()
        if self.scrapes is not None:
            self.scrapes.start()
        self._health = asyncio.create_task(keep_running("health", self._follow_workers), name="health")
        if self._metrics.enabled:
            self._loop_lag.start()
            self._metrics.start(self._snapshot)
        self.discovery.follow(parse_targets(self._options.workers))
        self._tracing.listens_at(self.server.address)
        log.info("router listening", address=self.server.address, workers=list(self._options.workers))

    async def drain(self) -> None:
        """Accepts no new requests, lets streams finish within the drain timeout, then stops."""
        timeout_s = self._options.drain_timeout_s
        log.info("draining", in_flight=self.service.in_flight, timeout_s=timeout_s)
        await self._leave_health()
        stopping = asyncio.create_task(self.server.drain(DRAIN_PROPAGATION_S, timeout_s + ROUTER_ENDING_S))
        idle = asyncio.create_task(self._idle_after(DRAIN_PROPAGATION_S))
        try:
            if self._scaler is not None:
                await self._scaler.stop()
            await asyncio.wait(
                {stopping, idle}, timeout=DRAIN_PROPAGATION_S + timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            await self.stop()
        finally:
            stopping.cancel()
            idle.cancel()
            await asyncio.gather(stopping, idle, return_exceptions=True)

    async def _idle_after(self, propagation_s: float) -> None:
        """Waits until no call is open, after clients have had time to notice the drain."""
        await asyncio.sleep(propagation_s)
        await self._calls.wait_until_none()

    async def stop(self) -> None:
        """Ends open calls and stops everything. May be called at any time, also twice."""
        await self._leave_health()
        if self.service.in_flight:
            log.warning("ending requests", in_flight=self.service.in_flight)
        # Before the server does, so that the status says what the client has received.
        self._calls.end()
        for auditor in (self._auditor, self._kv_auditor):
            if auditor is not None:
                await auditor.stop()
        self.requests.end_streams()
        await self.server.stop(ROUTER_ENDING_S)
        if self._scaler is not None:
            await self._scaler.stop()
        if self.admin is not None:
            await self.admin.stop(ROUTER_ENDING_S)
        await self.discovery.stop()
        await self.pool.stop()
        self.requests.stop()
        self._encoder.close()
        self._loop_lag.stop()
        await self._stop_metrics()
        await asyncio.to_thread(self._tracing.shutdown, TELEMETRY_SHUTDOWN_S)
        log.info("router stopped")

    def reload(self) -> None:
        """Reads the configuration again; an error is logged and changes nothing."""
        try:
            admin.reread(self.configuration)
        except CommandError as error:
            log.error("configuration not reloaded", why=str(error))

    def _apply(self, settings: RuntimeConfig) -> None:
        """Applies new settings, between two dispatch decisions."""
        routing, weights = settings.routing, settings.routing.tenant_weight
        placement = None if routing.placement == self._placement else PLACEMENTS[routing.placement]()
        self._placement = routing.placement
        gate = DelayGate(routing.delay_factor, routing.max_hold_s)
        self.requests.configure(gate, placement, routing.queue_size, weights)
        if placement is not None:
            self.pool.caches.learn_anew(self.pool.sessions())
        limits = weights, routing.tenant_concurrency, routing.tenant_max_priority
        self.service.set_tenants(self._options.tenants.with_limits(*limits))
        if settings.log_level != self._log_level:
            self._log_level = settings.log_level
            setup_logging(settings.log_level, service="router")
        self.discovery.follow(parse_targets(settings.workers))

    def _snapshot(self) -> RouterSnapshot:
        requests, running, workers = self.requests, self.requests.running, self.pool.workers()
        running.lost.forget_departed({worker.worker_id for worker in workers}, time.monotonic())
        return RouterSnapshot(
            in_flight=self.service.in_flight,
            queues=tuple(requests.waiting()),
            waiting=requests.waiting_of_models(),
            lanes=requests.lanes(),
            workers=tuple(workers),
            tables={**requests.tables(), **self.pool.tables(), **self._admission.tables()},
            lost=dict(running.lost.counts),
            releases=running.num_releases,
            released=running.num_released,
            adopted=running.num_adopted,
            unadopted=running.num_unadopted,
            failed=dict(self._metrics.failed),
            usage=dict(self._metrics.usage),
            finished=dict(self._metrics.finished),
            config_version=self.configuration.version,
            audits={} if self._auditor is None else dict(self._auditor.counts),
            kv_digests={} if self._kv_auditor is None else dict(self._kv_auditor.check.counts),
            kv_disputes={} if self._kv_auditor is None else dict(self._kv_auditor.counts),
        )

    async def _stop_metrics(self) -> None:
        self._metrics.stop()
        if self.scrapes is not None:
            await asyncio.to_thread(self.scrapes.stop)
        await asyncio.to_thread(self._metrics.shutdown, TELEMETRY_SHUTDOWN_S)

    def _refresh(self) -> None:
        self.discovery.refresh()

    async def _follow_workers(self) -> None:
        while True:
            self._serving.clear()
            await self.server.set_serving(self.registry.serving or bool(self._options.expect_models))
            await self._serving.wait()

    async def _leave_health(self) -> None:
        if self._health is not None:
            self._health.cancel()
            await asyncio.gather(self._health, return_exceptions=True)


def _public_server(options: RouterOptions) -> GrpcServer:
    security = options.security
    return GrpcServer(
        options.host,
        options.port,
        [SERVICE, open_inference.SERVICE],
        tls=security.tls,
        access=security.access,
        max_connection_age_s=options.max_connection_age_s,
        health_port=security.health_port,
    )


def _admin_server(options: RouterOptions) -> GrpcServer | None:
    if options.admin_port is None:
        return None
    return GrpcServer(
        options.admin_host,
        options.admin_port,
        [admin.SERVICE, _CHANNELZ],
        tls=options.security.admin_tls,
        access=options.security.access,
        bounds=SIDE_PORT,
    )


def _auditors(
    options: AuditOptions, rerunner: Rerunner, running: RunningRequests, dialer: Dialer
) -> tuple[AnswerAuditor | None, KvAuditor | None]:
    """Auditors of the answers and of the workers' KV blocks; None for an audit that is off."""
    verdicts = Verdicts(options.audit_dir, running, dialer)
    auditor = AnswerAuditor(options.audit, rerunner, verdicts) if options.audit else None
    kv_auditor = KvAuditor(rerunner, verdicts) if options.audit_kv else None
    return auditor, kv_auditor


def _dispatcher(options: RouterOptions) -> Dispatcher:
    gate = DelayGate(options.delay_factor, options.max_hold_s)
    placement = PLACEMENTS[options.placement]()
    shares = TenantShares(options.tenants.weights)
    return Dispatcher(gate, placement, shares, options.queue_size, options.failover.worker_wait_s)


def run_on_loop(main: Coroutine[Any, Any, None]) -> None:
    """Runs a router's main coroutine on uvloop, and sets the process up for it."""
    # Time for which a prompt thread may keep the interpreter from the event loop; by default 5 ms, each time.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # Objects made so far stay alive: full garbage collections would traverse them each time, and hold the loop.
    gc.freeze()
    uvloop.run(main)


async def run_router(options: RouterOptions, reread: Callable[[], ReloadedConfig] | None = None) -> None:
    """Serves until SIGTERM or SIGINT, then drains; a second signal ends the drain. SIGHUP reads the options again.

    Args:
        options: the options at the start.
        reread: reads them again.

    Raises:
        CommandError: the router cannot start; one line says what to change.
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
    preparing = asyncio.create_task(_prepare_reading(), name="tokenizers")
    await ending.wait()
    preparing.cancel()
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


async def _prepare_reading() -> None:
    """Imports the tokenizer code of transformers while the workers load, before a request waits for it."""
    await asyncio.to_thread(import_transformers)
    # As in `run_on_loop`: the 45,000 objects of the import live as long as the process.
    gc.freeze()


@click.command(cls=ConfigurableCommand, modes=ROUTER_MODES, context_settings={"help_option_names": ["-h", "--help"]})
@config_option("router")
@options("router")
def router(**given: Any) -> None:
    """Run one router: the public gRPC API in front of any number of workers.

    Ends on SIGTERM or Ctrl-C: health becomes NOT_SERVING, running streams finish, exit code 0.
    """
    security = RouterSecurity.from_parameters(given)
    give_memory_back()
    guard_standard_streams()
    setup_logging(given["log_level"], service="router")
    raise_descriptor_limit()
    checked_settings(given)
    options = replace(RouterOptions.from_parameters(given), security=security)
    run_on_loop(run_router(options, rereader(click.get_current_context())))
