"""Groups leave whole and in order, and an invalid sequence does not affect others."""

from __future__ import annotations

import re
from array import array
from random import Random

import grpc
import pytest
from fissile.worker.v1 import worker_pb2 as wpb
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ApiError
from common.limits import MAX_OPEN_GROUPS
from common.wire.block_hash import hash_chain, salt_root
from tests.unit.worker.session.support import LIMITS, MAX_MODEL_LEN, VOCAB_SIZE, long_prompt, params, record, submit
from worker.engine.sequence import EndReason, Priority
from worker.session.intake import Inbox, SequenceGroup
from worker.session.sequence_builder import EngineLimits


def is_empty(box: Inbox) -> bool:
    """Whether the inbox has no pending sequence and every group was taken."""
    return not (box._open or box._groups or box._refusals)


def inbox(limits: EngineLimits = LIMITS) -> Inbox:
    return Inbox(limits, is_live=lambda rid: rid == 999)


def rids(groups: list[SequenceGroup]) -> list[tuple[int, list[int]]]:
    return [(group.serial, [arrival.rid for arrival in group.arrivals]) for group in groups]


def test_group_of_one_frame() -> None:
    box = inbox()
    whole = record(10, range(40), choice=3, deadline_left_ms=1500, traceparent="t", tracestate="s")
    whole.seed = 2**64 - 1
    box.submit(submit(1, whole, record(11)).submit, 100.0)
    [group] = box.take_groups()
    assert rids([group]) == [(1, [10, 11])]
    first, second = group.arrivals
    assert (first.traceparent, first.tracestate) == ("t", "s")
    seq = first.seq
    assert (seq.token_ids, seq.num_prompt_tokens, seq.seed, seq.choice) == (list(range(40)), 40, 2**64 - 1, 3)
    assert (seq.arrive_time, seq.deadline, second.seq.deadline) == (100.0, 101.5, None)
    assert is_empty(box)


def test_salt_and_class_reach_the_sequence() -> None:
    box = inbox()
    salted = record(1, range(40), cache_salt=b"x", priority=wpb.PRIORITY_HIGH)
    root = salt_root(LIMITS.weights_digest.encode(), cache_salt=b"x", seed=LIMITS.hash_seed)
    salted.chain_hash = hash_chain(range(40), LIMITS.block_size, root=root, seed=LIMITS.hash_seed)[-1]
    box.submit(submit(1, salted, record(2, priority=wpb.PRIORITY_LOW), record(3)).submit, 0.0)
    [group] = box.take_groups()
    seqs = [arrival.seq for arrival in group.arrivals]
    assert [(seq.cache_salt, seq.hash_root) for seq in seqs] == [(b"x", root), (b"", None), (b"", None)]
    assert [seq.priority for seq in seqs] == [Priority.HIGH, Priority.LOW, Priority.NORMAL]


def test_prompt_is_hashed_once() -> None:
    """Former fault: the event loop made all hashes to check the last one, and the engine thread made them again."""
    box = inbox()
    box.submit(submit(1, record(1, range(100))).submit, 0.0)
    [group] = box.take_groups()
    seq = group.arrivals[0].seq
    assert seq.block_hashes == hash_chain(range(100), LIMITS.block_size, seed=LIMITS.hash_seed)
    assert seq.packed_ids == array("I", range(100)).tobytes()


def test_resumed_sequence_keeps_prompt_length() -> None:
    box = inbox()
    prompt = list(range(40))
    resumed = record(1, prompt)
    resumed.token_ids.extend([7, 8])
    box.submit(submit(1, resumed).submit, 0.0)
    [group] = box.take_groups()
    assert group.arrivals[0].seq.prompt_token_ids == prompt
    assert group.arrivals[0].seq.completion_token_ids == [7, 8]


def test_group_waits_for_last_submit() -> None:
    box = inbox()
    box.submit(submit(1, record(10), more=True).submit, 0.0)
    assert box.take_groups() == []
    box.submit(submit(1, record(11)).submit, 0.0)
    assert rids(box.take_groups()) == [(1, [10, 11])]


def test_group_waits_for_last_extend_of_longest_prompt() -> None:
    box = inbox()
    prompt = list(range(300))
    first, rest = long_prompt(10, prompt, cut=100)
    box.submit(submit(1, first, record(11)).submit, 0.0)
    box.extend(wpb.Extend(rid=10, token_ids=rest.token_ids[:50], more=True))
    box.extend(wpb.Extend(rid=999, token_ids=[1]))
    assert box.take_groups() == []
    box.extend(wpb.Extend(rid=10, token_ids=rest.token_ids[50:]))
    [group] = box.take_groups()
    assert rids([group]) == [(1, [10, 11])]
    assert group.arrivals[0].seq.token_ids == prompt


def test_known_rids_are_no_ops() -> None:
    box = inbox()
    box.submit(submit(1, record(10), record(10), record(999), more=True).submit, 0.0)
    box.submit(submit(1, record(10)).submit, 0.0)
    assert rids(box.take_groups()) == [(1, [10])]
    assert box.take_refusals() == []


