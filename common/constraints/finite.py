"""Finds subschemas that no finite value satisfies although the library accepts them.

There are two kinds. Each value has to contain another value of the same subschema, without end. Or no multiple of
`multipleOf` lies between the bounds. The library would begin such a value and never end it.

Subschemas that apply to the same value (`allOf`, `$ref`, one property of several objects) form a `State`. A state is
satisfiable if one of its alternatives is. The least fixed point gives the states that are satisfiable. The greatest
one, which ignores both kinds, gives those that the library takes for satisfiable. The difference is the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from functools import cache
from itertools import product
from typing import Any, Final

from common.constraints import numbers
from common.constraints.subschemas import step

# Places of subschemas that apply to the same value.
State = frozenset[str]
# Each clause needs one satisfiable state.
Clauses = tuple[tuple[State, ...], ...]
# Keywords that constrain a value.
_SAYING: Final = frozenset(
    {
        "type", "enum", "const", *numbers.BOUNDS, "multipleOf", "maxLength", "minLength", "pattern", "format",
        "maxItems", "minItems", "prefixItems", "items", "maxProperties", "minProperties", "required", "properties",
        "patternProperties", "additionalProperties", "allOf", "anyOf", "oneOf",
    }
)  # fmt: skip
# Takes a pattern and a name; True if the pattern matches the name.
Fits = Callable[[str, str], bool]
# Most alternatives of a state, most states, and most work for a schema. What exceeds them counts as satisfiable.
_MOST_ALTERNATIVES: Final = 512
_MOST_STATES: Final = 4_000
_MOST_WORK: Final = 200_000
# Most levels of nested references and applicators.
_MOST_LEVELS: Final = 150
_TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")
_APPLICATORS: Final = ("allOf", "anyOf", "oneOf")


class _TooManyError(Exception):
    pass


@dataclass(frozen=True, slots=True)
class _Alternative:
    """A way to satisfy a state.

    Attributes:
        clauses: conditions that must all hold.
        is_seen: False if the library takes this alternative for possible although it is not.
    """

    clauses: Clauses
    is_seen: bool = True


def endless(subschemas: Mapping[str, Any], references: Mapping[str, str], fits: Fits) -> list[State]:
    """States that the library accepts although no finite value satisfies them: subschemas, alone or in combination.

    Args:
        subschemas: all subschemas by JSON Pointer.
        references: for each subschema with `$ref`, the place that it refers to.
        fits: tells whether a pattern of `patternProperties` matches a name.
    """
    if not references and not any(isinstance(each, Mapping) and "multipleOf" in each for each in subschemas.values()):
        return []
    states = _States(subschemas, references, fits)
    known = states.discovered()
    so = _fixed_point(known, is_least=True)
    seen = _fixed_point(known, is_least=False)
    found = [state for state in known if seen[state] and not so[state]]
    single = {place for state in found if len(state) == 1 for place in state}
    together = [state for state in found if len(state) > 1 and not state & single]
    return [*together, *(State({place}) for place in subschemas if states.meant(place) in single)]


def _fixed_point(known: Mapping[State, list[_Alternative] | None], *, is_least: bool) -> dict[State, bool]:
    value = {state: alternatives is None or not is_least for state, alternatives in known.items()}
    changed = True
    while changed:
        changed = False
        for state, alternatives in known.items():
            if alternatives is None or value[state] is is_least:
                continue
            made = any(
                (each.is_seen or not is_least)
                and all(any(value.get(child, True) for child in clause) for clause in each.clauses)
                for each in alternatives
            )
            changed |= made is not value[state]
            value[state] = made
    return value


class _States:
    def __init__(self, subschemas: Mapping[str, Any], references: Mapping[str, str], fits: Fits) -> None:
        self._subschemas = subschemas
        self._references = references
        self._fits = cache(fits)
        self._left = _MOST_WORK

    def meant(self, place: str) -> str:
        """Follows references: the target's place for a subschema that is nothing but a `$ref`, else `place` itself."""
        seen = {place}
        while place in self._references and _SAYING.isdisjoint(self._subschemas[place]):
            place = self._references[place]
            if place in seen:
                break
            seen.add(place)
        return place

    def discovered(self) -> dict[State, list[_Alternative] | None]:
        """Alternatives of each state of the schema; None for a state that has too many."""
        known: dict[State, list[_Alternative] | None] = {}
        waiting = [State({place}) for place in self._subschemas]
        while waiting and len(known) < _MOST_STATES:
            state = State(map(self.meant, waiting.pop()))
            if state in known:
                continue
            try:
                parts = self._flat(state)
            except _TooManyError:
                known[state] = None
                continue
            known[state] = [self._of_meant(each) for part in parts for each in self._alternatives(part)]
            children = {child for part in parts for child in self._children(part)}
            self._left -= len(children)
            waiting += [child for child in children if child not in known]
        return known

    def _of_meant(self, alternative: _Alternative) -> _Alternative:
        clauses = tuple(tuple(State(map(self.meant, child)) for child in clause) for clause in alternative.clauses)
        return replace(alternative, clauses=clauses)

    def _flat(self, state: Iterable[str]) -> list[State | None]:
        """Alternatives of a state: sets of subschemas that must all hold; None for one that never ends."""
        found: list[State | None] = [State()]
        for place in state:
            found = self._joined(found, self._flat_of(place, State()))
        return found

    def _flat_of(self, place: str, within: State) -> list[State | None]:
        schema = self._subschemas[place]
        if not isinstance(schema, Mapping):
            return [] if schema is False else [State()]
        if place in within:
            return [None]
        if len(within) > _MOST_LEVELS:
            raise _TooManyError
        inner = within | {place}
        found: list[State | None] = [State({place})]
        if place in self._references:
            found = self._joined(found, self._flat_of(self._references[place], inner))
        for name in _APPLICATORS:
            if not isinstance(schema.get(name), list):
                continue
            branches = [self._flat_of(f"{place}/{name}/{i}", inner) for i in range(len(schema[name]))]
            if name != "allOf":
                branches = [[each for branch in branches for each in branch]]
            for branch in branches:
                found = self._joined(found, branch)
        return found

    def _joined(self, one: list[State | None], other: list[State | None]) -> list[State | None]:
        self._left -= len(one) * len(other)
        if len(one) * len(other) > _MOST_ALTERNATIVES or self._left < 0:
            raise _TooManyError
        joined = (None if a is None or b is None else a | b for a, b in product(one, other))
        return list(dict.fromkeys(joined))

    def _alternatives(self, part: State | None) -> Iterator[_Alternative]:
        if part is None:
            yield _Alternative((), is_seen=False)
            return
        schemas = [self._subschemas[place] for place in part]
        types = [_types(schema) for schema in schemas]
        allowed = [kind for kind in _TYPES if all(kind in each for each in types)]
        values = next((values for schema in schemas if (values := _values(schema)) is not None), None)
        if values is not None:
            some = [value for value in values if _kind(value) in allowed]
            if any(self._allows(part, value, with_multiples=False) for value in some):
                yield _Alternative((), is_seen=any(self._allows(part, value, with_multiples=True) for value in some))
            return
        for kind in allowed:
            if kind == "object":
                yield _Alternative(tuple(self._needed_names(part)))
            elif kind == "array":
                yield _Alternative(tuple(self._needed_items(part)))
            else:
                is_numeric = kind in ("integer", "number")
                yield _Alternative((), is_seen=not is_numeric or _has_number(schemas, is_integer=kind == "integer"))

    def _allows(self, part: State, value: Any, *, with_multiples: bool) -> bool:
        """True if a value of `enum` or `const` satisfies the numeric keywords of all subschemas of `part`."""
        if numbers.is_number(value):
            number = numbers.exact(value)
            schemas = [self._subschemas[place] for place in part]
            return all(_bounds_allow(number, each) for each in schemas) and not (
                with_multiples and any(not _is_multiple(number, each) for each in schemas)
            )
        inner: Iterable[tuple[State, Any]] = ()
        if isinstance(value, Mapping):
            inner = ((self._property(part, name), each) for name, each in value.items())
        elif isinstance(value, list):
            inner = ((self._item(part, i), each) for i, each in enumerate(value))
        return all(self._allows_any(state, each, with_multiples=with_multiples) for state, each in inner)

    def _allows_any(self, state: State, value: Any, *, with_multiples: bool) -> bool:
        try:
            parts = self._flat(state)
        except _TooManyError:
            return True
        return any(part is not None and self._allows(part, value, with_multiples=with_multiples) for part in parts)

    def _needed_names(self, part: State) -> Iterator[tuple[State, ...]]:
        required = dict.fromkeys(name for place in part for name in _list(self._subschemas[place], "required"))
        names = [name for name in required if isinstance(name, str)]
        yield from ((self._property(part, name),) for name in names)
        least = max((_count(self._subschemas[place], "minProperties") for place in part), default=0)
        if least > len(names):
            # Without `additionalProperties` this state is empty and so satisfiable: any other name will do.
            others = State(place for place in self._steps(part, "additionalProperties"))
            yield (*self._named(part, exclude=required), others)

    def _needed_items(self, part: State) -> Iterator[tuple[State, ...]]:
        least = max((_count(self._subschemas[place], "minItems") for place in part), default=0)
        listed = max((len(_list(self._subschemas[place], "prefixItems")) for place in part), default=0)
        yield from ((self._item(part, i),) for i in range(min(least, listed + 1)))

    def _children(self, part: State | None) -> Iterator[State]:
        if part is None:
            return
        yield from self._named(part, exclude=())
        for clause in (*self._needed_names(part), *self._needed_items(part)):
            yield from clause
        yield State(self._steps(part, "additionalProperties"))
        listed = max((len(_list(self._subschemas[place], "prefixItems")) for place in part), default=0)
        yield from (self._item(part, i) for i in range(listed + 1))

    def _named(self, part: State, exclude: Iterable[str]) -> list[State]:
        """States of the names in `properties`, less `exclude`, and of the patterns in `patternProperties`."""
        names = [name for place in part for name in _map(self._subschemas[place], "properties")]
        patterns = [
            State({f"{place}/patternProperties/{step(pattern)}"})
            for place in part
            for pattern in _map(self._subschemas[place], "patternProperties")
        ]
        return [*(self._property(part, name) for name in dict.fromkeys(names) if name not in exclude), *patterns]

    def _property(self, part: State, name: str) -> State:
        found: set[str] = set()
        for place in part:
            schema = self._subschemas[place]
            own = [f"properties/{step(name)}"] if name in _map(schema, "properties") else []
            fitting = [each for each in _map(schema, "patternProperties") if self._fits(each, name)]
            own += [f"patternProperties/{step(each)}" for each in fitting]
            if not own and "additionalProperties" in schema:
                own = ["additionalProperties"]
            found |= {f"{place}/{each}" for each in own}
        return State(found)

    def _item(self, part: State, index: int) -> State:
        found = set()
        for place in part:
            if index < len(_list(self._subschemas[place], "prefixItems")):
                found.add(f"{place}/prefixItems/{index}")
            elif "items" in self._subschemas[place]:
                found.add(f"{place}/items")
        return State(found)

    def _steps(self, part: State, name: str) -> Iterator[str]:
        return (f"{place}/{name}" for place in part if name in self._subschemas[place])


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    given = schema.get("type", _TYPES)
    given = [given] if isinstance(given, str) else given
    # An invalid `type` is passed over here, since the library refuses it.
    names = {each for each in given if isinstance(each, str)} if isinstance(given, list | tuple) else set(_TYPES)
    return frozenset(names | {"integer"} if "number" in names else names)


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return _list(schema, "enum") if "enum" in schema else None


