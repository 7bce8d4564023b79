"""Shared parts of the commands that call a router: a request, its stream, its errors and its figures in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from fissile.client import AsyncClient, AsyncStream, Delta, FissileError, Receipt, Stream
from fissile.client.connections import is_key
from fissile.client.errors import error_of
from fissile.v1 import inference_pb2 as pb
from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict

from common.cli.core.errors import CommandError
from common.limits import MAX_REQUEST_BYTES
from common.params.sampling_params import LOGPROB_FIELDS
from common.rpc.tls import ClientTls, Dialer, TlsError, is_loopback
from common.telemetry.names import TRACERESPONSE

# For so long several routers are asked again while nothing comes.
GIVE_UP_S = 10.0

# Exit codes by status: 2 when the request must be changed, 3 when the same request may work later, else 1.
_CHANGE_THE_REQUEST = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
    }
)
# Part of a gRPC error text -> its meaning, and what to do.
_TLS_TROUBLES = (
    ("WRONG_VERSION_NUMBER", "it speaks plain text", "leave --tls and --tls-ca away"),
    ("certificate has expired", "its certificate has expired", "renew it"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is of another CA", "--tls-ca names the right one"),
    ("Hostname Verification", "its certificate has another name", "--tls-name says which it must have"),
    ("Socket closed", "it closes the connection", "it may want TLS (--tls-ca) or a certificate (--client-cert)"),
)
_TRY_LATER = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED})


def call_failed(
    error: grpc.aio.AioRpcError | FissileError,
    address: str,
    *,
    partial: bool = False,
    remedy: str = "`fissile serve` starts one",
) -> CommandError:
    """Makes the error of a command from a failed call.

    Args:
        error: what the call raised.
        address: of the router that was called, or of several.
        partial: whether part of an answer had arrived.
        remedy: what to do when nobody listens there.
    """
    failure = error if isinstance(error, FissileError) else error_of(error)
    code, details = failure.code, failure.message
    # Errors of gRPC itself have no reason; a server of ours always says one.
    if code is grpc.StatusCode.UNAVAILABLE and not failure.reason:
        reason, remedy = next((said for part, *said in _TLS_TROUBLES if part in details), ("", remedy))
        reason = reason or details.rpartition(": ")[2]
        return CommandError(f"no router can be reached at {address} ({reason}); {remedy}", 3)
    # A DEADLINE_EXCEEDED of gRPC itself has no reason.
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and not failure.reason:
        details = f"{address} has not answered in time (--timeout)"
    if code is grpc.StatusCode.UNIMPLEMENTED and not failure.reason:
        details = f"{address} does not know this call; it is the port of another service, or of an older Fissile"
    exit_code = 2 if code in _CHANGE_THE_REQUEST else 3 if code in _TRY_LATER else 1
    note = " (the text so far is partial)" if partial and "partial" not in details else ""
    return CommandError(f"{code.name}: {details}{note}", exit_code)


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials of a command's calls.

    Attributes:
        tls: files of TLS; None is plain text.
        api_key: shown with every call; empty shows none.
    """

    tls: ClientTls | None = None
    api_key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        """Refuses a key that metadata cannot hold.

        Raises:
            CommandError: it holds a line break, or what is not ASCII.
        """
        if not is_key(self.api_key):
            raise CommandError("the API key has a character that no key has, such as a line break: see FISSILE_API_KEY")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()


NO_CREDENTIALS = Credentials()


def open_channel(
    address: str, credentials: Credentials = NO_CREDENTIALS, options: Sequence[tuple[str, Any]] = ()
) -> grpc.aio.Channel:
    """Opens a channel to a router. It accepts the longest request and ignores proxies of the environment.

    Raises:
        CommandError: a file of TLS cannot be used, or a key would go over a network in plain text.
    """
    dialer = _dialer(address, credentials)
    return dialer.channel(address, [("grpc.max_send_message_length", 2 * MAX_REQUEST_BYTES), *options])


def _dialer(address: str, credentials: Credentials) -> Dialer:
    if credentials.api_key and credentials.tls is None and not is_loopback(address):
        raise CommandError(f"the key would go to {address} in plain text: call by TLS, with --tls or --tls-ca FILE")
    try:
        return Dialer(credentials.tls)
    except TlsError as error:
        raise CommandError(str(error)) from None


