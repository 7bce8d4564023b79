"""Published chat templates render as in transformers without lost text, or are refused.

The templates are downloaded in packages of the registry, so the repository has none.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from common.text.chat_template import ChatTemplate
from common.text.template_sandbox import TemplateInputError
from common.text.tokenizer import Tokenizer
from tests.unit.common.text.support import files

PACKAGES = ("trl==1.16.0", "axolotl==0.19.0")
SPECIAL = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "the city"}}},
    },
}
CALL = {"type": "function", "id": "aaaaaaaaa", "function": {"name": "get_weather", "arguments": {"city": "Köln"}}}
USER = {"role": "user", "content": "how warm is it in Köln?"}
RESULT = {"role": "tool", "content": "21", "tool_call_id": "aaaaaaaaa", "name": "get_weather"}
THANKS = {"role": "user", "content": "thanks"}


def called(content: str, **fields: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "content": content, "tool_calls": [CALL], **fields}, RESULT, THANKS]


CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "plain": ([USER], None),
    "turns": ([USER, {"role": "assistant", "content": "warm", "reasoning_content": "well"}, THANKS], None),
    "system": ([{"role": "system", "content": "Be kind."}, USER], None),
    "tools": ([USER], [TOOL]),
    "call": (called(""), [TOOL]),
    "text and call": (called("Let me look."), [TOOL]),
    "reasoning, text and call": (called("Let me look.", reasoning_content="I should look."), [TOOL]),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("packages")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", *PACKAGES]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip("the package registry is not reachable")
    found: dict[str, str] = {}
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".jinja") and "templates/" in name]
            found |= {f"{wheel.name}/{name}": archive.read(name).decode() for name in names}
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_published_templates_equal_transformers_or_refuse(sources: dict[str, str], name: str) -> None:
    messages, tools = CONVERSATIONS[name]
    tokenizer = Tokenizer.from_files(files(**SPECIAL))
    equal = 0
    for where, source in sources.items():
        template = ChatTemplate({"default": source}, tokenizer)
        forms = template.forms(tools)
        try:
            rendered = template.prompt(messages, tools)
        except TemplateInputError:
            continue
        render: Any = render_jinja_template
        (expected,), _ = render(
            [forms.messages(messages)],
            tools=forms.tools(tools),
            chat_template=source,
            add_generation_prompt=True,
            **SPECIAL,
        )
        assert rendered == expected, where
        for text in re.findall(r"'(?:content|city)': '([^']+)'", str(messages)):
            assert text in rendered, (where, text)
        equal += 1
    assert equal > 40
