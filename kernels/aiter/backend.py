"""AMD's own kernels: AITER for what it has and does right, another back end, the Triton one, for everything else.

Only modules of this package call AITER, always through `AiterLibrary.call` with a literal name: tests/kernels reads
the calls from their sources and binds each against every supported version. Only leading arguments, which no version
has moved, go by position; all others by name.

Who does an operation is decided once for each kind of numbers that a model has (dtype, sizes, architecture, AITER's
version), never by what a step holds, and logged with the reason. With `Settings.batch_invariant` AITER does only what
has no sums: its products, attention and norms choose kernels and splits by the number of rows.

What AITER computes was never run by us on a GPU (docs/rocm.md lists what was verified, and how).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import structlog
import torch
from torch.nn.functional import pad

from kernels import float8
from kernels.aiter.blocks import AiterBlockLinear, AiterBlocks
from kernels.aiter.decoder import AiterDecoder
from kernels.aiter.group import AiterGroup
from kernels.aiter.library import AiterLibrary, AiterUnavailableError
from kernels.interface import (
    AttentionMetaData,
    AttentionPlan,
    ClampedSwiglu,
    Decoder,
    ExpertWeights,
    KernelBackend,
    KVSpec,
    PackedExperts,
    PackedFormat,
    PackedHeads,
    PackedLinear,
    QuantizedFormat,
    QuantizedWeight,
    Ranks,
    Routing,
    SampleParams,
    StepGraphs,
    TokenSelection,
)
from kernels.quantized_weight import as_floats
from kernels.triton_backend.kv_cache import DeviceKVCache
from kernels.triton_backend.plan import Shape, StepPlan
from kernels.triton_backend.target import Settings

_log = structlog.get_logger(__name__)

AITER: Final = "aiter"
ARCHITECTURES: Final = ("gfx942", "gfx950")
_NARROW: Final = (torch.bfloat16, torch.float16)
_NEOX: Final = 0
# Numbers of a row, and rows, that AITER's shuffled layout of weights takes together (aiter/ops/shuffle.py).
_SHUFFLED_ROWS, _SHUFFLED_COLUMNS = 16, 32
_LEAST_HEAD, _LARGEST_HEAD = 32, 256
_LEAST_TILE: Final = 16
# Of a rank; aiter/ops/triton/attention/mla.py had no more before 0.1.20.
_LATENT_HEADS: Final = 16
# Numbers of groups that aiter's csrc/kernels/topk_softmax_kernels_group.cu is compiled for.
_GROUPS: Final = (1, 2, 4, 8)
# Numbers of ranks that AITER itself reduces between (CustomAllreduce._SUPPORTED_WORLD_SIZES).
_REDUCED_RANKS: Final = (2, 4, 6, 8)

# Of the environment: AITER's sums over ranks are RCCL's beyond a size, or of parts that are quantized.
SUM_VARIABLES: Final = ("AITER_CUSTOM_AR_MAX_SIZE", "AITER_QUICK_REDUCE_QUANTIZATION")

# Functions that not every supported version has -> the first that does.
SINCE: Final = {
    "aiter.ops.triton.attention.mla:mla_decode_fwd": "0.1.16",
    "aiter.ops.triton.attention.mla:mla_prefill_fwd": "0.1.16",
}


@dataclass(frozen=True)
class Operation:
    """AITER's counterpart of an operation of ours.

    Attributes:
        functions: that it calls.
        row_by_row: whether a row's bits can depend on nothing else: no sum, and one kernel for all numbers of rows.
    """

    functions: tuple[str, ...]
    row_by_row: bool = False


OPERATIONS: Final = {
    "rms_norm": Operation(("aiter.ops.rmsnorm:rmsnorm2d_fwd",)),
    "add_rms_norm": Operation(("aiter.ops.rmsnorm:rmsnorm2d_fwd_with_add",)),
    "layer_norm": Operation(("aiter.ops.norm:layernorm2d_fwd",)),
    "rope": Operation(("aiter.ops.rope:rope_cached_2c_fwd",), row_by_row=True),
    "rope_write": Operation(("aiter.ops.triton.fusions.fused_kv_cache:fused_qk_rope_reshape_and_cache",)),
    "silu_and_mul": Operation(("aiter.ops.activation:silu_and_mul",), row_by_row=True),
    "route": Operation(("aiter.ops.moe_op:topk_softmax", "aiter.ops.topk:biased_grouped_topk")),
    "linear": Operation(("aiter.tuned_gemm:gemm_a16w16",)),
    "quantized_linear": Operation(
        (
            "aiter.ops.shuffle:shuffle_weight",
            "aiter.ops.quant:per_token_quant_hip",
            "aiter.ops.gemm_op_a8w8:gemm_a8w8_bpreshuffle",
        )
    ),
    "block_linear": Operation(("aiter.ops.quant:per_group_quant_hip", "aiter.ops.gemm_op_a8w8:gemm_a8w8_blockscale")),
    "moe": Operation(("aiter.ops.shuffle:shuffle_weight", "aiter.fused_moe:fused_moe")),
    "block_moe": Operation(("aiter.ops.shuffle:shuffle_weight", "aiter.fused_moe:fused_moe")),
    "attention": Operation(("aiter.ops.triton.attention.unified_attention:unified_attention",)),
    "latent_attention": Operation(
        ("aiter.ops.triton.attention.mla:mla_decode_fwd", "aiter.ops.triton.attention.mla:mla_prefill_fwd")
    ),
    "all_reduce": Operation(
        (
            "aiter.ops.communication:init_dist_env",
            "aiter.dist.communication_op:tensor_model_parallel_all_reduce",
            "aiter.dist.parallel_state:graph_capture",
            "aiter.ops.communication:destroy_dist_env",
        )
    ),
}


@dataclass(frozen=True)
class AiterLinear:
    """A weight [N, K] in the model dtype as it was, and a bias [N] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True)
