"""Prompts that ask a model whether a document is relevant to a query."""

from __future__ import annotations

from typing import Final

from common.text.chat_template import ChatTemplate
from common.text.tokenizer import Tokenizer

RERANK_ROLES: Final = frozenset(("query", "document"))
# The form of Qwen3-Reranker, as its model card has it.
_QWEN3: Final = """\
{%- set query = messages | selectattr("role", "eq", "query") | map(attribute="content") | first -%}
{%- set document = messages | selectattr("role", "eq", "document") | map(attribute="content") | first -%}
{%- set instruction = messages | selectattr("role", "eq", "system") | map(attribute="content") | first
    | default("Given a web search query, retrieve relevant passages that answer the query") -%}
{{- "<|im_start|>system\\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    ~ 'provided. Note that the answer can only be "yes" or "no".<|im_end|>\\n<|im_start|>user\\n'
    ~ "<Instruct>: " ~ instruction ~ "\\n<Query>: " ~ query ~ "\\n<Document>: " ~ document
    ~ "<|im_end|>\\n<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n" -}}
"""


def rerank_template(own: ChatTemplate | None, tokenizer: Tokenizer) -> ChatTemplate:
    """Renders messages of the roles `system` (the instruction, which may be absent), `query` and `document`.

    Args:
        own: the model's chat template, which serves if it names these roles, as sentence-transformers has it.
        tokenizer: the model's tokenizer.

    Returns:
        The model's own template, else the form of Qwen3-Reranker.
    """
    return own if own is not None and own.roles >= RERANK_ROLES else ChatTemplate({"default": _QWEN3}, tokenizer)
