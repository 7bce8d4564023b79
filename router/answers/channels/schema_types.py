"""Finds the types that a JSON Schema allows, through references and combined subschemas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, Final

from common.constraints import subschemas
from router.answers.channels.values import schema_types

TEXT: Final = "string"
# Order in which types are tried, after the types in the schema's own order.
TYPES: Final = ("integer", "number", "boolean", "null", "object", "array", TEXT)
NOTES: Final = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})
_OF_NUMBERS: Final = {"multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum"}
_RELEVANT: Final[Mapping[str, frozenset[str]]] = {
    "integer": frozenset(_OF_NUMBERS),
    "number": frozenset(_OF_NUMBERS),
    "object": frozenset(
        {"properties", "required", "patternProperties", "additionalProperties", "maxProperties", "minProperties"}
    ),
    "array": frozenset({"items", "prefixItems", "maxItems", "minItems"}),
}
_COMBINED: Final = ("$ref", "allOf", "anyOf", "oneOf")
_MOST_DEPTH: Final = 16
_MOST: Final = 64
_MOST_SUBSCHEMAS: Final = 1_000


class SchemaTypeError(ValueError):
    """The types of a schema's values cannot be determined; the message says why."""


@dataclass(frozen=True, slots=True)
class TypeAlternative:
    """One way to satisfy a schema.

    Attributes:
        types: types of the value; None for any.
        keywords: further keywords that the value has to satisfy, for each subschema.
    """

    types: tuple[str, ...] | None
    keywords: tuple[Mapping[str, Any], ...] = ()


def relevant(kind: str) -> frozenset[str]:
    """Returns the keywords that restrict values of a type."""
    return _RELEVANT.get(kind, frozenset()) | {"enum", "const"}