def _kind(value: Any) -> str:
    if numbers.is_number(value):
        number = numbers.exact(value)
        return "integer" if number == number.to_integral_value() else "number"
    kinds = {bool: "boolean", str: "string", list: "array", type(None): "null"}
    return kinds.get(type(value), "object")


def _bounds_allow(number: Decimal, schema: Mapping[str, Any]) -> bool:
    low, above, high, below = (numbers.exact(schema[name]) if name in schema else number for name in numbers.BOUNDS)
    return (
        low <= number <= high
        and not ("exclusiveMinimum" in schema and number <= above)
        and not ("exclusiveMaximum" in schema and number >= below)
    )


def _is_multiple(number: Decimal, schema: Mapping[str, Any]) -> bool:
    return "multipleOf" not in schema or Fraction(number) % Fraction(numbers.exact(schema["multipleOf"])) == 0


def _has_number(schemas: list[Mapping[str, Any]], *, is_integer: bool) -> bool:
    """True if a multiple of all `multipleOf` lies between all bounds."""
    steps = [Fraction(numbers.exact(schema["multipleOf"])) for schema in schemas if "multipleOf" in schema]
    if not steps:
        return True
    steps += [Fraction(1)] if is_integer else []
    unit = math.lcm(*(each.denominator for each in steps))
    size = Fraction(math.lcm(*(int(each * unit) for each in steps)), unit)
    limits = {
        name: [Fraction(numbers.exact(schema[name])) / size for schema in schemas if name in schema]
        for name in numbers.BOUNDS
    }
    lows = [*map(math.ceil, limits["minimum"]), *(math.floor(each) + 1 for each in limits["exclusiveMinimum"])]
    highs = [*map(math.floor, limits["maximum"]), *(math.ceil(each) - 1 for each in limits["exclusiveMaximum"])]
    return not lows or not highs or max(lows) <= min(highs)


def _list(schema: Mapping[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _map(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = schema.get(name)
    return value if isinstance(value, Mapping) else {}


def _count(schema: Mapping[str, Any], name: str) -> int:
    value = schema.get(name, 0)
    return value if isinstance(value, int) else 0
