"""Messages of the public contract, made from the state of streams and models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from fissile.v1 import inference_pb2 as pb

from common.params.sampling_params import DISTRIBUTION_FIELDS
from common.rpc.durations import to_duration
from common.telemetry.ledger import Blame
from common.telemetry.names import Stage
from common.telemetry.request_record import RequestTimes
from common.text.detokenizer import TokenBytes
from common.wire.heads import public_pooling
from common.wire.logprob_rows import unpack
from router.answers.answer_logprobs import ChunkLogprobs, LogprobRows
from router.answers.channels.parser import ChannelPart
from router.answers.stream_chunk import FinishInfo, StreamChunk
from router.api.receipts import receipt_of
from router.model_registry import ModelRegistry, ServedModel
from router.requests.stream import RequestStream


def fill_response(
    message: pb.GenerateResponse | pb.ChatResponse,
    part: StreamChunk,
    stream: RequestStream,
    clock: Callable[[], float],
    *,
    has_info: bool,
) -> None:
    """Fills `message` with one part of an answer; request id and index of the answer stay.

    Args:
        message: the message, perhaps with the part before, which is replaced.
        part: the part.
        stream: stream of the answer.
        clock: monotonic seconds.
        has_info: True for the first message of the call, which describes the prompt.
    """
    if isinstance(message, pb.ChatResponse):
        message.delta.content, message.delta.reasoning = part.text, part.reasoning
        _fill_calls(message.delta, part.calls, stream)
    else:
        message.text = part.text
    if message.token_ids:
        del message.token_ids[:]
    if part.token_ids:
        message.token_ids.extend(part.token_ids)
    if part.logprobs is not None:
        _fill_logprobs(message, part.logprobs, stream.request.token_bytes)
    if has_info:
        message.prompt_info.CopyFrom(_prompt_info(stream, clock()))
    elif message.HasField("prompt_info"):
        message.ClearField("prompt_info")
    if part.ending is not None:
        message.finish.CopyFrom(_finish(part.ending, stream, clock()))


def _fill_calls(delta: pb.ChatDelta, calls: Sequence[ChannelPart], stream: RequestStream) -> None:
    """Replaces the parts of tool calls in a message; only the first part of a call has its id."""
    if delta.tool_calls:
        del delta.tool_calls[:]
    for part in calls:
        call_id = stream.request.call_id(part.call) if part.name else ""
        delta.tool_calls.add(index=part.call, id=call_id, name=part.name, arguments_json=part.text)


def _fill_logprobs(
    message: pb.GenerateResponse | pb.ChatResponse, logprobs: ChunkLogprobs, token_bytes: TokenBytes | None
) -> None:
    """Replaces the logprobs of a message. Either all parts of an answer have logprobs, or none has."""
    for entries, rows in ((message.logprobs, logprobs.generated), (message.prompt_logprobs, logprobs.prompt)):
        del entries[:]
        if rows:
            entries.extend(token_logprobs(rows))
        if token_bytes is not None:
            for entry in entries:
                entry.token_bytes = token_bytes.inner(entry.token_id)
                for top in entry.top:
                    top.token_bytes = token_bytes.inner(top.token_id)


def token_logprobs(rows: LogprobRows) -> list[pb.TokenLogprobs]:
    """Logprobs as entries of the public contract."""
    return [
        pb.TokenLogprobs(
            token_id=token_id,
            logprob=entry.logprob,
            rank=entry.rank,
            top=[pb.TopLogprob(token_id=top_id, logprob=logprob) for top_id, logprob in entry.top],
            given=entry.given,
            kept_mass=entry.kept_mass,
        )
        for token_id, entry in zip(rows.token_ids, unpack(rows.layout, rows.rows), strict=True)
    ]


def text_of(message: pb.GenerateResponse | pb.ChatResponse) -> str:
    """The text that a message adds to its answer."""
    return message.delta.content if isinstance(message, pb.ChatResponse) else message.text


def reasoning_of(message: pb.GenerateResponse | pb.ChatResponse) -> str:
    """The reasoning that a message adds to its answer."""
    return message.delta.reasoning if isinstance(message, pb.ChatResponse) else ""


def whole_calls(parts: Iterable[pb.ToolCallDelta]) -> list[pb.ToolCall]:
    """The tool calls of an answer, joined from all their parts in order."""
    calls: list[pb.ToolCall] = []
    arguments: list[list[str]] = []
    for part in parts:
        if part.name:
            calls.append(pb.ToolCall(id=part.id, name=part.name))
            arguments.append([])
        arguments[part.index].append(part.arguments_json)
    for call, texts in zip(calls, arguments, strict=True):
        call.arguments_json = "".join(texts)
    return calls


def usage_of(streams: Sequence[RequestStream]) -> pb.Usage:
    """Token counts of all answers of a call so far."""
    assembly = streams[0].assembly
    return pb.Usage(
        prompt_tokens=assembly.prompt_tokens,
        completion_tokens=sum(stream.written_tokens for stream in streams),
        cached_tokens=assembly.start.cached_tokens,
        reasoning_tokens=sum(stream.written_reasoning_tokens for stream in streams),
    )


def times_of(stream: RequestStream, now: float) -> RequestTimes:
    """Times of a stream's stages until `now`, monotonic seconds."""
    assembly, attempts = stream.assembly, stream.attempts.all
    # After the loss of its worker the request waits again.
    given = attempts[-1].began if attempts and attempts[-1].loss is None else None
    return RequestTimes(
        arrived=stream.request.arrival,
        ended=now,
        given=given,
        first_token=assembly.first_token_time,
        last_token=assembly.last_token_time,
        tokens=assembly.delivered,
        prefill=assembly.start.prefill_s,
    )


