"""StreamAssembly: the text and the counts do not depend on how the tokens were framed or when the client read."""

from __future__ import annotations

import pytest
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import DeadlineError, EngineError, NoWorkerError, SlowClientError, WorkerLostError
from common.text.stop_strings import StopStrings
from router.assembly import GapError, Part, Start, StreamAssembly
from tests.unit.router.support import EOS, end, small_tokenizer

TOKENIZER = small_tokenizer()
PROMPT = 5


def assembly(
    stops: tuple[str, ...] = (), *, include: bool = False, min_tokens: int = 0, max_unread_tokens: int = 10_000
) -> StreamAssembly:
    return StreamAssembly(
        PROMPT,
        detokenizer=TOKENIZER.decode_stream(),
        stop_strings=StopStrings(stops, include) if stops else None,
        min_tokens=min_tokens,
        return_token_ids=True,
        max_unread_tokens=max_unread_tokens,
    )


def drain(stream: StreamAssembly) -> list[Part]:
    parts = []
    while (part := stream.take()) is not None:
        parts.append(part)
        if part.ending is not None:
            break
    return parts


def feed(stream: StreamAssembly, ids: list[int], cuts: list[int], last: wpb.SequenceEnd) -> list[Part]:
    """Feeds `ids` in runs that end at `cuts`, reading after every other run."""
    parts: list[Part] = []
    at = 0
    for i, cut in enumerate([*sorted({c for c in cuts if 0 < c < len(ids)}), len(ids)]):
        final = cut == len(ids)
        stream.append(PROMPT + at, ids[at:cut], now=float(i), end=last if final else None)
        at = cut
        if i % 2 and not stream.is_closed:
            parts.extend(drain(stream))
        if stream.is_closed:
            break
    return [*parts, *drain(stream)]


def reference(ids: list[int], stops: tuple[str, ...], include: bool, min_tokens: int) -> tuple[str, int, str | None]:
    """By brute force: text, delivered tokens, matched stop string."""
    head = TOKENIZER.decode_stream()
    skipped = head.push(ids[: max(0, min_tokens - 1)])
    text, searched = skipped, ""
    for i in range(max(0, min_tokens - 1), len(ids)):
        new = head.push(ids[i : i + 1]) + (head.flush() if i == len(ids) - 1 else "")
        for j in range(len(new)):
            seen = searched + new[: j + 1]
            matches = [s for s in stops if seen.endswith(s)]
            if matches:
                match = max(matches, key=len)
                return text + (seen if include else seen[: -len(match)]), i + 1, match
        searched += new
    return text + searched + (head.flush() if len(ids) < min_tokens else ""), len(ids), None


