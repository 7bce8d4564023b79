"""Probes find the form of messages that a template needs, and texts missing from the prompt are refused.

Each template is a small example of a class of published templates.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from common import limits
from common.text.chat_template import ChatTemplate
from common.text.template_sandbox import TemplateInputError
from tests.unit.common.text.support import CHATML
from tests.unit.common.text.test_chat_template import CALL, KITCHEN_SINK, TOOL, template

Message = dict[str, Any]
PARTS = (
    "{% for m in messages %}{{ m['role'] }}: "
    "{% for c in m['content'] | selectattr('type','equalto','text') %}{{ c['text'] }}{% endfor %}{% endfor %}"
)
# Parts in user messages only, as in templates of models that see images.
USER_PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'user' %}{% for c in m.content %}"
    "{% if c.type == 'text' %}{{ c.text | trim }}{% endif %}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
HEAD = "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}"
CALLS = "{% for c in m.tool_calls %}<call>{{ c.function.name }}\n"
TAIL = "</call>{% endfor %}{% else %}<{{ m.role }}>{{ m['content'] }}{% endif %}{% endfor %}"
# As in DeepSeek-V3, the template concatenates arguments as text.
TEXT_ARGUMENTS = HEAD + CALLS + "{{ '```json\n' + c['function']['arguments'] + '\n```' }}" + TAIL
# Prints the arguments object in Python's notation.
PRINTED_ARGUMENTS = HEAD + CALLS + "{{ c.function.arguments }}" + TAIL
# As in the first published DeepSeek-V3 and R1: calls need content None, and a text beside them hides the calls.
NULL_CONTENT = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}"
    "{% for c in m['tool_calls'] %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% elif m['role'] == 'assistant' %}<assistant>{{ m['content'] }}{% else %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% endif %}{% endfor %}"
)
# Prints the calls, and before them a separate answer unless the content is None.
EMPTY_TURN = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.content is not none %}<assistant>{{ m.content }}{% endif %}"
    + CALLS
    + "{{ c.function.arguments | tojson }}"
    + TAIL
)
PRINTS_NONE = HEAD + "{{ m.content }}" + CALLS + "{{ c.function.arguments | tojson }}" + TAIL
# As in gpt-oss: either reasoning or a text beside a call, and only the first call of a message.
ONE_ANALYSIS = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.content and m.thinking %}"
    "{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}"
    "<analysis>{{ m.content or m.thinking }}<call>{{ m.tool_calls[0].function.name }} "
    "{{ m.tool_calls[0].function.arguments | tojson }}{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
# As in Llama 3.1: a message with calls is printed without its content.
CALLS_ALONE = HEAD + CALLS + "{{ c.function.arguments | tojson }}" + TAIL
# As in Kimi-K2: the id contains the call's name.
NAMED_IDS = HEAD + (
    "{% for c in m.tool_calls %}<call>{{ c.id }} {{ c.function.arguments | tojson }}{% endfor %}"
    "{% else %}<{{ m.name or m.role }}>{{ m.tool_call_id }} {{ m.content }}{% endif %}{% endfor %}"
)
DESCRIPTIONS = (
    "{% for tool in tools %}{{ tool.function.name + ': ' + tool.function.description }}\n{% endfor %}" + CHATML
)


def said(role: str, content: str, **fields: Any) -> Message:
    return {"role": role, "content": content, **fields}


def called(content: str = "", **fields: Any) -> list[Message]:
    result = said("tool", "sunny", tool_call_id="1", name="wetter")
    return [said("user", "how is it?"), said("assistant", content, tool_calls=[CALL], **fields), result]


def prompt(source: str, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> str:
    return template(source).prompt(messages, tools)


def refused_path(source: str, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> str:
    with pytest.raises(TemplateInputError) as caught:
        prompt(source, messages, tools)
    return caught.value.violations[0].path


def test_template_that_loops_over_parts_gets_parts() -> None:
    """Regression: the prompt lacked the text, and the status was OK."""
    assert prompt(PARTS, [said("user", "how do I pick a lock?")]) == "user: how do I pick a lock?"
    messages = [said("system", "be kind"), said("user", "a"), said("assistant", "b"), said("user", "c")]
    assert prompt(PARTS, messages) == "system: be kinduser: aassistant: buser: c"


def test_only_roles_that_need_parts_get_parts() -> None:
    messages = [said("system", "be kind"), said("user", " a b "), said("assistant", "x"), said("user", "y")]
    assert prompt(USER_PARTS, messages) == "[system]be kind[user]a b[assistant]x[user]y"


def test_template_that_prints_text_keeps_text() -> None:
    assert prompt("{{ messages }}", [said("user", "hi")]) == "[{'role': 'user', 'content': 'hi'}]"


def test_template_that_concatenates_arguments_gets_text() -> None:
    """Regression: the router answered INVALID_ARGUMENT, `can only concatenate str (not "dict") to str`."""
    rendered = prompt(TEXT_ARGUMENTS, called())
    assert '```json\n{"ort": "Köln", "n": 2, "x": 0.5}\n```' in rendered


def test_template_that_prints_arguments_gets_json_text() -> None:
    assert '{"ort": "Köln", "n": 2, "x": 0.5}' in prompt(PRINTED_ARGUMENTS, called())


def test_template_that_needs_null_content_prints_calls() -> None:
    """Regression: the prompt lacked the calls, and the status was OK."""
    assert "<call>wetter" in prompt(NULL_CONTENT, called())


def test_calls_without_text_render_no_empty_answer() -> None:
    assert prompt(EMPTY_TURN, called()).startswith("<user>how is it?<call>wetter")


def test_template_that_prints_null_content_gets_empty_text() -> None:
    assert "None" not in prompt(PRINTS_NONE, called())


def test_text_beside_calls_becomes_a_message_if_template_drops_it() -> None:
    for source in (CALLS_ALONE, NULL_CONTENT):
        rendered = prompt(source, called("I look."))
        assert "<assistant>I look.<call>wetter" in rendered


def test_text_beside_a_call_is_appended_to_reasoning() -> None:
    """Regression: the router answered INVALID_ARGUMENT in the second turn."""
    rendered = prompt(ONE_ANALYSIS, called("I look.", reasoning_content="Where is it?"))
    assert "<analysis>Where is it?\n\nI look.<call>wetter" in rendered
    assert "<analysis>I look.<call>wetter" in prompt(ONE_ANALYSIS, called("I look."))


def test_second_call_missing_in_prompt_is_refused() -> None:
    """Regression: the prompt lacked the second call, and the status was OK."""
    messages = called()
    other = {"type": "function", "id": "2", "function": {"name": "wetter", "arguments": {"ort": "Bonn"}}}
    messages[1]["tool_calls"] = [CALL, other]
    assert refused_path(ONE_ANALYSIS, messages) == "messages[1].tool_calls[1]"
    assert '"Bonn"' in prompt(CALLS_ALONE, messages)


def test_ids_have_names_if_template_prints_only_ids() -> None:
    rendered = prompt(NAMED_IDS, called())
    assert "<call>functions.wetter:0 {" in rendered
    assert "<wetter>functions.wetter:0 sunny" in rendered


def test_tools_get_empty_descriptions_if_template_needs_them() -> None:
    """Regression: the router answered INVALID_ARGUMENT, `'dict object' has no attribute 'description'`."""
    bare = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    rendered = prompt(DESCRIPTIONS, [said("user", "hi")], [TOOL, bare])
    assert "now: \n" in rendered
    assert TOOL["function"]["description"] in rendered


@pytest.mark.parametrize(
    ("source", "messages", "path"),
    [
        # Prints only the last message.
        ("{{ messages[-1].content }}", [said("user", "a"), said("assistant", "b"), said("user", "c")], "[0].content"),
        # Prints no system messages, as Mistral 7B's template.
        (
            "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}",
            [said("system", "yes"), said("user", "hi")],
            "[0].content",
        ),
        # Prints the last of several messages with one role; the lost text is short and occurs in the template itself.
        (
            "{% for m in messages %}{% if loop.last or m.role != loop.nextitem.role %}"
            "<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}",
            [said("user", "a"), said("user", "b")],
            "[0].content",
        ),
        ("{% for m in messages %}{{ m.content[:30] }}{% endfor %}", [said("user", "word " * 20)], "[0].content"),
        ("{% for m in messages %}{{ m.content[-30:] }}{% endfor %}", [said("user", "word " * 20)], "[0].content"),
        # Prints no calls.
        (
            CHATML,
            [*called(), said("user", "thanks")],
            "[1].tool_calls[0]",
        ),
        ("fixed", [said("user", "x")], "[0].content"),
    ],
)  # fmt: skip
def test_text_missing_in_prompt_is_refused_with_its_field(source: str, messages: list[Message], path: str) -> None:
    """Regression: the router accepted input that the template did not print."""
    assert refused_path(source, messages) == f"messages{path}"


def test_tools_missing_in_prompt_are_refused_with_their_field() -> None:
    assert refused_path(CHATML, [said("user", "x")], [TOOL]) == "tools"
    some = "{% for tool in (tools or [])[:1] %}{{ tool.function.name }}{% endfor %}" + CHATML
    other = {"type": "function", "function": {**TOOL["function"], "name": "uhrzeit"}}
    assert refused_path(some, [said("user", "x")], [TOOL, other]) == "tools[1]"


@pytest.mark.parametrize(
    "change",
    [
        "m.content | trim",
        "m.content | upper",
        "m.content | tojson",
        "m.content | tojson(ensure_ascii=True)",
        "m.content | escape",
        "m.content | indent(4)",
        "m.content.split('</think>')[-1]",
        "m.content.replace('\n', ' ')",
    ],
)
def test_text_changed_by_the_template_is_accepted(change: str) -> None:
    source = (
        f"{{% for m in messages[1:] %}}<{{{{ m.role }}}}>{{{{ {change} }}}}{{% endfor %}}{{{{ messages[0].content }}}}"
    )
    texts = [" a ", 'ä "b"\n <c>', "first line\nsecond line, which is longer than the other", "x"]
    messages = [said(("user", "assistant")[i % 2], text) for i, text in enumerate(texts)]
    messages[3]["content"] = "<think>so\nlong</think>x"
    assert prompt(source, messages)


def test_reasoning_missing_in_prompt_is_accepted() -> None:
    messages = [said("user", "a"), said("assistant", "b", reasoning_content="because of this"), said("user", "c")]
    assert "because" not in prompt(CHATML, messages)


def test_special_tokens_and_numbers_in_texts_are_found() -> None:
    messages = [said("user", "a<|im_end|>b " * 9), said("user", "7"), said("user", "7")]
    assert prompt(CHATML, messages)


def test_usual_conversations_are_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = template(KITCHEN_SINK)
    counted: list[int] = []
    render = ChatTemplate.render

    def counting(self: ChatTemplate, *args: Any, **kwargs: Any) -> str:
        counted.append(1)
        return render(self, *args, **kwargs)

    monkeypatch.setattr(ChatTemplate, "render", counting)
    chat.prompt([said("system", "s"), said("user", "hi"), said("assistant", "a"), said("user", "yes")])
    chat.prompt([*called(), said("assistant", "sunny"), said("user", "ok")], [TOOL])
    assert len(counted) == 2


def test_hostile_template_is_read_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All probes together share one time budget."""
    monkeypatch.setattr("common.text.template_sandbox.MAX_TEMPLATE_S", 0.2)
    start = time.thread_time()
    template("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
    assert time.thread_time() - start < limits.MAX_TEMPLATE_S


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        value = {"a": value}
    return value


def test_deep_values_are_printed() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": nested(490)}}
    assert '"string"' in prompt("{{ tools | tojson }}" + CHATML, [said("user", "x")], [tool])


def test_values_nested_too_deeply_are_refused_with_their_field() -> None:
    walk = "{% macro w(v) %}{% if v is mapping %}{% for k in v %}{{ w(v[k]) }}{% endfor %}{% endif %}{% endmacro %}"
    source = walk + "{% for t in tools or [] %}{{ t.function.name }}{{ w(t) }}{% endfor %}" + (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c | tojson }}{{ w(c) }}{% endfor %}"
        "{% endfor %}{{ w(x) }}"
    )  # fmt: skip
    deep = nested(490)
    tools = [TOOL, {"type": "function", "function": {"name": "f", "parameters": deep}}]
    calls = [{"type": "function", "function": {"name": "f", "arguments": deep}}]
    user = [said("user", "x")]
    assert refused_path(source, user, tools) == "tools[1].parameters_json"
    assert refused_path(source, [*user, said("assistant", "", tool_calls=calls)]) == (
        "messages[1].tool_calls[0].arguments_json"
    )
    with pytest.raises(TemplateInputError) as caught:
        template(source).prompt(user, x=deep)
    assert caught.value.violations[0].path == "template_arguments_json"
