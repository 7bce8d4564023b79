"""Shared parts of the operators' commands: the call of a router's AdminService, its options and its errors."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import grpc
from fissile.admin.v1.admin_pb2_grpc import AdminServiceStub

from common.cli.core.client import NO_CREDENTIALS, Credentials, call_failed, open_channel
from common.cli.core.tls_options import with_credentials

if TYPE_CHECKING:
    # In the type stubs only: at run time the one stub class serves both kinds of channel.
    from fissile.admin.v1.admin_pb2_grpc import AdminServiceAsyncStub

DEFAULT_ADMIN = "127.0.0.1:50052"
REMEDY = "AdminService needs `fissile router --admin-port` or `fissile serve --admin-port`"
_T = TypeVar("_T")
_Request_contra = TypeVar("_Request_contra", contravariant=True)
_Response_co = TypeVar("_Response_co", covariant=True)


class Method(Protocol[_Request_contra, _Response_co]):
    """An RPC of the stub that takes one request and gives one response."""

    def __call__(
        self, request: _Request_contra, /, *, timeout: float | None, metadata: tuple[tuple[str, str], ...]
    ) -> Awaitable[_Response_co]:
        """Calls the RPC."""
        ...


@dataclass(frozen=True, slots=True)
class Admin:
    """Address of a router's AdminService, and how to call it; `timeout_s` bounds a whole call."""

    address: str = DEFAULT_ADMIN
    credentials: Credentials = NO_CREDENTIALS
    timeout_s: float = 60.0

    async def use(self, calls: Callable[[AdminServiceAsyncStub], Awaitable[_T]]) -> _T:
        """Runs `calls` on the service and returns the result.

        Raises:
            CommandError: a call failed.
        """
        async with open_channel(self.address, self.credentials) as channel:
            stub: AdminServiceAsyncStub = AdminServiceStub(channel)
            try:
                return await calls(stub)
            except grpc.aio.AioRpcError as error:
                raise call_failed(error, self.address, remedy=REMEDY) from error

    def ask(
        self, method: Callable[[AdminServiceAsyncStub], Method[_Request_contra, _Response_co]], request: _Request_contra
    ) -> _Response_co:
        """Sends one request and returns the response. Blocks.

        Raises:
            CommandError: the call failed.
        """

        async def call(stub: AdminServiceAsyncStub) -> _Response_co:
            return await method(stub)(request, timeout=self.timeout_s, metadata=self.credentials.metadata)

        return asyncio.run(self.use(call))


def with_admin(command: Callable[..., Any]) -> Callable[..., Any]:
    """Hands a command the options of its call as one argument, `admin`."""

    @functools.wraps(command)
    def wrapped(*args: Any, admin_address: str, credentials: Credentials, timeout: float, **kwargs: Any) -> Any:
        return command(*args, admin=Admin(admin_address, credentials, timeout), **kwargs)

    return with_credentials(wrapped)
