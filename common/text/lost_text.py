"""Finds texts and calls of a conversation that a chat template leaves out of the prompt.

The texts are looked for in the prompt in their order, which takes time linear in the prompt. A template may change them
(trim, escape, reorder), and a short text may stand in the template itself. Where that leaves a doubt, the conversation
is rendered once more with numbers around the texts, which no template changes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from common.text.message_forms import MessageForms, Messages, Tools
from common.text.template_sandbox import TemplateInputError

# Characters of a text that a template's own words hardly have.
_LONG: Final = 24
# Numbers of this width; templates and texts hardly have one of them.
_FIRST_NUMBER: Final = 7_301_946_000_000
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
    """A text or a call of a message.

    Attributes:
        message: index of the message.
        call: index of the call; None for the text.
        words: strings that a prompt with the piece has, in any order.
    """

    message: int
    call: int | None
    words: tuple[str, ...]

    @property
    def path(self) -> str:
        """The field of the request."""
        field = "content" if self.call is None else f"tool_calls[{self.call}]"
        return f"messages[{self.message}].{field}"


def lost_path(prompt: str, messages: Messages, forms: MessageForms, again: Callable[[Messages], str]) -> str:
    """The field of the first text or call of `messages` that is not in the prompt; "" if all are.

    Args:
        prompt: of `messages`, without marks.
        messages: as transformers has them.
        forms: of the template.
        again: renders other messages in the same way; raises TemplateInputError.
    """
    pieces = list(_pieces(messages))
    if _are_in_order(prompt, pieces, is_usual=_is_usual(messages, forms)):
        return ""
    try:
        numbered = again(_numbered(messages))
    except TemplateInputError:
        # The numbers do not fit the template: the words themselves have to do.
        return next((piece.path for piece in pieces if not _has_words(prompt, piece)), "")
    return next((piece.path for piece in pieces if not _has_numbers(numbered, piece, messages)), "")


def lost_tool(prompt: str, tools: Tools) -> str:
    """The field of the first tool whose name is not in the prompt; "" if all are."""
    names = [str(tool["function"]["name"]) for tool in tools or ()]
    return next((f"tools[{i}]" for i, name in enumerate(names) if name not in prompt), "")


def _pieces(messages: Messages) -> Iterator[_Piece]:
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, str) and (text := content.strip()):
            yield _Piece(i, None, (text,))
        for j, call in enumerate(message.get("tool_calls") or ()):
            function = call["function"]
            yield _Piece(i, j, (str(function["name"]), *_strings(function.get("arguments"))))


def _strings(arguments: Any) -> Iterator[str]:
    """The strings in the arguments of a call, found without a frame for each level."""
    row = [arguments]
    while row:
        yield from (each for each in row if isinstance(each, str) and each.strip())
        row = [
            item
            for each in row
            if isinstance(each, Mapping | list)
            for item in (each.values() if isinstance(each, Mapping) else each)
        ]


def _are_in_order(prompt: str, pieces: list[_Piece], *, is_usual: bool) -> bool:
    """True if the prompt surely has all pieces: each behind the one before it, and none too short to tell."""
    position = 0
    for piece in pieces:
        first, *others = piece.words
        begin = prompt.find(first, position)
        if begin < 0 or not (is_usual or piece.call is not None or len(first) >= _LONG):
            return False
        start = position = begin + len(first)
        for word in others:
            written, found = _find(prompt, word, start)
            if found < 0:
                return False
            position = max(position, found + len(written))
    return True


def _find(prompt: str, word: str, start: int) -> tuple[str, int]:
    """The form in which the prompt has a string of a call, and its place; -1 if it is not there."""
    for written in (word, json.dumps(word, ensure_ascii=False)[1:-1], word.strip()):
        if (found := prompt.find(written, start)) >= 0:
            return written, found
    return word, -1


def _is_usual(messages: Messages, forms: MessageForms) -> bool:
    """True if the messages follow each other as in the probes that the template printed whole."""
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


def _has_words(prompt: str, piece: _Piece) -> bool:
    return all(_find(prompt, word, 0)[1] >= 0 for word in piece.words)


def _number(message: int, place: int) -> str:
    return str(_FIRST_NUMBER + 1024 * message + place)


def _numbered(messages: Messages) -> Messages:
    """The messages with numbers around each text, and in the name and the arguments of each call."""
    made = []
    for i, message in enumerate(messages):
        changed = dict(message)
        content = message.get("content")
        if isinstance(content, str) and content.strip():
            changed["content"] = f"{_number(i, 0)} {content} {_number(i, 1)}"
        if message.get("tool_calls"):
            changed["tool_calls"] = [_numbered_call(i, j, call) for j, call in enumerate(message["tool_calls"])]
        made.append(changed)
    return made


def _numbered_call(i: int, j: int, call: dict[str, Any]) -> dict[str, Any]:
    function, number = call["function"], _number(i, 2 + j)
    arguments = function.get("arguments")
    changed = {**function, "name": f"{function['name']}_{number}"}
    if isinstance(arguments, Mapping) and arguments:
        changed["arguments"] = {**arguments, f"k{number}": number}
    return {**call, "function": changed}


def _has_numbers(numbered: str, piece: _Piece, messages: Messages) -> bool:
    i = piece.message
    if piece.call is not None:
        function = messages[i]["tool_calls"][piece.call]["function"]
        number = _number(i, 2 + piece.call)
        return f"_{number}" in numbered and (not function.get("arguments") or numbered.count(number) > 1)
    # Reasoning before the text of an answer may be left out: answers are told apart by their end.
    needed = (1,) if messages[i].get("role") == "assistant" else (0, 1)
    return all(_number(i, place) in numbered for place in needed)
