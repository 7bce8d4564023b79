"""Grammars of a worker's sequences, each compiled once, off the thread that computes steps.

A matcher's masks depend only on its grammar and the tokens that it has been given, so every sequence starts with a copy
of the compiled matcher. Copies share the library's data about its expressions, which grows with use. The library does
not tell the size of that data, so bytes are estimated from its CPU time (`_BYTES_PER_SECOND`). All grammars that are
kept or in use have at most MAX_GRAMMARS_BYTES together.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Final, TypeAlias
from weakref import WeakKeyDictionary

from common.constraints import big_stack, library
from common.limits import MAX_COMPILED_GRAMMARS, MAX_FORCED_TEXTS, MAX_GRAMMARS_BYTES
from common.text.tokenizer import Tokenizer, TokenizerError

# Most bytes that a second of the library's CPU time adds to its data: 30 to 220 MB for thirteen hostile grammars.
_BYTES_PER_SECOND: Final = 250e6
# Bytes charged for each grammar, besides its text and the CPU time spent on it.
_LEAST_BYTES: Final = 1 << 16
# If all grammars together take too much memory, one above 1 / _LARGE_SHARE of the limit is compiled again for its
# sequences.
_LARGE_SHARE: Final = 8
_COMPILE_THREADS: Final = 2
# Letters, digits and blanks, as bytes. Every byte of another alphabet's characters counts as a letter.
_WORD: Final = re.compile(rb"[A-Za-z0-9 \x80-\xff]+")

Compiled: TypeAlias = "Future[library.Matcher]"


class GrammarError(Exception):
    """A grammar does not compile; one line."""


class Grammars:
    """Compiles grammars, and keeps them. Any thread may call it.

    Args:
        vocab: of the model.
        encode: tokenizes a text inside other text; None if forced text is never wanted.
        words: by id, 1 for a token of letters, digits and blanks alone.
        no_text: ids of tokens without text: special tokens, and those that end a sequence.
    """

    def __init__(
        self,
        vocab: library.Vocabulary,
        encode: Callable[[str], list[int]] | None = None,
        words: bytes = b"",
        no_text: Collection[int] = (),
    ) -> None:
        self._vocab = vocab
        self._words = words
        self._no_text = frozenset(no_text)
        # Texts have MAX_FORCED_TEXT_BYTES at most (worker/model/text_ahead.py).
        self._usual = lru_cache(MAX_FORCED_TEXTS)(encode or _no_tokens)
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[bytes, str], Compiled] = OrderedDict()
        # Bytes charged to each compiled grammar, while anything refers to it.
        self._bytes: WeakKeyDictionary[Compiled, float] = WeakKeyDictionary()
        self._threads = ThreadPoolExecutor(_COMPILE_THREADS, "grammars")

    @property
    def num_ids(self) -> int:
        """Number of token ids in a mask."""
        return self._vocab.vocab_size

    @property
    def num_bytes(self) -> float:
        """Estimated bytes of all compiled grammars, kept or in use."""
        return sum(self._bytes.values())

    def begin(self, text: str, salt: bytes = b"") -> Compiled:
        """Starts to compile a grammar, or finds it. The result is a matcher that must not be changed.

        The future raises GrammarError if the grammar does not compile.

        Args:
            text: of the grammar.
            salt: cache salt of the sequence. Sequences of another salt do not find the grammar, because a hit would
                reveal that it is in use.
        """
        with self._lock:
            key = salt, text
            if (found := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return found
            while len(self._kept) >= MAX_COMPILED_GRAMMARS:
                self._kept.popitem(last=False)
            made: Compiled = Future()
            self._kept[key], self._bytes[made] = made, _LEAST_BYTES + len(text)
        self._threads.submit(self._compile, text, made)
        return made

    def is_word(self, token: int) -> bool:
        """True if a token is letters, digits and blanks alone, which hardly ever end a text."""
        return token < len(self._words) and self._words[token] == 1

    def text_of(self, token: int) -> bytes | None:
        """The bytes of a token; None for a token without text."""
        return None if token in self._no_text else self._vocab.decode_bytes([token])

    def usual_tokens(self, text: bytes) -> list[int]:
        """The usual tokens of a text, up to the first byte that is not valid text."""
        try:
            return self._usual(text.decode()) if text else []
        except UnicodeDecodeError as error:
            return self._usual(text[: error.start].decode())
        except TokenizerError:
            return []

    def worked(self, compiled: Compiled, cpu_s: float) -> bool:
        """Charges a compiled grammar for CPU time that the library has spent on it.

        Returns:
            False if all grammars hold too much together and this one is large: its sequences should compile it anew.
        """
        with self._lock:
            own = self._bytes[compiled] = self._bytes.get(compiled, 0) + cpu_s * _BYTES_PER_SECOND
            # A grammar that no sequence uses is freed at once.
            while self.num_bytes > MAX_GRAMMARS_BYTES and self._kept:
                self._kept.popitem(last=False)
            return self.num_bytes <= MAX_GRAMMARS_BYTES or own * _LARGE_SHARE <= MAX_GRAMMARS_BYTES

    def forget(self, text: str, salt: bytes, compiled: Compiled) -> None:
        """Drops a kept grammar if it is still `compiled`, so that its next use compiles it anew.

        Copies of a matcher share their data about its expressions. Once the data exceeds the library's limit, all
        copies fail.
        """
        with self._lock:
            if self._kept.get((salt, text)) is compiled:
                del self._kept[salt, text]

    def _compile(self, text: str, made: Compiled) -> None:
        try:
            matcher, cpu_s = big_stack.begin(lambda: _timed(text, self._vocab), "grammar").result()
            if matcher.is_error():
                lines = str(matcher.get_error()).splitlines() or ["no reason is known"]
                raise GrammarError(f"the grammar does not compile: {lines[0][:300]}")
        except BaseException as error:
            made.set_exception(error)
        else:
            self.worked(made, cpu_s)
            made.set_result(matcher)


def _timed(text: str, vocab: library.Vocabulary) -> tuple[library.Matcher, float]:
    """A compiled grammar, and the CPU seconds that compiling it took."""
    begin = time.thread_time()
    return library.compiled(text, vocab, library.RUNNING), time.thread_time() - begin


def model_grammars(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> Grammars:
    """Grammars over a model's tokens. Special tokens never count as text.

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
    no_text = {*special, *ends}
    vocab = library.vocabulary(tokens, no_text, ends, library.text_slices(longest))
    return Grammars(vocab, tokenizer.encode_inside, words, no_text)


def _no_tokens(text: str) -> list[int]:
    return []


def grammars_to_check(tokenizer: Tokenizer, eos_token_ids: frozenset[int]) -> Grammars:
    """Grammars of an engine whose ranks have their own: it finds faults, and waits until a grammar compiles."""
    return Grammars(library.byte_vocabulary(tokenizer.added_tokens, eos_token_ids))
