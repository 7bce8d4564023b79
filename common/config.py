"""Engine configuration with the scheduling guide's defaults (seed 001, "Key config defaults").

Frozen: what becomes known later (pool size, end-of-sequence ids) is filled in with `dataclasses.replace`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from common.errors import InvalidFieldError

PREFILL_FIRST: Final = "prefill_first"
MIXED: Final = "mixed"
SCHEDULING_POLICIES: Final = (PREFILL_FIRST, MIXED)


@dataclass(frozen=True)
class SpeculativeConfig:
    """Speculative decoding: how many draft tokens are verified per step."""

    num_speculative_tokens: int = 1


@dataclass(frozen=True)
class Config:
    """What the scheduler, the block manager and the model runner need to know.

    Attributes:
        model: folder of the checkpoint.
        max_num_seqs: most sequences in the running set.
        max_num_batched_tokens: most tokens computed in one step.
        kv_cache_block_size: tokens per KV block; 1 or a multiple of 16.
        num_kvcache_blocks: blocks in the pool; 0 until the pool has been sized.
        enable_prefix_caching: share full blocks between sequences with equal prefixes.
        scheduler_delay_factor: the delay gate of requests that come without a router; 0 is off.
        scheduling_policy: `prefill_first` computes prompts, or else one token of every running sequence; `mixed` packs
            both into one step, decodes first and prompt chunks into what is left of the budget (seed 004).
        max_consecutive_prefill_steps: under `prefill_first`, after so many steps of prompts running sequences get one.
        gpu_memory_utilization: fraction of a GPU's memory to use.
        kv_cache_memory: bytes for the KV cache on CPU; 0 takes a quarter of the free memory.
        max_model_len: longest prompt plus output in tokens; 0 takes the model's own length.
        deferred_output: schedule a step before the tokens of the one before it have come.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        kernels: `auto` or the name of a back end.
        tensor_parallel_size: ranks that share the model.
        hash_seed: fleet-wide seed of the block hashes.
        bos_token_id: beginning-of-sequence id, None when the model has none.
        eos_token_id: the model's first end-of-sequence id, None when it has none.
        stop_token_ids: the further ids of `generation_config.eos_token_id` (seed 001 section 5.3).
        speculative_config: None when speculation is off.

    Raises:
        InvalidFieldError: a value is out of range.
    """

    model: str = ""
    max_num_seqs: int = 512
    max_num_batched_tokens: int = 16384
    kv_cache_block_size: int = 16
    num_kvcache_blocks: int = 0
    enable_prefix_caching: bool = False
    scheduler_delay_factor: float = 0.0
    scheduling_policy: str = PREFILL_FIRST
    max_consecutive_prefill_steps: int = 4
    gpu_memory_utilization: float = 0.9
    kv_cache_memory: int = 0
    max_model_len: int = 0
    deferred_output: bool = False
    dtype: str = "auto"
    kernels: str = "auto"
    tensor_parallel_size: int = 1
    hash_seed: int = 0
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    speculative_config: SpeculativeConfig | None = None

    def __post_init__(self) -> None:
        size = self.kv_cache_block_size
        _require(size == 1 or (size > 0 and size % 16 == 0), "kv_cache_block_size", size, "1 or a multiple of 16")
        _require(self.max_num_seqs >= 1, "max_num_seqs", self.max_num_seqs, "at least 1")
        _require(self.max_num_batched_tokens >= 1, "max_num_batched_tokens", self.max_num_batched_tokens, "at least 1")
        _require(self.scheduler_delay_factor >= 0, "scheduler_delay_factor", self.scheduler_delay_factor, "0 or more")
        policy, steps = self.scheduling_policy, self.max_consecutive_prefill_steps
        _require(policy in SCHEDULING_POLICIES, "scheduling_policy", policy, " or ".join(SCHEDULING_POLICIES))
        _require(steps >= 1, "max_consecutive_prefill_steps", steps, "at least 1")
        _require(0 < self.gpu_memory_utilization <= 1, "gpu_memory_utilization", self.gpu_memory_utilization, "(0, 1]")

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every end-of-sequence id of the generation config."""
        first = () if self.eos_token_id is None else (self.eos_token_id,)
        return frozenset(first + self.stop_token_ids)


def _require(ok: bool, field: str, value: object, valid: str) -> None:
    if not ok:
        raise InvalidFieldError(field, f"is {value}", valid)
