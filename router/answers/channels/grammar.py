"""Writes grammars of answers with calls and reasoning, in the forms of model families.

Grammars are llguidance's Lark, without the header. If a delimiter is a token, the grammar names the token, so that no
text is taken for the delimiter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from router.answers.channels.arguments import Argument

_TEXT: Final = r"/(.|\n)*/"
_BLANKS: Final = r"/[ \n]*/"
# Placeholders for characters that the model chooses, and their rules.
WORD: Final = "{word}"
DIGITS: Final = "{digits}"
_PLACES: Final = {WORD: "word", DIGITS: "digits"}
_PLACE: Final = re.compile("|".join(map(re.escape, _PLACES)))
_PLACE_RULES: Final = (
    ("word", "/[A-Za-z0-9_]{1,64}/"),
    ("digits", "/[0-9]{1,20}/"),
)
# Matches rule names. It may also match text in a rule, which then only keeps an unused rule.
_RULE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
NAME: Final = "{name}"
KEY: Final = "{key}"
IS_TEXT: Final = "{is_text}"
_ANY_OBJECT: Final = '{"type": "object"}'


@dataclass(frozen=True, slots=True)
class CallStyle:
    """Text of calls, reasoning and content as a family writes them.

    `{name}` and `{key}` stand for names of tools and arguments, `{word}` and `{digits}` for text of the model's choice.

    Attributes:
        begins: texts that may begin a call, up to its arguments.
        end: end of a call.
        before: text before the first call.
        between: text between two calls.
        after: text after the last call.
        is_one: True if an answer has one call at most.
        key: begin of an argument between tags; empty if arguments are JSON. `{is_text}` stands for `true` or `false`:
            whether the value is raw text.
        value_after: text between a value and `key_end`, not a part of the value.
        key_end: end of an argument.
        key_after: text after an argument.
        reasoning: begin and end of reasoning; empty without reasoning.
        content: begin of content.
        delimiters: texts that must be tokens of their own, so that no other text is taken for a delimiter.
    """

    begins: tuple[str, ...]
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
_KIMI: Final = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_DEEPSEEK_CALL: Final = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")


def _dsml(around: str) -> CallStyle:
    return CallStyle(
        ('<｜DSML｜invoke name="{name}">\n',),
        "</｜DSML｜invoke>",
        before=f"<｜DSML｜{around}>\n",
        after=f"\n</｜DSML｜{around}>",
        key='<｜DSML｜parameter name="{key}" string="{is_text}">',
        key_end="</｜DSML｜parameter>",
        delimiters=("｜DSML｜",),
    )


def _array(begin: str, end: str, delimiters: tuple[str, ...]) -> CallStyle:
    return CallStyle((_OBJECT_BEGIN,), "}", before=f"{begin}[", between=", ", after=f"]{end}", delimiters=delimiters)


STYLES: Final[Mapping[str, CallStyle]] = {
    "qwen": CallStyle((f"<tool_call>\n{_OBJECT_BEGIN}",), "}\n</tool_call>"),
    "qwen_coder": CallStyle(
        ("<tool_call>\n<function={name}>\n",),
        "</function>\n</tool_call>",
        key="<parameter={key}>\n",
        value_after="\n",
        key_end="</parameter>",
    ),
    "glm": CallStyle(
        ("<tool_call>{name}\n",),
        "</tool_call>",
        key="<arg_key>{key}</arg_key>\n<arg_value>",
        key_end="</arg_value>",
        delimiters=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "deepseek_v3": CallStyle(
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",),
        "\n```<｜tool▁call▁end｜>",
        before=_DEEPSEEK[0],
        after=_DEEPSEEK[1],
        delimiters=(*_DEEPSEEK, *_DEEPSEEK_CALL),
    ),
    "deepseek_v31": CallStyle(
        ("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",),
        "<｜tool▁call▁end｜>",
        before=_DEEPSEEK[0],
        between="",
        after=_DEEPSEEK[1],
        delimiters=(*_DEEPSEEK, *_DEEPSEEK_CALL),
    ),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "mistral": replace(_array("[TOOL_CALLS] ", "", ("[TOOL_CALLS]",)), reasoning=("", "")),
    "mistral_named": CallStyle(
        ("[TOOL_CALLS]{name}[ARGS]", f"[TOOL_CALLS]{{name}}[CALL_ID]{WORD}[ARGS]"),
        "",
        between="",
        reasoning=("[THINK]", "[/THINK]"),
        delimiters=("[TOOL_CALLS]", "[ARGS]"),
    ),
    "nemotron": _array("<TOOLCALL>", "</TOOLCALL>", ("<TOOLCALL>", "</TOOLCALL>")),
    "jamba": _array("<tool_calls>", "</tool_calls>", ("<tool_calls>", "</tool_calls>")),
    "granite": _array("<|tool_call|>", "", ("<|tool_call|>",)),
    "phi": _array("<|tool_call|>", "<|/tool_call|>", ("<|tool_call|>", "<|/tool_call|>")),
    "phi_each": CallStyle(
        (f"<|tool_call|>{_OBJECT_BEGIN}",),
        "}<|/tool_call|>",
        between="",
        delimiters=("<|tool_call|>", "<|/tool_call|>"),
    ),
    "xlam": replace(_array("", "", ()), reasoning=("", "")),
    "kimi": CallStyle(
        (f"<|tool_call_begin|>functions.{{name}}:{DIGITS}<|tool_call_argument_begin|>",),
        "<|tool_call_end|>",
        before=_KIMI[0],
        between="",
        after=_KIMI[1],
        delimiters=(*_KIMI, "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    "gigachat": CallStyle((f"<|function_call|>{_OBJECT_BEGIN}",), "}", is_one=True, delimiters=("<|function_call|>",)),
    "llama": CallStyle(('{"name": "{name}", "parameters": ',), "}", is_one=True, reasoning=("", ""), delimiters=()),
    "harmony": CallStyle(
        ("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",),
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
        name: name of the tool.
        schema: JSON Schema of the arguments, as text; empty for any object.
        arguments: arguments in order, for families with tags.
    """

    name: str
    schema: str
    arguments: Sequence[Argument] = ()