def one_of_each_prompt(streams: Sequence[RequestStream]) -> list[RequestStream]:
    """The first stream of each prompt of a call. Answers to the same prompt share the array of its token ids."""
    return [*{id(stream.request.token_ids): stream for stream in reversed(streams)}.values()][::-1]


def finish_name(reason: pb.FinishReason.ValueType) -> str:
    """Short name of a finish reason, such as `stop` or `length`."""
    return pb.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()


def decode_s(stream: RequestStream) -> float:
    """Seconds from the first token's arrival to the last one's; 0 without tokens."""
    first, last = stream.assembly.first_token_time, stream.assembly.last_token_time
    return 0.0 if first is None or last is None else last - first


def describe_model(model: ServedModel, registry: ModelRegistry) -> pb.Model:
    """The model for ListModels and GetModel."""
    return pb.Model(
        name=model.name,
        architecture=model.architecture,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        capabilities=_capabilities(model),
        tokenizer_sha256=model.tokenizer_sha256,
        weights_digest=model.weights_digest,
        ready_workers=registry.ready_workers(model.name),
        default_sampling_params=pb.SamplingParams(
            **{name: getattr(model.text.defaults, name) for name in DISTRIBUTION_FIELDS}
        ),
        template_sha256="" if model.text.template is None else model.text.template.sha256,
        eos_token_ids=sorted(model.eos_token_ids),
        embedding_size=model.hidden_size if model.embeds else 0,
        default_pooling=public_pooling(model.default_pooling if model.embeds else None),
    )


# Capabilities that a model without an output head lacks, even if its files suggest them.
_OF_OUTPUT_HEAD: Final = frozenset(
    {
        pb.CAPABILITY_GENERATE,
        pb.CAPABILITY_CHAT,
        pb.CAPABILITY_LOGPROBS,
        pb.CAPABILITY_CONSTRAINTS,
        pb.CAPABILITY_TOOLS,
        pb.CAPABILITY_REASONING,
        pb.CAPABILITY_RECEIPTS,
    }
)