@settings(max_examples=150)
@given(
    ids=st.lists(st.integers(0, 298).filter(lambda i: i != EOS), min_size=1, max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=6),
    stops=st.lists(st.sampled_from(["a", "lo", "ela", "é", "ab", "ba", "x"]), max_size=3).map(tuple),
    include=st.booleans(),
    min_tokens=st.integers(0, 8),
)
def test_any_framing_gives_the_reference(
    ids: list[int], cuts: list[int], stops: tuple[str, ...], include: bool, min_tokens: int
) -> None:
    stream = assembly(stops, include=include, min_tokens=min_tokens)
    parts = feed(stream, ids, cuts, end(1, PROMPT + len(ids), wpb.END_REASON_LENGTH))
    text, delivered, matched = reference(ids, stops, include, min_tokens)
    assert "".join(part.text for part in parts) == text
    assert [i for part in parts for i in part.token_ids] == ids[:delivered]
    assert stream.delivered == delivered
    assert [part.start is not None for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [part.ending is not None for part in parts] == [False] * (len(parts) - 1) + [True]
    ending = parts[-1].ending
    assert ending is not None
    if matched is None:
        assert ending.reason == pb.FINISH_REASON_LENGTH
    else:
        assert ending.reason == pb.FINISH_REASON_STOP
        assert ending.stop is not None
        assert ending.stop.stop_string == matched


@pytest.mark.parametrize(("reason", "field"), [("EOS", "eos_token_id"), ("STOP_TOKEN", "stop_token_id")])
def test_stopping_token_is_counted_but_not_text(reason: str, field: str) -> None:
    ids = TOKENIZER.encode("good day")
    stop = ids[-1]
    stream = assembly()
    stream.append(PROMPT, ids, 0.0, end(1, PROMPT + len(ids), wpb.EndReason.Value(f"END_REASON_{reason}"), stop))
    (part,) = drain(stream)
    assert part.text == TOKENIZER.decode(ids[:-1])
    assert part.token_ids == tuple(ids)
    assert stream.delivered == len(ids)
    assert part.ending is not None
    assert part.ending.stop is not None
    assert part.ending.stop.WhichOneof("matched") == field
    assert getattr(part.ending.stop, field) == stop


def test_stop_sequence_stays_in_the_text() -> None:
    ids = TOKENIZER.encode("one two")
    last = end(1, PROMPT + len(ids), wpb.END_REASON_STOP_SEQUENCE)
    last.stop_token_sequence.ids.extend(ids[-2:])
    stream = assembly()
    stream.append(PROMPT, ids, 0.0, last)
    (part,) = drain(stream)
    assert part.text == "one two"
    assert part.ending is not None
    assert part.ending.stop is not None
    assert list(part.ending.stop.stop_token_sequence.ids) == ids[-2:]


def test_repeated_run_is_dropped_and_a_gap_refused() -> None:
    stream = assembly()
    stream.append(PROMPT, [1, 2], 0.0)
    stream.append(PROMPT, [1, 2], 0.0)
    assert stream.delivered == 2
    with pytest.raises(GapError, match="position 8 where 7"):
        stream.append(PROMPT + 3, [4], 0.0)


def test_end_with_other_count_is_a_gap() -> None:
    stream = assembly()
    stream.append(PROMPT, [1, 2], 0.0)
    with pytest.raises(GapError, match="an end at 8"):
        stream.finish(end(1, PROMPT + 3, wpb.END_REASON_LENGTH))


def test_first_part_comes_with_the_first_token_though_its_text_is_held_back() -> None:
    stream = assembly(("lo!",))
    assert stream.take() is None
    stream.begin(Start(cached_tokens=3, queue_s=0.5, prefill_s=0.25))
    stream.append(PROMPT, TOKENIZER.encode("lo"), 1.0)
    part = stream.take()
    assert part is not None
    assert (part.text, part.start) == ("", Start(3, 0.5, 0.25))
    stream.finish(end(1, stream.have, wpb.END_REASON_LENGTH))
    last = stream.take()
    assert last is not None
    assert last.text == "lo"


def test_worker_lost_before_and_after_the_first_part() -> None:
    untouched = assembly()
    untouched.append(PROMPT, [1, 2], 0.0)
    untouched.lose_worker("gone")
    with pytest.raises(NoWorkerError, match="gone"):
        untouched.take()

    begun = assembly()
    begun.worker_id = "w7"
    begun.append(PROMPT, TOKENIZER.encode("a"), 0.0)
    assert begun.take() is not None
    begun.append(begun.have, TOKENIZER.encode("b"), 0.0)
    begun.lose_worker("gone")
    rest = begun.take()
    assert rest is not None
    assert rest.text == "b"
    with pytest.raises(WorkerLostError, match="w7 was lost after 2 tokens"):
        begun.take()


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (wpb.END_REASON_DEADLINE, DeadlineError),
        (wpb.END_REASON_INVALID, EngineError),
        (wpb.END_REASON_ERROR, EngineError),
    ],
)
def test_ends_that_are_failures(reason: wpb.EndReason.ValueType, error: type[Exception]) -> None:
    stream = assembly()
    stream.finish(end(1, PROMPT, reason, message="why"))
    assert stream.is_closed
    with pytest.raises(error):
        stream.take()


def test_slow_client_is_dropped_at_the_bound() -> None:
    stream = assembly(max_unread_tokens=8)
    stream.append(PROMPT, [1] * 8, 0.0)
    part = stream.take()
    assert part is not None
    assert len(part.token_ids) == 8
    stream.append(stream.have, [1] * 9, 0.0)
    assert stream.is_closed
    with pytest.raises(SlowClientError, match="9 tokens unread"):
        stream.take()


def test_without_tokenizer_there_is_no_text() -> None:
    stream = StreamAssembly(PROMPT, detokenizer=None, return_token_ids=True)
    stream.append(PROMPT, [1, 2, EOS], 0.0, end(1, PROMPT + 3, wpb.END_REASON_EOS, EOS))
    (part,) = drain(stream)
    assert (part.text, part.token_ids) == ("", (1, 2, EOS))
