"""Small trained tokenizers of the three kinds that checkpoints use, with transformers' own as the reference."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "hello world, how are you today? the cat sat on the mat. user assistant system don't 12345 ",
    "héllo wörld 中文 一二三 русский текст emoji 😀 <tag> a|b \n\n  indented\tline\r\n",
] * 5
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
KINDS = ("byte_level", "sentencepiece", "sentencepiece_legacy", "unigram")

Files = dict[str, bytes]


@cache
def byte_level() -> Tokenizer:
    """Qwen's kind: two special tokens and one ordinary added token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<think>", "Ünïcode added"])
    return tokenizer


def _byte_fallback(legacy: bool) -> Tokenizer:
    """Llama 2's kind: `▁` for a space, byte tokens for unknown characters, a beginning-of-sequence token."""
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=[*special, *BYTE_TOKENS], show_progress=False)
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trained.train_from_iterator(CORPUS[:1], trainer)
    trained_model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in trained_model["merges"]]
    tokenizer = Tokenizer(
        models.BPE(trained_model["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@cache
def sentencepiece() -> Tokenizer:
    return _byte_fallback(legacy=False)


@cache
def sentencepiece_legacy() -> Tokenizer:
    return _byte_fallback(legacy=True)


@cache
def unigram() -> Tokenizer:
    """T5's kind: the special tokens are pieces of the vocabulary, so plain text can spell them."""
    letters = sorted({char for text in CORPUS for char in text.replace(" ", "▁")} | set("|im_startend<>"))
    pieces = [("<unk>", 0.0), ("</s>", -1.0), ("<|im_start|>", -1.0), ("<|im_end|>", -1.0)]
    tokenizer = Tokenizer(models.Unigram([*pieces, *((letter, -5.0) for letter in letters)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens(["<unk>", "</s>", "<|im_start|>", "<|im_end|>"])
    return tokenizer


def backend(kind: str) -> Tokenizer:
    makers = {
        "byte_level": byte_level,
        "sentencepiece": sentencepiece,
        "sentencepiece_legacy": sentencepiece_legacy,
        "unigram": unigram,
    }
    return makers[kind]()


def files(kind: str = "byte_level", **config: Any) -> Files:
    """The files of a tokenizer with `config` in tokenizer_config.json."""
    return {"tokenizer.json": backend(kind).to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


def save(made: Files, folder: Path) -> Path:
    """Writes the files into `folder` and returns it."""
    for name, data in made.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def reference(kind: str = "byte_level", **config: Any) -> PreTrainedTokenizerFast:
    """transformers' tokenizer of the same files."""
    return PreTrainedTokenizerFast(tokenizer_object=backend(kind), **config)  # type: ignore[no-untyped-call]