def test_empty_group_passes_with_serial() -> None:
    box = inbox()
    box.submit(submit(5).submit, 0.0)
    assert rids(box.take_groups()) == [(5, [])]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (record(1, [5, VOCAB_SIZE, 6]), r"token_ids\[1\] is 1000; valid: 0 to 999"),
        (record(1, []), "prompt_len is 0; valid: 1 to 0"),
        (record(1, [1, 2, 3], prompt_len=4), "prompt_len is 4; valid: 1 to 3"),
        (record(1, range(MAX_MODEL_LEN - 24)), ""),
        (record(1, [1] * MAX_MODEL_LEN), "token_ids has 1024 tokens; valid: at most 1023"),
        (record(1, [1] * (MAX_MODEL_LEN + 1)), "token_ids has 1025 tokens; valid: at most 1023"),
        (record(1, chain_hash=9), "chain_hash is 0x9: hash seed, block size or tokens of router and worker differ"),
        (record(1, range(16), chain_hash=9), "chain_hash is 0x9"),
        (record(1, params=params(temperature=-1.0)), "params.temperature is -1"),
        (record(1, params=params(temperature=float("nan"))), "params.temperature is nan"),
        (record(1, params=params(min_p=2.0)), "params.min_p is 2"),
        (record(1, params=params(stop_token_ids=[VOCAB_SIZE])), r"params.stop_token_ids\[0\] is 1000"),
        (
            record(1, params=params(stop_token_sequences=[wpb.TokenIds()])),
            r"params.stop_token_sequences\[0\] has 0 ids",
        ),
        (
            record(1, params=params(presence_penalty=2.5)),
            "params.presence_penalty is 2.5; valid: a number from -2 to 2",
        ),
        (record(1, params=params(frequency_penalty=-3.0)), "params.frequency_penalty is -3"),
        (record(1, cache_salt=b"x" * 129), "cache_salt has 129 bytes; valid: at most 128"),
        (record(1, range(16), cache_salt=b"x"), "chain_hash is 0x"),
        (record(1, priority=17), "priority is 17; valid: PRIORITY_LOW, PRIORITY_NORMAL, PRIORITY_HIGH"),
    ],
)
def test_invalid_sequence_is_refused_alone(bad: wpb.SubmitSequence, message: str) -> None:
    box = inbox()
    box.submit(submit(1, record(10), bad, record(11)).submit, 0.0)
    if not message:
        assert rids(box.take_groups()) == [(1, [10, 1, 11])]
        return
    assert rids(box.take_groups()) == [(1, [10, 11])]
    [refusal] = box.take_refusals()
    assert (refusal.rid, refusal.reason) == (1, EndReason.INVALID)
    assert refusal.end_pos == len(bad.token_ids)
    assert re.match(message, refusal.message)


@pytest.mark.parametrize("value", [0.0, -1.0, 101.0])
def test_repetition_penalty_must_be_in_range(value: float) -> None:
    box = inbox()
    bad = record(1)
    bad.params.repetition_penalty = value
    box.submit(submit(1, bad, record(2)).submit, 0.0)
    assert rids(box.take_groups()) == [(1, [2])]
    assert box.take_refusals()[0].message.startswith(f"params.repetition_penalty is {value}")


def test_overlong_extended_prompt_is_refused_and_freed() -> None:
    box = inbox()
    first, _ = long_prompt(10, range(200), cut=100)
    box.submit(submit(1, first, record(11)).submit, 0.0)
    box.extend(wpb.Extend(rid=10, token_ids=[1] * MAX_MODEL_LEN, more=True))
    box.extend(wpb.Extend(rid=10, token_ids=[1]))
    assert rids(box.take_groups()) == [(1, [11])]
    [refusal] = box.take_refusals()
    assert "at most 1023" in refusal.message
    assert is_empty(box)


def test_cancel_and_deadline_end_pending_sequences() -> None:
    box = inbox()
    late, _ = long_prompt(10, range(200), cut=100)
    late.deadline_left_ms = 100
    unwanted, _ = long_prompt(11, range(200), cut=100)
    box.submit(submit(1, late, unwanted, record(12)).submit, 50.0)
    box.expire(50.05)
    assert not box.cancel(77)
    assert box.cancel(11)
    assert not box.cancel(11)
    assert box.take_groups() == []
    box.expire(50.1)
    assert rids(box.take_groups()) == [(1, [12])]
    reasons = {refusal.rid: refusal.reason for refusal in box.take_refusals()}
    assert reasons == {10: EndReason.DEADLINE, 11: EndReason.CANCELLED}


def test_unfinished_prompt_tokens_are_bounded() -> None:
    box = Inbox(EngineLimits(VOCAB_SIZE, 1 << 25, 16, 0), lambda _: False)
    tokens = [1] * 16_384

    def fill() -> None:
        for serial in range(1100):
            box.submit(submit(1, record(serial, [1], token_ids=tokens, more=True), more=True).submit, 0.0)

    with pytest.raises(ApiError, match="unfinished prompts"):
        fill()


