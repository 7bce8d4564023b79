"""Response templates declare how a model writes reasoning, content and calls (`tokenizer_config.json`).

The format is version 1 of transformers'. A template has fields. Each field is a kind of region of the text between two
delimiters. Text outside all regions belongs to the field without an opening delimiter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Final

import regex

from router.answers.channels.values import PARSERS, has_mixed_text, placeholder, transformed

# Names of the field of reasoning in transformers' templates and messages.
REASONING_FIELDS: Final = frozenset({"thinking", "reasoning_content", "reasoning"})
CONTENT_FIELD: Final = "content"
CALLS_FIELD: Final = "tool_calls"
# Time limit of one search for a delimiter, in seconds: the pattern of a checkpoint may be slow.
_SEARCH_S: Final = 1.0
_TEMPLATE_KEYS: Final = frozenset({"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"})
_FIELD_KEYS: Final = frozenset(
    (
        *("open", "open_pattern", "close", "close_pattern", "content", "content_args"),
        *("repeats", "join", "optional", "transform", "transform_each"),
    )
)


class ResponseTemplateError(ValueError):
    """A response template cannot be used; the message is one line that says what is wrong."""


@dataclass(frozen=True, slots=True)
class Delimiter:
    """The beginning or end of a region.

    Attributes:
        pattern: compiled pattern.
        texts: the possible texts; empty if the template gives a pattern.
    """

    pattern: Any
    texts: tuple[str, ...] = ()

    @property
    def can_extend(self) -> bool:
        """True if one of the texts is the beginning of another."""
        return any(one != other and one.startswith(other) for one in self.texts for other in self.texts)

    def search(self, text: str, start: int, *, final: bool) -> Any:
        """Returns the first match from `start` on, or a partial match unless the text is `final`; None without one."""
        if final:
            return self.pattern.search(text, start, timeout=_SEARCH_S)
        return self.pattern.search(text, start, partial=True, timeout=_SEARCH_S)

    def may_change(self, text: str, match: Any) -> bool:
        """True if more text could change a full match."""
        if match.end() == len(text):
            return match.start() == match.end() or not self.texts or self.can_extend
        if self.texts:
            return False
        # Tries with a further character that is not an end of line, so that `$` no longer matches.
        longer = self.pattern.match(text + "\0", match.start())
        return longer is None or longer.span() != match.span() or longer.groupdict() != match.groupdict()


class CallForm(Enum):
    """Forms of name and arguments of a call within its region."""

    WHOLE = auto()
    """Any form, which is known when the region ends."""
    BODY = auto()
    """The name in the opening delimiter, the arguments as JSON."""
    OBJECT = auto()
    """A JSON object with a name and arguments."""
    LIST = auto()
    """A JSON array of such objects."""
    TAGS = auto()
    """The name in the opening delimiter, each argument between tags."""


@dataclass(frozen=True, slots=True)
class Field:
    """A kind of region of an answer's text.

    Attributes:
        name: name of the field in messages.
        open: opening delimiter; None for the field of text outside all regions.
        close: closing delimiter; None for a region that reaches to the end.
        content: name of the parser of the region's text.
        content_args: arguments of the parser.
        transform: shape of the value; None for the parsed value.
        transform_each: True if each entry of a list has the shape.
        join: text between the texts of several regions; None for the model's own text between them.
        repeats: True if an answer may have several such regions.
        form: form of calls.
        name_key: group of the delimiter, or key, that holds the name of a call.
        arguments_key: key that holds the arguments of a call.
    """

    name: str
    open: Delimiter | None
    close: Delimiter | None
    content: str
    content_args: Mapping[str, Any]
    transform: Any
    transform_each: bool
    join: str | None
    repeats: bool = False
    form: CallForm = CallForm.WHOLE
    name_key: str = ""
    arguments_key: str = ""

    @property
    def strips(self) -> bool:
        """True if blanks around the text of a region are dropped."""
        return bool(self.content_args.get("strip", True))

    def value(self, text: str, captures: Mapping[str, str]) -> Any:
        """Parses the text of a region to its value.

        Raises:
            ValueError: the text does not have the declared form.
        """
        value = PARSERS[self.content](text, self.content_args)
        if self.transform is None:
            return value
        if not self.transform_each:
            return transformed(self.transform, {**captures, "content": value})
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise ValueError("the region is not a list of objects")
        return [transformed(self.transform, {**captures, **item}) for item in value]


class ResponseTemplate:
    """Describes how a model writes its answers.

    Args:
        spec: the declaration, as parsed JSON.

    Attributes:
        fields: fields by name.

    Raises:
        ResponseTemplateError: `spec` is not a response template, or has an unknown version.
    """

    def __init__(self, spec: Any) -> None:
        _check_keys("it", spec, _TEMPLATE_KEYS)
        if spec.get("version", 1) != 1:
            raise ResponseTemplateError(f"its version is {spec['version']!r}, not 1")
        fields = spec.get("fields")
        if not isinstance(fields, dict) or not fields:
            raise ResponseTemplateError("it has no fields")
        self._anchor = _delimiter("it", spec, "start_anchor")
        if self._anchor is None:
            raise ResponseTemplateError("it has no start_anchor")
        self.fields: Mapping[str, Field] = {name: _field(name, given) for name, given in fields.items()}
        if sum(field.open is None for field in self.fields.values()) > 1:
            raise ResponseTemplateError("two fields have no opening delimiter")
        self._texts = tuple(_texts(fields))

    @property
    def has_calls(self) -> bool:
        """True if the template has a field of calls."""
        return CALLS_FIELD in self.fields

    @property
    def has_reasoning(self) -> bool:
        """True if the template has a field of reasoning."""
        return not REASONING_FIELDS.isdisjoint(self.fields)

    def without(self, names: Collection[str]) -> Mapping[str, Field]:
        """Returns the fields except `names`; text of those is then plain text."""
        return {name: field for name, field in self.fields.items() if name not in names}

    def opening(self, prompt: str) -> str:
        """Returns the end of a prompt that is part of the answer: the text after the last start anchor, or \"\"."""
        assert self._anchor is not None
        ends = [match.end() for match in self._anchor.pattern.finditer(prompt, timeout=_SEARCH_S)]
        return prompt[ends[-1] :] if ends else ""

    def behind_anchor(self, text: str, *, at_start: bool = False) -> str | None:
        """Returns the text after the first start anchor; None without one, or if `at_start` and text precedes it."""
        assert self._anchor is not None
        match = self._anchor.search(text, 0, final=True)
        return None if match is None or (at_start and match.start()) else text[match.end() :]

    def names(self, token: str) -> bool:
        """True if a delimiter, or a pattern within a region, contains `token`."""
        return any(token in text for text in self._texts)


