"""StreamAssembly: text and counts do not depend on framing or on when the client reads."""

from __future__ import annotations

import contextlib
import hashlib

import pytest
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture.providers import HypothesisProvider

from common.errors import (
    DeadlineError,
    EngineError,
    NoWorkerError,
    ResumeMismatchError,
    SlowClientError,
    WorkerLostError,
)
from common.text.answer_text import AnswerText
from common.text.stop_strings import StopStrings
from router.answers.delivered import DeliveredText, DeliveredTokens
from router.answers.stream_assembly import GapError, StreamAssembly
from router.answers.stream_chunk import FirstTokenInfo, StreamChunk
from tests.unit.common.text.continuations import Continuation, continuations
from tests.unit.router.support import EOS, end, small_tokenizer

TOKENIZER = small_tokenizer()
PROMPT = 5


def ids_of(*texts: str) -> list[int]:
    """Ids of the texts' tokens; a character of several bytes has several ids."""
    return sorted({i for text in texts for i in TOKENIZER.encode(text)})


# Ids with stop strings that they often form: nested ones, across tokens, of half characters.
FAMILIES = [
    (ids_of("a", "b", "ba"), ["ab", "bb", "aab", "bab", "abba", "babb", "aaab", "abab", "bbaab"]),
    (ids_of("e", "l", "o", "la", "lo", "x"), ["lo", "ela", "a", "elo", "xel", "ll", "oe"]),
    (ids_of("é", "x"), ["é", "éé", "\ufffd", "x\ufffd", "xx\ufffd", "é\ufffd", "\ufffdx\ufffd"]),
    ([i for i in range(299) if i != EOS], ["a", "lo", "ela", "é", "ab", "ba", "x"]),
]


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[int], tuple[str, ...]]:
    """The ids of an answer, and stop strings that mostly occur in it."""
    letters, possible = draw(st.sampled_from(FAMILIES))
    # Rarely none and usually few: with many, a short one ends the answer before a long one begins.
    stops = draw(st.lists(st.sampled_from(possible), min_size=draw(st.sampled_from([0, 1, 1, 1, 1])), max_size=6))
    stops = list(dict.fromkeys(stops))
    # Stop strings and prefixes of them, so that a match or near match follows.
    heads = [stop[:end] for stop in stops for end in range(1, len(stop) + 1) if "\ufffd" not in stop]
    begun = [[i for letter in head for i in TOKENIZER.encode(letter)] for head in heads]
    letter = st.sampled_from([[i] for i in letters])
    pieces = draw(st.lists(st.sampled_from(begun) | letter if begun else letter, min_size=1, max_size=20))
    return [i for piece in pieces for i in piece][:40], tuple(stops)


def assembly(
    stops: tuple[str, ...] = (),
    *,
    include: bool = False,
    min_tokens: int = 0,
    max_unread_tokens: int = 10_000,
    delivered_text: DeliveredText | None = None,
    delivered_tokens: DeliveredTokens | None = None,
) -> StreamAssembly:
    return StreamAssembly(
        PROMPT,
        text=AnswerText(TOKENIZER.decode_stream(), StopStrings(stops, include) if stops else None, min_tokens),
        return_token_ids=True,
        max_unread_tokens=max_unread_tokens,
        delivered_text=delivered_text,
        delivered_tokens=delivered_tokens,
    )


def drain(stream: StreamAssembly) -> list[StreamChunk]:
    parts = []
    while (part := stream.next_chunk()) is not None:
        parts.append(part)
        if part.ending is not None:
            break
    return parts


def feed(stream: StreamAssembly, ids: list[int], cuts: list[int], last: wpb.SequenceEnd) -> list[StreamChunk]:
    """Feeds `ids` in runs that end at `cuts`, reading after every other run."""
    parts: list[StreamChunk] = []
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
    """The brute-force reference: text, delivered tokens, matched stop string."""
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