class AiterScaledLinear:
    """A weight in FP8.

    Attributes:
        weight: [N, K], shuffled.
        scale: float32 [N, 1], what its rows are to be multiplied by.
        bias: [N] in the model dtype, or None.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None

    def __post_init__(self) -> None:
        _mark_shuffled(self.weight)


@dataclass(frozen=True)
class AiterExperts:
    """A rank's E experts, in the model dtype or in FP8.

    Attributes:
        first: id of the first.
        gate_up: [E, 2I, H], shuffled.
        down: [E, H, I], shuffled.
        gate_up_scale: of FP8, float32 [E, 2I, 1] of rows or [E, 2I / 128, H / 128] of blocks; else None.
        down_scale: of FP8, float32 [E, H, 1] or [E, H / 128, I / 128]; else None.
        mask: int32 [E + 1], 1 for each and 0 for the experts of other ranks; None where there are no others.
    """

    first: int
    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_scale: torch.Tensor | None
    down_scale: torch.Tensor | None
    mask: torch.Tensor | None

    def __post_init__(self) -> None:
        _mark_shuffled(self.gate_up)
        _mark_shuffled(self.down)

    @property
    def quant_type(self) -> str:
        """The member of AITER's QuantType."""
        if self.gate_up_scale is None:
            return "No"
        return "per_Token" if self.gate_up_scale.shape[1] == self.gate_up.shape[1] else "per_128x128"


def _mark_shuffled(weight: torch.Tensor) -> None:
    """Sets the mark that `shuffle_weight` puts on its result and AITER asks for; a loaded tensor lacks it."""
    cast(Any, weight).is_shuffled = True


class Choices:
    """Choice of the operations that AITER does.

    Args:
        library: what there is of it.
        batch_invariant: leaves only what is row by row.
        other: name of the back end that does the rest.
    """

    def __init__(self, library: AiterLibrary, batch_invariant: bool, other: str) -> None:
        self._missing = {name: _why_missing(name, library, batch_invariant) for name in OPERATIONS}
        self._other = other
        self._taken: dict[Hashable, bool] = {}
        self._logged: set[tuple[str, str | None]] = set()

    def takes(self, operation: str, refusal: Callable[..., str | None], *facts: Hashable) -> bool:
        """True if AITER does an operation on numbers of that kind; the same answer whenever it is asked again.

        Args:
            operation: one of OPERATIONS.
            refusal: gives the reason why not for `facts`; None for none.
            facts: dtypes and sizes, as the model has them.
        """
        key = (operation, *facts)
        taken = self._taken.get(key)
        if taken is None:
            taken = self._taken[key] = self._decide(operation, self._missing[operation] or refusal(*facts))
        return taken

    def _decide(self, operation: str, reason: str | None) -> bool:
        if (operation, reason) not in self._logged:
            self._logged.add((operation, reason))
            because = {} if reason is None else {"reason": reason}
            _log.info("kernels chosen", operation=operation, kernels=self._other if reason else AITER, **because)
        return reason is None


