"""AdminService: the API of a router for operators, on its own port."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import grpc
import structlog
from fissile.admin.v1 import admin_pb2 as apb
from fissile.admin.v1.admin_pb2_grpc import AdminServiceServicer
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb
from fissile.worker.v1.worker_pb2_grpc import WorkerServiceStub
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from common.cli.core.errors import CommandError
from common.errors import (
    ApiError,
    BadConfigurationError,
    InvalidFieldError,
    NoWorkerError,
    TooManyWatchesError,
    UnknownWorkerError,
)
from common.limits import CONNECT_TIMEOUT_S, FLUSH_TIMEOUT_S, MAX_LOAD_WATCHES, MIN_WATCH_INTERVAL_S
from common.params.names import PRIORITIES
from common.rpc.durations import to_duration, to_seconds
from common.rpc.unsupported_fields import field_paths, refuse_unserved
from common.telemetry.request_record import shown
from common.telemetry.tracing import SpanFactory
from common.version import fissile_version
from common.wire.peer_numbers import as_uint64
from router.api.in_flight import InFlightCall, InFlightCalls
from router.api.pages import page_of
from router.api.rpc_scope import Context, RpcScope
from router.api.shutdown import OpenCalls
from router.requests.request_router import RequestRouter
from router.requests.stream import RequestStream
from router.runtime_config import ConfigStore, ReloadResult, RoutingConfig
from router.workers.session import WorkerState
from router.workers.worker_pool import WorkerPool
from router.workers.worker_record import KnownWorker

if TYPE_CHECKING:
    # In the type stubs only: at run time the one stub class serves both kinds of channel.
    from fissile.worker.v1.worker_pb2_grpc import WorkerServiceAsyncStub

SERVICE = "fissile.admin.v1.AdminService"
_WATCH_INTERVAL_S: Final = 1.0
_DEFAULT_PAGE: Final = 100
# Largest Duration, in seconds (google/protobuf/duration.proto).
_MAX_SECONDS: Final = 315_576_000_000
# Options that GetServerInfo does not show: files of keys and certificates, and the tenants, which GetRouting shows.
_HIDDEN_OPTIONS: Final = frozenset({"security", "tenants"})
_FRACTION_OPTIONS: Final = frozenset({"audit"})
# Fields whose option has another name.
_OPTION_OF: Final = {"policy": "failover", "workers": "worker", "expect_models": "expect-model"}
_STATES: Final = {state: apb.WorkerState.Value(f"WORKER_STATE_{state.name}") for state in WorkerState}
# Fields of a lane for the external scaler alone.
_AUTOSCALER_FIELDS: Final = ("fleet_age_s", "elsewhere_tokens")
_ROUTING_FIELDS: Final = frozenset(apb.Routing.DESCRIPTOR.fields_by_name)
_SET_ROUTING: Final = frozenset(field_paths(apb.SetRoutingRequest.DESCRIPTOR))

log = structlog.get_logger(__name__)


class ServerInfo:
    """Description of a router that holds for its life.

    Args:
        router_id: the id of its process, which workers know.
        address: of its public service.
        options: as `shown_options` gives them.
        started: monotonic seconds.
        start_time_ns: the same moment, since the epoch.
    """

    def __init__(
        self, router_id: str, address: str, options: Mapping[str, str], started: float, start_time_ns: int
    ) -> None:
        self._router_id = router_id
        self._address = address
        self._options = options
        self._started = started
        self._start_time = Timestamp()
        self._start_time.FromNanoseconds(start_time_ns)

    def describe(self, now: float, config_version: int, in_flight: int) -> apb.GetServerInfoResponse:
        """The response of GetServerInfo; `now` in monotonic seconds."""
        return apb.GetServerInfoResponse(
            version=fissile_version(),
            router_id=self._router_id,
            start_time=self._start_time,
            uptime=to_duration(now - self._started),
            address=self._address,
            options=self._options,
            config_version=config_version,
            in_flight=in_flight,
        )


class AdminService(AdminServiceServicer):
    """The admin RPCs of one router.

    Args:
        pool: its workers.
        requests: its requests.
        configuration: options that may change while it runs.
        tracing: makes a span per call.
        calls: all open calls, which end with the router.
        in_flight: the clients' calls that run requests on workers.
        server: describes the router.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        pool: WorkerPool,
        requests: RequestRouter,
        configuration: ConfigStore,
        tracing: SpanFactory,
        calls: OpenCalls,
        in_flight: InFlightCalls,
        server: ServerInfo,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._in_flight = in_flight
        self._server = server
        self._clock = clock
        self._pool = pool
        self._requests = requests
        self._configuration = configuration
        self._tracing = tracing
        self._calls = calls
        self._watches = 0

    # Workers.

    async def ListWorkers(self, request: apb.ListWorkersRequest, context: Context) -> apb.ListWorkersResponse:
        """Lists the workers, connected or not."""
        async with RpcScope(self._tracing, context, "ListWorkers", service=SERVICE):
            refuse_unserved(request)
            return apb.ListWorkersResponse(workers=map(_worker, self._pool.workers()))

    async def CordonWorker(self, request: apb.CordonWorkerRequest, context: Context) -> apb.CordonWorkerResponse:
        """Forwards the call to the worker, which tells all its routers."""
        async with RpcScope(self._tracing, context, "CordonWorker", service=SERVICE):
            refuse_unserved(request, frozenset({"worker_id", "evict"}))
            intake = wpb.INTAKE_EVICTING if request.evict else wpb.INTAKE_CORDONED
            return apb.CordonWorkerResponse(sequences=await self._set_intake(request.worker_id, intake))

    async def UncordonWorker(self, request: apb.UncordonWorkerRequest, context: Context) -> apb.UncordonWorkerResponse:
        """Forwards the call to the worker, which tells all its routers."""
        async with RpcScope(self._tracing, context, "UncordonWorker", service=SERVICE):
            refuse_unserved(request, frozenset({"worker_id"}))
            await self._set_intake(request.worker_id, wpb.INTAKE_OPEN)
            return apb.UncordonWorkerResponse()

    async def DrainWorker(self, request: apb.DrainWorkerRequest, context: Context) -> apb.DrainWorkerResponse:
        """Forwards the call to the worker, which tells all its routers."""
        async with RpcScope(self._tracing, context, "DrainWorker", service=SERVICE):
            refuse_unserved(request, frozenset({"worker_id", "deadline"}))
            wanted = wpb.DrainRequest(deadline_ms=round(1000 * _checked_seconds("deadline", request.deadline)))
            async with self._worker_stub(self._find(request.worker_id)) as stub:
                answer = await stub.Drain(wanted, timeout=CONNECT_TIMEOUT_S)
            return apb.DrainWorkerResponse(sequences=answer.sequences)

    async def WatchLoad(self, request: apb.WatchLoadRequest, context: Context) -> None:  # type: ignore[override]
        """Sends the load at an interval until the client cancels, or `count` messages were sent."""
        async with RpcScope(self._tracing, context, "WatchLoad", service=SERVICE):
            refuse_unserved(request, frozenset({"interval", "count"}))
            interval_s = _WATCH_INTERVAL_S
            if request.HasField("interval"):
                interval_s = _checked_seconds("interval", request.interval, MIN_WATCH_INTERVAL_S)
            with self._watching():
                await context.send_initial_metadata(())
                with self._calls.interruptible():
                    await self._watch(context, request.count, interval_s)

    async def FlushCaches(self, request: apb.FlushCachesRequest, context: Context) -> apb.FlushCachesResponse:
        """Forwards the call to one worker, or to all at once."""
        async with RpcScope(self._tracing, context, "FlushCaches", service=SERVICE):
            refuse_unserved(request, frozenset({"worker_id"}))
            workers = [self._find(request.worker_id)] if request.worker_id else self._connected()
            caches = await asyncio.gather(*map(self._flush, workers))
            return apb.FlushCachesResponse(caches=sorted(caches, key=lambda cache: cache.worker_id))

    async def ListSteps(self, request: apb.ListStepsRequest, context: Context) -> apb.ListStepsResponse:
        """Forwards the call to the worker."""
        async with RpcScope(self._tracing, context, "ListSteps", service=SERVICE):
            refuse_unserved(request, frozenset({"worker_id", "last", "request_id", "before"}))
            wanted = wpb.ListStepsRequest(last=request.last, request_id=request.request_id, before=request.before)
            async with self._worker_stub(self._find(request.worker_id)) as stub:
                answer = await stub.ListSteps(wanted, timeout=CONNECT_TIMEOUT_S)
            return apb.ListStepsResponse(steps=answer.steps)

    # Configuration.

    async def GetRouting(self, request: apb.GetRoutingRequest, context: Context) -> apb.GetRoutingResponse:
        """Returns the routing in force."""
        async with RpcScope(self._tracing, context, "GetRouting", service=SERVICE):
            refuse_unserved(request)
            in_force = self._configuration
            return apb.GetRoutingResponse(routing=_proto(in_force.settings.routing), version=in_force.version)

    async def SetRouting(self, request: apb.SetRoutingRequest, context: Context) -> apb.SetRoutingResponse:
        """Changes the routing, all fields or none."""
        async with RpcScope(self._tracing, context, "SetRouting", service=SERVICE):
            refuse_unserved(request, _SET_ROUTING)
            in_force = self._configuration
            in_force.set_routing(_merged(in_force.settings.routing, request), request.if_version)
            return apb.SetRoutingResponse(routing=_proto(in_force.settings.routing), version=in_force.version)

    async def Reload(self, request: apb.ReloadRequest, context: Context) -> apb.ReloadResponse:
        """Reads the configuration again, all or nothing."""
        async with RpcScope(self._tracing, context, "Reload", service=SERVICE):
            refuse_unserved(request)
            try:
                done = reread(self._configuration)
            except CommandError as error:
                raise BadConfigurationError(str(error)) from None
            return apb.ReloadResponse(
                version=done.version, changed=done.changed, needs_restart=done.needs_restart, undone=done.undone
            )

    # Requests, and the router itself.

    async def ListRequests(self, request: apb.ListRequestsRequest, context: Context) -> apb.ListRequestsResponse:
        """Lists the calls in flight."""
        async with RpcScope(self._tracing, context, "ListRequests", service=SERVICE):
            refuse_unserved(request, frozenset({"tenant", "page_size", "page_token"}))
            return _listed(self._in_flight, request, self._clock())

    async def CancelRequest(self, request: apb.CancelRequestRequest, context: Context) -> apb.CancelRequestResponse:
        """Ends a call in flight."""
        async with RpcScope(self._tracing, context, "CancelRequest", service=SERVICE):
            refuse_unserved(request, frozenset({"request_id", "tenant"}))
            self._in_flight.cancel(request.tenant, request.request_id)
            log.warning("an operator has ended a request", request_id=shown(request.request_id), tenant=request.tenant)
            return apb.CancelRequestResponse()

    async def GetServerInfo(self, request: apb.GetServerInfoRequest, context: Context) -> apb.GetServerInfoResponse:
        """Describes the router."""
        async with RpcScope(self._tracing, context, "GetServerInfo", service=SERVICE):
            refuse_unserved(request)
            return self._server.describe(self._clock(), self._configuration.version, len(self._in_flight))

    # Shared by the methods above.

    def _connected(self) -> list[KnownWorker]:
        return [worker for worker in self._pool.workers() if worker.state is not WorkerState.UNCONNECTED]

    def _find(self, worker_id: str) -> KnownWorker:
        known = {worker.worker_id: worker for worker in self._connected()}
        if worker_id not in known:
            raise UnknownWorkerError(worker_id, sorted(known))
        return known[worker_id]

    @contextlib.asynccontextmanager
    async def _worker_stub(self, worker: KnownWorker) -> AsyncIterator[WorkerServiceAsyncStub]:
        """A worker's service. Its errors become UNAVAILABLE, which is no failure of the router."""
        with self._calls.interruptible():
            async with self._pool.dialer.channel(worker.address) as channel:
                try:
                    yield WorkerServiceStub(channel)
                except grpc.aio.AioRpcError as error:
                    why = f"{error.code().name}: {error.details()}"
                    raise NoWorkerError(f"the worker at {worker.address} refused: {why}") from None

    async def _set_intake(self, worker_id: str, intake: wpb.Intake.ValueType) -> int:
        """Sets what work a worker takes. Returns the number of its sequences."""
        async with self._worker_stub(self._find(worker_id)) as stub:
            answer = await stub.SetIntake(wpb.SetIntakeRequest(intake=intake), timeout=CONNECT_TIMEOUT_S)
        return answer.sequences

    async def _flush(self, worker: KnownWorker) -> apb.FlushedCache:
        try:
            async with self._worker_stub(worker) as stub:
                # The worker flushes between two steps, and a step may take long.
                answer = await stub.FlushCache(wpb.FlushCacheRequest(), timeout=FLUSH_TIMEOUT_S)
        except ApiError as error:
            return apb.FlushedCache(worker_id=worker.worker_id, error=str(error))
        return apb.FlushedCache(worker_id=worker.worker_id, blocks=answer.blocks)

    async def _watch(self, context: Context, count: int, interval_s: float) -> None:
        sent = 0
        while True:
            await context.write(self._load())
            sent += 1
            if sent == count:
                return
            await asyncio.sleep(interval_s)

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Counts one of a bounded number of load streams."""
        if self._watches >= MAX_LOAD_WATCHES:
            raise TooManyWatchesError(MAX_LOAD_WATCHES)
        self._watches += 1
        try:
            yield
        finally:
            self._watches -= 1

    def _load(self) -> apb.WatchLoadResponse:
        queues = [
            apb.QueueLoad(
                priority=pb.Priority.ValueType(PRIORITIES[each.name]),
                waiting=each.waiting,
                oldest_age=to_duration(each.oldest_age_s) if each.waiting else None,
            )
            for each in self._requests.waiting()
        ]
        workers = map(_worker, self._pool.workers())
        return apb.WatchLoadResponse(workers=workers, queues=queues, in_flight=self._requests.in_flight)


def shown_options(options: Any) -> dict[str, str]:
    """Options as text by their names, without secrets; `options` is a dataclass with a field for each."""
    return dict(_option_texts(options))


def _option_texts(options: Any) -> Iterator[tuple[str, str]]:
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name in _HIDDEN_OPTIONS:
            continue
        if is_dataclass(value):
            yield from _option_texts(value)
        else:
            name = _OPTION_OF.get(field.name, field.name)
            yield name.removesuffix("_s").replace("_", "-"), _option_text(field.name, value)


def _option_text(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    if name in _FRACTION_OPTIONS:
        return f"{100 * value:g}%"
    return f"{value:g}s" if name.endswith("_s") else str(getattr(value, "value", value))


def reread(configuration: ConfigStore) -> ReloadResult:
    """Reads a configuration again, and logs what changed and which changes need attention.

    Raises:
        CommandError: the configuration is wrong; nothing changed.
    """
    done = configuration.reload()
    log.info("configuration reloaded", version=done.version, changed=list(done.changed))
    if done.undone:
        log.warning("settings of SetRouting replaced by the configuration", options=list(done.undone))
    if done.needs_restart:
        log.warning("changed options need a restart", options=list(done.needs_restart))
    return done


def _worker(worker: KnownWorker) -> apb.Worker:
    return apb.Worker(
        worker_id=worker.worker_id,
        address=worker.address,
        instance_id=worker.instance_id,
        model=worker.model,
        numerics=worker.numerics,
        kernels=worker.kernels,
        version=worker.version,
        running=worker.running,
        state=_STATES[worker.state],
        last_error=worker.last_error,
        draft_method=worker.draft_method,
        num_speculative_tokens=worker.num_speculative_tokens,
        drafts=[
            pb.DraftCounts(verified=as_uint64(verified), accepted=as_uint64(accepted))
            for verified, accepted in worker.drafts
        ],
        answers=apb.AnswerTotals(
            output_tokens=worker.answers.output_tokens,
            first_tokens=worker.answers.first_tokens,
            time_to_first_token=to_duration(worker.answers.ttft_s),
            later_tokens=worker.answers.later_tokens,
            decode_time=to_duration(worker.answers.decode_s),
        ),
        **_load_of(worker),
    )


def _listed(calls: InFlightCalls, request: apb.ListRequestsRequest, now: float) -> apb.ListRequestsResponse:
    """One page of the calls in flight, oldest first; `now` in monotonic seconds.

    Raises:
        InvalidFieldError: the page size or the page token is not valid.
    """
    wanted = [call for call in calls if not request.tenant or call.tenant == request.tenant]
    # Numbers of calls grow with time; padded, they sort as text.
    keys = [f"{call.number:020d}" for call in wanted]
    page, following = page_of(wanted, keys, request.page_size, request.page_token, _DEFAULT_PAGE)
    return apb.ListRequestsResponse(requests=[_request(call, now) for call in page], next_page_token=following)


def _request(call: InFlightCall, now: float) -> apb.InFlightRequest:
    running = next((stream for stream in call.streams if not stream.assembly.is_closed), None)
    return apb.InFlightRequest(
        request_id=shown(call.request_id),
        tenant=shown(call.tenant),
        model=shown(call.model),
        method=call.method,
        priority=pb.Priority.ValueType(call.priority),
        state=_state(call),
        age=to_duration(now - call.arrived),
        prompt_tokens=call.prompt_tokens,
        output_tokens=sum(stream.assembly.delivered for stream in call.streams),
        worker_id="" if running is None or running.session is None else running.assembly.worker_id,
        attempts=max((len(stream.attempts) for stream in call.streams), default=0),
        trace_id=call.span.trace_id,
    )


def _state(call: InFlightCall) -> apb.RequestState.ValueType:
    """State of the call's most advanced answer."""
    return max((_state_of(stream) for stream in call.streams), default=apb.REQUEST_STATE_PREPARING)