def client_arguments(addresses: Sequence[str], credentials: Credentials = NO_CREDENTIALS) -> dict[str, Any]:
    """Makes the arguments of a `fissile.client.Client` or `AsyncClient` for these routers.

    One router is asked once, as a command that fails is to say so; of several, the others may go on.

    Raises:
        CommandError: a file of TLS cannot be used, or a key would go over a network in plain text.
    """
    for address in addresses:
        _dialer(address, credentials)
    tls = credentials.tls
    given: dict[str, Any] = {} if tls is None else {"tls": True, "tls_ca": tls.ca, "tls_name": tls.name}
    if tls is not None and tls.cert is not None and tls.key is not None:
        given["client_cert"] = (tls.cert, tls.key)
    return {
        "targets": addresses,
        "give_up_s": GIVE_UP_S if len(addresses) > 1 else 0.0,
        "api_key": credentials.api_key,
        "options": [("grpc.enable_http_proxy", 0)],
        **given,
    }


@dataclass(frozen=True, slots=True)
class Question:
    """Request that a command sends.

    `chat` None takes Chat where the model has a chat template. `sampling`: the given fields of
    `common.params.sampling_params.SamplingParams` only, of which those of logprobs are output options.
    `has_receipt`: the answer is to have a receipt, which is checked.
    """

    prompt: str
    model: str = ""
    chat: bool | None = None
    system: str = ""
    request_id: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    has_receipt: bool = False
    logits_every: int = 0

    @property
    def sampling_params(self) -> pb.SamplingParams:
        given = {name: value for name, value in self.sampling.items() if name not in LOGPROB_FIELDS}
        if (constraint := given.get("constraint")) is not None and "choices" in constraint:
            given["constraint"] = {"choices": {"texts": constraint["choices"]}}
        return pb.SamplingParams(**given)


@dataclass(slots=True)
class CommandAnswer:
    """Answer to a question of the command line."""

    trace_id: str = ""
    request_id: str = ""
    text: str = ""
    reasoning: str = ""
    tool_calls: list[pb.ToolCall] = field(default_factory=list)
    prompt_info: pb.PromptInfo = field(default_factory=pb.PromptInfo)
    finish: pb.Finish = field(default_factory=pb.Finish)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    receipt: Receipt | None = None

    @classmethod
    def of(cls, stream: Stream | AsyncStream) -> CommandAnswer:
        """Makes the answer from a stream, complete or not."""
        progress = stream.progress
        came = progress.answers[0]
        return cls(
            trace_id=_trace_id_in(stream.trailing_metadata.items()),
            request_id=progress.request_id,
            text=came.text,
            reasoning=came.reasoning,
            tool_calls=came.tool_calls,
            prompt_info=progress.prompt_info or pb.PromptInfo(),
            finish=came.finish or pb.Finish(),
            token_ids=came.token_ids,
            logprobs=came.logprobs,
            prompt_logprobs=progress.prompt_logprobs,
            receipt=came.receipt,
        )

    def figures(self) -> str:
        """TTFT, time per token, token counts, finish reason, and the trace, or the request for logs."""
        timings, usage = self.finish.timings, self.finish.usage
        return (
            f"TTFT {milliseconds(timings.ttft):.1f} ms, {milliseconds(timings.tpot):.2f} ms per token, "
            f"{usage.completion_tokens} tokens from {usage.prompt_tokens} ({usage.cached_tokens} cached), "
            f"{self.finish_reason()}, {f'trace {self.trace_id}' if self.trace_id else f'request {self.request_id}'}"
        )

    def logprob_lines(self) -> Iterator[str]:
        """Table of the logprobs, if there are any: of the prompt, and of the answer."""
        for name, entries in (("prompt", self.prompt_logprobs), ("answer", self.logprobs)):
            if entries:
                yield f"{name + ' token':>13} {'logprob':>9} {'rank':>6}  most likely"
            for entry in entries:
                top = ", ".join(f"{one.token_id} {one.logprob:.3f}" for one in entry.top)
                given = "".join(f"  {logprob:.3f}" for logprob in entry.given)
                yield f"{entry.token_id:13} {entry.logprob:9.4f} {entry.rank:6}  {top}{given}".rstrip()

    def finish_reason(self) -> str:
        """`stop`, `length` or `tool_calls`."""
        return pb.FinishReason.Name(self.finish.reason).removeprefix("FINISH_REASON_").lower()

    def as_dict(self) -> dict[str, Any]:
        """Converts the answer to JSON values; times are in milliseconds."""
        finish = self.finish
        return {
            "request_id": self.request_id,
            "text": self.text,
            **({"reasoning": self.reasoning} if self.reasoning else {}),
            "finish_reason": self.finish_reason(),
            "usage": {name: getattr(finish.usage, name) for name in finish.usage.DESCRIPTOR.fields_by_name},
            "timings_ms": {
                name: round(milliseconds(getattr(finish.timings, name)), 3)
                for name in finish.timings.DESCRIPTOR.fields_by_name
                if name != "parts"
            },
            "parts_ms": {part.stage: round(milliseconds(part.duration), 3) for part in finish.timings.parts},
            "seed": self.prompt_info.seed,
            "worker_id": finish.worker_id,
            "attempts": finish.attempts,
            "exact": finish.exact,
            "trace_id": self.trace_id,
            **self._drafts(),
            **self._logprobs(),
        }

    def _drafts(self) -> dict[str, Any]:
        """Drafts by their position behind a token, if there were any."""
        found = [{"verified": one.verified, "accepted": one.accepted} for one in self.finish.drafts]
        return {"drafts": found} if found else {}

    def _logprobs(self) -> dict[str, Any]:
        """Logprobs, if there are any."""
        found: dict[str, Any] = {}
        for name, entries in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if entries:
                found[name] = [MessageToDict(entry, preserving_proto_field_name=True) for entry in entries]
        if self.finish.HasField("logprob"):
            found["logprob"] = self.finish.logprob
        return found


