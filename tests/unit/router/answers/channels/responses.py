"""Random answers in the form of each family, whole and broken."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from transformers.utils.chat_parsing import content_parsers

from router.answers.channels import families

NAMES = ("get_weather", "f", "add-2")
# Properties of every tool.
PROPERTIES = {"n": {"type": "integer"}, "x": {"anyOf": [{"type": "number"}, {"type": "null"}]}, "o": {"type": "object"}}
TOOLS = [{"type": "function", "function": {"name": n, "parameters": {"properties": PROPERTIES}}} for n in NAMES]


@dataclass(frozen=True)
class Answer:
    """An answer before it is written in a family's form."""

    reasoning: str
    content: str
    calls: Sequence[tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class Family:
    """A family's response template, and how it writes an answer after `opening`."""

    name: str
    spec: Mapping[str, Any]
    opening: str
    markers: Sequence[str]

    def write(self, answer: Answer) -> str:
        """The text of an answer."""
        thought = f"<think>\n{answer.reasoning}\n</think>\n\n" if answer.reasoning else ""
        text: str = getattr(self, f"_{self.name}")(answer, thought)
        return text.removeprefix(self.opening)

    def _qwen(self, answer: Answer, thought: str) -> str:
        calls = (f"<tool_call>\n{_object(name, args)}\n</tool_call>" for name, args in answer.calls)
        return thought + answer.content + "\n" + "\n".join(calls)

    def _qwen_coder(self, answer: Answer, thought: str) -> str:
        calls = (
            f"<tool_call>\n<function={name}>\n"
            + "".join(f"<parameter={key}>\n{_raw(value)}\n</parameter>\n" for key, value in args.items())
            + "</function>\n</tool_call>"
            for name, args in answer.calls
        )
        return thought + answer.content + "\n" + "\n".join(calls)

    def _glm(self, answer: Answer, thought: str) -> str:
        calls = (
            f"\n<tool_call>{name}\n"
            + "".join(
                f"<arg_key>{key}</arg_key>\n<arg_value>{_raw(value)}</arg_value>\n" for key, value in args.items()
            )
            + "</tool_call>"
            for name, args in answer.calls
        )
        return thought + answer.content + "".join(calls)

    def _deepseek_v3(self, answer: Answer, thought: str) -> str:
        calls = (
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(args)}\n```<｜tool▁call▁end｜>"
            for name, args in answer.calls
        )
        return thought + answer.content + _wrapped("\n".join(calls))

    def _deepseek_v31(self, answer: Answer, thought: str) -> str:
        calls = (
            f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(args)}<｜tool▁call▁end｜>"
            for name, args in answer.calls
        )
        return thought + answer.content + _wrapped("".join(calls))

    def _deepseek_v32(self, answer: Answer, thought: str) -> str:
        calls = "".join(
            f'<｜DSML｜invoke name="{name}">\n'
            + "".join(
                f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">{_raw(value)}'
                "</｜DSML｜parameter>\n"
                for key, value in args.items()
            )
            + "</｜DSML｜invoke>\n"
            for name, args in answer.calls
        )
        wrapped = f"\n\n<｜DSML｜function_calls>\n{calls}</｜DSML｜function_calls>" if calls else ""
        return thought + answer.content + wrapped

    def _deepseek_v4(self, answer: Answer, thought: str) -> str:
        return self._deepseek_v32(answer, thought).replace("｜function_calls>", "｜tool_calls>")

    def _minimax(self, answer: Answer, thought: str) -> str:
        calls = "".join(
            f'<invoke name="{name}">\n'
            + "".join(f'<parameter name="{key}">{_raw(value)}</parameter>\n' for key, value in args.items())
            + "</invoke>\n"
            for name, args in answer.calls
        )
        return thought + answer.content + (f"\n<minimax:tool_call>\n{calls}</minimax:tool_call>" if calls else "")

    def _kimi(self, answer: Answer, thought: str) -> str:
        calls = "".join(
            f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{json.dumps(args)}<|tool_call_end|>"
            for i, (name, args) in enumerate(answer.calls)
        )
        wrapped = f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>" if calls else ""
        return thought + answer.content + wrapped

    def _mistral_named(self, answer: Answer, thought: str) -> str:
        thought = f"[THINK]{answer.reasoning}[/THINK]" if answer.reasoning else ""
        calls = (
            f"[TOOL_CALLS]{name}{'[CALL_ID]abcdefghi' * (i % 2)}[ARGS]{json.dumps(args)}"
            for i, (name, args) in enumerate(answer.calls)
        )
        return thought + answer.content + "".join(calls)

    def _nemotron(self, answer: Answer, thought: str) -> str:
        return thought + answer.content + _array(answer, "<TOOLCALL>", "</TOOLCALL>")

    def _jamba(self, answer: Answer, thought: str) -> str:
        return thought + answer.content + _array(answer, "<tool_calls>", "</tool_calls>")

    def _xlam(self, answer: Answer, thought: str) -> str:
        return _array(answer, "", "") or answer.content

    def _functionary(self, answer: Answer, thought: str) -> str:
        calls = (f"<function={name}>{json.dumps(args)}</function>" for name, args in answer.calls)
        return thought + answer.content + "".join(calls)

    def _lfm(self, answer: Answer, thought: str) -> str:
        calls = ", ".join(
            f"{name}({', '.join(f'{key}={_python(value)}' for key, value in args.items())})"
            for name, args in answer.calls
        )
        return thought + answer.content + (f"<|tool_call_start|>[{calls}]<|tool_call_end|>" if calls else "")

    def _olmo(self, answer: Answer, thought: str) -> str:
        calls = "\n".join(
            f"{name}({', '.join(f'{key}={json.dumps(value)}' for key, value in args.items())})"
            for name, args in answer.calls
        )
        return thought + answer.content + (f"<function_calls>{calls}</function_calls>" if calls else "")

    def _granite(self, answer: Answer, thought: str) -> str:
        return thought + answer.content + _array(answer, "<|tool_call|>", "")

    def _phi_each(self, answer: Answer, thought: str) -> str:
        calls = (f"<|tool_call|>{_object(name, args)}<|/tool_call|>" for name, args in answer.calls)
        return thought + answer.content + "".join(calls)

    def _phi(self, answer: Answer, thought: str) -> str:
        return thought + answer.content + _array(answer, "<|tool_call|>", "<|/tool_call|>")

    def _gigachat(self, answer: Answer, thought: str) -> str:
        calls = (f"<|function_call|>{_object(name, args)}" for name, args in answer.calls[:1])
        return thought + answer.content + "".join(calls)

    def _mistral(self, answer: Answer, thought: str) -> str:
        calls = [{"name": name, "arguments": args, "id": "abcdefghi"} for name, args in answer.calls]
        return answer.content + (f"[TOOL_CALLS] {json.dumps(calls)}" if calls else "")

    def _llama(self, answer: Answer, thought: str) -> str:
        for name, args in answer.calls[:1]:
            return json.dumps({"name": name, "parameters": args})
        return answer.content

    def _harmony(self, answer: Answer, thought: str) -> str:
        messages = [f"<|channel|>analysis<|message|>{answer.reasoning}<|end|>"] if answer.reasoning else []
        if answer.content:
            messages.append(f"<|channel|>final<|message|>{answer.content}<|end|>")
        messages += [
            f" to=functions.{name}<|channel|>commentary json<|message|>{json.dumps(args)}<|call|>"
            if place % 2
            else f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(args)}<|call|>"
            for place, (name, args) in enumerate(answer.calls)
        ]
        return "<|start|>assistant".join(messages)


def _object(name: str, args: Mapping[str, Any]) -> str:
    return json.dumps({"name": name, "arguments": args}, ensure_ascii=False)


def _array(answer: Answer, begin: str, end: str) -> str:
    calls = ", ".join(_object(name, args) for name, args in answer.calls)
    return f"{begin}[{calls}]{end}" if calls else ""


def _python(value: Any) -> str:
    """A value in Python's notation, with strings escaped as in JSON."""
    if isinstance(value, list):
        return f"[{', '.join(map(_python, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_python(key)}: {_python(each)}' for key, each in value.items())}}}"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _wrapped(calls: str) -> str:
    return f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>" if calls else ""


_THINK = ("<think>", "</think>")
_TOOL = (*_THINK, "<tool_call>", "</tool_call>")
_DEEPSEEK = (
    *_THINK,
    *(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")),
)
_KIMI = ("s_section_begin", "s_section_end", "_begin", "_argument_begin", "_end")
FAMILIES = (
    Family("qwen", families.QWEN, "", _TOOL),
    Family("qwen", families.QWEN, "<think>\n", _TOOL),
    Family("qwen_coder", families.QWEN_CODER, "", (*_TOOL, "<parameter=n>", "</parameter>", "</function>")),
    Family("glm", families.GLM, "", (*_TOOL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")),
    Family("deepseek_v3", families.DEEPSEEK_V3, "<think>\n", (*_DEEPSEEK, "```")),
    Family("deepseek_v31", families.DEEPSEEK_V31, "", _DEEPSEEK),
    Family("deepseek_v32", families.DEEPSEEK_V32, "", (*_THINK, "</｜DSML｜invoke>", "<｜DSML｜function_calls>")),
    Family("deepseek_v4", families.DEEPSEEK_V4, "", (*_THINK, "</｜DSML｜invoke>", "<｜DSML｜tool_calls>")),
    Family("minimax", families.MINIMAX, "<think>\n", (*_THINK, "</invoke>", "</parameter>", "</minimax:tool_call>")),
    Family("kimi", families.KIMI, "", (*_THINK, *(f"<|tool_call{name}|>" for name in _KIMI))),
    Family("mistral_named", families.MISTRAL_NAMED, "", ("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]", "[")),
    Family("nemotron", families.NEMOTRON, "<think>\n", (*_THINK, "<TOOLCALL>", "</TOOLCALL>", "]")),
    Family("jamba", families.JAMBA, "", (*_THINK, "<tool_calls>", "</tool_calls>", "]")),
    Family("granite", families.GRANITE, "", (*_THINK, "<|tool_call|>", "]")),
    Family("phi", families.PHI, "", (*_THINK, "<|tool_call|>", "<|/tool_call|>", "]")),
    Family("phi_each", families.PHI_EACH, "", (*_THINK, "<|tool_call|>", "<|/tool_call|>", "}")),
    Family("olmo", families.OLMO, "", (*_THINK, "<function_calls>", "</function_calls>", ")", "(")),
    Family("xlam", families.XLAM, "", ("[", "]", '{"name"')),
    Family("functionary", families.FUNCTIONARY, "", ("<function=f>", "</function>", "<|eom_id|>")),
    Family("lfm", families.LFM, "", (*_THINK, "<|tool_call_start|>", "<|tool_call_end|>", "]", "(")),
    Family("gigachat", families.GIGACHAT, "", ("<|function_call|>", "}")),
    Family("mistral", families.MISTRAL, "", ("[TOOL_CALLS]", "[", "]")),
    Family("llama", families.LLAMA, "", ("<|python_tag|>", '{"name"')),
    Family(
        "harmony", families.HARMONY, "", ("<|channel|>", "<|message|>", "<|end|>", "<|start|>assistant", "<|call|>")
    ),
)

