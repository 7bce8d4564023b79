"""Permissions per method over real sockets, with a role for every method of every service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from fissile.admin.v1 import admin_pb2
from fissile.peers.inference import open_inference_pb2
from fissile.v1 import inference_pb2
from fissile.worker.v1 import worker_pb2, worker_pb2_grpc
from google.rpc import error_details_pb2
from grpc_channelz.v1 import channelz, channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from common.errors import ApiError
from common.rpc.api_keys import Role, new_key
from common.rpc.auth import METHOD_ROLES, Access, Caller, KeyAccess, PeerAccess, bearer_key, caller
from common.rpc.key_store import KeyStore
from common.rpc.server import GrpcServer
from common.rpc.tls import ClientTls, Dialer, ServerTls
from tests.certificates import LOOPBACK, Authority

KEYS = {role: new_key(role.value, "", [role]) for role in Role}
GENERATE = "fissile.v1.InferenceService/Generate"
DRAIN = "fissile.admin.v1.AdminService/DrainWorker"
LIST = "fissile.admin.v1.AdminService/ListWorkers"


@pytest.fixture
def access() -> KeyAccess:
    return KeyAccess(KeyStore(None, [kept.line() for _, kept in KEYS.values()]))


def shown(role: Role) -> list[tuple[str, str]]:
    return [("other", "1"), ("authorization", f"Bearer {KEYS[role][0]}")]


@pytest.mark.parametrize("module", [inference_pb2, admin_pb2, open_inference_pb2, reflection_pb2, channelz_pb2])
def test_every_method_of_every_service_is_listed(module: Any) -> None:
    """A new method of the protos is refused until it has roles here."""
    services = module.DESCRIPTOR.services_by_name.values()
    methods = {f"{service.full_name}/{method.name}" for service in services for method in service.methods}
    names = {service.full_name for service in services}
    assert methods
    assert {method for method in METHOD_ROLES if method.partition("/")[0] in names} == methods


@pytest.mark.parametrize("method", METHOD_ROLES)
def test_key_is_admitted_by_role(method: str, access: KeyAccess) -> None:
    for role in Role:
        if role in METHOD_ROLES[method]:
            assert access.admit(method, shown(role), {}) == Caller(name=role.value)
        else:
            with pytest.raises(ApiError) as caught:
                access.admit(method, shown(role), {})
            assert caught.value.code is grpc.StatusCode.PERMISSION_DENIED
            assert method in str(caught.value)
            assert all(wanted.value in str(caught.value) for wanted in METHOD_ROLES[method])


def test_method_roles_match_services() -> None:
    assert {method.partition("/")[2]: set(roles) for method, roles in METHOD_ROLES.items() if "admin.v1" in method}[
        "DrainWorker"
    ] == {Role.ADMIN_WRITE}
    assert METHOD_ROLES[LIST] == {Role.ADMIN_READ}
    assert METHOD_ROLES[GENERATE] == {Role.INFER}


def test_unlisted_method_is_refused_for_every_role(access: KeyAccess) -> None:
    for role in Role:
        with pytest.raises(ApiError, match="AdminService/Explode needs role that no key has"):
            access.admit("fissile.admin.v1.AdminService/Explode", shown(role), {})


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ([], "API_KEY_MISSING"),
        ([("authorization", "")], "API_KEY_MISSING"),
        ([("authorization", "Basic abc")], "API_KEY_MISSING"),
        ([("authorization", "Bearer ")], "API_KEY_MISSING"),
        ([("authorization", KEYS[Role.INFER][0])], "API_KEY_MISSING"),
        ([("authorization", "Bearer wrong")], "API_KEY_INVALID"),
        ([("authorization", b"Bearer \xff")], "API_KEY_INVALID"),
        ([("authorization", f"Bearer {KEYS[Role.INFER][0]}x")], "API_KEY_INVALID"),
        ([("authorization", "Bearer wrong"), ("authorization", f"Bearer {KEYS[Role.INFER][0]}")], "API_KEY_INVALID"),
        ([("authorization", f"Bearer {KEYS[Role.INFER][1].sha256}")], "API_KEY_INVALID"),
    ],
)
def test_invalid_key_is_unauthenticated(
    metadata: list[tuple[str, str | bytes]], reason: str, access: KeyAccess
) -> None:
    with pytest.raises(ApiError) as caught:
        access.admit(GENERATE, metadata, {})
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAUTHENTICATED, reason)
    assert not any(KEYS[role][0] in repr(caught.value) for role in Role)


def test_authorization_scheme_is_case_insensitive() -> None:
    assert bearer_key([("authorization", "bearer  abc ")]) == "abc"


@pytest.mark.parametrize(
    ("peer", "identity"),
    [
        ({"peer_dns": [b"router.example"]}, "router.example"),
        ({"peer_dns": [b"x", b"ROUTER.example"]}, "router.example"),
        ({"peer_uri": [b"spiffe://td/ns/llm/router"]}, "spiffe://td/ns/llm/router"),
        ({"peer_uri": [b"spiffe://td/ns/llm/router"], "peer_dns": [b"router.example"]}, "router.example"),
        ({}, None),
        ({"peer_dns": [b"spiffe://td/ns/llm/router", b"router"]}, "spiffe://td/ns/llm/router"),
        ({"peer_dns": [b"router.example.org", b"xrouter.example", b"*.example"]}, None),
        ({"peer_uri": [b"spiffe://td/ns/llm/router/x", b"SPIFFE://td/ns/llm/router"]}, None),
        ({"x509_common_name": [b"router.example"]}, None),
        ({"peer_email": [b"router.example"], "peer_ip": [b"router.example"]}, None),
    ],
)
def test_router_certificates_are_recognized(peer: dict[str, list[bytes]], identity: str | None) -> None:
    access = PeerAccess(["router.example", "spiffe://td/ns/llm/router"])
    if identity is None:
        with pytest.raises(ApiError, match="WorkerService/Session is for routers; the certificate has") as caught:
            access.admit("fissile.worker.v1.WorkerService/Session", [], peer)
        assert caught.value.code is grpc.StatusCode.PERMISSION_DENIED
    else:
        assert access.admit("fissile.worker.v1.WorkerService/Session", [], peer) == Caller(identity=identity)


class Servicer(worker_pb2_grpc.WorkerServiceServicer):
    """Handlers of every call type; each answers with the caller that it sees."""

    def __init__(self) -> None:
        self.calls = 0

    async def Session(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        self.calls += 1
        while await context.read() is not grpc.aio.EOF:
            pass
        await context.write(worker_pb2.SessionResponse(welcome=worker_pb2.Welcome(worker_id=str(caller.get()))))

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]
        self.calls += 1
        await context.write(worker_pb2.GenerateResponse())

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.calls += 1
        for _ in range(2):
            yield worker_pb2.GetTokenizerResponse(name=str(caller.get()))

    async def GetWorker(self, request: Any, context: Any) -> Any:
        self.calls += 1
        return worker_pb2.GetWorkerResponse(worker_id=str(caller.get()))

    async def Drain(self, request: Any, context: Any) -> Any:
        self.calls += 1
        return worker_pb2.DrainResponse()

    async def SetIntake(self, request: Any, context: Any) -> worker_pb2.SetIntakeResponse:
        return worker_pb2.SetIntakeResponse()

    async def FlushCache(self, request: Any, context: Any) -> worker_pb2.FlushCacheResponse:
        return worker_pb2.FlushCacheResponse()

    async def ListSteps(self, request: Any, context: Any) -> worker_pb2.ListStepsResponse:
        return worker_pb2.ListStepsResponse()


class Everybody(Access):
    """Admits every caller that shows a name."""

    def admit(self, method: str, metadata: Any, peer: Any) -> Caller:
        name = dict(metadata).get("name")
        if name is None:
            raise ApiError(grpc.StatusCode.UNAUTHENTICATED, f"who calls {method}?", reason="NOBODY")
        return Caller(name=name)


@asynccontextmanager
async def serving(server: GrpcServer) -> AsyncIterator[None]:
    await server.start()
    try:
        yield
    finally:
        await server.stop(0)


async def callers(channel: grpc.aio.Channel, metadata: Sequence[tuple[str, str]]) -> list[str]:
    """The caller that a handler of each call type sees."""
    stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
    session = stub.Session(metadata=metadata)
    await session.write(worker_pb2.SessionRequest())
    await session.done_writing()
    welcome = (await session.read()).welcome
    pieces = [piece.name async for piece in stub.GetTokenizer(worker_pb2.GetTokenizerRequest(), metadata=metadata)]
    worker = await stub.GetWorker(worker_pb2.GetWorkerRequest(), metadata=metadata)
    return [welcome.worker_id, "".join(sorted(set(pieces))), worker.worker_id]


async def codes(channel: grpc.aio.Channel, metadata: Sequence[tuple[str, str]]) -> list[grpc.StatusCode]:
    """The status of a refused call of each type.

    The test writes no message to the Session: if the refusal overtakes a write, gRPC's client reports INTERNAL.
    """
    stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
    calls = (
        stub.Session(metadata=metadata),
        stub.GetTokenizer(worker_pb2.GetTokenizerRequest(), metadata=metadata),
        stub.GetWorker(worker_pb2.GetWorkerRequest(), metadata=metadata),
    )
    return [await call.code() for call in calls]


async def test_handlers_run_after_access_check_with_caller() -> None:
    servicer = Servicer()
    server = GrpcServer("127.0.0.1", 0, [], access=Everybody())
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server.server)
    async with serving(server), grpc.aio.insecure_channel(server.address) as channel:
        with structlog.testing.capture_logs() as logs:
            assert await codes(channel, [("authorization", "Bearer secret")]) == [grpc.StatusCode.UNAUTHENTICATED] * 3
        assert servicer.calls == 0
        assert {line["reason"] for line in logs} == {"NOBODY"}
        assert "secret" not in repr(logs)
        assert await callers(channel, [("name", "alice")]) == [str(Caller(name="alice"))] * 3
        assert caller.get() == Caller()
        nope: Any = channel.unary_unary("/fissile.worker.v1.WorkerService/Nope")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await nope(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_health_needs_no_key_and_reflection_does(access: KeyAccess) -> None:
    server = GrpcServer("127.0.0.1", 0, [], access=access)
    async with serving(server), grpc.aio.insecure_channel(server.address) as channel:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="liveness"))
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        # No message is written: the refusal may overtake it, and gRPC's client then reports INTERNAL.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reflection.ServerReflectionInfo().read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        info = error_details_pb2.ErrorInfo()
        status = rpc_status.from_call(caught.value)
        assert status.details[0].Unpack(info)
        assert (info.reason, info.domain) == ("API_KEY_MISSING", "fissile")
        answers = [a async for a in reflection.ServerReflectionInfo(iter([asked]), metadata=shown(Role.INFER))]
        assert [len(a.list_services_response.service) > 1 for a in answers] == [True]


async def test_channelz_needs_admin_read_role(access: KeyAccess) -> None:
    server = GrpcServer("127.0.0.1", 0, [], access=access)
    channelz.add_channelz_servicer(server.server)
    async with serving(server), grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = channelz_pb2_grpc.ChannelzStub(channel)
        asked = channelz_pb2.GetServersRequest()
        assert (await stub.GetServers(asked, metadata=shown(Role.ADMIN_READ))).server
        with pytest.raises(grpc.aio.AioRpcError, match="GetServers needs role admin-read; the key infer has infer"):
            await stub.GetServers(asked, metadata=shown(Role.INFER))


async def test_peer_access_checks_certificate_except_for_health(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    pair, other = ca.issue("server", *LOOPBACK), ca.issue("client", "somebody")
    router = ca.issue("router", "10.0.0.1", "a.example", "spiffe://td/router")
    server = GrpcServer(
        "127.0.0.1", 0, [], tls=ServerTls(pair.cert, pair.key, ca.cert), access=PeerAccess(["spiffe://td/router"])
    )
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(Servicer(), server.server)
    asked = worker_pb2.GetWorkerRequest()
    async with serving(server):
        async with Dialer(ClientTls(ca.cert, other.cert, other.key)).channel(server.address) as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="liveness"))
            with pytest.raises(grpc.aio.AioRpcError, match="is for routers; the certificate has somebody"):
                await worker_pb2_grpc.WorkerServiceStub(channel).GetWorker(asked)
        async with Dialer(ClientTls(ca.cert, router.cert, router.key)).channel(server.address) as channel:
            assert await callers(channel, []) == [str(Caller(identity="spiffe://td/router"))] * 3
