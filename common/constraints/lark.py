"""Grammars as workers get them: one text, whatever form the constraint has.

It is llguidance's dialect of Lark. Schemas in a grammar are those of `json_schema.py`; options that would change
nothing here, or another part of the grammar than they stand at, are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import Final

from common.constraints import json_schema, library
from common.constraints.faults import place
from common.constraints.forms import CHOICES, GRAMMAR, JSON_OBJECT, JSON_SCHEMA, REGEX, Constraint
from common.constraints.gbnf.writer import lark_of_gbnf
from common.constraints.lark_ends import endless_rule
from common.constraints.library import lark_of_regex
from common.constraints.subschemas import SchemaError
from common.json_text import JsonError, end_of_value

HEADER: Final = library.HEADER
_GBNF: Final = "::="
_OBJECT: Final = '{"type": "object"}'
# Strings, comments and expressions, which are skipped; special tokens, schemas and options, which are checked.
_PARTS: Final = re.compile(
    r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|#[^\n]*|/(?:[^/\\\n]|\\.)+/'
    r"|(?P<token><[^<>\s\[][^<>\s]*>)|(?P<schema>%json\b\s*)|(?P<option>%llguidance\b|\b(?:temperature|capture|stop_capture)\s*=)"
)


class LarkError(Exception):
    """A Lark grammar has a construct that is not supported; one line, with line and column."""


def canonical(constraint: Constraint, *, optional_space: bool = False, special: Collection[str] | None = None) -> str:
    """The grammar of a constraint.

    Args:
        constraint: of a request.
        optional_space: True if a blank may come first, which the answer's text does not have: the first token of a
            text has one with SentencePiece's kind of tokenizers.
        special: names of the model's special tokens; None for any.

    Raises:
        SchemaError, LarkError, GbnfError: the constraint cannot be served.
    """
    space = '" "? ' if optional_space else ""
    if space and constraint.form in (REGEX, CHOICES):
        # One terminal: the library gives up a separate one for the blank too late if the text begins with a blank too.
        return f"{HEADER}start: T\nT: {space}{_body(constraint)}\n"
    if constraint.form != GRAMMAR:
        return f"{HEADER}start: {space}{_body(constraint)}\n"
    (text,) = constraint.texts
    if is_gbnf(text):
        return f"{HEADER}{lark_of_gbnf(text, optional_space=optional_space, special=special)}\n"
    made = "".join(_checked_parts(text, special))
    if (endless := endless_rule(text)) is not None:
        name, at = endless
        raise LarkError(f"{place(text, at)}: no text satisfies rule {name!r}: it never ends")
    return f"{HEADER}start: {space}%lark {{\n{made}\n}}\n" if space else f"{HEADER}{made}\n"


def is_gbnf(text: str) -> bool:
    """True if a grammar is in GBNF, not in Lark."""
    return _GBNF in text


def quoted(text: str) -> str:
    """Quotes a text as a string of a grammar."""
    # The library's lexer takes no raw control character, and JSON escapes all but this one.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def _body(constraint: Constraint) -> str:
    if constraint.form == CHOICES:
        return f"({' | '.join(map(quoted, constraint.texts))})"
    if constraint.form == JSON_OBJECT:
        return f"%json {json_schema.canonical(_OBJECT)}"
    (text,) = constraint.texts
    return f"%json {json_schema.canonical(text)}" if constraint.form == JSON_SCHEMA else _expression(text)


def _expression(text: str) -> str:
    # Between slashes nothing would be a comment.
    return f"/{lark_of_regex(text)}/" if text else '""'


def _checked_parts(text: str, special: Collection[str] | None) -> Iterator[str]:
    """Pieces of a grammar, with its schemas checked and in the library's form."""
    done = at = 0
    while (part := _PARTS.search(text, at)) is not None:
        at = part.end()
        if part["option"]:
            raise LarkError(f"{place(text, part.start())}: {part['option'].rstrip(' =')!r} is not supported")
        if part["token"] and special is not None and part["token"] not in special:
            raise LarkError(f"{place(text, part.start())}: unknown special token {part['token']!r}")
        if part["schema"]:
            try:
                end = end_of_value(text, at)
                schema = json_schema.canonical(text[at:end])
            except JsonError as error:
                raise LarkError(f"{place(text, at)}: the schema {error}") from None
            except SchemaError as error:
                raise LarkError(f"{place(text, at)}: of its schema, {error}") from None
            yield text[done:at]
            yield schema
            done = at = end
    yield text[done:]
