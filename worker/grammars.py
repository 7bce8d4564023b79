"""Grammars of a worker's sequences, each compiled once, off the thread that computes steps.

What a matcher allows is a function of its grammar and the tokens that it has been given, so every sequence starts with
a copy of the compiled one.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Final

from common.constraints import big_stack, library
from common.text.tokenizer import Tokenizer, TokenizerError

# Compiled grammars that are kept; one takes up to some megabytes.
_MOST_KEPT: Final = 128
_COMPILE_THREADS: Final = 2
# Texts that grammars force whose tokens are kept: keys of objects mostly.
_MOST_TEXTS: Final = 1024
# Bytes of letters, digits and blanks; of other alphabets any that are no ASCII.
_WORD: Final = re.compile(rb"[A-Za-z0-9 \x80-\xff]+")


class GrammarError(Exception):
    """A grammar does not compile; one line."""


class Grammars:
    """Compiles grammars, and keeps them. For any thread.

    Args:
        vocab: of the model.
        encode: gives the tokens of a text behind other text; None where nobody asks for any.
        words: by id, 1 for a token that is made of letters, digits and blanks alone.
    """

    def __init__(
        self, vocab: library.Vocabulary, encode: Callable[[str], list[int]] | None = None, words: bytes = b""
    ) -> None:
        self._vocab = vocab
        self._words = words
        self._usual = lru_cache(_MOST_TEXTS)(encode or _no_tokens)
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Future[library.Matcher]] = OrderedDict()
        self._threads = ThreadPoolExecutor(_COMPILE_THREADS, "grammars")

    @property
    def num_ids(self) -> int:
        """Token ids that masks are about."""
        return self._vocab.vocab_size

    def begin(self, text: str) -> Future[library.Matcher]:
        """Begins to compile a grammar, or finds it; gives a matcher that must not be changed.

        The future raises GrammarError where it does not compile.
        """
        with self._lock:
            if text in self._kept:
                self._kept.move_to_end(text)
                return self._kept[text]
            while len(self._kept) >= _MOST_KEPT:
                self._kept.popitem(last=False)
            made = self._kept[text] = self._threads.submit(self._compile, text)
            return made

    def is_word(self, token: int) -> bool:
        """True if a token is known to be letters, digits and blanks alone, which hardly ever end a text."""
        return token < len(self._words) and self._words[token] == 1

    def usual_tokens(self, text: bytes) -> list[int]:
        """Tokens into which a text is cut as a rule, up to bytes that are none."""
        try:
            return self._usual(text.decode()) if text else []
        except UnicodeDecodeError as error:
            return self._usual(text[: error.start].decode())
        except TokenizerError:
            return []

    def forget(self, text: str, compiled: Future[library.Matcher]) -> None:
        """Has a grammar compiled anew when it is needed next, if it is still kept as `compiled`.

        Copies of a matcher share what they find out about its expressions: it counts for all of them, and once it is
        too much all of them fail.
        """
        with self._lock:
            if self._kept.get(text) is compiled:
                del self._kept[text]

    def _compile(self, text: str) -> library.Matcher:
        compiling = big_stack.begin(lambda: library.compiled(text, self._vocab, library.RUNNING), "grammar")
        matcher = compiling.result()
        if matcher.is_error():
            lines = str(matcher.get_error()).splitlines() or ["no reason is known"]
            raise GrammarError(f"the grammar does not compile: {lines[0][:300]}")
        return matcher


def model_grammars(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> Grammars:
    """Grammars over a model's tokens, of which no special one comes about as text.

    Args:
        tokenizer: of the model.
        vocab_size: ids of the model.
        eos_token_ids: at least one.
    """
    tokens = tokenizer.token_bytes()
    special = {token_id: name for token_id, name in tokenizer.added_tokens.items() if token_id < len(tokens)}
    for token_id, name in special.items():
        tokens[token_id] = name.encode()
    tokens += [b""] * (vocab_size - len(tokens))
    ends = {token_id for token_id in eos_token_ids if token_id < len(tokens)}
    words = bytes(_WORD.fullmatch(token) is not None for token in tokens)
    longest = max((len(text) for token_id, text in enumerate(tokens) if token_id not in special), default=1)
    vocab = library.vocabulary(tokens, {*special, *ends}, ends, library.text_slices(longest))
    return Grammars(vocab, tokenizer.encode_inside, words)


def _no_tokens(text: str) -> list[int]:
    return []


def grammars_to_check(tokenizer: Tokenizer, eos_token_ids: frozenset[int]) -> Grammars:
    """Grammars of an engine whose ranks have their own: it finds faults, and waits until one is known to compile."""
    return Grammars(library.byte_vocabulary(tokenizer.added_tokens, eos_token_ids))