def _texts(spec: Any) -> Iterator[str]:
    """Yields all strings of a declaration, without the escapes of patterns."""
    if isinstance(spec, dict | list):
        for item in spec.values() if isinstance(spec, dict) else spec:
            yield from _texts(item)
    elif isinstance(spec, str):
        yield spec.replace("\\", "")


def _check_keys(scope: str, given: Any, known: Collection[str]) -> None:
    if not isinstance(given, dict):
        raise ResponseTemplateError(f"{scope} is not an object")
    if unknown := sorted(set(given) - set(known)):
        raise ResponseTemplateError(f"{scope} has keys that are not known: {', '.join(unknown)}")


def _delimiter(scope: str, given: Mapping[str, Any], key: str) -> Delimiter | None:
    pattern_key = f"{key}_pattern"
    if key in given and pattern_key in given:
        raise ResponseTemplateError(f"{scope} has both {key} and {pattern_key}")
    if pattern_key in given:
        try:
            return Delimiter(regex.compile(given[pattern_key], regex.DOTALL))
        except (regex.error, TypeError) as error:
            raise ResponseTemplateError(f"{scope} has a {pattern_key} that is not a pattern: {error}") from None
    if key not in given:
        return None
    texts = [given[key]] if isinstance(given[key], str) else given[key]
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise ResponseTemplateError(f"{scope} has a {key} that is neither a text nor a list of texts")
    # Longest first, so that the longer of two matches wins.
    pattern = "|".join(regex.escape(text) for text in sorted(texts, key=len, reverse=True))
    return Delimiter(regex.compile(pattern, regex.DOTALL), tuple(texts))


