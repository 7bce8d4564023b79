"""Rewrites numbers of a JSON Schema for the library, which reads them as doubles and writes them by its own rules.

A bound that a double or the library would round is moved inward, to a number of 15 digits. Answers then lack some
numbers of more digits, but none is outside the bound. A number of `const` or `enum` cannot move, so it is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, Final

# Every integer up to it is a double.
LARGEST: Final = 2**53
# The library's bounds are integers of 64 bits.
_MOST: Final = Decimal("9223372036854770000")
# Decimal numbers of at most _DIGITS digits, with at most _EXPONENT of them after the point, are distinct doubles. The
# library reads these exactly; with more digits it may be off by one unit.
_DIGITS: Final = 15
_EXPONENT: Final = 22
# More digits than any number that is kept has as text.
_MOST_DIGITS: Final = 400
# (exclusive keyword, inclusive keyword, how to round inward, direction of inward)
_SIDES: Final = (("exclusiveMinimum", "minimum", ROUND_CEILING, 1), ("exclusiveMaximum", "maximum", ROUND_FLOOR, -1))
BOUNDS: Final = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
# Largest share of the gap between two bounds by which `_apart` moves an exclusive bound.
_SHARE: Final = Decimal("1e-6")


class NumberError(ValueError):
    """A number of a schema cannot be kept as it is; the message says which and why."""


class Written(float):
    """A number with a fraction or an exponent that keeps its text from the schema."""

    text: str

    @classmethod
    def of(cls, text: str) -> Written:
        """Reads a number.

        Raises:
            ValueError: the number is too large or too small.
        """
        made = cls(text)
        if math.isinf(made) or Decimal(text).adjusted() < -_MOST_DIGITS:
            raise ValueError(f"the number {text[:40]} is too large or too small")
        made.text = text
        return made


def exact(value: object) -> Decimal:
    """The exact decimal value of a number in a schema."""
    return Decimal(value.text if isinstance(value, Written) else repr(value))


def is_number(value: object) -> bool:
    """True if a value is a JSON number, which a boolean is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_constant(value: Any) -> None:
    """Checks the numbers in a value of `const` or `enum`.

    Raises:
        NumberError: an answer would have another number in place of one of them.
    """
    for each in _numbers(value):
        if not _is_kept(each):
            raise NumberError(
                f"the number {_shown(each)} cannot be kept in an answer: integers up to 2^53 and numbers of at most"
                f" {_DIGITS} digits can; as text it could be"
            )


def _is_kept(value: int | float) -> bool:
    number = exact(value)
    return abs(number) <= LARGEST and (isinstance(value, int) or _has_few_digits(number))


def _has_few_digits(number: Decimal) -> bool:
    parts = number.normalize(Context(prec=_MOST_DIGITS)).as_tuple()
    return len(parts.digits) <= _DIGITS and isinstance(parts.exponent, int) and parts.exponent >= -_EXPONENT


def _numbers(value: Any) -> Iterator[int | float]:
    if is_number(value):
        yield value
    elif isinstance(value, list | Mapping):
        for each in value if isinstance(value, list) else value.values():
            yield from _numbers(each)


def bounds(schema: Mapping[str, Any]) -> Iterator[Decimal]:
    """Numbers at which the range of a schema may begin or end."""
    for name in BOUNDS:
        if name in schema and is_number(schema[name]):
            yield exact(schema[name])
    for value in [schema.get("const"), *_list(schema.get("enum"))]:
        if is_number(value):
            yield exact(value)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def rewritten(schema: Mapping[str, Any], every: Iterable[Decimal]) -> dict[str, Any]:
    """Bounds of one subschema in the library's form: at most one lower and one upper bound.

    Args:
        schema: one subschema.
        every: bounds of all subschemas: any of them may apply to the same number.

    Raises:
        NumberError: a bound is not a number, or cannot be kept.
    """
    made: dict[str, Any] = {}
    for exclusive, inclusive, rounding, inward in _SIDES:
        given = _of_draft_4(schema, exclusive, inclusive)
        if not given:
            continue
        number, is_strict = max(
            ((exact(value), name == exclusive) for name, value in given.items()),
            key=lambda bound: (bound[0] * inward, bound[1]),
        )
        moved = _inward(number, rounding, inward, is_strict=is_strict)
        if is_strict and moved == number:
            moved = _apart(number, inward, every)
        is_unmoved = moved == number
        value = next(value for value in given.values() if exact(value) == number) if is_unmoved else _written(moved)
        made[exclusive if is_strict and is_unmoved else inclusive] = value
    return made


def _of_draft_4(schema: Mapping[str, Any], exclusive: str, inclusive: str) -> dict[str, Any]:
    """Bounds of one side; draft 4's boolean `exclusive...` becomes an exclusive number."""
    given = {name: schema[name] for name in (inclusive, exclusive) if name in schema}
    if given.get(exclusive) is False:
        del given[exclusive]
    if given.get(exclusive) is True and inclusive in given:
        given = {exclusive: given[inclusive]}
    for name, value in given.items():
        if not is_number(value):
            raise NumberError(f"{name!r} is not a number")
    return given


def _inward(limit: Decimal, rounding: str, inward: int, *, is_strict: bool) -> Decimal:
    """The next number inward that the library keeps, or the bound itself."""
    is_integer = limit == limit.to_integral_value()
    if abs(limit) <= LARGEST and (is_integer or _has_few_digits(limit)):
        return limit
    if abs(limit) > _MOST:
        if (limit > 0) == (inward > 0):
            raise NumberError(f"the bound {_shown(limit)} leaves no number that can be kept: they are below 2^63")
        return _MOST.copy_sign(limit)
    places = Decimal(1).scaleb(-_EXPONENT)
    context = Context(prec=_DIGITS, rounding=rounding)
    moved = context.plus(limit if abs(limit) >= 1 else limit.quantize(places, rounding, Context(prec=_EXPONENT + 2)))
    while _is_outside(moved, limit, inward, is_strict=is_strict):
        moved = context.next_plus(moved) if inward > 0 else context.next_minus(moved)
    return moved


def _is_outside(moved: Decimal, limit: Decimal, inward: int, *, is_strict: bool) -> bool:
    """True if `moved`, or the double that the library makes of it, is not inside the bound."""
    for made in (moved, Decimal(float(moved))):
        gap = (made - limit) * inward
        if gap < 0 or (is_strict and gap == 0):
            return True
    return False


def _apart(number: Decimal, inward: int, every: Iterable[Decimal]) -> Decimal:
    """Moves an exclusive integer bound inward if another bound is less than 1 away.

    If both bounds have the same integer before the point, and the one nearer to zero is that integer and exclusive,
    the library takes it as inclusive (llguidance 1.9.1).
    """
    if number != number.to_integral_value() or number * inward < 0:
        return number
    gaps = [gap for each in every if 0 < (gap := (each - number) * inward) < 1]
    if not gaps:
        return number
    step = Decimal(1).scaleb(min(gaps).adjusted()) * _SHARE
    moved = number + step * inward
    if len(moved.normalize().as_tuple().digits) > _DIGITS:
        raise NumberError(f"there is too little room between the bound {_shown(number)} and another one")
    return moved


def _written(number: Decimal) -> int | float:
    return int(number) if number == number.to_integral_value() else float(number)


def _shown(value: object) -> str:
    text = str(value if not isinstance(value, Written) else value.text)
    return text if len(text) <= 40 else text[:37] + "..."
