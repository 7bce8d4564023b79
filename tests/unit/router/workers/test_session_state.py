"""RouterSession: bounded frames in the right order to the worker, streams and cancels from it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from fissile.worker.v1 import worker_pb2 as wpb
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import NoWorkerError
from common.limits import MAX_FRAME_BYTES, MAX_FRAME_TOKENS
from common.text.answer_text import AnswerText
from router.answers.stream_assembly import GapError, StreamAssembly
from router.scheduling.failover import Loss
from router.scheduling.lane import LaneRecord
from router.workers.session_state import Adoption, ProtocolError, RouterSession, RunningRequest, Submission
from router.workers.worker_record import AnswerTotals
from tests.unit.router.support import end


@dataclass
class Running:
    """A request of a Session."""

    rid: int
    assembly: StreamAssembly
    arrival: float = 0.0

    def wake(self) -> None:
        """Does nothing."""


def rids(sequences: Iterable[RunningRequest]) -> list[int]:
    return [sequence.rid for sequence in sequences]


def submission(rid: int, tokens: int, *, deadline: float | None = None, state: int = 0) -> Submission:
    record = wpb.SubmitSequence(rid=rid, prompt_len=tokens, tracestate="s" * state)
    assembly = StreamAssembly(tokens, text=AnswerText(None), return_token_ids=True)
    return Submission(record, array("I", range(tokens)), Running(rid, assembly), deadline)


def link() -> RouterSession:
    made = RouterSession("r1", lease_s=5.0)
    frame = made.next_frame(0.0)
    assert frame is not None
    assert (frame.hello.router_id, frame.hello.lease_ms) == ("r1", 5000)
    return made


def frames(made: RouterSession, now: float = 0.0) -> list[wpb.SessionRequest]:
    found = []
    while (frame := made.next_frame(now)) is not None:
        found.append(frame)
    return found


def kinds(found: list[wpb.SessionRequest]) -> list[str | None]:
    return [frame.WhichOneof("frame") for frame in found]


SMALL = st.sampled_from([1, 7])
LARGE = st.sampled_from([7, 5000, 9000, MAX_FRAME_TOKENS - 1, MAX_FRAME_TOKENS, MAX_FRAME_TOKENS + 1, 40_000])
# Small ones exceed a frame's bytes, large ones its tokens.
GROUPS = st.lists(SMALL, min_size=3, max_size=6) | st.lists(LARGE, min_size=1, max_size=6)


@settings(max_examples=60)
@given(groups=st.lists(GROUPS, min_size=1, max_size=3), state=st.sampled_from([0, 300_000]))
def test_frames_are_bounded_and_complete(groups: list[list[int]], state: int) -> None:
    made = link()
    sent: dict[int, int] = {}
    for serial, sizes in enumerate(groups, start=1):
        group = [submission(100 * serial + i, size, state=state) for i, size in enumerate(sizes)]
        sent.update({s.record.rid: len(s.token_ids) for s in group})
        made.submit(serial, group)
    got: dict[int, list[int]] = {}
    open_rids: set[int] = set()
    serials: list[int] = []
    for frame in frames(made):
        assert frame.ByteSize() <= MAX_FRAME_BYTES
        pieces = [frame.extend] if frame.HasField("extend") else list(frame.submit.seqs)
        assert sum(len(piece.token_ids) for piece in pieces) <= MAX_FRAME_TOKENS
        for piece in pieces:
            assert frame.HasField("submit") != (piece.rid in open_rids)
            got.setdefault(piece.rid, []).extend(piece.token_ids)
            open_rids = open_rids | {piece.rid} if piece.more else open_rids - {piece.rid}
        if frame.HasField("submit") and not frame.submit.more:
            serials.append(frame.submit.serial)
    assert serials == list(range(1, len(groups) + 1))
    assert not open_rids
    assert got == {rid: list(range(size)) for rid, size in sent.items()}
    assert list(got) == sorted(got)


def test_control_frames_go_before_the_next_extend() -> None:
    made = link()
    made.submit(1, [submission(1, 60_000), submission(2, 10)])
    first = made.next_frame(0.0)
    assert first is not None
    assert first.submit.seqs[0].more
    made.cancel(2)
    made.announce(LaneRecord(1.0, 5, 1))
    made.announce(LaneRecord(1.0, 9, 2))
    rest = frames(made, now=3.5)
    assert kinds(rest) == ["lane", "submit", "extend", "extend", "extend"]
    assert (rest[0].lane.oldest_age_ms, rest[0].lane.tokens, rest[0].lane.seqs) == (2500, 9, 2)
    assert (list(rest[1].submit.seqs), rest[1].submit.more) == ([], False)


def test_lane_is_announced_on_change_or_lease_renewal() -> None:
    made = link()
    made.announce(LaneRecord(None, 0, 0))
    assert frames(made) == []
    for expected in (["lane"], []):
        made.announce(LaneRecord(1.0, 5, 1))
        assert kinds(frames(made)) == expected
    made.renew_lease()
    (frame,) = frames(made, now=3.0)
    assert (frame.lane.oldest_age_ms, frame.lane.tokens) == (2000, 5)


def test_cancel_drops_rest_of_partly_written_sequence() -> None:
    made = link()
    made.submit(1, [submission(1, 60_000)])
    assert made.next_frame(0.0) is not None
    made.cancel(1)
    made.cancel(1)
    (cancel,) = frames(made)
    assert list(cancel.cancel.rids) == [1]
    assert not made.live


def test_group_cancelled_before_write_still_sends_serial() -> None:
    made = link()
    made.submit(4, [submission(1, 10), submission(2, 10)])
    made.cancel(1)
    made.cancel(2)
    (frame,) = frames(made)
    assert (frame.submit.serial, list(frame.submit.seqs), frame.submit.more) == (4, [], False)


def test_deadline_sent_is_time_left_at_write() -> None:
    made = link()
    made.submit(1, [submission(1, 1, deadline=12.0), submission(2, 1), submission(3, 1, deadline=1.0)])
    (frame,) = frames(made, now=10.0)
    assert [s.deadline_left_ms for s in frame.submit.seqs] == [2000, 0, 1]


def test_rids_are_never_used_twice() -> None:
    made = link()
    made.submit(1, [submission(5, 1)])
    with pytest.raises(ValueError, match="S1"):
        made.submit(2, [submission(5, 1)])


def step(*, rid: list[int], first_pos: list[int], n: list[int], token_ids: list[int]) -> wpb.StepOutput:
    return wpb.StepOutput(rid=rid, first_pos=first_pos, n=n, token_ids=token_ids)


def test_step_feeds_streams_and_ends_them() -> None:
    made = link()
    one, two = submission(1, 3), submission(2, 4)
    made.submit(1, [one, two])
    output = step(rid=[2, 1], first_pos=[4, 3], n=[2, 1], token_ids=[10, 11, 20])
    output.starts.add(rid=1, cached_tokens=2, queue_us=1500, prefill_us=2_000_000)
    output.ends.append(end(2, 6, wpb.END_REASON_LENGTH))
    effects = made.apply(output, now=7.0)
    assert rids(effects.touched) == [2, 1]
    assert list(made.live) == [1]
    assert two.sequence.assembly.is_closed
    part = one.sequence.assembly.next_chunk()
    assert part is not None
    assert part.token_ids == (20,)
    assert part.start is not None
    assert (part.start.cached_tokens, part.start.prefill_s) == (2, 2.0)
    assert one.sequence.assembly.first_token_time == 7.0


def test_self_closed_stream_is_cancelled_and_late_output_ignored() -> None:
    made = link()
    slow = StreamAssembly(1, text=AnswerText(None), max_unread_tokens=2)
    made.submit(1, [Submission(wpb.SubmitSequence(rid=9, prompt_len=1), array("I", [0]), Running(9, slow))])
    frames(made)
    assert rids(made.apply(step(rid=[9], first_pos=[1], n=[3], token_ids=[1, 2, 3]), 0.0).touched) == [9]
    (cancel,) = frames(made)
    assert list(cancel.cancel.rids) == [9]
    late = step(rid=[9], first_pos=[4], n=[1], token_ids=[4])
    late.ends.append(end(9, 5, wpb.END_REASON_CANCELLED))
    assert made.apply(late, 0.0).touched == []
    assert frames(made) == []


def test_unknown_rid_is_cancelled_once() -> None:
    made = link()
    for _ in range(3):
        made.apply(step(rid=[77], first_pos=[4], n=[1], token_ids=[4]), 0.0)
    (cancel,) = frames(made)
    assert list(cancel.cancel.rids) == [77]


def test_endless_aliens_close_the_session() -> None:
    made = link()
    rids = list(range(5000))
    with pytest.raises(ProtocolError, match="too many"):
        made.apply(step(rid=rids, first_pos=[0] * 5000, n=[0] * 5000, token_ids=[]), 0.0)


@pytest.mark.parametrize(
    "output",
    [
        step(rid=[1, 2], first_pos=[3], n=[1], token_ids=[1]),
        step(rid=[1], first_pos=[3], n=[2], token_ids=[1]),
        step(rid=[1], first_pos=[3], n=[1], token_ids=[1, 2]),
        wpb.StepOutput(logit_digests=[wpb.LogitDigests(rid=1, positions=[3, 4], digests=[7])]),
    ],
)
def test_columns_that_do_not_fit_are_refused(output: wpb.StepOutput) -> None:
    made = link()
    made.submit(1, [submission(1, 3)])
    with pytest.raises(ProtocolError):
        made.apply(output, 0.0)


def test_gap_leaves_stream_live_until_session_ends() -> None:
    made = link()
    made.submit(1, [submission(1, 3)])
    with pytest.raises(GapError):
        made.apply(step(rid=[1], first_pos=[4], n=[1], token_ids=[1]), 0.0)
    wrong_end = wpb.StepOutput(ends=[end(1, 9, wpb.END_REASON_LENGTH)])
    with pytest.raises(GapError):
        made.apply(wrong_end, 0.0)
    assert list(made.live) == [1]


@pytest.mark.parametrize(
    ("reason", "loss"), [(wpb.END_REASON_CANCELLED, Loss.DRAINED), (wpb.END_REASON_ERROR, Loss.ENGINE_FAILED)]
)
def test_sequence_given_up_ends_attempt_not_stream(reason: wpb.EndReason.ValueType, loss: Loss) -> None:
    made = link()
    one, closed = submission(1, 3), submission(2, 3)
    made.submit(1, [one, closed])
    closed.sequence.assembly.fail(NoWorkerError("gone"))
    output = step(rid=[1], first_pos=[3], n=[2], token_ids=[8, 9])
    output.ends.extend([end(1, 5, reason), end(2, 3, reason)])
    effects = made.apply(output, 0.0)
    assert effects.lost == [(one.sequence, loss)]
    assert rids(effects.touched) == [1, 2]
    assert not made.live
    assert not one.sequence.assembly.is_closed
    assert list(one.sequence.assembly.token_ids) == [8, 9]


def test_next_session_takes_over_with_received_counts() -> None:
    earlier = link()
    earlier.submit(1, [submission(4, 3), submission(5, 3), submission(6, 3)])
    earlier.apply(step(rid=[4], first_pos=[3], n=[2], token_ids=[8, 9]), 0.0)
    earlier.cancel(5)
    made = RouterSession("r1", lease_s=5.0)
    made.resume(earlier)
    hello = made.next_frame(1.0)
    assert hello is not None
    assert [(kept.rid, kept.have) for kept in hello.hello.live] == [(4, 5), (6, 3)]
    assert rids(made.forget([6])) == [6]
    assert frames(made) == []
    # Late output of sequences dropped on the earlier stream is not an error.
    made.apply(step(rid=[5, 6], first_pos=[3, 3], n=[1, 1], token_ids=[1, 1]), 1.0)
    assert frames(made) == []
    made.apply(step(rid=[4], first_pos=[5], n=[1], token_ids=[7]), 1.0)
    assert list(made.live[4].assembly.token_ids) == [8, 9, 7]
    with pytest.raises(ValueError, match="S1"):
        made.submit(1, [submission(6, 1)])


def test_returned_sequences_leave_the_session() -> None:
    made = link()
    made.submit(1, [submission(1, 3), submission(2, 3)])
    assert rids(made.apply(wpb.StepOutput(returned=[2, 5]), 0.0).returned) == [2]
    assert list(made.live) == [1]


def test_partly_written_sequences_are_known() -> None:
    """It cannot be on the worker, so it was no attempt."""
    made = link()
    made.submit(1, [submission(1, 10), submission(2, 3 * MAX_FRAME_TOKENS)])
    made.submit(2, [submission(3, 10), submission(4, 10)])
    assert rids(made.unwritten()) == [1, 2, 3, 4]
    made.cancel(3)
    frame = made.next_frame(0.0)
    assert frame is not None
    assert [sequence.rid for sequence in frame.submit.seqs] == [1]
    assert rids(made.unwritten()) == [2, 4]
    while made.unwritten():
        frame = made.next_frame(0.0)
    assert frame is not None
    assert [sequence.rid for sequence in frame.submit.seqs] == [4]
    refused = link()
    refused.submit(1, [submission(5, 3 * MAX_FRAME_TOKENS)])
    refused.next_frame(0.0)
    refused.apply(wpb.StepOutput(ends=[wpb.SequenceEnd(rid=5, reason=wpb.END_REASON_INVALID)]), 0.0)
    assert rids(refused.unwritten()) == []


def adoption(rid: int, deadline: float | None = None) -> Adoption:
    running = Running(rid, StreamAssembly(3, text=AnswerText(None), return_token_ids=True))
    return Adoption(wpb.Adopt(rid=rid, key=b"k", have=3), running, deadline)


def test_adoption_precedes_all_but_cancels_and_streams_tokens() -> None:
    made = link()
    made.submit(1, [submission(1, 10)])
    frames(made)
    made.announce(LaneRecord(1.0, 5, 1))
    made.submit(2, [submission(2, 10)])
    made.adopt(taken := adoption(3, deadline=9.0))
    made.cancel(1)
    found = frames(made, now=2.0)
    assert kinds(found) == ["cancel", "adopt", "lane", "submit"]
    assert (found[1].adopt.rid, found[1].adopt.key, found[1].adopt.deadline_left_ms) == (3, b"k", 7000)
    effects = made.apply(wpb.StepOutput(rid=[3], first_pos=[3], n=[2], token_ids=[8, 9]), 0.0)
    assert list(taken.sequence.assembly.token_ids) == [8, 9]
    assert rids(effects.touched) == [3]
    with pytest.raises(ValueError, match="not new"):
        made.submit(3, [submission(3, 10)])


def test_unwritten_adoption_is_at_no_worker() -> None:
    made = link()
    for rid in (1, 2):
        made.adopt(adoption(rid))
    assert rids(made.unwritten()) == [1, 2]
    made.cancel(1)
    (frame,) = frames(made)
    assert frame.adopt.rid == 2
    assert made.unwritten() == []
    effects = made.apply(wpb.StepOutput(returned=[2]), 0.0)
    assert rids(effects.returned) == [2]
    assert frames(made) == []


def test_answer_totals_count_first_tokens_once_and_decode_time_at_end() -> None:
    made, totals = link(), AnswerTotals()
    asked = [submission(rid, 2) for rid in (1, 2)]
    made.submit(1, asked)
    first = wpb.StepOutput(
        rid=[1, 2], first_pos=[2, 2], n=[1, 1], token_ids=[5, 6], starts=[wpb.SequenceStart(rid=rid) for rid in (1, 2)]
    )
    totals.add(2, made.apply(first, 3.0))
    assert totals == AnswerTotals(output_tokens=2, first_tokens=2, ttft_s=6.0)
    # Reported again, as after a lost worker: the answer has begun already.
    again = wpb.StepOutput(
        rid=[1], first_pos=[3], n=[2], token_ids=[7, 8], starts=[wpb.SequenceStart(rid=1)],
        ends=[end(1, 5, wpb.END_REASON_LENGTH)],
    )  # fmt: skip
    totals.add(2, made.apply(again, 4.0))
    assert totals == AnswerTotals(output_tokens=4, first_tokens=2, ttft_s=6.0, later_tokens=2, decode_s=1.0)
