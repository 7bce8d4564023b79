"""Errors that reach a client: a gRPC status with `google.rpc` details.

One class per cause in docs/reference/statuses.md. Pure code raises them; `common.rpc` turns them into a status.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from common.limits import ROUTER_RETRY_S

DOMAIN = "fissile"

# Statuses of calls that fail because of what the client sent or did, whoever serves them.
_CLIENT_CODES = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.CANCELLED,
    }
)
# The same among statuses that servers cause too.
_CLIENT_REASONS = frozenset({"TENANT_LIMIT", "SLOW_CLIENT", "CONSTRAINT_FAILED", "REQUEST_TIMEOUT", "SUPERSEDED"})


def is_client_fault(code: grpc.StatusCode, reason: str) -> bool:
    """True if a call failed because of its client.

    A deadline that passes, a full queue and a lost worker are faults of the server.

    Args:
        code: the call's status.
        reason: the reason in its ErrorInfo, "" for none.
    """
    return reason != "CANCELLED_BY_OPERATOR" and (code in _CLIENT_CODES or reason in _CLIENT_REASONS)


@dataclass(frozen=True)
class FieldViolation:
    """A bad field of a request: its path, what is wrong with it, and what would be valid."""

    path: str
    problem: str
    valid: str = ""

    def __str__(self) -> str:
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


@contextlib.contextmanager
def at_path(prefix: str) -> Iterator[None]:
    """Prefixes the field paths of errors raised in the block with the message at `prefix`."""
    try:
        yield
    except ApiError as error:
        if error.violations:
            error.violations = tuple(replace(each, path=f"{prefix}.{each.path}") for each in error.violations)
            error.message = str(error.violations[0])
        raise


class InvalidFieldError(ApiError):
    """INVALID_ARGUMENT: a field has a value that is not allowed."""

    def __init__(self, path: str, problem: str, valid: str) -> None:
        violation = FieldViolation(path, problem, valid)
        super().__init__(grpc.StatusCode.INVALID_ARGUMENT, str(violation), (violation,), reason="INVALID_FIELD")


class MalformedRequestError(ApiError):
    """INVALID_ARGUMENT: the bytes of a call are not a whole message of its type."""

    def __init__(self, problem: str) -> None:
        super().__init__(grpc.StatusCode.INVALID_ARGUMENT, problem, reason="MALFORMED_REQUEST")


class RequestTimeoutError(ApiError):
    """DEADLINE_EXCEEDED: a call's message did not arrive in time."""

    def __init__(self, seconds: float) -> None:
        message = f"the request's message did not arrive within {seconds:g} s"
        super().__init__(grpc.StatusCode.DEADLINE_EXCEEDED, message, reason="REQUEST_TIMEOUT")


class UnservedFieldError(ApiError):
    """UNIMPLEMENTED: a field that this version does not serve."""

    def __init__(self, path: str) -> None:
        violation = FieldViolation(path, "is not served by this version", "leave it out")
        super().__init__(grpc.StatusCode.UNIMPLEMENTED, str(violation), (violation,), reason="UNSERVED_FIELD")


class UnservedByWorkersError(ApiError):
    """UNIMPLEMENTED: a field that a model's workers do not serve, because their version is older."""

    def __init__(self, path: str, model: str) -> None:
        violation = FieldViolation(path, f"is not served by all workers of model {model!r}", "leave it out")
        super().__init__(grpc.StatusCode.UNIMPLEMENTED, str(violation), (violation,), reason="UNSERVED_FIELD")


class ConstraintFailedError(ApiError):
    """RESOURCE_EXHAUSTED: an answer's constraint took more work than allowed, or other masks left it no token."""

    def __init__(self, why: str) -> None:
        message = why or "the constraint cannot go on"
        super().__init__(grpc.StatusCode.RESOURCE_EXHAUSTED, message, reason="CONSTRAINT_FAILED")


class UnservedMethodError(ApiError):
    """UNIMPLEMENTED: a method that a model's workers do not serve, because their version is older."""

    def __init__(self, method: str, model: str) -> None:
        message = f"{method} is not served by all workers of model {model!r}, of which some are of an older version"
        super().__init__(grpc.StatusCode.UNIMPLEMENTED, message, reason="UNSERVED_METHOD", metadata={"method": method})


class UnknownRequestError(ApiError):
    """NOT_FOUND: no such request is in flight."""

    def __init__(self, request_id: str, tenant: str) -> None:
        of = f" of tenant {tenant!r}" if tenant else ""
        super().__init__(
            grpc.StatusCode.NOT_FOUND,
            f"no request {request_id!r}{of} is in flight at this router",
            reason="UNKNOWN_REQUEST",
            metadata={"request_id": request_id, "tenant": tenant},
        )


