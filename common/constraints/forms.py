"""Constraint of a request: its form and its texts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from common.errors import InvalidFieldError
from common.limits import MAX_CHOICES, MAX_GRAMMAR_BYTES

PATH: Final = "sampling_params.constraint"
JSON_SCHEMA: Final = "json_schema"
JSON_OBJECT: Final = "json_object"
REGEX: Final = "regex"
GRAMMAR: Final = "grammar"
CHOICES: Final = "choices"
FORMS: Final = (JSON_SCHEMA, JSON_OBJECT, REGEX, GRAMMAR, CHOICES)


@dataclass(frozen=True, slots=True)
class Constraint:
    """The form that an answer is confined to.

    Attributes:
        form: one of `FORMS`.
        texts: the schema, the expression or the grammar; all texts of a choice; empty for any JSON object.

    Raises:
        InvalidFieldError: an unknown form, or texts that are too many or too long.
    """

    form: str
    texts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise InvalidFieldError(PATH, f"is {self.form!r}", f"one of {', '.join(FORMS)}")
        if self.form == CHOICES and not 1 <= len(self.texts) <= MAX_CHOICES:
            raise InvalidFieldError(f"{self.path}.texts", f"has {len(self.texts)} entries", f"1 to {MAX_CHOICES}")
        try:
            size = sum(len(text.encode()) for text in self.texts)
        except UnicodeEncodeError:
            raise InvalidFieldError(self.path, "has half of a surrogate pair", "Unicode text") from None
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidFieldError(self.path, f"has {size} bytes", f"at most {MAX_GRAMMAR_BYTES} bytes of UTF-8")

    @property
    def path(self) -> str:
        """The request field of the constraint."""
        return f"{PATH}.{self.form}"

    @classmethod
    def of(cls, given: object) -> Constraint:
        """A constraint from a mapping of its form to its content, such as `{"regex": "a+"}`; a schema may be an object.

        Raises:
            InvalidFieldError: the mapping has another shape.
        """
        if isinstance(given, Constraint):
            return given
        if not isinstance(given, Mapping) or len(given) != 1:
            valid = f"a mapping with one of {', '.join(FORMS)}"
            raise InvalidFieldError(PATH, f"is {given!r}"[:200], valid)
        ((form, content),) = given.items()
        return cls(str(form), _texts(str(form), content))


def _texts(form: str, content: Any) -> tuple[str, ...]:
    path = f"{PATH}.{form}"
    if form == JSON_OBJECT:
        if content is not True:
            raise InvalidFieldError(path, f"is {content!r}"[:200], "true")
        return ()
    if form == CHOICES:
        if isinstance(content, str) or not isinstance(content, Iterable):
            raise InvalidFieldError(path, f"is {content!r}"[:200], "a list of texts")
        texts = tuple(content)
    elif form == JSON_SCHEMA and isinstance(content, Mapping | bool):
        texts = (_dumped(path, content),)
    else:
        texts = (content,)
    if not all(isinstance(text, str) for text in texts):
        raise InvalidFieldError(path, f"is {content!r}"[:200], "text")
    return texts


def _dumped(path: str, content: object) -> str:
    try:
        return json.dumps(content, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidFieldError(path, f"is not valid JSON: {error}", "a JSON Schema") from None
