"""Texts in pieces have the tokens of the whole text, in bounded steps, and a lower bound on their number."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from common.text import pieces
from common.text.tokenizer import LongPieceError, Tokenizer
from tests.covering import slow_but
from tests.unit.common.text.support import CORPUS, KINDS, backend, files

# Patterns with which published models split text before byte-level BPE.
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "gpt2": [],
    "llama3": [CL100K],
    "qwen": [CL100K.replace("{1,3}", "")],
    "gpt-oss": [O200K],
    "deepseek": [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK],
    # A word's end depends on the text before it, so no cut is safe.
    "looks back": [r"(?<=\s)\S+|\S+|\s+"],
}
LONG_CORPUS = [*CORPUS, "      \n\n\n   1234567890 ======== 中文，一二三。再见\n" * 5]


def split_backend(name: str) -> Backend:
    tokenizer = Backend(models.BPE(ignore_merges=name == "llama3"))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[name]]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splits)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, level])
    if name == "qwen":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LONG_CORPUS, trainer)
    tokenizer.add_tokens(["<think>"])
    return tokenizer


def metaspace_unsplit() -> Backend:
    """Gemma's kind, with tokens across words."""
    letters = sorted({char for text in CORPUS for char in text.replace(" ", "▁")})
    vocab = {token: i for i, token in enumerate(["<unk>", *letters, "e▁", "he", "▁t", "▁the"])}
    merges = [("e", "▁"), ("h", "e"), ("▁", "t"), ("▁t", "he")]
    tokenizer = Backend(models.BPE(vocab, merges, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    return tokenizer


def stripping() -> Backend:
    """An added token that includes the blanks beside it."""
    tokenizer = Backend.from_str(split_backend("gpt2").to_str())
    tokenizer.add_tokens([AddedToken("stop word", rstrip=True, lstrip=True)])
    return tokenizer


@cache
def tokenizer(name: str) -> Tokenizer:
    if name in KINDS:
        return Tokenizer.from_files(files(name))
    made = {"crossing": metaspace_unsplit, "stripping": stripping}.get(name, lambda: split_backend(name))()
    return Tokenizer.from_files({"tokenizer.json": made.to_str().encode()})


NAMES = (*KINDS, *SPLITS, "crossing", "stripping")
KEPT = {"llama3", "looks back", "crossing", "stripping"}
# Tokenizers that can cut before a space: not those with a token across it or an added token that contains one.
CUT = {*NAMES} - {"looks back", "crossing", "byte_level", "stripping"}
HOSTILE = st.lists(
    st.sampled_from(
        [
            *[" ", "  ", "\n", "\r\n", "\t", "   \n \n", "a", "word", "the", "don't", "é", "e\u0301", "\u0301", "中文"],
            *["。", "，", "1", "1234567", "½", "😀", "👩\u200d💻", "▁", "<|im_end|>", "<think>", "stop word", "<|im_"],
            *[
                "Ünïcode added",
                "\u3000",
                "\xa0",
                "\ufeff",
                "ﬁ",
                "ｗ",
                "ا",
                "한글",
                "/",
                "...",
                "'",
                "==",
                "_",
                "x ",
                "in a",
            ],
        ]
    )
    | st.text(max_size=3),
    max_size=60,
).map("".join)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE", 7)


@pytest.mark.parametrize("name", slow_but(KEPT, NAMES))
@settings(max_examples=150, deadline=None)
@given(text=HOSTILE)
def test_pieces_have_the_tokens_of_the_whole(name: str, text: str) -> None:
    """Long texts are encoded in pieces."""
    tok = tokenizer(name)
    for allow_special in (False, True):
        encoded = []
        for size in (7, 1 << 30):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(pieces, "PIECE", size)
                encoded.append(tok.encode(text, allow_special=allow_special))
        assert encoded[0] == encoded[1]


@pytest.mark.parametrize("name", NAMES)
def test_only_known_tokenizers_cut_text(name: str) -> None:
    """Only tokenizers known to allow it cut prose."""
    assert (len(list(tokenizer(name).encode_pieces("the cat sat on the mat " * 5))) > 5) is (name in CUT)
    by_lines = len(list(tokenizer(name).encode_pieces("the cat\n" * 10))) > 5
    assert by_lines is (name not in ("looks back", "stripping"))


@pytest.mark.parametrize("name", slow_but(KEPT, NAMES))
@settings(max_examples=100, deadline=None)
@given(text=HOSTILE)
def test_no_text_has_fewer_tokens_than_the_floor(name: str, text: str) -> None:
    """A text refused by its bytes really has too many tokens."""
    tok = tokenizer(name)
    assert tok.fewest_tokens(text) <= len(tok.encode(text))
    assert tok.fewest_tokens(text) <= len(tok.encode(text, allow_special=True))


@pytest.mark.parametrize("name", ["llama3", "qwen", "gpt-oss", "sentencepiece"])
def test_token_floor_detects_long_texts(name: str) -> None:
    """Digits, words and blanks are refused by their bytes."""
    for text in ("7" * 5000, "word" * 5000, " " * 20_000):
        assert tokenizer(name).fewest_tokens(text, 100) >= 100, (name, text[:4])


def test_long_unsplittable_part_is_refused() -> None:
    """No larger part than allowed is encoded at once."""
    tok = tokenizer("llama3")
    assert sum(map(len, tok.encode_pieces("word " * 100, most_bytes=50))) > 100
    with pytest.raises(LongPieceError, match="more than 50 bytes"):
        list(tok.encode_pieces("word " * 100 + "=" * 51, most_bytes=50))


def test_unknown_encoder_is_not_split_or_bounded() -> None:
    content: dict[str, Any] = json.loads(backend("byte_level").to_str())
    content["pre_tokenizer"] = {"type": "UnicodeScripts"}
    tok = Tokenizer.from_files({"tokenizer.json": json.dumps(content).encode()})
    assert tok.fewest_tokens("word " * 1000) == 0
    assert len(list(tok.encode_pieces("word " * 1000))) == 1
