"""Reads calls of tools from the text of one region as it arrives.

A call is reported when its name and the first character of its arguments are known, so that no part has to be taken
back. Text that belongs to no call is kept in `left`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, Final, NamedTuple, Protocol

import regex

from common.json_text import is_text
from router.answers.channels.regions import RegionEnd, RegionStart
from router.answers.channels.template import CallForm, Field
from router.answers.channels.values import part_value, python_value, schema_types, typed

_BLANKS: Final = " \t\n\r"
# Keys beside name and arguments that are ignored.
_EXTRA_KEYS: Final = frozenset({"id", "type"})
_IN_STRING: Final = regex.compile(r'["\\]')
_IN_VALUE: Final = regex.compile(r'["\[\]{}]')
# Matches the literal text at the end of a pattern.
_LITERAL_END: Final = regex.compile(r"(?:\A|[()\[\]{}*+?.^$|]|\\.)([^\\()\[\]{}*+?.^$|]*)\Z")
_SCALAR: Final = regex.compile(r"[^\s,\]}]+")
NO_ARGUMENTS: Final = "{}"
# First characters of values that can be arguments: an object, a string that contains one, or `null`.
_ARGUMENTS_BEGIN: Final = '{"n'
# Schema of each argument of a tool.
Properties = Mapping[str, Any]


class CallPart(NamedTuple):
    """The next part of a call: the name in the first part, and text of the arguments."""

    name: str
    arguments: str


class CallRegion(Protocol):
    """Reads the calls of one region.

    Attributes:
        is_whole: True if the last call is complete.
    """

    is_whole: bool

    @property
    def left(self) -> str:
        """Text that belongs to no call."""

    def push(self, text: str) -> list[CallPart]:
        """Reads the next piece of the region. Returns parts of calls."""

    def finish(self, closed: RegionEnd) -> list[CallPart]:
        """Ends the region. Returns the last parts of calls."""


class ToolSchemas:
    """Schemas of a request's tools.

    Args:
        properties: schemas of arguments, by the names of tools and arguments.
    """

    def __init__(self, properties: Mapping[str, Properties]) -> None:
        self._properties = properties

    def knows(self, name: str) -> bool:
        """True if the request has a tool `name`."""
        return name in self._properties

    def typed(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Converts arguments that are texts to the types in the tool's schema."""
        return {key: self.typed_value(name, key, value) for key, value in arguments.items()}

    def typed_value(self, name: str, key: str, value: Any) -> Any:
        """Converts one argument to a type in the tool's schema."""
        types = schema_types(self._properties.get(name, {}).get(key))
        if isinstance(value, str):
            return _with_python(typed(value, types), types)
        if types and isinstance(value, list) and "array" not in types:
            # The argument was written several times.
            return [typed(item, types) if isinstance(item, str) else item for item in value]
        return value


def _with_python(value: Any, types: Sequence[str]) -> Any:
    """Converts a text in Python syntax to the list or object that `types` allow; other values stay unchanged."""
    if not isinstance(value, str) or "string" in types or not {"array", "object"} & {*types}:
        return value
    try:
        found = python_value(value)
    except ValueError:
        return value
    return found if ("array" if isinstance(found, list) else "object") in types else value


def call_region(opened: RegionStart, tools: ToolSchemas) -> CallRegion:
    """Returns the reader of a region by the form of its calls."""
    # Without a delimiter any JSON could look like a call, so its name must be that of a tool.
    accepts = _any if opened.delimiter.strip() else tools.knows
    form = opened.field.form
    if form is CallForm.WHOLE:
        return _WholeRegion(opened, tools, accepts)
    name = opened.captures.get(opened.field.name_key, "")
    if form is CallForm.TAGS:
        return _TagRegion(opened.field, name, tools, accepts)
    if form is CallForm.BODY:
        return _BodyRegion(name, accepts)
    return _ObjectRegion(opened.field, accepts)


def _any(name: str) -> bool:
    return bool(name) and is_text(name)


