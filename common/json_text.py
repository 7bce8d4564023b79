"""Parses the JSON of clients strictly: checks each value once, before any other code sees it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from common.limits import MAX_JSON_LEVELS

# Python's own limit for reading and writing an integer.
_MOST_DIGITS: Final = 4300
_MOST_PLACE: Final = 200


class JsonError(ValueError):
    """A text is not JSON, or has a value that is not supported; one line.

    Attributes:
        place: JSON Pointer of the value; empty for the whole, or if the text is not JSON.
        problem: what is wrong with it.
    """

    def __init__(self, problem: str, place: str = "") -> None:
        super().__init__(f"at {place} {problem}" if place else problem)
        self.place = place
        self.problem = problem


@dataclass(frozen=True, slots=True)
class _Fault:
    """Placeholder in a parsed value for a number, constant or object that is refused."""

    problem: str


# A place in a value: the outer value's place, and the key or index there. None is the root.
_Path = tuple[Any, object] | None


def json_value(text: str, read_float: Callable[[str], float] = float) -> Any:
    """Parses a JSON text. All strings of the value can be encoded, and all its numbers can be written.

    Args:
        text: of a client.
        read_float: reads a number with a fraction or an exponent; a ValueError means that it has no value.

    Raises:
        JsonError: the text is not JSON, or has a duplicate name in an object, half of a surrogate pair, a number
            without a finite value or with too many digits, or more than MAX_JSON_LEVELS levels.
    """
    try:
        value = (_DECODER if read_float is float else _decoder(read_float)).decode(text)
    except RecursionError:
        raise JsonError(f"is nested too deeply: at most {MAX_JSON_LEVELS} levels") from None
    except ValueError as error:
        raise JsonError(f"is not valid JSON: {error}") from None
    for problem, path in _faults(value):
        raise JsonError(problem, _pointer(path))
    return value


def end_of_value(text: str, start: int) -> int:
    """The index after the JSON value that begins at `start`.

    Raises:
        JsonError: no JSON value begins there.
    """
    try:
        return _DECODER.raw_decode(text, start)[1]
    except RecursionError:
        raise JsonError(f"is nested too deeply: at most {MAX_JSON_LEVELS} levels") from None
    except ValueError as error:
        raise JsonError(f"is not valid JSON: {error}") from None


def _faults(value: Any) -> Iterator[tuple[str, _Path]]:
    waiting: list[tuple[Any, int, _Path]] = [(value, 1, None)]
    while waiting:
        one, level, path = waiting.pop()
        if isinstance(one, dict | list) and level > MAX_JSON_LEVELS:
            yield f"is nested too deeply: at most {MAX_JSON_LEVELS} levels", None
        if isinstance(one, _Fault):
            yield one.problem, path
        elif isinstance(one, str):
            if not is_text(one):
                yield "has half of a surrogate pair", path
        elif isinstance(one, dict):
            for key, inner in one.items():
                if not is_text(key):
                    yield "has a name with half of a surrogate pair", path
                waiting.append((inner, level + 1, (path, key)))
        elif isinstance(one, list):
            waiting += [(inner, level + 1, (path, i)) for i, inner in enumerate(one)]


def is_text(text: str) -> bool:
    """True if a text can be encoded: it has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _pointer(path: _Path) -> str:
    steps = []
    while path is not None:
        path, step = path
        steps.append(str(step).replace("~", "~0").replace("/", "~1"))
    return "".join(f"/{step}" for step in reversed(steps))[:_MOST_PLACE]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | _Fault:
    values = dict(pairs)
    if len(values) == len(pairs):
        return values
    twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
    return _Fault(f"is not valid JSON: {twice[:_MOST_PLACE]!r} stands twice in an object")


def _integer(digits: str) -> int | _Fault:
    if len(digits) > _MOST_DIGITS:
        return _Fault(f"is a number of {len(digits)} digits; at most {_MOST_DIGITS} are served")
    return int(digits)


def _constant(name: str) -> _Fault:
    return _Fault(f"is not valid JSON: {name} is not a JSON number")


def _decoder(read_float: Callable[[str], float]) -> json.JSONDecoder:
    def number(digits: str) -> float | _Fault:
        try:
            value = read_float(digits)
        except ValueError:
            value = math.inf
        return value if math.isfinite(value) else _Fault("is a number that is too large: 64 bits are served")

    return json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer, parse_float=number, parse_constant=_constant)


_DECODER: Final = _decoder(float)
