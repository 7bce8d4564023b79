"""Sets up a SimulatedRunner, sized like one with the model. No PyTorch."""

from __future__ import annotations

from common.config import Config
from worker.config.model_config import ModelConfig
from worker.kv_pool import size_simulated_pool
from worker.simulation.cost_model import CostModel
from worker.simulation.runner import SimulatedRunner


def simulated_runner(config: Config, model_config: ModelConfig, cost: CostModel) -> tuple[Config, SimulatedRunner]:
    """The runner, and `config` with the size of its KV pool.

    Vocabulary and longest length are the checkpoint's.

    Raises:
        InvalidFieldError: the lengths do not fit the KV memory, or the preset's weights leave no room.
    """
    kv_tokens = cost.kv_tokens(config.gpu_memory_utilization)
    config = size_simulated_pool(config, model_config, kv_tokens, cost.kv_bytes_per_token)
    runner = SimulatedRunner(
        model_config.vocab_size,
        config.eos_token_id,
        cost,
        block_size=config.kv_cache_block_size,
        num_blocks=config.num_kvcache_blocks,
        check_contexts=False,
        hidden_size=model_config.hidden_size,
        num_labels=model_config.num_labels,
    )
    return config, runner
