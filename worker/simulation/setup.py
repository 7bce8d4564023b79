"""Sets up a SimulatedRunner, sized like one with the model. No PyTorch."""

from __future__ import annotations

from dataclasses import replace

from common.config import Config
from common.errors import InvalidFieldError
from common.limits import MAX_KV_BLOCKS
from worker.config.engine_config import with_pool
from worker.config.model_config import ModelConfig
from worker.simulation.cost_model import CostModel
from worker.simulation.runner import SimulatedRunner


def simulated_runner(config: Config, model_config: ModelConfig, cost: CostModel) -> tuple[Config, SimulatedRunner]:
    """The runner, and `config` with the size of its KV pool.

    The vocabulary and the longest length are the checkpoint's. The pool holds what the preset's memory holds, or
    `kv_cache_memory` of its bytes per token; no machine's memory is asked, because a slot takes 16 bytes here.

    Raises:
        InvalidFieldError: the lengths do not fit the KV memory, or the preset's weights leave no room.
    """
    block_size = config.kv_cache_block_size
    if not config.kv_cache_memory:
        num_blocks = min(MAX_KV_BLOCKS, cost.kv_tokens(config.gpu_memory_utilization) // block_size)
        if num_blocks < 1:
            raise InvalidFieldError("simulate", "leaves no memory for a KV cache beside the weights", "more chips")
        config = replace(config, num_kvcache_blocks=num_blocks)
    block_bytes = block_size * (cost.kv_bytes_per_token or _checkpoint_bytes(model_config))
    model_len, longest = model_config.max_position_embeddings, model_config.longest_len
    config = with_pool(config, model_len, lambda num_bytes: num_bytes // block_bytes, free_bytes=0, longest=longest)
    runner = SimulatedRunner(
        model_config.vocab_size,
        config.eos_token_id,
        cost,
        block_size=block_size,
        num_blocks=config.num_kvcache_blocks,
        check_contexts=False,
        hidden_size=model_config.hidden_size,
        num_labels=model_config.num_labels,
    )
    return config, runner


def _checkpoint_bytes(model_config: ModelConfig) -> int:
    """KV bytes of a token, in float32."""
    return 2 * model_config.num_hidden_layers * model_config.num_key_value_heads * model_config.head_dim * 4
