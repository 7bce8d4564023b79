"""Answers in channels: their parts depend only on the tokens, and a stream resumes after any delivered part."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence

import pytest
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ResumeMismatchError
from common.text.answer_text import AnswerText
from common.text.stop_strings import StopStrings
from router.answers.channel_reader import ChannelReader, ChannelTerms
from router.answers.channels.calls import ToolSchemas
from router.answers.channels.parser import Channel, ChannelPart, ResponseParser
from router.answers.delivered import DeliveredText
from router.answers.stream_assembly import StreamAssembly
from router.answers.stream_chunk import FinishInfo, StreamChunk
from router.model_registry import TextAssets
from tests.unit.router.support import EOS, end, tool_files

PROMPT = 5
ASSETS = {with_tokens: TextAssets.from_files(tool_files(with_tokens=with_tokens)) for with_tokens in (True, False)}
TOOLS = ToolSchemas({"f": {}, "get_it": {"n": {"type": "integer"}}})
OPENINGS = ("", "<think>\n", "<think>\n\n</think>\n\n")


def reading(
    *, with_tokens: bool = True, opening: str = "", tools: ToolSchemas | None = None, ends_with_first_call: bool = False
) -> ChannelTerms:
    form = ASSETS[with_tokens].response_form
    assert form is not None
    return ChannelTerms(form, opening, tools=tools, ends_with_first_call=ends_with_first_call)


def ids_of(text: str, *, with_tokens: bool = True, spelled: bool = False) -> list[int]:
    """Tokens of a text, in which a delimiter is its token unless it is `spelled`."""
    tokenizer = ASSETS[with_tokens and not spelled].tokenizer
    assert tokenizer is not None
    return tokenizer.encode(text)


def assembly(
    asked: ChannelTerms,
    *,
    with_tokens: bool = True,
    stops: tuple[str, ...] = (),
    include: bool = False,
    min_tokens: int = 0,
    delivered: DeliveredText | None = None,
) -> StreamAssembly:
    tokenizer = ASSETS[with_tokens].tokenizer
    assert tokenizer is not None
    return StreamAssembly(
        PROMPT,
        text=AnswerText(
            tokenizer.decode_stream(keep=asked.form.kept_ids),
            StopStrings(stops, include) if stops else None,
            min_tokens,
            is_read_per_token=True,
        ),
        return_token_ids=True,
        reader=ChannelReader(asked),
        delivered_text=delivered,
    )


def drain(stream: StreamAssembly) -> list[StreamChunk]:
    chunks = []
    while (chunk := stream.next_chunk()) is not None:
        chunks.append(chunk)
        if chunk.ending is not None:
            break
    return chunks


def feed(
    stream: StreamAssembly, ids: Sequence[int], cuts: Iterable[int] = (), *, ends: bool = True
) -> list[StreamChunk]:
    """Feeds the tokens that the stream lacks, in runs that end at `cuts`, and reads after each."""
    chunks: list[StreamChunk] = []
    last = end(1, PROMPT + len(ids), wpb.END_REASON_EOS, EOS)
    for cut in [*sorted({cut for cut in cuts if stream.delivered < cut < len(ids)}), len(ids)]:
        is_last = ends and cut == len(ids)
        stream.append(stream.num_tokens, ids[stream.delivered : cut], 0.0, last if is_last else None)
        chunks += drain(stream)
        if stream.is_closed:
            break
    return chunks


def texts(chunks: Iterable[StreamChunk]) -> tuple[str, ...]:
    """Reasoning, content, and each call's name with its arguments."""
    gathered = [*chunks]
    calls: list[list[str]] = []
    for part in (part for chunk in gathered for part in chunk.calls):
        assert bool(part.name) == (part.call == len(calls))
        if part.name:
            calls.append([f"{part.name}: "])
        calls[part.call].append(part.text)
    return (
        "".join(chunk.reasoning for chunk in gathered),
        "".join(chunk.text for chunk in gathered),
        *("".join(call) for call in calls),
    )


def digest_of(chunks: Iterable[StreamChunk]) -> DeliveredText | None:
    """The DeliveredText that a client of these chunks reports."""
    reasoning, content, *calls = texts(chunks)
    data = "".join([reasoning, content, *(call.partition(": ")[2] for call in calls)]).encode()
    return DeliveredText(0, len(data), hashlib.sha256(data).digest()) if data else None


