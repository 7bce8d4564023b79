"""Tokenizers and shorthands for the router's tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from fissile.worker.v1 import worker_pb2 as wpb
from tokenizers import decoders, models, pre_tokenizers

from common.text.tokenizer import Tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>{{ persona or 'assistant' }}\n{% endif %}"
)
EOS = 257


# Like Qwen3's in short: it shows reasoning of earlier answers, and thinking can be disabled.
THINKING_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% if begin_thinking %}<think>\n{% endif %}{% endif %}"
)


# The same with tools, calls and results.
TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    + THINKING_TEMPLATE.replace(
        "{{ m.content }}",
        "{{ m.content }}{% for call in m.tool_calls %}{{ '\\n' }}<tool_call>\n"
        '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
        "{% endfor %}{{ m.tool_call_id }}{{ m.name }}",
    )
)


def tool_files(*, with_tokens: bool = True) -> dict[str, bytes]:
    """Files of a model that thinks and calls tools; its delimiters are ids 300 to 303, or spelled in letters."""
    added = ("<think>", "</think>", "<tool_call>", "</tool_call>") if with_tokens else ()
    files = tokenizer_files(special=("<|im_start|>", "<|im_end|>", "<|pad|>"), added=added)
    return {**files, "chat_template.jinja": TOOLS_TEMPLATE.encode()}


def thinking_files(*, with_tokens: bool = True) -> dict[str, bytes]:
    """Files of a model that thinks; `<think>` and `</think>` are ids 300 and 301, or spelled in letters."""
    files = tokenizer_files(
        special=("<|im_start|>", "<|im_end|>", "<|pad|>"), added=("<think>", "</think>") if with_tokens else ()
    )
    return {**files, "chat_template.jinja": THINKING_TEMPLATE.encode()}


def tokenizer_files(
    *,
    chat: bool = True,
    generation: dict[str, object] | None = None,
    special: Sequence[str] = ("<|start|>", "<|end|>", "<|pad|>"),
    added: Sequence[str] = (),
) -> dict[str, bytes]:
    """A byte-level tokenizer: 0..255 bytes, 256..258 special, merges of letters, and from 300 on `added` tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    merges = [(a, b) for a in "abcdefg" for b in "aeiou"] + [("l", "o"), ("l", "a"), ("t", "h"), ("o", "n"), ("e", "r")]
    for i, (a, b) in enumerate(merges):
        vocab[a + b] = 259 + i
    for i in range(len(merges) + 259, 300):
        vocab[f"unused{i}"] = i
    vocab.update({token: 256 + i for i, token in enumerate(special)})
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*special])
    tokenizer.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in added])
    files = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"eos_token": special[1]}).encode(),
    }
    if chat:
        files["chat_template.jinja"] = CHAT_TEMPLATE.encode()
    if generation is not None:
        files["generation_config.json"] = json.dumps(generation).encode()
    return files


def small_tokenizer() -> Tokenizer:
    """The tokenizer of `tokenizer_files`."""
    return Tokenizer.from_files(tokenizer_files())


def save(files: dict[str, bytes], folder: Path) -> Path:
    """Writes the files into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def end(
    rid: int, end_pos: int, reason: wpb.EndReason.ValueType, stop_token_id: int = 0, message: str = ""
) -> wpb.SequenceEnd:
    return wpb.SequenceEnd(rid=rid, end_pos=end_pos, reason=reason, stop_token_id=stop_token_id, message=message)
