"""Incremental decoding equals decoding at once, however the ids arrive, and never shows half a character."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.text.tokenizer import Tokenizer
from tests.unit.common.text.support import KINDS, backend, files

TOKENIZERS = {kind: Tokenizer.from_files(files(kind)) for kind in KINDS}
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
def test_any_byte_level_ids_stream_as_they_decode_at_once(ids: list[int], sizes: list[int]) -> None:
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
    first_byte, space = 5, 5 + 0x20
    normal = [id for id in ids if not (first_byte + 0x80 <= id < first_byte + 0x100 or id == space)]

    assert TOKENIZERS["sentencepiece"].decode(normal) == backend("sentencepiece").decode(normal)


def test_invalid_byte_tokens_cost_only_themselves() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    vocabulary = backend("sentencepiece").get_vocab()
    ids = [vocabulary[token] for token in ("<0x41>", "<0xE4>", "<0x42>")]

    assert streamed(tokenizer, [[id] for id in ids]) == ["A", "", "\ufffdB", ""]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_characters_come_whole(kind: str) -> None:
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


def test_endless_garbage_is_not_held_back() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    continuation = backend("byte_level").get_vocab()["Ģ"]  # byte 0x80
    stream = tokenizer.decode_stream()

    assert [stream.push([continuation]) for _ in range(3)] == ["\ufffd"] * 3
