"""The router as KEDA's external scaler, called as KEDA calls it: by a client made from KEDA's proto."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from fissile.peers.keda import external_scaler_pb2 as kpb
from fissile.peers.keda.external_scaler_pb2_grpc import ExternalScalerStub
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2

from common.limits import MAX_LOAD_WATCHES
from common.rpc.api_keys import Role, new_key
from common.rpc.auth import KeyAccess
from common.rpc.key_store import KeyStore
from common.rpc.tls import ServerTls
from router.api.external_scaler import ExternalScalerService
from router.app import Router
from router.options import RouterOptions
from router.scheduling.failover import FailoverOptions
from router.security import RouterSecurity
from tests.certificates import LOOPBACK, Authority
from tests.e2e.fake_worker import FakeWorker, letters, short
from tests.e2e.http_bench import facade_of
from tests.e2e.router_bench import FILES, Bench, bench, collect, detail, error_of, request, until, until_health
from tests.e2e.service import free_port

if TYPE_CHECKING:
    from fissile.peers.keda.external_scaler_pb2_grpc import ExternalScalerAsyncStub

WAIT = FailoverOptions(worker_wait_s=600.0)


def trigger(**metadata: str) -> kpb.ScaledObjectRef:
    """A trigger's metadata as KEDA sends it, with the keys of its own."""
    return kpb.ScaledObjectRef(
        name="fissile-worker", namespace="llm", scalerMetadata={"scalerAddress": "r:1", "requests": "4", **metadata}
    )


@contextlib.asynccontextmanager
async def scaler(*workers: FakeWorker, **options: Any) -> AsyncIterator[tuple[Bench, ExternalScalerAsyncStub]]:
    """A router with a scaler's port, and KEDA's client of it."""
    port = free_port()
    async with (
        bench(*workers, scaler_port=port, **options) as made,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield made, ExternalScalerStub(channel)


async def value(stub: ExternalScalerAsyncStub, name: str, ref: kpb.ScaledObjectRef) -> float:
    response = await stub.GetMetrics(kpb.GetMetricsRequest(scaledObjectRef=ref, metricName=name), timeout=60)
    (found,) = response.metricValues
    assert found.metricName == name
    return found.metricValueFloat


async def first_of(stream: Any) -> Any:
    """The next message of a stream."""
    return await stream.read()


async def is_active(stub: ExternalScalerAsyncStub, ref: kpb.ScaledObjectRef) -> bool:
    return bool((await stub.IsActive(ref, timeout=60)).result)


@pytest.mark.parametrize("named", ["m", ""])
async def test_first_request_wakes_a_fleet_of_no_workers(named: str) -> None:
    """From zero: KEDA hears of the first request on its stream, a worker starts, and the request is answered."""
    worker = FakeWorker(FILES, answer=short, port=free_port())
    port, address = free_port(), f"127.0.0.1:{worker.port}"
    router = Router(RouterOptions([address], port=0, scaler_port=port, expect_models=("m",), failover=WAIT))
    await router.start()
    async with (
        grpc.aio.insecure_channel(router.server.address) as clients,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        await until_health(clients, health_pb2.HealthCheckResponse.SERVING)
        stub: ExternalScalerAsyncStub = ExternalScalerStub(channel)
        stream = stub.StreamIsActive(trigger(model="m"), timeout=120)
        assert (await first_of(stream)).result is False
        answer = asyncio.ensure_future(
            collect(InferenceServiceStub(clients).Generate(request(model=named), timeout=120))
        )
        assert (await first_of(stream)).result is True
        assert await value(stub, "requests", trigger(model="m")) == 1
        assert await value(stub, "queue-age", trigger(model="m", queueAge="2s")) > 0
        # KEDA does this.
        await worker.start()
        assert (await answer)[-1].finish.reason == pb.FINISH_REASON_STOP
        assert (await first_of(stream)).result is False
    await router.stop()
    await worker.stop()


async def test_first_http_request_wakes_a_fleet_of_no_workers() -> None:
    """Former fault: without a worker the facade was not ready, so its Service had no endpoint for the first request."""
    worker = FakeWorker(FILES, answer=short, port=free_port())
    address = f"127.0.0.1:{worker.port}"
    router = Router(RouterOptions([address], port=0, expect_models=("m",), failover=WAIT))
    await router.start()
    async with facade_of([router.server.address]) as http, grpc.aio.insecure_channel(router.server.address) as channel:
        await until_health(channel, health_pb2.HealthCheckResponse.SERVING)
        health = await http.http.get("/health")
        assert (health.status_code, health.json()) == (200, {"status": "ok"})
        asked = http.openai.with_options(timeout=120.0).completions.create(model="m", prompt="say it", max_tokens=4)
        answer = asyncio.ensure_future(asked)
        await until(lambda: router.service.in_flight == 1)
        await worker.start()
        assert (await answer).choices[0].finish_reason == "length"
    await router.stop()
    await worker.stop()


async def test_http_request_without_a_worker_in_time_gets_503(monkeypatch: pytest.MonkeyPatch) -> None:
    """Former fault: the facade repeated each wait for 30 s, and long ones until the request's deadline."""
    options = RouterOptions(["127.0.0.1:1"], port=0, expect_models=("m",), failover=FailoverOptions(worker_wait_s=1.0))
    router, waits = Router(options), list[str]()
    wait_for_model = router.pool.expected.wait_for_model

    async def counted(name: str) -> None:
        waits.append(name)
        await wait_for_model(name)

    monkeypatch.setattr(router.pool.expected, "wait_for_model", counted)
    await router.start()
    async with facade_of([router.server.address], give_up_s=1.0) as http:
        refused = await http.http.post("/v1/completions", json={"model": "m", "prompt": "say it"})
        assert (refused.status_code, "'m'" in refused.text) == (503, True)
        assert refused.headers["retry-after"] == "1"
        assert waits == ["m"]
    await router.stop()


async def test_facade_without_workers_or_expected_models_is_not_ready() -> None:
    router = Router(RouterOptions(["127.0.0.1:1"], port=0))
    await router.start()
    async with facade_of([router.server.address]) as http:
        health = await http.http.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "no worker is ready"})
    await router.stop()


