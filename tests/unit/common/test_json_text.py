"""JSON of clients is accepted if the service can encode, write and nest it; other JSON is refused with the place."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.json_text import JsonError, end_of_value, json_value
from common.limits import MAX_JSON_LEVELS

# Texts of values that are refused at any place, with the error message.
BAD = {
    "first half": (r'"\ud800"', "half of a surrogate pair"),
    "second half": (r'"x\udfff"', "half of a surrogate pair"),
    "half before a letter": (r'"\ud83d\u0041"', "half of a surrogate pair"),
    "halves the other way": (r'"\uDE00\uD83D"', "half of a surrogate pair"),
    "half of three": (r'"\ud83d\ude00\ud83d"', "half of a surrogate pair"),
    "half in a name": (r'{"a\ud83d": 1}', "name with half of a surrogate pair"),
    "no number": ("NaN", "NaN is not a JSON number"),
    "infinity": ("-Infinity", "-Infinity is not a JSON number"),
    "beyond floats": ("1e999", "a number that is too large"),
    "below floats": ("-1.5e400", "a number that is too large"),
    "digits": ("1" * 4301, "a number of 4301 digits"),
    "negative digits": ("-" + "7" * 9000, "digits"),
    "lists": ("[" * 600 + "]" * 600, "nested too deeply"),
    "more lists": ("[" * 990 + "]" * 990, "nested too deeply"),
    "most lists": ("[" * 20_000 + "]" * 20_000, "nested too deeply"),
    "objects": ('{"a":' * 700 + "1" + "}" * 700, "nested too deeply"),
    "twice": ('{"b": 1, "a": 1, "b": 2}', "'b' stands twice"),
    "half twice": (r'{"\ud800": 1, "\ud800": 2}', "stands twice"),
    "open": ("[1", "is not valid JSON"),
    "control": ('"\x01"', "is not valid JSON"),
    "nothing": ("", "is not valid JSON"),
}
# Texts of unusual values that are accepted.
ODD = {
    "pair": r'"\ud83d\ude00"',
    "noncharacters": r'"\uffff\ufdcf\u0000"',
    "digits": "1" * 4300,
    "largest": "1.7976931348623157e308",
    "smallest": "1e-999",
    "lists": "[" * 250 + "]" * 250,
    "empty names": '{"": {"": ""}}',
    "half as text": r'"\\ud800"',
}


@pytest.mark.parametrize("name", BAD)
def test_bad_json_refused_with_place(name: str) -> None:
    text, said = BAD[name]
    for before, behind, place in (("", "", ""), ('{"a/b": [0, ', "]}", "/a~1b/1")):
        with pytest.raises(JsonError, match=said) as refused:
            json_value(before + text + behind)
        assert str(refused.value).isprintable()
        assert refused.value.place in (place, "")
        if "nested" not in said and "valid" not in str(refused.value):
            assert refused.value.place == place


@pytest.mark.parametrize("name", ODD)
def test_unusual_json_is_parsed(name: str) -> None:
    assert json_value(ODD[name]) == json.loads(ODD[name])


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ),
    st.booleans(),
)
def test_json_values_round_trip(value: Any, is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii)
    assert json_value(text) == value
    assert end_of_value(f"xy{text} z", 2) == len(text) + 2


def test_levels_are_counted() -> None:
    text = "[" * MAX_JSON_LEVELS + "]" * MAX_JSON_LEVELS
    assert json_value(text) == json.loads(text)
    with pytest.raises(JsonError, match=f"at most {MAX_JSON_LEVELS} levels"):
        json_value(f"[{text}]")


@given(st.text(alphabet='{}[]",:\\u d8f019eE.-+aNIntruefalsy') | st.text())
def test_any_json_text_is_parsed_or_refused_in_one_line(text: str) -> None:
    try:
        value = json_value(text)
    except JsonError as error:
        said = str(error)
    else:
        said = json.dumps(value, ensure_ascii=False, allow_nan=False)
    assert said.encode().count(b"\n") == 0
