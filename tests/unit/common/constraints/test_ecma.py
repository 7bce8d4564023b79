"""Expressions of `pattern` match as in ECMA-262, or are refused."""

from __future__ import annotations

import random
import re

import pytest

from common.constraints import ecma, library
from tests.hostile_schemas import PATTERNS
from tests.schema_checks import of_python
from tests.unit.common.constraints.test_json_schema import accepted

# Characters on which dialects of expressions differ, and some on which they agree.
SIGNS = 'abcx10A_-+&~[]"\\/#,. \t\r\n\x0b\x01\x7f\x85\xa0\u2028\u2029\ufeffé😀Ä'


def texts(count: int) -> list[str]:
    rnd = random.Random(1)
    return ["", *SIGNS, *("".join(rnd.choices(SIGNS, k=rnd.randint(2, 4))) for _ in range(count))]


@pytest.mark.parametrize("pattern", [each for each in PATTERNS if r"\p" not in each.lower()])
def test_rewritten_expression_matches_as_ecma_262(pattern: str) -> None:
    try:
        rewritten = ecma.rewritten(pattern)
    except ecma.ExpressionError:
        return
    expected = of_python(pattern)
    for text in texts(60):
        assert library.is_match(rewritten, text) == bool(expected.search(text)), text


@pytest.mark.parametrize(
    "pattern", [r"^[^\"]$", r"^[^\\]$", r"^[^/\\]$", r'^[^<>"]$', r'^[^" ]$', r"^[a-z\x00-\x1f]$", r'^[^"\n]$']
)
def test_class_with_all_control_characters_lets_no_quote_through(pattern: str) -> None:
    """A quote must be escaped in an answer, since it would end the string."""
    expected = of_python(pattern)
    # This character occurs in answers only as an escape.
    signs = SIGNS.replace("\x7f", "")
    found = accepted({"type": "string", "pattern": pattern}, signs)
    assert found == [sign for sign in signs if expected.search(sign)]


@pytest.mark.slow
def test_random_classes_match_as_ecma_262() -> None:
    rnd = random.Random(7)
    items = [
        "a",
        "-",
        "&",
        "&&",
        "--",
        "~~",
        "[",
        r"\d",
        r"\w",
        r"\s",
        r"\S",
        r"\D",
        r"\W",
        "0-9",
        r"\\",
        '"',
        r"\]",
        ".",
        "^",
        r"\x00-\x1f",
        "a-c",
    ]
    tried = 0
    while tried < 40:
        pattern = f"^[{'^' * rnd.randint(0, 1)}{''.join(rnd.choices(items, k=rnd.randint(1, 4)))}]$"
        try:
            rewritten, expected = ecma.rewritten(pattern), of_python(pattern)
        except (ecma.ExpressionError, re.error):
            continue
        tried += 1
        for sign in SIGNS:
            assert library.is_match(rewritten, sign) == bool(expected.search(sign)), (pattern, sign)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("a(?=b)", "look-around"),
        ("a(?!b)", "look-around"),
        ("(?<=a)b", "look-around"),
        ("(?<!a)b", "look-around"),
        (r"(a)\1", "back reference"),
        (r"(?<n>a)\k<n>", "back reference"),
        (r"\bx", "word boundary"),
        (r"x\B", "word boundary"),
        ("(?i)abc", "no group"),
        ("(?i:a)", "no group"),
        ("(?x)a b", "no group"),
        ("(?s).", "no group"),
        ("(?P<n>a)", "no group"),
        ("(?>a)", "no group"),
        ("[[:alpha:]]", "']' without"),
        ("[a[b]]", "']' without"),
        ("[]a]", "class without a character"),
        (r"\Aa\z", "no escape"),
        (r"a\Z", "no escape"),
        (r"\e", "no escape"),
        (r"\x4", "no escape"),
        (r"\u{110000}", "no character"),
        (r"\ud800", "no character"),
        ("a++", "repeats nothing"),
        ("a**", "repeats nothing"),
        ("^*", "repeats nothing"),
        ("*a", "repeats nothing"),
        ("(*a)", "repeats nothing"),
        ("a|*", "repeats nothing"),
        ("^}$", "'}' without"),
        ("a]", "']' without"),
        ("a{", "begins no quantifier"),
        ("a{,2}", "begins no quantifier"),
        ("a{2,1}", "wrong order"),
        ("[z-a]", "wrong order"),
        (r"[a-\d]", "more than a character"),
        (r"[\w-.]", "more than a character"),
        ("(a", "'(' without"),
        ("a)", "')' without"),
        ("[a", "'[' without"),
        ("(?<n>a)(?<n>b)", "has been used"),
        ("(?<1>a)", "no name"),
        (r"\p{Nonsense}", "Unicode property"),
        (r"\pL", "Unicode property"),
        (r"\p{letter}", "Unicode property"),
        ("\\", "no escape"),
        ("(" * 200 + ")" * 200, "nested too deeply"),
        (r"\x00", "cannot be generated"),
    ],
)
def test_unsupported_expression_is_refused_by_name(pattern: str, said: str) -> None:
    with pytest.raises(ecma.ExpressionError, match=re.escape(said)):
        ecma.rewritten(pattern)
