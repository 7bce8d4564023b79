"""Finds texts and calls of a conversation that a chat template leaves out of the prompt.

The prompt is searched for the texts in their order, in linear time. A template may trim, escape or reorder texts, and
may itself contain a short text. In a doubtful case the conversation is rendered once more with numbers around the
texts, because no template changes numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from common.text.message_forms import MessageForms, Messages, Tools
from common.text.template_sandbox import TemplateInputError

# Length from which a text hardly occurs among a template's own words, characters.
_LONG: Final = 24
# First of the 13-digit numbers that are put around texts; templates and texts hardly contain them.
_FIRST_NUMBER: Final = 7_301_900_000_000
_NUMBER: Final = re.compile(r"73019\d{8}")
_NEXT: Final[Mapping[str, frozenset[str]]] = {
    "": frozenset(("system", "user")),
    "system": frozenset(("user",)),
    "user": frozenset(("assistant",)),
    "assistant": frozenset(("user",)),
    "calls": frozenset(("tool",)),
    "tool": frozenset(("assistant", "user")),
}


@dataclass(frozen=True, slots=True)
class _Piece:
    """A text or a tool call of a message, which the prompt must contain.

    Attributes:
        index: number of the piece in the conversation.
        message: index of the message.
        call: index of the call in its message; None for a text.
        words: strings that the prompt must contain; the first is the text, or the call's name.
    """

    index: int
    message: int
    call: int | None
    words: tuple[str, ...]

    @property
    def path(self) -> str:
        """Path of the request field that holds the piece."""
        field = "content" if self.call is None else f"tool_calls[{self.call}]"
        return f"messages[{self.message}].{field}"


def lost_path(prompt: str, messages: Messages, forms: MessageForms, again: Callable[[Messages], str]) -> str:
    """Path of the first text or call of `messages` that the prompt lacks; "" if it has all of them.

    Args:
        prompt: rendered prompt of `messages`, without marks of special tokens.
        messages: the conversation, in transformers' form.
        forms: message form of the template.
        again: renders changed messages in the same way; raises TemplateInputError.
    """
    pieces = list(_pieces(messages))
    doubtful = _first_doubtful(prompt, pieces, is_usual=_is_usual(messages, forms))
    if doubtful is None:
        return ""
    try:
        found = set(_NUMBER.findall(again(_numbered(messages, pieces))))
    except TemplateInputError:
        # The template rejects the numbered texts, so the words of the doubtful piece decide.
        return "" if all(_find(prompt, word, 0)[1] >= 0 for word in doubtful.words) else doubtful.path
    return next((piece.path for piece in pieces if not _has_numbers(found, piece, messages)), "")


def lost_tool(prompt: str, tools: Tools) -> str:
    """Path of the first tool whose name the prompt lacks; "" if it has all of them."""
    names = [str(tool["function"]["name"]) for tool in tools or ()]
    return next((f"tools[{i}]" for i, name in enumerate(names) if name not in prompt), "")


def _pieces(messages: Messages) -> Iterator[_Piece]:
    indices = count()
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, str) and (text := content.strip()):
            yield _Piece(next(indices), i, None, (text,))
        for j, call in enumerate(message.get("tool_calls") or ()):
            function = call["function"]
            yield _Piece(next(indices), i, j, (str(function["name"]), *_strings(function.get("arguments"))))


def _strings(arguments: Any) -> Iterator[str]:
    """Strings anywhere in a call's arguments, found without recursion."""
    row = [arguments]
    while row:
        yield from (each for each in row if isinstance(each, str) and each.strip())
        row = [
            item
            for each in row
            if isinstance(each, Mapping | list)
            for item in (each.values() if isinstance(each, Mapping) else each)
        ]


def _first_doubtful(prompt: str, pieces: list[_Piece], *, is_usual: bool) -> _Piece | None:
    """First piece not found after the previous one, or too short to be sure of; None if the prompt has all pieces."""
    position = 0
    for piece in pieces:
        first, *others = piece.words
        begin = prompt.find(first, position)
        if begin < 0 or not (is_usual or piece.call is not None or len(first) >= _LONG):
            return piece
        start = position = begin + len(first)
        for word in others:
            written, found = _find(prompt, word, start)
            if found < 0:
                return piece
            position = max(position, found + len(written))
    return None


def _find(prompt: str, word: str, start: int) -> tuple[str, int]:
    """Spelling of a call's string in the prompt, and its position; -1 if the prompt lacks it."""
    for written in (word, json.dumps(word, ensure_ascii=False)[1:-1], word.strip()):
        if (found := prompt.find(written, start)) >= 0:
            return written, found
    return word, -1


def _is_usual(messages: Messages, forms: MessageForms) -> bool:
    """True if the messages follow each other as in a probe that the template printed completely."""
    before = ""
    for message in messages:
        role = str(message.get("role"))
        if role not in _NEXT.get(before, ()):
            return False
        has_calls = bool(message.get("tool_calls"))
        if has_calls and (message.get("content") or len(message["tool_calls"]) > 1):
            return False
        before = "calls" if has_calls else role
    has_tools = any(message.get("tool_calls") for message in messages)
    return forms.prints_calls if has_tools else forms.prints_plain


def _number(piece: _Piece, place: int) -> str:
    return str(_FIRST_NUMBER + 2 * piece.index + place)


def _numbered(messages: Messages, pieces: list[_Piece]) -> Messages:
    """Copies the messages, with numbers around each text and in each call's name and arguments."""
    made = [{**message, "tool_calls": [*(message.get("tool_calls") or ())]} for message in messages]
    for piece in pieces:
        message = made[piece.message]
        if piece.call is None:
            message["content"] = f"{_number(piece, 0)} {message['content']} {_number(piece, 1)}"
        else:
            calls = message["tool_calls"]
            calls[piece.call] = _numbered_call(calls[piece.call], _number(piece, 0), _number(piece, 1))
    return [message if message["tool_calls"] else _without_calls(message) for message in made]


def _without_calls(message: dict[str, Any]) -> dict[str, Any]:
    """Copies a message without the key `tool_calls`: some templates test whether the key exists."""
    return {key: value for key, value in message.items() if key != "tool_calls"}


def _numbered_call(call: dict[str, Any], in_name: str, in_arguments: str) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    changed = {**function, "name": f"{function['name']}_{in_name}"}
    if isinstance(arguments, Mapping) and arguments:
        changed["arguments"] = {**arguments, f"k{in_arguments}": in_arguments}
    return {**call, "function": changed}


def _has_numbers(found: Set[str], piece: _Piece, messages: Messages) -> bool:
    first, last = _number(piece, 0), _number(piece, 1)
    message = messages[piece.message]
    if piece.call is not None:
        arguments = message["tool_calls"][piece.call]["function"].get("arguments")
        return first in found and (not arguments or last in found)
    # A template may drop the reasoning at the start of an assistant's text, and the first number with it.
    return last in found and (first in found or message.get("role") == "assistant")