WORDS = ("la", "lo", " ", "\n", "é", "<", "<thi", "</think", ">", "x")
DELIMITERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
# After the mark, which is not part of them.
SPELLED = ("\0<think>", "\0<tool_call>")
CALLS = (
    '<tool_call>\n{"name": "f", "arguments": {"a": [1, "}"]}}\n</tool_call>\n',
    '<tool_call>{"name": "get_it"}</tool_call>',
    '<tool_call>{"arguments": {"n": 1}, "name": "f"}',
)


@st.composite
def answers(draw: st.DrawFn) -> tuple[bool, list[int], str]:
    """A complete answer: whether delimiters are tokens, its tokens, and the opening in the prompt."""
    with_tokens = draw(st.booleans())
    pieces = draw(st.lists(st.sampled_from(WORDS + (*DELIMITERS, *CALLS, *SPELLED) * 3), max_size=12))
    ids = [
        id
        for piece in pieces
        for id in ids_of(piece.removeprefix("\0"), with_tokens=with_tokens, spelled=piece.startswith("\0"))
    ]
    return with_tokens, [*ids, EOS], draw(st.sampled_from(OPENINGS))


def reference(with_tokens: bool, ids: Sequence[int], opening: str) -> list[ChannelPart]:
    """The parser alone on the whole text; spelled delimiters are masked if tokens exist for them."""
    asked = reading(with_tokens=with_tokens, opening=opening)
    tokenizer = ASSETS[with_tokens].tokenizer
    assert tokenizer is not None
    parser = ResponseParser(asked.form.template, tools=TOOLS, separates_reasoning=True, opening=opening)
    text, run = "", list[int]()
    for id in [*ids[:-1], None]:
        if id is not None and id not in asked.form.markers:
            run.append(id)
            continue
        plain = tokenizer.decode(run)
        text += re.sub("(think|tool_call)>", "\\1\ue000>", plain) if with_tokens else plain
        text += "" if id is None else asked.form.markers[id]
        run = []
    return [part._replace(text=part.text.replace("\ue000", "")) for part in (*parser.push(text), *parser.finish())]


def as_chunk(parts: Sequence[ChannelPart]) -> StreamChunk:
    reasoning, content = (
        "".join(p.text for p in parts if p.channel is c) for c in (Channel.REASONING, Channel.CONTENT)
    )
    return StreamChunk(content, (), None, None, None, reasoning, tuple(p for p in parts if p.channel is Channel.CALL))


@settings(max_examples=150)
@given(answer=answers(), cuts=st.lists(st.integers(0, 60), max_size=8))
def test_streamed_channels_equal_whole_text(answer: tuple[bool, list[int], str], cuts: list[int]) -> None:
    """For any framing and reading order; a delimiter with a token is text if it is spelled."""
    with_tokens, ids, opening = answer
    stream = assembly(reading(with_tokens=with_tokens, opening=opening, tools=TOOLS), with_tokens=with_tokens)
    assert texts(feed(stream, ids, cuts)) == texts([as_chunk(reference(with_tokens, ids, opening))])
    assert stream.delivered == len(ids)


@settings(max_examples=100)
@given(answer=answers(), cuts=st.lists(st.integers(0, 60), max_size=8), by_text=st.booleans())
def test_stream_resumes_after_each_message(answer: tuple[bool, list[int], str], cuts: list[int], by_text: bool) -> None:
    """By token ids or by the digest of all channels, without loss or repetition."""
    with_tokens, ids, opening = answer
    asked = reading(with_tokens=with_tokens, opening=opening, tools=TOOLS)
    chunks = feed(assembly(asked, with_tokens=with_tokens), ids, cuts)
    for count in range(len(chunks)):
        had = chunks[:count]
        again = assembly(asked, with_tokens=with_tokens, delivered=digest_of(had) if by_text else None)
        if not by_text:
            again.resume_behind([id for chunk in had for id in chunk.token_ids])
        rest = feed(again, ids, cuts[::2])
        assert texts([*had, *rest]) == texts(chunks)
        assert again.reasoning_tokens == assembly_of(asked, ids, with_tokens=with_tokens).reasoning_tokens


def assembly_of(asked: ChannelTerms, ids: Sequence[int], *, with_tokens: bool) -> StreamAssembly:
    stream = assembly(asked, with_tokens=with_tokens)
    feed(stream, ids)
    return stream


