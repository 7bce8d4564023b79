"""Rewrites JSON Schemas so that the library reads them as JSON Schema reads the originals.

A keyword that the library enforces in no spelling is refused here. Each subschema keeps its place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any, Final

from common.constraints import ecma, finite, library, numbers, references
from common.constraints.formats import FURTHER, INSTEAD
from common.constraints.subschemas import SchemaError, changed, walk

NOTES: Final = frozenset(
    {
        "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment",
        "contentEncoding", "contentMediaType", "contentSchema",
    }
)  # fmt: skip
# Left out for the library: references are resolved before, and the dialect is always the same.
_IDENTITY: Final = frozenset({"$schema", "$id", "$anchor"})
# Draft 2020-12 and later ones.
_OF_TODAY: Final = ("https://json-schema.org/draft/2020-12/", "https://json-schema.org/draft/next/")
_OLD: Final = ("http://json-schema.org/", "https://json-schema.org/draft")

# The library computes common multiples in 32 bits.
_MOST_MULTIPLE: Final = 2**32


def library_form(schema: Any) -> Any:
    """Rewrites a checked schema into the library's form.

    Raises:
        SchemaError: the library enforces a keyword in no spelling.
    """
    return _Form(schema).made("", schema)


def has_plain_names(schema: Any) -> bool:
    r"""True if answers may have no `\u` escape: a name spelled with one would bypass its own subschema."""
    return any(
        isinstance(each, Mapping)
        and (each.get("properties") or each.get("patternProperties") or each.get("required"))
        and each.get("additionalProperties") is not False
        for _, each in walk(schema)
    )


class _Form:
    def __init__(self, schema: Any) -> None:
        places = dict(walk(schema))
        self._check_draft(places)
        try:
            self._targets = references.resolved(places.items())
        except references.UnresolvedError as error:
            raise SchemaError(error.place, str(error)) from None
        self._without = ecma.UNSPELLABLE if has_plain_names(schema) else ecma.NUL
        self._check_names(places)
        every = [bound for each in places.values() if isinstance(each, Mapping) for bound in numbers.bounds(each)]
        self._bounds = {place: self._bounds_of(place, each, every) for place, each in places.items()}
        self._check_multiples(places)
        self._endless = self._without_end(places)

    def _check_draft(self, places: Mapping[str, Any]) -> None:
        named = [each.get("$schema", "") for each in places.values() if isinstance(each, Mapping)]
        if any(name.startswith(_OLD) and not name.startswith(_OF_TODAY) for name in named):
            for place, each in places.items():
                if isinstance(each, Mapping) and "prefixItems" in each:
                    raise SchemaError(place, "'prefixItems' is not of the draft that '$schema' names; 2020-12 has it")

    def _check_names(self, places: Mapping[str, Any]) -> None:
        """Refuses names with control characters, which the rewritten patterns do not match as the originals do."""
        schemas = [(place, each) for place, each in places.items() if isinstance(each, Mapping)]
        if not any(each.get("patternProperties") for _, each in schemas):
            return
        for place, each in schemas:
            required = each.get("required")
            names = [*each.get("properties", {}), *(required if isinstance(required, list) else ())]
            if any(_has_one_of(text, ecma.UNSPELLABLE) for text in _texts(names)):
                raise SchemaError(place, "a name with a control character is not supported beside 'patternProperties'")

    def _check_multiples(self, places: Mapping[str, Any]) -> None:
        """Refuses values of `multipleOf` whose common multiple may exceed the library's 32 bits."""
        steps = {
            place: numbers.exact(each["multipleOf"])
            for place, each in places.items()
            if isinstance(each, Mapping) and "multipleOf" in each
        }
        unit = min((step.normalize().as_tuple().exponent for step in steps.values()), default=0)
        sizes = {int(step.scaleb(-unit)) if isinstance(unit, int) else 0 for step in steps.values()}
        if len(sizes) > 1 and math.prod(sizes) >= _MOST_MULTIPLE:
            place = next(iter(steps))
            raise SchemaError(place, "the values of 'multipleOf' are too large, or too many, to be taken together")

    def _bounds_of(self, place: str, schema: Any, every: Iterable[Decimal]) -> dict[str, Any]:
        if not isinstance(schema, Mapping):
            return {}
        try:
            for value in (schema.get("const"), schema.get("enum"), schema.get("multipleOf")):
                numbers.check_constant(value)
            return numbers.rewritten(schema, every)
        except numbers.NumberError as error:
            raise SchemaError(place, str(error)) from None

    def _without_end(self, places: Mapping[str, Any]) -> frozenset[str]:
        """Places of subschemas that no finite value satisfies."""
        known = {
            place: {**_without_bounds(each), **self._bounds[place]} if isinstance(each, Mapping) else each
            for place, each in places.items()
        }
        found = finite.endless(known, self._targets, self._fits)
        for state in found:
            if "" in state and len(state) == 1:
                raise SchemaError("", "no finite value satisfies it")
            if len(state) > 1:
                first, *others = sorted(state)
                raise SchemaError(first, f"no finite value satisfies it together with {' and '.join(others)}")
        return frozenset(place for state in found for place in state)

    def _fits(self, pattern: str, name: str) -> bool:
        return library.is_match(self._expression("", pattern), name)

    def made(self, place: str, schema: Any) -> Any:
        """Rewrites one subschema and those inside it."""
        if not isinstance(schema, Mapping):
            return schema
        form: dict[str, Any] = {}
        for name, value in schema.items():
            if name in NOTES or name in _IDENTITY:
                continue
            if name == "format" and value in INSTEAD:
                continue
            if name in numbers.BOUNDS:
                form |= self._bounds[place]
            elif name == "$ref":
                form[name] = references.pointer(self._targets[place])
            elif name == "pattern":
                form[name] = self._expression(place, value)
            else:
                self._check_spelling(place, name, value)
                form[name] = changed(name, value, place, self.made)
                if name == "patternProperties":
                    form[name] = self._patterns(place, form[name])
        further = [False] if place in self._endless else _further(schema.get("format", ""))
        if further and isinstance(every := form.get("allOf", []), list):
            form["allOf"] = [*every, *further]
        return form

    def _patterns(self, place: str, patterns: Mapping[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for pattern, schema in patterns.items():
            expression = self._expression(f"{place}/patternProperties", pattern)
            if ecma.UNASSIGNED in expression:
                raise SchemaError(
                    f"{place}/patternProperties", "a negated property of Unicode is not supported in names"
                )
            if expression in made:
                raise SchemaError(f"{place}/patternProperties", f"{pattern!r} is another spelling of one before it")
            made[expression] = schema
        return made

    def _expression(self, place: str, pattern: Any) -> str:
        if not isinstance(pattern, str):
            raise SchemaError(place, "'pattern' is not text")
        try:
            return ecma.rewritten(pattern, self._without)
        except ecma.ExpressionError as error:
            raise SchemaError(place, str(error)) from None

    def _check_spelling(self, place: str, name: str, value: Any) -> None:
        is_constant = name in ("const", "enum") and self._without is ecma.UNSPELLABLE
        if is_constant and any(_has_one_of(text, self._without) for text in _texts(value)):
            raise SchemaError(place, f"{name!r} has a control character, which cannot be generated here")


def _further(format_name: str) -> list[dict[str, Any]]:
    """Schemas for what a format demands beyond the library's expression for it."""
    if format_name in INSTEAD:
        return [{"pattern": INSTEAD[format_name]}]
    return list(FURTHER.get(format_name, ()))


def _without_bounds(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in schema.items() if name not in numbers.BOUNDS}


def _has_one_of(text: str, ranges: ecma.Ranges) -> bool:
    return any(low <= ord(sign) <= high for sign in text for low, high in ranges)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | Mapping):
        for each in value if isinstance(value, list) else value.values():
            yield from _texts(each)