@dataclass(frozen=True, slots=True)
class ReasoningLimit:
    """Limits of the reasoning in front of an answer.

    Attributes:
        has_begun: True if the prompt begins the reasoning; otherwise the model may leave it out.
        max_tokens: most tokens of reasoning; None for no limit.
    """

    has_begun: bool = False
    max_tokens: int | None = None


class AnswerGrammar:
    """Writes the grammars of one model's answers.

    Args:
        style: style of the model's family.
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
        """True if all delimiters of calls are tokens, so that no text can be taken for one."""
        return all(delimiter in self._ids for delimiter in self._style.delimiters)

    @property
    def tells_calls(self) -> bool:
        """True if content and calls can be told apart by a token that begins either."""
        return bool(self._style.content) or self._before_token is not None

    @property
    def tag_end(self) -> str:
        """Text that ends an argument between tags; empty if a token does, which no value can spell."""
        return "" if self._has_token(self._style.key_end) else self._style.key_end

    @property
    def ends_reasoning(self) -> bool:
        """True if reasoning ends with a token of its own."""
        return self._begins_with_token(self._style.reasoning[1])

    @property
    def has_json(self) -> bool:
        """True if arguments are JSON, which can be held to a schema."""
        return not self._style.key

    def calls(
        self, tools: Sequence[CalledTool], thinking: ReasoningLimit | None, *, is_required: bool, is_one: bool
    ) -> str:
        """Returns the grammar of an answer that may or must call tools.

        Args:
            tools: tools that may be called; empty if the answer is content alone.
            thinking: limits of reasoning before the answer; None without reasoning.
            is_required: True if the answer must call.
            is_one: True for one call at most.
        """
        content = f"{self._literal(self._style.content)} text"
        if not tools:
            return self._written([("answer", content)], thinking)
        answer = "calls" if is_required else self._may_call(content)
        return self._written(
            [("answer", answer), *self._call_rules(tools, is_one, after_text=not is_required)], thinking
        )

    def around(self, grammar: str, thinking: ReasoningLimit | None, calls: str = "") -> str:
        """Puts a grammar of content behind reasoning, without parsing it.

        Args:
            grammar: grammar of content.
            thinking: limits of reasoning before the answer; None without reasoning.
            calls: grammar of calls that may replace content; empty for none.
        """
        answer = f"{self._literal(self._style.content)} %lark {{\n{grammar}\n}}"
        if calls:
            answer += f" | %lark {{\n{calls}\n}}"
        return self._written([("answer", answer)], thinking)

    @property
    def _before_token(self) -> str | None:
        """Text in front of the first token of calls; None if calls begin without a token or in several ways."""
        firsts = (self._style.before,) if self._style.before else self._style.begins
        tokens = [self._marker.search(first) for first in firsts]
        known = {first[: token.start()] for first, token in zip(firsts, tokens, strict=True) if token is not None}
        text = next(iter(known), "")
        return None if None in tokens or len(known) != 1 or _PLACE.search(text) else text

    def _may_call(self, content: str) -> str:
        if self._before_token:
            return f"{content} | text_before calls"
        return f"{content} | calls" if self._style.content else f"{content} calls?"

    def _call_rules(self, tools: Sequence[CalledTool], is_one: bool, *, after_text: bool) -> list[tuple[str, str]]:
        style, known = self._style, (self._before_token or "") if after_text else ""
        # The rule `text_before` has this part of the first call.
        first_begins = style.begins if style.before else tuple(text.removeprefix(known) for text in style.begins)
        first = "first" if known and not style.before else "call"
        has_one = is_one or style.is_one or self._ends_answer(style.end)
        more = "" if has_one else f" ({self._literal(style.between)} call)*"
        before = self._literal(style.before.removeprefix(known))
        rules = [
            ("text_before", f"/(.|\\n)*{re.escape(known)}/"),
            ("calls", f"{before} {first}{more} {self._literal(style.after)}"),
        ]
        for i, tool in enumerate(tools):
            rules += self._argument_rules(f"arguments_{i}", tool)
        for rule, begins in {first: first_begins, "call": style.begins}.items():
            rules.append((rule, " | ".join(f"{rule}_{i}" for i in range(len(tools)))))
            rules += self._begin_rules(f"begin_{rule}", begins)
            for i, tool in enumerate(tools):
                begin = self._begin(f"begin_{rule}", begins, tool.name)
                rules.append(
                    (f"{rule}_{i}", f"{begin} arguments_{i} {self._literal(style.end.replace(NAME, tool.name))}")
                )
        return rules

    def _ends_answer(self, text: str) -> bool:
        return any(match[0] in self._ends for match in self._marker.finditer(text))

    def _begin_rules(self, rule: str, begins: Sequence[str]) -> list[tuple[str, str]]:
        """Rules for the texts around the name of a tool, if a call may begin with several texts."""
        if len(begins) == 1:
            return []
        return [
            (f"{rule}_{k}{side}", self._choice(part))
            for k, group in enumerate(_around_name(begins))
            for side, part in zip("ab", group, strict=True)
        ]

    def _begin(self, rule: str, begins: Sequence[str], name: str) -> str:
        """The begin of a call of the tool `name`, by the rules of `_begin_rules`."""
        if len(begins) == 1:
            return self._literal(begins[0].replace(NAME, name))
        groups = range(len(_around_name(begins)))
        return f"({' | '.join(f'{rule}_{k}a {_quoted(name)} {rule}_{k}b' for k in groups)})"

    def _argument_rules(self, rule: str, tool: CalledTool) -> list[tuple[str, str]]:
        if self.has_json:
            return [(rule, f"%json {tool.schema or _ANY_OBJECT}")]
        parts, rules = [], list[tuple[str, str]]()
        for j, argument in enumerate(tool.arguments):
            parts.append(f"{rule}_{j}{'' if argument.is_required else '?'}")
            value, more = self._value(f"{rule}_{j}_value", argument)
            rules += [
                (f"{rule}_{j}", f"{self._key(argument)} {value} {self._literal(self._style.key_after)}"),
                *more,
            ]
        return [(rule, " ".join(parts) or '""'), *rules]

    def _key(self, argument: Argument) -> str:
        text = self._style.key.replace(KEY, argument.name)
        if argument.is_text is not None or IS_TEXT not in text:
            return self._literal(text.replace(IS_TEXT, "true" if argument.is_text else "false"))
        before, after = map(self._literal, text.split(IS_TEXT))
        return f'{before} ("true" | "false") {after}'

    def _value(self, rule: str, argument: Argument) -> tuple[str, list[tuple[str, str]]]:
        """Returns the expression of an argument's value and end, and the rules that it needs."""
        end = self._literal(self._style.value_after + self._style.key_end)
        if argument.schema:
            return f"{rule} {end}", [(rule, f"%json {argument.schema}")]
        if not argument.text:
            return self._until(rule, self._style.key_end)
        return self._held(rule.upper(), argument.text)

    def _held(self, terminal: str, text: str) -> tuple[str, list[tuple[str, str]]]:
        """Returns the expression of raw text by its terminals, with its end, and the rules that it needs."""
        end = self._style.value_after + self._style.key_end
        token = self._marker.search(end)
        # Text of the end in front of its token is part of the terminal.
        of_text, of_tokens = (end, "") if token is None else (end[: token.start()], end[token.start() :])
        return f"{terminal} {self._literal(of_tokens)}", [
            (terminal, f"({text}) {_quoted(of_text)}".removesuffix(' ""'))
        ]

    def _until(self, rule: str, end: str, most: int | None = None) -> tuple[str, list[tuple[str, str]]]:
        """Returns the expression of any text up to `end`, and the rules that it needs."""
        token = self._marker.search(end)
        if token is None:
            return rule, [(f"{rule}[suffix={_quoted(end)}]", _TEXT)]
        limit = "" if most is None else f"[max_tokens={most}]"
        # Text of the end in front of its token is part of the text.
        expression = r"(.|\n)*" + re.escape(end[: token.start()]).replace("/", r"\/")
        return f"{rule} {self._literal(end[token.start() :])}", [(f"{rule}{limit}", f"/{expression}/")]

    def _written(self, rules: Sequence[tuple[str, str]], thinking: ReasoningLimit | None) -> str:
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
        written = [("start", start), *more, *rules, ("text", _TEXT), ("blanks", _BLANKS), *_PLACE_RULES]
        used = {word for _, body in written for word in _RULE.findall(body)}
        return "\n".join(f"{name}: {body}" for name, body in written if name == "start" or _name(name) in used)

    def _begins_with_token(self, text: str) -> bool:
        return self._marker.match(text) is not None

    def _has_token(self, text: str) -> bool:
        return self._marker.search(text) is not None

    def _choice(self, texts: Sequence[str]) -> str:
        """Expression of one of the texts."""
        literals = list(dict.fromkeys(map(self._literal, texts)))
        return literals[0] if len(literals) == 1 else f"({' | '.join(literals)})"

    def _literal(self, text: str) -> str:
        """Returns the expression of a text, with its tokens named. A token that ends answers is left out."""
        parts, at = [], 0
        for match in _PLACE.finditer(text):
            parts += [*self._named(text[at : match.start()]), _PLACES[match[0]]]
            at = match.end()
        return " ".join([*parts, *self._named(text[at:])])

    def _named(self, text: str) -> list[str]:
        parts, at = [], 0
        for match in self._marker.finditer(text):
            parts += [_quoted(text[at : match.start()])] if match.start() > at else []
            parts += [] if match[0] in self._ends else [f"<[{self._ids[match[0]]}]>"]
            at = match.end()
        return [*parts, *([_quoted(text[at:])] if at < len(text) else [])]


