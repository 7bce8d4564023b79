"""Authentication and authorization: one interceptor for every method of every service of a port.

Invariants: health needs no key, so that probes work without one. A method that is missing from `METHOD_ROLES` is
refused to every key. While a call runs, `caller` holds what is known about its caller.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import grpc

from common.errors import ApiError, PermissionDeniedError, UnauthenticatedError
from common.rpc.api_keys import Role
from common.rpc.errors import abort
from common.rpc.interceptors import HandlerCache
from common.rpc.key_store import KeyStore
from common.telemetry.request_record import current_record

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]
AuthContext: TypeAlias = Mapping[str, Iterable[bytes]]
_Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

AUTHORIZATION: Final = "authorization"
_OPEN_SERVICE: Final = "grpc.health.v1.Health"
_INFER: Final = frozenset({Role.INFER})
_READ: Final = frozenset({Role.ADMIN_READ})
_WRITE: Final = frozenset({Role.ADMIN_WRITE})
_ANY: Final = frozenset(Role)

# Method to roles. A key needs one of them.
METHOD_ROLES: Final[Mapping[str, frozenset[Role]]] = {
    "fissile.v1.InferenceService/Generate": _INFER,
    "fissile.v1.InferenceService/Chat": _INFER,
    "fissile.v1.InferenceService/GenerateOnce": _INFER,
    "fissile.v1.InferenceService/ChatOnce": _INFER,
    "fissile.v1.InferenceService/Score": _INFER,
    "fissile.v1.InferenceService/Embed": _INFER,
    "fissile.v1.InferenceService/Rerank": _INFER,
    "fissile.v1.InferenceService/Replay": _INFER,
    "fissile.v1.InferenceService/CountTokens": _INFER,
    "fissile.v1.InferenceService/RenderPrompt": _INFER,
    "fissile.v1.InferenceService/Tokenize": _INFER,
    "fissile.v1.InferenceService/Detokenize": _INFER,
    "fissile.v1.InferenceService/ListModels": _INFER,
    "fissile.v1.InferenceService/GetModel": _INFER,
    "inference.GRPCInferenceService/ServerLive": _INFER,
    "inference.GRPCInferenceService/ServerReady": _INFER,
    "inference.GRPCInferenceService/ModelReady": _INFER,
    "inference.GRPCInferenceService/ServerMetadata": _INFER,
    "inference.GRPCInferenceService/ModelMetadata": _INFER,
    "inference.GRPCInferenceService/ModelInfer": _INFER,
    "inference.GRPCInferenceService/ModelStreamInfer": _INFER,
    "fissile.admin.v1.AdminService/ListWorkers": _READ,
    "fissile.admin.v1.AdminService/WatchLoad": _READ,
    "fissile.admin.v1.AdminService/GetRouting": _READ,
    "fissile.admin.v1.AdminService/ListRequests": _READ,
    "fissile.admin.v1.AdminService/GetServerInfo": _READ,
    "fissile.admin.v1.AdminService/ListSteps": _READ,
    "fissile.admin.v1.AdminService/CancelRequest": _WRITE,
    "fissile.admin.v1.AdminService/CordonWorker": _WRITE,
    "fissile.admin.v1.AdminService/UncordonWorker": _WRITE,
    "fissile.admin.v1.AdminService/DrainWorker": _WRITE,
    "fissile.admin.v1.AdminService/FlushCaches": _WRITE,
    "fissile.admin.v1.AdminService/SetRouting": _WRITE,
    "fissile.admin.v1.AdminService/Reload": _WRITE,
    "grpc.channelz.v1.Channelz/GetTopChannels": _READ,
    "grpc.channelz.v1.Channelz/GetServers": _READ,
    "grpc.channelz.v1.Channelz/GetServer": _READ,
    "grpc.channelz.v1.Channelz/GetServerSockets": _READ,
    "grpc.channelz.v1.Channelz/GetChannel": _READ,
    "grpc.channelz.v1.Channelz/GetSubchannel": _READ,
    "grpc.channelz.v1.Channelz/GetSocket": _READ,
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _ANY,
    "grpc.reflection.v1.ServerReflection/ServerReflectionInfo": _ANY,
}


@dataclass(frozen=True, slots=True)
class Caller:
    """Authenticated identity of a caller.

    Attributes:
        name: of its key; "" when keys are off.
        tenant: of its key; "" lets the call's metadata name the tenant.
        identity: name in its certificate; "" when certificates are not checked.
        max_priority: name of the highest priority class that the key allows; "" if the key does not say.
    """

    name: str = ""
    tenant: str = ""
    identity: str = ""
    max_priority: str = ""


caller: ContextVar[Caller] = ContextVar("caller", default=Caller())  # noqa: B039  # frozen


class Access(Protocol):
    """Policy that admits or refuses each call."""

    def admit(self, method: str, metadata: Metadata, peer: AuthContext) -> Caller:
        """Authenticates the caller of a method.

        Args:
            method: full name, without a leading slash.
            metadata: of the call.
            peer: what TLS says about the caller.

        Raises:
            ApiError: the call is refused.
        """
        ...


class KeyAccess:
    """Admits calls that show an API key with a role for their method."""

    def __init__(self, store: KeyStore) -> None:
        self._store = store

    def admit(self, method: str, metadata: Metadata, peer: AuthContext) -> Caller:
        """See `Access.admit`.

        Raises:
            UnauthenticatedError: the call shows no key, or an unknown one.
            PermissionDeniedError: the key has no role for the method.
        """
        shown = bearer_key(metadata)
        key = self._store.ring().find(shown)
        if key is None:
            raise UnauthenticatedError("API_KEY_INVALID", "the API key is not valid")
        wanted = METHOD_ROLES.get(method, frozenset())
        if not wanted & key.roles:
            roles, has = " or ".join(sorted(wanted)) or "that no key has", ", ".join(sorted(key.roles))
            raise PermissionDeniedError("ROLE_MISSING", f"{method} needs role {roles}; the key {key.name} has {has}")
        return Caller(name=key.name, tenant=key.tenant, max_priority=key.max_priority)


class PeerAccess:
    """Admits calls over mTLS whose client certificate has one of the given names.

    Args:
        identities: DNS names and URIs (SPIFFE ids too), compared as a whole.
    """

    def __init__(self, identities: Sequence[str]) -> None:
        self._identities = tuple(identities)

    def admit(self, method: str, metadata: Metadata, peer: AuthContext) -> Caller:
        """See `Access.admit`.

        Raises:
            PermissionDeniedError: the certificate has none of the names.
        """
        names = {name.decode("utf-8", "replace").lower() for name in peer.get("peer_dns", ())}
        names.update(uri.decode("utf-8", "replace") for uri in peer.get("peer_uri", ()))
        for identity in self._identities:
            if (identity if "://" in identity else identity.lower()) in names:
                return Caller(identity=identity)
        shown = ", ".join(sorted(names)) or "no name"
        raise PermissionDeniedError("PEER_NOT_ALLOWED", f"{method} is for routers; the certificate has {shown}")


def bearer_key(metadata: Metadata) -> str:
    """The API key in a call's metadata.

    Raises:
        UnauthenticatedError: there is none.
    """
    value = next((value for name, value in metadata if name == AUTHORIZATION), None)
    if value is None:
        raise UnauthenticatedError("API_KEY_MISSING", "metadata authorization is missing; send `Bearer KEY`")
    scheme, _, key = (value if isinstance(value, str) else value.decode("utf-8", "replace")).partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise UnauthenticatedError("API_KEY_MISSING", "metadata authorization has another form than `Bearer KEY`")
    return key.strip()


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Asks `access` before every call except those of health."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._handlers = HandlerCache(self._asking)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """The call's handler, wrapped so that it asks `access` first."""
        handler = await continuation(handler_call_details)
        # Without a handler the method does not exist: gRPC answers UNIMPLEMENTED.
        return None if handler is None else self._handlers.of(handler, handler_call_details.method)

    def _asking(self, handler: _Handler, method: str) -> _Handler:
        if method.partition("/")[0] == _OPEN_SERVICE:
            return handler

        async def ask(context: _Context) -> None:
            try:
                found = self._access.admit(method, context.invocation_metadata() or (), context.auth_context())
            except ApiError as error:
                await abort(context, error)
            caller.set(found)
            current_record().key = found.name

        return _guarded(handler, ask)


_MAKERS: Final[Mapping[tuple[bool, bool], Callable[..., _Handler]]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def _guarded(handler: _Handler, ask: Callable[[_Context], Awaitable[None]]) -> _Handler:
    """The handler, wrapped so that `ask` runs first. A generator stays a generator, because gRPC treats coroutines
    differently."""
    # The type stubs only know the handlers of synchronous servers.
    run: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

    async def awaited(request: Any, context: _Context) -> Any:
        await ask(context)
        return await run(request, context)

    async def generated(request: Any, context: _Context) -> AsyncIterator[Any]:
        await ask(context)
        async for message in run(request, context):
            yield message

    make = _MAKERS[handler.request_streaming, handler.response_streaming]
    chosen = generated if inspect.isasyncgenfunction(run) else awaited
    return make(chosen, handler.request_deserializer, handler.response_serializer)
