"""A chat template gets calls and reasoning exactly if a built-in form reads back its rendered answers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Final

import pytest
from fissile.v1 import inference_pb2 as pb

from common.text.template_sandbox import TemplateInputError
from common.text.tokenizer import Tokenizer
from router.answers.channels.families import QWEN
from router.answers.channels.fit import WrittenCalls, fitted
from router.answers.channels.form import ResponseForm, response_form
from router.answers.channels.grammar import STYLES
from router.answers.channels.probe import TOOLS, FoundForm, find_form, shows_tools
from router.answers.channels.template import ResponseTemplate
from router.prompts.conversation import template_messages
from tests.covering import SAMPLED
from tests.unit.common.text.chat_forms import (
    CALLS,
    FILES,
    FRAMES,
    REASONING,
    SHOWN_TOOLS,
    UNREAD_CALLS,
    WHOLE_CALLS,
    chat_template,
    readable,
    source,
)
from tests.unit.router.answers.channels.written_answers import misread

EVERY_CALLS: Final = {**CALLS, **WHOLE_CALLS}


def found(text: str) -> FoundForm:
    form = find_form(chat_template(text))
    assert form is not None
    return form


def check_read_back(text: str) -> None:
    """Checks that the form found for a chat template reads back all answers that the template renders."""
    chat = chat_template(text)
    form = find_form(chat)
    if form is not None:
        assert [*misread(chat, ResponseTemplate(form.spec))] == []


@pytest.mark.parametrize(
    ("frame", "calls"),
    [
        *((frame, "qwen") for frame in FRAMES),
        *(("chatml", name) for name in EVERY_CALLS),
        *(pytest.param("inst", name, marks=pytest.mark.slow) for name in EVERY_CALLS),
    ],
)
def test_calls_in_a_family_form_are_found_in_every_frame(frame: str, calls: str) -> None:
    text = source(frame, "", EVERY_CALLS[calls], content="{% if not m.tool_calls %}{{ m.content }}{% endif %}")

    form = found(text)

    assert form.family == calls.partition(",")[0]
    assert [*form.spec["fields"]] == ["tool_calls", "content"]
    if frame == "chatml":
        check_read_back(text)


@pytest.mark.each_value
@pytest.mark.parametrize("marks", [marks for marks in REASONING if marks])
@pytest.mark.parametrize("frame", FRAMES)
def test_reasoning_is_found_by_its_marks(frame: str, marks: str) -> None:
    text = source(frame, REASONING[marks], "", tools="")

    form = found(text)

    assert form.spec["fields"]["thinking"]["open"] == marks
    assert [*form.spec["fields"]] == ["thinking", "content"]
    assert form.style.reasoning == (marks, f"{marks[0]}/{marks[1:]}")
    check_read_back(text)


@pytest.mark.parametrize(
    "frame",
    # All frames together take five minutes.
    [
        pytest.param(each, marks=pytest.mark.slow if each in ("granite", "exaone", "words") else SAMPLED)
        for each in FRAMES
    ],
)
def test_all_family_answers_are_read_back_in_any_pieces(frame: str) -> None:
    """More than 600 chat templates combine all frames, reasoning marks and calls."""
    for _, marks, name in (each for each in readable() if each[0] == frame):
        text = source(frame, REASONING[marks], EVERY_CALLS[name])
        check_read_back(text)
        if name in CALLS:
            assert found(text).family == name.partition(",")[0], (frame, marks, name)
            assert ("thinking" in found(text).spec["fields"]) == bool(marks)


@pytest.mark.parametrize("frame", ["chatml", "llama"])
@pytest.mark.parametrize("calls", UNREAD_CALLS)
def test_unread_calls_get_no_form(frame: str, calls: str) -> None:
    """Former fault: one word in such published templates was enough to read them as Qwen's or Llama's."""
    text = source(frame, "", UNREAD_CALLS[calls])

    assert find_form(chat_template(text)) is None


@pytest.mark.parametrize("calls", UNREAD_CALLS)
def test_reasoning_beside_unread_calls_is_kept(calls: str) -> None:
    text = source("kimi", REASONING["<think>"], UNREAD_CALLS[calls])

    assert [*found(text).spec["fields"]] == ["thinking", "content"]
    check_read_back(text)


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages }}",
        "{% if tools %}<tool_call>{% endif %}</think>",
        "tools <｜tool▁calls▁begin｜> ```json </think>",
        "tools [TOOL_CALLS] <|start_header_id|> <|python_tag|> <function=",
        "{{ raise_exception('no') }}",
        "{% for m in messages %}{{ m.content.nothing.at.all }}{% endfor %}",
    ],
)
def test_template_with_only_marker_words_gets_no_form(text: str) -> None:
    assert find_form(chat_template(text)) is None


@pytest.mark.parametrize("calls", ["qwen", "deepseek_v3", "deepseek_v31"])
def test_calls_without_tools_in_the_prompt_get_no_form(calls: str) -> None:
    """As with DeepSeek-V3 and R1, the chat template writes calls but leaves out the tools of a request."""
    text = source("deepseek", REASONING["<think>"], CALLS[calls], tools="")

    assert not shows_tools(chat_template(text))
    assert shows_tools(chat_template(SHOWN_TOOLS + text))
    assert [*found(text).spec["fields"]] == ["thinking", "content"]
    assert [*found(SHOWN_TOOLS.replace("\\n", "\n") + text).spec["fields"]] == ["thinking", "tool_calls", "content"]


def test_calls_with_lost_content_get_no_form() -> None:
    """The form would misread content after calls, or content with its own mark."""
    for content in ("", "<answer>{{ m.content }}</answer>", "{{ m.content | upper }}"):
        text = source("chatml", "", CALLS["qwen"] if content else CALLS["qwen"] + "{{ m.content }}", content=content)
        form = find_form(chat_template(text))
        assert form is None or [*misread(chat_template(text), ResponseTemplate(form.spec))] == []


@pytest.mark.parametrize(
    ("text", "opening"),
    [
        # Templates of QwQ and Nemotron leave out earlier reasoning, but their prompts begin it.
        ("<|im_start|>assistant\n<think>\n", "<think>\n"),
        ("<|im_start|>assistant\n<think></think>", "<think></think>"),
        ("<|im_start|>assistant\n</think>\n\n", ""),
    ],
)
def test_reasoning_begun_or_ended_in_prompt_is_found(text: str, opening: str) -> None:
    begin = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    chat = chat_template(f"{begin}{{% if add_generation_prompt %}}{text}{{% endif %}}")

    form = find_form(chat)

    assert form is not None
    assert ResponseTemplate(form.spec).opening(chat.render([{"role": "user", "content": "hm"}])) == opening


def test_reasoning_removed_from_earlier_answers_is_found() -> None:
    content = "{{ m.content.split('</think>')[-1] }}"

    assert "thinking" in found(source("deepseek", "", "", content=content)).spec["fields"]


def test_opening_after_a_tool_result_is_empty() -> None:
    """Mistral's prompts end with the tool's result, without a mark for the beginning of the answer."""
    text = source("inst", "", CALLS["mistral"])
    call = {"type": "function", "id": "abcdefghi", "function": {"name": "f", "arguments": {}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hm"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "abcdefghi"},
    ]

    assert ResponseTemplate(found(text).spec).opening(chat_template(text).render(messages)) == ""


@pytest.mark.parametrize("calls", [name for name in CALLS if name.partition(",")[0] in STYLES])
def test_grammar_writes_calls_like_chat_template(calls: str) -> None:
    family, _, kind = calls.partition(", ")
    form = found(source("chatml", REASONING["<think>"], CALLS[calls]))

    assert not form.unheld
    assert form.style.reasoning == ("<think>", "</think>")
    if not kind and family != "mistral_named":
        assert form.style == replace(STYLES[family], reasoning=("<think>", "</think>"))
    chat = chat_template(source("chatml", "", CALLS[calls]))
    call = {"type": "function", "id": "functions.f:0", "function": {"name": "f", "arguments": {}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    written = chat.render([{"role": "user", "content": "hm"}, message], add_generation_prompt=False)
    begin = form.style.begins[0].replace("{name}", "f").replace("{digits}", "0").replace("{word}", "functions.f:0")
    assert form.style.before + begin in written


def test_calls_without_grammar_are_parsed_and_marked_unheld() -> None:
    form = found(source("chatml", "", CALLS["lfm"]))

    assert form.unheld
    assert "tool_calls" in form.spec["fields"]


def test_style_of_calls_in_another_order_is_refused() -> None:
    other = WrittenCalls(
        '<tool_call>{"arguments": {"a": "x"}, "name": "f"}</tool_call>', "", ("f", "g"), ("a", "b"), "x"
    )

    assert fitted(STYLES["qwen"], other) is None


def form_of(text: str, own: object = None) -> ResponseForm | None:
    """The form of a checkpoint with chat template `text` and, if given, its own response template `own`."""
    config = json.loads(FILES["tokenizer_config.json"]) | ({"response_template": own} if own else {})
    files = {**FILES, "tokenizer_config.json": json.dumps(config).encode()}
    return response_form(files, Tokenizer.from_files(files), chat_template(text))


def test_checkpoint_can_call_tools_only_if_prompts_show_them() -> None:
    shown, hidden = (source("chatml", "", CALLS["qwen"], tools=tools) for tools in (SHOWN_TOOLS, ""))

    built_in, own, own_hidden = form_of(shown), form_of(shown, QWEN), form_of(hidden, QWEN)

    assert form_of(hidden) is None
    assert built_in is not None
    assert own is not None
    assert own_hidden is not None
    assert (built_in.calls_tools, own.calls_tools, own_hidden.calls_tools) == (True, True, False)


@pytest.mark.parametrize("calls", UNREAD_CALLS)
def test_checkpoint_with_unread_calls_has_no_form(calls: str) -> None:
    assert form_of(source("llama", "", UNREAD_CALLS[calls])) is None


@pytest.mark.parametrize("family", ["qwen", "glm", "mistral_named"])
def test_own_template_of_a_familys_calls_has_the_familys_style(family: str) -> None:
    text = source("chatml", "", CALLS[family])
    own = {**found(text).spec}

    form = form_of(text, own)

    assert form is not None
    assert form.is_own
    assert not form.unheld
    assert form.style is not None
    assert form.style.begins == found(text).style.begins


def test_own_template_of_other_calls_is_unheld_and_keeps_its_reasoning() -> None:
    calls = {**QWEN["fields"]["tool_calls"], "open": "<call>", "close": "</call>"}
    own = {"start_anchor": "assistant\n", "fields": {**QWEN["fields"], "tool_calls": calls}}

    form = form_of(source("chatml", REASONING["<think>"], CALLS["qwen"]), own)

    assert form is not None
    assert form.unheld == "has calls of no built-in form"
    assert form.style is not None
    assert form.style.reasoning == ("<think>", "</think>")
    assert not form.style.begins


@pytest.mark.parametrize(
    ("thinking", "marks"),
    [
        ({"open": "<mull>", "close": "</mull>"}, ("<mull>", "</mull>")),
        ({"open_pattern": r"<think>\s*", "close": "</think>"}, ("<think>", "</think>")),
        ({"open_pattern": r"<mull>\s*", "close": "</mull>"}, None),
        ({"open": ["<mull>", "<think>"], "close": ["</mull>", "</done>"]}, None),
    ],
)
def test_own_reasoning_is_held_with_single_or_family_marks(
    thinking: dict[str, object], marks: tuple[str, str] | None
) -> None:
    own = {"start_anchor": "assistant\n", "fields": {"thinking": thinking, "content": {}}}

    form = form_of(source("chatml", REASONING["<think>"], ""), own)

    assert form is not None
    assert (form.style and form.style.reasoning) == marks
    assert bool(form.unheld) == (marks is None)


def test_own_template_refuses_unknown_names() -> None:
    calls = {
        **QWEN["fields"]["tool_calls"],
        "open_pattern": r'<tool_call>\n\{"name": "(?P<name>\w+)", "arguments": ',
        "close": "}\n</tool_call>",
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    }
    calls.pop("open", None)
    own = {"start_anchor": "assistant\n", "fields": {"tool_calls": calls, "content": {}}}

    form = form_of(source("chatml", "", CALLS["qwen"]), own)

    assert form is not None
    assert not form.unheld
    assert (form.can_call("look", ["a"]), form.can_call("a.b", [])) == (True, False)


DESCRIBED: Final = {
    "qwen": "<tools>{{ tools | tojson }}</tools>\\nWrite a JSON object within <tool_call></tool_call>.",
    "granite": "Respond with <|tool_call|> followed by a JSON list.\\n{{ tools | tojson }}",
}


def described(name: str, reasoning: str = "") -> str:
    """A chat template that describes calls and leaves those of messages out, as SmolLM3's and Granite 3.3's do."""
    return source("chatml", reasoning, "", tools=f"{{% if tools %}}{DESCRIBED[name]}\\n{{% endif %}}")


@pytest.mark.parametrize("name", DESCRIBED)
@pytest.mark.parametrize("reasoning", ["", "<think>"])
def test_described_calls_of_a_template_that_leaves_calls_out_are_read(name: str, reasoning: str) -> None:
    form = found(described(name, REASONING[reasoning]))

    assert (form.family, form.is_described) == (name, True)
    assert ("thinking" in form.spec["fields"]) == bool(reasoning)


@pytest.mark.parametrize("frame", FRAMES)
def test_delimiters_in_prompts_without_tools_describe_no_calls(frame: str) -> None:
    always = "{% if tools %}{{ tools | tojson }}{% endif %}Tags: <tool_call></tool_call> <|tool_call|>\\n"
    assert find_form(chat_template(source(frame, "", "", tools=always))) is None
    named = "{% if tools %}{{ tools | tojson }} <tool_call>\\n{% endif %}"
    assert find_form(chat_template(source(frame, "", "", tools=named))) is None


def test_calls_of_messages_become_content_where_they_are_described() -> None:
    files = {**FILES, "chat_template.jinja": described("qwen").encode()}
    tokenizer = Tokenizer.from_files(files)
    template = chat_template(described("qwen"))
    form = response_form(files, tokenizer, template)
    assert form is not None
    assert form.writes_calls
    call = pb.ToolCall(id="abcdefgh1", name="get_zixa", arguments_json='{"place": "Oslo"}')
    request = pb.ChatRequest(
        messages=[
            pb.ChatMessage(role="user", content="Where?"),
            pb.ChatMessage(role="assistant", content="Look.", tool_calls=[call, call]),
            pb.ChatMessage(role="tool", content="There.", tool_call_id="abcdefgh1"),
        ]
    )

    tools = [dict(tool) for tool in TOOLS]
    text = template.prompt(template_messages(request, form), tools)

    written = '<tool_call>\n{"name": "get_zixa", "arguments": {"place": "Oslo"}}\n</tool_call>'
    assert f"Look.\n{written}\n{written}<|im_end|>" in text
    with pytest.raises(TemplateInputError):
        template.prompt(template_messages(request), tools)
