"""Settings of an engine that follow from its model or machine: special tokens, the folder of packed weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.config import Config
from common.params.checks import require
from common.text.tokenizer import named_special_tokens, read_json, tokenizer_fault, tokenizer_files
from worker.config.model_config import ModelConfig


def tokenizer_eos_id(folder: str | Path) -> int | None:
    """Id of the tokenizer's `eos_token`; None without a tokenizer, without that token, or if it has no id.

    Raises:
        TokenizerError: a file of the tokenizer cannot be used.
    """
    if not (Path(folder) / "tokenizer.json").is_file():
        return None
    files = tokenizer_files(folder)
    try:
        text = named_special_tokens(files).get("eos_token")
        return None if text is None else _token_id(files, text)
    # The JSON of the files may have any shape.
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise tokenizer_fault(files, f"the tokenizer's files are not of their usual form: {said}") from None


def _token_id(files: Mapping[str, bytes], text: str) -> int | None:
    decoder = read_json(files, "tokenizer_config.json").get("added_tokens_decoder") or {}
    content = read_json(files, "tokenizer.json")
    added = {token["content"]: int(token_id) for token_id, token in decoder.items()}
    added |= {token["content"]: int(token["id"]) for token in content.get("added_tokens") or ()}
    if text in added:
        return added[text]
    vocab: Any = content["model"].get("vocab") or {}
    # A Unigram vocabulary is a list of tokens with their scores.
    found = vocab.get(text) if isinstance(vocab, dict) else {token: id for id, (token, _) in enumerate(vocab)}.get(text)
    return None if found is None else int(found)


def default_weights_cache() -> str:
    """`fissile/weights` in the user's cache folder; empty where there is none."""
    try:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return ""
    return str(Path(caches) / "fissile" / "weights")


def with_special_tokens(config: Config, model_config: ModelConfig) -> Config:
    """`config` with the model's beginning- and end-of-sequence ids where it has none.

    The tokenizer's `eos_token` ends sequences too: some fine-tunes of base models name their end of turn only there.

    Raises:
        InvalidFieldError: an id of its own is outside the model's vocabulary.
        TokenizerError: the tokenizer's files cannot be used.
    """
    vocab_size = model_config.vocab_size
    for name, ids in (("eos_token_id", (config.eos_token_id or 0,)), ("stop_token_ids", config.stop_token_ids)):
        require(max(ids, default=0) < vocab_size, name, getattr(config, name), f"0 to {vocab_size - 1}")
    bos = model_config.bos_token_id if config.bos_token_id is None else config.bos_token_id
    if config.eos_token_ids:
        return replace(config, bos_token_id=bos)
    ends = model_config.eos_token_ids
    tokenizers = tokenizer_eos_id(config.model) if config.model else None
    if tokenizers is not None and tokenizers < vocab_size and tokenizers not in ends:
        ends = (*ends, tokenizers)
    return replace(config, bos_token_id=bos, eos_token_id=next(iter(ends), None), stop_token_ids=ends[1:])
