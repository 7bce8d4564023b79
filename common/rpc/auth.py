"""Authentication and authorization: one interceptor for every method of every service of a port.

Invariants: only health is open to everybody, so that probes need no key; a method that is not listed in `METHOD_ROLES`
is refused to every key. What was found out about the caller is in `caller` while its call runs.
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
from common.rpc.handlers import Wrapped
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

# Method -> roles of which a key must have one.
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
    "fissile.admin.v1.AdminService/ListWorkers": _READ,
    "fissile.admin.v1.AdminService/WatchLoad": _READ,
    "fissile.admin.v1.AdminService/GetRouting": _READ,
    "fissile.admin.v1.AdminService/ListRequests": _READ,
    "fissile.admin.v1.AdminService/GetServerInfo": _READ,
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
    """Identity of a caller.

    Attributes:
        name: of the key; empty when keys are off.
        tenant: of the key; empty leaves it to the call's metadata.
        identity: name in its certificate; empty when that is not asked for.
        max_priority: name of the highest class that the key may ask for; empty when it does not say.
    """

    name: str = ""
    tenant: str = ""
    identity: str = ""
    max_priority: str = ""


caller: ContextVar[Caller] = ContextVar("caller", default=Caller())  # noqa: B039  # frozen


class Access(Protocol):
    """Decides about each call."""

    def admit(self, method: str, metadata: Metadata, peer: AuthContext) -> Caller:
        """Authenticates the caller of a method.

        Args:
            method: full name, without a slash before it.
            metadata: of the call.
            peer: what TLS knows of the other side.

        Raises:
            ApiError: the call is refused.
        """
        ...


class KeyAccess:
    """Admits calls that show an API key with a role for their method."""

    def __init__(self, store: KeyStore) -> None:
        self._store = store

    def admit(self, method: str, metadata: Metadata, peer: AuthContext) -> Caller:
        """As `Access.admit`.

        Raises:
            UnauthenticatedError: no key, or one that does not count.
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
    """Admits calls over mTLS whose certificate has one of some names.

    Args:
        identities: DNS names and URIs (SPIFFE ids too), compared as a whole.
    """

    def __init__(self, identities: Sequence[str]) -> None:
        self._identities = tuple(identities)

    def admit(self, method: str, metadata: Metadata, peer: AuthContext) -> Caller:
        """As `Access.admit`.

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
    """The key that a call shows.

    Raises:
        UnauthenticatedError: it shows none.
    """
    value = next((value for name, value in metadata if name == AUTHORIZATION), None)
    if value is None:
        raise UnauthenticatedError("API_KEY_MISSING", "metadata authorization is missing; send `Bearer KEY`")
    scheme, _, key = (value if isinstance(value, str) else value.decode("utf-8", "replace")).partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise UnauthenticatedError("API_KEY_MISSING", "metadata authorization has another form than `Bearer KEY`")
    return key.strip()


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Asks `access` before every call but those of health."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._handlers = Wrapped(self._asking)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """The call's handler, with the question before it."""
        handler = await continuation(handler_call_details)
        # Without a handler there is no such method: gRPC answers UNIMPLEMENTED.
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
    """The handler, run after `ask` has returned; gRPC tells generators and coroutines apart, so it stays one."""
    # The type stubs know the handlers of synchronous servers only.
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