def _state_of(stream: RequestStream) -> apb.RequestState.ValueType:
    # Tokens that a client received of a broken stream do not count.
    if stream.assembly.first_token_time is not None:
        return apb.REQUEST_STATE_STREAMING
    return apb.REQUEST_STATE_QUEUED if stream.session is None else apb.REQUEST_STATE_SUBMITTED


def _load_of(worker: KnownWorker) -> dict[str, Any]:
    """Load of a worker, as fields of `apb.Worker`."""
    if worker.load is None:
        return {}
    fields = asdict(worker.load)
    for name in _AUTOSCALER_FIELDS:
        del fields[name]
    age_s = fields.pop("report_age_ms") / 1000
    return {**fields, "report_age": to_duration(age_s)}


def _proto(routing: RoutingConfig) -> apb.Routing:
    """The routing as a message: fields of the same names, but `max_hold` is a Duration."""
    values = {each.name: getattr(routing, each.name) for each in fields(routing)}
    return apb.Routing(max_hold=to_duration(values.pop("max_hold_s")), **values)


def _merged(routing: RoutingConfig, request: apb.SetRoutingRequest) -> RoutingConfig:
    """The routing with the fields that a request sets.

    Raises:
        InvalidFieldError: an unknown field, a value out of range, or no field.
    """
    given = request.routing
    paths: Sequence[str] = request.update_mask.paths or [field.name for field, _ in given.ListFields()]
    allowed = ", ".join(sorted(_ROUTING_FIELDS))
    for path in paths:
        if path not in _ROUTING_FIELDS:
            raise InvalidFieldError("update_mask", f"names {path!r}", f"fields of Routing: {allowed}")
    if not paths:
        raise InvalidFieldError("routing", "has no field, and there is no update_mask", f"any of {allowed}")
    values: dict[str, Any] = {path: getattr(given, path) for path in paths}
    changed: dict[str, Any] = {
        path: dict(value) if isinstance(value, Mapping) else value for path, value in values.items()
    }
    if "max_hold" in changed:
        changed["max_hold_s"] = _checked_seconds("routing.max_hold", changed.pop("max_hold"))
    return replace(routing, **changed)


def _checked_seconds(path: str, duration: Duration, least: float = 0.0) -> float:
    """A client's Duration in seconds, checked.

    Args:
        path: of the field, for the error.
        duration: as the client sent it.
        least: shortest valid, seconds.

    Raises:
        InvalidFieldError: it is malformed or out of range.
    """
    whole, nanos = duration.seconds, duration.nanos
    same_sign = whole == 0 or nanos == 0 or (whole > 0) == (nanos > 0)
    seconds = to_seconds(duration)
    if not same_sign or abs(nanos) > 999_999_999 or not least <= seconds <= _MAX_SECONDS:
        raise InvalidFieldError(path, f"is {seconds:g} s", f"a duration of at least {least:g} s")
    return seconds
