"""Settings of an engine that follow from its model or machine: special tokens, the folder of packed weights."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from common.config import Config
from common.params.checks import require
from worker.config.model_config import ModelConfig
from worker.config.model_tokenizer import tokenizer_eos_id


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
