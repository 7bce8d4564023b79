"""From the parts of a stream to the messages of the public contract."""

from __future__ import annotations

from collections.abc import Callable

from fissile.v1 import inference_pb2 as pb
from google.protobuf.duration_pb2 import Duration

from router.assembly import Ending, Part
from router.model_registry import ModelRegistry, ServedModel
from router.request_stream import RequestStream


def fill_response(
    message: pb.GenerateResponse | pb.ChatResponse, part: Part, stream: RequestStream, clock: Callable[[], float]
) -> None:
    """Makes `message`, which has the request's id and perhaps the part before, the message of `part`.

    Args:
        message: the message; what was in it is replaced.
        part: of the answer.
        stream: the request.
        clock: monotonic seconds.
    """
    message.text = part.text
    if message.token_ids:
        del message.token_ids[:]
    if part.token_ids:
        message.token_ids.extend(part.token_ids)
    if part.start is not None:
        message.prompt_info.CopyFrom(_prompt_info(stream))
    elif message.HasField("prompt_info"):
        message.ClearField("prompt_info")
    if part.ending is not None:
        message.finish.CopyFrom(_finish(part.ending, stream, clock()))


def time_to_first_token_s(stream: RequestStream) -> float:
    """From the request's arrival to its first token's being ready to send; 0 before that."""
    first = stream.assembly.first_token_time
    return 0.0 if first is None else first - stream.request.arrival


def decode_s(stream: RequestStream) -> float:
    """From the first token's arrival to the last one's; 0 without any."""
    first, last = stream.assembly.first_token_time, stream.assembly.last_token_time
    return 0.0 if first is None or last is None else last - first


def describe_model(model: ServedModel, registry: ModelRegistry) -> pb.Model:
    """The model for ListModels and GetModel."""
    return pb.Model(
        name=model.name,
        architecture=model.architecture,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        chat=model.text.template is not None,
        tokenizer_sha256=model.tokenizer_sha256,
        weights_digest=model.weights_digest,
        ready_workers=registry.ready_workers(model.name),
    )


def _prompt_info(stream: RequestStream) -> pb.PromptInfo:
    return pb.PromptInfo(
        prompt_tokens=stream.assembly.prompt_tokens,
        cached_tokens=stream.assembly.start.cached_tokens,
        queue_time=_duration(_queue_s(stream)),
        seed=str(stream.request.seed),
    )


def _finish(ending: Ending, stream: RequestStream, now: float) -> pb.Finish:
    assembly = stream.assembly
    return pb.Finish(
        reason=ending.reason,
        stop=ending.stop,
        usage=pb.Usage(
            prompt_tokens=assembly.prompt_tokens,
            completion_tokens=assembly.delivered,
            cached_tokens=assembly.start.cached_tokens,
        ),
        timings=_timings(stream, now),
        worker_id=assembly.worker_id,
        attempts=len(stream.attempts),
        exact=stream.attempts.exact,
    )


def _timings(stream: RequestStream, now: float) -> pb.Timings:
    assembly = stream.assembly
    first, last = assembly.first_token_time or now, assembly.last_token_time or now
    return pb.Timings(
        queue=_duration(_queue_s(stream)),
        prefill=_duration(assembly.start.prefill_s),
        ttft=_duration(time_to_first_token_s(stream)),
        tpot=_duration((last - first) / max(1, assembly.delivered - 1)),
        total=_duration(now - stream.request.arrival),
    )


def _queue_s(stream: RequestStream) -> float:
    """Time at the router and in the worker's queue; the hop itself is not counted."""
    submitted = stream.request.arrival if stream.submitted is None else stream.submitted
    return submitted - stream.request.arrival + stream.assembly.start.queue_s


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