def dumps(value: Any) -> str:
    """Writes JSON as templates do; a single surrogate stays an escape, as the model wrote it."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()


class _WholeRegion:
    """Reads a region whose value is known when it ends."""

    def __init__(self, opened: RegionStart, tools: ToolSchemas, accepts: Callable[[str], bool]) -> None:
        self.left = ""
        self.is_whole = False
        self._opened = opened
        self._tools = tools
        self._accepts = accepts

    def push(self, text: str) -> list[CallPart]:
        self.left += text
        return []

    def finish(self, closed: RegionEnd) -> list[CallPart]:
        """Returns all calls of the region, or none if one is not valid."""
        try:
            value = self._opened.field.value(self.left, {**self._opened.captures, **closed.captures})
            parts = [self._part(call) for call in (value if isinstance(value, list) else [value])]
        except (ValueError, TypeError, KeyError, AttributeError):
            return []
        self.left, self.is_whole = "", True
        return parts

    def _part(self, call: Mapping[str, Any]) -> CallPart:
        function = call["function"]
        name, arguments = function["name"], function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict) or not isinstance(name, str) or not self._accepts(name):
            raise ValueError("it is not a call")
        return CallPart(name, dumps(self._tools.typed(name, arguments)))


class _TagRegion:
    """Reads a region with arguments between tags."""

    def __init__(self, field: Field, name: str, tools: ToolSchemas, accepts: Callable[[str], bool]) -> None:
        self.is_whole = False
        self._name = name
        self._tools = tools
        self._pattern = regex.compile(field.content_args["tag_pattern"], regex.DOTALL)
        # Literal end of each tag. A long text is searched again only after a new one.
        self._tag_end = _literal_end(field.content_args["tag_pattern"])
        self._may_match = True
        self._parser = field.content_args.get("value_parser")
        self._between = ""
        self._text = ""
        self._has_begun = False
        self._has_arguments = False
        self._is_refused = not accepts(name)

    @property
    def left(self) -> str:
        """Text that belongs to no argument."""
        text = self._between + self._text
        return text if text.strip() else ""

    def push(self, text: str) -> list[CallPart]:
        """Reads the next piece. Returns complete arguments."""
        seen = self._text[max(0, len(self._text) - len(self._tag_end) + 1) :]
        self._may_match |= self._tag_end in seen + text
        self._text += text
        return self._take(final=False)

    def finish(self, closed: RegionEnd) -> list[CallPart]:
        """Returns the rest of the call; a region that was cut off is not complete."""
        parts = self._take(final=True)
        is_short = closed.is_cut or (closed.delimiter is None and self.left)
        if is_short or self._is_refused or (self.left and not self._has_begun):
            return parts
        self.is_whole = True
        return [*parts, *self._begun(), CallPart("", "}")]

    def _begun(self) -> list[CallPart]:
        begins, self._has_begun = not self._has_begun, True
        return [CallPart(self._name, "{")] if begins else []

    def _take(self, *, final: bool) -> list[CallPart]:
        parts: list[CallPart] = []
        while self._may_match and not self._is_refused:
            match = self._pattern.search(self._text)
            self._may_match = match is not None
            if match is None or (match.end() == len(self._text) and not final):
                break
            parts += [*self._begun(), CallPart("", self._argument(match))]
            self._between += self._text[: match.start()]
            self._text = self._text[match.end() :]
        if not self._has_begun and not self._is_refused and self._may_be_argument():
            parts += self._begun()
        return parts

    def _may_be_argument(self) -> bool:
        """True if the text begins with the first character of an argument."""
        first = self.left.lstrip()[:1]
        return bool(first) and self._pattern.match(first, partial=True) is not None

    def _argument(self, match: Any) -> str:
        groups = match.groupdict()
        key, raw = groups.get("key") or "", groups.get("value") or ""
        try:
            value = part_value(raw, self._parser)
        except ValueError:
            value = raw
        separator, self._has_arguments = ", " if self._has_arguments else "", True
        return f"{separator}{dumps(key)}: {dumps(self._tools.typed_value(self._name, key, value))}"


def _literal_end(pattern: str) -> str:
    """Returns the text that every match of a pattern ends with; "" if unknown."""
    match = _LITERAL_END.search(pattern)
    means_more = regex.compile(pattern).flags & (regex.IGNORECASE | regex.VERBOSE)
    return "" if match is None or means_more else str(match[1])


class _Copy:
    """Finds the end of one JSON value, by its strings and brackets.

    Attributes:
        is_done: True once the value is complete.
    """

    def __init__(self, first: str) -> None:
        self.is_done = False
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._is_scalar = first not in '"[{'

    def push(self, text: str, start: int) -> int:
        """Returns the end of the part of `text`, from `start` on, that belongs to the value."""
        if self._is_scalar:
            match = _SCALAR.match(text, start)
            end = start if match is None else int(match.end())
            self.is_done = end < len(text)
            return end
        at = start
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            match = (_IN_STRING if self._in_string else _IN_VALUE).search(text, at)
            if match is None:
                break
            at = int(match.end())
            self._take(match[0])
            if not self._in_string and not self._depth:
                self.is_done = True
                return at
        return len(text)

    def _take(self, char: str) -> None:
        if char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = not self._in_string
        else:
            self._depth += 1 if char in "[{" else -1


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _object_text(value: str) -> str:
    """Returns the JSON object of a value: the object itself, {} for `null`, or the content of a string; else empty."""
    if value.startswith("{"):
        return value
    text = NO_ARGUMENTS if value == "null" else _string(value)
    return text if _is_object(text) else ""


class _BodyRegion:
    """Reads a region that consists of the arguments."""

    def __init__(self, name: str, accepts: Callable[[str], bool]) -> None:
        self.left = ""
        self.is_whole = False
        self._name = name
        self._is_refused = not accepts(name)
        self._copy: _Copy | None = None
        self._arguments = ""

    def push(self, text: str) -> list[CallPart]:
        """Returns the next text of the arguments."""
        start = 0
        name = ""
        if self._copy is None:
            self.left += text
            text = self.left.lstrip()
            if self._is_refused or not text.startswith("{"):
                return []
            self._copy, name, self.left = _Copy("{"), self._name, ""
        if not self._copy.is_done:
            start = self._copy.push(text, 0)
            self._arguments += text[:start]
            if self._copy.is_done:
                self.is_whole = _is_object(self._arguments)
        self.left += text[start:]
        return [CallPart(name, text[:start])] if start else []

    def finish(self, closed: RegionEnd) -> list[CallPart]:
        """Returns the call of a region that had no object: with {} if it is empty, or of a `null` or a string."""
        if self._copy is not None or self._is_refused:
            return []
        given = self.left.strip()
        is_empty = not given and closed.delimiter is not None
        arguments = NO_ARGUMENTS if is_empty else _object_text(given)
        if not arguments:
            return []
        self.left, self.is_whole = "", True
        return [CallPart(self._name, arguments)]


class _ObjectPlace(Enum):
    """Expected syntax at a place in an object, or in a list of objects."""

    OBJECT = auto()
    KEY = auto()
    KEY_TEXT = auto()
    COLON = auto()
    VALUE = auto()
    VALUE_TEXT = auto()
    COMMA = auto()
    NEXT_OBJECT = auto()
    END = auto()
    NOTHING = auto()
    """The text is not JSON of this form."""


class _ObjectRegion:
    """Reads a region with one JSON object, or a list of objects; each object is a call."""

    def __init__(self, field: Field, accepts: Callable[[str], bool]) -> None:
        self.is_whole = False
        # Text that belongs to no call, and text that may still belong to one.
        self._lost = ""
        self._pending = ""
        self._is_list = field.form is CallForm.LIST
        self._name_key = field.name_key
        self._arguments_key = field.arguments_key
        self._accepts = accepts
        self._expected = _ObjectPlace.NEXT_OBJECT if self._is_list else _ObjectPlace.OBJECT
        self._has_list = not self._is_list
        self._has_objects = False
        self._copy: _Copy | None = None
        self._begin_object()

    @property
    def left(self) -> str:
        """Text that belongs to no call."""
        return self._lost + self._pending

    def _begin_object(self) -> None:
        self._key = ""
        self._has_others = False
        self._value = ""
        self._name: str | None = None
        # Arguments that precede the name.
        self._early = ""
        self._has_begun = False
        self._has_entries = False

    def push(self, text: str) -> list[CallPart]:
        """Returns names and the next text of arguments."""
        parts: list[CallPart] = []
        at = 0
        while at < len(text):
            if self._expected in (_ObjectPlace.NOTHING, _ObjectPlace.END):
                self._pending += text[at:]
                break
            at = self._copied(text, at, parts) if self._copy is not None else self._structured(text, at, parts)
        return parts

    def finish(self, closed: RegionEnd) -> list[CallPart]:
        """Returns no call: the rest stays in `left`."""
        return []

    def _copied(self, text: str, at: int, parts: list[CallPart]) -> int:
        """Reads the next text of a key or value. Returns the place behind it."""
        assert self._copy is not None
        end = self._copy.push(text, at)
        piece = text[at:end]
        self._value += piece
        streams = self._has_begun and self._key == self._arguments_key and self._expected is _ObjectPlace.VALUE_TEXT
        if streams:
            parts.append(CallPart("", piece))
        else:
            self._pending += piece
        if self._copy.is_done:
            self._copy = None
            self._end_text(parts)
        return end

    def _end_text(self, parts: list[CallPart]) -> None:
        if self._expected is _ObjectPlace.KEY_TEXT:
            self._key = _string(self._value)
            self._has_others |= self._key not in _EXTRA_KEYS and self._key not in (self._name_key, self._arguments_key)
            self._expected = _ObjectPlace.COLON
            return
        self._expected = _ObjectPlace.COMMA
        if self._key == self._name_key and not self._has_begun:
            self._name = _string(self._value)
            if not self._accepts(self._name):
                self._expected = _ObjectPlace.NOTHING
            elif self._early:
                self._begin(self._early, parts)
                self.is_whole = _is_object(self._early)
        elif self._key == self._arguments_key:
            if self._has_begun:
                self.is_whole = _is_object(self._value)
            else:
                self._take_early(_object_text(self._value), parts)

    def _take_early(self, arguments: str, parts: list[CallPart]) -> None:
        """Handles arguments that precede the name, or that must be complete to be read: `null`, or a string."""
        if not arguments:
            self._expected = _ObjectPlace.NOTHING
        elif self._name is None:
            self._early = arguments
        else:
            self._begin(arguments, parts)
            self.is_whole = _is_object(arguments)

    def _begin(self, arguments: str, parts: list[CallPart]) -> None:
        self._has_begun, self.is_whole = True, False
        if not self._has_others:
            self._pending = ""
        parts.append(CallPart(self._name or "", arguments))

    def _structured(self, text: str, at: int, parts: list[CallPart]) -> int:
        """Reads a character between keys and values. Returns the next place."""
        char = text[at]
        if char in _BLANKS:
            self._pending += char
            return at + 1
        step = self._step(char, parts)
        if step is _ObjectPlace.VALUE_TEXT or step is _ObjectPlace.KEY_TEXT:
            # This character is the first of the key or value.
            self._expected, self._value, self._copy = step, "", _Copy(char)
            return at
        self._pending += char
        if step is _ObjectPlace.END or (char == "}" and step is _ObjectPlace.NEXT_OBJECT):
            # The end of an object or of the list belongs to the calls.
            self._lost += self._pending if self._has_others else ""
            self._pending, self._has_others = "", False
        self._expected = step
        return at + 1

    def _step(self, char: str, parts: list[CallPart]) -> _ObjectPlace:
        """Returns the expected syntax after a character between keys and values."""
        match self._expected:
            case _ObjectPlace.NEXT_OBJECT:
                return self._in_list(char)
            case _ObjectPlace.OBJECT if char == "{":
                self._begin_object()
                return _ObjectPlace.KEY
            case _ObjectPlace.KEY if char == '"':
                return _ObjectPlace.KEY_TEXT
            case _ObjectPlace.KEY if char == "}" and not self._has_entries:
                return self._end_object(parts)
            case _ObjectPlace.COLON if char == ":":
                return _ObjectPlace.VALUE
            case _ObjectPlace.VALUE if char not in ",]}:":
                return self._begin_value(char, parts)
            case _ObjectPlace.COMMA if char == ",":
                self._has_entries = True
                return _ObjectPlace.KEY
            case _ObjectPlace.COMMA if char == "}":
                return self._end_object(parts)
        return _ObjectPlace.NOTHING

    def _in_list(self, char: str) -> _ObjectPlace:
        """Returns the expected syntax after a character between the objects of a list."""
        if not self._has_list:
            self._has_list = char == "["
            return _ObjectPlace.NEXT_OBJECT if self._has_list else _ObjectPlace.NOTHING
        if char == "{" and not self._has_objects:
            self._has_objects = True
            self._begin_object()
            return _ObjectPlace.KEY
        if char == "]":
            return _ObjectPlace.END
        if char == "," and self._has_objects:
            return _ObjectPlace.OBJECT
        return _ObjectPlace.NOTHING

    def _begin_value(self, char: str, parts: list[CallPart]) -> _ObjectPlace:
        if self._key == self._arguments_key:
            if self._has_begun or char not in _ARGUMENTS_BEGIN:
                return _ObjectPlace.NOTHING
            if self._name is not None and char == "{":
                self._begin("", parts)
        return _ObjectPlace.VALUE_TEXT

    def _end_object(self, parts: list[CallPart]) -> _ObjectPlace:
        if not self._has_begun:
            if self._name is None or self._has_others:
                return _ObjectPlace.NOTHING
            self._begin(NO_ARGUMENTS, parts)
            self.is_whole = True
        return _ObjectPlace.NEXT_OBJECT if self._is_list else _ObjectPlace.END


def _string(text: str) -> str:
    """Parses a JSON string; returns an empty text for any other value."""
    try:
        value = json.loads(text)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