@settings(max_examples=200)
@given(
    answer=answers(),
    cuts=st.lists(st.integers(0, 40), max_size=6),
    include=st.booleans(),
    min_tokens=st.integers(0, 8),
)
def test_stream_text_is_independent_of_framing(
    answer: tuple[list[int], tuple[str, ...]], cuts: list[int], include: bool, min_tokens: int
) -> None:
    """Stop strings overlap, contain each other and cross tokens and runs."""
    ids, stops = answer
    # A sequence has at least min_tokens tokens.
    min_tokens = min(min_tokens, len(ids))
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


def test_many_answers_meet_long_stop_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the property's generator: three in ten answers meet a stop string of two or more characters, and as many
    meet one that crosses tokens."""
    # Hypothesis draws constants from loaded modules, so a seed would give other answers in each run.
    monkeypatch.setattr(HypothesisProvider, "_maybe_draw_constant", lambda *_, **__: None)
    met: list[bool] = []

    @seed(0)
    @settings(max_examples=200, database=None, phases=[Phase.generate])
    @given(answer=answers())
    def note(answer: tuple[list[int], tuple[str, ...]]) -> None:
        _, delivered, matched = reference(*answer, include=False, min_tokens=0)
        ids = answer[0][:delivered]
        met.append(matched is not None and len(matched) > 1 and len(TOKENIZER.decode(ids[-1:])) < len(matched))

    note()
    assert sum(met) >= 0.3 * len(met)


@settings(max_examples=200)
@given(asked=continuations(), reads=st.sets(st.integers(0, 8)))
def test_continuation_text_depends_only_on_prompt_and_tokens(asked: Continuation, reads: set[int]) -> None:
    """The text equals the library's for any framing, reading order and stop strings."""
    stream = StreamAssembly(
        len(asked.prompt),
        text=AnswerText(
            asked.tokenizer.decode_stream(behind=asked.prompt),
            StopStrings(asked.stops, include=False) if asked.stops else None,
        ),
    )
    text = []
    for i, run in enumerate(asked.runs):
        if not stream.is_closed:
            stream.append(stream.num_tokens, run, now=0.0)
        if i in reads and not stream.is_closed:
            text += [part.text for part in drain(stream)]
    stream.finish(end(1, stream.num_tokens, wpb.END_REASON_LENGTH))
    text += [part.text for part in drain(stream)]

    assert "".join(text) == asked.stopped


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


def test_first_chunk_is_sent_with_first_token_despite_held_text() -> None:
    stream = assembly(("lo!",))
    assert stream.next_chunk() is None
    stream.begin(FirstTokenInfo(cached_tokens=3, prefill_s=0.25))
    stream.append(PROMPT, TOKENIZER.encode("lo"), 1.0)
    part = stream.next_chunk()
    assert part is not None
    assert (part.text, part.start) == ("", FirstTokenInfo(3, 0.25))
    stream.finish(end(1, stream.num_tokens, wpb.END_REASON_LENGTH))
    last = stream.next_chunk()
    assert last is not None
    assert last.text == "lo"


def test_later_attempt_does_not_change_stream_start() -> None:
    """Cached tokens and times of the finish belong to the attempt of the first delivered token."""
    stream = assembly()
    stream.begin(FirstTokenInfo(cached_tokens=3))
    stream.begin(FirstTokenInfo(cached_tokens=4))
    stream.append(PROMPT, [1], 0.0)
    stream.begin(FirstTokenInfo(cached_tokens=9))
    assert stream.start.cached_tokens == 4


def test_stop_string_may_end_at_min_tokens() -> None:
    """The token that reaches min_tokens may complete a stop string."""
    for min_tokens, delivered in ((0, 1), (1, 1), (2, 2), (3, 3), (4, 3)):
        stream = assembly(("a",), min_tokens=min_tokens)
        stream.append(PROMPT, TOKENIZER.encode("a") * 3, 0.0)
        assert stream.delivered == delivered
        assert stream.is_closed == (min_tokens < 4)


def test_stop_string_completed_at_end_matches() -> None:
    """Half a character becomes U+FFFD at the end and is searched too."""
    stream = assembly(("b\ufffd",))
    ids = [*TOKENIZER.encode("ab"), TOKENIZER.encode("é")[0]]
    stream.append(PROMPT, ids, 0.0, end(1, PROMPT + 3, wpb.END_REASON_LENGTH))
    (part,) = drain(stream)
    assert part.text == "a"
    assert part.ending is not None
    assert part.ending.stop is not None
    assert part.ending.stop.stop_string == "b\ufffd"