async def test_model_scaled_to_zero_is_waited_for_beside_another_one() -> None:
    async with scaler(expect_models=("away",), failover=WAIT) as (made, stub):
        unknown = await error_of(made.stub.Generate(request(model="typo"), timeout=60))
        assert unknown.code() is grpc.StatusCode.NOT_FOUND
        waits = asyncio.ensure_future(collect(made.stub.Generate(request(model="away"))))
        while not await is_active(stub, trigger(model="away")):
            assert not waits.done()
        assert not await is_active(stub, trigger(model="m"))
        waits.cancel()


async def test_request_without_a_worker_in_time_is_refused_by_its_model() -> None:
    async with scaler(expect_models=("away",), failover=FailoverOptions(worker_wait_s=0.1)) as (made, stub):
        refused = await error_of(made.stub.Generate(request(model="away"), timeout=60))
        assert refused.code() is grpc.StatusCode.UNAVAILABLE
        assert "'away'" in (refused.details() or "")
        info = detail(refused, error_details_pb2.ErrorInfo)
        assert (info.reason, dict(info.metadata)) == ("NO_WORKER", {"waited_s": "0.1"})
        assert not await is_active(stub, trigger(model="away"))


async def test_port_has_the_tls_of_the_router_and_needs_no_key(tmp_path: Path) -> None:
    """KEDA can send no key."""
    authority = Authority(tmp_path)
    pair = authority.issue("router", *LOOPBACK)
    _, kept = new_key("tester", "", [Role.INFER])
    security = RouterSecurity(tls=ServerTls(pair.cert, pair.key), access=KeyAccess(KeyStore(None, [kept.line()])))
    port = free_port()
    router = Router(RouterOptions(["127.0.0.1:1"], port=0, scaler_port=port, security=security))
    await router.start()
    address, credentials = f"127.0.0.1:{port}", grpc.ssl_channel_credentials(authority.cert.read_bytes())
    async with (
        grpc.aio.secure_channel(address, credentials) as secure,
        grpc.aio.insecure_channel(address) as plain,
    ):
        assert not await is_active(ExternalScalerStub(secure), trigger())
        refused = await error_of(ExternalScalerStub(plain).IsActive(trigger(), timeout=60))
        assert refused.code() is grpc.StatusCode.UNAVAILABLE
    await router.stop()


async def test_waiting_request_ends_with_its_deadline() -> None:
    async with scaler(expect_models=("away",), failover=WAIT) as (made, stub):
        late = await error_of(made.stub.Generate(request(model="away"), timeout=1.0))
        assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: not made.router.service.in_flight)
        assert not await is_active(stub, trigger(model="away"))