class CancelledByOperatorError(ApiError):
    """CANCELLED: an operator has ended the request."""

    def __init__(self) -> None:
        message = "an operator has ended this request"
        super().__init__(grpc.StatusCode.CANCELLED, message, reason="CANCELLED_BY_OPERATOR")


class SupersededError(ApiError):
    """ABORTED: another call has resumed this stream."""

    def __init__(self) -> None:
        message = "another call with this request_id and `resume` goes on with this stream"
        super().__init__(grpc.StatusCode.ABORTED, message, reason="SUPERSEDED")


class ResumeMismatchError(ApiError):
    """DATA_LOSS: the tokens that a client says it has are not those of its request."""

    def __init__(self, index: int, problem: str) -> None:
        message = f"answer {index} cannot be resumed: {problem}; send the request without resume"
        super().__init__(grpc.StatusCode.DATA_LOSS, message, reason="RESUME_MISMATCH", metadata={"index": str(index)})


class OtherModelStateError(ApiError):
    """FAILED_PRECONDITION: the model state that the request continues or repeats is not served here now."""

    def __init__(self, what: str, wanted: str, served: str) -> None:
        message = f"{what} {wanted} is not served here now (served: {served or 'none'}); send a new request"
        super().__init__(
            grpc.StatusCode.FAILED_PRECONDITION,
            message,
            reason="OTHER_MODEL_STATE",
            metadata={"what": what, "wanted": wanted, "served": served},
        )


class PromptTooLongError(ApiError):
    """OUT_OF_RANGE: the prompt leaves no room for an answer. `at_least`: a long text is not counted to its end."""

    def __init__(self, path: str, prompt_tokens: int, max_model_len: int, *, at_least: bool = False) -> None:
        has = f"has {'at least ' if at_least else ''}{prompt_tokens} tokens"
        violation = FieldViolation(path, has, f"at most {max_model_len - 1}")
        super().__init__(grpc.StatusCode.OUT_OF_RANGE, str(violation), (violation,), reason="TOO_LONG")


class TextTooLongError(ApiError):
    """OUT_OF_RANGE: more text than can be tokenized, or sent back."""

    def __init__(self, path: str, problem: str, valid: str = "less text, or several requests") -> None:
        violation = FieldViolation(path, problem, valid)
        super().__init__(grpc.StatusCode.OUT_OF_RANGE, str(violation), (violation,), reason="TOO_LONG")


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
            f"the configuration is at version {version} now, not {expected}; read it again",
            reason="CONFIG_VERSION",
            metadata={"version": str(version)},
        )


class BadConfigurationError(ApiError):
    """FAILED_PRECONDITION: the configuration is invalid; nothing has changed."""

    def __init__(self, why: str) -> None:
        super().__init__(grpc.StatusCode.FAILED_PRECONDITION, f"nothing has changed: {why}", reason="BAD_CONFIGURATION")


