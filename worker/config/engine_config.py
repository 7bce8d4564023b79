"""Fills in what a Config cannot know before the model is there: special tokens, pool size, model length."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from common.config import Config
from common.errors import InvalidFieldError
from common.limits import MAX_KV_BLOCKS
from common.params.checks import require
from worker.config.model_config import ModelConfig
from worker.config.special_tokens import tokenizer_eos_id

# Share of the free memory that the KV cache takes when nothing is said.
_FREE_SHARE = 4


def default_weights_cache() -> str:
    """`fissile/weights` in the user's cache folder; empty where there is none."""
    try:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return ""
    return str(Path(caches) / "fissile" / "weights")


def with_special_tokens(config: Config, model_config: ModelConfig) -> Config:
    """`config` with the model's beginning- and end-of-sequence ids, as far as it has none of its own.

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


def with_pool(
    config: Config, model_len: int, num_blocks_for: Callable[[int], int], free_bytes: int, *, longest: int = 0
) -> Config:
    """`config` with `num_kvcache_blocks` and `max_model_len` such that one longest sequence always fits.

    A length that was not asked for is lowered to what the cache holds. A length that was asked for enlarges the cache
    beyond its default size. A pool that was set (`num_kvcache_blocks`) stays. No more blocks are made than all
    sequences of a full running set can hold.

    Args:
        config: `kv_cache_memory` 0 takes a quarter of `free_bytes`; `max_model_len` 0 takes `model_len`.
        model_len: the model's own length, tokens.
        num_blocks_for: number of blocks that so many bytes hold.
        free_bytes: memory that can be used.
        longest: greatest `max_model_len` that is allowed; 0 allows `model_len`.

    Raises:
        InvalidFieldError: `max_model_len` is beyond the model's, or does not fit the memory.
    """
    longest = longest or model_len
    if config.max_model_len > longest:
        own = "the model's own" if longest == model_len else "with the model's rope scaling"
        raise InvalidFieldError("max_model_len", f"is {config.max_model_len}", f"at most {own} {longest}")
    size = config.kv_cache_block_size
    wanted = _blocks(config.max_model_len or model_len, size)
    num_blocks = config.num_kvcache_blocks or num_blocks_for(config.kv_cache_memory or free_bytes // _FREE_SHARE)
    if num_blocks < wanted and config.max_model_len:
        fixed = config.num_kvcache_blocks or config.kv_cache_memory
        most = num_blocks if fixed else num_blocks_for(free_bytes)
        if most < wanted:
            what = "the KV cache" if fixed else "the free memory"
            raise InvalidFieldError("max_model_len", f"is {config.max_model_len}", f"at most {most * size}: {what}")
        num_blocks = wanted
    if num_blocks < 1:
        raise InvalidFieldError("kv_cache_memory", f"is {config.kv_cache_memory} bytes", "at least one block")
    max_model_len = min(config.max_model_len or model_len, num_blocks * size)
    useful = min(MAX_KV_BLOCKS, config.max_num_seqs * _blocks(max_model_len, size))
    if not config.num_kvcache_blocks:
        num_blocks = min(num_blocks, max(useful, _blocks(max_model_len, size)))
    return replace(config, num_kvcache_blocks=num_blocks, max_model_len=max_model_len)


def _blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
