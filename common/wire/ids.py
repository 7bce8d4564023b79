"""Checks of ids that clients and peers choose: bounded length, and safe to print on a terminal."""

from __future__ import annotations

import re
from typing import Final

from common.errors import InvalidFieldError

# Control characters, which a terminal obeys; line and paragraph separators; characters that change the text
# direction.
_UNFIT: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def check_id(path: str, text: str, max_bytes: int, *, required: bool = False) -> None:
    """Refuses an id that is too long or has control characters.

    Args:
        path: of its field.
        text: the id.
        max_bytes: most bytes of UTF-8.
        required: True to refuse an empty id too.

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
