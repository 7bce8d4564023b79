"""Grammars of answers with calls and reasoning, in the forms of families (llguidance's Lark, without its header).

Where a delimiter is a token of its own a grammar names the token, so that no text is taken for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from common.text.response.arguments import Argument

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
        key: begins an argument, where each stands between tags; empty where arguments are JSON. `{is_text}` stands for
            `true` if it is a text as it is.
        value_after: stands behind a value, in front of `key_end`, and is no part of it.
        key_end: ends an argument, wherever it stands.
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
    value_after: str = ""
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
        value_after="\n",
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
    "deepseek_v32": CallStyle(
        '<｜DSML｜invoke name="{name}">\n',
        "</｜DSML｜invoke>",
        before="<｜DSML｜function_calls>\n",
        after="\n</｜DSML｜function_calls>",
        key='<｜DSML｜parameter name="{key}" string="{is_text}">',
        key_end="</｜DSML｜parameter>",
        delimiters=("｜DSML｜",),
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
        arguments: in order, for families with tags.
    """

    name: str
    schema: str
    arguments: Sequence[Argument] = ()


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
        return self._has_token(self._style.before or self._style.begin)

    @property
    def tags_are_tokens(self) -> bool:
        """True if no text of an argument can be taken for its end."""
        return self._has_token(self._style.key_end)

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
        answer = "calls" if is_required else self._may_call(content)
        return self._written(
            [("answer", answer), *self._call_rules(tools, is_one, after_text=not is_required)], thinking
        )

    def around(self, grammar: str, thinking: Thinking | None, calls: str = "") -> str:
        """A grammar, of which nothing is read, behind reasoning.

        Args:
            grammar: of content.
            thinking: before it; None for none.
            calls: grammar of calls, that may come instead; empty for none.
        """
        answer = f"{self._literal(self._style.content)} %lark {{\n{grammar}\n}}"
        if calls:
            answer += f" | %lark {{\n{calls}\n}}"
        return self._written([("answer", answer)], thinking)

    @property
    def _before_token(self) -> str:
        """The text in front of the token that calls begin with."""
        first = self._style.before or self._style.begin
        token = self._marker.search(first)
        return "" if token is None else first[: token.start()]

    def _may_call(self, content: str) -> str:
        if self._before_token:
            return f"{content} | text_before calls"
        return f"{content} | calls" if self._style.content else f"{content} calls?"

    def _call_rules(self, tools: Sequence[CalledTool], is_one: bool, *, after_text: bool) -> list[tuple[str, str]]:
        style, known = self._style, self._before_token if after_text else ""
        call = "call" if is_one or style.is_one else f"call ({self._literal(style.between)} call)*"
        rules = [
            ("text_before", f"/(.|\\n)*{re.escape(known)}/"),
            ("calls", f"{self._literal(style.before.removeprefix(known))} {call} {self._literal(style.after)}"),
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
        for j, argument in enumerate(tool.arguments):
            parts.append(f"{rule}_{j}{'' if argument.is_required else '?'}")
            value, more = self._value(f"{rule}_{j}_value", argument)
            rules += [(f"{rule}_{j}", f"{self._key(argument)} {value} {self._literal(self._style.key_after)}"), *more]
        return [(rule, " ".join(parts) or '""'), *rules]

    def _key(self, argument: Argument) -> str:
        text = self._style.key.replace("{key}", argument.name)
        if argument.is_text is not None or "{is_text}" not in text:
            return self._literal(text.replace("{is_text}", "true" if argument.is_text else "false"))
        before, after = map(self._literal, text.split("{is_text}"))
        return f'{before} ("true" | "false") {after}'

    def _value(self, rule: str, argument: Argument) -> tuple[str, list[tuple[str, str]]]:
        """The value of an argument and its end, and the rules for them."""
        end = self._literal(self._style.value_after + self._style.key_end)
        if argument.schema:
            return f"{rule} {end}", [(rule, f"%json {argument.schema}")]
        if argument.texts is not None:
            return f"({' | '.join(map(_quoted, argument.texts))}) {end}", []
        if argument.lengths is None:
            return self._until(rule, self._style.key_end)
        least, most = argument.lengths
        return self._until(rule, self._style.key_end, text=f"(.|\\n){{{least},{'' if most is None else most}}}")

    def _until(
        self, rule: str, end: str, most: int | None = None, text: str = r"(.|\n)*"
    ) -> tuple[str, list[tuple[str, str]]]:
        """Any text up to its end, and the rules for it."""
        token = self._marker.search(end)
        if token is None:
            return rule, [(f"{rule}[suffix={_quoted(end)}]", f"/{text}/")]
        limit = "" if most is None else f"[max_tokens={most}]"
        # What stands in front of the token is a part of the text, which is as long as it can be.
        expression = text + re.escape(end[: token.start()]).replace("/", r"\/")
        return f"{rule} {self._literal(end[token.start() :])}", [(f"{rule}{limit}", f"/{expression}/")]

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

    def _has_token(self, text: str) -> bool:
        return self._marker.search(text) is not None

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
