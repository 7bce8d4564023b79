"""Commit subjects have the form `area: imperative subject` and are short."""

from __future__ import annotations

import pytest

from scripts.check_subject import problem


@pytest.mark.parametrize(
    "message",
    [
        "router: retry lost calls",
        "router/scheduling, worker: retry lost calls\n\nBecause. " + "Long. " * 40,
        'Revert "' + "x" * 80,
    ],
)
def test_subject_in_the_form_is_accepted(message: str) -> None:
    assert problem(message) == ""


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("router: " + "x" * 65, "has 73 characters"),
        ("Retry lost calls", "`area: imperative subject`"),
        ("Router: retry lost calls", "`area: imperative subject`"),
        ("router: retry lost calls.", "without a full stop"),
        ("", "`area: imperative subject`"),
    ],
)
def test_other_subject_is_refused(message: str, said: str) -> None:
    assert said in problem(message)