def one_call(style: CallStyle, name: str, keys: Iterable[str]) -> str:
    """An answer with one call of the tool `name`, with an argument for each of `keys` if a style has tags."""
    value_end = style.value_after + style.key_end + style.key_after
    arguments = "".join(f"{style.key.replace(KEY, key).replace(IS_TEXT, 'true')}x{value_end}" for key in keys)
    call = f"{style.begins[0]}{arguments if style.key else '{}'}{style.end}{style.after}"
    filled = (style.before + call).replace(NAME, name)
    return filled.replace(WORD, "x").replace(DIGITS, "0")


def written_calls(style: CallStyle, calls: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """Calls, each a name and arguments, as a family whose arguments are JSON writes them."""
    texts = [
        f"{style.begins[0].replace(NAME, name)}{json.dumps(arguments, ensure_ascii=False)}{style.end}"
        for name, arguments in calls
    ]
    return f"{style.before}{style.between.join(texts)}{style.after}"


def _around_name(begins: Sequence[str]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Groups of texts before and texts after the name; within a group each text before goes with each one after."""
    behind: dict[str, list[str]] = {}
    for text in begins:
        before, _, after = text.partition(NAME)
        behind.setdefault(before, []).append(after)
    groups: dict[tuple[str, ...], list[str]] = {}
    for before, afters in behind.items():
        groups.setdefault(tuple(afters), []).append(before)
    return [(tuple(befores), afters) for afters, befores in groups.items()]


def _name(rule: str) -> str:
    return rule.partition("[")[0]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
