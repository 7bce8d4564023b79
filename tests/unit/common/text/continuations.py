"""Prompts, answers and stop strings with their text by the library's decoder: the reference for streams."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from common.text.tokenizer import Tokenizer
from tests.unit.common.text.support import KINDS, backend, files

TOKENIZERS = {kind: Tokenizer.from_files(files(kind)) for kind in KINDS}
WORDS = ("the cat", "sat", " on", "  ", "é", "中文", "😀", "▁", "\r\n", "a")
STOPS = ("c", " c", "at", "cat ", " ", "  ", "é", "t o", "文", "\n")


@dataclass(frozen=True)
class Continuation:
    """One answer, delivered in runs of `sizes` tokens and a last run with the rest.

    Attributes:
        kind: kind of tokenizer, one of `KINDS`.
        prompt: token ids; at least one.
        answer: token ids.
        sizes: sizes of the runs.
        stops: stop strings.
    """

    kind: str
    prompt: list[int]
    answer: list[int]
    sizes: list[int]
    stops: tuple[str, ...]

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of `kind`."""
        return TOKENIZERS[self.kind]

    @property
    def runs(self) -> list[list[int]]:
        """The answer in non-empty runs."""
        runs, rest = [], self.answer
        for size in self.sizes:
            runs.append(rest[:size])
            rest = rest[size:]
        return [run for run in (*runs, rest) if run]

    @property
    def stopped(self) -> str:
        """The text before the stop string that is complete first; if two end together, before the longer one."""
        text = continuation(self.kind, self.prompt, self.answer)
        for end in range(1, len(text) + 1):
            matched = [stop for stop in self.stops if text[:end].endswith(stop)]
            if matched:
                return text[: end - max(map(len, matched))]
        return text


def continuation(kind: str, prompt: list[int], answer: list[int]) -> str:
    """The text that the answer adds to the prompt's last five tokens.

    If the prompt ends with half a character, visible text separates them, because the answer must not change the
    prompt.
    """
    library, tail = backend(kind), prompt[-5:]
    if library.decode(tail).endswith("\ufffd"):
        letter = library.token_to_id("a")
        assert letter is not None
        tail = [*tail, letter]
    before, whole = library.decode(tail), library.decode([*tail, *answer])
    assert whole.startswith(before)
    return whole[len(before) :]


def _ids(kind: str, *, halves: bool) -> st.SearchStrategy[int]:
    """Any ids, including unused ones; byte tokens of half a character only with `halves`.

    The library replaces whole characters of invalid UTF-8, see `common.text.detokenizer`.
    """
    names = {id: token for token, id in backend(kind).get_vocab().items()}
    ids = range(TOKENIZERS[kind].vocab_size + 3)
    return st.sampled_from([id for id in ids if halves or not "<0x80>" <= names.get(id, "") <= "<0xFF>"])


def _tokens(kind: str, *, halves: bool) -> st.SearchStrategy[list[int]]:
    """Tokens of texts, mixed with other ids."""
    texts = st.lists(st.sampled_from(WORDS), max_size=3).map(lambda words: TOKENIZERS[kind].encode("".join(words)))
    special = st.lists(st.sampled_from(sorted(TOKENIZERS[kind].special_ids)), max_size=6)
    pieces = st.lists(texts | special | st.lists(_ids(kind, halves=halves), max_size=3), max_size=5)
    return pieces.map(lambda pieces: [id for piece in pieces for id in piece])


@st.composite
def continuations(draw: st.DrawFn) -> Continuation:
    """Any prompt and answer for every kind of tokenizer."""
    kind = draw(st.sampled_from(KINDS))
    return Continuation(
        kind,
        draw(_tokens(kind, halves=True).filter(len)),
        draw(_tokens(kind, halves=kind == "byte_level").filter(len)),
        draw(st.lists(st.integers(0, 4), max_size=8)),
        tuple(draw(st.lists(st.sampled_from(STOPS), max_size=2, unique=True))),
    )
