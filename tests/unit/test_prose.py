"""The prose check finds a violation of each of its rules, and none in valid prose."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.check_prose import num_markers, problems


def found(source: str, folder: Path) -> list[str]:
    path = folder / "a.py"
    path.write_text(source)
    return [line.removeprefix(f"{path}:") for line in problems(path)]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ('"""What this is."""', "docstring begins with 'What'; begin with a verb or a noun"),
        ('def f():\n    """Whether it works."""', "docstring begins with 'Whether'; begin with a verb or a noun"),
        ('class A:\n    """Those that wait."""', "docstring begins with 'Those'; begin with a verb or a noun"),
        ('def is_open() -> bool:\n    """Says if."""', 'otherwise than with "True if"'),
        (
            'class A:\n    @property\n    def open(self) -> bool:\n        """Says if."""',
            'otherwise than with "True if"',
        ),
        ('def cancel() -> bool:\n    """Cancels it."""', "does not say when the function returns True or False"),
        ('option("--a", help="number of things.")', "is not a sentence"),
        ('option("--a", help="Number of things")', "is not a sentence"),
        ('log.info("Worker up")', "is not a phrase"),
        ('log.warning("worker is up.")', "is not a phrase"),
        ('def _drop(x):\n    """Drops it."""\n    return x', "says no more than the name"),
        (
            'class A:\n    @property\n    def p(self):\n        """See B."""\n        return 1',
            "says no more than the name",
        ),
        (f'"""{"Word " * 26}"""', "has 26 words; at most 25"),
        (f'"""{"Word " * 26}.\n\nMore."""', "at most 25"),
        ('raise ValueError("a key is no string")', "has 'is no': say that it is not one"),
        ('raise ValueError(f"{path}: these are no numbers")', "has 'are no': say that it is not one"),
    ],
)
def test_prose_rule_violation_is_found(source: str, problem: str, tmp_path: Path) -> None:
    [line] = found(source, tmp_path)
    assert problem in line


@pytest.mark.parametrize(
    "source",
    [
        '"""A list of things."""',
        'def is_open() -> bool:\n    """True if it is open."""',
        'def cancel() -> bool:\n    """Cancels it; False when it has ended."""',
        'option("--a", help="Number of things. Default: 1.")',
        'log.info("worker up", worker=1)\nlog.info("API keys reloaded")\nother.info("Worker up.")',
        'raise ValueError("a key is not a string; there is no other, and it is no longer there")',
        'print("0 is no limit")',
        'def shape(self):\n    """See B."""\n    return 1',
        'class A:\n    @property\n    def _shape(self):\n        """int64 [N]."""\n        return 1',
        f'"""{"Word " * 24}end.\n\n{"More " * 30}"""',
    ],
)
def test_valid_prose_is_accepted(source: str, tmp_path: Path) -> None:
    assert found(source, tmp_path) == []


def test_marker_words_of_docstrings_and_comments_are_counted() -> None:
    source = '"""Nobody waits, and nothing brings it."""\nx = "nobody"  # Likewise, as of now.\n# noqa: nothing\n'
    assert num_markers([source, source]) == 10
