"""Ids that clients and peers choose themselves: of bounded length, and fit for a log line on somebody's terminal."""

from __future__ import annotations

import re
from typing import Final

from common.errors import InvalidFieldError

# Control characters (a terminal obeys them), line and paragraph separators, and those that turn the direction of text.
_UNFIT: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def check_id(path: str, text: str, max_bytes: int, *, required: bool = False) -> None:
    """Refuses an id that is too long, or has control characters.

    Args:
        path: of its field.
        text: the id.
        max_bytes: most bytes of UTF-8.
        required: whether an empty one is refused too.

    Raises:
        InvalidFieldError: names the field.
    """
    size = len(text.encode())
    if required and not size:
        raise InvalidFieldError(path, "is empty", f"1 to {max_bytes} bytes of UTF-8")
    if size > max_bytes:
        raise InvalidFieldError(path, f"has {size} bytes", f"at most {max_bytes} bytes of UTF-8")
    if (bad := _UNFIT.search(text)) is not None:
        problem = f"has U+{ord(bad[0]):04X} at position {bad.start()}"
        raise InvalidFieldError(path, problem, "no control characters, line breaks or marks of text direction")
