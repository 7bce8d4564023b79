"""The library that grammars are compiled by, llguidance: the only file that imports it.

Its matchers never raise for what a grammar or a token does: they enter an error state, which they do not leave.
Nothing in it reads a clock; what bounds its work is fuel, which depends on what is warm. So workers have ten times the
fuel that a grammar is admitted with.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import cache
from importlib.metadata import version
from typing import Final

import llguidance

# Part of what an answer depends on: masks are this version's.
ENGINE: Final = f"llguidance {version('llguidance')}"
Matcher = llguidance.LLMatcher
Vocabulary = llguidance.LLTokenizer


# Of every grammar: forced text may be split into tokens in any way, as every other text.
HEADER: Final = '%llguidance {"no_forcing": true}\n'


def _limits(factor: int) -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(
        max_items_in_row=2_000 * factor,
        initial_lexer_fuel=1_000_000 * factor,
        step_lexer_fuel=200_000 * factor,
        step_max_items=50_000 * factor,
        max_lexer_states=25_000 * factor,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


# Of a grammar that is checked, and of one that an answer is made by.
ADMISSION: Final = _limits(1)
RUNNING: Final = _limits(10)


# Of a vocabulary of bytes: the token behind them.
_PROBE_END: Final = 256
# Of texts within quotes, in characters: more take memory and time when a vocabulary is made, and a look for each mask.
_SLICED_LENGTHS: Final = (6, 10, 14, 20, 28, 40)


class _Tokens:
    """Tokens as the library asks for them; nothing is tokenized, since no text is forced."""

    def __init__(self, tokens: list[bytes], special: Collection[int], eos_token_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = list(special)
        self.eos_token_id = eos_token_id
        self.bos_token_id: int | None = None

    def __call__(self, text: bytes | str) -> list[int]:
        raise RuntimeError("no grammar forces text, so none is tokenized")


def vocabulary(
    tokens: list[bytes],
    special: Collection[int],
    eos_token_ids: Collection[int],
    slices: list[str] | None = None,
) -> Vocabulary:
    """A vocabulary: the bytes of each token, the names of special ones; grammars may name these, no text gives them.

    Args:
        tokens: by id; empty for an id that there is not.
        special: ids of special tokens.
        eos_token_ids: those that may end what a grammar has accepted.
        slices: expressions of texts that are often allowed all together or not at all, which then takes one look. The
            masks are the same with any. None for the library's own.
    """
    ends = sorted(eos_token_ids)
    made = llguidance.TokenizerWrapper(_Tokens(tokens, special, ends[0]))
    return llguidance.LLTokenizer(made, len(tokens), ends, slices)


def text_slices(longest: int) -> list[str]:
    """Slices for tokens up to so many bytes: blanks, and texts within JSON's quotes, by their lengths.

    Where a text may go on for at least so many characters, all tokens of a slice are allowed. The library's own slices
    are of 10 and 30 characters and of any number. Since those of any number are never allowed as a whole where there is
    a `maxLength`, the longest has a slice of its own.
    """
    blanks, text = llguidance.LLTokenizer.json_slices()[0], r'[^"\\\x00-\x1F\x7F]'
    lengths = [*(length for length in _SLICED_LENGTHS if length < longest), longest]
    return [blanks, *(f"{text}{{1,{length}}}" for length in lengths), f"{text}+"]


def byte_vocabulary(special: Mapping[int, str], eos_token_ids: Collection[int]) -> Vocabulary:
    """A vocabulary to check grammars with: single bytes, and special tokens with the ids that they have."""
    size = max((*special, *eos_token_ids), default=-1) + 1
    taken = {*special, *eos_token_ids}
    free = [i for i in range(size + 256) if i not in taken][:256]
    tokens = [b""] * max(size, free[-1] + 1)
    for value, token_id in enumerate(free):
        tokens[token_id] = bytes([value])
    for token_id, name in special.items():
        tokens[token_id] = name.encode()
    return vocabulary(tokens, taken, eos_token_ids)


def compiled(text: str, vocab: Vocabulary, limits: llguidance.LLParserLimits) -> Matcher:
    """A matcher at the beginning of a grammar, which has made its first mask: some faults show only there.

    To be called on a thread with a large stack (`big_stack`); the matcher may be used and copied on any.
    """
    matcher = Matcher(vocab, text, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


@cache
def _probe_vocabulary() -> Vocabulary:
    return byte_vocabulary({}, {_PROBE_END})


def can_begin(schema: str) -> bool:
    """True if an object that satisfies a schema can have a first property, or if that cannot be told.

    Args:
        schema: of objects that have one, as the library gets it.
    """
    matcher = compiled(f"{HEADER}start: %json {schema}\n", _probe_vocabulary(), ADMISSION)
    if matcher.is_error():
        return "Unsatisfiable" not in matcher.get_error()
    matcher.consume_token(ord("{"))
    mask = matcher.compute_logit_bias()
    return not matcher.is_error() and bool(mask[ord('"')])


def is_match(expression: str, text: str) -> bool:
    """True if an expression is found in a text, as `pattern` of a schema would, or if that cannot be told."""
    return "Unsatisfiable" not in _fault_of({"type": "string", "pattern": expression, "const": text})


def has_longer(expression: str, length: int) -> bool:
    """True if an expression is found in a text of more than so many characters."""
    return not _fault_of({"type": "string", "pattern": expression, "minLength": length + 1})


def _fault_of(schema: Mapping[str, object]) -> str:
    grammar = f"{HEADER}start: %json {json.dumps(schema, ensure_ascii=False)}\n"
    return str(compiled(grammar, _probe_vocabulary(), ADMISSION).get_error())


def lark_of_regex(expression: str) -> str:
    """The expression as a grammar writes it between slashes."""
    return llguidance.regex_to_lark(expression, "")
