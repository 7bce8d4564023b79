"""An engine on the model itself. Imports PyTorch, which takes seconds: on the engine thread, and not when simulated."""

from __future__ import annotations

from dataclasses import replace

import torch

from common.config import Config
from worker.engine_config import available_memory, with_pool
from worker.engine_core import EngineCore
from worker.facts import WorkerFacts
from worker.model_config import ModelConfig, ModelError
from worker.model_runner import ModelRunner
from worker.numerics import numerics_digest
from worker.progress import Progress


def build_model_engine(
    config: Config, model_config: ModelConfig, facts: WorkerFacts, threads: int | None, progress: Progress
) -> tuple[EngineCore, WorkerFacts]:
    """The engine, loaded and warm, and the worker's description with what is known now.

    Raises:
        ModelError: the checkpoint can not be served.
        InvalidFieldError: the lengths do not fit the KV memory.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    progress.stage("loading weights")
    runner = ModelRunner(config, model_config, progress.bytes)
    model_len = model_config.max_position_embeddings
    config = with_pool(config, model_len, runner.num_blocks_for, available_memory(runner.mapped_bytes))
    allocate(runner, config.num_kvcache_blocks)
    progress.stage("warming up")
    runner.warmup()
    facts = replace(
        facts,
        max_model_len=config.max_model_len,
        total_blocks=config.num_kvcache_blocks,
        weights_digest=runner.weights_digest,
        numerics=numerics_digest(runner),
        kernels=runner.kernels.description,
        dtype=str(runner.dtype).removeprefix("torch."),
    )
    return EngineCore(config, runner), facts


def allocate(runner: ModelRunner, num_blocks: int) -> None:
    """Makes the KV pool.

    Raises:
        ModelError: it does not fit into memory.
    """
    try:
        runner.allocate_kv_cache(num_blocks)
    except (RuntimeError, MemoryError, OSError):
        raise ModelError(f"{num_blocks} KV blocks do not fit into memory: lower --kv-cache-memory") from None
