"""Bodies of requests: JSON into msgspec structs. Every refusal names the field, as the caller wrote it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Final, TypeVar

import msgspec

from common.errors import InvalidFieldError, MalformedRequestError, UnservedFieldError
from common.limits import MAX_JSON_LEVELS

T = TypeVar("T")
UInt32 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
TokenIdList = list[UInt32]
Names = Mapping[str, str]

_PLACE: Final = re.compile(r"(.*) - at `(key in )?\$?\.?(.*)`", re.DOTALL)
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING: Final = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_EXPECTED: Final = re.compile(r"Expected `(.*?)`(.*)", re.DOTALL)
_INDEX: Final = re.compile(r"\[\d+\]")
_MAX_NAME: Final = 128


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A JSON object of a request; a field that it does not name is refused."""


def decode(body: bytes, kind: type[T]) -> T:
    """Reads a body.

    Raises:
        ApiError: it is not JSON, has a name twice in an object, or a field is unknown, missing or of another type.
    """
    try:
        # Parts that are kept as they were written are not checked by msgspec.
        text = str(body, "utf-8")
    except UnicodeDecodeError:
        raise MalformedRequestError("the body is not valid UTF-8") from None
    value = decode_part(body, kind)
    try:
        _refuse_repeated_names(text)
    except RecursionError:
        raise _too_deep() from None
    return value


def decode_part(part: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Reads a part of a body that `decode` has read, as an object of one form.

    Raises:
        ApiError: a field is unknown, missing or of another type.
    """
    try:
        return msgspec.json.decode(part, type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None
    except msgspec.DecodeError as error:
        raise MalformedRequestError(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise _too_deep() from None


def _too_deep() -> MalformedRequestError:
    return MalformedRequestError(f"the body is nested too deeply: at most {MAX_JSON_LEVELS} levels")


class _RepeatedNameError(Exception):
    """An object has a name twice."""


class _RepeatedName(str):
    """Value of an object with a repeated name: the path of that name from this object on."""

    __slots__ = ()


def _check_names(pairs: list[tuple[str, Any]]) -> None:
    """Checks one object. Values are not kept: only their strings take memory, while their list is read."""
    if len(dict(pairs)) != len(pairs):
        raise _RepeatedNameError


def _find_repeated(pairs: list[tuple[str, Any]]) -> _RepeatedName | None:
    """Finds a repeated name in an object whose inner objects have been searched."""
    seen = set()
    for name, value in pairs:
        if name in seen:
            return _RepeatedName(name)
        seen.add(name)
        if (path := _repeated_in(value)) is not None:
            return _RepeatedName(f"{name}{path}" if path.startswith("[") else f"{name}.{path}")
    return None


def _repeated_in(value: Any) -> str | None:
    """Path of a repeated name in a value; None without one."""
    if isinstance(value, _RepeatedName):
        return value
    for i, each in enumerate(value if isinstance(value, list) else ()):
        if (path := _repeated_in(each)) is not None:
            return f"[{i}]{path}" if path.startswith("[") else f"[{i}].{path}"
    return None


def _decoder(check: Callable[[list[tuple[str, Any]]], Any]) -> json.JSONDecoder:
    # Numbers have been checked; `len` is the fastest function that takes any of them.
    return json.JSONDecoder(object_pairs_hook=check, parse_int=len, parse_float=len)


_CHECKER: Final = _decoder(_check_names)
_FINDER: Final = _decoder(_find_repeated)


def _refuse_repeated_names(text: str) -> None:
    """Refuses valid JSON with a name twice in an object, because readers differ in which of its values counts.

    Raises:
        InvalidFieldError: there is one; it has the path of the first.
    """
    try:
        _CHECKER.decode(text)
    except _RepeatedNameError:
        # The path takes a search in Python, so only refused bodies pay for it.
        path = _repeated_in(_FINDER.decode(text)) or "body"
        raise InvalidFieldError(path[:_MAX_NAME], "is given twice", "each name once in an object") from None


def _refusal(message: str) -> Exception:
    """The error for what msgspec says about a value."""
    found = _PLACE.fullmatch(message)
    problem, place = (found[1], found[3]) if found else (message, "")
    if unknown := _UNKNOWN.fullmatch(problem):
        return UnservedFieldError(_path(place, unknown[1] or '""'))
    if missing := _MISSING.fullmatch(problem):
        return InvalidFieldError(_path(place, missing[1]), "is missing", "a value")
    if expected := _EXPECTED.fullmatch(problem):
        return _unexpected(place, expected[1], expected[2])
    return InvalidFieldError(place or "body", "is invalid", problem[0].lower() + problem[1:])


def _unexpected(place: str, kind: str, more: str) -> InvalidFieldError:
    got = re.fullmatch(r", got `(.*)`", more)
    valid = kind.replace(" | ", " or ")
    if got:
        return InvalidFieldError(place or "body", f"is of type {got[1]}", valid)
    return InvalidFieldError(place or "body", "is out of range", f"{valid}{more}")


def _path(place: str, name: str) -> str:
    return (f"{place}.{name}" if place else name)[:_MAX_NAME]


def refuse_given(body: msgspec.Struct, harmless: Mapping[str, Collection[Any] | None]) -> None:
    """Refuses fields whose value would change the answer, which is not served.

    Args:
        body: the request.
        harmless: name of each such field -> values without effect; None for any value. None itself is harmless.

    Raises:
        UnservedFieldError: a field has another value.
    """
    for name, values in harmless.items():
        given = getattr(body, name)
        if given is not None and values is not None and given not in values:
            raise UnservedFieldError(name)


def param_of(path: str, names: Names) -> str:
    """The caller's name of a field of fissile.v1, by the longest beginning of its path in `names`.

    Args:
        path: such as `sampling_params.stop_strings[2]`.
        names: beginning of a path without indices -> name of the door. `*` stands for the indices, of several each
            for one; at the end it stands for the rest of the path too. Metadata are headers here.
    """
    plain = _INDEX.sub("", path)
    for known in sorted(names, key=len, reverse=True):
        if plain == known or plain.startswith(known + "."):
            name, matched = names[known], ".".join(path.split(".")[: known.count(".") + 1])
            indices = _INDEX.findall(matched)
            rest = path[len(matched) :] if name.endswith("*") else ""
            while name.count("*") > 1 and indices:
                name = name.replace("*", indices.pop(0), 1)
            return (name.replace("*", "".join(indices)) + rest).lstrip(".")
    return path.removeprefix("metadata ")
