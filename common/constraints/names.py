"""Finds objects in which the library would begin a further property although no name is left for it.

The library's grammars allow a comma wherever another property may follow. No name is left for that property if
`properties` lists every name that a pattern matches, or if the patterns forbid all other names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from common.constraints.subschemas import SchemaError, changed, walk

# Each pattern costs a query to the library. Published schemas have up to 60 patterns.
_MOST_PATTERNS: Final = 128
# Patterns without a match longer than the longest listed name, times listed names: the library excludes each name.
_MOST_ASKED: Final = 10_000
_ANY: Final = {"const": 1}
_COMBINED: Final = frozenset({"allOf", "anyOf", "oneOf", "$ref"})

# Takes a schema; True if an object that satisfies it can have a first property.
Begins = Callable[[dict[str, Any]], bool]

# Takes a pattern and a length; True if the pattern matches a text of more characters.
HasLonger = Callable[[str, int], bool]


def without_dead_ends(schema: Any, begins: Begins, has_longer: HasLonger) -> Any:
    """Returns a schema, in the library's form, in which every property name that can begin can also end.

    Args:
        schema: the whole schema.
        begins: asks the library.
        has_longer: asks the library. A pattern that matches longer names than the listed ones has names of its own.

    Raises:
        SchemaError: a pattern matches no name of its own, or there are too many patterns.
    """
    places = {place: each for place, each in walk(schema) if isinstance(each, Mapping)}
    if not any("patternProperties" in each for each in places.values()):
        return schema
    is_combined = any(_COMBINED & each.keys() for each in places.values())
    count = sum(len(each.get("patternProperties", {})) for each in places.values())
    if count > _MOST_PATTERNS:
        raise SchemaError("", f"it has {count} patterns in 'patternProperties'; at most {_MOST_PATTERNS} are served")
    every = _names(places.values()) if is_combined else None
    if every is not None:
        _check_forbidden(places, every, begins)

    def change(place: str, each: Any) -> Any:
        if not isinstance(each, Mapping):
            return each
        made = {name: changed(name, value, place, change) for name, value in each.items()}
        patterns = each.get("patternProperties", {})
        names = _names([each]) if every is None else every
        longest = max(map(len, names), default=0)
        short = [
            pattern for pattern, inner in patterns.items() if inner is not False and not has_longer(pattern, longest)
        ]
        if len(short) * len(names) > _MOST_ASKED:
            raise SchemaError(place, "it has too many patterns of short names beside the names that are listed")
        for pattern in short:
            if not begins(_object(names, {pattern: _ANY}, False)):
                raise SchemaError(
                    place,
                    "'patternProperties' has a pattern whose every name is in 'properties' or 'required':"
                    " 'properties' can say the same of it",
                )
        is_open = each.get("additionalProperties", True) is not False
        if patterns and is_open and not begins(_object(_names([each]), dict.fromkeys(patterns, False), _ANY)):
            made["additionalProperties"] = False
        return made

    return change("", schema)


def _check_forbidden(places: Mapping[str, Mapping[str, Any]], names: Iterable[str], begins: Begins) -> None:
    """Refuses `false` patterns that together forbid every name; for schemas that combine several objects."""
    forbidden = {
        pattern: place
        for place, each in places.items()
        for pattern, inner in each.get("patternProperties", {}).items()
        if inner is False
    }
    if forbidden and not begins(_object(names, dict.fromkeys(forbidden, False), _ANY)):
        place = next(iter(forbidden.values()))
        raise SchemaError(place, "'patternProperties' that are false leave no name: 'additionalProperties' can say so")


def _object(names: Iterable[str], patterns: Mapping[str, Any], others: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": dict.fromkeys(names, False),
        "patternProperties": dict(patterns),
        "additionalProperties": others,
        "minProperties": 1,
    }


def _names(schemas: Iterable[Mapping[str, Any]]) -> list[str]:
    found: dict[str, None] = {}
    for each in schemas:
        found |= dict.fromkeys(each.get("properties", {}))
        required = each.get("required", [])
        found |= dict.fromkeys(name for name in required if isinstance(name, str)) if isinstance(required, list) else {}
    return list(found)
