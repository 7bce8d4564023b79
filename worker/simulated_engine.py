"""An engine on SimulatedRunner, sized like one with the model. No PyTorch."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from common.config import Config
from worker.engine_config import available_memory, with_pool
from worker.engine_core import EngineCore
from worker.facts import WorkerFacts
from worker.model_config import ModelConfig
from worker.simulated import SimulatedRunner

# Without a memory size. The runner keeps a number per token, so the pool is not sized by the machine's memory.
_NUM_BLOCKS: Final = 16_384
_BYTES_PER_NUMBER: Final = 4


def build_simulated_engine(
    config: Config, model_config: ModelConfig, facts: WorkerFacts, step_s: float
) -> tuple[EngineCore, WorkerFacts]:
    """The engine, and the worker's description with what is known now.

    Raises:
        InvalidFieldError: the lengths do not fit the KV memory.
    """
    if not config.kv_cache_memory:
        config = replace(config, num_kvcache_blocks=_NUM_BLOCKS)
    numbers = 2 * model_config.num_hidden_layers * model_config.num_key_value_heads * model_config.head_dim
    block_bytes = _BYTES_PER_NUMBER * numbers * config.kv_cache_block_size
    model_len = model_config.max_position_embeddings
    config = with_pool(config, model_len, lambda num_bytes: num_bytes // block_bytes, available_memory())
    runner = SimulatedRunner(
        model_config.vocab_size,
        config.eos_token_id,
        step_s,
        block_size=config.kv_cache_block_size,
        num_blocks=config.num_kvcache_blocks,
    )
    facts = replace(
        facts,
        max_model_len=config.max_model_len,
        total_blocks=config.num_kvcache_blocks,
        weights_digest="simulated",
        numerics="simulated",
        kernels="simulated",
        dtype="simulated",
    )
    return EngineCore(config, runner), facts
