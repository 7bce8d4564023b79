"""Messages of recorded steps: times, sequences, and which steps one response has."""

from __future__ import annotations

from fissile.worker.v1 import worker_pb2 as wpb
from hypothesis import given, settings
from hypothesis import strategies as st

from common.limits import MAX_LISTED_STEP_ROWS
from worker.engine.step_record import StepRecord, StepRing
from worker.session import step_protos
from worker.session.step_protos import newest_steps, step_proto


def record(number: int, request_ids: list[str]) -> StepRecord:
    ones = [1] * len(request_ids)
    return StepRecord(number, 0.0, 0.0, list(range(len(ones))), request_ids, ones, ones, ones, 0, 3, 4, 0, 0, [])


def test_message_of_finished_step() -> None:
    step = StepRecord(
        7, 100.0, 100.002, [5, 6, 8], ["a", "", "b"], [1, 3, 40], [20, 30, 16], [0, 16, 16], 1, 3, 4, 2, 1, [9],
        100.003, 100.010, 0.006, 4,
    )  # fmt: skip
    assert step_proto(step, 150.0, 999_900.0) == wpb.Step(
        number=7,
        start_us=1_000_000_000_000,
        schedule_us=2000,
        launch_us=1000,
        wait_us=7000,
        forward_us=6000,
        free_blocks=3,
        total_blocks=4,
        waiting_seqs=2,
        gated_seqs=1,
        new_tokens=4,
        preempted=[9],
        rows=[
            wpb.StepRow(sequence=5, request_id="a", kind=wpb.STEP_ROW_KIND_DECODE, tokens=1, computed_tokens=20),
            wpb.StepRow(
                sequence=6, kind=wpb.STEP_ROW_KIND_VERIFY, tokens=3, computed_tokens=30, cached_tokens=16
            ),
            wpb.StepRow(
                sequence=8, request_id="b", kind=wpb.STEP_ROW_KIND_PREFILL, tokens=40, computed_tokens=16,
                cached_tokens=16,
            ),
        ],
    )  # fmt: skip


def test_start_of_a_step_is_equal_in_each_listing() -> None:
    steps = [step_proto(record(1, ["a"]), now, 1e9) for now in (5.0, 5.001, 900.0)]
    assert {step.start_us for step in steps} == {1_000_000_000_000_000}


def test_message_of_hanging_step_has_time_until_now() -> None:
    step = record(1, [""])
    step.waited = 2.0
    made = step_proto(step, 60.0, 0.0)
    assert (made.in_flight, made.launch_us, made.wait_us) == (True, 2_000_000, 58_000_000)
    step.waited = None
    made = step_proto(step, 60.0, 0.0)
    assert (made.in_flight, made.launch_us, made.wait_us) == (True, 60_000_000, 0)


@given(
    requests=st.lists(st.lists(st.sampled_from("ab"), max_size=3), max_size=12),
    request_id=st.sampled_from(["", "a"]),
    last=st.integers(0, 4),
)
@settings(max_examples=100, deadline=None)
def test_pages_have_every_step_of_request_once(requests: list[list[str]], request_id: str, last: int) -> None:
    ring = StepRing()
    for number, ids in enumerate(requests, 1):
        ring.append(record(number, ids))
    found: list[int] = []
    while len(found) <= len(requests):
        wanted = wpb.ListStepsRequest(last=last, request_id=request_id, before=(*found, 0)[0])
        page = step_protos.newest_steps(ring, wanted)
        assert len(page) <= last or not last
        found[:0] = [each.number for each in page]
        if not page or found[0] == 1:
            break
    assert found == [i for i, ids in enumerate(requests, 1) if not request_id or request_id in ids]


def test_page_is_bounded_by_sequences_but_has_one_step() -> None:
    ring = StepRing()
    for number, num_rows in enumerate((1, 1, MAX_LISTED_STEP_ROWS, MAX_LISTED_STEP_ROWS + 1), 1):
        ring.append(record(number, [""] * num_rows))
    pages = [[each.number for each in newest_steps(ring, wpb.ListStepsRequest(before=n))] for n in (0, 4, 3)]
    assert pages == [[4], [3], [1, 2]]
