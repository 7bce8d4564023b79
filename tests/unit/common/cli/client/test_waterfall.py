"""The waterfall of a request's stages."""

from __future__ import annotations

import pytest
from fissile.v1 import inference_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st

from common.cli.client.waterfall import StageTime, stages_of, waterfall
from common.rpc.durations import to_duration


def test_bars_follow_each_other_and_fill_the_width() -> None:
    lines = waterfall([StageTime("queue", 0.1), StageTime("prefill", 0.3), StageTime("decode", 0.6)], 49)
    assert lines == [
        "queue        100.0 ms  10% |##                  |",
        "prefill      300.0 ms  30% |  ######            |",
        "decode       600.0 ms  60% |        ############|",
    ]


def test_note_stands_below_its_stage() -> None:
    lines = waterfall([StageTime("queue", 0.1, "request r7: 80 ms"), StageTime("decode", 0.1)], 60)
    assert lines[1] == "        request r7: 80 ms"


def test_request_without_time_has_no_waterfall() -> None:
    assert waterfall([], 80) == []
    assert stages_of(pb.Timings()) == []


def test_stages_of_an_answer_add_up_to_its_total() -> None:
    own = pb.Blame(request_id="r7", duration=to_duration(0.1))
    other = pb.Blame(is_other_tenant=True, duration=to_duration(0.5))
    timings = pb.Timings(
        parts=[
            pb.TimePart(stage="queue", duration=to_duration(0.2), blame=own),
            pb.TimePart(stage="others_prefill", duration=to_duration(0.7), blame=other),
        ],
        unexplained=to_duration(0.1),
        total=to_duration(1.0),
    )
    found = stages_of(timings)
    assert [stage.name for stage in found] == ["queue", "others_prefill", "unexplained"]
    assert [stage.note for stage in found] == ["request r7: 100.0 ms", "a request of another tenant: 500.0 ms", ""]
    assert sum(stage.seconds for stage in found) == pytest.approx(1.0)


SECONDS = st.floats(1e-6, 1e4)


@given(
    st.lists(st.builds(StageTime, st.sampled_from(["tokenize", "queue", "worker_queue"]), SECONDS, st.just(""))),
    st.integers(50, 200),
)
def test_bars_cover_the_line_without_going_back(stages: list[StageTime], columns: int) -> None:
    lines = waterfall(stages, columns)
    assert len(lines) == len(stages)
    bars = [line.split("|")[1] for line in lines]
    starts, ends = [bar.index("#") for bar in bars], [len(bar.rstrip()) for bar in bars]
    assert all(len(line) <= columns for line in lines)
    assert starts == sorted(starts)
    assert not bars or (starts[0], ends[-1]) == (0, len(bars[-1]))
    # A bar begins in the column in which the one before ends, or in the one behind it.
    assert all(before - 1 <= after <= before for before, after in zip(ends, starts[1:], strict=False))
