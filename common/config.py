"""The engine's configuration, its defaults and their validation.

Fields that a later version gives a meaning have one allowed value so far, their default; others are refused, so that
no option is without effect. Frozen: what becomes known later (pool size, end-of-sequence ids) is filled in with
`dataclasses.replace`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from common.params.checks import require as _require
from common.params.checks import require_one_of, require_types
from common.params.config_parts import (
    DTYPES,
    KV_CACHE_DTYPES,
    MIXED,
    PREFILL_FIRST,
    QUANTIZE,
    QUANTIZE_NO,
    SCHEDULING_POLICIES,
    WEIGHT_FORMATS,
    CompilationConfig,
    LayerQuantConfig,
    ParallelConfig,
    QuantizationConfig,
    SpeculativeConfig,
    weight_formats,
)
from common.params.options.table import library_default

__all__ = [
    "DTYPES",
    "KV_CACHE_DTYPES",
    "MIXED",
    "PREFILL_FIRST",
    "QUANTIZE",
    "QUANTIZE_NO",
    "SCHEDULING_POLICIES",
    "CompilationConfig",
    "Config",
    "LayerQuantConfig",
    "ParallelConfig",
    "QuantizationConfig",
    "SpeculativeConfig",
]


@dataclass(frozen=True)
class Config:
    """Configuration of the scheduler, the block manager and the model runner.

    Examples:
        ```python
        config = Config(model="deploy/demo/checkpoint", max_num_seqs=64, kv_cache_memory=1 << 28)
        engine = LLMEngine(config)
        ```

    Attributes:
        model: folder of the checkpoint.
        max_num_seqs: most sequences in the running set.
        max_num_batched_tokens: most tokens computed in one step.
        kv_cache_block_size: tokens per KV block; 1 or a multiple of 16.
        num_kvcache_blocks: blocks in the pool; 0 until the pool has been sized.
        enable_prefix_caching: share full blocks between sequences with equal prefixes.
        scheduler_delay_factor: the delay gate of requests that come without a router; 0 is off.
        scheduling_policy: `prefill_first` computes prompts, or else one token of every running sequence; `mixed` packs
            both into one step, decodes first and prompt chunks into what is left of the budget.
        max_consecutive_prefill_steps: under `prefill_first`, after so many steps of prompts running sequences get one.
        prefill_slice_s: longest step with prompts while any sequence decodes, seconds; at least five usual decode
            steps. 0 bounds steps by tokens alone.
        gpu_memory_utilization: fraction of a GPU's memory to use.
        kv_cache_memory: bytes for the KV cache on CPU; 0 takes a quarter of the free memory.
        max_model_len: longest prompt plus output in tokens; 0 takes the model's own length.
        deferred_output: schedule a step before the tokens of the one before it have come.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        kv_cache_dtype: of the KV cache: `auto`, the model's; or `bfloat16`, `float16` or `fp8` (E4M3 with a scale of
            1): numbers beyond its range become the largest.
        kernels: `auto` or the name of a back end.
        weights_cache: folder of packed weights that processes share and later starts map; empty keeps none.
        cpu_isa: instruction set of the native CPU kernels, or `auto`.
        batch_invariant: whether tiles and splits of GPU kernels are chosen without looking at how much work there is,
            so that a token never depends on the batch. CPU kernels always do so.
        enforce_eager: whether decode steps run kernel by kernel on a GPU, instead of as captured graphs.
        quantize: `int8`, or `fp8` (E4M3) on GPUs, brings the weights of matrix products to 8 bits when they are loaded,
            with a scale for each output and 128 inputs; `int4` to 4, with one for 32. `w8a8_int8` and `w8a8_fp8`, on
            GPUs, have one for each output, and bring each row that is multiplied to 8 bits too. `no` keeps `dtype`.
        tensor_parallel_size: ranks that share the model, each a process of its own when there are several.
        enable_expert_parallel: whether each rank holds some experts of a mixture whole, instead of a part of each.
        parallel_config: engines in lockstep, whose ranks share the experts.
        compilation_config: which decode steps are captured into graphs on a GPU; nothing is compiled so far.
        quant_config: how the weights of a checkpoint are quantized whose config.json does not say so. They are
            brought to `dtype` when they are loaded, where the kernels do not multiply them as they are.
        hash_seed: fleet-wide seed of the block hashes.
        kv_digests: share of the cached blocks whose contents are digested, for routers to compare between workers; 0 is
            none.
        kv_tiers: where cached blocks go besides the pool, as in `--kv-tiers`; empty keeps them in the pool alone.
        enable_constraints: whether sequences may have grammars, for which the vocabulary is kept in a form of its own.
        bos_token_id: beginning-of-sequence id, None when the model has none.
        eos_token_id: the model's first end-of-sequence id, None when it has none.
        stop_token_ids: the further ids of `generation_config.eos_token_id`.
        speculative_config: None when speculation is off.

    Raises:
        InvalidFieldError: a value is out of range, or no version so far does what it says. Names the field, the value
            and what is allowed.
    """

    model: str = library_default("model")
    max_num_seqs: int = library_default("max_num_seqs")
    max_num_batched_tokens: int = library_default("max_num_batched_tokens")
    kv_cache_block_size: int = library_default("kv_cache_block_size")
    num_kvcache_blocks: int = 0
    enable_prefix_caching: bool = library_default("enable_prefix_caching")
    scheduler_delay_factor: float = library_default("scheduler_delay_factor")
    scheduling_policy: str = library_default("scheduling_policy")
    max_consecutive_prefill_steps: int = 4
    prefill_slice_s: float = library_default("prefill_slice_s")
    gpu_memory_utilization: float = library_default("gpu_memory_utilization")
    kv_cache_memory: int = library_default("kv_cache_memory")
    max_model_len: int = library_default("max_model_len")
    deferred_output: bool = False
    dtype: str = library_default("dtype")
    kv_cache_dtype: str = library_default("kv_cache_dtype")
    kernels: str = library_default("kernels")
    weights_cache: str = library_default("weights_cache")
    cpu_isa: str = library_default("cpu_isa")
    batch_invariant: bool = library_default("batch_invariant")
    enforce_eager: bool = library_default("enforce_eager")
    quantize: str = library_default("quantize")
    tensor_parallel_size: int = library_default("tensor_parallel_size")
    enable_expert_parallel: bool = library_default("enable_expert_parallel")
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)
    quant_config: QuantizationConfig = field(default_factory=QuantizationConfig)
    hash_seed: int = library_default("hash_seed")
    kv_digests: float = library_default("kv_digests")
    kv_tiers: str = library_default("kv_tiers")
    enable_constraints: bool = library_default("enable_constraints")
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    speculative_config: SpeculativeConfig | None = None

    def __post_init__(self) -> None:
        require_types(self)
        size = self.kv_cache_block_size
        _require(size == 1 or (size > 0 and size % 16 == 0), "kv_cache_block_size", size, "1 or a multiple of 16")
        _require(self.max_num_seqs >= 1, "max_num_seqs", self.max_num_seqs, "at least 1")
        _require(self.max_num_batched_tokens >= 1, "max_num_batched_tokens", self.max_num_batched_tokens, "at least 1")
        _require(self.scheduler_delay_factor >= 0, "scheduler_delay_factor", self.scheduler_delay_factor, "0 or more")
        require_one_of("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        steps = self.max_consecutive_prefill_steps
        _require(steps >= 1, "max_consecutive_prefill_steps", steps, "at least 1")
        slice_s = self.prefill_slice_s
        _require(slice_s >= 0 and math.isfinite(slice_s), "prefill_slice_s", slice_s, "a finite number, 0 or more")
        ranks = self.tensor_parallel_size
        _require(ranks >= 1, "tensor_parallel_size", ranks, "at least 1")
        engines, experts = self.parallel_config.data_parallel_size, self.enable_expert_parallel
        _require(not experts or ranks * engines > 1, "enable_expert_parallel", experts, "False with one rank")
        name = "parallel_config.data_parallel_size"
        _require(experts or engines == 1, name, engines, "1 without enable_expert_parallel: run more workers instead")
        _require(0 < self.gpu_memory_utilization <= 1, "gpu_memory_utilization", self.gpu_memory_utilization, "(0, 1]")
        delay = self.scheduler_delay_factor
        _require(math.isfinite(delay), "scheduler_delay_factor", delay, "a finite number")
        for name in ("num_kvcache_blocks", "kv_cache_memory", "max_model_len"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        require_one_of("dtype", self.dtype, ("auto", *DTYPES))
        require_one_of("quantize", self.quantize, QUANTIZE)
        agrees = not (self.enforce_eager and self.compilation_config.cudagraph_capture_sizes)
        _require(agrees, "enforce_eager", True, "False with compilation_config.cudagraph_capture_sizes")
        _require(0 <= self.kv_digests <= 1, "kv_digests", self.kv_digests, "[0, 1]")
        if self.kv_tiers:
            _require(self.enable_prefix_caching, "kv_tiers", self.kv_tiers, "empty without prefix caching")
            _require(self.batch_invariant, "kv_tiers", self.kv_tiers, "empty without batch_invariant")
        require_one_of("kv_cache_dtype", self.kv_cache_dtype, ("auto", *KV_CACHE_DTYPES))
        _require(0 <= self.hash_seed < 1 << 64, "hash_seed", self.hash_seed, "an unsigned 64-bit number")
        for name in ("bos_token_id", "eos_token_id"):
            token_id = getattr(self, name)
            _require(token_id is None or token_id >= 0, name, token_id, "None, or 0 or more")
        _require(all(token >= 0 for token in self.stop_token_ids), "stop_token_ids", self.stop_token_ids, "0 or more")
        self._refuse_unbuilt()

    def _refuse_unbuilt(self) -> None:
        """Refuses what no code acts on yet."""
        level = self.compilation_config.level
        _require(level == 0, "compilation_config.level", level, "0: compilation is not built yet")
        for layer in self.quant_config.layer_configs:
            known = layer.quant_type == "no" or layer.quant_type in WEIGHT_FORMATS.get(layer.quant_dtype, ())
            _require(known, "quant_config", layer, weight_formats())

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every end-of-sequence id of the generation config."""
        first = () if self.eos_token_id is None else (self.eos_token_id,)
        return frozenset(first + self.stop_token_ids)

    @property
    def can_constrain(self) -> bool:
        """True if sequences may have grammars, which end with an end-of-sequence token."""
        return self.enable_constraints and bool(self.eos_token_ids)
