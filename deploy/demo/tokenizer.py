"""The demo's tokenizer: a byte-fallback BPE trained on the corpus, and its chat template.

Words become merged pieces, except right after a quotation mark or a hyphen: there every letter is a token, as every
digit is everywhere. So a model of this size can spell, reverse and add. Characters outside the vocabulary are encoded
as their UTF-8 bytes, so every text can be encoded and decoded unchanged.
"""

from __future__ import annotations

import itertools
import json
import string

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from deploy.demo.corpus import CALL_END, CALL_START, END_OF_TEXT, FIRST, TURN_END, TURN_START, documents

VOCABULARY = 1024
"""Size of the whole vocabulary: characters, merges, 256 bytes, the delimiters of calls and the special tokens."""

SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
CALL_TOKENS = (CALL_START, CALL_END)
"""Tokens that stand for themselves in text, as with Qwen3: answers that call tools show them."""

CONTEXT_LENGTH = 1024
_SAMPLE = 20_000
_CHARACTERS = sorted(string.ascii_letters + string.digits + string.punctuation + " \n")
_BYTES = [f"<0x{value:02X}>" for value in range(256)]
_PIECES = r""" \p{L}+|(?<!["\p{L}-])\p{L}+|\p{L}|\p{N}| ?[^\s\p{L}\p{N}]|\s"""

CHAT_TEMPLATE = """
{%- set said = messages -%}
{%- if tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if messages[0]['role'] == 'system' -%}
        {%- set said = messages[1:] -%}
        {{- messages[0]['content'] + '\\n' -}}
    {%- endif -%}
    {{- '<tools>\\n' -}}
    {%- for tool in tools -%}
        {%- set schema = tool['function']['parameters'] or {} -%}
        {{- '{"name": "' + tool['function']['name'] + '", "arguments": {' -}}
        {%- for name, kind in (schema['properties'] or {}).items() -%}
            {{- (name | tojson) + ': ' + (kind['type'] | default('any') | tojson) -}}
            {{- '' if loop.last else ', ' -}}
        {%- endfor -%}
        {{- '}}\\n' -}}
    {%- endfor -%}
    {{- '</tools><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in said -%}
    {{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') -}}
    {%- for call in message['tool_calls'] or [] -%}
        {{- '' if loop.first and not message['content'] else '\\n' -}}
        {{- '<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": ' -}}
        {{- call['function']['arguments'] | tojson -}}
        {{- '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def _splitter() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")


def _without_special_tokens(text: str) -> str:
    for token in SPECIAL_TOKENS:
        text = text.replace(token, "\n")
    return text


def _merges() -> list[tuple[str, str]]:
    """The merge list of a BPE trained on the first documents of the corpus, without the special tokens."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = _splitter()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(_BYTES) - len(CALL_TOKENS) - len(SPECIAL_TOKENS),
        initial_alphabet=_CHARACTERS,
        limit_alphabet=len(_CHARACTERS),
        show_progress=False,
    )
    sample = itertools.islice(documents(FIRST), _SAMPLE)
    learner.train_from_iterator((_without_special_tokens(document.text) for document in sample), trainer)
    return [(left, right) for left, right in json.loads(learner.to_str())["model"]["merges"]]


def train_tokenizer() -> Tokenizer:
    """The finished tokenizer: bytes first, then characters and merges, the delimiters of calls, the special tokens."""
    merges = _merges()
    pieces = [*_BYTES, *_CHARACTERS, *(left + right for left, right in merges)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    tokenizer.pre_tokenizer = _splitter()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in CALL_TOKENS])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must exist."""
    index = tokenizer.token_to_id(token)
    if index is None:
        raise ValueError(f"the tokenizer has no token {token!r}")
    return index


def packaged(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer as `transformers` saves and loads it, with the chat template."""
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