def test_resume_of_other_answer_is_refused() -> None:
    ids = [*ids_of("<think>lala</think>lo"), EOS]
    chunks = feed(assembly(reading()), ids)
    assert texts(chunks) == ("lala", "lo")
    for data, expected in ((b"lalalo", None), (b"lolala", ResumeMismatchError), (b"lalalolo", ResumeMismatchError)):
        again = assembly(reading(), delivered=DeliveredText(0, len(data), hashlib.sha256(data).digest()))
        if expected is None:
            assert texts(feed(again, ids)) == ("", "")
            continue
        with pytest.raises(expected):
            feed(again, ids)


def test_tokens_of_reasoning_are_counted_with_their_delimiters() -> None:
    thought, said = ids_of("<think>la la</think>"), ids_of("\n\nlo")
    for opening, ids in (("", [*thought, *said]), ("<think>\n", [*thought[1:], *said])):
        for cuts in (range(0), range(20)):
            stream = assembly(reading(opening=opening))
            feed(stream, [*ids, EOS], cuts)
            assert stream.reasoning_tokens == len(ids) - len(said)
            assert stream.written_tokens()[1] == stream.reasoning_tokens
    behind = assembly(reading())
    behind.resume_behind(thought[:3])
    feed(behind, [*thought, *said, EOS])
    assert (behind.reasoning_tokens, behind.written_tokens()[1]) == (len(thought), len(thought) - 3)


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_match_text_with_delimiters(include: bool) -> None:
    ids = ids_of("<think>la</think>lo la lo")
    for stop, expected in (
        ("la", ("la" if include else "", "")),
        ("</think>lo", ("la", "lo" if include else "")),
        (" la", ("la", "lo la" if include else "lo")),
    ):
        for cuts in (range(0), range(20)):
            stream = assembly(reading(), stops=(stop,), include=include)
            chunks = feed(stream, ids, cuts, ends=False)
            assert texts(chunks) == expected
            assert chunks[-1].ending is not None
            assert chunks[-1].ending.stop == pb.StopDetail(stop_string=stop)
    late = assembly(reading(), stops=("la",), min_tokens=4)
    assert texts(feed(late, [*ids, EOS])) == ("la", "lo")


def test_held_back_text_is_sent_at_end() -> None:
    for text in ("<think>la</thi", "lo<thi"):
        ids = ids_of(text, with_tokens=False)
        stream = assembly(reading(with_tokens=False), with_tokens=False)
        stream.append(PROMPT, ids, 0.0)
        before = drain(stream)
        assert "<thi" not in "".join(texts(before))
        stream.finish(end(1, PROMPT + len(ids), wpb.END_REASON_LENGTH))
        assert "".join(texts([*before, *drain(stream)])) == text.removeprefix("<think>")


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("cuts", [range(0), range(200)])
def test_finish_reason_depends_on_last_part(cuts: range) -> None:
    for text, reason, calls in (
        (CALL, "TOOL_CALLS", ['f: {"a": 1}']),
        (f"lo\n{CALL}\n{CALL}\n", "TOOL_CALLS", ['f: {"a": 1}'] * 2),
        (f"{CALL} lo", "STOP", ['f: {"a": 1}']),
        ("lo", "STOP", []),
        ('<tool_call>\n{"name": "f", "argu', "STOP", []),
    ):
        chunks = feed(assembly(reading(tools=TOOLS)), [*ids_of(text), EOS], cuts)
        ending = chunks[-1].ending
        assert ending is not None
        assert (ending.reason, ending.stop) == (
            pb.FinishReason.Value(f"FINISH_REASON_{reason}"),
            pb.StopDetail(eos_token_id=EOS),
        )
        assert [*texts(chunks)[2:]] == calls
    # An incomplete call is content, without change.
    assert texts(chunks)[1] == text


@pytest.mark.parametrize("cuts", [range(0), range(200)])
def test_single_call_answer_ends_at_first_call(cuts: range) -> None:
    ids = [*ids_of(f"lo {CALL}\n{CALL}"), EOS]
    stream = assembly(reading(tools=TOOLS, ends_with_first_call=True))
    chunks = feed(stream, ids, cuts)
    assert texts(chunks) == ("", "lo", 'f: {"a": 1}')
    assert chunks[-1].ending == FinishInfo(pb.FINISH_REASON_TOOL_CALLS)
    # Including the token that completes it.
    assert stream.delivered == len(ids_of(f"lo {CALL[: CALL.index('}}') + 1]}"))
    assert texts(feed(assembly(reading(tools=TOOLS, ends_with_first_call=True)), [*ids_of("lo"), EOS], cuts)) == (
        "",
        "lo",
    )