def _capabilities(model: ServedModel) -> list[pb.Capability.ValueType]:
    served = {
        pb.CAPABILITY_GENERATE: True,
        pb.CAPABILITY_TEXT: model.text.tokenizer is not None,
        pb.CAPABILITY_CHAT: model.text.template is not None,
        pb.CAPABILITY_LOGPROBS: model.serves_logprobs,
        pb.CAPABILITY_TOOLS: model.calls_tools,
        pb.CAPABILITY_REASONING: model.reasons,
        pb.CAPABILITY_CONSTRAINTS: model.serves_constraints,
        pb.CAPABILITY_EMBED: model.embeds,
        pb.CAPABILITY_RERANK: model.reranks,
        pb.CAPABILITY_RECEIPTS: True,
    }
    return [
        capability
        for capability, is_served in served.items()
        if is_served and (model.generates or capability not in _OF_OUTPUT_HEAD)
    ]


def _prompt_info(stream: RequestStream, now: float) -> pb.PromptInfo:
    return pb.PromptInfo(
        prompt_tokens=stream.assembly.prompt_tokens,
        cached_tokens=stream.assembly.start.cached_tokens,
        queue_time=to_duration(times_of(stream, now).queue_s),
        seed=str(stream.request.seed),
        weights_digest=stream.request.weights_digest,
        numerics=stream.attempts.numerics,
        token_ids=stream.request.token_ids if stream.request.shows_prompt_ids else (),
    )


def _finish(ending: FinishInfo, stream: RequestStream, now: float) -> pb.Finish:
    assembly = stream.assembly
    return pb.Finish(
        reason=ending.reason,
        stop=ending.stop,
        usage=pb.Usage(
            prompt_tokens=assembly.prompt_tokens,
            completion_tokens=assembly.delivered,
            cached_tokens=assembly.start.cached_tokens,
            reasoning_tokens=assembly.reasoning_tokens,
        ),
        timings=_timings(stream, now),
        worker_id=assembly.worker_id,
        attempts=len(stream.attempts),
        exact=stream.attempts.exact,
        weights_digest=stream.request.weights_digest,
        logprob=None if assembly.logprobs is None else assembly.logprobs.total,
        receipt=receipt_of(stream, stream.request.receipt) if stream.attempts.exact else None,
        drafts=[pb.DraftCounts(verified=verified, accepted=accepted) for verified, accepted in ending.drafts],
    )


def _timings(stream: RequestStream, now: float) -> pb.Timings:
    times, parts, blames = times_of(stream, now), stream.ledger.parts(now), stream.ledger.blames
    timings = pb.Timings(
        queue=to_duration(times.queue_s),
        prefill=to_duration(times.prefill_s),
        ttft=to_duration(times.ttft_s),
        tpot=to_duration(times.tpot_s),
        total=to_duration(times.duration_s),
        unexplained=to_duration(parts.pop(Stage.UNEXPLAINED, 0.0)),
    )
    # Set one by one, fields take a third of the time of arguments.
    for stage, seconds in parts.items():
        part = timings.parts.add()
        part.stage = stage
        part.duration.seconds, part.duration.nanos = int(seconds), int(seconds % 1 * 1e9)
        if stage in blames:
            _fill_blame(part, blames[stage], stream.request.tenant)
    return timings


def _fill_blame(part: pb.TimePart, blame: Blame, tenant: str) -> None:
    """Fills in a blamed request as a client of `tenant` may know it: another tenant's request has no id.

    It costs the part at most: the shares of an interval that is shorter than they are were scaled down.
    """
    message = part.blame
    message.is_other_tenant = blame.tenant != tenant
    message.request_id = "" if message.is_other_tenant else blame.request_id
    cost, whole = to_duration(blame.seconds), part.duration
    is_less = (cost.seconds, cost.nanos) < (whole.seconds, whole.nanos)
    message.duration.CopyFrom(cost if is_less else whole)
