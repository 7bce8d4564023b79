"""GPU memory for the KV cache, measured by running a largest step."""

from __future__ import annotations

import torch

from common.params.sampling_params import SamplingParams
from worker.engine.batch import ScheduledBatch
from worker.engine.sequence import Sequence
from worker.model.model_runner import ModelRunner

# Sampling that needs most memory: it sorts the logits.
_SAMPLED = SamplingParams(temperature=1.0, top_k=2, top_p=0.9)


def device_memory(runner: ModelRunner) -> int:
    """Bytes for the KV cache within `gpu_memory_utilization` of the runner's GPU, measured by a largest step.

    The peak of that step, and memory that this process or others hold besides, count as used.
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
    """Bytes of `total * utilization` that remain after used memory and `step_bytes`; 0 or more."""
    return max(0, int(total * utilization) - (total - free) - step_bytes)


def _largest_step(runner: ModelRunner) -> int:
    """Runs prompts of `max_num_batched_tokens` tokens together, each as long as possible. Returns the peak in bytes."""
    block_size, left = runner.config.kv_cache_block_size, runner.config.max_num_batched_tokens
    seqs: list[Sequence] = []
    num_blocks = 0
    while left and len(seqs) < runner.config.max_num_seqs:
        # As many sampled rows as fit beside the long prompts.
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