_CUT = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[(\[{]|[)\]}]|\n""", flags=re.DOTALL)


def _lines(text: str, args: dict[str, Any]) -> Any:
    """Reads calls one a line as transformers reads a list: line ends outside strings and brackets become commas."""
    lines, depth, start = [], 0, 0
    for match in _CUT.finditer(text):
        depth += (match[0] in "([{") - (match[0] in ")]}")
        if match[0] == "\n" and not depth:
            lines.append(text[start : match.start()])
            start = match.end()
    lines.append(text[start:])
    written = ", ".join(line for line in lines if line.strip())
    return content_parsers.CONTENT_PARSERS["python-call-list"](f"[{written}]", args)


# transformers has no parser of OLMo's form.
content_parsers.CONTENT_PARSERS["python-call-lines"] = _lines

# Words that are recognized in any surrounding text.
_words = st.integers(0, 999).map(lambda n: f"w{n:03d}")
_text = st.lists(
    st.one_of(_words, st.sampled_from([" ", "\n", '"', "<", "{", "é", "😀", "<tool", "\\"])), max_size=6
).map("".join)
_values = st.one_of(
    _text,
    st.integers(-1000, 1000),
    st.booleans(),
    st.none(),
    st.lists(st.one_of(_text, st.integers(0, 9)), max_size=2),
    st.dictionaries(st.sampled_from(["k", "l"]), _text, max_size=2),
)
_arguments = st.dictionaries(st.sampled_from(["a", "b", "n", "x", "o"]), _values, max_size=3)
_plain = st.lists(_words, min_size=1, max_size=4).map(" ".join)


def answers(family: Family) -> st.SearchStrategy[Answer]:
    """Answers that the family can write."""
    reasons = st.one_of(st.just(""), _plain) if not family.opening else _plain
    calls = st.lists(st.tuples(st.sampled_from(NAMES), _arguments), max_size=3)
    return st.builds(Answer, reasons, st.one_of(st.just(""), _plain), calls)


@st.composite
def broken(draw: st.DrawFn, family: Family) -> str:
    """A text of the family with parts lost, doubled, swapped or inserted."""
    text = family.write(draw(answers(family)))
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 8)))
        put = draw(
            st.one_of(
                st.sampled_from(["", "}", '"', ",", "x", "\n", text[start:end] * 2]), st.sampled_from(family.markers)
            )
        )
        text = text[:start] + put + text[end:]
    return text
