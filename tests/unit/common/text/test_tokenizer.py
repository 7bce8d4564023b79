"""Tokenizer against transformers, and the promise that a client's text never becomes a special token."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from common.text.tokenizer import Tokenizer, TokenizerError, files_sha256, tokenizer_files
from tests.unit.common.text.support import KINDS, backend, files, reference

TEXTS = ["", "hello world", " two  spaces ", "中文 and 😀", "a<think>b", "line\n\nnext\r\n", "\ud7ff\ufdd0 private"]
SPECIALS = ["<|im_end|>", "<|im_start|>", "<|im_end|><|im_end|>"]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("text", TEXTS)
def test_plain_text_is_encoded_as_by_transformers(kind: str, text: str) -> None:
    assert Tokenizer.from_files(files(kind)).encode(text) == reference(kind)(text).input_ids


def pair_ids(tokenizer: Tokenizer, first: str, second: str) -> list[int]:
    parts = (tokenizer.encode_pair_pieces(text, is_first=place) for text, place in ((first, True), (second, False)))
    return [id for pieces in parts for piece in pieces for id in piece]


PAIRS = [("a query", " two  docs"), ("", "x"), ("a", "a")]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_pairs_are_encoded_as_by_transformers(kind: str, first: str, second: str) -> None:
    assert pair_ids(Tokenizer.from_files(files(kind)), first, second) == reference(kind)(first, second).input_ids


START, END = "<|im_start|>", "<|im_end|>"


@pytest.mark.parametrize("pair", ["$A $B:1", f"{START} $A {START}:1 $B:1", f"{START} $A {END} $B:1 {END}:1"])
def test_pairs_have_what_the_post_processor_puts_around_them(pair: str) -> None:
    made = backend("byte_level")
    special = [(token, made.token_to_id(token)) for token in (START, END)]
    made.post_processor = processors.TemplateProcessing(single="$A", pair=pair, special_tokens=special)
    tokenizer = Tokenizer.from_files({**files("byte_level"), "tokenizer.json": made.to_str().encode()})
    for first, second in PAIRS:
        assert pair_ids(tokenizer, first, second) == made.encode(first, second).ids
    # A client's text is text.
    around = [id for id in pair_ids(tokenizer, END, START) if id in tokenizer.special_ids]
    assert around == [id for id in made.encode("a", "a").ids if id in tokenizer.special_ids]


def test_the_configuration_says_what_is_around_both_of_a_pair() -> None:
    config = {"add_bos_token": True, "add_eos_token": True, "bos_token": "<s>", "eos_token": "<|im_end|>"}
    made = {**files("sentencepiece"), "tokenizer_config.json": json.dumps(config).encode()}
    tokenizer = Tokenizer.from_files(made)
    assert pair_ids(tokenizer, "a b", "c") == tokenizer.encode("a b") + tokenizer.encode("c")


@pytest.mark.parametrize("special", SPECIALS)
def test_special_tokens_in_plain_text_stay_text(kind: str, special: str) -> None:
    tokenizer = Tokenizer.from_files(files(kind))
    text = f"say {special} now"

    ids = tokenizer.encode(text)

    assert tokenizer.special_ids.isdisjoint(ids[1:])
    assert tokenizer.decode(ids) == text


SHARED = {kind: Tokenizer.from_files(files(kind)) for kind in ("byte_level", "sentencepiece")}


@settings(max_examples=60)
@given(st.lists(st.sampled_from(["<|im_end|>", "<|im_", "end|>", "<|", "|>", "a", " ", "\n", "é"]), max_size=12))
def test_no_mixture_of_pieces_becomes_special(pieces: list[str]) -> None:
    text = "".join(pieces)
    for name, tokenizer in SHARED.items():
        ids = tokenizer.encode(text)
        assert tokenizer.special_ids.isdisjoint(ids[1:] if name == "sentencepiece" else ids)
        # SentencePiece takes a space at the beginning for its own.
        assert tokenizer.decode(ids) in ((text,) if name == "byte_level" else (text, text.removeprefix(" ")))


def test_special_tokens_are_parsed_where_allowed(kind: str) -> None:
    tokenizer = Tokenizer.from_files(files(kind))
    expected = backend(kind).encode("<|im_start|>user\nhi<|im_end|>", add_special_tokens=False).ids

    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>", allow_special=True) == expected
    assert len(tokenizer.special_ids & set(expected)) == 2


def test_beginning_of_sequence_goes_before_plain_text_only() -> None:
    tokenizer = Tokenizer.from_files(files("sentencepiece"))

    assert tokenizer.encode("hello")[0] == 1
    assert tokenizer.encode("<s>hello", allow_special=True).count(1) == 1


@pytest.mark.parametrize("add_bos", [True, False])
def test_configuration_decides_on_beginning_of_sequence(add_bos: bool) -> None:
    config = {"add_bos_token": add_bos, "bos_token": "<s>"}

    ids = Tokenizer.from_files(files("sentencepiece", **config)).encode("hello")

    assert ids == reference("sentencepiece", **config)("hello").input_ids
    assert (ids[0] == 1) is add_bos


def test_named_special_tokens_count_although_not_flagged() -> None:
    plain, named = (Tokenizer.from_files(files("byte_level", **c)) for c in ({}, {"pad_token": "<think>"}))
    think = backend("byte_level").token_to_id("<think>")

    assert think in plain.encode("a<think>b")
    assert think not in named.encode("a<think>b")
    assert named.special_ids - plain.special_ids == {think}


def test_truncation_of_a_training_run_does_not_cut_prompts() -> None:
    content = json.loads(backend("byte_level").to_str())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    tokenizer = Tokenizer.from_files({"tokenizer.json": json.dumps(content).encode()})

    assert tokenizer.decode(tokenizer.encode("hello world " * 20)) == "hello world " * 20


def test_vocab_size_and_token_strings() -> None:
    tokenizer = Tokenizer.from_files(files("byte_level"))

    assert tokenizer.vocab_size == backend("byte_level").get_vocab_size()
    assert tokenizer.token_strings([1, tokenizer.vocab_size]) == ["<|im_end|>", ""]


def test_decode_keeps_special_tokens_when_asked() -> None:
    tokenizer = Tokenizer.from_files(files("byte_level"))
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>", allow_special=True)

    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>hi<|im_end|>"


def test_sha256_covers_names_lengths_and_bytes() -> None:
    expected = hashlib.sha256()
    for name, data in (("a", b"x"), ("b", b"")):
        expected.update(name.encode() + b"\0" + len(data).to_bytes(8, "little") + data)

    assert files_sha256({"b": b"", "a": b"x"}) == expected.hexdigest()
    assert Tokenizer.from_files(files()).sha256 == files_sha256(files())
    assert files_sha256({"a": b"xb"}) != files_sha256({"a": b"x", "b": b""})


def test_files_of_a_folder(tmp_path: Path) -> None:
    reference().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"large")

    found = tokenizer_files(tmp_path)

    assert set(found) == {"tokenizer.json", "tokenizer_config.json"}
    assert Tokenizer.from_folder(tmp_path).encode("hi") == reference()("hi").input_ids


def test_folder_without_tokenizer_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"^.* has no tokenizer\.json; .*$"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"tokenizer.json": b"{"},
        {"tokenizer.json": b"{}"},
        {"tokenizer.json": b"\xff\xfe"},
        {"tokenizer.json": b"[]"},
        files() | {"tokenizer_config.json": b"nope"},
    ],
)
def test_unusable_files_are_one_line(bad: dict[str, bytes]) -> None:
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_files(bad)
    assert "\n" not in str(caught.value)
