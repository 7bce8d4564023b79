"""Errors that reach a client: a gRPC status with `google.rpc` details.

One class per row of the design's table of codes. Pure code raises them; `common.rpc` turns them into a status.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from common.limits import MAX_DEATHS

DOMAIN = "fissile"


@dataclass(frozen=True)
class FieldViolation:
    """A bad field of a request: its path, what is wrong with it, and what would be valid."""

    path: str
    problem: str
    valid: str = ""

    def __str__(self) -> str:
        """One sentence."""
        return f"{self.path} {self.problem}" + (f"; valid: {self.valid}" if self.valid else "")


@dataclass
class ApiError(Exception):
    """A request's failure: status code, message, and the details that a client acts on.

    `retry_after_s` becomes RetryInfo, `reason` ErrorInfo, `violations` BadRequest.
    """

    code: grpc.StatusCode
    message: str
    violations: tuple[FieldViolation, ...] = ()
    retry_after_s: float | None = None
    reason: str = ""
    metadata: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """The message."""
        return self.message

    def to_status(self) -> status_pb2.Status:
        """The error as google.rpc.Status."""
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        status.details.extend(_packed(detail) for detail in self._details())
        return status

    def _details(self) -> list[Message]:
        details: list[Message] = []
        if self.violations:
            details.append(
                error_details_pb2.BadRequest(
                    field_violations=[
                        error_details_pb2.BadRequest.FieldViolation(field=v.path, description=str(v))
                        for v in self.violations
                    ]
                )
            )
        if self.retry_after_s is not None:
            delay = duration_pb2.Duration()
            delay.FromMilliseconds(max(1, round(self.retry_after_s * 1000)))
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        if self.reason:
            details.append(error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN, metadata=self.metadata))
        return details


def _packed(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


class InvalidFieldError(ApiError):
    """INVALID_ARGUMENT: a field has a value that is not allowed."""

    def __init__(self, path: str, problem: str, valid: str) -> None:
        violation = FieldViolation(path, problem, valid)
        super().__init__(grpc.StatusCode.INVALID_ARGUMENT, str(violation), (violation,))


class MalformedRequestError(ApiError):
    """INVALID_ARGUMENT: the bytes of a call are not a message of its type, or not a whole one."""

    def __init__(self, problem: str) -> None:
        super().__init__(grpc.StatusCode.INVALID_ARGUMENT, problem, reason="MALFORMED_REQUEST")


class UnservedFieldError(ApiError):
    """UNIMPLEMENTED: a field that this version does not serve."""

    def __init__(self, path: str) -> None:
        violation = FieldViolation(path, "is not served by this version", "leave it out")
        super().__init__(grpc.StatusCode.UNIMPLEMENTED, str(violation), (violation,))


class PromptTooLongError(ApiError):
    """OUT_OF_RANGE: the prompt leaves no room for an answer."""

    def __init__(self, path: str, prompt_tokens: int, max_model_len: int) -> None:
        violation = FieldViolation(path, f"has {prompt_tokens} tokens", f"at most {max_model_len - 1}")
        super().__init__(grpc.StatusCode.OUT_OF_RANGE, str(violation), (violation,))


class UnknownModelError(ApiError):
    """NOT_FOUND: no worker serves this model."""

    def __init__(self, model: str, known: list[str]) -> None:
        super().__init__(
            grpc.StatusCode.NOT_FOUND,
            f"model {model!r} is not served here; models: {', '.join(known) or 'none'}",
            reason="UNKNOWN_MODEL",
            metadata={"model": model},
        )


class UnknownWorkerError(ApiError):
    """NOT_FOUND: the router is connected to no such worker."""

    def __init__(self, worker_id: str, known: list[str]) -> None:
        super().__init__(
            grpc.StatusCode.NOT_FOUND,
            f"no worker is called {worker_id!r}; workers: {', '.join(known) or 'none'}",
            reason="UNKNOWN_WORKER",
            metadata={"worker_id": worker_id},
        )


class ConfigVersionError(ApiError):
    """ABORTED: the configuration has changed since the caller read it."""

    def __init__(self, expected: int, version: int) -> None:
        super().__init__(
            grpc.StatusCode.ABORTED,
            f"the configuration has version {version} by now, not {expected}; read it again",
            reason="CONFIG_VERSION",
            metadata={"version": str(version)},
        )


class BadConfigurationError(ApiError):
    """FAILED_PRECONDITION: the configuration can not be taken into force, and nothing has changed."""

    def __init__(self, why: str) -> None:
        super().__init__(grpc.StatusCode.FAILED_PRECONDITION, f"nothing has changed: {why}", reason="BAD_CONFIGURATION")


class TooManyWatchesError(ApiError):
    """RESOURCE_EXHAUSTED: as many clients watch the load as may."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"{limit} clients watch the load, the most that may",
            retry_after_s=1.0,
            reason="TOO_MANY_WATCHES",
        )


