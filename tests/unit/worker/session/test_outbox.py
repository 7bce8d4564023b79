"""Any interleaving of steps and takes delivers every token once and in order, ends with the last token."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from fissile.worker.v1 import worker_pb2 as wpb
from hypothesis import given, settings
from hypothesis import strategies as st

from common.limits import MAX_FRAME_BYTES, MAX_FRAME_TOKENS, MAX_SENT_LOGPROBS, MAX_TAIL_TOKENS, MAX_TAILS
from worker.engine.outputs import End, GivenLogprobs, RequestOutput, Start
from worker.engine.sequence import EndReason
from worker.session.outbox import Outbox

START = Start(prompt_tokens=1, cached_tokens=2**32 - 1, queue_s=1e6, prefill_s=1e6)


def output(first_pos: int, tokens: list[int], *, start: bool = False, end: bool = False) -> RequestOutput:
    finish = End(first_pos + len(tokens), EndReason.EOS, tokens[-1] if tokens else 0) if end else None
    return RequestOutput(0, tokens, end, None, first_pos, START if start else None, finish)


@dataclass
class Reader:
    """A router that checks every rule of the frames."""

    have: dict[int, list[int]] = field(default_factory=dict)
    started: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    returned: list[int] = field(default_factory=list)
    submit_seen: int = 0

    def read(self, frame: wpb.StepOutput) -> None:
        assert frame.ByteSize() <= MAX_FRAME_BYTES
        assert len(frame.token_ids) <= MAX_FRAME_TOKENS
        assert len(frame.rid) == len(frame.first_pos) == len(frame.n) == len(set(frame.rid))
        assert sum(frame.n) == len(frame.token_ids)
        at = 0
        for rid, first_pos, n in zip(frame.rid, frame.first_pos, frame.n, strict=True):
            assert rid not in self.ended
            have = self.have.setdefault(rid, [])
            assert first_pos == 10 + len(have)
            assert n > 0
            have.extend(frame.token_ids[at : at + n])
            at += n
        for start in frame.starts:
            assert start.rid in frame.rid
            assert start.rid not in self.started
            self.started.add(start.rid)
        for end in frame.ends:
            assert end.rid not in self.ended
            assert end.end_pos == 10 + len(self.have.get(end.rid, []))
            # An end arrives with its last token (S3), unless that was sent before the end was known.
            self.ended.add(end.rid)
        self.returned += frame.returned
        assert frame.submit_seen >= self.submit_seen
        self.submit_seen = frame.submit_seen


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 40), st.sampled_from([1, 3, 700, 9000]))
def test_every_interleaving_delivers_every_token_once_in_order(seed: int, num_seqs: int, longest_run: int) -> None:
    random = Random(seed)
    outbox, reader = Outbox(), Reader()
    sent: dict[int, list[int]] = {rid: [] for rid in range(num_seqs)}
    live = list(sent)
    step = 0
    while live:
        step += 1
        for rid in random.sample(live, random.randint(1, len(live))):
            tokens = [random.randrange(2**32) for _ in range(random.choice([0, 1, 1, longest_run]))]
            end = random.random() < 0.3
            outbox.add(rid, output(10 + len(sent[rid]), tokens, start=bool(tokens) and not sent[rid], end=end))
            sent[rid] += tokens
            if end:
                live.remove(rid)
        outbox.on_step(step, step if random.random() < 0.5 else None)
        for _ in range(random.choice([0, 0, 1, 3])):
            if (frame := outbox.take()) is not None:
                reader.read(frame)
    while (frame := outbox.take()) is not None:
        reader.read(frame)
    assert outbox.is_empty
    assert {rid: reader.have.get(rid, []) for rid in sent} == sent
    assert reader.ended == set(sent)
    assert reader.started == {rid for rid, tokens in sent.items() if tokens}


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_broken_streams_lose_frames_and_no_tokens(seed: int) -> None:
    """All frames after some point are lost; the next stream rewinds to the positions in the router's Hello."""
    random = Random(seed)
    outbox = Outbox()
    sent: dict[int, list[int]] = {rid: [] for rid in range(8)}
    have: dict[int, list[int]] = {rid: [] for rid in sent}
    ended: dict[int, int] = {}
    live = list(sent)
    for _ in range(12):
        reader = Reader(have={rid: list(tokens) for rid, tokens in have.items()}, ended=set(ended))
        lost_after = random.randrange(6)
        for i in range(8):
            for rid in random.sample(live, min(len(live), 3)):
                tokens = [random.randrange(2**32) for _ in range(random.randrange(4))]
                end = random.random() < 0.1
                outbox.add(rid, output(10 + len(sent[rid]), tokens, start=bool(tokens) and not sent[rid], end=end))
                sent[rid] += tokens
                if end:
                    live.remove(rid)
            outbox.on_step(i, i)
            frame = outbox.take()
            if frame is not None and i < lost_after:
                reader.read(frame)
        have = reader.have
        ended |= {rid: len(have.get(rid, [])) for rid in reader.ended}
        outbox.begin_stream()
        assert outbox.submit_seen == 0
        for rid, tokens in sent.items():
            if rid in ended:
                outbox.forget(rid)
            elif outbox.holds(rid):
                assert outbox.rewind(rid, 10 + len(have.get(rid, [])))
                assert not outbox.rewind(rid, 9)
                assert not outbox.rewind(rid, 11 + len(tokens))
    reader = Reader(have={rid: list(tokens) for rid, tokens in have.items()}, ended=set(ended))
    while (frame := outbox.take()) is not None:
        reader.read(frame)
    assert {rid: reader.have.get(rid, []) for rid in sent} == sent
    assert reader.ended == set(sent) - set(live)


