"""JSON in fields of requests."""

from __future__ import annotations

from typing import Any

from common.errors import InvalidFieldError
from common.json_text import JsonError, json_value


def json_object(path: str, text: str) -> dict[str, Any]:
    """A JSON object as Python values, in their order.

    Raises:
        InvalidFieldError: the text is no JSON object, or `json_value` refuses it; the error names the place.
    """
    try:
        value = json_value(text)
    except JsonError as error:
        raise InvalidFieldError(path, str(error), "a JSON object") from None
    if not isinstance(value, dict):
        raise InvalidFieldError(path, "is another JSON value", "a JSON object")
    return value
