"""GPU memory for the KV cache: what a largest step leaves of it."""

from __future__ import annotations

import torch

from common.params.sampling_params import SamplingParams
from worker.engine.batch import ScheduledBatch
from worker.engine.sequence import Sequence
from worker.model.model_runner import ModelRunner

# Their logits are made and sorted out.
_SAMPLED = SamplingParams(temperature=1.0, top_k=2, top_p=0.9)


def device_memory(runner: ModelRunner) -> int:
    """Bytes for the KV cache within `gpu_memory_utilization` of the runner's GPU, found out by a largest step.

    Counted as taken: what the step needed at its peak, and what this process or another holds besides.
    """
    device = runner.kernels.device
    torch.cuda.reset_peak_memory_stats(device)
    num_blocks = _largest_step(runner)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    peak, held = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    step_bytes = peak - held - num_blocks * runner.kv_block_bytes
    return kv_budget(total, free, step_bytes, runner.config.gpu_memory_utilization)


def kv_budget(total: int, free: int, step_bytes: int, utilization: float) -> int:
    """Bytes of `total` times `utilization` that are left beside what is not free and what a step needs; 0 or more."""
    return max(0, int(total * utilization) - (total - free) - step_bytes)


def _largest_step(runner: ModelRunner) -> int:
    """Prompts of together `max_num_batched_tokens`, as long as can be, in a KV pool of so many blocks."""
    block_size, left = runner.config.kv_cache_block_size, runner.config.max_num_batched_tokens
    seqs: list[Sequence] = []
    num_blocks = 0
    while left and len(seqs) < runner.config.max_num_seqs:
        # As many sampled rows as there can be beside the long prompts.
        others = runner.config.max_num_seqs - len(seqs) - 1
        seq = Sequence([0] * min(max(1, left - others), runner.max_model_len), block_size, _SAMPLED)
        seq.block_table = list(range(num_blocks, num_blocks + seq.num_blocks))
        num_blocks += seq.num_blocks
        left -= seq.num_tokens
        seqs.append(seq)
    lengths = [seq.num_tokens for seq in seqs]
    with runner.scratch_kv_cache(num_blocks):
        runner.forward(ScheduledBatch({seq.id: seq for seq in seqs}, lengths, sum(lengths)))
    return num_blocks
