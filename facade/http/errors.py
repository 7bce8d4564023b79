"""Failures of requests, as HTTP says them. Each door has its own form of the body (`ErrorForm`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import grpc
from fissile.client import FissileError

from common.errors import ApiError
from common.limits import ROUTER_RETRY_S
from facade.http.bodies import Names, param_of

# The statuses of gRPC as HTTP has them; others are 500.
_STATUSES: Final[Mapping[grpc.StatusCode, int]] = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.UNIMPLEMENTED: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.ABORTED: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
# Reasons whose status differs from that of their gRPC status.
_BY_REASON: Final[Mapping[str, int]] = {
    "CONSTRAINT_FAILED": 400,
    "METADATA_TOO_LARGE": 431,
    "REQUEST_TIMEOUT": 408,
    "BODY_TOO_LARGE": 413,
}
_RETRIED_BY_CLIENTS: Final = frozenset({408, 409, 429})


@dataclass(frozen=True, slots=True)
class HttpError:
    """A failure that a caller is told.

    Attributes:
        status: of HTTP.
        message: for people to read.
        reason: as in `ErrorInfo`, such as TOO_LONG; "" if no process of Fissile has made the failure.
        param: field that is wrong, as the caller names it; "" for none.
        retry_after_s: when the same request may work; None if that is unknown.
        has_begun: True if a part of the answer has been sent.
        detail: what gRPC says of the routers' connections, for the log alone.
    """

    status: int
    message: str
    reason: str = ""
    param: str = ""
    retry_after_s: float | None = None
    has_begun: bool = False
    detail: str = ""

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers that tell a client's library whether and when to send the request again."""
        found = []
        if self.retry_after_s is not None:
            found.append((b"retry-after", str(max(1, math.ceil(self.retry_after_s))).encode()))
            found.append((b"retry-after-ms", str(max(1, round(1000 * self.retry_after_s))).encode()))
        if self.status >= 500 or self.status in _RETRIED_BY_CLIENTS:
            found.append((b"x-should-retry", b"true" if self.can_retry else b"false"))
        return found

    @property
    def can_retry(self) -> bool:
        """True if the same request may succeed."""
        return not self.has_begun and (self.status in (429, 503) and self.reason != "DEADLINE_HOPELESS")


# Makes the body of a failure: one for each door.
ErrorForm: TypeAlias = Callable[[HttpError], Mapping[str, Any]]


def http_error(error: BaseException, names: Names, *, has_begun: bool = False) -> HttpError:
    """The failure for an exception of a translator or of the client library.

    Args:
        error: what was raised; an exception of another class is a fault of this process.
        names: of fields, as for `param_of`.
        has_begun: True if a part of the answer has been sent.
    """
    if isinstance(error, FissileError):
        given = [problem.field for problem in error.fields]
        path = given[0] if given else ""
        return _made(error.code, error.message, error.reason, path, error.retry_after_s, names, has_begun)
    if isinstance(error, ApiError):
        path = error.violations[0].path if error.violations else ""
        return _made(error.code, error.message, error.reason, path, error.retry_after_s, {}, has_begun)
    return HttpError(500, "the facade failed; its log has the traceback", "FACADE_ERROR", has_begun=has_begun)


def _made(
    code: grpc.StatusCode,
    message: str,
    reason: str,
    path: str,
    retry_after_s: float | None,
    names: Names,
    has_begun: bool,
) -> HttpError:
    status = _BY_REASON.get(reason, _STATUSES.get(code, 500))
    param = param_of(path, names) if path else ""
    if path and message.startswith(path):
        message = param + message[len(path) :]
    detail = ""
    if status == 503 and not reason:
        # gRPC's own words name addresses of routers.
        message, detail = "no router can be reached", message
    return HttpError(status, message, reason, param, retry_after_s, has_begun, detail)


def server_ending() -> ApiError:
    """UNAVAILABLE: this process ends; another one may serve the same request."""
    message = "this HTTP server shuts down; ask another one"
    return ApiError(grpc.StatusCode.UNAVAILABLE, message, retry_after_s=ROUTER_RETRY_S, reason="SERVER_ENDING")
