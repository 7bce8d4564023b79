"""Failures of calls, as a client acts on them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

_DETAILS = "grpc-status-details-bin"
_USAGE = "fissile-usage-bin"
# Without one of Fissile's reasons they mean that the connection broke, perhaps behind a proxy.
_BROKEN = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED})
# Reasons of Fissile after which the same request can succeed at another router, or later.
_GO_ON = frozenset({"NO_WORKER", "ROUTER_ENDING", "SERVER_ENDING", "WORKER_LOST", "QUEUE_FULL", "TENANT_LIMIT"})
# What one router lacks another may have.
_ELSEWHERE = frozenset({"OTHER_MODEL_STATE"})


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """A bad field of a request: its path and what would be valid."""

    field: str
    description: str


@dataclass(eq=False)
class FissileError(Exception):
    """A call that has failed.

    Examples:
        ```python
        with Client("10.0.0.1:50051", give_up_s=0) as client:
            try:
                client.generate("Tell me a story.", top_p=7.0)
            except FissileError as error:
                print(error.reason, [problem.field for problem in error.fields])
        ```

    Attributes:
        code: status of the call.
        message: for people to read.
        reason: of `ErrorReason`, without its prefix; "" if gRPC or a proxy made the status.
        metadata: facts about the reason.
        fields: bad fields of the request.
        retry_after_s: when the same call may work, None if the service does not say.
        usage: bytes of `Usage`, what had been delivered; empty if the service does not say.
    """

    code: grpc.StatusCode
    message: str
    reason: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    fields: tuple[FieldProblem, ...] = ()
    retry_after_s: float | None = None
    usage: bytes = b""

    def __str__(self) -> str:
        """Status, reason and message."""
        reason = f" {self.reason}" if self.reason else ""
        return f"{self.code.name}{reason}: {self.message}"

    @property
    def may_go_on(self) -> bool:
        """True if the same request may go on, at another router or later."""
        return self.reason in _GO_ON if self.reason else self.code in _BROKEN

    @property
    def waited_s(self) -> float:
        """Seconds for which the router has waited for a worker; 0 if it has not, or does not say."""
        try:
            return max(0.0, float(self.metadata.get("waited_s", 0.0)))
        except ValueError:
            return 0.0

    @property
    def is_of_one_router(self) -> bool:
        """True if this router refuses for good what another may serve."""
        return self.reason in _ELSEWHERE


class ReceiptPart(enum.Enum):
    """Part of an answer that its receipt does not fit."""

    RECEIPT = "receipt"
    OUTPUT = "output"
    REQUEST = "request"


@dataclass(eq=False)
class ReceiptError(FissileError):
    """An answer that its own receipt does not fit, or a receipt that contradicts itself.

    Attributes:
        part: RECEIPT for one that contradicts itself, OUTPUT for other token ids, REQUEST for another request.
    """

    part: ReceiptPart = ReceiptPart.RECEIPT

    @classmethod
    def of(cls, part: ReceiptPart, detail: str) -> ReceiptError:
        """The error for one answer, with the problem as a sentence."""
        words = {
            ReceiptPart.RECEIPT: "the receipt contradicts itself",
            ReceiptPart.OUTPUT: "the receipt is of another answer",
            ReceiptPart.REQUEST: "the receipt is of another request",
        }
        return cls(grpc.StatusCode.DATA_LOSS, f"{words[part]}: {detail}", part=part)


def cancelled() -> FissileError:
    """The failure of a stream that its own program has cancelled, or whose client it has closed."""
    return FissileError(grpc.StatusCode.CANCELLED, "cancelled by this program")


def again(error: BaseException) -> FissileError:
    """The failure of a stream that has ended by `error` before, without the frames that hold that one."""
    return replace(error) if isinstance(error, FissileError) else cancelled()


def error_of(error: Any) -> FissileError:
    """Converts the error of a gRPC call, sync or asyncio, into a typed error.

    Args:
        error: a grpc.RpcError that is a grpc.Call, or a grpc.aio.AioRpcError.
    """
    trailing = dict(error.trailing_metadata() or ())
    made = FissileError(error.code(), error.details() or "", usage=_bytes(trailing.get(_USAGE, b"")))
    status = status_pb2.Status.FromString(_bytes(trailing.get(_DETAILS, b"")))
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    for detail in status.details:
        if detail.Unpack(info):
            made.reason, made.metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(bad):
            made.fields = tuple(FieldProblem(each.field, each.description) for each in bad.field_violations)
        elif detail.Unpack(retry):
            made.retry_after_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    return made


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()
