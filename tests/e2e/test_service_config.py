"""The shipped service config: the calls that gRPC retries at another router, and those that it does not."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import grpc
import pytest
from fissile.admin.v1 import admin_pb2 as apb
from fissile.admin.v1.admin_pb2_grpc import AdminServiceStub
from fissile.v1.inference_pb2_grpc import InferenceServiceStub
from google.rpc import error_details_pb2

from tests.e2e.fake_worker import FakeWorker, short
from tests.e2e.router_bench import FILES, Bench, bench, collect, detail, error_of, request, until
from tests.e2e.service import REPOSITORY

SHIPPED = (REPOSITORY / "deploy" / "clients" / "service-config.json").read_text("utf-8")


def channel_to(*routers: Bench, config: str = SHIPPED) -> grpc.aio.Channel:
    targets = ",".join(b.router.server.address for b in routers)
    return grpc.aio.insecure_channel(f"ipv4:{targets}", options=[("grpc.service_config", config)])


async def code_of(call: Any) -> str:
    try:
        await collect(call)
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


def seeds_at_workers(router: Bench) -> set[int]:
    """Seeds of the requests that a router gave to workers: gRPC retries no call whose answer has begun."""
    return {sequence.seed for worker in router.workers for sequence in worker.submitted}


@pytest.mark.parametrize("retries_cancelled", [True, False])
async def test_calls_unseen_by_stopped_server_are_retried_elsewhere(retries_cancelled: bool) -> None:
    """Calls that arrive between the stop of gRPC's core and its GOAWAY end as CANCELLED; no router sees them.

    The test stops the core while many calls wait to be accepted. Otherwise one or two in a thousand would end so.
    """
    shipped = json.loads(SHIPPED)
    (method,) = shipped["methodConfig"]
    # A short backoff makes the test quicker.
    method["retryPolicy"]["initialBackoff"] = "0.01s"
    if not retries_cancelled:
        method["retryPolicy"]["retryableStatusCodes"] = ["UNAVAILABLE"]
    async with (
        bench(FakeWorker(FILES, answer=short)) as ends,
        bench(FakeWorker(FILES, answer=short)) as stays,
        channel_to(ends, stays, config=json.dumps(shipped)) as channel,
    ):
        stub = InferenceServiceStub(channel)
        for i in range(4):
            await collect(stub.Generate(request(request_id=f"warm {i}"), wait_for_ready=True))
        calls = [stub.Generate(request(params={"max_tokens": 2, "seed": seed})) for seed in range(1, 401)]
        await until(lambda: ends.router.service.in_flight > 0)
        # Bypasses `GrpcServer.stop`, which would accept the calls that arrived and refuse them.
        await ends.router.server.server.stop(0)
        all_codes = await asyncio.gather(*map(code_of, calls))
        begun = seeds_at_workers(ends)
        codes = Counter(code for seed, code in enumerate(all_codes, 1) if seed not in begun)
        if retries_cancelled:
            assert set(codes) == {"OK"}, codes
        else:
            assert codes["CANCELLED"] > 0, codes


async def test_call_cancelled_by_operator_is_not_retried() -> None:
    """A policy that retries every CANCELLED would undo `fissile cancel`."""
    worker = FakeWorker(FILES, room_seqs=1, step_s=0.01)
    async with bench(worker, admin_port=0) as b, channel_to(b) as channel:
        assert b.router.admin is not None
        first = b.stub.Generate(request(request_id="first", params={"max_tokens": 4000}))
        await first.read()
        waiting = InferenceServiceStub(channel).Generate(request(request_id="waiting", params={"max_tokens": 4000}))
        await until(lambda: len(b.router.dispatcher) == 1)
        async with grpc.aio.insecure_channel(b.router.admin.address) as operator:
            await AdminServiceStub(operator).CancelRequest(apb.CancelRequestRequest(request_id="waiting"))
            error = await error_of(waiting)
        assert error.code() is grpc.StatusCode.CANCELLED
        assert detail(error, error_details_pb2.ErrorInfo).reason == "CANCELLED_BY_OPERATOR"
        # No second attempt arrives: only the first request is in flight.
        await asyncio.sleep(0.5)
        assert b.router.service.in_flight == 1
        first.cancel()
        await b.empty()
