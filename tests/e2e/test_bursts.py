"""Many calls at once: each ends with OK or with a status that says why."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub

from common.rpc.api_keys import Role, new_key
from tests.e2e.service import Service, running_service
from tests.e2e.simulated import request, simulated_model


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("bursts")
    options = ["--simulate", "instant", "--max-num-seqs", "256"]
    with running_service(folder, simulated_model(folder / "model"), worker_options=options) as running:
        yield running


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """With a router that wants a key."""
    folder = tmp_path_factory.mktemp("keys")
    _, key = new_key("alice", "", [Role.INFER])
    options = ["--api-key-line", key.line()]
    with running_service(
        folder, simulated_model(folder / "model"), worker_options=["--simulate", "instant"], router_options=options
    ) as running:
        yield running


async def list_models(stub: InferenceServiceStub) -> tuple[str, str]:
    return await ended(stub.ListModels(pb.ListModelsRequest(), timeout=120))


async def generate(stub: InferenceServiceStub, i: int) -> tuple[str, str]:
    call: Any = stub.Generate(request(i, 2), timeout=600)
    # A status comes behind the messages only.
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    return await ended(call)


async def ended(call: object) -> tuple[str, str]:
    """The call's status, and for one that is not OK its message."""
    assert isinstance(call, grpc.aio.Call)
    code, details = await call.code(), await call.details()
    return code.name, "" if code is grpc.StatusCode.OK else str(details)


async def burst(address: str, calls: int, connections: int, method: str) -> Counter[tuple[str, str]]:
    """Begins all calls in one turn of the loop."""
    own = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, options=own) for _ in range(connections)]
    stubs = [InferenceServiceStub(channel) for channel in channels]
    try:
        for channel in channels:
            await channel.channel_ready()
        begun = [
            list_models(stubs[i % connections]) if method == "ListModels" else generate(stubs[i % connections], i)
            for i in range(calls)
        ]
        return Counter(await asyncio.gather(*begun))
    finally:
        for channel in channels:
            await channel.close()


@pytest.mark.slow
async def test_three_thousand_calls_at_once_are_all_answered(service: Service) -> None:
    """Former fault: beyond 1,000 calls that the loop had not accepted, gRPC dropped some with a bare CANCELLED."""
    assert await burst(service.router.address, 3000, 4, "ListModels") == {("OK", ""): 3000}


@pytest.mark.slow
async def test_5000_simultaneous_calls_on_one_connection_are_answered(service: Service) -> None:
    """Former fault: a client starts a new call after each status, but the core of gRPC refused it (REFUSED_STREAM)
    until the router had freed the earlier call."""
    for _ in range(3):
        assert await burst(service.router.address, 5000, 1, "ListModels") == {("OK", ""): 5000}


@pytest.mark.slow
async def test_three_thousand_bad_key_calls_all_get_status(guarded: Service) -> None:
    """Refused calls get a status too, although no handler runs for them."""
    found = await burst(guarded.router.address, 3000, 2, "ListModels")
    assert {code for code, _ in found} == {"UNAUTHENTICATED"}
    assert found.total() == 3000


@pytest.mark.long
@pytest.mark.parametrize("connections", [1, 4])
async def test_ten_thousand_streams_at_once_end_with_ok_or_a_documented_status(
    service: Service, connections: int
) -> None:
    """The router refuses calls beyond its queue, and says when to retry."""
    found = await burst(service.router.address, 10_000, connections, "Generate")
    assert {code for code, _ in found} <= {"OK", "RESOURCE_EXHAUSTED"}, found
    assert all(details for code, details in found if code == "RESOURCE_EXHAUSTED")
    assert found["OK", ""] > 4096
