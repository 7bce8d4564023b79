"""Incremental decoding equals decoding at once for any division of the ids, and never shows half a character."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from common.text.tokenizer import Tokenizer
from tests.unit.common.text.continuations import TOKENIZERS, Continuation, continuation, continuations
from tests.unit.common.text.support import KINDS, backend

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("abc 😀中é\n"), max_size=40)


def streamed(tokenizer: Tokenizer, pieces: Sequence[Sequence[int]]) -> list[str]:
    stream = tokenizer.decode_stream()
    return [stream.push(piece) for piece in pieces] + [stream.flush()]


def cut(ids: list[int], sizes: list[int]) -> list[list[int]]:
    pieces = []
    for size in sizes:
        pieces.append(ids[:size])
        ids = ids[size:]
    return [*pieces, ids]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(text=ANY_TEXT, sizes=st.lists(st.integers(0, 4), max_size=20))
def test_text_streams_as_it_decodes_at_once(kind: str, text: str, sizes: list[int]) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    expected = backend(kind).decode(ids, skip_special_tokens=True)

    assert "".join(streamed(tokenizer, cut(ids, sizes))) == expected
    assert tokenizer.decode(ids) == expected


@settings(max_examples=150)
@given(st.lists(st.integers(0, TOKENIZERS["byte_level"].vocab_size + 3), max_size=30), st.lists(st.integers(0, 3)))
def test_byte_level_stream_equals_whole_decode(ids: list[int], sizes: list[int]) -> None:
    expected = backend("byte_level").decode(ids, skip_special_tokens=True)

    assert "".join(streamed(TOKENIZERS["byte_level"], cut(ids, sizes))) == expected


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(data=st.data(), sizes=st.lists(st.integers(0, 3), max_size=20))
def test_result_does_not_depend_on_the_pieces(kind: str, data: st.DataObject, sizes: list[int]) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))

    assert "".join(streamed(tokenizer, cut(ids, sizes))) == tokenizer.decode(ids)


@settings(max_examples=100)
@given(st.lists(st.integers(5, TOKENIZERS["sentencepiece"].vocab_size - 1), max_size=30))
def test_byte_fallback_equals_the_library_outside_of_invalid_bytes(ids: list[int]) -> None:
    first_byte = 5
    normal = [id for id in ids if not first_byte + 0x80 <= id < first_byte + 0x100]

    assert TOKENIZERS["sentencepiece"].decode(normal) == backend("sentencepiece").decode(normal)


def test_decode_stream_context_is_visible_text() -> None:
    """The first ids of the vocabulary are a special token and a space, which are invisible at the start."""
    vocabulary = {"<unk>": 0, "▁": 1, "▁a": 2, "b": 3}
    library = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    library.add_special_tokens(["<unk>"])
    tokenizer = Tokenizer.from_files({"tokenizer.json": library.to_str().encode(), "tokenizer_config.json": b"{}"})
    for ids in ([2, 2], [3, 2, 2], [1, 2], [3, 1, 3], [2, 1, 1, 3]):
        assert "".join(streamed(tokenizer, [[id] for id in ids])) == library.decode(ids)


def test_invalid_byte_tokens_cost_only_themselves() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    vocabulary = backend("sentencepiece").get_vocab()
    ids = [vocabulary[token] for token in ("<0x41>", "<0xE4>", "<0x42>")]

    assert streamed(tokenizer, [[id] for id in ids]) == ["A", "", "\ufffdB", ""]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_streamed_characters_are_whole(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    text = "a😀é中\U0001f469\u200d\U0001f4bb b"

    pieces = streamed(tokenizer, [[id] for id in tokenizer.encode(text)])

    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text
    assert len([piece for piece in pieces if piece]) > 4


def test_unfinished_character_shows_at_the_end_only() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("😀")
    stream = tokenizer.decode_stream()

    assert stream.push(ids[:1]) == ""
    assert stream.flush() == "\ufffd"


def test_invalid_bytes_are_not_held_back() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    continuation = backend("byte_level").get_vocab()["Ģ"]  # byte 0x80
    stream = tokenizer.decode_stream()

    assert [stream.push([continuation]) for _ in range(3)] == ["\ufffd"] * 3


@settings(max_examples=300)
@given(asked=continuations())
def test_streamed_text_equals_text_added_to_prompt(asked: Continuation) -> None:
    """The reference is the library's decoder, for any prompt, answer and framing, without half characters of the
    prompt."""
    stream = asked.tokenizer.decode_stream(behind=asked.prompt)

    text = "".join(map(stream.push, asked.runs)) + stream.flush()

    assert text == continuation(asked.kind, asked.prompt, asked.answer)


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_and_continuation_join_to_one_text(kind: str) -> None:
    """Regression: the space before a continuation's first word was lost."""
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode("the cat sat on the mat")
    for cut in range(2, len(ids)):
        stream = tokenizer.decode_stream(behind=ids[:cut])
        assert tokenizer.decode(ids[:cut]) + stream.push(ids[cut:]) == "the cat sat on the mat"


@pytest.mark.parametrize("kind", ["sentencepiece", "sentencepiece_legacy", "unigram"])
def test_text_after_only_special_tokens_has_no_leading_space(kind: str) -> None:
    """Special tokens and unused ids are not text, nor is the space before a beginning."""
    tokenizer = TOKENIZERS[kind]
    special, unknown = min(tokenizer.special_ids), tokenizer.vocab_size
    ids = tokenizer.encode("cat")
    before: tuple[list[int], ...] = ([], [special], [special, unknown], [*tokenizer.encode("a"), *[special] * 5])
    for behind in before:
        assert tokenizer.decode_stream(behind=behind).push(ids) == "cat"
    assert tokenizer.decode_stream(behind=[*tokenizer.encode("a"), *[special] * 4]).push(ids) == " cat"


def test_character_begun_in_prompt_is_not_in_continuation() -> None:
    """A byte-level answer's text depends only on its own bytes, not on the prompt."""
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("😀")
    stream = tokenizer.decode_stream(behind=ids[:1])

    assert stream.push(ids[1:]) + stream.flush() == tokenizer.decode(ids[1:])
