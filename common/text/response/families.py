"""Response templates of model families whose checkpoints bring none, told by their chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_CALL: Final = {"type": "function", "function": "{content}"}
_NAMED_CALL: Final = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_THINK: Final = {"open": "<think>", "close": "</think>"}
_CHATML: Final = "<|im_start|>assistant\n"
_DEEPSEEK_ANCHOR: Final = r"<｜Assistant｜>(?:</think>)?"
_DEEPSEEK_CALL: Final = r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>"
_DEEPSEEK_END: Final = "<｜tool▁call▁end｜>"
# Stands behind the last call, where it would be content.
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
DEEPSEEK_V32: Final[Mapping[str, Any]] = {
    "start_anchor_pattern": _DEEPSEEK_ANCHOR,
    "fields": {
        "thinking": _THINK,
        "tool_calls": {
            "open_pattern": r'(?:<｜DSML｜function_calls>\s*)?<｜DSML｜invoke name="(?P<name>[^"]+)">',
            "close": "</｜DSML｜invoke>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": (
                    r'<｜DSML｜parameter name="(?P<key>[^"]+)"(?: string="(?:true|false)")?>'
                    r"(?P<value>.*?)</｜DSML｜parameter>"
                )
            },
            "transform": _NAMED_CALL,
        },
        "content": {"close": "</｜DSML｜function_calls>"},
    },
}
MISTRAL: Final[Mapping[str, Any]] = {
    "start_anchor": "[/INST]",
    "fields": {
        "tool_calls": {
            "open": "[TOOL_CALLS]",
            "content": "json",
            "transform_each": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
        },
        "content": {},
    },
}
# A call is the whole answer, behind the token of code or behind nothing.
LLAMA: Final[Mapping[str, Any]] = {
    "start_anchor": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "fields": {
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
SPECS: Final[Mapping[str, Mapping[str, Any]]] = {
    "harmony": HARMONY,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "deepseek_v32": DEEPSEEK_V32,
    "qwen_coder": QWEN_CODER,
    "glm": GLM,
    "mistral": MISTRAL,
    "qwen": QWEN,
    "llama": LLAMA,
}
# Words of the chat template of a family, the surest first.
_SIGNS: Final = (
    ("<|channel|>", "harmony"),
    ("｜DSML｜", "deepseek_v32"),
    ("<function=", "qwen_coder"),
    ("<arg_key>", "glm"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "qwen"),
    ("<|python_tag|>", "llama"),
    ("<|start_header_id|>", "llama"),
    ("<think>", "qwen"),
)
# Arguments in a fenced block, as DeepSeek-V3 and R1 began.
_FENCED: Final = "```json"


def family_name(chat_template: str) -> str:
    """Name of the family that a chat template is of; "" where it is of none."""
    name = next((name for sign, name in _SIGNS if sign in chat_template), "")
    return "deepseek_v3" if name == "deepseek_v31" and _FENCED in chat_template else name


def family_of(chat_template: str) -> Mapping[str, Any] | None:
    """The response template of the family that a chat template is of, as far as the chat template has its parts.

    Returns:
        None where it says nothing of tools or reasoning.
    """
    name = family_name(chat_template)
    if not name:
        return None
    spec = SPECS[name]
    has_reasoning = name == "harmony" or "think>" in chat_template
    absent = {*(() if has_reasoning else ("thinking",)), *(() if "tools" in chat_template else ("tool_calls",))}
    fields = {key: field for key, field in spec["fields"].items() if key not in absent}
    return {**spec, "fields": fields} if set(fields) != {"content"} else None
