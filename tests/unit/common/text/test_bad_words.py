"""Bad words become the tokens that spell them inside a text, alone and after a blank."""

from __future__ import annotations

import pytest

from common.errors import InvalidFieldError
from common.limits import MAX_BAD_WORD_BYTES
from common.params.sampling_params import SamplingParams
from common.text.tokenizer import bad_words_token_ids
from tests.unit.common.text.continuations import TOKENIZERS

WORDS = ["cat", "the cat", "é", "at on"]


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
def test_bad_words_are_spelled_as_inside_text(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    before = tokenizer.encode("a")
    for word in WORDS:
        spelled = [
            tokenizer.decode_stream(behind=before).push(ids)
            for ids in bad_words_token_ids([word], tokenizer, tokenizer.vocab_size)
        ]
        assert spelled == [word, f" {word}"]


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
def test_bad_word_tokens_occur_in_tokenized_text(kind: str) -> None:
    """The tokenizer splits a text with the word after a blank, and after another character, in the same way."""
    tokenizer = TOKENIZERS[kind]
    alone, behind_blank = bad_words_token_ids(["cat"], tokenizer, tokenizer.vocab_size)
    for text, ids in (("a\ncat", alone), ("a cat", behind_blank)):
        assert tuple(tokenizer.encode(text)[-len(ids) :]) == ids


def test_repeated_bad_word_gives_each_sequence_once() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    once = bad_words_token_ids(["cat"], tokenizer, tokenizer.vocab_size)
    assert bad_words_token_ids(["cat", "cat"], tokenizer, tokenizer.vocab_size) == once


def test_bad_word_may_need_one_token_per_byte() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    word = "\N{GRINNING FACE}" * (MAX_BAD_WORD_BYTES // 4)
    alone, behind_blank = bad_words_token_ids([word], tokenizer, tokenizer.vocab_size)
    assert (len(alone), len(behind_blank)) == (MAX_BAD_WORD_BYTES, MAX_BAD_WORD_BYTES + 1)
    SamplingParams(bad_words_token_ids=(alone, behind_blank))


def test_bad_word_with_tokens_unknown_to_model_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match=r"sampling_params\.bad_words\[0\] has a part"):
        bad_words_token_ids(["cat"], TOKENIZERS["sentencepiece"], 5)
