"""The library that grammars are compiled by, llguidance: the only file that imports it.

Its matchers never raise for what a grammar or a token does: they enter an error state, which they do not leave.
The library reads no clock: fuel bounds its work. How much fuel a grammar takes depends on what is warm. So workers have
ten times the fuel that a grammar is admitted with.
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


# Begins every grammar: forced text may be split into tokens in any way, like all other text.
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


# Limits for checking a grammar, and for generating with it.
ADMISSION: Final = _limits(1)
RUNNING: Final = _limits(10)


# Id of the end token in the vocabulary of 256 bytes.
_PROBE_END: Final = 256
# Characters of the slices for quoted texts. Each further slice costs memory, time at the start, and a look per mask.
_SLICED_LENGTHS: Final = (6, 10, 14, 20, 28, 40)


class _LibraryTokens:
    """Tokens in the form that the library asks for. It never tokenizes, since no grammar forces text."""

    def __init__(self, tokens: list[bytes], special: Collection[int], eos_token_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = list(special)
        self.eos_token_id = eos_token_id
        self.bos_token_id: int | None = None

    def __call__(self, text: bytes | str) -> list[int]:
        raise RuntimeError("no grammar forces text, so none is tokenized")


def vocabulary(
    tokens: list[bytes], special: Collection[int], eos_token_ids: Collection[int], slices: list[str] | None = None
) -> Vocabulary:
    """Makes a vocabulary from the bytes of each token. Grammars may name special tokens; no text matches them.

    Args:
        tokens: by id; empty for an id that there is not.
        special: ids of special tokens.
        eos_token_ids: those that may end what a grammar has accepted.
        slices: expressions. Tokens that match one are often all allowed or all forbidden, which then takes one look.
            Masks are the same with any slices. None for the library's own.
    """
    ends = sorted(eos_token_ids)
    made = llguidance.TokenizerWrapper(_LibraryTokens(tokens, special, ends[0]))
    return llguidance.LLTokenizer(made, len(tokens), ends, slices)


def text_slices(longest: int) -> list[str]:
    """Slices for tokens of at most `longest` bytes: blanks, and texts within JSON's quotes by length.

    If a text may continue for a slice's length, all tokens of the slice are allowed. The library's own slices have 10,
    30 and any number of characters. With a `maxLength` the last is never allowed as a whole, so `longest` has a slice
    of its own.
    """
    blanks, text = llguidance.LLTokenizer.json_slices()[0], r'[^"\\\x00-\x1F\x7F]'
    lengths = [*(length for length in _SLICED_LENGTHS if length < longest), longest]
    return [blanks, *(f"{text}{{1,{length}}}" for length in lengths), f"{text}+"]


def byte_vocabulary(special: Mapping[int, str], eos_token_ids: Collection[int]) -> Vocabulary:
    """A vocabulary to check grammars with: single bytes, and special tokens with their ids."""
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
    """Compiles a grammar and computes its first mask, since some faults show only there.

    Call it on a thread with a large stack (`big_stack`). Any thread may use and copy the matcher.
    """
    matcher = Matcher(vocab, text, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


@cache
def _probe_vocabulary() -> Vocabulary:
    return byte_vocabulary({}, {_PROBE_END})


def can_begin(schema: str) -> bool:
    """True if an object that satisfies a schema can have a first property, or if that is unknown.

    Args:
        schema: in the library's form, of objects with at least one property.
    """
    matcher = compiled(f"{HEADER}start: %json {schema}\n", _probe_vocabulary(), ADMISSION)
    if matcher.is_error():
        return "Unsatisfiable" not in matcher.get_error()
    matcher.consume_token(ord("{"))
    mask = matcher.compute_logit_bias()
    return not matcher.is_error() and bool(mask[ord('"')])


def is_match(expression: str, text: str) -> bool:
    """True if an expression matches within a text, as `pattern` of a schema does, or if that is unknown."""
    return "Unsatisfiable" not in _fault_of({"type": "string", "pattern": expression, "const": text})


def has_longer(expression: str, length: int) -> bool:
    """True if an expression matches within some text of more than `length` characters."""
    return not _fault_of({"type": "string", "pattern": expression, "minLength": length + 1})


def _fault_of(schema: Mapping[str, object]) -> str:
    grammar = f"{HEADER}start: %json {json.dumps(schema, ensure_ascii=False)}\n"
    return str(compiled(grammar, _probe_vocabulary(), ADMISSION).get_error())


def lark_of_regex(expression: str) -> str:
    """The expression as a grammar writes it between slashes."""
    return llguidance.regex_to_lark(expression, "")
