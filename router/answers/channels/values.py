"""Parses the text of a region to its value, gives it the shape of the template, and types arguments.

Values and ValueErrors are the same as those of transformers (`utils/chat_parsing`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

import regex

Arguments = Mapping[str, Any]
# Placeholder of a string between a model's own delimiters, while the JSON around it is parsed.
_HELD: Final = "\x01{}\x02"
_BARE_KEY: Final = regex.compile(r'"(?:\\.|[^"\\])*"|(?<=[{,])(\s*)(\w+)(\s*):')
_PLACEHOLDER: Final = regex.compile(r"\{(\w+(?:\.\w+)*)\}")


def text_value(text: str, arguments: Arguments) -> str:
    """Returns the text, without blanks around it unless `strip` is false."""
    return text.strip() if arguments.get("strip", True) else text


def json_value(text: str, arguments: Arguments) -> Any:
    """Parses JSON; by its arguments also with other string delimiters, bare keys, or no JSON at all."""
    try:
        return json.loads(_strict_json(text, arguments))
    except json.JSONDecodeError as error:
        if arguments.get("allow_non_json"):
            return text_value(text, arguments)
        raise ValueError(f"no JSON: {error}") from None


def _strict_json(text: str, arguments: Arguments) -> str:
    delimiters = arguments.get("string_delims") or ()
    if delimiters and ("\x01" in text or "\x02" in text):
        raise ValueError("control characters stand where strings are marked by them")
    strings: list[str] = []

    def hold(match: Any) -> str:
        strings.append(match[1])
        return _HELD.format(len(strings) - 1)

    for begin, end in delimiters:
        pattern = regex.escape(begin) + "(.*?)" + regex.escape(end)
        text = regex.sub(pattern, hold, text, flags=regex.DOTALL)
    if arguments.get("unquoted_keys"):
        text = _BARE_KEY.sub(lambda m: m[0] if m[2] is None else f'{m[1]}"{m[2]}"{m[3]}:', text)
    for place, string in enumerate(strings):
        text = text.replace(_HELD.format(place), json.dumps(string))
    return text


def part_value(text: str, parser: Mapping[str, Any] | None) -> Any:
    """Parses a text of an answer with a parser of the response template; None keeps it as text."""
    return text if parser is None else PARSERS[parser.get("name", "text")](text, parser.get("args", {}))


def _tag_values(text: str, arguments: Arguments) -> dict[str, Any]:
    if "tag_pattern" not in arguments:
        raise ValueError("xml-inline has no tag_pattern")
    values: dict[str, Any] = {}
    repeated = set[str]()
    for match in regex.finditer(arguments["tag_pattern"], text, flags=regex.DOTALL):
        groups = match.groupdict()
        key = groups.get("key")
        if key is None:
            raise ValueError("tag_pattern has no group 'key'")
        value = part_value(groups.get("value", ""), arguments.get("value_parser"))
        if key not in values or not arguments.get("merge_duplicates"):
            values[key] = value
        elif key in repeated:
            values[key].append(value)
        else:
            repeated.add(key)
            values[key] = [values[key], value]
    return values


def _line_values(text: str, arguments: Arguments) -> dict[str, Any]:
    separator = arguments.get("kv_sep", ":")
    values = {}
    for line in text.split(arguments.get("line_sep", "\n")):
        stripped = text_value(line, arguments)
        if stripped and separator in stripped:
            key, value = (text_value(each, arguments) for each in stripped.split(separator, 1))
            values[key] = part_value(value, arguments.get("value_parser"))
    return values


class _CallList:
    """Parses calls in Python syntax: a list, such as `[f(a=1), g()]`, or one a line."""

    _BLANKS: Final = regex.compile(r"[ \t\n\r]*")
    _LINE_END: Final = regex.compile(r"[ \t\r]*(?:[\n,]|\Z)")
    _NAME: Final = regex.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:[-.][A-Za-z0-9_]+)*")
    _NUMBER: Final = regex.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
    _STRING: Final = regex.compile(r"""'((?:[^'\\\n\r]|\\.)*)'|"((?:[^"\\\n\r]|\\.)*)\"""", flags=regex.DOTALL)
    _LONG_STRING: Final = regex.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)\"""", flags=regex.DOTALL)
    _ESCAPE: Final = regex.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", flags=regex.DOTALL)
    _SURROGATE: Final = regex.compile(r"[\ud800-\udfff]")
    _ESCAPED: Final = {**{c: c for c in "\\'\"/"}, "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
    _CONSTANTS: Final = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
    _MOST_DIGITS: Final = 17
    _MOST_INTEGER: Final = 2**53 - 1
    _MOST_DEPTH: Final = 100

    def __init__(self, text: str, *, has_line_ends: bool = False) -> None:
        self._text = text
        self._at = 0
        self._string_pattern = self._LONG_STRING if has_line_ends else self._STRING

    def read(self) -> list[dict[str, Any]]:
        """Returns the calls, with name and arguments."""
        self._expect("[")
        calls = self._items("]", self._call)
        if self._match(self._BLANKS) is not None and self._at != len(self._text):
            self._fail("something stands behind the list")
        return calls

    def read_lines(self) -> list[dict[str, Any]]:
        """Returns the calls, one a line, with name and arguments."""
        calls = []
        while self._match(self._BLANKS) is not None and self._at != len(self._text):
            calls.append(self._call())
            if self._match(self._LINE_END) is None:
                self._fail("something stands behind a call")
        return calls

    def _fail(self, problem: str) -> NoReturn:
        raise ValueError(f"no list of calls: {problem}, at {self._at}")

    def _match(self, pattern: Any) -> Any:
        match = pattern.match(self._text, self._at)
        if match is not None:
            self._at = match.end()
        return match

    def _sees(self, char: str) -> bool:
        self._match(self._BLANKS)
        return self._text.startswith(char, self._at)

    def _expect(self, char: str) -> None:
        if not self._sees(char):
            self._fail(f"{char} is missing")
        self._at += 1

    def _items(self, close: str, item: Callable[[], Any]) -> list[Any]:
        items: list[Any] = []
        while not self._sees(close):
            if items:
                self._expect(",")
            items.append(item())
        self._at += 1
        return items

    def _unique(self, pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            self._fail("a name stands twice")
        return values

    def _name(self) -> str:
        self._match(self._BLANKS)
        match = self._match(self._NAME)
        if match is None:
            self._fail("a name is missing")
        return str(match[0])

    def _call(self) -> dict[str, Any]:
        name = self._name()
        self._expect("(")
        return {"name": name, "arguments": self._unique(self._items(")", self._argument))}

    def _argument(self) -> tuple[str, Any]:
        name = self._name()
        self._expect("=")
        return name, self._value(0)

    def _value(self, depth: int) -> Any:
        if self._sees("'") or self._sees('"'):
            return self._string()
        if self._sees("[") or self._sees("{"):
            if depth >= self._MOST_DEPTH:
                self._fail("it is nested too deeply")
            self._at += 1
            if self._text[self._at - 1] == "[":
                return self._items("]", lambda: self._value(depth + 1))
            return self._unique(self._items("}", lambda: self._pair(depth + 1)))
        if (match := self._match(self._NUMBER)) is not None:
            return self._number(match)
        match = self._match(self._NAME)
        if match is None or match[0] not in self._CONSTANTS:
            self._fail("a value is missing")
        return self._CONSTANTS[match[0]]

    def _number(self, match: Any) -> int | float:
        if match[1] is None and match[2] is None:
            # A long number is refused before it becomes an int.
            if len(match[0]) > self._MOST_DIGITS or abs(int(match[0])) > self._MOST_INTEGER:
                self._fail("an integer is too large")
            return int(match[0])
        if math.isinf(number := float(match[0])):
            self._fail("a number is too large")
        return number

    def _pair(self, depth: int) -> tuple[str, Any]:
        if not self._sees("'") and not self._sees('"'):
            self._fail("a key is not a string")
        key = self._string()
        self._expect(":")
        return key, self._value(depth)

    def _string(self) -> str:
        match = self._match(self._string_pattern)
        if match is None:
            self._fail("a string does not end")
        body = match[1] if match[1] is not None else match[2]
        if self._SURROGATE.search(body):
            self._fail("a string has half a character")
        text = str(self._ESCAPE.sub(self._unescaped, body))
        # Two escapes may be one character; a single surrogate is an error.
        return text.encode("utf-16", "surrogatepass").decode("utf-16")

    def _unescaped(self, match: Any) -> str:
        if match[1] is not None:
            return chr(int(match[1], 16))
        if match[2] not in self._ESCAPED:
            self._fail("a string has an escape that there is not")
        return self._ESCAPED[match[2]]


def _call_list(text: str, arguments: Arguments) -> _CallList:
    """Parser of calls in Python syntax. `line_ends`, unknown to transformers, allows line ends in strings."""
    return _CallList(text, has_line_ends=bool(arguments.get("line_ends")))


def python_value(text: str) -> Any:
    """Parses a list or an object in Python syntax.

    Raises:
        ValueError: `text` is neither a list nor an object.
    """
    value = _CallList(f"[f(x={text})]").read()[0]["arguments"]["x"]
    if not isinstance(value, list | dict):
        raise ValueError("it is neither a list nor an object")
    return value


PARSERS: Final[Mapping[str, Callable[[str, Arguments], Any]]] = {
    "text": text_value,
    "int": lambda text, arguments: int(text_value(text, arguments)),
    "float": lambda text, arguments: float(text_value(text, arguments)),
    "bool": lambda text, arguments: text_value(text, arguments).lower() in ("true", "1"),
    "json": json_value,
    "xml-inline": _tag_values,
    "kv-lines": _line_values,
    "python-call-list": lambda text, arguments: _call_list(text, arguments).read(),
    # Unknown to transformers.
    "python-call-lines": lambda text, arguments: _call_list(text, arguments).read_lines(),
}


def placeholder(template: Any) -> str:
    """Returns the name in a placeholder such as `{content.name}`; "" for any other value."""
    match = _PLACEHOLDER.fullmatch(template) if isinstance(template, str) else None
    return match[1] if match else ""


def has_mixed_text(template: Any) -> bool:
    """True if a string of a transform has a placeholder and other text."""
    if isinstance(template, dict | list):
        return any(map(has_mixed_text, template.values() if isinstance(template, dict) else template))
    return isinstance(template, str) and not placeholder(template) and _PLACEHOLDER.search(template) is not None


def transformed(template: Any, scope: Mapping[str, Any]) -> Any:
    """Fills in the placeholders of a transform.

    Raises:
        ValueError: a placeholder names a missing value.
    """
    if isinstance(template, dict):
        return {key: transformed(item, scope) for key, item in template.items()}
    if isinstance(template, list):
        return [transformed(item, scope) for item in template]
    path = placeholder(template)
    if not path:
        return template
    value: Any = scope
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"there is no {{{path}}}")
        value = value[key]
    return value


def schema_types(schema: Any) -> tuple[str, ...]:
    """Returns the types that a JSON Schema declares, in order."""
    if not isinstance(schema, Mapping):
        return ()
    declared = schema.get("type")
    types = [declared] if isinstance(declared, str) else []
    if isinstance(declared, list):
        types += [each for each in declared if isinstance(each, str)]
    for union in ("anyOf", "oneOf"):
        choices = schema.get(union)
        for choice in choices if isinstance(choices, list) else ():
            types += schema_types(choice)
    return (*types, "null") if schema.get("nullable") and "null" not in types else tuple(types)


def typed(raw: str, types: Sequence[str]) -> Any:
    """Converts a text to the first type that fits; returns the text if no type fits."""
    for name in types:
        try:
            found, value = _TYPED.get(name, _no_value)(raw)
        except ValueError:
            continue
        if found:
            return value
    return raw


def _no_value(raw: str) -> tuple[bool, Any]:
    return False, raw


def _integer(raw: str) -> tuple[bool, Any]:
    try:
        return True, int(raw)
    except ValueError:
        number = float(raw)
        return number.is_integer(), int(number) if number.is_integer() else raw


def _number(raw: str) -> tuple[bool, Any]:
    number = float(raw)
    if not math.isfinite(number):
        return False, raw
    return True, int(number) if number.is_integer() and "." not in raw else number


def _decoded(raw: str, kind: type) -> tuple[bool, Any]:
    value = json.loads(raw)
    return isinstance(value, kind), value


_TYPED: Final[Mapping[str, Callable[[str], tuple[bool, Any]]]] = {
    "integer": _integer,
    "number": _number,
    "boolean": lambda raw: (raw.strip().lower() in ("true", "1", "false", "0"), raw.strip().lower() in ("true", "1")),
    "null": lambda raw: (raw.strip() in ("null", "None"), None),
    "object": lambda raw: _decoded(raw, dict),
    "array": lambda raw: _decoded(raw, list),
}
