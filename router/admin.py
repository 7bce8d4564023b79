"""AdminService: what operators call on a router, on a port of its own."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import grpc
from fissile.admin.v1 import admin_pb2 as apb
from fissile.admin.v1.admin_pb2_grpc import AdminServiceServicer
from fissile.worker.v1 import worker_pb2 as wpb
from fissile.worker.v1.worker_pb2_grpc import WorkerServiceStub

from common.errors import NoWorkerError, UnknownWorkerError
from common.limits import CONNECT_TIMEOUT_S
from common.rpc.tls import Dialer
from common.rpc.unserved import refuse_unserved
from common.telemetry.tracing import Tracing
from router.call import Call, Context
from router.fleet import Fleet

if TYPE_CHECKING:
    # In the type stubs only: at run time the one stub class serves both kinds of channel.
    from fissile.worker.v1.worker_pb2_grpc import WorkerServiceAsyncStub

SERVICE = "fissile.admin.v1.AdminService"


class AdminService(AdminServiceServicer):
    """The administration of one router.

    Args:
        fleet: its workers.
        tracing: makes a span per call.
    """

    def __init__(self, fleet: Fleet, tracing: Tracing) -> None:
        self._fleet = fleet
        self._tracing = tracing

    async def ListWorkers(self, request: apb.ListWorkersRequest, context: Context) -> apb.ListWorkersResponse:
        """Lists the workers that the router is connected to."""
        async with Call(self._tracing, context, "ListWorkers", service=SERVICE):
            workers = [
                apb.Worker(
                    worker_id=worker.worker_id,
                    address=worker.address,
                    instance_id=worker.instance_id,
                    model=worker.model,
                    numerics=worker.numerics,
                    draining=worker.draining,
                    running=worker.running,
                    **asdict(worker.load),
                )
                for worker in self._fleet.workers()
            ]
            return apb.ListWorkersResponse(workers=workers)

    async def DrainWorker(self, request: apb.DrainWorkerRequest, context: Context) -> apb.DrainWorkerResponse:
        """Passes the wish to the worker, which tells all its routers."""
        async with Call(self._tracing, context, "DrainWorker", service=SERVICE):
            refuse_unserved(request, frozenset({"worker_id", "deadline_ms"}))
            workers = {worker.worker_id: worker.address for worker in self._fleet.workers()}
            if request.worker_id not in workers:
                raise UnknownWorkerError(request.worker_id, sorted(workers))
            return await _drain(self._fleet.dialer, workers[request.worker_id], request.deadline_ms)


async def _drain(dialer: Dialer, address: str, deadline_ms: int) -> apb.DrainWorkerResponse:
    async with dialer.channel(address) as channel:
        stub: WorkerServiceAsyncStub = WorkerServiceStub(channel)
        try:
            answer = await stub.Drain(wpb.DrainRequest(deadline_ms=deadline_ms), timeout=CONNECT_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise NoWorkerError(f"the worker at {address} does not answer: {error.details()}") from None
    return apb.DrainWorkerResponse(sequences=answer.sequences)