def test_worker_lost_before_and_after_the_first_part() -> None:
    untouched = assembly()
    untouched.append(PROMPT, [1, 2], 0.0)
    untouched.lose_worker(NoWorkerError("gone"))
    with pytest.raises(NoWorkerError, match="gone"):
        untouched.next_chunk()

    begun = assembly()
    begun.worker_id = "w7"
    begun.append(PROMPT, TOKENIZER.encode("a"), 0.0)
    assert begun.next_chunk() is not None
    begun.append(begun.num_tokens, TOKENIZER.encode("b"), 0.0)
    begun.lose_worker(NoWorkerError("gone"))
    rest = begun.next_chunk()
    assert rest is not None
    assert rest.text == "b"
    with pytest.raises(WorkerLostError, match="w7 was lost after 2 tokens"):
        begun.next_chunk()


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (wpb.END_REASON_DEADLINE, DeadlineError),
        (wpb.END_REASON_INVALID, EngineError),
        (wpb.END_REASON_ERROR, EngineError),
    ],
)
def test_failed_end_raises_its_error(reason: wpb.EndReason.ValueType, error: type[Exception]) -> None:
    stream = assembly()
    stream.finish(end(1, PROMPT, reason, message="why"))
    assert stream.is_closed
    with pytest.raises(error):
        stream.next_chunk()


def test_slow_client_is_dropped_at_the_bound() -> None:
    stream = assembly(max_unread_tokens=8)
    stream.append(PROMPT, [1] * 8, 0.0)
    part = stream.next_chunk()
    assert part is not None
    assert len(part.token_ids) == 8
    stream.append(stream.num_tokens, [1] * 9, 0.0)
    assert stream.is_closed
    with pytest.raises(SlowClientError, match="9 tokens unread"):
        stream.next_chunk()


def test_stream_without_tokenizer_has_no_text() -> None:
    stream = StreamAssembly(PROMPT, text=AnswerText(None), return_token_ids=True)
    stream.append(PROMPT, [1, 2, EOS], 0.0, end(1, PROMPT + 3, wpb.END_REASON_EOS, EOS))
    (part,) = drain(stream)
    assert (part.text, part.token_ids) == ("", (1, 2, EOS))


@settings(max_examples=100)
@given(
    answer=answers(),
    again=st.lists(st.integers(0, 40), max_size=6),
    count=st.integers(1, 12),
    named=st.booleans(),
    wrong=st.sampled_from([False, False, True]),
)
def test_resumed_answer_omits_delivered_part(
    answer: tuple[list[int], tuple[str, ...]], again: list[int], count: int, named: bool, wrong: bool
) -> None:
    """For any messages, by token ids or by text and token count; an answer that differs is refused."""
    ids, stops = answer
    last = end(0, PROMPT + len(ids), wpb.END_REASON_LENGTH)
    # Messages of one or two tokens give many places to break.
    whole = feed(assembly(stops), ids, list(range(40)), last)
    got: list[StreamChunk] = []
    for part in whole[:-1]:
        got.append(part)
        if sum(len(each.token_ids) for each in got) >= count:
            break
    had, text = [i for part in got for i in part.token_ids], "".join(part.text for part in got)
    if not had or not (named or text):
        return
    claimed = [*had[:-1], had[-1] + 1] if wrong else had
    data = (text + "!" if wrong else text).encode()
    stream = assembly(
        stops,
        delivered_tokens=DeliveredTokens(0, len(had), claimed if named else None),
        delivered_text=None if named else DeliveredText(0, len(data), hashlib.sha256(data).digest()),
    )
    rest: list[StreamChunk] = []
    with contextlib.suppress(ResumeMismatchError):
        rest = feed(stream, ids, again, last)
    assert bool(rest) != wrong
    if wrong:
        return
    assert had + [i for part in rest for i in part.token_ids] == [i for part in whole for i in part.token_ids]
    assert text + "".join(part.text for part in rest) == "".join(part.text for part in whole)
    assert rest[-1].ending == whole[-1].ending
