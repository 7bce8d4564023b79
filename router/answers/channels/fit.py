"""Adapts the call style of a family to the blanks that one chat template writes. Pure.

Fine-tunes of a family differ in line ends and blanks. Grammars hold each model to the blanks of its training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import regex

from router.answers.channels.grammar import DIGITS, IS_TEXT, KEY, NAME, WORD, CallStyle

_BLANKS: Final = regex.compile(r"\s+")
# Chat templates write the ids of earlier calls; models write none.
_ID: Final = r'(?:,\s*"id":\s*"[^"]*")?'
_PARTS: Final = ("before", "key", "value_after", "key_end", "key_after", "end", "after")


@dataclass(frozen=True, slots=True)
class WrittenCalls:
    """Answers with calls, as a chat template writes them.

    Attributes:
        one: answer with one call.
        two: answer with two calls; empty if the chat template writes no such answer.
        names: names of the called tools.
        keys: argument names of the first call, at least two.
        value: value of the first argument, a text.
    """

    one: str
    two: str
    names: Sequence[str]
    keys: Sequence[str]
    value: str


def fitted(style: CallStyle, written: WrittenCalls) -> CallStyle | None:
    """Adapts `style` to the blanks of `written`; None if the chat template writes calls in another style."""
    for begin in style.begins:
        parts = _fitted_parts({"begin": begin, **{part: getattr(style, part) for part in _PARTS}}, written)
        between = None if parts is None else _between(style, parts, written)
        if parts is not None and between is not None:
            return replace(style, begins=(parts.pop("begin"),), **parts, between=between)
    return None


def _fitted_parts(parts: Mapping[str, str], written: WrittenCalls) -> dict[str, Any] | None:
    """Adapts the parts of a style to the blanks of one call; None if the call has another style."""
    filled = {NAME: regex.escape(written.names[0]), KEY: regex.escape(written.keys[0])}
    pattern = _part("before", parts, filled) + _part("begin", parts, filled)
    if parts["key"]:
        # The first argument is followed by another one, and the last argument ends like the first.
        following = _blank_free(parts["key"], {**filled, KEY: regex.escape(written.keys[1])})
        end = _blank_free(parts["key_end"], filled)
        pattern += _part("key", parts, filled) + regex.escape(written.value)
        pattern += rf"(?P<value_after>\s*){end}(?P<key_after>\s*){following}.*{end}"
    else:
        pattern += r"\{.*\}" + _ID
    pattern += rf"(?P<lead>\s*){_part('end', parts, filled)}"
    if parts["after"]:
        pattern += rf"(?P<gap>\s*){_part('after', parts, filled)}"
    match = regex.search(pattern, written.one, flags=regex.DOTALL)
    return None if match is None else _spaced(parts, match)


def _spaced(parts: Mapping[str, str], match: Any) -> dict[str, Any] | None:
    """Adds the blanks of a match to the parts; None if the blanks contradict each other."""
    groups = match.groupdict()
    lead = groups["lead"]
    made = {part: _with_blanks(part, parts[part], groups) for part in ("before", "begin", "key", "end", "after")}
    if parts["key"]:
        made |= {part: groups[part] for part in ("value_after", "key_after")}
        # After the last argument come the blanks that follow every argument, then those before the end.
        if not lead.startswith(made["key_after"]):
            return None
        lead = lead.removeprefix(made["key_after"])
    made["end"] = lead + made["end"]
    made["after"] = (groups.get("gap") or "") + made["after"]
    return made


def _between(style: CallStyle, parts: Mapping[str, str], written: WrittenCalls) -> str | None:
    """The text between two calls, with its blanks; None if it differs from the family's text."""
    usual = style.between
    if not written.two:
        return usual
    filled = {NAME: regex.escape(written.names[1])}
    between = rf"\s*{_blank_free(usual, filled)}\s*"
    pattern = f"{_exact(parts['end'], filled)}(?P<between>{between}){_exact(parts['begin'], filled)}"
    match = regex.search(_ID + pattern, written.two, flags=regex.DOTALL)
    if match is not None:
        return str(match["between"])
    return usual if style.is_one else None


def _part(part: str, parts: Mapping[str, str], filled: Mapping[str, str]) -> str:
    """Pattern of a style's part. Blanks may differ within the part and, unless it is an end, after it."""
    pieces = _pieces(parts[part])
    if not pieces:
        return ""
    between = [rf"(?P<{part}{i}>\s*)" for i in range(len(pieces))]
    if part in ("end", "after"):
        between[-1] = ""
    return "".join(_exact(piece, filled) + blanks for piece, blanks in zip(pieces, between, strict=True))


def _with_blanks(part: str, text: str, groups: Mapping[str, str | None]) -> str:
    return "".join(piece + (groups.get(f"{part}{i}") or "") for i, piece in enumerate(_pieces(text)))


def _pieces(text: str) -> list[str]:
    return [piece for piece in _BLANKS.split(text) if piece]


def _blank_free(text: str, filled: Mapping[str, str]) -> str:
    return r"\s*".join(_exact(piece, filled) for piece in _pieces(text))


def _exact(text: str, filled: Mapping[str, str]) -> str:
    """Pattern of a style's text, with its placeholders filled in."""
    places = {**filled, IS_TEXT: "(?:true|false)", DIGITS: r"\d+", WORD: r"\w+"}
    parts = regex.split(f"({'|'.join(map(regex.escape, places))})", text)
    return "".join(places.get(part) or regex.escape(part, special_only=True) for part in parts)
