"""WordWrap breaks lines as textwrap does, however the text is cut into pieces."""

from __future__ import annotations

import textwrap

from hypothesis import given
from hypothesis import strategies as st
from prompt_toolkit.utils import get_cwidth

from common.cli.core.word_wrap import WordWrap


def wrapped(text: str, width: int, pieces: int = 1) -> str:
    wrap = WordWrap(width, get_cwidth)
    size = max(1, len(text) // pieces)
    return "".join(wrap.feed(text[i : i + size]) for i in range(0, len(text), size)) + wrap.end()


WORDS = st.lists(st.text("abcdefgh", min_size=1, max_size=12), max_size=40)
TEXTS = st.text("ab \t\n日é😀.", max_size=120)


@given(WORDS, st.integers(1, 30), st.integers(1, 50))
def test_words_wrap_as_in_textwrap(words: list[str], width: int, pieces: int) -> None:
    text = " ".join(words)
    options = {"break_on_hyphens": False, "break_long_words": True}
    expected = textwrap.wrap(text, width, **options)  # type: ignore[arg-type]
    # textwrap begins a word longer than the line on the line of the previous word; WordWrap does not.
    if all(len(word) <= width for word in words):
        assert wrapped(text, width, pieces).split("\n") == (expected or [""])


@given(TEXTS.map(lambda text: text.replace("\t", " ")), st.integers(2, 20), st.integers(1, 40))
def test_wrapped_lines_fit_the_width_and_keep_all_text(text: str, width: int, pieces: int) -> None:
    shown = wrapped(text, width, pieces)
    assert "".join(shown.split()) == "".join(text.split())
    for line in shown.rstrip(" \t").split("\n"):
        assert sum(map(get_cwidth, line.rstrip())) <= width
    assert shown == wrapped(text, width, len(text) or 1)


@given(TEXTS)
def test_wide_terminal_shows_text_unchanged(text: str) -> None:
    assert [line.rstrip() for line in wrapped(text, 10_000, 7).split("\n")] == [
        line.rstrip() for line in text.split("\n")
    ]


def test_word_at_line_start_is_shown_at_once() -> None:
    wrap = WordWrap(10)
    assert [wrap.feed(char) for char in "abc de"] == ["a", "b", "c", "", "", ""]
    assert wrap.feed("fghi") == ""
    assert wrap.feed("jk") == "\ndefghijk"
    assert wrap.feed("lmnop") == "lm\nnop"
    assert wrap.end() == ""
