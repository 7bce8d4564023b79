"""Chat templates for tests, made of the parts of published ones: frames, reasoning and calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from common.text.chat_template import ChatTemplate
from tests.unit.router.support import tokenizer_files

FILES: Final = tokenizer_files(chat=False)


@dataclass(frozen=True)
class Frame:
    """Text around messages; `ROLE` is replaced by the message's role.

    Attributes:
        begin: text before a message.
        end: text after a message.
        begins_answer: text at the end of a prompt, before the answer.
    """

    begin: str
    end: str
    begins_answer: str


FRAMES: Final = {
    "chatml": Frame("<|im_start|>ROLE\\n", "<|im_end|>\\n", "<|im_start|>assistant\\n"),
    "llama": Frame(
        "<|start_header_id|>ROLE<|end_header_id|>\\n\\n",
        "<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\\n\\n",
    ),
    "deepseek": Frame("<｜ROLE｜>", "<｜end▁of▁sentence｜>", "<｜assistant｜>"),
    "kimi": Frame("<|im_ROLE|>ROLE<|im_middle|>", "<|im_end|>", "<|im_assistant|>assistant<|im_middle|>"),
    "granite": Frame(
        "<|start_of_role|>ROLE<|end_of_role|>", "<|end_of_text|>\\n", "<|start_of_role|>assistant<|end_of_role|>"
    ),
    "exaone": Frame("[|ROLE|]\\n", "[|endofturn|]\\n", "[|assistant|]\\n"),
    "glm": Frame("<|ROLE|>\\n", "", "<|assistant|>\\n"),
    "nemotron": Frame("<SPECIAL_11>ROLE\\n", "\\n<SPECIAL_12>\\n", "<SPECIAL_11>assistant\\n"),
    "words": Frame("### ROLE: ", "\\n\\n", "### assistant:"),
    # The end of the user's turn begins the answer, with and without `add_generation_prompt`.
    "inst": Frame("", "", ""),
}
REASONING: Final = {
    "": "",
    "<think>": "{% if m.reasoning_content %}<think>\\n{{ m.reasoning_content }}\\n</think>\\n\\n{% endif %}",
    "[THINK]": "{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}",
    "<seed:think>": "{% if m.reasoning_content %}<seed:think>{{ m.reasoning_content }}</seed:think>{% endif %}",
}
# Jinja drops a line end after a tag (trim_blocks), but not this one.
_LINE: Final = "{{ '\\n' }}"
_LINE_END: Final = "LINE_END"
_EACH: Final = "{% for c in m.tool_calls %}"
_NAME: Final = "{{ c.function.name }}"
_ARGUMENTS: Final = "{{ c.function.arguments | tojson }}"
_OBJECT: Final = f'{{"name": "{_NAME}", "arguments": {_ARGUMENTS}}}'
_COMMA: Final = "{{ ', ' if not loop.last }}"
_ITEMS: Final = "{% for k, v in c.function.arguments.items() %}"
_TEXT: Final = "{{ v if v is string else v | tojson }}"
_DSML: Final = (
    '{% if m.tool_calls %}\\n\\n<｜DSML｜AROUND>\\n{% for c in m.tool_calls %}<｜DSML｜invoke name="'
    + _NAME
    + '">\\n'
    + _ITEMS
    + "<｜DSML｜parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">"
    + _TEXT
    + "</｜DSML｜parameter>\\n{% endfor %}</｜DSML｜invoke>\\n{% endfor %}</｜DSML｜AROUND>{% endif %}"
)
CALLS: Final = {
    "qwen": f"{_EACH}{_LINE}<tool_call>\\n{_OBJECT}\\n</tool_call>{{% endfor %}}",
    "qwen, no line ends": f"{_EACH}<tool_call>{_OBJECT}</tool_call>{{% endfor %}}",
    "qwen_coder": f"{_EACH}{_LINE}<tool_call>\\n<function={_NAME}>\\n{_ITEMS}<parameter={{{{ k }}}}>\\n{_TEXT}"
    "\\n</parameter>\\n{% endfor %}</function>\\n</tool_call>{% endfor %}",
    "glm": f"{_EACH}{_LINE}<tool_call>{_NAME}\\n{_ITEMS}<arg_key>{{{{ k }}}}</arg_key>\\n<arg_value>{_TEXT}"
    "</arg_value>\\n{% endfor %}</tool_call>{% endfor %}",
    "glm, no line ends": f"{_EACH}<tool_call>{_NAME}{_ITEMS}<arg_key>{{{{ k }}}}</arg_key><arg_value>{_TEXT}"
    "</arg_value>{% endfor %}</tool_call>{% endfor %}",
    "deepseek_v3": "{% if m.tool_calls %}<｜tool▁calls▁begin｜>"
    + _EACH
    + "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    + _NAME
    + "\\n```json\\n"
    + _ARGUMENTS
    + "\\n```<｜tool▁call▁end｜>{{ '\\n' if not loop.last }}{% endfor %}<｜tool▁calls▁end｜>{% endif %}",
    "deepseek_v31": "{% if m.tool_calls %}<｜tool▁calls▁begin｜>"
    + _EACH
    + f"<｜tool▁call▁begin｜>{_NAME}<｜tool▁sep｜>{_ARGUMENTS}<｜tool▁call▁end｜>"
    + "{% endfor %}<｜tool▁calls▁end｜>{% endif %}",
    "deepseek_v32": _DSML.replace("AROUND", "function_calls"),
    "deepseek_v4": _DSML.replace("AROUND", "tool_calls"),
    "kimi": "{% if m.tool_calls %}<|tool_calls_section_begin|>"
    + _EACH
    + f"<|tool_call_begin|>{{{{ c.id }}}}<|tool_call_argument_begin|>{_ARGUMENTS}<|tool_call_end|>"
    + "{% endfor %}<|tool_calls_section_end|>{% endif %}",
    "mistral": f'{{% if m.tool_calls %}}[TOOL_CALLS] [{_EACH}{_OBJECT[:-1]}, "id": "{{{{ c.id }}}}"}}{_COMMA}'
    "{% endfor %}]{% endif %}",
    "mistral_named": f"{_EACH}[TOOL_CALLS]{_NAME}[ARGS]{_ARGUMENTS}{{% endfor %}}",
    "mistral_named, with ids": f"{_EACH}[TOOL_CALLS]{_NAME}[CALL_ID]{{{{ c.id }}}}[ARGS]{_ARGUMENTS}{{% endfor %}}",
    "nemotron": f"{{% if m.tool_calls %}}<TOOLCALL>[{_EACH}{_OBJECT}{_COMMA}{{% endfor %}}]</TOOLCALL>{{% endif %}}",
    "jamba": f"{{% if m.tool_calls %}}<tool_calls>[{_EACH}{_OBJECT}{_COMMA}{{% endfor %}}]</tool_calls>{{% endif %}}",
    "granite": f"{{% if m.tool_calls %}}<|tool_call|>[{_EACH}{_OBJECT}{_COMMA}{{% endfor %}}]{{% endif %}}",
    "phi": f"{{% if m.tool_calls %}}<|tool_call|>[{_EACH}{_OBJECT}{_COMMA}{{% endfor %}}]<|/tool_call|>{{% endif %}}",
    "phi_each": f"{_EACH}<|tool_call|>{_OBJECT}<|/tool_call|>{{% endfor %}}",
    "olmo": f"{{% if m.tool_calls %}}<function_calls>{_EACH}{_NAME}({_ITEMS}{{{{ k }}}}={{{{ v | tojson }}}}"
    "{{ ', ' if not loop.last }}{% endfor %}){{ '\\n' if not loop.last }}{% endfor %}</function_calls>{% endif %}",
    "minimax": "{% if m.tool_calls %}\\n<minimax:tool_call>\\n"
    + _EACH
    + f'<invoke name="{_NAME}">\\n{_ITEMS}<parameter name="{{{{ k }}}}">{_TEXT}</parameter>\\n'
    + "{% endfor %}</invoke>\\n"
    + "{% endfor %}</minimax:tool_call>{% endif %}",
    "functionary": f"{_EACH}<function={_NAME}>{_ARGUMENTS}</function>{{% endfor %}}",
    "gigachat": "{% if m.tool_calls %}{% set c = m.tool_calls[0] %}<|function_call|>" + _OBJECT + "{% endif %}",
    "lfm": f"{{% if m.tool_calls %}}<|tool_call_start|>[{_EACH}{_NAME}({_ITEMS}{{{{ k }}}}="
    "{{ \"'\" ~ v ~ \"'\" if v is string else v }}{{ ', ' if not loop.last }}{% endfor %})"
    f"{_COMMA}{{% endfor %}}]<|tool_call_end|>{{% endif %}}",
}
# Calls that make up the whole answer, without content or reasoning.
WHOLE_CALLS: Final = {
    "llama": "{% if m.tool_calls %}{% set c = m.tool_calls[0] %}"
    f'{{"name": "{_NAME}", "parameters": {_ARGUMENTS}}}{{% endif %}}',
    "xlam": f"{{% if m.tool_calls %}}[{_EACH}{_OBJECT}{_COMMA}{{% endfor %}}]{{% endif %}}",
}
# Calls of published chat templates that no built-in form reads.
UNREAD_CALLS: Final = {
    "python without quotes": f"{_EACH}[{_NAME}({_ITEMS}{{{{ k }}}}={{{{ v }}}}, {{% endfor %}})]{{% endfor %}}",
    "python without a token": f'{_EACH}[{_NAME}(city="Oslo")]{{% endfor %}}',
    "functionary_v3": f"{_EACH}>>>{_NAME}\\n{_ARGUMENTS}{{% endfor %}}",
    "action": f"{_EACH}\\nAction: {_NAME}\\nAction Input: {_ARGUMENTS}{{% endfor %}}",
    "other keys": f'{_EACH}<tool_call>{{"tool": "{_NAME}", "input": {_ARGUMENTS}}}</tool_call>{{% endfor %}}',
    "python's objects": f"{_EACH}<tool_call>{{'name': '{_NAME}', 'arguments': {{{{ c.function.arguments }}}}}}"
    "</tool_call>{% endfor %}",
    "a wrapper of its own": f"{_EACH}<my:calls><tool_call>{_OBJECT}</tool_call></my:calls>{{% endfor %}}",
    "a tag of its own": f"{_EACH}<call:{_NAME}>{_ARGUMENTS}</call>{{% endfor %}}",
    "none": "",
    "names alone": f"{_EACH}<tool_call>{_NAME}</tool_call>{{% endfor %}}",
}
_INST: Final = (
    "{% for m in messages %}{% if m.role == 'assistant' %}ANSWER</s>"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {\"content\": {{ m.content | tojson }}}[/TOOL_RESULTS]"
    "{% else %}[INST] {{ m.content }}[/INST]{% endif %}{% endfor %}"
)
SHOWN_TOOLS: Final = "{% if tools %}Tools: {{ tools | tojson }}\\n{% endif %}"


def source(
    frame: str, reasoning: str, calls: str, *, tools: str = SHOWN_TOOLS, content: str = "{{ m.content }}"
) -> str:
    """The text of a chat template made of these parts, in the frame named `frame`."""
    answer = f"{reasoning}{content}{calls}"
    if frame == "inst":
        made = tools + _INST.replace("ANSWER", answer)
    else:
        parts = FRAMES[frame]
        begin = parts.begin.replace("ROLE", "{{ m.role }}")
        made = (
            f"{tools}{{% for m in messages %}}{begin}{{% if m.role == 'assistant' %}}{answer}"
            f"{{% else %}}{{{{ m.content }}}}{{% endif %}}{parts.end}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{parts.begins_answer}{{% endif %}}"
        )
    return made.replace("'\\n'", _LINE_END).replace("\\n", "\n").replace(_LINE_END, "'\\n'")


@lru_cache
def chat_template(text: str) -> ChatTemplate:
    """The ChatTemplate of a template text."""
    made = ChatTemplate.from_files({**FILES, "chat_template.jinja": text.encode()})
    assert made is not None
    return made


def readable() -> Iterator[tuple[str, str, str]]:
    """Names of frame, reasoning and calls of all combinations whose calls a built-in form reads."""
    for frame in FRAMES:
        for marks in REASONING:
            yield from ((frame, marks, name) for name in CALLS)
        yield from ((frame, "", name) for name in WHOLE_CALLS)
