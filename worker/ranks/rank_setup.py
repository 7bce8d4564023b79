"""Loads a model on ranks, processes that each hold a part of it. No PyTorch in this process."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

from common.config import Config
from worker.config.model_config import ModelConfig, ModelError
from worker.config.shares import check_heads
from worker.kv_pool import KVMemory, size_kv_pool
from worker.progress import StartProgress
from worker.ranks.rank_client import RankGroup


def load_ranks(
    group: RankGroup, config: Config, model_config: ModelConfig, progress: StartProgress
) -> tuple[Config, dict[str, str]]:
    """Starts the ranks and loads the model on them; ends them if that fails.

    The ranks' pools have the same number of blocks, that of the rank with the least room.

    Args:
        group: not started yet.
        config: `kv_cache_memory` is each rank's.
        model_config: from the same folder.
        progress: is told the stages; the group's own, which is told the rest.

    Returns:
        The config with its pool, and what all ranks say of the model: weights_digest, numerics, kernels, dtype.

    Raises:
        RankLostError: a rank has ended.
        ModelError: the checkpoint cannot be served, or the ranks' machines are not alike.
        InvalidFieldError: the lengths do not fit the KV memory.
    """
    # Ranks take seconds to start, and machines of others may be waited for.
    check_heads(model_config, group.topology.tp_size)
    progress.stage("starting ranks")
    group.start()
    with contextlib.ExitStack() as stack:
        stack.callback(group.close)
        progress.stage("loading weights")
        settings = json.dumps(model_config.source)
        block_bytes = group.call("load", config, group.threads, settings)
        shares_sums = any(group.call("share_sums").values())
        memory = _kv_memory(group)
        # On GPUs a step is launched before the tokens of the previous step have arrived.
        config = replace(config, deferred_output=config.deferred_output or memory.is_device)
        config = size_kv_pool(config, model_config, max(whole for whole, _ in block_bytes.values()), memory)
        group.call("allocate", config.num_kvcache_blocks)
        progress.stage("warming up")
        if all(group.call("warmup").values()):
            progress.stage("capturing graphs")
            group.call("capture_graphs")
        known = _agreed(group.call("describe"))
        group.set_ready(shares_sums, block_bytes)
        stack.pop_all()
    return config, known


def _kv_memory(group: RankGroup) -> KVMemory:
    """Memory for each rank's KV cache: that of the rank with least; ranks of one machine share its memory."""
    memories = [KVMemory(*answer) for answer in group.call("kv_memory").values()]
    free_bytes = min(memory.num_bytes for memory in memories)
    if all(memory.is_device for memory in memories):
        return KVMemory(free_bytes, is_device=True)
    return KVMemory(free_bytes // group.topology.ranks_per_node, is_device=False)


def _agreed(answers: dict[int, dict[str, str]]) -> dict[str, str]:
    """Checks that all ranks report the same facts of the model, and returns them.

    Raises:
        ModelError: two of them differ; they would compute different tokens.
    """
    for rank, known in answers.items():
        for name, value in known.items():
            if value != answers[0][name]:
                raise ModelError(f"ranks 0 and {rank} differ in {name}: {answers[0][name]} and {value}")
    return answers[0]
