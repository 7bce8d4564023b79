"""Token sequences of words that an answer must not contain."""

from __future__ import annotations

from collections.abc import Iterable

from common.errors import InvalidFieldError
from common.limits import MAX_BAD_WORD_TOKENS
from common.params.sampling_checks import TokenSequences
from common.text.tokenizer import Tokenizer, TokenizerError, check_text_ids


def bad_words_token_ids(words: Iterable[str], tokenizer: Tokenizer, vocab_size: int) -> TokenSequences:
    """Returns the token sequences of each word, alone and behind a blank as inside a text, without duplicates.

    Raises:
        InvalidFieldError: a word cannot be tokenized, has no or too many tokens, or a token that the model lacks.
    """
    found = dict[tuple[int, ...], None]()
    for i, word in enumerate(words):
        for text in (word, f" {word}"):
            found[_token_ids(f"sampling_params.bad_words[{i}]", text, tokenizer, vocab_size)] = None
    return tuple(found)


def _token_ids(path: str, text: str, tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    try:
        ids = tokenizer.encode_inside(text)
    except (TokenizerError, UnicodeError) as error:
        raise InvalidFieldError(path, f"cannot be tokenized: {error}", "another word") from None
    if not 1 <= len(ids) <= MAX_BAD_WORD_TOKENS:
        raise InvalidFieldError(path, f"has {len(ids)} tokens", f"1 to {MAX_BAD_WORD_TOKENS}")
    check_text_ids(path, ids, vocab_size)
    return tuple(ids)