def types_of(schema: Any, root: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the types that a schema allows, its own `type` first; empty if it allows any type or types are unknown.

    Args:
        schema: a subschema of `root`.
        root: the whole schema, for references.
    """
    own = schema_types(schema)
    if own and not _refers(schema):
        return own
    try:
        found = alternatives(schema, root)
    except SchemaTypeError:
        return own
    if any(each.types is None for each in found):
        return ()
    every = {kind for each in found for kind in (each.types or ())}
    return tuple(dict.fromkeys((*(kind for kind in own if kind in every), *(kind for kind in TYPES if kind in every))))


def _refers(schema: Any) -> bool:
    """True if keywords other than `type`, `anyOf` and `oneOf` decide on the types of a schema."""
    if not isinstance(schema, Mapping):
        return False
    branches = (each for union in ("anyOf", "oneOf") for each in _list(schema, union))
    return "$ref" in schema or "allOf" in schema or any(not schema_types(each) or _refers(each) for each in branches)


def alternatives(schema: Any, root: Mapping[str, Any]) -> list[TypeAlternative]:
    """Returns all ways to satisfy a schema.

    Args:
        schema: a subschema of `root`.
        root: the whole schema, for references.

    Raises:
        SchemaTypeError: the schema refers to itself, to a missing subschema, or has too many alternatives.
    """
    return _Walk(root).alternatives(schema)


class _Walk:
    """Walks through a schema and its references, within bounds of depth and number."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._left = _MOST_SUBSCHEMAS

    def alternatives(self, schema: Any, depth: int = 0) -> list[TypeAlternative]:
        self._left -= 1
        if depth > _MOST_DEPTH or self._left < 0:
            raise SchemaTypeError("it refers to itself, or its subschemas are too many or nested too deeply")
        if not isinstance(schema, Mapping):
            return [] if schema is False else [TypeAlternative(None)]
        merged = [_own(schema)]
        for part in self._parts(schema, depth + 1):
            merged = [one for chosen in product(merged, part) if (one := _merged(chosen)) is not None]
            if len(merged) > _MOST:
                raise SchemaTypeError(f"it has more than {_MOST} alternatives")
        return merged

    def _parts(self, schema: Mapping[str, Any], depth: int) -> Iterator[list[TypeAlternative]]:
        """Yields the alternatives of each subschema that a value has to satisfy besides."""
        if "$ref" in schema:
            yield self.alternatives(referred(schema["$ref"], self._root), depth)
        for each in _list(schema, "allOf"):
            yield self.alternatives(each, depth)
        for union in ("anyOf", "oneOf"):
            if union in schema:
                found = [self.alternatives(each, depth) for each in _list(schema, union)]
                if union == "oneOf":
                    _check_apart(found)
                yield [each for inner in found for each in inner]


def _list(schema: Mapping[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _own(schema: Mapping[str, Any]) -> TypeAlternative:
    keywords = {name: value for name, value in schema.items() if name not in (*_COMBINED, "type", *NOTES)}
    declared = schema.get("type")
    given = [declared] if isinstance(declared, str) else declared
    types = [kind for kind in given if isinstance(kind, str)] if isinstance(given, list) else None
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if types is None and isinstance(values, list):
        types = list(dict.fromkeys(map(_type_of, values)))
    return TypeAlternative(None if types is None else tuple(types), (keywords,) if keywords else ())


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds = {int: "integer", float: "number", str: TEXT, list: "array", dict: "object", type(None): "null"}
    return kinds[type(value)]


def _merged(chosen: Sequence[TypeAlternative]) -> TypeAlternative | None:
    """Merges alternatives into one that satisfies all; None if their types exclude each other."""
    types: tuple[str, ...] | None = None
    for each in chosen:
        types = each.types if types is None else types if each.types is None else _common(types, each.types)
    if types == ():
        return None
    return TypeAlternative(types, tuple(keywords for each in chosen for keywords in each.keywords))


def _common(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(
        kind
        for kind in TYPES
        if all(kind in types or (kind == "integer" and "number" in types) for types in (one, other))
    )


def _check_apart(found: Sequence[Sequence[TypeAlternative]]) -> None:
    """Refuses `oneOf` branches if a string could satisfy two of them."""
    may_be_text = [any(each.types is None or TEXT in each.types for each in branch) for branch in found]
    if any(a and b for a, b in combinations(may_be_text, 2)):
        raise SchemaTypeError("a string could satisfy several branches of its 'oneOf'")


def referred(reference: Any, root: Mapping[str, Any]) -> Any:
    """Resolves a reference to its subschema.

    Raises:
        SchemaTypeError: the reference is not supported, or its target is missing.
    """
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise SchemaTypeError(
            f"'$ref' {reference!r} is not supported between tags: only those that begin with '#/' are"
        )
    found: Any = root
    for step in reference.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdigit() and int(key) < len(found):
            found = found[int(key)]
        elif isinstance(found, Mapping) and key in found:
            found = found[key]
        else:
            raise SchemaTypeError(f"'$ref' {reference!r} is of nothing")
    return found


def with_root(schema: Any, root: Mapping[str, Any]) -> Any:
    """Makes a subschema self-contained: adds the definitions that its references need."""
    if not isinstance(schema, Mapping):
        return schema
    references = [*_references(schema)]
    if not references:
        return schema
    known = subschemas.definitions(root)
    if all(each.startswith(("#/$defs/", "#/definitions/")) for each in [*references, *_references(known)]):
        return {**schema, **known}
    # References point into the whole schema, so it becomes a definition.
    own = {name: value for name, value in _moved(schema).items() if name not in ("$defs", "definitions")}
    return {**own, "$defs": {"root": _moved(root)}}


def _references(schema: Any) -> list[str]:
    found = [each["$ref"] for _, each in subschemas.walk(schema) if isinstance(each, Mapping) and "$ref" in each]
    return [each for each in found if isinstance(each, str)]


def _moved(schema: Any) -> Any:
    """Rewrites the references of a schema to a root that has become a definition."""
    if isinstance(schema, Mapping):
        return {
            name: f"#/$defs/root{value[1:]}" if name == "$ref" and isinstance(value, str) else _moved(value)
            for name, value in schema.items()
        }
    return [_moved(each) for each in schema] if isinstance(schema, list) else schema