def milliseconds(duration: Duration) -> float:
    """A proto duration in milliseconds."""
    return duration.seconds * 1e3 + duration.nanos / 1e6


async def ask(
    client: AsyncClient, question: Question, timeout_s: float, on_text: Callable[[str], None]
) -> CommandAnswer:
    """Asks a router and streams the answer; a broken stream continues at another router, if there are several.

    Args:
        client: of the routers.
        question: what to ask.
        timeout_s: deadline of the whole call.
        on_text: gets each piece of text as it arrives.

    Raises:
        CommandError: the call ended with a status other than OK.
    """
    stream: AsyncStream | None = None
    try:
        chat = question.chat
        if chat is None:
            model = await client.model(question.model, timeout_s=timeout_s)
            chat = pb.CAPABILITY_CHAT in model.capabilities
        if question.system and not chat:
            raise CommandError("--system needs a model with a chat template: leave it out")
        async with open_stream(client, question, timeout_s, chat=chat) as stream:
            async for event in stream:
                if isinstance(event, Delta):
                    on_text(event.text)
    except FissileError as error:
        is_partial = stream is not None and stream.progress.answers[0].has_any
        raise call_failed(error, ",".join(client.connection.targets), partial=is_partial) from error
    return CommandAnswer.of(stream)


def open_stream(client: AsyncClient, question: Question, timeout_s: float, *, chat: bool) -> AsyncStream:
    """Opens the stream of a question: a chat of one message and perhaps a system message, or a plain prompt."""
    given: dict[str, Any] = {
        "timeout_s": timeout_s,
        "model": question.model,
        "request_id": question.request_id,
        "receipt": {"logits_every": question.logits_every} if question.logits_every else question.has_receipt,
        **question.sampling,
    }
    if not chat:
        return client.generate_stream(question.prompt, **given)
    system = [{"role": "system", "content": question.system}] if question.system else []
    return client.chat_stream([*system, {"role": "user", "content": question.prompt}], **given)


def _trace_id_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Finds the id of the router's trace, 32 hex digits; empty if it records none."""
    said = next((str(value) for name, value in metadata or () if name == TRACERESPONSE), "")
    return said.split("-")[1] if said.count("-") >= 3 else ""


# A model's output may hold terminal control sequences; on a terminal they are shown instead of obeyed.
_SHOWN_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def printable(text: str, *, terminal: bool) -> str:
    """Escapes control characters in text for a terminal."""
    return text.translate(_SHOWN_CONTROLS) if terminal else text
