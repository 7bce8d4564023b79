"""Answers for tests of encoders: their parts, the same parts cut into other events, and the frames of a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fissile.client import Delta, Event, Finished, Result
from fissile.client.progress import Progress
from fissile.v1 import inference_pb2 as pb
from hypothesis import strategies as st

REQUEST_ID = "r7"


@dataclass(frozen=True)
class Part:
    """A stretch of an answer in one channel: reasoning, text, or the arguments of a call with a name."""

    channel: str
    text: str
    name: str = ""


TEXT_PARTS = st.builds(Part, st.sampled_from(["reasoning", "text"]), st.text(min_size=1, max_size=12))
CALL_PARTS = st.builds(
    Part,
    st.just("call"),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2).map(json.dumps),
    st.sampled_from(["look", "wait"]),
)
# Answers as models write them: parts in any order.
ANSWERS = st.lists(st.one_of(TEXT_PARTS, CALL_PARTS), max_size=5)


def call_id(index: int) -> str:
    return f"call{index:05d}"


def deltas(parts: Sequence[Part], cut: Any) -> list[Delta]:
    """Events of an answer; `cut(length)` says how many of the next characters one event has."""
    events: list[Delta] = []
    num_calls = 0
    for part in parts:
        rest, is_first = part.text, True
        while rest or is_first:
            size = max(1, cut(len(rest)))
            piece, rest = rest[:size], rest[size:]
            if part.channel == "reasoning":
                events.append(Delta(0, "", reasoning=piece))
            elif part.channel == "text":
                events.append(Delta(0, piece))
            else:
                named = {"id": call_id(num_calls), "name": part.name} if is_first else {}
                events.append(
                    Delta(0, "", tool_calls=(pb.ToolCallDelta(index=num_calls, arguments_json=piece, **named),))
                )
            is_first = False
        num_calls += part.channel == "call"
    return events


def finished(reason: pb.FinishReason.ValueType = pb.FINISH_REASON_STOP, stop_string: str = "") -> Finished:
    usage = pb.Usage(prompt_tokens=9, completion_tokens=5, cached_tokens=4, reasoning_tokens=2)
    stop = pb.StopDetail(stop_string=stop_string) if stop_string else None
    return Finished(0, pb.Finish(reason=reason, stop=stop, usage=usage, exact=True))


def progress_of(events: Sequence[Event]) -> Progress:
    """The progress after these events."""
    progress = Progress(pb.ChatRequest(request_id=REQUEST_ID))
    info = pb.PromptInfo(prompt_tokens=9, cached_tokens=4, numerics="n1")
    progress.add(pb.ChatResponse(prompt_info=info))
    for event in events:
        if isinstance(event, Finished):
            progress.add(pb.ChatResponse(finish=event.finish))
        else:
            delta = pb.ChatDelta(content=event.text, reasoning=event.reasoning, tool_calls=event.tool_calls)
            progress.add(pb.ChatResponse(delta=delta))
    return progress


def result_of(events: Sequence[Event]) -> Result:
    progress = progress_of(events)
    assert progress.prompt_info is not None
    return Result(REQUEST_ID, progress.prompt_info, [*progress.answers.values()])


def frames(data: bytes) -> list[tuple[str, Any]]:
    """Name and JSON of each event of a stream; the name must be the event's type."""
    found = []
    for block in data.decode().split("\n\n")[:-1]:
        name, _, value = block.partition("\n")
        assert name.startswith("event: ")
        assert value.startswith("data: ")
        event = json.loads(value.removeprefix("data: "))
        assert event["type"] == name.removeprefix("event: ")
        found.append((event["type"], event))
    return found
