"""KEDA's external scaler: a port of the router that says how many workers a ScaledObject needs.

KEDA sends no API key, so the port asks for none; it has the TLS of the main port. It balances its calls over all
routers behind `scalerAddress`, and keeps each stream at one of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

import structlog
from fissile.peers.keda import external_scaler_pb2 as kpb
from fissile.peers.keda.external_scaler_pb2_grpc import ExternalScalerServicer, add_ExternalScalerServicer_to_server

from common.errors import RouterEndingError, TooManyWatchesError
from common.limits import FIGURES_EVERY_S, MAX_LOAD_WATCHES, MAX_SCRAPE_REQUEST_BYTES, ROUTER_ENDING_S
from common.rpc.server import SIDE_PORT, GrpcServer
from common.rpc.tls import ServerTls
from common.telemetry.tracing import SpanFactory
from router.api.in_flight import InFlightCalls
from router.api.rpc_scope import Context, RpcScope
from router.api.scaling import ScalingTrigger, has_work, scaling_load
from router.api.shutdown import OpenCalls
from router.workers.worker_pool import WorkerPool

SERVICE: Final = "externalscaler.ExternalScaler"

log = structlog.get_logger(__name__)


class ExternalScalerService(ExternalScalerServicer):
    """The RPCs that KEDA calls.

    Args:
        calls: the router's calls in flight.
        pool: its workers.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        calls: InFlightCalls,
        pool: WorkerPool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._calls = calls
        self._pool = pool
        # Makes no spans: KEDA asks every few seconds, and traces are about requests.
        self._tracing = SpanFactory()
        self._clock = clock
        self._streams = OpenCalls()
        self._num_streams = 0

    def end_streams(self) -> None:
        """Ends all streams with OK, after which KEDA opens new ones at once, at another router."""
        self._streams.end()

    async def IsActive(self, request: kpb.ScaledObjectRef, context: Context) -> kpb.IsActiveResponse:
        """Says whether the model of a trigger has work."""
        async with RpcScope(self._tracing, context, "IsActive", service=SERVICE):
            trigger = ScalingTrigger.from_metadata(request.scalerMetadata)
            return kpb.IsActiveResponse(result=self._is_active(trigger))

    async def StreamIsActive(self, request: kpb.ScaledObjectRef, context: Context) -> None:  # type: ignore[override]
        """Says so at once, and within FIGURES_EVERY_S of a change."""
        async with RpcScope(self._tracing, context, "StreamIsActive", service=SERVICE):
            trigger = ScalingTrigger.from_metadata(request.scalerMetadata)
            async with self._stream(context):
                said = None
                while True:
                    if (is_active := self._is_active(trigger)) != said:
                        await context.write(kpb.IsActiveResponse(result=is_active))
                        said = is_active
                    await asyncio.sleep(FIGURES_EVERY_S)

    async def GetMetricSpec(self, request: kpb.ScaledObjectRef, context: Context) -> kpb.GetMetricSpecResponse:
        """Names the metrics of a trigger and their targets."""
        async with RpcScope(self._tracing, context, "GetMetricSpec", service=SERVICE):
            return _specs(ScalingTrigger.from_metadata(request.scalerMetadata))

    async def StreamMetricSpec(self, request: kpb.ScaledObjectRef, context: Context) -> None:  # type: ignore[override]
        """Names them once: they change with the ScaledObject alone, for which KEDA opens a new stream."""
        async with RpcScope(self._tracing, context, "StreamMetricSpec", service=SERVICE):
            specs = _specs(ScalingTrigger.from_metadata(request.scalerMetadata))
            async with self._stream(context):
                await context.write(specs)
                await asyncio.Event().wait()

    async def GetMetrics(self, request: kpb.GetMetricsRequest, context: Context) -> kpb.GetMetricsResponse:
        """Returns the value of one metric of a trigger."""
        async with RpcScope(self._tracing, context, "GetMetrics", service=SERVICE):
            trigger = ScalingTrigger.from_metadata(request.scaledObjectRef.scalerMetadata)
            metric = trigger.metric(request.metricName)
            load = scaling_load(trigger.model, self._calls, self._pool.workers(), self._clock())
            value = kpb.MetricValue(metricName=metric.name, metricValueFloat=metric.value(load))
            return kpb.GetMetricsResponse(metricValues=[value])

    def _is_active(self, trigger: ScalingTrigger) -> bool:
        return has_work(trigger.model, self._calls, self._pool.workers)

    @contextlib.asynccontextmanager
    async def _stream(self, context: Context) -> AsyncIterator[None]:
        """Counts one of a bounded number of streams; `end_streams` ends the block."""
        if self._num_streams >= MAX_LOAD_WATCHES:
            raise TooManyWatchesError(MAX_LOAD_WATCHES)
        self._num_streams += 1
        try:
            # Sent before: gRPC sends no status after a first message that was broken off.
            await context.send_initial_metadata(())
            with contextlib.suppress(RouterEndingError), self._streams.interruptible():
                yield
        finally:
            self._num_streams -= 1


def _specs(trigger: ScalingTrigger) -> kpb.GetMetricSpecResponse:
    specs = [kpb.MetricSpec(metricName=each.name, targetSizeFloat=each.target) for each in trigger.metrics.values()]
    return kpb.GetMetricSpecResponse(metricSpecs=specs)


class ScalerPort:
    """The port of the scaler.

    Args:
        host: address to listen on.
        port: TCP port; 0 for any free one.
        tls: certificate of the router.
        service: the RPCs.
    """

    def __init__(self, host: str, port: int, tls: ServerTls | None, service: ExternalScalerService) -> None:
        self._service = service
        self._server = GrpcServer(
            host, port, [SERVICE], max_message_bytes=MAX_SCRAPE_REQUEST_BYTES, tls=tls, bounds=SIDE_PORT
        )
        add_ExternalScalerServicer_to_server(service, self._server.server)

    async def start(self) -> None:
        """Listens.

        Raises:
            PortTakenError: the address cannot be listened on.
            TlsError: the certificate cannot be used.
        """
        await self._server.start()
        await self._server.set_serving(True)
        log.info("external scaler listening", address=self._server.address)

    async def stop(self) -> None:
        """Ends the streams and closes the port. May be called twice."""
        self._service.end_streams()
        await self._server.stop(ROUTER_ENDING_S)
