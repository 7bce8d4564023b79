"""Texts that a command reads, and their division into requests."""

from __future__ import annotations

import io
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.cli.client.texts import Source, parts_of, shown
from common.cli.core.errors import CommandError


@given(st.lists(st.text(max_size=40), max_size=30), st.integers(1, 8), st.integers(0, 40), st.integers(1, 400))
def test_request_parts_hold_all_texts_in_order_within_bound(
    texts: list[str], most: int, beside: int, most_bytes: int
) -> None:
    parts = [list(part) for part in parts_of(texts, most, beside, most_bytes)]
    assert [text for part in parts for text in part] == texts
    assert all(1 <= len(part) <= most for part in parts)
    for part in parts:
        assert len(part) == 1 or sum(len(text.encode()) + beside for text in part) <= most_bytes


def test_request_parts_are_as_large_as_allowed() -> None:
    assert [len(part) for part in parts_of(["a"] * 10, 4)] == [4, 4, 2]
    # Each text has 32 bytes of framing in its request.
    assert [len(part) for part in parts_of(["abcd"] * 5, 9, 4, 80)] == [2, 2, 1]


def test_text_lines_accept_any_newline(tmp_path: Path) -> None:
    path = tmp_path / "texts"
    path.write_bytes("one\r\ntwo\u2028three\nfour".encode())
    assert Source(str(path)).texts([], "texts") == ["one", "two\u2028three", "four"]
    path.write_text('"a\\nb"\n"c"\n')
    assert Source(str(path), json_lines=True).texts([], "texts") == ["a\nb", "c"]


def test_texts_default_to_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    for source in (Source(), Source("-")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\nb\n")))
        assert source.texts([], "texts") == ["a", "b"]
    assert Source().texts(["x\ny"], "texts") == ["x\ny"]


@pytest.mark.parametrize(
    ("content", "json_lines", "problem"),
    [
        (b"", False, "no texts: .* is empty"),
        (b"a\n\nb", False, "line 2 of .* is empty"),
        (b"a\n\xff", False, "line 2 of .* is not valid UTF-8"),
        (b"a", True, "line 1 of .* is not a JSON string"),
        (b'"a"\n{"a": 1}', True, "line 2 of .* is not a JSON string"),
        (b'"\\ud800"', True, "line 1 of .* is not valid UTF-8"),
    ],
)
def test_invalid_text_line_is_named(tmp_path: Path, content: bytes, json_lines: bool, problem: str) -> None:
    path = tmp_path / "texts"
    path.write_bytes(content)
    with pytest.raises((CommandError, click.UsageError), match=problem):
        Source(str(path), json_lines=json_lines).texts([], "texts")


def test_arguments_that_cannot_be_sent_are_named(tmp_path: Path) -> None:
    for source in (Source(str(tmp_path)), Source(json_lines=True)):
        with pytest.raises(click.UsageError, match="not both"):
            source.texts(["a"], "texts")
    with pytest.raises(CommandError, match="argument 2 is empty"):
        Source().texts(["a", ""], "texts")
    # Python represents a byte that is not valid UTF-8 in an argument as a lone surrogate.
    with pytest.raises(CommandError, match="argument 1 is not valid UTF-8"):
        Source().texts(["\udcff"], "texts")
    with pytest.raises(CommandError, match="cannot be read: No such file"):
        Source(str(tmp_path / "none")).texts([], "texts")


def test_source_fields_hold_given_options() -> None:
    assert Source().fields == {}
    assert Source(model="m", priority="low").fields == {"model": "m", "priority": "PRIORITY_LOW"}


def test_table_text_is_one_escaped_line() -> None:
    assert shown("a\n\x1b[2J\x9b\u2028b") == r'"a\n\u001b[2J\u009b\u2028b"'
    assert len(shown("x" * 1000)) < 120
