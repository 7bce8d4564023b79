"""Calls of tools out of the text of one region, as it comes.

A call begins when its name and the first character of its arguments are known, and has at least that one: so nothing of
it has to be taken back. What is no call, or stands around one, is left for others (`left`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, Final, NamedTuple, Protocol

import regex

from common.json_text import is_text
from router.answers.channels.regions import Closed, Opened
from router.answers.channels.template import CallForm, Field
from router.answers.channels.values import part_value, python_value, schema_types, typed

_BLANKS: Final = " \t\n\r"
# Keys beside name and arguments that say nothing more.
_EXTRA_KEYS: Final = frozenset({"id", "type"})
_IN_STRING: Final = regex.compile(r'["\\]')
_IN_VALUE: Final = regex.compile(r'["\[\]{}]')
# Behind the last character that may mean something else in a pattern, and what may belong to it.
_LITERAL_END: Final = regex.compile(r"(?:\A|[()\[\]{}*+?.^$|]|\\.)([^\\()\[\]{}*+?.^$|]*)\Z")
_SCALAR: Final = regex.compile(r"[^\s,\]}]+")
NO_ARGUMENTS: Final = "{}"
# First characters of values that can be arguments: an object, a string that contains one, or `null`.
_ARGUMENTS_BEGIN: Final = '{"n'
# Of a tool: the schema of each argument.
Properties = Mapping[str, Any]


class CallPart(NamedTuple):
    """The next part of a call: its name where it begins, then more of its arguments."""

    name: str
    arguments: str


class CallRegion(Protocol):
    """Reads one region.

    Attributes:
        is_whole: True if the last call that has begun has all its arguments.
    """

    is_whole: bool

    @property
    def left(self) -> str:
        """Text that no call has."""

    def push(self, text: str) -> list[CallPart]:
        """Takes the next piece of the region."""

    def finish(self, closed: Closed) -> list[CallPart]:
        """Takes the end of the region."""


class Tools:
    """The tools that a request has.

    Args:
        properties: schemas of their arguments, by the names of tools and arguments.
    """

    def __init__(self, properties: Mapping[str, Properties]) -> None:
        self._properties = properties

    def knows(self, name: str) -> bool:
        """True if there is a tool of this name."""
        return name in self._properties

    def typed(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of which texts have the types that the tool's schema declares."""
        return {key: self.typed_value(name, key, value) for key, value in arguments.items()}

    def typed_value(self, name: str, key: str, value: Any) -> Any:
        """One argument."""
        types = schema_types(self._properties.get(name, {}).get(key))
        if isinstance(value, str):
            return _with_python(typed(value, types), types)
        if types and isinstance(value, list) and "array" not in types:
            # A name that stood several times.
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


def call_region(opened: Opened, tools: Tools) -> CallRegion:
    """Reader of a region that begins."""
    # Without a delimiter any JSON could be a call.
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
    """JSON as templates write it; half of a surrogate pair stays the escape that the model wrote."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()


class _WholeRegion:
    """A region whose value is known when it ends."""

    def __init__(self, opened: Opened, tools: Tools, accepts: Callable[[str], bool]) -> None:
        self.left = ""
        self.is_whole = False
        self._opened = opened
        self._tools = tools
        self._accepts = accepts

    def push(self, text: str) -> list[CallPart]:
        self.left += text
        return []

    def finish(self, closed: Closed) -> list[CallPart]:
        """Takes all calls, or none."""
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
    """A region with each argument between tags."""

    def __init__(self, field: Field, name: str, tools: Tools, accepts: Callable[[str], bool]) -> None:
        self.is_whole = False
        self._name = name
        self._tools = tools
        self._pattern = regex.compile(field.content_args["tag_pattern"], regex.DOTALL)
        # A tag ends with it: without one that is new, a long text need not be searched again.
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
        """Text that is no argument."""
        text = self._between + self._text
        return text if text.strip() else ""

    def push(self, text: str) -> list[CallPart]:
        """Gives the arguments that are whole."""
        seen = self._text[max(0, len(self._text) - len(self._tag_end) + 1) :]
        self._may_match |= self._tag_end in seen + text
        self._text += text
        return self._take(final=False)

    def finish(self, closed: Closed) -> list[CallPart]:
        """Gives the rest; a region that is cut off has not told all."""
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
        """True if the text begins as an argument does: with the same character."""
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
    """Text that every match of a pattern ends with; "" where it is not known."""
    match = _LITERAL_END.search(pattern)
    means_more = regex.compile(pattern).flags & (regex.IGNORECASE | regex.VERBOSE)
    return "" if match is None or means_more else str(match[1])


class _Copy:
    """Follows one JSON value to its end, by its strings and brackets.

    Attributes:
        is_done: True once the value is whole.
    """

    def __init__(self, first: str) -> None:
        self.is_done = False
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._is_scalar = first not in '"[{'

    def push(self, text: str, start: int) -> int:
        """Place behind the part of `text` from `start` on that belongs to the value."""
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
    """JSON text of the object in a JSON value: the object itself, {} for `null`, a string's content; else empty."""
    if value.startswith("{"):
        return value
    text = NO_ARGUMENTS if value == "null" else _string(value)
    return text if _is_object(text) else ""


class _BodyRegion:
    """A region that is the arguments."""

    def __init__(self, name: str, accepts: Callable[[str], bool]) -> None:
        self.left = ""
        self.is_whole = False
        self._name = name
        self._is_refused = not accepts(name)
        self._copy: _Copy | None = None
        self._arguments = ""

    def push(self, text: str) -> list[CallPart]:
        """Gives the arguments as they come."""
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

    def finish(self, closed: Closed) -> list[CallPart]:
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