def test_tails_are_bounded_and_dropped_oldest_first() -> None:
    outbox = Outbox()
    for rid in range(MAX_TAILS + 10):
        outbox.add(rid, output(10, [1, 2], end=True))
    while outbox.take() is not None:
        pass
    assert (len(outbox._tails), len(outbox.rids)) == (MAX_TAILS, MAX_TAILS)
    assert [outbox.rewind(rid, 10) for rid in (9, 10)] == [False, True]
    outbox.add(9999, output(10, [7] * MAX_TAIL_TOKENS, end=True))
    while outbox.take() is not None:
        pass
    assert len(outbox._tails) == 1
    outbox.acknowledge(9999)
    assert (len(outbox._tails), outbox.rids) == (0, [])


def test_cancelled_sequence_leaves_no_tail_in_outbox() -> None:
    outbox = Outbox()
    outbox.add(1, RequestOutput(0, [4], True, None, 10, START, End(11, EndReason.CANCELLED)))
    outbox.acknowledge(1)
    frame = outbox.take()
    assert frame is not None
    assert len(frame.ends) == 1
    assert outbox.rids == []


def test_end_is_sent_with_last_token_of_split_run() -> None:
    outbox = Outbox()
    tokens = list(range(MAX_FRAME_TOKENS + 1))
    outbox.add(1, output(10, tokens, start=True, end=True))
    outbox.on_step(1)
    first, second = outbox.take(), outbox.take()
    assert first is not None
    assert second is not None
    assert (len(first.token_ids), len(first.starts), len(first.ends)) == (MAX_FRAME_TOKENS, 1, 0)
    assert (list(second.first_pos), len(second.starts), len(second.ends)) == ([10 + MAX_FRAME_TOKENS], 0, 1)
    assert outbox.take() is None


def test_long_messages_do_not_pass_the_byte_bound() -> None:
    outbox, reader = Outbox(), Reader()
    for rid in range(5000):
        end = End(10, EndReason.INVALID, message="é" * 10_000, stop_token_sequence=(2**32 - 1,) * 64)
        outbox.add(rid, RequestOutput(0, [], True, None, 10, end=end))
    frames = 0
    while (frame := outbox.take()) is not None:
        reader.read(frame)
        frames += 1
    assert frames > 1
    assert len(reader.ended) == 5000


def test_oldest_output_is_sent_first() -> None:
    outbox = Outbox()
    outbox.add(7, output(10, [1] * MAX_FRAME_TOKENS))
    outbox.add(3, output(10, [2]))
    outbox.add(7, output(10 + MAX_FRAME_TOKENS, [1]))
    first, second = outbox.take(), outbox.take()
    assert first is not None
    assert second is not None
    assert (list(first.rid), list(second.rid)) == ([7], [7, 3])


def test_returned_rids_and_newest_submit_are_sent_once() -> None:
    outbox = Outbox()
    assert outbox.take() is None
    for rid in range(200_000):
        outbox.give_back(2**64 - 1 - rid)
    outbox.on_step(4, 9)
    reader = Reader()
    while (frame := outbox.take()) is not None:
        reader.read(frame)
        assert frame.step == 4
    assert len(set(reader.returned)) == len(reader.returned) == 200_000
    assert reader.submit_seen == outbox.submit_seen == 9
    outbox.on_step(5, 10)
    news = outbox.take()
    assert news is not None
    assert (news.step, news.submit_seen) == (5, 10)
    assert outbox.take() is None


def test_outbox_refuses_position_gap() -> None:
    outbox = Outbox()
    outbox.add(1, output(10, [1, 2]))
    with pytest.raises(ValueError, match="leave a gap"):
        outbox.add(1, output(13, [3]))


