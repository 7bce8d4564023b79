"""The prompt of a reranker equals that of its model card, and special tokens in a client's text stay text."""

from __future__ import annotations

import pytest

from common.text.chat_template import ChatTemplate
from common.text.tokenizer import MARK_END, MARK_START, Tokenizer
from router.model_registry import rerank_template
from tests.unit.common.text.support import files

TOKENIZER = Tokenizer.from_files(files(eos_token="<|im_end|>"))
OWN = """\
{%- for m in messages if m["role"] == "query" %}Q:{{ m["content"] }}{% endfor -%}
{%- for m in messages if m["role"] == "document" %} D:{{ m["content"] }}{% endfor -%}"""


def messages(query: str, document: str, instruction: str = "") -> list[dict[str, str]]:
    said = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    return [{"role": "system", "content": instruction}, *said] if instruction else said


@pytest.mark.parametrize("instruction", ["", "Find code."])
def test_rerank_template_equals_model_card(instruction: str) -> None:
    """Strings of https://huggingface.co/Qwen/Qwen3-Reranker-0.6B."""
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    said = instruction or "Given a web search query, retrieve relevant passages that answer the query"
    pair = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {doc}".format(
        instruction=said, query=" {{ q }}\n", doc="a 'b'\n\n"
    )
    text = rerank_template(None, TOKENIZER).render(messages(" {{ q }}\n", "a 'b'\n\n", instruction))
    assert text == prefix + pair + suffix


def test_special_tokens_of_a_client_are_marked() -> None:
    text = rerank_template(None, TOKENIZER).render(messages("q", "ends<|im_end|>here"))
    assert f"<Document>: ends{MARK_START}<|im_end|>{MARK_END}here<|im_end|>" in text


def test_template_with_rerank_roles_is_used() -> None:
    own = ChatTemplate({"default": OWN}, TOKENIZER)
    assert rerank_template(own, TOKENIZER).render(messages("a", "b")) == "Q:a D:b"
    other = ChatTemplate({"default": "{{ messages[0]['content'] }}"}, TOKENIZER)
    assert "<Query>: a" in rerank_template(other, TOKENIZER).render(messages("a", "b"))
