"""Checks of configurations: each error names the field, its value, and what is allowed."""

from __future__ import annotations

import functools
import types
from dataclasses import fields
from typing import Any, ClassVar, Protocol, Union, get_args, get_origin, get_type_hints

from common.errors import InvalidFieldError


class Dataclass(Protocol):
    """Any dataclass."""

    __dataclass_fields__: ClassVar[Any]


def require(ok: bool, field: str, value: object, valid: str) -> None:
    """Raises InvalidFieldError when `ok` is false."""
    if not ok:
        raise InvalidFieldError(field, f"is {value!r}", valid)


def require_one_of(field: str, value: object, choices: tuple[object, ...]) -> None:
    """Raises InvalidFieldError when `value` is none of `choices`."""
    require(value in choices, field, value, ", ".join(map(str, choices)))


def require_types(config: Dataclass, path: str = "") -> None:
    """Raises InvalidFieldError for the first field whose value is not of its annotated type.

    An int is a float too, and a bool is not an int. Understands classes, unions and `tuple[x, ...]`.
    """
    hints = _hints(type(config))
    for field in fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        require(_fits(value, hint), path + field.name, value, f"of type {_name(hint)}")


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _fits(value: object, hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    if get_origin(hint) is tuple:
        each, *rest = get_args(hint)
        if rest == [...]:
            return isinstance(value, tuple) and all(_fits(item, each) for item in value)
        return (
            isinstance(value, tuple)
            and len(value) == len(get_args(hint))
            and all(map(_fits, value, get_args(hint)))
        )  # fmt: skip
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
