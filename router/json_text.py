"""JSON in fields of requests."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn

from common.errors import InvalidFieldError


def json_object(path: str, text: str) -> dict[str, Any]:
    """A JSON object as Python values, in their order.

    Raises:
        InvalidFieldError: it is none, or has a name that stands twice in an object.
    """
    try:
        value = json.loads(text, object_pairs_hook=_distinct, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        why = "is nested too deeply" if isinstance(error, RecursionError) else f"is not valid JSON: {error}"
        raise InvalidFieldError(path, why, "a JSON object") from None
    if not isinstance(value, dict):
        raise InvalidFieldError(path, "is another JSON value", "a JSON object")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; of two values of one name neither may be dropped."""
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{twice!r} stands twice in an object")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
