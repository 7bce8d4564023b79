"""Sets up a model runner: loads the model, sizes and allocates its KV pool, warms it up. Imports PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

import torch

from common.config import Config
from common.constraints.library import ENGINE
from common.params.pooling import LAST, Pooling
from common.params.sampling_params import SamplingParams
from common.process.available_memory import available_memory
from worker.config.model_config import ModelConfig, ModelError
from worker.engine.batch import ScheduledBatch
from worker.engine.executor import Executor, PipelinedExecutor, TokenWaiter
from worker.engine.sequence import Sequence
from worker.kv_pool import KVMemory, size_kv_pool
from worker.model.model_runner import ModelRunner
from worker.model.numerics import numerics_digest
from worker.model.speculation.verify_check import verifies_exactly
from worker.progress import StartProgress
from worker.weights.checkpoint import LoadProgress, no_progress

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


_WARMUP_TOKENS: Final = 33
# Drafts compared if only grammars make any: few, because each takes a step.
_CHECKED_FORCED: Final = 3


def load_runner(
    config: Config, model_config: ModelConfig, threads: int | None, progress: StartProgress, *, takes_memory: bool
) -> tuple[Config, ModelRunner]:
    """Loads and warms up a model. Returns its runner, and `config` with the size of its KV pool.

    Args:
        config: of the engine.
        model_config: from the same folder.
        threads: of arithmetic; None for PyTorch's choice.
        progress: called at each stage.
        takes_memory: True to take the KV pool's memory now (`take_kv_memory`).

    Raises:
        ModelError: the checkpoint cannot be served.
        InvalidFieldError: the lengths do not fit the KV memory.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    progress.stage("loading weights")
    runner = ModelRunner(config, model_config, progress.bytes)
    config = size_kv_pool(config, model_config, runner.kv_block_bytes, kv_memory(runner))
    progress.stage("taking memory for the KV cache")
    allocate(runner, config.num_kvcache_blocks)
    if takes_memory:
        take_kv_memory(runner, config.num_kvcache_blocks, progress.bytes)
    progress.stage("warming up")
    warm_up(runner)
    if runner.captures_graphs:
        progress.stage("capturing graphs")
        runner.capture_graphs(progress.count)
    return config, runner


def warm_up(runner: ModelRunner) -> None:
    """Runs one prefill and one decode, so that the first request does not pay for first calls.

    Then compares the verification of drafts with plain decodes, if drafts or forced tokens are possible.

    Raises:
        ModelError: drafts would change tokens.
    """
    config = runner.config
    pooling: Pooling | None = None if runner.model_config.generates else LAST
    tokens = [0] * min(_WARMUP_TOKENS, runner.max_model_len)
    seq = Sequence(tokens, config.kv_cache_block_size, pooling=pooling)
    seq.block_table = list(range(seq.num_blocks))
    with runner.scratch_kv_cache(seq.num_blocks):
        for num_tokens in (seq.num_tokens, 1):
            seq.num_computed_tokens = seq.num_tokens - num_tokens
            batch = ScheduledBatch({seq.id: seq}, [num_tokens], num_tokens)
            batch.feeds_draft_model = True
            runner.forward(batch)
    spec = config.speculative_config
    if spec is None and runner.may_force:
        # On every rank, because the ranks compute these steps together.
        runner.forces &= verifies_exactly(runner, _CHECKED_FORCED)
    elif spec is not None and not verifies_exactly(runner, spec.num_speculative_tokens):
        raise ModelError(
            f"speculative_config: with kernels {runner.kernels.name} several rows of a sequence have other bits than "
            "one at a time, so drafts would change tokens; leave it out, or choose other kernels"
        )


def describe(runner: ModelRunner) -> dict[str, str]:
    """Facts of a loaded model that are the same on every rank. Runs a few steps to compute them."""
    return {
        "weights_digest": runner.weights_digest,
        "numerics": numerics_digest(runner),
        "kernels": runner.kernels.description,
        "dtype": str(runner.dtype).removeprefix("torch."),
        "grammar_engine": "" if runner.grammars is None else ENGINE,
    }


def kv_memory(runner: ModelRunner) -> KVMemory:
    """Memory for the runner's KV cache: free main memory, or what a largest step leaves of its GPU's."""
    if runner.kernels.device.type == "cpu":
        return KVMemory(available_memory(runner.mapped_bytes), is_device=False)
    return KVMemory(device_memory(runner), is_device=True)


def make_executor(
    config: Config, runner: ModelRunner, clock: Callable[[], float] = time.monotonic
) -> tuple[Config, Executor | None]:
    """An engine's config and executor. On a GPU each step is launched before the previous one has ended."""
    if runner.kernels.device.type == "cpu":
        return config, None
    return replace(config, deferred_output=True), PipelinedExecutor(runner.launch, clock, partial(_enter, runner))


def make_token_waiter(config: Config, runner: ModelRunner, clock: Callable[[], float]) -> TokenWaiter | None:
    """A waiter for a rank's tokens if steps are launched ahead: on a GPU, and with deferred output; else None."""
    if runner.kernels.device.type == "cpu" and not config.deferred_output:
        return None
    return TokenWaiter(clock, partial(_enter, runner))


def _enter(runner: ModelRunner) -> None:
    """Makes the runner's device this thread's current one."""
    if runner.kernels.device.type != "cpu":
        torch.cuda.set_device(runner.kernels.device)


def allocate(runner: ModelRunner, num_blocks: int) -> None:
    """Allocates the KV pool.

    Raises:
        ModelError: it does not fit into memory.
    """
    try:
        runner.allocate_kv_cache(num_blocks)
    except (RuntimeError, MemoryError, OSError):
        raise ModelError(f"{num_blocks} KV blocks do not fit into memory: lower --kv-cache-memory") from None


def take_kv_memory(runner: ModelRunner, num_blocks: int, progress: LoadProgress = no_progress) -> None:
    """Takes the KV pool's memory now if twice as much is free; otherwise blocks take memory as they are used."""
    if 2 * num_blocks * runner.kv_block_bytes <= available_memory(runner.mapped_bytes):
        runner.touch_kv_cache(progress)
