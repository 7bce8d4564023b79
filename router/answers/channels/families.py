"""Response templates of model families, for checkpoints without a response template of their own.

probe.py finds the family of a checkpoint: it renders calls and reasoning with the chat template and reads them back.
It also finds the beginning of an answer and the reasoning marks. So a `start_anchor` here is that of the
family's first model, and the reasoning marks are those of most of its models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_CALL: Final = {"type": "function", "function": "{content}"}
_NAMED_CALL: Final = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_LISTED_CALL: Final = {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}}
_THINK: Final = {"open": "<think>", "close": "</think>"}
_CHATML: Final = "<|im_start|>assistant\n"
_DEEPSEEK_ANCHOR: Final = r"<｜Assistant｜>(?:</think>)?"
_DEEPSEEK_CALL: Final = r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>"
_DEEPSEEK_END: Final = "<｜tool▁call▁end｜>"
# Text after the last call, which would be content otherwise.
_DEEPSEEK_CONTENT: Final = {"close": "<｜tool▁calls▁end｜>"}
_HARMONY_START: Final = r"(?:<\|start\|>assistant)?"
_HARMONY_KIND: Final = r"\s*(?:<\|constrain\|>)?\s*(?:json|code)?\s*<\|message\|>"

QWEN: Final[Mapping[str, Any]] = {
    "start_anchor": _CHATML,
    "fields": {
        "thinking": _THINK,
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": _CALL,
        },
        "content": {},
    },
}

QWEN_CODER: Final[Mapping[str, Any]] = {
    "start_anchor": _CHATML,
    "fields": {
        "thinking": _THINK,
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
            "transform": _NAMED_CALL,
        },
        "content": {},
    },
}
GLM: Final[Mapping[str, Any]] = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "thinking": _THINK,
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*(?P<name>[^\s<]+)(?=\s*<)",
            "close": "</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"},
            "transform": _NAMED_CALL,
        },
        "content": {},
    },
}
# The first form of DeepSeek-V3 and R1: arguments in a fenced block.
DEEPSEEK_V3: Final[Mapping[str, Any]] = {
    "start_anchor_pattern": _DEEPSEEK_ANCHOR,
    "fields": {
        "thinking": _THINK,
        "tool_calls": {
            "open_pattern": _DEEPSEEK_CALL + r"function<｜tool▁sep｜>(?P<name>[^\n<]+)\n```json\n",
            "close_pattern": r"\n?```\s*" + _DEEPSEEK_END,
            "repeats": True,
            "content": "json",
            "transform": _NAMED_CALL,
        },
        "content": _DEEPSEEK_CONTENT,
    },
}
DEEPSEEK_V31: Final[Mapping[str, Any]] = {
    "start_anchor_pattern": _DEEPSEEK_ANCHOR,
    "fields": {
        "thinking": _THINK,
        "tool_calls": {
            "open_pattern": _DEEPSEEK_CALL + r"(?P<name>[^\n<]+)<｜tool▁sep｜>",
            "close": _DEEPSEEK_END,
            "repeats": True,
            "content": "json",
            "transform": _NAMED_CALL,
        },
        "content": _DEEPSEEK_CONTENT,
    },
}


def _invocations(prefix: str, around: str, anchor: Mapping[str, str]) -> Mapping[str, Any]:
    """Response template for calls as `<invoke name="NAME">` with a `<parameter name="KEY">` for each argument."""
    return {
        **anchor,
        "fields": {
            "thinking": _THINK,
            "tool_calls": {
                "open_pattern": rf'(?:<{around}>\s*)?<{prefix}invoke name="(?P<name>[^"]+)">',
                "close": f"</{prefix}invoke>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": (
                        rf'<{prefix}parameter name="(?P<key>[^"]+)"(?: string="(?:true|false)")?>'
                        rf"(?P<value>.*?)</{prefix}parameter>"
                    )
                },
                "transform": _NAMED_CALL,
            },
            "content": {"close": f"</{around}>"},
        },
    }


DEEPSEEK_V32: Final = _invocations("｜DSML｜", "｜DSML｜function_calls", {"start_anchor_pattern": _DEEPSEEK_ANCHOR})
DEEPSEEK_V4: Final = _invocations("｜DSML｜", "｜DSML｜tool_calls", {"start_anchor_pattern": _DEEPSEEK_ANCHOR})
MINIMAX: Final = _invocations("", "minimax:tool_call", {"start_anchor": "]~b]ai\n"})


def _list(begin: Mapping[str, str], end: str, anchor: str) -> Mapping[str, Any]:
    """Response template for calls in one JSON array of objects."""
    return {
        "start_anchor": anchor,
        "fields": {
            "thinking": _THINK,
            "tool_calls": {
                **begin,
                **({"close": end} if end else {}),
                "content": "json",
                "transform_each": True,
                "transform": _LISTED_CALL,
            },
            "content": {},
        },
    }


MISTRAL: Final = _list({"open": "[TOOL_CALLS]"}, "", "[/INST]")
# Mistral since 2025: each call begins with a token, followed by its name, perhaps its id, and its arguments.
MISTRAL_NAMED: Final[Mapping[str, Any]] = {
    "start_anchor": "[/INST]",
    "fields": {
        "thinking": {"open": "[THINK]", "close": "[/THINK]"},
        "tool_calls": {
            "open_pattern": r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)(?:(?:\[CALL_ID\]\w*)?\[ARGS\]|(?=\{))",
            "close_pattern": r"(?=\[TOOL_CALLS\])",
            "repeats": True,
            "content": "json",
            "transform": _NAMED_CALL,
        },
        "content": {},
    },
}
NEMOTRON: Final = _list({"open": "<TOOLCALL>"}, "</TOOLCALL>", "<SPECIAL_11>Assistant\n")
JAMBA: Final = _list({"open": "<tool_calls>"}, "</tool_calls>", "<|assistant|>")
# Granite 3 ends its calls with the answer, Phi-4-mini with a token.
GRANITE: Final = _list({"open": "<|tool_call|>"}, "", "<|start_of_role|>assistant<|end_of_role|>")
PHI: Final = _list({"open": "<|tool_call|>"}, "<|/tool_call|>", "<|assistant|>")
# Phi-4-mini with a token pair around each call, as llama.cpp's chat template writes it.
PHI_EACH: Final[Mapping[str, Any]] = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "thinking": _THINK,
        "tool_calls": {
            "open": "<|tool_call|>",
            "close": "<|/tool_call|>",
            "repeats": True,
            "content": "json",
            "transform": _CALL,
        },
        "content": {},
    },
}
# xLAM: the array of calls is the whole answer.
XLAM: Final = _list({"open_pattern": r'\A\s*(?=\[\s*\{\s*"name")'}, "", _CHATML)
KIMI: Final[Mapping[str, Any]] = {
    "start_anchor": "<|im_assistant|>assistant<|im_middle|>",
    "fields": {
        "thinking": _THINK,
        "tool_calls": {
            "open_pattern": (
                r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*(?:functions\.)?"
                r"(?P<name>[\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>"
            ),
            "close": "<|tool_call_end|>",
            "repeats": True,
            "content": "json",
            "transform": _NAMED_CALL,
        },
        "content": {"close": "<|tool_calls_section_end|>"},
    },
}
# Functionary: a tag with the name, then the arguments as JSON.
FUNCTIONARY: Final[Mapping[str, Any]] = {
    "start_anchor": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "fields": {
        "thinking": _THINK,
        "tool_calls": {
            "open_pattern": r"<function=(?P<name>[^>\n]+)>(?=\s*[{\"n])",
            "close": "</function>",
            "repeats": True,
            "content": "json",
            "transform": _NAMED_CALL,
        },
        "content": {"close": "<|eom_id|>"},
    },
}
# LFM: a list of calls in Python syntax.
LFM: Final[Mapping[str, Any]] = {
    "start_anchor": _CHATML,
    "fields": {
        "thinking": _THINK,
        "tool_calls": {
            "open": "<|tool_call_start|>",
            "close": "<|tool_call_end|>",
            "content": "python-call-list",
            "content_args": {"line_ends": True},
            "transform_each": True,
            "transform": _LISTED_CALL,
        },
        "content": {},
    },
}
# OLMo 3: calls in Python syntax, one a line.
OLMO: Final[Mapping[str, Any]] = {
    "start_anchor": _CHATML,
    "fields": {
        "thinking": _THINK,
        "tool_calls": {
            "open": "<function_calls>",
            "close": "</function_calls>",
            "content": "python-call-lines",
            "transform_each": True,
            "transform": _LISTED_CALL,
        },
        "content": {},
    },
}
GIGACHAT: Final[Mapping[str, Any]] = {
    "start_anchor": "assistant<|role_sep|>\n",
    "fields": {
        "thinking": _THINK,
        "tool_calls": {"open": "<|function_call|>", "content": "json", "transform": _CALL},
        "content": {},
    },
}
# A call is the whole answer, behind the token of code or behind nothing.
LLAMA: Final[Mapping[str, Any]] = {
    "start_anchor": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "fields": {
        "thinking": _THINK,
        "tool_calls": {
            "open_pattern": r'(?:\A\s*|<\|python_tag\|>\s*)(?=\{\s*"(?:type|name|parameters)")',
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
            },
        },
        "content": {},
    },
}
# gpt-oss: every message has a channel, and calls have a recipient.
HARMONY: Final[Mapping[str, Any]] = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {
            "open_pattern": _HARMONY_START + r"<\|channel\|>analysis\s*<\|message\|>",
            "close": "<|end|>",
            "repeats": True,
            "join": "\n",
        },
        "tool_calls": {
            "open_pattern": (
                _HARMONY_START + r"(?:\s*to=functions\.(?P<name>[\w.-]+)\s*<\|channel\|>\w+"
                r"|<\|channel\|>\w+\s+to=functions\.(?P<name>[\w.-]+))" + _HARMONY_KIND
            ),
            "close": ["<|call|>", "<|end|>"],
            "repeats": True,
            "content": "json",
            "transform": _NAMED_CALL,
        },
        "content": {
            "open_pattern": _HARMONY_START + r"<\|channel\|>(?:final|commentary)" + _HARMONY_KIND,
            "close": ["<|end|>", "<|return|>"],
            "repeats": True,
            "join": "\n",
        },
    },
}
# The probe tries the families in this order.
SPECS: Final[Mapping[str, Mapping[str, Any]]] = {
    "harmony": HARMONY,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "deepseek_v32": DEEPSEEK_V32,
    "deepseek_v4": DEEPSEEK_V4,
    "kimi": KIMI,
    "qwen": QWEN,
    "qwen_coder": QWEN_CODER,
    "glm": GLM,
    "mistral": MISTRAL,
    "mistral_named": MISTRAL_NAMED,
    "nemotron": NEMOTRON,
    "jamba": JAMBA,
    "granite": GRANITE,
    "phi": PHI,
    "phi_each": PHI_EACH,
    "minimax": MINIMAX,
    "lfm": LFM,
    "olmo": OLMO,
    "gigachat": GIGACHAT,
    "functionary": FUNCTIONARY,
    "llama": LLAMA,
    "xlam": XLAM,
}
# Texts in prompts with tools that describe a family's calls, for chat templates that leave the calls of messages out.
DESCRIBED: Final[Mapping[str, tuple[str, ...]]] = {
    "qwen": ("<tool_call>", "</tool_call>"),
    "granite": ("<|tool_call|>",),
}
# Families with a message format of their own, which allows no other reasoning marks.
WHOLE: Final = frozenset({"harmony"})
# Marks around reasoning, the most usual ones first.
REASONING_MARKS: Final = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<mm:think>", "</mm:think>"),
)
