"""Reads the requests of a data set: a JSON object on each line. Pure."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any, Final

from common.cli.bench.workload import GivenWorkload, Work
from common.params.options.types import Lengths

_FORM: Final = (
    '{"prompt": TEXT}, {"messages": [{"role": ROLE, "content": TEXT}, ...]} or {"token_ids": [ID, ...]}, each with '
    '"max_tokens": N if it is not --output-len that says so'
)
_PROMPTS: Final = ("prompt", "messages", "token_ids")


class DatasetError(ValueError):
    """A line is not a request; the message names the line and what is valid."""


def read_dataset(lines: Iterable[str], output_len: Lengths, seed: int) -> GivenWorkload:
    """Reads the requests of a data set; empty lines are left out.

    Args:
        lines: of the file.
        output_len: tokens of the answers whose line does not say.
        seed: of the lengths drawn from it.

    Raises:
        DatasetError: a line is not a request, or there are none.
    """
    rnd = random.Random(f"dataset {seed}")
    entries = [
        _work(number, line, output_len.draw(rnd)) for number, line in enumerate(lines, 1) if line and not line.isspace()
    ]
    if not entries:
        raise DatasetError(f"the data set has no request; valid: lines of {_FORM}")
    return GivenWorkload(entries)


def _work(number: int, line: str, drawn: int) -> Work:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise DatasetError(f"line {number} is not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise DatasetError(f"line {number} is not an object; valid: {_FORM}")
    kinds = [name for name in _PROMPTS if name in entry]
    unknown = sorted(entry.keys() - {*_PROMPTS, "max_tokens"})
    tokens = entry.get("max_tokens", drawn)
    if len(kinds) != 1 or unknown:
        named = f"names {', '.join(map(repr, unknown))}" if unknown else f"has {len(kinds)} prompts"
        raise DatasetError(f"line {number} {named}; valid: {_FORM}")
    if not _is_number(tokens, 1):
        raise DatasetError(f"line {number}: max_tokens is {tokens!r}; valid: a number from 1")
    return _prompt(number, kinds[0], entry[kinds[0]], tokens)


def _prompt(number: int, kind: str, given: Any, output_tokens: int) -> Work:
    if kind == "prompt" and isinstance(given, str) and given:
        _require_utf8(number, kind, given)
        return Work(output_tokens, text=given)
    if kind == "token_ids" and _all(given, lambda item: _is_number(item, 0)):
        return Work(output_tokens, token_ids=tuple(given))
    if kind == "messages" and _all(given, _is_message):
        for message in given:
            _require_utf8(number, kind, message["role"] + message["content"])
        return Work(output_tokens, messages=tuple({"role": m["role"], "content": m["content"]} for m in given))
    raise DatasetError(f"line {number}: {kind} is empty or of a wrong type; valid: {_FORM}")


def _all(given: Any, fits: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(map(fits, given))


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and all(isinstance(item.get(name), str) for name in ("role", "content"))


def _is_number(value: Any, least: int) -> bool:
    """True if the value is an integer of 32 bits and not a truth value."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 32


def _require_utf8(number: int, kind: str, text: str) -> None:
    """Refuses halves of a surrogate pair, which JSON can escape but no request can carry."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start].encode("unicode_escape").decode()
        raise DatasetError(f"line {number}: {kind} has {half}, half of a character; valid: text in UTF-8") from None