def test_give_up_returns_all_pending_rids() -> None:
    box = inbox()
    first, rest = long_prompt(10, range(200), cut=100)
    box.submit(submit(1, first, record(11)).submit, 0.0)
    assert box.give_up() == [10, 11]
    box.extend(rest)
    assert box.take_groups() == []
    assert is_empty(box)


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_split_and_interleaved_groups_give_equal_sequences(seed: int) -> None:
    """Groups are cut into Submit and Extend frames, frames of several groups are mixed, some sequences cancelled."""
    random = Random(seed)
    box, expected, frames = inbox(), {}, []
    for serial in range(1, 5):
        prompts = {
            100 * serial + i: [random.randrange(VOCAB_SIZE) for _ in range(random.randint(1, 60))] for i in range(4)
        }
        cancelled = {rid for rid in prompts if random.random() < 0.2}
        expected[serial] = {rid: prompt for rid, prompt in prompts.items() if rid not in cancelled}
        frames.append(_frames(random, serial, prompts, cancelled))
    while any(frames):
        queue = random.choice([queue for queue in frames if queue])
        _give(box, queue.pop(0))
    groups = {group.serial: group for group in box.take_groups()}
    got = {serial: {a.rid: a.seq.token_ids for a in group.arrivals} for serial, group in groups.items()}
    assert got == expected
    assert all(list(got[serial]) == list(expected[serial]) for serial in got)
    box.take_refusals()
    assert is_empty(box)


def _frames(
    random: Random, serial: int, prompts: dict[int, list[int]], cancelled: set[int]
) -> list[wpb.SessionRequest]:
    frames: list[wpb.SessionRequest] = []
    rests: list[wpb.SessionRequest] = []
    for at, (rid, prompt) in enumerate(prompts.items()):
        cuts = sorted({random.randint(1, len(prompt)) for _ in range(random.randint(0, 3))} - {len(prompt)})
        pieces = [prompt[a:b] for a, b in zip([0, *cuts], [*cuts, len(prompt)], strict=True)]
        first = record(rid, prompt, more=len(pieces) > 1 or rid in cancelled)
        del first.token_ids[len(pieces[0]) :]
        frames.append(submit(serial, first, more=at < len(prompts) - 1))
        for i, piece in enumerate(pieces[1:], 2):
            more = i < len(pieces) or rid in cancelled
            rests.append(wpb.SessionRequest(extend=wpb.Extend(rid=rid, token_ids=piece, more=more)))
        if rid in cancelled:
            rests.append(wpb.SessionRequest(cancel=wpb.Cancel(rids=[rid])))
    return frames + rests


def _give(box: Inbox, frame: wpb.SessionRequest) -> None:
    kind = frame.WhichOneof("frame")
    if kind == "submit":
        box.submit(frame.submit, 0.0)
    elif kind == "extend":
        box.extend(frame.extend)
    else:
        for rid in frame.cancel.rids:
            box.cancel(rid)


def test_endless_groups_close_session() -> None:
    """Ever new serial numbers, all with more to come."""
    box = inbox()
    for serial in range(MAX_OPEN_GROUPS):
        box.submit(submit(serial, more=True).submit, 0.0)
    with pytest.raises(ApiError, match="unfinished groups") as caught:
        box.submit(submit(MAX_OPEN_GROUPS, more=True).submit, 0.0)
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SESSION_BOUNDS")


def test_endless_prompts_close_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """One-token prompts with more to come are counted by their memory, not by their tokens."""
    monkeypatch.setattr("worker.session.intake.MAX_ASSEMBLING_BYTES", 1 << 20)
    box = inbox()
    frames = [submit(1, record(rid, [1], more=True, tracestate="x" * 500), more=True).submit for rid in range(2000)]
    for frame in frames[:500]:
        box.submit(frame, 0.0)

    def fill() -> None:
        for frame in frames[500:]:
            box.submit(frame, 0.0)

    with pytest.raises(ApiError, match="bytes of unfinished groups") as caught:
        fill()
    assert caught.value.reason == "SESSION_BOUNDS"


def test_submitted_and_dropped_sequences_are_uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.session.intake.MAX_ASSEMBLING_BYTES", 1 << 14)
    box = inbox()
    for serial in range(1000):
        first, second, late = range(1000 + 3 * serial, 1003 + 3 * serial)
        begun = [record(rid, [1], more=True) for rid in (first, second)]
        box.submit(submit(serial, *begun, record(late, deadline_left_ms=10)).submit, float(serial))
        box.expire(serial + 0.5)
        box.cancel(first)
        box.extend(wpb.Extend(rid=second, token_ids=[2, 3]))
        assert rids(box.take_groups()) == [(serial, [second])]
        assert len(box.take_refusals()) == 2
        assert is_empty(box)
        assert not box.num_seqs
