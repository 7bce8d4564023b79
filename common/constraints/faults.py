"""The grammar library's error messages, each in one line and with a place that the client knows."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

from common.constraints import json_schema
from common.constraints.subschemas import SchemaError, children, definitions

# `at LINE(COLUMN): MESSAGE`
_PLACED: Final = re.compile(r"(?:at )?(\d+)\((\d+)\): (.*)", re.DOTALL)
_OF_PARSER: Final = "error: "
_PANIC: Final = "panic: "
# The library's name for a first mask without a token.
_SAID: Final = {"NoExtension": "no text satisfies it", "NoExtensionBias": "no text satisfies it"}
_OF_SCHEMA: Final = "failed to compile JSON schema: "
# Most schemas that are compiled to locate a fault.
_MOST_TRIED: Final = 64
_MOST_CHARACTERS: Final = 300

# Returns the fault of a grammar; "" for none.
Fault = Callable[[str], str]


def place(text: str, at: int) -> str:
    """Line and column of an index in a text."""
    line = text.count("\n", 0, at)
    return f"line {line + 1}, column {at - (text.rfind(chr(10), 0, at) + 1) + 1}"


def of_grammar(message: str, first_line: int | None) -> str:
    """Describes a fault in a grammar.

    `first_line` is the grammar's first line in the canonical text; None if the canonical text is not the client's text.
    """
    placed = _PLACED.match(message)
    if placed is None:
        return _short(message)
    line = 0 if first_line is None else int(placed[1]) - first_line + 1
    where = f"line {line}, column {placed[2]}: " if line > 0 else ""
    return where + _short(placed[3])


def of_expression(message: str) -> str:
    """Describes a fault in a regular expression: the parser's message, with the character if it names one."""
    lines = message.splitlines()
    for before, said in pairwise(["", *lines]):
        if said.startswith(_OF_PARSER):
            # The parser prints the expression above the mark, indented by four.
            at = f"character {before.index('^') - 3}: " if before.strip().startswith("^") else ""
            return at + _short(said)
    placed = _PLACED.match(message)
    return _short(message if placed is None else placed[3])


def of_schema(schema: Any, fault: Fault) -> SchemaError:
    """Describes a fault in a schema: the innermost subschema that has the fault by itself."""
    message, place, tried = _of_schema(fault(json_schema.dumped(schema))), "", 0
    known = definitions(schema)
    inner = list(children(schema))
    while inner and tried < _MOST_TRIED:
        step, child = inner.pop(0)
        tried += 1
        if isinstance(child, dict) and _of_schema(fault(json_schema.dumped({**known, **child}))) == message:
            place += step
            inner = list(children(child))
    return SchemaError(place, message)


def _of_schema(message: str) -> str:
    return message and _short(message.partition(_OF_SCHEMA)[2] or message)


def _short(message: str) -> str:
    """The most informative line of a message, without advice for direct callers of the library."""
    if message.startswith(_PANIC):
        return "the library of grammars fails to compile it"
    lines = message.strip().splitlines() or [""]
    said = next((line.removeprefix(_OF_PARSER) for line in lines if line.startswith(_OF_PARSER)), lines[0])
    return _SAID.get(said, said.partition(". Enable ")[0][:_MOST_CHARACTERS])
