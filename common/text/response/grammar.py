"""Grammars of answers with calls and reasoning, in the forms of families (llguidance's Lark, without its header).

Where a delimiter is a token of its own a grammar names the token, so that no text is taken for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

_TEXT: Final = r"/(.|\n)*/"
_BLANKS: Final = r"/[ \n]*/"
_ANY_OBJECT: Final = '{"type": "object"}'


@dataclass(frozen=True, slots=True)
class CallStyle:
    """The text of calls, as a family writes it. `{name}` and `{key}` stand for names.

    Attributes:
        begin: of a call, up to its arguments.
        end: of a call.
        before: all calls.
        between: two calls.
        after: all calls.
        is_one: True if an answer has one call at most.
        key: begins an argument, where each stands between tags; empty where arguments are JSON.
        key_end: ends it, wherever it stands.
        key_after: stands behind it.
        reasoning: stands around reasoning; empty where there is none.
        content: begins content.
        delimiters: that must be tokens of their own: elsewhere text could be taken for one.
    """

    begin: str
    end: str
    before: str = ""
    between: str = "\n"
    after: str = ""
    is_one: bool = False
    key: str = ""
    key_end: str = ""
    key_after: str = "\n"
    reasoning: tuple[str, str] = ("<think>", "</think>")
    content: str = ""
    delimiters: tuple[str, ...] = ("<tool_call>", "</tool_call>")


_OBJECT_BEGIN: Final = '{"name": "{name}", "arguments": '
_DEEPSEEK: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_CALL: Final = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
STYLES: Final[Mapping[str, CallStyle]] = {
    "qwen": CallStyle(f"<tool_call>\n{_OBJECT_BEGIN}", "}\n</tool_call>"),
    "qwen_coder": CallStyle(
        "<tool_call>\n<function={name}>\n",
        "</function>\n</tool_call>",
        key="<parameter={key}>\n",
        key_end="</parameter>",
    ),
    "glm": CallStyle(
        "<tool_call>{name}\n",
        "</tool_call>",
        key="<arg_key>{key}</arg_key>\n<arg_value>",
        key_end="</arg_value>",
        delimiters=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "deepseek_v3": CallStyle(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        before=_DEEPSEEK[0],
        after=_DEEPSEEK[1],
        delimiters=(*_DEEPSEEK, *_DEEPSEEK_CALL),
    ),
    "deepseek_v31": CallStyle(
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        before=_DEEPSEEK[0],
        between="",
        after=_DEEPSEEK[1],
        delimiters=(*_DEEPSEEK, *_DEEPSEEK_CALL),
    ),
    "mistral": CallStyle(
        _OBJECT_BEGIN,
        "}",
        before="[TOOL_CALLS] [",
        between=", ",
        after="]",
        reasoning=("", ""),
        delimiters=("[TOOL_CALLS]",),
    ),
    "llama": CallStyle('{"name": "{name}", "parameters": ', "}", is_one=True, reasoning=("", ""), delimiters=()),
    "harmony": CallStyle(
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
        "<|call|>",
        is_one=True,
        reasoning=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        content="<|channel|>final<|message|>",
        delimiters=("<|channel|>", "<|message|>", "<|call|>", "<|end|>", "<|start|>", "<|constrain|>"),
    ),
}


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A tool that may be called.

    Attributes:
        name: of the tool.
        schema: JSON Schema of the arguments, as text; empty for any object.
        keys: names of the arguments, and whether each is required; for families with tags.
    """

    name: str
    schema: str
    keys: Sequence[tuple[str, bool]] = ()


@dataclass(frozen=True, slots=True)
class Thinking:
    """Reasoning that an answer begins with.

    Attributes:
        has_begun: True if the prompt has begun it; else the model may leave it out.
        max_tokens: most tokens of it, None for any number.
    """

    has_begun: bool = False
    max_tokens: int | None = None


