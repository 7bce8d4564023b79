"""Finds the form in which a chat template expects messages, calls and tools, and converts messages to it.

Published templates differ. Some loop over the parts of a content, and some concatenate a call's arguments as text. Some
recognize a message of calls by its null content. A template does not declare its form, so probes are rendered when the
template is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final, TypeAlias

from common.text.template_sandbox import TemplateInputError

Messages: TypeAlias = list[dict[str, Any]]
Tools: TypeAlias = list[dict[str, Any]] | None
# Renders messages and tools without converting them.
Render: TypeAlias = Callable[[Messages, Tools], str]

# Words of the probes, which occur in no template.
_QUESTION: Final = "probequestion"
_TEXT: Final = "probetext"
_RESULT: Final = "proberesult"
_THOUGHT: Final = "probethought"
_NAME: Final = "probe_call"
_KEY: Final = "probekey"
_VALUE: Final = "probevalue"
# Mistral's templates accept only call ids of nine letters and digits.
_CALL_ID: Final = "probe1234"
_WORDS: Final = (_NAME, _KEY, _VALUE)
_TOOLS: Final[Tools] = [
    {"type": "function", "function": {"name": _NAME, "parameters": {"type": "object", "properties": {}}}}
]
# The probe's arguments as Python prints an object, and as JSON text that is printed without further escapes.
_WRITTEN_BY_PYTHON: Final = repr({_KEY: _VALUE})[1:-1]
_WRITTEN_AS_JSON: Final = json.dumps({_KEY: _VALUE})[1:-1]
_SYSTEM_ROLES: Final = ("system", "developer")


@dataclass(frozen=True, slots=True)
class MessageForms:
    """The form in which one chat template expects messages, calls and tools; the defaults are transformers' form.

    Attributes:
        part_roles: roles whose content is a list of parts, not a text.
        has_text_arguments: True if the arguments of calls are JSON text, not an object.
        has_null_content: True if a message with calls and no text has the content None, not an empty text.
        joins_reasoning: True if a text beside calls is appended to the message's reasoning, if it has any.
        splits_calls: True if a text beside calls becomes a message of its own, before the calls.
        has_named_ids: True if a call's id must contain the call's name, because the template prints the id alone.
        has_descriptions: True if each tool needs a description, even an empty one.
        prints_tools: False if the template leaves tools out of the prompt.
        prints_plain: True if the template prints a conversation of user and assistant completely, also after a system
            message if it accepts one.
        prints_calls: True if the template prints a conversation with a call and its result completely.
    """

    part_roles: frozenset[str] = frozenset()
    has_text_arguments: bool = False
    has_null_content: bool = False
    joins_reasoning: bool = False
    splits_calls: bool = False
    has_named_ids: bool = False
    has_descriptions: bool = False
    prints_tools: bool = True
    prints_plain: bool = False
    prints_calls: bool = False

    def messages(self, messages: Messages) -> Messages:
        """Converts messages from transformers' form to this form."""
        if self.has_named_ids:
            messages = _with_named_ids(messages)
        return [made for message in messages for made in self._split(message)]

    def tools(self, tools: Tools) -> Tools:
        """Converts tools from transformers' form to this form."""
        if tools is None or not self.has_descriptions:
            return tools
        return [_described(tool) for tool in tools]

    def _split(self, message: dict[str, Any]) -> Messages:
        calls, text = message.get("tool_calls"), message.get("content")
        if not calls:
            return [self._message(message)]
        made = {**message, "tool_calls": [self._call(call) for call in calls]}
        if text and self.joins_reasoning and message.get("reasoning_content"):
            made["reasoning_content"] = f"{message['reasoning_content']}\n\n{text}"
            text = made["content"] = ""
        if text and self.splits_calls:
            before = {key: value for key, value in message.items() if key != "tool_calls"}
            alone = {key: value for key, value in made.items() if key != "reasoning_content"}
            return [self._message(before), self._message({**alone, "content": ""})]
        return [self._message(made)]

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        text = message.get("content")
        if message.get("tool_calls") and self.has_null_content and not text:
            return {**message, "content": None}
        if message.get("role") in self.part_roles and isinstance(text, str):
            return {**message, "content": [{"type": "text", "text": text}]}
        return message

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call.get("function")
        if not self.has_text_arguments or not isinstance(function, Mapping):
            return call
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            return call
        return {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}


def _with_named_ids(messages: Messages) -> Messages:
    """Replaces call ids that lack the call's name by `functions.NAME:NUMBER`, as Kimi-K2 writes them."""
    ids: dict[Any, str] = {}
    number, made = 0, []
    for message in messages:
        changed: dict[str, Any] = {}
        for call in message.get("tool_calls") or ():
            given, name = call.get("id"), call["function"]["name"]
            ids[given] = given if name in str(given) else f"functions.{name}:{number}"
            changed.setdefault("tool_calls", []).append({**call, "id": ids[given]})
            number += 1
        if (answered := message.get("tool_call_id")) is not None and answered in ids:
            changed["tool_call_id"] = ids[answered]
        made.append({**message, **changed})
    return made


