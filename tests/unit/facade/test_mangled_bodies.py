"""Mangled requests of Responses and Messages: each is refused by the name of a field, or becomes a request."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from fissile.client.calls import chat_request
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ApiError
from facade.anthropic import messages
from facade.openai import responses
from tests.unit.facade.test_messages import CLAUDE_CODE
from tests.unit.facade.test_responses import CODEX

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=5)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(st.sampled_from(["type", "text", "name", "role"]), inner, max_size=2),
    ),
    max_leaves=4,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values within a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inner for place in places(each, (*path, key)))][0 if path else 1 :]


def replaced(body: Any, place: tuple[Any, ...], value: Any) -> Any:
    """The body with another value at a place."""
    made = copy.deepcopy(body)
    holder = made
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    return made


@pytest.mark.parametrize(("parse", "body"), [(responses.parse, CODEX), (messages.parse, CLAUDE_CODE)])
@given(st.data())
@settings(max_examples=300, deadline=None)
def test_mangled_body_is_refused_or_becomes_a_request(
    parse: Callable[[bytes, int], Any], body: dict[str, Any], data: st.DataObject
) -> None:
    mangled = replaced(body, data.draw(st.sampled_from(places(body))), data.draw(VALUES))
    with contextlib.suppress(ApiError):
        plan = parse(json.dumps(mangled).encode(), 1)
        chat_request(plan.prompts[0], {name: value for name, value in plan.arguments.items() if name != "receipt"})


@pytest.mark.parametrize("parse", [responses.parse, messages.parse, lambda data, _: messages.parse_count(data)])
@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"7", b'"x"', b"\xff", b'{"input": "\xff"}', b"null", b'{"messages": ' + b"[" * 100_000, b"{}"],
)
def test_body_that_is_no_request_is_refused(parse: Callable[[bytes, int], Any], data: bytes) -> None:
    with pytest.raises(ApiError):
        parse(data, 1)