def _field(name: str, given: Any) -> Field:
    scope = f"field {name}"
    _check_keys(scope, given, _FIELD_KEYS)
    field = Field(
        name=name,
        open=_delimiter(scope, given, "open"),
        close=_delimiter(scope, given, "close"),
        content=given.get("content", "text"),
        content_args=given.get("content_args") or {},
        transform=given.get("transform"),
        transform_each=given.get("transform_each", False),
        join=given.get("join"),
        repeats=bool(given.get("repeats", False)),
    )
    _check_field(scope, field)
    return _with_form(field)


def _check_field(scope: str, field: Field) -> None:
    if field.content not in PARSERS:
        raise ResponseTemplateError(f"{scope} has content {field.content!r}; there are {', '.join(PARSERS)}")
    if not isinstance(field.content_args, dict):
        raise ResponseTemplateError(f"{scope} has content_args that are not an object")
    if field.join is not None and not isinstance(field.join, str):
        raise ResponseTemplateError(f"{scope} has a join that is not text")
    if has_mixed_text(field.transform):
        raise ResponseTemplateError(f"{scope} has a placeholder with something beside it")
    if field.transform is None and (field.transform_each or groups_of(field.open) | groups_of(field.close)):
        raise ResponseTemplateError(f"{scope} has named groups or transform_each, but no transform")


def groups_of(delimiter: Delimiter | None) -> set[str]:
    """Returns the names of a delimiter's groups."""
    return set() if delimiter is None else set(delimiter.pattern.groupindex)


def _with_form(field: Field) -> Field:
    """Sets the form of calls, if calls of this field can be read before their region ends."""
    function = field.transform.get("function") if isinstance(field.transform, dict) else None
    name, arguments = call_places(function)
    in_opening = name in groups_of(field.open) - groups_of(field.close)
    if in_opening and arguments == "content" and not field.transform_each:
        if field.content == "json" and not field.content_args:
            return replace(field, form=CallForm.BODY, name_key=name)
        if field.content == "xml-inline" and _is_plain(field.content_args):
            return replace(field, form=CallForm.TAGS, name_key=name)
    if field.content != "json" or field.content_args or not name or not arguments:
        return field
    if field.transform_each:
        known = groups_of(field.open) | groups_of(field.close)
        form = CallForm.WHOLE if "." in name + arguments or {name, arguments} & known else CallForm.LIST
        return replace(field, form=form, name_key=name, arguments_key=arguments)
    keys = [path.removeprefix("content.") for path in (name, arguments) if path.startswith("content.")]
    if len(keys) < 2 or any("." in key for key in keys):
        return field
    return replace(field, form=CallForm.OBJECT, name_key=keys[0], arguments_key=keys[1])


def call_places(function: Any) -> tuple[str, str]:
    """Returns the placeholders of a call's name and arguments; empty texts without placeholders."""
    if placeholder(function) == "content":
        return "content.name", "content.arguments"
    if not isinstance(function, dict):
        return "", ""
    return placeholder(function.get("name")), placeholder(function.get("arguments"))


def _is_plain(arguments: Mapping[str, Any]) -> bool:
    """True if each argument between tags is known when its tag ends."""
    pattern = arguments.get("tag_pattern")
    if not isinstance(pattern, str) or arguments.get("merge_duplicates"):
        return False
    try:
        return "key" in regex.compile(pattern).groupindex
    except regex.error:
        return False