class DuplicateRequestError(ApiError):
    """ALREADY_EXISTS: a request with this id is in flight."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            grpc.StatusCode.ALREADY_EXISTS,
            f"request_id {request_id!r} is in flight; use another, or wait until it has ended",
            reason="DUPLICATE_REQUEST_ID",
        )


class NoChatTemplateError(ApiError):
    """FAILED_PRECONDITION: the model has no chat template."""

    def __init__(self, model: str) -> None:
        super().__init__(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"model {model!r} has no chat template; use Generate",
            reason="NO_CHAT_TEMPLATE",
        )


class NoTokenizerError(ApiError):
    """FAILED_PRECONDITION: the model has no tokenizer."""

    def __init__(self, model: str) -> None:
        super().__init__(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"model {model!r} has no tokenizer; send token_ids",
            reason="NO_TOKENIZER",
        )


class QueueFullError(ApiError):
    """RESOURCE_EXHAUSTED: the router's queue, or that of one class of it, is full."""

    def __init__(self, queued: int, retry_after_s: float, priority: str = "") -> None:
        super().__init__(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"the queue is full ({queued} requests{f' of priority {priority}' if priority else ''})",
            retry_after_s=retry_after_s,
            reason="QUEUE_FULL",
        )


class HopelessDeadlineError(ApiError):
    """RESOURCE_EXHAUSTED: by what waits before it, the request would pass its deadline in the queue."""

    def __init__(self, needed_s: float, left_s: float, retry_after_s: float) -> None:
        super().__init__(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"the prompt would be computed in {needed_s:.3g} s at the earliest, its deadline is in {left_s:.3g} s",
            retry_after_s=retry_after_s,
            reason="DEADLINE_HOPELESS",
        )


class TenantLimitError(ApiError):
    """RESOURCE_EXHAUSTED: the tenant has as many requests in flight as it may have."""

    def __init__(self, tenant: str, limit: int, retry_after_s: float) -> None:
        super().__init__(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"tenant {tenant!r} has {limit} requests in flight, the most that it may have",
            retry_after_s=retry_after_s,
            reason="TENANT_LIMIT",
            metadata={"tenant": tenant},
        )


class SlowClientError(ApiError):
    """RESOURCE_EXHAUSTED: the client reads so slowly that its unread tokens passed the limit."""

    def __init__(self, unread_tokens: int) -> None:
        super().__init__(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"the client left {unread_tokens} tokens unread",
            reason="SLOW_CLIENT",
        )


class NoWorkerError(ApiError):
    """UNAVAILABLE: no worker serves, and nothing has been sent; the client may retry."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(grpc.StatusCode.UNAVAILABLE, message, retry_after_s=retry_after_s, reason="NO_WORKER")


class WorkerLostError(ApiError):
    """ABORTED: the worker was lost after tokens had been sent; the text so far is partial."""

    def __init__(self, worker_id: str, tokens_sent: int) -> None:
        super().__init__(
            grpc.StatusCode.ABORTED,
            f"worker {worker_id} was lost after {tokens_sent} tokens; the text so far is partial",
            reason="WORKER_LOST",
            metadata={"worker_id": worker_id, "tokens_sent": str(tokens_sent)},
        )


class PoisonRequestError(ApiError):
    """INTERNAL: workers died while they ran this request; it is not given to another."""

    def __init__(self, attempts: int) -> None:
        super().__init__(
            grpc.StatusCode.INTERNAL,
            f"{MAX_DEATHS} workers died while they ran this request; do not repeat it",
            reason="POISON_REQUEST",
            metadata={"attempts": str(attempts)},
        )


class EngineError(ApiError):
    """INTERNAL: the engine failed on the worker."""

    def __init__(self, message: str) -> None:
        super().__init__(grpc.StatusCode.INTERNAL, message, reason="ENGINE_ERROR")


class UnauthenticatedError(ApiError):
    """UNAUTHENTICATED: the call shows no API key, or one that does not count. The message must not hold the key."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(grpc.StatusCode.UNAUTHENTICATED, message, reason=reason)


class PermissionDeniedError(ApiError):
    """PERMISSION_DENIED: it is known who calls, and that they may not."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(grpc.StatusCode.PERMISSION_DENIED, message, reason=reason)


class DeadlineError(ApiError):
    """DEADLINE_EXCEEDED: the call's deadline passed."""

    def __init__(self, where: str) -> None:
        super().__init__(grpc.StatusCode.DEADLINE_EXCEEDED, f"the deadline passed {where}")


class CancelledByClientError(ApiError):
    """CANCELLED: the client cancelled."""

    def __init__(self) -> None:
        super().__init__(grpc.StatusCode.CANCELLED, "cancelled by the client")
