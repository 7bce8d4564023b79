"""Waterfall of one request for a terminal: a bar for each stage, where it begins and how long it is. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from fissile.v1 import inference_pb2 as pb

from common.rpc.durations import to_seconds

# Columns before the bars, without the name of the stage: two blanks, the time, its share, and a blank.
_FIGURES: Final = 20
_LEAST_BAR: Final = 10
_BAR: Final = "#"


class StageTime(NamedTuple):
    """Time of a request in one stage, all visits together.

    Attributes:
        name: of the stage.
        seconds: time in it.
        note: what caused it, "" if that is unknown.
    """

    name: str
    seconds: float
    note: str = ""


def stages_of(timings: pb.Timings) -> list[StageTime]:
    """The stages of a finished answer, in the order in which a request passes them; they add up to its total."""
    stages = [StageTime(part.stage, to_seconds(part.duration), _blamed(part)) for part in timings.parts]
    stages.append(StageTime("unexplained", to_seconds(timings.unexplained)))
    return [stage for stage in stages if stage.seconds > 0]


def _blamed(part: pb.TimePart) -> str:
    if not part.HasField("blame"):
        return ""
    blamed = "a request of another tenant" if part.blame.is_other_tenant else f"request {part.blame.request_id}"
    return f"{blamed}: {1e3 * to_seconds(part.blame.duration):.1f} ms"


def waterfall(stages: Sequence[StageTime], columns: int) -> list[str]:
    """One line for each stage, none wider than `columns`: name, milliseconds, share of the whole, bar, note.

    A bar begins where the one before ends. Stages that take turns, such as decoding beside a neighbour's prompt, are
    each drawn in one piece. A stage of some time has at least one mark.

    Args:
        stages: in order; their times add up to the whole.
        columns: width of the terminal.
    """
    total_s = sum(stage.seconds for stage in stages)
    if total_s <= 0:
        return []
    widest = max(len(stage.name) for stage in stages)
    room = max(_LEAST_BAR, columns - widest - _FIGURES - 2)
    lines, begun_s = [], 0.0
    for stage in stages:
        start = min(room - 1, int(room * begun_s / total_s))
        begun_s += stage.seconds
        end = max(start + 1, round(room * begun_s / total_s))
        bar = (" " * start + _BAR * (end - start)).ljust(room)
        figures = f"  {stage.seconds * 1e3:9.1f} ms {stage.seconds / total_s:4.0%} "
        lines.append(f"{stage.name:{widest}}{figures}|{bar}|"[:columns])
        if stage.note:
            lines.append(f"{'':{widest}}  {stage.note}"[:columns])
    return lines
