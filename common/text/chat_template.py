"""Chat templates: Jinja from the model's files, rendered as transformers renders them.

Messages are converted to the form that the template expects (`common.text.message_forms`), and rendered in a sandbox
(`common.text.template_sandbox`). Special tokens in the input are marked, so that `Tokenizer.encode` treats them as text
(see `common.text.tokenizer`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import jinja2

from common.text.lost_text import lost_path, lost_tool
from common.text.message_forms import MessageForms, Messages, Tools, message_forms
from common.text.template_sandbox import (
    TemplateBounds,
    TemplateDepthError,
    TemplateInputError,
    compile_template,
    render_template,
)
from common.text.tokenizer import MARK_END, MARK_START, Tokenizer, mark_special, special_pattern, unmarked

# Usual roles of messages; templates print most of them without naming them.
_ROLES: Final = frozenset(("system", "developer", "user", "assistant", "tool", "function"))
_QUOTED: Final = re.compile(r"""(['"])([A-Za-z][A-Za-z0-9_-]{0,63})\1""")
# Names under which a message's reasoning arrives; templates read the first.
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class _NamedTemplate:
    """One compiled chat template of a model, and the message form that it expects."""

    compiled: jinja2.Template
    forms: MessageForms


class ChatTemplate:
    """The chat templates of one model: usually one, sometimes a second for requests with tools.

    Immutable, and `render` may run in several threads.

    Attributes:
        roles: roles that messages may have: the usual ones, and every quoted word of a template.
        sha256: lower-case hex digest of the text of the only template, or of the names and texts of several.

    Raises:
        TokenizerError: a template has a syntax error.
    """

    def __init__(self, templates: Mapping[str, str], tokenizer: Tokenizer) -> None:
        self.roles = _ROLES.union(*map(_words, templates.values()))
        self.sha256 = _digest(templates)
        self._variables = tokenizer.named_tokens
        self._special = special_pattern(tokenizer.special_tokens)
        self._templates = {name: self._read(name, source) for name, source in templates.items()}

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> ChatTemplate | None:
        """Builds the chat templates of a tokenizer; None if the model has none.

        Raises:
            TokenizerError: a template has a syntax error.
        """
        return cls(tokenizer.chat_templates, tokenizer) if tokenizer.chat_templates else None

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> ChatTemplate | None:
        """Builds the chat templates in a tokenizer's `files`; None if there are none.

        Raises:
            TokenizerError: a file cannot be read, or a template has a syntax error.
        """
        return cls.from_tokenizer(Tokenizer.from_files(files))

    def prompt(self, messages: Messages, tools: Tools = None, **arguments: Any) -> str:
        """Renders a client's conversation as `render` does, and checks that the prompt has its texts, calls and tools.

        Raises:
            TemplateInputError: as `render`; or the prompt lacks a text, a call or a tool, which the error names.
        """
        rendered = self.render(messages, tools, **arguments)

        def again(messages: Messages) -> str:
            return unmarked(self.render(messages, tools, **arguments))

        forms, text = self.forms(tools), unmarked(rendered)
        path = "" if forms.prints_tools or not tools else "tools"
        if path := path or lost_path(text, messages, forms, again) or lost_tool(text, tools):
            raise TemplateInputError("it leaves this out of the prompt", path)
        return rendered

    def render(self, messages: Messages, tools: Tools = None, **arguments: Any) -> str:
        """Renders `messages` to a prompt for `Tokenizer.encode(..., allow_special=True)`.

        `arguments` are further variables of the template; `add_generation_prompt` is true unless given. If the
        input has no special token, the text equals `apply_chat_template(..., tokenize=False)` of transformers for the
        same messages in the template's form. A special token in the input is wrapped in two noncharacters.

        Raises:
            TemplateInputError: the template rejects the input, or the result is too long or takes too long.
        """
        named = self._select(tools)
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            return self._render(
                named.compiled, named.forms.messages(plain), named.forms.tools(tools), arguments, TemplateBounds()
            )
        except (RecursionError, TemplateDepthError):
            raise TemplateDepthError(_deepest(messages, tools, arguments)) from None

    def forms(self, tools: Tools = None) -> MessageForms:
        """Returns the message form that the template for requests with `tools` expects.

        Raises:
            TemplateInputError: the model has no template for such requests.
        """
        return self._select(tools).forms

    def _read(self, name: str, source: str) -> _NamedTemplate:
        compiled = compile_template(name, source)
        # All probes share one budget, so that a hostile template delays its loading by at most one time limit.
        bounds = TemplateBounds()
        forms = message_forms(lambda messages, tools: self._render(compiled, messages, tools, {}, bounds))
        return _NamedTemplate(compiled, forms)

    def _render(
        self,
        template: jinja2.Template,
        messages: Messages,
        tools: Tools,
        arguments: Mapping[str, Any],
        bounds: TemplateBounds,
    ) -> str:
        """Renders messages and tools that already have the template's form."""
        chat = [_alias_reasoning(message) for message in messages]
        variables = {**self._variables, "add_generation_prompt": True, "documents": None, **self._mark(arguments)}
        variables |= {"messages": self._mark(chat), "tools": self._mark(tools)}
        return render_template(template, variables, bounds)

    def _select(self, tools: Tools) -> _NamedTemplate:
        if tools is not None and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            raise TemplateInputError(f"the model has templates {sorted(self._templates)} but no default")
        return self._templates["default"]

    def _mark(self, value: Any) -> Any:
        """Marks the special tokens in the strings of `value`, keys included: templates print keys of tool schemas."""
        if isinstance(value, str):
            if MARK_START in value or MARK_END in value:
                raise TemplateInputError("a string has one of the noncharacters U+FDD0 and U+FDD1")
            return mark_special(value, self._special)
        # Loops, since a comprehension takes one more frame for each of MAX_JSON_LEVELS.
        if isinstance(value, Mapping):
            marked = {}
            for key, item in value.items():
                marked[self._mark(key)] = self._mark(item)
            return marked
        if isinstance(value, list | tuple):
            items = []
            for item in value:
                items.append(self._mark(item))  # noqa: PERF401
            return items
        return value


def _digest(templates: Mapping[str, str]) -> str:
    if list(templates) == ["default"]:
        text = templates["default"]
    else:
        text = "".join(f"{name}\0{source}\0" for name, source in sorted(templates.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def _words(source: str) -> set[str]:
    """Quoted words of a template; names of roles are among them."""
    return {word for _, word in _QUOTED.findall(source)}


def _alias_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _deepest(messages: Messages, tools: Tools, arguments: Mapping[str, Any]) -> str:
    """Path of the request field whose value is nested most deeply."""
    found = {"messages": 1, "template_arguments_json": _levels(arguments)}
    found |= {f"tools[{i}].parameters_json": _levels(tool) for i, tool in enumerate(tools or ())}
    for i, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        found |= {f"messages[{i}].tool_calls[{j}].arguments_json": _levels(call) for j, call in enumerate(calls)}
    return max(found, key=lambda path: found[path])


def _levels(value: Any) -> int:
    """Nesting depth of mappings and lists in a value, counted without recursion."""
    levels, row = 0, [value]
    while row := [each for each in row if isinstance(each, Mapping | list | tuple)]:
        levels += 1
        row = [item for each in row for item in (each.values() if isinstance(each, Mapping) else each)]
    return levels