def _why_missing(operation: str, library: AiterLibrary, batch_invariant: bool) -> str | None:
    offered = OPERATIONS[operation]
    if batch_invariant and not offered.row_by_row:
        return "AITER chooses its kernels by the number of rows, and the worker is batch-invariant"
    missing = [function for function in offered.functions if function not in library.functions]
    return f"aiter {library.version} has no {missing[0]}; {SINCE[missing[0]]} is the first" if missing else None


class AiterBackend:
    """KernelBackend on AITER, over another one for what AITER does not do.

    Args:
        fallback: does the rest. Its KV cache is a DeviceKVCache and its plan a StepPlan, as the Triton back end's are.
        library: AITER.
        settings: the architecture, and whether rows must not depend on the batch.
        expert_parallel: whether rows choose experts that other ranks hold.

    Attributes:
        device: see KernelBackend; the other one's.
        fp8: the dtype of E4M3 numbers of this architecture, which weights and the KV cache may have.

    Raises:
        AiterUnavailableError: it has no kernels for this architecture.
    """

    name = AITER
    row_multiple = 1

    def __init__(
        self,
        fallback: KernelBackend,
        library: AiterLibrary,
        settings: Settings,
        expert_parallel: bool = True,
    ) -> None:
        target = settings.target
        if target.name not in ARCHITECTURES:
            allowed = " and ".join(ARCHITECTURES)
            raise AiterUnavailableError(f"AITER's kernels are for {allowed}; this is {target.name}: --kernels triton")
        self.fp8 = target.fp8
        self._fallback = fallback
        self._aiter = library
        self._settings = settings
        self.device = fallback.device
        self._expert_parallel = expert_parallel
        self._choices = Choices(library, settings.batch_invariant, fallback.name)
        self._blocks = AiterBlocks(library, self._choices, self.fp8, self.device)
        # AITER reads scales even where there is nothing to scale; a cache in FP8 has a scale of 1.
        self._one = torch.ones(1, dtype=torch.float32, device=self.device)
        # Whether it adds up over ranks.
        self._reduces = False

    @property
    def description(self) -> str:
        """See KernelBackend: with the architecture, as `aiter:gfx942`."""
        return f"{AITER}:{self._settings.target.name}"

    @property
    def batch_invariant(self) -> bool:
        """See KernelBackend: if the settings ask for it, and the other back end is."""
        return self._settings.batch_invariant and self._fallback.batch_invariant

    @property
    def graphs(self) -> StepGraphs | None:
        """See KernelBackend: the other back end's, whose plan AITER's calls take."""
        return self._fallback.graphs

    @property
    def numerics(self) -> tuple[object, ...]:
        """See KernelBackend."""
        settings = self._settings
        own = (AITER, self._aiter.version, settings.target.name, settings.batch_invariant, torch.__version__)
        sums = tuple(os.environ.get(name) for name in SUM_VARIABLES) if self._reduces else ()
        return (*own, self._reduces, *sums, *self._fallback.numerics)

    @property
    def layout(self) -> tuple[object, ...]:
        """See KernelBackend: what is shuffled follows from the settings."""
        settings = self._settings
        own = (AITER, self._aiter.version, settings.target.name, settings.batch_invariant, self._expert_parallel)
        return (*own, *self._fallback.layout)

    def join_ranks(self, ranks: Ranks) -> AiterGroup | None:
        """See KernelBackend."""
        self._reduces = self._choices.takes("all_reduce", _refuse_ranks, ranks.size, ranks.in_order)
        return AiterGroup(self._aiter, ranks, self.device) if self._reduces else None

    def adopt(self, packed: Any) -> None:
        """See KernelBackend."""
        if not isinstance(packed, AiterLinear | AiterScaledLinear | AiterBlockLinear | AiterExperts):
            self._fallback.adopt(packed)

    def is_fast(self, dtype: torch.dtype) -> bool:
        """See KernelBackend."""
        return dtype in _NARROW or self._fallback.is_fast(dtype)

    def packed_format(self, name: str, dtype: torch.dtype) -> PackedFormat | None:
        """See KernelBackend: rows and weights in FP8 are AITER's; all else is the other's."""
        if name == "w8a8_fp8" and dtype in _NARROW:
            return PackedFormat(self.fp8, quantizes_rows=True)
        return self._fallback.packed_format(name, dtype)

    def keeps_quantized(self, stored: QuantizedFormat, dtype: torch.dtype) -> bool:
        """See KernelBackend: what the other one does."""
        return self._fallback.keeps_quantized(stored, dtype)

    def pack_linear(
        self,
        weight: torch.Tensor | QuantizedWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        packed_format: PackedFormat | None = None,
    ) -> PackedLinear:
        """See KernelBackend."""
        if isinstance(weight, QuantizedWeight):
            if self._blocks.takes_linear(weight, dtype, packed_format):
                return self._blocks.pack_linear(weight, bias, dtype)
            return self._fallback.pack_linear(weight, bias, dtype, packed_format)
        operation = "linear" if packed_format is None else "quantized_linear"
        if not self._choices.takes(operation, _refuse_linear, dtype, packed_format, self.fp8, *weight.shape):
            return self._fallback.pack_linear(weight, bias, dtype, packed_format)
        own_bias = None if bias is None else bias.to(self.device, dtype)
        if packed_format is None:
            return AiterLinear(weight.to(self.device, dtype).contiguous(), own_bias)
        return AiterScaledLinear(*self._scaled(weight.to(self.device)), own_bias)

    def _scaled(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A weight [..., N, K] as FP8, shuffled, and the scale of its rows, float32 [..., N, 1]."""
        wide = weight.float()
        scale = (wide.abs().amax(-1, keepdim=True) / torch.finfo(self.fp8).max).clamp_(min=1e-12)
        return self._shuffled(float8.saturated(wide / scale, self.fp8)), scale

    def _shuffled(self, weight: torch.Tensor) -> torch.Tensor:
        shuffled: torch.Tensor = self._aiter.call("aiter.ops.shuffle:shuffle_weight", weight, layout=(16, 16))
        return shuffled

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """See KernelBackend."""
        if not isinstance(packed, AiterLinear | AiterScaledLinear | AiterBlockLinear):
            return self._fallback.linear(x, packed)
        if not len(x):
            return x.new_empty(0, len(packed.weight))
        if isinstance(packed, AiterBlockLinear):
            return self._blocks.linear(x, packed)
        return self._plain(x, packed) if isinstance(packed, AiterLinear) else self._fp8(x, packed)

    def _plain(self, x: torch.Tensor, packed: AiterLinear) -> torch.Tensor:
        out: torch.Tensor = self._aiter.call(
            "aiter.tuned_gemm:gemm_a16w16", x, packed.weight, bias=packed.bias, otype=x.dtype
        )
        return out

    def _fp8(self, x: torch.Tensor, packed: AiterScaledLinear) -> torch.Tensor:
        rounded, scale = self._aiter.call(
            "aiter.ops.quant:per_token_quant_hip", x.contiguous(), quant_dtype=packed.weight.dtype
        )
        out: torch.Tensor = self._aiter.call(
            "aiter.ops.gemm_op_a8w8:gemm_a8w8_bpreshuffle", rounded, packed.weight, scale, packed.scale, dtype=x.dtype
        )
        return out if packed.bias is None else out.add_(packed.bias)

    def packed_rows(self, packed: PackedLinear, ids: torch.Tensor) -> torch.Tensor:
        """See KernelBackend."""
        if isinstance(packed, AiterLinear):
            return packed.weight.index_select(0, ids)
        return self._fallback.packed_rows(packed, ids)

    def linear_argmax(self, x: torch.Tensor, packed: PackedLinear, limit: int) -> torch.Tensor:
        """See KernelBackend."""
        if not isinstance(packed, AiterLinear | AiterScaledLinear | AiterBlockLinear):
            return self._fallback.linear_argmax(x, packed, limit)
        return self.argmax(self.linear(x, packed), limit)

    def pack_heads(self, weight: torch.Tensor, dtype: torch.dtype) -> PackedHeads:
        """See KernelBackend: not AITER's."""
        return self._fallback.pack_heads(weight, dtype)

    def head_linear(self, x: torch.Tensor, packed: PackedHeads) -> torch.Tensor:
        """See KernelBackend: not AITER's."""
        return self._fallback.head_linear(x, packed)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See KernelBackend, but for the rounding before the weight, which AITER leaves out."""
        if not x.numel() or not self._choices.takes("rms_norm", _refuse_dtype, x.dtype):
            return self._fallback.rms_norm(x, weight, eps)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out: torch.Tensor = self._aiter.call("aiter.ops.rmsnorm:rmsnorm2d_fwd", rows, weight, eps)
        return out.view(x.shape)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See KernelBackend, but for the rounding before the weight, which AITER leaves out."""
        if not x.numel() or not self._choices.takes("add_rms_norm", _refuse_dtype, x.dtype):
            return self._fallback.add_rms_norm(x, residual, weight, eps)
        x, residual = x.contiguous(), residual.contiguous()
        out, total = torch.empty_like(x), torch.empty_like(x)
        self._aiter.call("aiter.ops.rmsnorm:rmsnorm2d_fwd_with_add", out, x, residual, total, weight, eps)
        return out, total

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        """See KernelBackend."""
        if not x.numel() or not self._choices.takes("layer_norm", _refuse_dtype, x.dtype):
            return self._fallback.layer_norm(x, weight, bias, eps)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        weight, bias = weight.to(x.dtype), bias.to(x.dtype)
        out: torch.Tensor = self._aiter.call("aiter.ops.norm:layernorm2d_fwd", rows, weight, bias, epsilon=eps)
        return out.view(x.shape)

    def rope(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See KernelBackend. To AITER rows are a sequence of T steps with a batch of 1: [T, 1, heads, D].

        Then cos and sin [T, 1, 1, R/2] are each row's own, and no positions are needed.
        """
        if not q.numel() or not self._choices.takes("rope", _refuse_dtype, q.dtype):
            return self._fallback.rope(q, k, cos, sin)
        rotated_q, rotated_k = self._aiter.call(
            "aiter.ops.rope:rope_cached_2c_fwd",
            q.unsqueeze(1),
            k.unsqueeze(1),
            cos.unsqueeze(1),
            sin.unsqueeze(1),
            _NEOX,
            reuse_freqs_front_part=True,
            nope_first=False,
        )
        return rotated_q.squeeze(1), rotated_k.squeeze(1)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """See KernelBackend."""
        if not x.numel() or not self._choices.takes("silu_and_mul", _refuse_dtype, x.dtype):
            return self._fallback.silu_and_mul(x)
        out = x.new_empty(len(x), x.shape[1] // 2)
        self._aiter.call("aiter.ops.activation:silu_and_mul", out, x.contiguous())
        return out

    def route(
        self, logits: torch.Tensor, routing: Routing, correction_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See KernelBackend; of chosen experts that are equal the first is AITER's choice."""
        facts = (routing, logits.shape[1], correction_bias is not None)
        if not len(logits) or not self._choices.takes("route", _refuse_route, *facts):
            return self._fallback.route(logits, routing, correction_bias)
        weights = logits.new_empty(len(logits), routing.top_k)
        ids = torch.empty_like(weights, dtype=torch.int32)
        if correction_bias is None:
            self._route_by_softmax(logits, weights, ids, routing)
        else:
            self._aiter.call(
                "aiter.ops.topk:biased_grouped_topk",
                logits,
                correction_bias,
                weights,
                ids,
                routing.num_groups,
                routing.top_groups,
                routing.renormalize,
                routed_scaling_factor=routing.scale,
            )
        return ids.long(), weights

    def _route_by_softmax(
        self, logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, routing: Routing
    ) -> None:
        """The softmax over the chosen is that over all, renormalized."""
        renormalize = routing.renormalize or routing.scoring == "topk_softmax"
        scratch = torch.empty_like(ids)
        self._aiter.call("aiter.ops.moe_op:topk_softmax", weights, ids, scratch, logits, renormalize)
        if routing.scoring == "softmax":
            weights.mul_(routing.scale)

    def pack_experts(
        self,
        weights: Iterable[ExpertWeights],
        first: int,
        clamp: ClampedSwiglu | None,
        dtype: torch.dtype,
        packed_format: PackedFormat | None = None,
    ) -> PackedExperts:
        """See KernelBackend."""
        experts = iter(weights)
        model = next(experts, None)
        if model is None:
            return self._fallback.pack_experts((), first, clamp, dtype, packed_format)
        plain = clamp is None and model.gate_up_bias is None and model.down_bias is None
        experts = chain([model], experts)
        if isinstance(model.gate_up, QuantizedWeight) or isinstance(model.down, QuantizedWeight):
            if not self._blocks.takes_experts(model, plain, dtype, packed_format):
                return self._fallback.pack_experts(experts, first, clamp, dtype, packed_format)
            return self._stacked_experts(first, map(self._blocks.pack_expert, experts))
        facts = (dtype, packed_format, self.fp8, *model.down.shape, plain)
        if not self._choices.takes("moe", _refuse_experts, *facts):
            return self._fallback.pack_experts(experts, first, clamp, dtype, packed_format)
        return self._stacked_experts(first, (self._pack_expert(each, dtype, packed_format) for each in experts))

    def _stacked_experts(self, first: int, experts: Iterable[tuple[torch.Tensor | None, ...]]) -> AiterExperts:
        """Two weights of each expert, each followed by its scales."""
        pairs = list(experts)
        gate_up, gate_up_scale, down, down_scale = (_stacked(parts) for parts in zip(*pairs, strict=True))
        assert gate_up is not None
        assert down is not None
        return AiterExperts(first, gate_up, down, gate_up_scale, down_scale, self._mask(len(pairs)))

    def _pack_expert(
        self, expert: ExpertWeights, dtype: torch.dtype, packed_format: PackedFormat | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Its two weights, shuffled, each followed by the scale of its rows, None if it has none."""
        weights = [as_floats(weight).to(self.device) for weight in (expert.gate_up, expert.down)]
        if packed_format is None:
            gate_up, down = (self._shuffled(weight.to(dtype).contiguous()) for weight in weights)
            return gate_up, None, down, None
        return (*self._scaled(weights[0]), *self._scaled(weights[1]))

    def _mask(self, num_experts: int) -> torch.Tensor | None:
        if not self._expert_parallel:
            return None
        mask = torch.ones(num_experts + 1, dtype=torch.int32, device=self.device)
        mask[-1] = 0
        return mask

    def moe(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, packed: PackedExperts
    ) -> torch.Tensor:
        """See KernelBackend; the order of the sum is AITER's."""
        if not isinstance(packed, AiterExperts):
            return self._fallback.moe(x, topk_ids, topk_weights, packed)
        if not len(x):
            return torch.empty_like(x)
        ids, weights = _local(topk_ids, topk_weights, packed)
        out: torch.Tensor = self._aiter.call(
            "aiter.fused_moe:fused_moe",
            x.contiguous(),
            packed.gate_up,
            packed.down,
            weights,
            ids,
            expert_mask=packed.mask,
            activation=self._aiter.enum("ActivationType", "Silu"),
            quant_type=self._aiter.enum("QuantType", packed.quant_type),
            w1_scale=packed.gate_up_scale,
            w2_scale=packed.down_scale,
        )
        return out

    def allocate_kv(
        self, spec: KVSpec, num_layers: int, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> DeviceKVCache:
        """See KernelBackend."""
        cache: DeviceKVCache = self._fallback.allocate_kv(spec, num_layers, num_blocks, block_size, dtype)
        return cache

    def touch_kv(self, cache: DeviceKVCache, progress: Callable[[int, int], None]) -> None:
        """See KernelBackend: the device has given them."""

    def plan_attention(self, metadata: AttentionMetaData, cache: DeviceKVCache, num_heads: int) -> AttentionPlan:
        """See KernelBackend."""
        return self._fallback.plan_attention(metadata, cache, num_heads)

    def write_kv(
        self, cache: DeviceKVCache, layer: int, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetaData
    ) -> None:
        """See KernelBackend: not AITER's. Models write in `fuse_decoder` or `write_latent`."""
        self._fallback.write_kv(cache, layer, k, v, metadata)

    def attention(
        self,
        q: torch.Tensor,
        cache: DeviceKVCache,
        layer: int,
        metadata: AttentionMetaData,
        scale: float,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See KernelBackend."""
        facts = (q.dtype, cache.data.dtype, self.fp8, cache.head_dim)
        if not q.numel() or not self._choices.takes("attention", _refuse_attention, *facts):
            return self._fallback.attention(q, cache, layer, metadata, scale, window, sinks)
        plan: StepPlan = metadata.plan
        # Rows of padding are not written.
        out = q.new_zeros(q.shape)
        stored_scale = self._stored_scale(cache)
        self._aiter.call(
            "aiter.ops.triton.attention.unified_attention:unified_attention",
            q,
            cache.keys(layer),
            cache.values(layer),
            out,
            plan.cu_seqlens_q,
            _max_seqlen_q(plan.shape),
            plan.seq_lens,
            plan.shape.max_seqlen_k,
            scale,
            True,
            (-1, -1) if window is None else (window - 1, 0),
            plan.block_tables,
            0.0,
            None,
            stored_scale,
            stored_scale,
            sinks=sinks,
        )
        return out

    def _stored_scale(self, cache: DeviceKVCache) -> torch.Tensor | None:
        return self._one if cache.data.dtype == self.fp8 else None

    def write_latent(self, cache: DeviceKVCache, layer: int, k: torch.Tensor, metadata: AttentionMetaData) -> None:
        """See KernelBackend: not AITER's, whose function takes latent and rotated part apart."""
        self._fallback.write_latent(cache, layer, k, metadata)

    def write_index(self, cache: DeviceKVCache, layer: int, k: torch.Tensor, metadata: AttentionMetaData) -> None:
        """See KernelBackend: not AITER's."""
        self._fallback.write_index(cache, layer, k, metadata)

    def select_tokens(
        self, q: torch.Tensor, weights: torch.Tensor, cache: DeviceKVCache, layer: int, metadata: AttentionMetaData
    ) -> TokenSelection | None:
        """See KernelBackend: not AITER's."""
        return self._fallback.select_tokens(q, weights, cache, layer, metadata)

    def latent_attention(
        self,
        q: torch.Tensor,
        cache: DeviceKVCache,
        layer: int,
        metadata: AttentionMetaData,
        scale: float,
        selection: TokenSelection | None,
    ) -> torch.Tensor:
        """See KernelBackend: AITER's where all tokens are attended to."""
        if selection is not None or not q.numel() or not self._takes_latent(q, cache):
            return self._fallback.latent_attention(q, cache, layer, metadata, scale, selection)
        plan: StepPlan = metadata.plan
        out = q.new_zeros(*q.shape[:2], cache.value_dim)
        if plan.shape.max_seqlen_q == 1 and plan.shape.seqs == plan.shape.rows:
            self._decode_latent(q, cache, layer, plan, scale, out)
        else:
            self._prefill_latent(q, cache, layer, plan, scale, out)
        return out

    def _takes_latent(self, q: torch.Tensor, cache: DeviceKVCache) -> bool:
        sizes = (cache.value_dim, cache.head_dim - cache.value_dim, cache.block_size)
        facts = (q.dtype, cache.data.dtype, self.fp8, q.shape[1], sizes)
        return self._choices.takes("latent_attention", _refuse_latent, *facts)

    def _decode_latent(
        self, q: torch.Tensor, cache: DeviceKVCache, layer: int, plan: StepPlan, scale: float, out: torch.Tensor
    ) -> None:
        """Keys split among programs; takes it that all sequences have equally many rows."""
        self._aiter.call(
            "aiter.ops.triton.attention.mla:mla_decode_fwd",
            q,
            cache.keys(layer),
            out,
            plan.cu_seqlens_q,
            plan.seq_lens,
            plan.shape.max_seqlen_k,
            plan.block_tables,
            scale,
            kv_lora_rank=cache.value_dim,
            qk_rope_head_dim=cache.head_dim - cache.value_dim,
            causal=True,
            q_descale=None,
            kv_descale=self._stored_scale(cache),
        )

    def _prefill_latent(
        self, q: torch.Tensor, cache: DeviceKVCache, layer: int, plan: StepPlan, scale: float, out: torch.Tensor
    ) -> None:
        """Any mixture of sequences."""
        self._aiter.call(
            "aiter.ops.triton.attention.mla:mla_prefill_fwd",
            q,
            cache.keys(layer),
            out,
            plan.cu_seqlens_q,
            plan.seq_lens,
            plan.shape.max_seqlen_k,
            plan.block_tables,
            scale,
            kv_lora_rank=cache.value_dim,
            qk_rope_head_dim=cache.head_dim - cache.value_dim,
            causal=True,
            q_descale=None,
            kv_descale=self._stored_scale(cache),
        )

    def fuse_decoder(self, decoder: Decoder, kv_dtype: torch.dtype) -> AiterDecoder:
        """See KernelBackend."""
        return AiterDecoder(decoder, self, self._aiter, self._choices)

    def argmax(self, logits: torch.Tensor, limit: int) -> torch.Tensor:
        """See KernelBackend."""
        return self._fallback.argmax(logits, limit)

    def fetch(self, ids: torch.Tensor) -> Callable[[], list[int]]:
        """See KernelBackend."""
        return self._fallback.fetch(ids)

    def sample(
        self,
        logits: torch.Tensor,
        params: SampleParams,
        seeds: npt.NDArray[np.uint64],
        positions: npt.NDArray[np.int64],
        choices: npt.NDArray[np.int64],
    ) -> torch.Tensor:
        """See KernelBackend: never AITER's, whose samplers take no seeds."""
        return self._fallback.sample(logits, params, seeds, positions, choices)


def _local(ids: torch.Tensor, weights: torch.Tensor, packed: AiterExperts) -> tuple[torch.Tensor, torch.Tensor]:
    """Chosen experts by their number among the packed ones, int32, and their weights.

    Experts of other ranks have the number behind the last, which is masked. Where there may be any, AITER expects one
    more slot that is: since 0.1.16 it looks its settings up by one less (aiter/fused_moe.py, `is_ep`). 0.1.13 looks
    them up by all slots, so that it does not find those tuned for the model and takes its own defaults.
    """
    local = ids - packed.first
    if packed.mask is not None:
        count = len(packed.gate_up)
        inside = torch.where((local >= 0) & (local < count), local, count)
        local, weights = pad(inside, (0, 1), value=count), pad(weights, (0, 1))
    return local.int(), weights


def _stacked(parts: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
    """Parts of all experts as one tensor; None where they are None."""
    tensors = [part for part in parts if part is not None]
    return torch.stack(tensors) if tensors else None


def _max_seqlen_q(shape: Shape) -> int:
    """1 makes AITER write a row for each sequence, those of padding too: there have to be as many rows."""
    return max(2, shape.max_seqlen_q) if shape.seqs > shape.rows else shape.max_seqlen_q


def _refuse_dtype(dtype: torch.dtype) -> str | None:
    return None if dtype in _NARROW else f"AITER's kernels are for bfloat16 and float16, not {_text(dtype)}"


def _refuse_stored(dtype: torch.dtype, stored: torch.dtype, fp8: torch.dtype) -> str | None:
    if stored in (dtype, fp8):
        return _refuse_dtype(dtype)
    return f"AITER's KV cache has the model's dtype or {_text(fp8)}, not {_text(stored)}"


def _refuse_attention(dtype: torch.dtype, stored: torch.dtype, fp8: torch.dtype, head_dim: int) -> str | None:
    if not _LEAST_HEAD <= head_dim <= _LARGEST_HEAD or head_dim % _LEAST_TILE:
        return f"AITER's attention is for heads of {_LEAST_HEAD} to {_LARGEST_HEAD}, by 16, not {head_dim}"
    return _refuse_stored(dtype, stored, fp8)


def _refuse_latent(
    dtype: torch.dtype, stored: torch.dtype, fp8: torch.dtype, num_heads: int, sizes: tuple[int, ...]
) -> str | None:
    if num_heads > _LATENT_HEADS:
        return f"AITER's latent attention is for {_LATENT_HEADS} heads of a rank at most, not {num_heads}"
    if any(size < _LEAST_TILE or size & (size - 1) for size in sizes):
        return f"AITER's latent attention is for powers of 2 from 16: latent, rotated part and block are {sizes}"
    return _refuse_stored(dtype, stored, fp8)


def _refuse_linear(
    dtype: torch.dtype, packed_format: PackedFormat | None, fp8: torch.dtype, rows: int, columns: int
) -> str | None:
    return _refuse_dtype(dtype) or _refuse_packed(packed_format, fp8, rows, columns, packed_format is not None)


def _refuse_packed(
    packed_format: PackedFormat | None, fp8: torch.dtype, rows: int, columns: int, shuffled: bool
) -> str | None:
    if packed_format is not None and packed_format != PackedFormat(fp8, quantizes_rows=True):
        what = "weights and rows" if packed_format.quantizes_rows else "weights only"
        return f"AITER has weights and rows in {_text(fp8)}, not {what} in {_text(packed_format.dtype)}"
    if shuffled and (rows % _SHUFFLED_ROWS or columns % _SHUFFLED_COLUMNS):
        return f"AITER shuffles weights of multiples of 16 x 32, not {rows} x {columns}"
    return None


def _refuse_experts(
    dtype: torch.dtype, packed_format: PackedFormat | None, fp8: torch.dtype, hidden: int, inner: int, plain: bool
) -> str | None:
    if not plain:
        return "AITER's mixture of experts is for silu without biases"
    gate_up = _refuse_packed(packed_format, fp8, 2 * inner, hidden, shuffled=True)
    return _refuse_dtype(dtype) or gate_up or _refuse_packed(packed_format, fp8, hidden, inner, shuffled=True)


def _refuse_route(routing: Routing, num_experts: int, corrected: bool) -> str | None:
    if routing.scoring != "sigmoid":
        grouped = routing.num_groups > 1
        return "AITER's softmax routing has other groups, and no correction" if grouped or corrected else None
    if not corrected or not routing.renormalize:
        return "AITER's sigmoid routing has a correction, and weights that are renormalized"
    if routing.num_groups not in _GROUPS or num_experts % routing.num_groups:
        return f"AITER's sigmoid routing has {_GROUPS} groups, not {routing.num_groups} of {num_experts} experts"
    return None


def _refuse_ranks(size: int, in_order: bool) -> str | None:
    if size not in _REDUCED_RANKS:
        return f"AITER adds up over 2, 4, 6 or 8 ranks, not {size}"
    return None if in_order else "AITER adds up over ranks of one machine, each on the GPU of its number"


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
