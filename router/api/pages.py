"""Pages of a list with page tokens (AIP-158)."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import Final, TypeVar

from common.errors import InvalidFieldError

T = TypeVar("T")
MAX_PAGE: Final = 1000
_CHECK_BYTES: Final = 4


def page_of(
    items: Sequence[T], keys: Sequence[str], page_size: int, page_token: str, default: int
) -> tuple[Sequence[T], str]:
    """One page of a list, and the token of the next page ("" after the last).

    A token names the last item sent, so that pages stay right when items are added or removed.

    Args:
        items: all items, in order of their keys.
        keys: keys of the items, all different.
        page_size: most items; 0 is `default`.
        page_token: of the page before; "" for the first page.
        default: most items of a page if the caller names no size.

    Raises:
        InvalidFieldError: the size or the token is not valid.
    """
    if page_size > MAX_PAGE:
        raise InvalidFieldError("page_size", f"is {page_size}", f"at most {MAX_PAGE}; 0 is {default}")
    last = _key_in(page_token) if page_token else None
    begin = 0 if last is None else next((i for i, key in enumerate(keys) if key > last), len(items))
    page = items[begin : begin + (page_size or default)]
    end = begin + len(page)
    return page, _token_of(keys[end - 1]) if end < len(items) else ""


def _token_of(key: str) -> str:
    data = key.encode()
    return base64.urlsafe_b64encode(_check_of(data) + data).decode()


def _key_in(token: str) -> str:
    try:
        data = base64.urlsafe_b64decode(token.encode())
        key = data[_CHECK_BYTES:].decode()
    except ValueError:
        key = ""
    # Decoding skips characters that are not base64.
    if token != _token_of(key):
        raise InvalidFieldError("page_token", "is not one of this service", "next_page_token of an answer")
    return key


def _check_of(data: bytes) -> bytes:
    """Checksum that tells a token from other text."""
    return hashlib.blake2b(data, digest_size=_CHECK_BYTES, person=b"page token").digest()
