"""An engine whose few blocks make it preempt, and prompts that share a beginning."""

from __future__ import annotations

import random

from common.config import Config
from common.params.config_parts import SpeculativeConfig
from worker.engine.core import EngineCore
from worker.engine.tier_lookups import Tiers
from worker.simulation.runner import SimulatedRunner

BLOCK = 16


def engine(*, num_drafts: int = 0, tiers: Tiers | None = None, **options: object) -> EngineCore:
    """An engine of five blocks, with KV tiers, if any, and further fields of its Config."""
    config = Config(
        max_model_len=80,
        num_kvcache_blocks=5,
        kv_cache_block_size=BLOCK,
        enable_prefix_caching=True,
        speculative_config=SpeculativeConfig(num_drafts, adaptive=False) if num_drafts else None,
        **options,  # type: ignore[arg-type]
    )
    runner = SimulatedRunner(50, None, block_size=BLOCK, num_blocks=5, num_drafts=num_drafts)
    return EngineCore(config, runner, tiers=tiers)


def prompts(num_shared: int) -> list[list[int]]:
    """Five prompts whose first `num_shared` tokens are the same."""
    rnd = random.Random(1)
    shared = [rnd.randrange(50) for _ in range(num_shared)]
    return [[*shared, *(rnd.randrange(50) for _ in range(n))] for n in (1, 9, 20, 17, 2)]