class _Expected(Enum):
    """The next thing in an object, or in a list of objects."""

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
    """Something has come that is not JSON of this form."""


class _ObjectRegion:
    """A region with one JSON object, or a list of them, of which each is a call."""

    def __init__(self, field: Field, accepts: Callable[[str], bool]) -> None:
        self.is_whole = False
        # Text that no call has for certain, and text that one may still take.
        self._lost = ""
        self._pending = ""
        self._is_list = field.form is CallForm.LIST
        self._name_key = field.name_key
        self._arguments_key = field.arguments_key
        self._accepts = accepts
        self._expected = _Expected.NEXT_OBJECT if self._is_list else _Expected.OBJECT
        self._has_list = not self._is_list
        self._has_objects = False
        self._copy: _Copy | None = None
        self._begin_object()

    @property
    def left(self) -> str:
        """Text that no call has."""
        return self._lost + self._pending

    def _begin_object(self) -> None:
        self._key = ""
        self._has_others = False
        self._value = ""
        self._name: str | None = None
        # Arguments that came before the name.
        self._early = ""
        self._has_begun = False
        self._has_entries = False

    def push(self, text: str) -> list[CallPart]:
        """Gives names and arguments as they come."""
        parts: list[CallPart] = []
        at = 0
        while at < len(text):
            if self._expected in (_Expected.NOTHING, _Expected.END):
                self._pending += text[at:]
                break
            at = self._copied(text, at, parts) if self._copy is not None else self._structured(text, at, parts)
        return parts

    def finish(self, closed: Closed) -> list[CallPart]:
        """Leaves what is no call."""
        return []

    def _copied(self, text: str, at: int, parts: list[CallPart]) -> int:
        """Takes a key or a value as far as it has come."""
        assert self._copy is not None
        end = self._copy.push(text, at)
        piece = text[at:end]
        self._value += piece
        streams = self._has_begun and self._key == self._arguments_key and self._expected is _Expected.VALUE_TEXT
        if streams:
            parts.append(CallPart("", piece))
        else:
            self._pending += piece
        if self._copy.is_done:
            self._copy = None
            self._end_text(parts)
        return end

    def _end_text(self, parts: list[CallPart]) -> None:
        if self._expected is _Expected.KEY_TEXT:
            self._key = _string(self._value)
            self._has_others |= self._key not in _EXTRA_KEYS and self._key not in (self._name_key, self._arguments_key)
            self._expected = _Expected.COLON
            return
        self._expected = _Expected.COMMA
        if self._key == self._name_key and not self._has_begun:
            self._name = _string(self._value)
            if not self._accepts(self._name):
                self._expected = _Expected.NOTHING
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
            self._expected = _Expected.NOTHING
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
        """Takes a character between keys and values."""
        char = text[at]
        if char in _BLANKS:
            self._pending += char
            return at + 1
        step = self._step(char, parts)
        if step is _Expected.VALUE_TEXT or step is _Expected.KEY_TEXT:
            # Its first character is part of it.
            self._expected, self._value, self._copy = step, "", _Copy(char)
            return at
        self._pending += char
        if step is _Expected.END or (char == "}" and step is _Expected.NEXT_OBJECT):
            # What ends an object or the list is of the calls.
            self._lost += self._pending if self._has_others else ""
            self._pending, self._has_others = "", False
        self._expected = step
        return at + 1

    def _step(self, char: str, parts: list[CallPart]) -> _Expected:
        """The next thing behind a character between keys and values; a text where it begins one."""
        match self._expected:
            case _Expected.NEXT_OBJECT:
                return self._in_list(char)
            case _Expected.OBJECT if char == "{":
                self._begin_object()
                return _Expected.KEY
            case _Expected.KEY if char == '"':
                return _Expected.KEY_TEXT
            case _Expected.KEY if char == "}" and not self._has_entries:
                return self._end_object(parts)
            case _Expected.COLON if char == ":":
                return _Expected.VALUE
            case _Expected.VALUE if char not in ",]}:":
                return self._begin_value(char, parts)
            case _Expected.COMMA if char == ",":
                self._has_entries = True
                return _Expected.KEY
            case _Expected.COMMA if char == "}":
                return self._end_object(parts)
        return _Expected.NOTHING

    def _in_list(self, char: str) -> _Expected:
        """The list begins, ends, or has another object."""
        if not self._has_list:
            self._has_list = char == "["
            return _Expected.NEXT_OBJECT if self._has_list else _Expected.NOTHING
        if char == "{" and not self._has_objects:
            self._has_objects = True
            self._begin_object()
            return _Expected.KEY
        if char == "]":
            return _Expected.END
        if char == "," and self._has_objects:
            return _Expected.OBJECT
        return _Expected.NOTHING

    def _begin_value(self, char: str, parts: list[CallPart]) -> _Expected:
        if self._key == self._arguments_key:
            if self._has_begun or char not in _ARGUMENTS_BEGIN:
                return _Expected.NOTHING
            if self._name is not None and char == "{":
                self._begin("", parts)
        return _Expected.VALUE_TEXT

    def _end_object(self, parts: list[CallPart]) -> _Expected:
        if not self._has_begun:
            if self._name is None or self._has_others:
                return _Expected.NOTHING
            self._begin(NO_ARGUMENTS, parts)
            self.is_whole = True
        return _Expected.NEXT_OBJECT if self._is_list else _Expected.END


def _string(text: str) -> str:
    """The value of a JSON string; empty for what is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