class TooManyWatchesError(ApiError):
    """RESOURCE_EXHAUSTED: the maximum number of clients watches the load already."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"{limit} clients already watch the load, which is the limit",
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


class NotARerankerError(ApiError):
    """FAILED_PRECONDITION: the model was not trained to rate the relevance of documents.

    Args:
        model: its name.
        num_labels: of its classifier; 0 for a model that has none.
    """

    def __init__(self, model: str, num_labels: int = 0) -> None:
        why = (
            f"its classifier has {num_labels} labels, where a reranker's has one"
            if num_labels
            else "its checkpoint has no classifier and names no tokens for yes and no (1_LogitScore/config.json, or "
            "classifier_from_token in config.json)"
        )
        message = f"model {model!r} is not a reranker: {why}; ask a model with CAPABILITY_RERANK"
        super().__init__(grpc.StatusCode.FAILED_PRECONDITION, message, reason="NOT_A_RERANKER")


class NoOutputHeadError(ApiError):
    """FAILED_PRECONDITION: the model cannot generate."""

    def __init__(self, model: str) -> None:
        message = f"model {model!r} cannot generate: its checkpoint has no output head; use Embed for vectors"
        super().__init__(grpc.StatusCode.FAILED_PRECONDITION, message, reason="NO_OUTPUT_HEAD")


class QueueFullError(ApiError):
    """RESOURCE_EXHAUSTED: the queue of a router or worker is full, or that of one priority class.

    Args:
        queued: waiting requests.
        retry_after_s: when to retry.
        priority: name of the class.
        tenant: the tenant that holds its full share of the queue already.
    """

    def __init__(self, queued: int, retry_after_s: float, priority: str = "", tenant: str | None = None) -> None:
        of_class = f" of priority {priority}" if priority else ""
        share = "" if tenant is None else f", and tenant {tenant!r} has its share of it"
        super().__init__(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"the queue is full ({queued} requests{of_class}){share}",
            retry_after_s=retry_after_s,
            reason="QUEUE_FULL",
        )


class HopelessDeadlineError(ApiError):
    """RESOURCE_EXHAUSTED: the requests queued before this one would take longer than its deadline."""

    def __init__(self, needed_s: float, left_s: float, retry_after_s: float) -> None:
        super().__init__(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"the prompt would be computed in {needed_s:.3g} s at the earliest, but the deadline is in {left_s:.3g} s",
            retry_after_s=retry_after_s,
            reason="DEADLINE_HOPELESS",
        )


class TenantLimitError(ApiError):
    """RESOURCE_EXHAUSTED: the tenant has its maximum number of requests in flight."""

    def __init__(self, tenant: str, limit: int, retry_after_s: float) -> None:
        super().__init__(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"tenant {tenant!r} has {limit} requests in flight, the most that it may have",
            retry_after_s=retry_after_s,
            reason="TENANT_LIMIT",
            metadata={"tenant": tenant},
        )


class SlowClientError(ApiError):
    """RESOURCE_EXHAUSTED: the client leaves too much unread, or reads too slowly."""

    def __init__(self, unread_tokens: int, waited_s: float | None = None) -> None:
        waited = "" if waited_s is None else f", and has let a message wait for {waited_s:g} s"
        super().__init__(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"the client left {unread_tokens} tokens unread{waited}",
            reason="SLOW_CLIENT",
        )


class NoWorkerError(ApiError):
    """UNAVAILABLE: no worker serves, and nothing has been sent; the client may retry."""

    def __init__(self, message: str, retry_after_s: float = 1.0, **metadata: str) -> None:
        super().__init__(grpc.StatusCode.UNAVAILABLE, message, (), retry_after_s, reason="NO_WORKER", metadata=metadata)


class WorkerLostError(ApiError):
    """ABORTED: the worker was lost after tokens had been sent; the answer is partial."""

    def __init__(self, worker_id: str, tokens_sent: int) -> None:
        super().__init__(
            grpc.StatusCode.ABORTED,
            f"worker {worker_id} was lost after {tokens_sent} tokens; the text so far is partial",
            reason="WORKER_LOST",
            metadata={"worker_id": worker_id, "tokens_sent": str(tokens_sent)},
        )


class RouterEndingError(ApiError):
    """This router ends: UNAVAILABLE if the client has received nothing, ABORTED if its answer is partial."""

    def __init__(self, tokens_sent: int = 0) -> None:
        metadata = {"tokens_sent": str(tokens_sent)} if tokens_sent else {}
        super().__init__(
            grpc.StatusCode.ABORTED if tokens_sent else grpc.StatusCode.UNAVAILABLE,
            f"this router shut down after {tokens_sent} tokens; the text so far is partial"
            if tokens_sent
            else "this router is shutting down; ask another one",
            retry_after_s=None if tokens_sent else ROUTER_RETRY_S,
            reason="ROUTER_ENDING",
            metadata=metadata,
        )


class PoisonRequestError(ApiError):
    """INTERNAL: workers crash on this request, the last one with nothing else starting; no other worker gets it."""

    def __init__(self, deaths: int) -> None:
        super().__init__(
            grpc.StatusCode.INTERNAL,
            f"{deaths} workers died with this request, the last one while it began nothing else; do not send it again",
            reason="POISON_REQUEST",
            metadata={"deaths": str(deaths)},
        )


class RouterFailedError(ApiError):
    """INTERNAL: a bug of the router; its log has the traceback."""

    def __init__(self) -> None:
        super().__init__(grpc.StatusCode.INTERNAL, "the router failed", reason="ROUTER_ERROR")


class EngineError(ApiError):
    """INTERNAL: the engine failed on the worker."""

    def __init__(self, message: str) -> None:
        super().__init__(grpc.StatusCode.INTERNAL, message, reason="ENGINE_ERROR")


class UnauthenticatedError(ApiError):
    """UNAUTHENTICATED: the call shows no API key, or an unknown one. The message must not contain the key."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(grpc.StatusCode.UNAUTHENTICATED, message, reason=reason)


class PermissionDeniedError(ApiError):
    """PERMISSION_DENIED: the caller is authenticated but not allowed."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(grpc.StatusCode.PERMISSION_DENIED, message, reason=reason)


class PriorityNotAllowedError(ApiError):
    """PERMISSION_DENIED: the caller may not use such a high priority class."""

    def __init__(self, asked: str, most: str) -> None:
        violation = FieldViolation("priority", f"is {asked}", f"at most {most}, the highest for this caller")
        super().__init__(
            grpc.StatusCode.PERMISSION_DENIED,
            str(violation),
            (violation,),
            reason="PRIORITY_NOT_ALLOWED",
            metadata={"max_priority": most},
        )


class DeadlineError(ApiError):
    """DEADLINE_EXCEEDED: the call's deadline passed."""

    def __init__(self, where: str) -> None:
        super().__init__(grpc.StatusCode.DEADLINE_EXCEEDED, f"the deadline passed {where}", reason="DEADLINE")
