"""Size of the KV cache: the number of KV blocks, and with it the length of the model.

The memory comes from `--kv-cache-memory`. Without it, a CPU's engine takes a quarter of the free main memory, all its
ranks together; `fissile serve` shares this quarter among its workers (common/cli/serve/launch_plan.py). A GPU's rank
takes all memory within `--gpu-memory-utilization` that weights and the largest step leave
(worker/model/runner_setup.py). A simulated engine has the memory of its preset.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from common.config import Config
from common.errors import InvalidFieldError
from common.limits import MAX_KV_BLOCKS
from worker.config.model_config import ModelConfig

# The cache's share of the free main memory, without `kv_cache_memory`: one in _FREE_SHARE.
_FREE_SHARE: Final = 4


@dataclass(frozen=True)
class KVMemory:
    """Memory that a rank's KV cache may take.

    Attributes:
        num_bytes: bytes that are left beside the loaded weights.
        is_device: True if the bytes are of a GPU, which no other process takes; False for main memory.
    """

    num_bytes: int
    is_device: bool


def size_kv_pool(config: Config, model_config: ModelConfig, block_bytes: int, memory: KVMemory) -> Config:
    """`config` with the size of each rank's KV pool and the models' length (`with_pool`).

    Raises:
        InvalidFieldError: the lengths do not fit the KV memory, or a GPU has none left.
    """
    if memory.is_device:
        if not memory.num_bytes and not config.kv_cache_memory:
            share = config.gpu_memory_utilization
            raise InvalidFieldError(
                "gpu_memory_utilization", f"is {share}", "more: weights and a step take all of that"
            )
        config = replace(config, kv_cache_memory=config.kv_cache_memory or memory.num_bytes)
    return _sized(config, model_config, block_bytes, memory.num_bytes)


def size_simulated_pool(config: Config, model_config: ModelConfig, kv_tokens: int, kv_bytes_per_token: int) -> Config:
    """`config` with the KV pool of a simulated engine: `kv_tokens`, or as many as `kv_cache_memory` holds.

    No machine's memory is asked, because a simulated token takes 16 bytes.

    Args:
        config: of the engine.
        model_config: of its checkpoint.
        kv_tokens: tokens that the preset's memory holds beside the weights.
        kv_bytes_per_token: of the preset; 0 takes those of the checkpoint in float32.

    Raises:
        InvalidFieldError: the lengths do not fit the KV memory, or the preset's weights leave no room.
    """
    block_size = config.kv_cache_block_size
    if not config.kv_cache_memory:
        num_blocks = min(MAX_KV_BLOCKS, kv_tokens // block_size)
        if num_blocks < 1:
            raise InvalidFieldError("simulate", "leaves no memory for a KV cache beside the weights", "more chips")
        config = replace(config, num_kvcache_blocks=num_blocks)
    block_bytes = block_size * (kv_bytes_per_token or _checkpoint_bytes(model_config))
    return _sized(config, model_config, block_bytes, free_bytes=0)


def size_given_pool(config: Config, model_config: ModelConfig) -> Config:
    """`config` with the model's length, for a runner that already has a pool of `num_kvcache_blocks`.

    Raises:
        InvalidFieldError: `num_kvcache_blocks` is 0, or too small for `max_model_len`.
    """
    if not config.num_kvcache_blocks:
        raise InvalidFieldError("num_kvcache_blocks", "is 0", "the number of blocks of the runner's pool")
    return _sized(config, model_config, block_bytes=1, free_bytes=0)


def _sized(config: Config, model_config: ModelConfig, block_bytes: int, free_bytes: int) -> Config:
    model_len, longest = model_config.max_position_embeddings, model_config.longest_len
    return with_pool(config, model_len, block_bytes, free_bytes, longest=longest)


def _checkpoint_bytes(model_config: ModelConfig) -> int:
    """KV bytes of a token in float32."""
    return 2 * model_config.num_hidden_layers * model_config.num_key_value_heads * model_config.head_dim * 4


def with_pool(config: Config, model_len: int, block_bytes: int, free_bytes: int, *, longest: int = 0) -> Config:
    """`config` with `num_kvcache_blocks` and `max_model_len`, such that one sequence of that length always fits.

    Without `max_model_len` the length is lowered to what the cache holds. A given `max_model_len` enlarges the cache
    beyond its default size. A given `num_kvcache_blocks` stays. A full running set never leaves a block unused.

    Args:
        config: `kv_cache_memory` 0 takes a quarter of `free_bytes`; `max_model_len` 0 takes `model_len`.
        model_len: the model's own length, tokens.
        block_bytes: bytes of one KV block on one rank.
        free_bytes: memory that the cache may take.
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
    num_blocks = config.num_kvcache_blocks or (config.kv_cache_memory or free_bytes // _FREE_SHARE) // block_bytes
    if num_blocks < wanted and config.max_model_len:
        fixed = config.num_kvcache_blocks or config.kv_cache_memory
        most = num_blocks if fixed else free_bytes // block_bytes
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
