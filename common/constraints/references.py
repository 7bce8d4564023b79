"""Resolves the `$ref`s of a JSON Schema to the subschemas that they refer to.

The library only gets pointers from the root: `$id`, `$anchor` and `$schema` change how it reads keywords beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import quote, unquote, urldefrag, urljoin

# Characters that need no escape in a URI's fragment.
_SAFE: Final = "/~!$&'()*+,;=:@-._?"


class UnresolvedError(ValueError):
    """A `$ref` refers to no subschema, or to no single one; the message says why.

    Attributes:
        place: JSON Pointer of the subschema that has the `$ref`.
    """

    def __init__(self, place: str, message: str) -> None:
        super().__init__(message)
        self.place = place


def resolved(subschemas: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """For each subschema with `$ref`, the place that it refers to.

    Args:
        subschemas: all subschemas of a schema with their JSON Pointers, outer ones first.

    Raises:
        UnresolvedError: a `$ref` refers to no subschema, or to no single one.
    """
    known = _KnownSubschemas()
    for place, schema in subschemas:
        known.add(place, schema)
    return {place: known.target(place, reference) for place, reference in known.references.items()}


def pointer(place: str) -> str:
    """The `$ref` that refers to a place."""
    return "#" + quote(place, safe=_SAFE)


class _KnownSubschemas:
    """Subschemas of a schema by the names that references use."""

    def __init__(self) -> None:
        self.references: dict[str, str] = {}
        self._bases: dict[str, str] = {}
        # None for a name that two subschemas have, so that no `$ref` resolves to it.
        self._named: dict[str, str | None] = {}

    def add(self, place: str, schema: Any) -> None:
        parent = place
        while parent and parent not in self._bases:
            parent = parent.rpartition("/")[0]
        base = self._bases.get(parent, "")
        if not isinstance(schema, Mapping):
            self._bases[place] = base
            return
        own, fragment = urldefrag(_joined(base, schema.get("$id", "")))
        if not place or own != base:
            self._name(own, place)
        self._bases[place] = own
        # Drafts 6 and 7 write an anchor as the fragment of `$id`.
        anchors = {schema.get("$anchor"), fragment if not fragment.startswith("/") else None} - {None, ""}
        for anchor in anchors:
            self._name(f"{own}#{anchor}", place)
        if "$ref" in schema:
            self.references[place] = schema["$ref"]

    def _name(self, name: str, place: str) -> None:
        self._named[name] = place if self._named.get(name, place) == place else None

    def target(self, place: str, reference: str) -> str:
        """The place that a reference resolves to."""
        uri, fragment = urldefrag(_joined(self._bases[place], reference))
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            found = self._named.get(f"{uri}#{fragment}")
        else:
            root = self._named.get(uri)
            found = None if root is None else root + fragment
        if found is None or found not in self._bases:
            raise UnresolvedError(
                place,
                f"'$ref' {reference!r} means no subschema of this schema, or no single one: a reference is a JSON"
                " Pointer to a subschema such as '#/$defs/name', or an '$id' or '$anchor' of one",
            )
        return found


def _joined(base: str, reference: str) -> str:
    if not reference or reference.startswith("#"):
        return base + reference
    try:
        return urljoin(base, reference)
    except ValueError:
        return reference