def rows_of(tokens: list[int]) -> bytes:
    """Two words for each token, which identify it."""
    ids = np.array(tokens, "<u4")
    return np.stack((ids, ids ^ 1), axis=1).tobytes()


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.sampled_from([1, 900, 9000]), st.sampled_from([3, 3, 3, 200_000]))
def test_logprobs_accompany_tokens_after_given_rows(seed: int, longest_run: int, num_given: int) -> None:
    random, outbox = Random(seed), Outbox()
    tokens: dict[int, list[int]] = {rid: [] for rid in range(6)}
    given_rows = {rid: rows_of(list(range(rid, rid + num_given))) for rid in (0, 3)}
    got: dict[int, bytes] = dict.fromkeys(tokens, b"")
    have: dict[int, list[int]] = {rid: [] for rid in tokens}
    got_given: dict[int, bytes] = dict.fromkeys(given_rows, b"")
    cut = sorted(random.sample(range(num_given), 2))

    def read(frame: wpb.StepOutput | None) -> None:
        if frame is None:
            return
        assert frame.ByteSize() <= MAX_FRAME_BYTES
        for part in frame.given_logprobs:
            assert not have[part.rid]
            assert part.first_pos == 2 + len(got_given[part.rid]) // 8
            got_given[part.rid] += part.rows
        at = 0
        rows = {part.rid: part for part in frame.logprobs}
        assert rows.keys() == {rid for rid in frame.rid if rid % 2}
        for rid, first_pos, n in zip(frame.rid, frame.first_pos, frame.n, strict=True):
            assert rid not in given_rows or got_given[rid] == given_rows[rid]
            if rid in rows:
                assert rows[rid].first_pos == first_pos
                assert len(rows[rid].rows) == 8 * n
                got[rid] += rows[rid].rows
            have[rid] += frame.token_ids[at : at + n]
            at += n

    for rid, rows in given_rows.items():
        for start, stop in pairwise([0, *cut, num_given]):
            output_given = GivenLogprobs(2 + start, 8, rows[8 * start : 8 * stop])
            outbox.add(rid, RequestOutput(0, [], first_pos=10, given=output_given))
            if random.random() < 0.3:
                read(outbox.take())
    lost = random.choice(list(given_rows))
    if not have[lost]:
        # The stream breaks before its first token: all of it comes again.
        got_given[lost] = b""
        assert outbox.rewind(lost, 10)
    for step in range(8):
        for rid, old in tokens.items():
            new = [random.randrange(2**32) for _ in range(random.choice([0, 1, longest_run]))]
            made = output(10 + len(old), new, end=step == 7)
            made.logprobs = rows_of(new) if rid % 2 else b""
            outbox.add(rid, made)
            old.extend(new)
        if random.random() < 0.5:
            read(outbox.take())
    while not outbox.is_empty:
        read(outbox.take())
    assert have == tokens
    assert got_given == given_rows
    assert got == {rid: rows_of(own) if rid % 2 else b"" for rid, own in tokens.items()}


@pytest.mark.parametrize("kind", ["logprobs", "digests", "given"])
def test_token_data_is_kept_for_last_sent_tokens(kind: str) -> None:
    """A router that resumes with at least those tokens continues to the bit; for an older position the sequence is
    unknown."""
    outbox, tokens = Outbox(), list(range(5 * MAX_SENT_LOGPROBS))
    outbox.add(1, output(10, []))
    if kind == "given":
        outbox.add(1, RequestOutput(0, [], first_pos=10, given=GivenLogprobs(2, 8, rows_of([1, 2]))))
    for token in tokens:
        made = output(10 + token, [token])
        made.logprobs = rows_of([token]) if kind == "logprobs" else b""
        made.logit_digests = {10 + token: token} if kind == "digests" else None
        outbox.add(1, made)
        outbox.take()
    have = 10 + len(tokens) - MAX_SENT_LOGPROBS
    assert outbox.rewind(1, have)
    frame = outbox.take()
    assert frame is not None
    assert frame.token_ids == tokens[-MAX_SENT_LOGPROBS:]
    if kind == "logprobs":
        assert frame.logprobs[0].rows == rows_of(tokens[-MAX_SENT_LOGPROBS:])
    if kind == "digests":
        assert frame.logit_digests[0].digests == tokens[-MAX_SENT_LOGPROBS:]
    assert not outbox.rewind(1, 10)


def test_tokens_without_logprobs_are_kept_from_start() -> None:
    outbox, tokens = Outbox(), list(range(5 * MAX_SENT_LOGPROBS))
    outbox.add(1, output(10, tokens))
    outbox.take()
    assert outbox.rewind(1, 10)
