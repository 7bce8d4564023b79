"""Bodies of requests: a name that is twice in an object is refused with its path, in any depth."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ApiError
from facade.http.bodies import decode

NAMES = st.sampled_from(["a", "b", "é", "", "a.b", "x[0]"])
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()
)


class Pairs(list[tuple[str, Any]]):
    """An object, with the names as they are written."""


VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.lists(st.tuples(NAMES, inner), max_size=3).map(Pairs)),
    max_leaves=12,
)


def text_of(value: Any) -> str:
    if isinstance(value, Pairs):
        return "{" + ", ".join(f"{json.dumps(name)}: {text_of(each)}" for name, each in value) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(text_of, value)) + "]"
    return json.dumps(value)


def repeated(value: Any, path: str | None = None) -> set[str]:
    """Paths of all repeated names; the body's own path is None, because a name may be empty."""
    found: set[str] = set()
    if isinstance(value, Pairs):
        names = [name for name, _ in value]
        place = "" if path is None else f"{path}."
        found = {place + name for name in names if names.count(name) > 1}
        inner = [(place + name, each) for name, each in value]
    else:
        inner = [(f"{path or ''}[{i}]", each) for i, each in enumerate(value)] if isinstance(value, list) else []
    return found.union(*(repeated(each, place) for place, each in inner))


@given(VALUES)
@settings(max_examples=400, deadline=None)
def test_repeated_name_is_refused_with_its_path_and_other_json_is_read(value: Any) -> None:
    expected = repeated(value)
    data = text_of(value).encode()
    if not expected:
        msgspec.json.decode(data)
        decode(data, msgspec.Raw)
        return
    with pytest.raises(ApiError) as caught:
        decode(data, msgspec.Raw)
    assert (caught.value.violations[0].path or "body") in {path or "body" for path in expected}


@pytest.mark.parametrize("size", [100, 100_000])
def test_path_of_a_name_behind_many_levels_or_entries_is_cut_or_said(size: int) -> None:
    deep = '{"a":' * 300 + '{"b":1,"b":2}' + "}" * 300
    wide = json.dumps({"list": [0] * size})[:-1] + ', "o": [{"k": [], "k": []}]}'
    for text, path in ((deep, "a." * 64), (wide, "o[0].k")):
        with pytest.raises(ApiError) as caught:
            decode(text.encode(), msgspec.Raw)
        assert caught.value.violations[0].path == path