async def test_metrics_follow_the_load() -> None:
    ref = trigger(model="m", outstandingTokens="100", queueAge="1s", ttftObjective="2s")
    async with scaler(FakeWorker(FILES, decoding=1, room_seqs=0)) as (made, stub):
        specs = (await stub.GetMetricSpec(ref, timeout=60)).metricSpecs
        targets = {spec.metricName: spec.targetSizeFloat for spec in specs}
        assert targets == {"requests": 4.0, "outstanding-tokens": 100.0, "queue-age": 1.0, "ttft-use": 0.5}
        # The worker runs a sequence of another router.
        before = {name: await value(stub, name, ref) for name in targets}
        assert before == {"requests": 1.0, "outstanding-tokens": 0.0, "queue-age": 0.0, "ttft-use": 0.0}
        calls = [asyncio.ensure_future(collect(made.stub.Generate(request("say it"), timeout=120))) for _ in range(3)]
        await until(lambda: len(made.router.dispatcher) == 3)
        tokens = sum(queued.tokens for queued in made.router.dispatcher.queued())
        assert await value(stub, "requests", ref) == 4
        assert await value(stub, "outstanding-tokens", ref) == tokens
        earlier = [await value(stub, name, ref) for name in ("queue-age", "ttft-use")]
        later = [await value(stub, name, ref) for name in ("queue-age", "ttft-use")]
        assert all(0 < first < second for first, second in zip(earlier, later, strict=True))
        for each in calls:
            each.cancel()


@pytest.mark.parametrize("method", ["IsActive", "GetMetricSpec", "StreamIsActive", "StreamMetricSpec", "GetMetrics"])
async def test_wrong_metadata_is_refused_by_name(method: str) -> None:
    async with scaler() as (_, stub):
        ref = trigger(queueAge="soon")
        asked: Any = (
            kpb.GetMetricsRequest(scaledObjectRef=ref, metricName="requests") if method == "GetMetrics" else ref
        )
        refused = await error_of(getattr(stub, method)(asked, timeout=60))
        assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "scalerMetadata.queueAge is 'soon'; valid" in (refused.details() or "")


async def test_streams_are_bounded_and_unary_calls_go_on() -> None:
    async with scaler() as (_, stub):
        streams = [stub.StreamMetricSpec(trigger()) for _ in range(MAX_LOAD_WATCHES)]
        for stream in streams:
            (spec,) = (await first_of(stream)).metricSpecs
            assert (spec.metricName, spec.targetSizeFloat) == ("requests", 4.0)
        refused = await error_of(stub.StreamIsActive(trigger()))
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not await is_active(stub, trigger())
        streams.pop().cancel()
        # The router hears of it a moment later.
        async with asyncio.timeout(60):
            while (first := await _first(stub)) is None:
                pass
        assert first.result is False


async def _first(stub: ExternalScalerAsyncStub) -> kpb.IsActiveResponse | None:
    stream = stub.StreamIsActive(trigger())
    try:
        found: kpb.IsActiveResponse = await first_of(stream)
    except grpc.aio.AioRpcError:
        return None
    stream.cancel()
    return found


async def test_stream_that_ends_in_its_first_message_has_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """Former fault: a drain in that moment left the stream open until the router ended, and KEDA got an error."""

    def ends_next(service: ExternalScalerService, trigger: object) -> bool:
        asyncio.get_running_loop().call_soon(service.end_streams)
        return True

    monkeypatch.setattr(ExternalScalerService, "_is_active", ends_next)
    async with scaler() as (_, stub):
        stream = stub.StreamIsActive(trigger(), timeout=60)
        while await stream.read() is not grpc.aio.EOF:
            pass
        assert await stream.code() is grpc.StatusCode.OK


async def test_draining_router_ends_streams_with_ok_at_once() -> None:
    """After OK KEDA opens the stream again in two seconds, at another router; after an error it waits ever longer."""
    async with scaler(FakeWorker(FILES, answer=letters, step_s=0.05)) as (made, stub):
        answer = made.stub.Generate(request(params={"max_tokens": 4000}), timeout=120)
        await answer.read()
        activity, specs = stub.StreamIsActive(trigger()), stub.StreamMetricSpec(trigger())
        assert (await first_of(activity)).result is True
        assert await specs.read()
        draining = asyncio.ensure_future(made.router.drain())
        for stream in (activity, specs):
            while await stream.read() is not grpc.aio.EOF:
                pass
            assert await stream.code() is grpc.StatusCode.OK
        # The answer still runs.
        assert not draining.done()
        assert await answer.read() is not grpc.aio.EOF
        answer.cancel()
        await draining