def _described(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or "description" in function:
        return tool
    # The description follows the name, as in tools that come with one.
    function = {"name": function.get("name"), "description": "", **function}
    return {**tool, "function": function}


def message_forms(render: Render) -> MessageForms:
    """Finds the form that a template expects, by rendering probes with it.

    Args:
        render: renders messages without converting them; raises TemplateInputError.
    """
    forms = _tool_forms(render, MessageForms(part_roles=_part_roles(render)))
    forms = _call_forms(render, forms)
    plain = [_said(role, f"{_TEXT}{i}") for i, role in enumerate(("user", "assistant", "user", "assistant", "user"))]
    calls = [*plain[:2], *_with_call(content=""), *plain[1:3]]
    return replace(
        forms, prints_plain=_prints_whole(render, forms, plain), prints_calls=_prints_whole(render, forms, calls)
    )


def _prints_whole(render: Render, forms: MessageForms, messages: Messages) -> bool:
    """True if the template prints `messages` completely, also after a system message if it accepts one."""
    words = [str(message["content"]) for message in messages]
    if any("tool_calls" in message for message in messages):
        words += _WORDS
    system = [_said("system", _THOUGHT), *messages]
    with_system = _rendered(render, forms, system)
    return _prints(render, forms, messages, words) and (
        with_system is None or all(word in with_system for word in (*words, _THOUGHT))
    )


def _part_roles(render: Render) -> frozenset[str]:
    """Roles whose text the template prints only if the content is a list of parts."""
    before: dict[str, Messages] = {
        "user": [],
        "system": [],
        "developer": [],
        "assistant": [_said("user", _QUESTION)],
        "tool": [_said("user", _QUESTION), _said("assistant", _THOUGHT)],
    }
    found = set[str]()
    for role in ("user", *_SYSTEM_ROLES, "assistant", "tool"):
        forms = MessageForms(part_roles=frozenset(found))
        behind = [] if role == "user" else [_said("user", _QUESTION)]
        messages = [*before[role], _said(role, _TEXT), *behind]
        parts = replace(forms, part_roles=forms.part_roles | {role})
        if not _prints(render, forms, messages, [_TEXT]) and _prints_parts(render, parts, messages, _TEXT):
            found.add(role)
    return frozenset(found)


def _call_forms(render: Render, forms: MessageForms) -> MessageForms:
    """`forms` with the first form of calls that the template prints correctly; unchanged if there is none."""
    no_roles: frozenset[str] = frozenset()
    for tool_roles, has_named_ids, has_text, has_null in product(
        (no_roles, frozenset(("tool",))), (False, True), (False, True), (False, True)
    ):
        tried = replace(
            forms,
            part_roles=forms.part_roles | tool_roles,
            has_named_ids=has_named_ids,
            has_text_arguments=has_text,
            has_null_content=has_null,
        )
        if _prints_call(render, tried):
            return _text_forms(render, replace(tried, has_null_content=_is_null(render, tried)))
    return forms


def _prints_call(render: Render, forms: MessageForms) -> bool:
    text = _rendered(render, forms, _with_call(content=""))
    if text is None or not all(word in text for word in (*_WORDS, _RESULT)) or _shows_parts(text):
        return False
    return _WRITTEN_AS_JSON in text if forms.has_text_arguments else _WRITTEN_BY_PYTHON not in text


def _is_null(render: Render, forms: MessageForms) -> bool:
    """True if calls without a text need the content None: "" fails, or the template has a branch for None."""
    if forms.has_null_content:
        return True
    null = replace(forms, has_null_content=True)
    messages = _with_call(content="")
    empty, text = _rendered(render, forms, messages), _rendered(render, null, messages)
    if text is None or empty is None or text == empty or not _prints_call(render, null):
        return False
    return all(text.count(word) <= empty.count(word) for word in ("None", "null"))


def _text_forms(render: Render, forms: MessageForms) -> MessageForms:
    """`forms` with the place of a text beside calls: in the message, in its reasoning, or in a message of its own."""
    words = (*_WORDS, _RESULT, _TEXT)
    both = _with_call(content=_TEXT, reasoning_content=_THOUGHT)
    if not _prints(render, forms, both, words):
        joined = replace(forms, joins_reasoning=True)
        if _prints(render, joined, both, (*words, _THOUGHT)):
            forms = joined
    if not _prints(render, forms, _with_call(content=_TEXT), words):
        split = replace(forms, splits_calls=True)
        if _prints(render, split, _with_call(content=_TEXT), words):
            return split
    return forms


def _tool_forms(render: Render, forms: MessageForms) -> MessageForms:
    """`forms` with the first form of tools that the template accepts; unchanged if it rejects all."""
    for has_descriptions in (False, True):
        tried = replace(forms, has_descriptions=has_descriptions)
        try:
            text = render(tried.messages([_said("user", _QUESTION)]), tried.tools(_TOOLS))
        except TemplateInputError:
            continue
        return replace(tried, prints_tools=_NAME in text)
    return forms


def _said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _with_call(**fields: str) -> Messages:
    """A probe with a call and its result; `fields` are further fields of the message with the call."""
    call = {"type": "function", "id": _CALL_ID, "function": {"name": _NAME, "arguments": {_KEY: _VALUE}}}
    # The result has another name: some templates print the result's name and leave out the call's.
    result = {**_said("tool", _RESULT), "tool_call_id": _CALL_ID, "name": _QUESTION}
    return [_said("user", _QUESTION), {"role": "assistant", **fields, "tool_calls": [call]}, result]


def _rendered(render: Render, forms: MessageForms, messages: Messages) -> str | None:
    """Renders messages without tools, or with tools if the template rejects that; None if it rejects both."""
    for tools in (None, _TOOLS):
        try:
            return render(forms.messages(messages), forms.tools(tools))
        except TemplateInputError:
            continue
    return None


def _prints(render: Render, forms: MessageForms, messages: Messages, words: tuple[str, ...] | list[str]) -> bool:
    text = _rendered(render, forms, messages)
    return text is not None and all(word in text for word in words)


def _prints_parts(render: Render, forms: MessageForms, messages: Messages, word: str) -> bool:
    text = _rendered(render, forms, messages)
    return text is not None and word in text and not _shows_parts(text)


def _shows_parts(text: str) -> bool:
    """True if the template printed a list of parts as Python or JSON source, instead of the parts' texts."""
    return any(f"{quote}text{quote}: {quote}" in text for quote in "'\"")
