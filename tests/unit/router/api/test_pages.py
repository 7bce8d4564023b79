"""Pages of a list: all items in order; only tokens of this service are accepted."""

from __future__ import annotations

import base64

from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidFieldError
from router.api.pages import page_of

KEYS = [f"{i:03d}" for i in range(10)]


def page(token: str, size: int = 3) -> tuple[list[str], str]:
    items, following = page_of(KEYS, KEYS, size, token, 100)
    return list(items), following


def refused_field(token: str) -> str:
    """Path of the field for which a page is refused; "" if it is accepted."""
    try:
        page(token)
    except InvalidFieldError as error:
        return error.violations[0].path
    return ""


@given(size=st.integers(1, 12))
def test_pages_join_to_whole_list(size: int) -> None:
    found, token = page("", size)
    while token:
        more, token = page(token, size)
        found += more
    assert found == KEYS


@given(token=st.text(min_size=1))
def test_unknown_page_token_is_refused(token: str) -> None:
    assert refused_field(token) == "page_token"


def test_altered_page_token_is_refused() -> None:
    _, token = page("")
    for bad in (token + "=", token + "\n", f"?{token}", token[:-1], base64.urlsafe_b64encode(b"002").decode()):
        assert refused_field(bad) == "page_token"
    assert page(token)[0] == KEYS[3:6]