class AnswerGrammar:
    """Writes the grammars of one model's answers.

    Args:
        style: of its family.
        markers: texts of tokens that stand for delimiters, by id.
        eos_token_ids: tokens that end an answer, which grammars do not name.
    """

    def __init__(self, style: CallStyle, markers: Mapping[int, str], eos_token_ids: frozenset[int]) -> None:
        self._style = style
        self._ids = {text: token_id for token_id, text in markers.items()}
        self._ends = {text for text, token_id in self._ids.items() if token_id in eos_token_ids}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @property
    def holds(self) -> bool:
        """True if no text of an answer can be taken for a delimiter of calls."""
        return all(delimiter in self._ids for delimiter in self._style.delimiters)

    @property
    def tells_calls(self) -> bool:
        """True if calls begin with a token of their own, so that no text is one."""
        return self._begins_with_token(self._style.before or self._style.begin)

    @property
    def ends_reasoning(self) -> bool:
        """True if reasoning ends with a token of its own."""
        return self._begins_with_token(self._style.reasoning[1])

    @property
    def has_json(self) -> bool:
        """True if arguments are JSON, which can be held to a schema."""
        return not self._style.key

    def calls(self, tools: Sequence[CalledTool], thinking: Thinking | None, *, is_required: bool, is_one: bool) -> str:
        """Grammar of an answer that calls tools.

        Args:
            tools: that may be called; none where content alone may come.
            thinking: before it; None for none.
            is_required: True if it calls, False if it may.
            is_one: True for one call at most.
        """
        content = f"{self._literal(self._style.content)} text"
        if not tools:
            return self._written([("answer", content)], thinking)
        rules = [("answer", "calls" if is_required else self._may_call(content)), *self._call_rules(tools, is_one)]
        return self._written(rules, thinking)

    def around(self, grammar: str, thinking: Thinking) -> str:
        """A grammar, of which nothing is read, behind reasoning."""
        content = self._literal(self._style.content)
        return self._written([("answer", f"{content} %lark {{\n{grammar}\n}}")], thinking)

    def _may_call(self, content: str) -> str:
        return f"{content} | calls" if self._style.content else f"{content} calls?"

    def _call_rules(self, tools: Sequence[CalledTool], is_one: bool) -> list[tuple[str, str]]:
        style = self._style
        call = "call" if is_one or style.is_one else f"call ({self._literal(style.between)} call)*"
        rules = [
            ("calls", f"{self._literal(style.before)} {call} {self._literal(style.after)}"),
            ("call", " | ".join(f"call_{i}" for i in range(len(tools)))),
        ]
        for i, tool in enumerate(tools):
            begin = self._literal(style.begin.replace("{name}", tool.name))
            rules.append((f"call_{i}", f"{begin} arguments_{i} {self._literal(style.end)}"))
            rules += self._argument_rules(f"arguments_{i}", tool)
        return rules

    def _argument_rules(self, rule: str, tool: CalledTool) -> list[tuple[str, str]]:
        if self.has_json:
            return [(rule, f"%json {tool.schema or _ANY_OBJECT}")]
        parts, rules = [], list[tuple[str, str]]()
        for j, (key, is_required) in enumerate(tool.keys):
            parts.append(f"{rule}_{j}{'' if is_required else '?'}")
            text, more = self._until(f"{rule}_{j}_value", self._style.key_end)
            begin = self._literal(self._style.key.replace("{key}", key))
            rules += [(f"{rule}_{j}", f"{begin} {text} {self._literal(self._style.key_after)}"), *more]
        return [(rule, " ".join(parts) or '""'), *rules]

    def _until(self, rule: str, end: str, most: int | None = None) -> tuple[str, list[tuple[str, str]]]:
        """Any text up to its end, and the rules for it."""
        if self._begins_with_token(end):
            limit = "" if most is None else f"[max_tokens={most}]"
            return f"{rule} {self._literal(end)}", [(f"{rule}{limit}", _TEXT)]
        return rule, [(f"{rule}[suffix={_quoted(end)}]", _TEXT)]

    def _written(self, rules: Sequence[tuple[str, str]], thinking: Thinking | None) -> str:
        start, more = "answer", list[tuple[str, str]]()
        if thinking is not None and self._style.reasoning[1]:
            begin, end = self._style.reasoning
            if thinking.max_tokens == 0:
                text = self._literal(end)
            else:
                text, more = self._until("thought", end, thinking.max_tokens)
            opening = "" if thinking.has_begun else self._literal(begin)
            blanks = "" if self._style.content else "blanks"
            more = [("reasoning", f"{opening} {text} {blanks}"), *more]
            start = "reasoning answer" if thinking.has_begun else "reasoning? answer"
        every = [("start", start), *more, *rules, ("text", _TEXT), ("blanks", _BLANKS)]
        used = " ".join(body for _, body in every)
        return "\n".join(f"{name}: {body}" for name, body in every if name == "start" or _name(name) in used)

    def _begins_with_token(self, text: str) -> bool:
        return self._marker.match(text) is not None

    def _literal(self, text: str) -> str:
        """A text with its tokens named; one that ends an answer is left to the end."""
        parts, at = [], 0
        for match in self._marker.finditer(text):
            parts += [_quoted(text[at : match.start()])] if match.start() > at else []
            parts += [] if match[0] in self._ends else [f"<[{self._ids[match[0]]}]>"]
            at = match.end()
        parts += [_quoted(text[at:])] if at < len(text) else []
        return " ".join(parts)


def _name(rule: str) -> str:
    return rule.partition("[")[0]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def keys_of(schema: Any) -> list[tuple[str, bool]]:
    """Names of the arguments that a schema declares, in order, and whether each is required."""
    properties, required = schema.get("properties"), schema.get("required")
    names = list(properties) if isinstance(properties, dict) else []
    return [(name, isinstance(required, list) and name in required) for name in names]
