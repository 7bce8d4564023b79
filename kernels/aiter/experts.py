"""Mixtures of experts by AITER, which chooses the first of equal experts and the order of the sum."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Final

import torch
from torch.nn.functional import pad
from typing_extensions import override

from kernels.aiter.blocks import AiterBlocks
from kernels.aiter.dispatch import Choices, refuse_dtype, refuse_packed
from kernels.aiter.library import AiterLibrary
from kernels.aiter.weights import mark_shuffled, scaled, shuffled
from kernels.grouped_weight import GroupedWeight, JoinedWeight
from kernels.interface import (
    ClampedSwiglu,
    ExpertOps,
    ExpertWeights,
    KernelBackend,
    PackedExperts,
    PackedFormat,
    QuantizedWeight,
    Routing,
)
from kernels.quantized_weight import as_floats

# Numbers of groups that aiter's csrc/kernels/topk_softmax_kernels_group.cu is compiled for.
_GROUPS: Final = (1, 2, 4, 8)


@dataclass(frozen=True)
class AiterExperts:
    """A rank's E experts, in the model dtype or in FP8.

    Attributes:
        first: id of the first.
        gate_up: [E, 2I, H], shuffled.
        down: [E, H, I], shuffled.
        gate_up_scale: for FP8, float32 [E, 2I, 1] of rows or [E, 2I / 128, H / 128] of blocks; else None.
        down_scale: for FP8, float32 [E, H, 1] or [E, H / 128, I / 128]; else None.
        mask: int32 [E + 1], 1 for each of them and 0 for the experts of other ranks; None if there are no others.
    """

    first: int
    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_scale: torch.Tensor | None
    down_scale: torch.Tensor | None
    mask: torch.Tensor | None

    def __post_init__(self) -> None:
        mark_shuffled(self.gate_up)
        mark_shuffled(self.down)

    @property
    def quant_type(self) -> str:
        """Member of AITER's QuantType for these experts."""
        if self.gate_up_scale is None:
            return "No"
        return "per_Token" if self.gate_up_scale.shape[1] == self.gate_up.shape[1] else "per_128x128"


class AiterExpertOps(ExpertOps):
    """Mixtures of experts by AITER, or by the back end `other` if AITER lacks the case.

    Args:
        library: AITER.
        choices: decides which operations are AITER's.
        blocks: experts that are stored in blocks.
        fp8: the FP8 of the architecture.
        expert_parallel: True if rows choose experts that other ranks hold.
        other: the back end for the other operations.
    """

    def __init__(
        self,
        library: AiterLibrary,
        choices: Choices,
        blocks: AiterBlocks,
        fp8: torch.dtype,
        expert_parallel: bool,
        other: KernelBackend,
    ) -> None:
        self._aiter = library
        self._choices = choices
        self._blocks = blocks
        self._fp8 = fp8
        self._expert_parallel = expert_parallel
        self._device = other.device
        self._other = other.experts

    @override
    def route(
        self, logits: torch.Tensor, routing: Routing, correction_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        facts = (routing, logits.shape[1], correction_bias is not None)
        if not len(logits) or not self._choices.takes("route", _refuse_route, *facts):
            return self._other.route(logits, routing, correction_bias)
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
        """Routing weights by the softmax over all experts, renormalized over the chosen ones."""
        renormalize = routing.renormalize or routing.scoring == "topk_softmax"
        scratch = torch.empty_like(ids)
        self._aiter.call("aiter.ops.moe_op:topk_softmax", weights, ids, scratch, logits, renormalize)
        if routing.scoring == "softmax":
            weights.mul_(routing.scale)

    @override
    def pack(
        self,
        weights: Iterable[ExpertWeights],
        first: int,
        clamp: ClampedSwiglu | None,
        dtype: torch.dtype,
        packed_format: PackedFormat | None = None,
    ) -> PackedExperts:
        experts = iter(weights)
        model = next(experts, None)
        if model is None:
            return self._other.pack((), first, clamp, dtype, packed_format)
        plain = clamp is None and model.gate_up_bias is None and model.down_bias is None
        experts = chain([model], experts)
        if any(isinstance(each, GroupedWeight | JoinedWeight) for each in (model.gate_up, model.down)):
            return self._other.pack(experts, first, clamp, dtype, packed_format)
        if isinstance(model.gate_up, QuantizedWeight) or isinstance(model.down, QuantizedWeight):
            if not self._blocks.takes_experts(model, plain, dtype, packed_format):
                return self._other.pack(experts, first, clamp, dtype, packed_format)
            return self._stacked(first, map(self._blocks.pack_expert, experts))
        facts = (dtype, packed_format, self._fp8, *model.down.shape, plain)
        if not self._choices.takes("moe", _refuse, *facts):
            return self._other.pack(experts, first, clamp, dtype, packed_format)
        return self._stacked(first, (self._pack_expert(each, dtype, packed_format) for each in experts))

    def _stacked(self, first: int, experts: Iterable[tuple[torch.Tensor | None, ...]]) -> AiterExperts:
        """Stacks the weights of all experts: both products, each followed by its scales."""
        pairs = list(experts)
        gate_up, gate_up_scale, down, down_scale = (_stacked(parts) for parts in zip(*pairs, strict=True))
        assert gate_up is not None
        assert down is not None
        return AiterExperts(first, gate_up, down, gate_up_scale, down_scale, self._mask(len(pairs)))

    def _pack_expert(
        self, expert: ExpertWeights, dtype: torch.dtype, packed_format: PackedFormat | None
    ) -> tuple[torch.Tensor | None, ...]:
        """The two weights of one expert, shuffled for AITER, each followed by its row scales or None."""
        weights = [as_floats(weight).to(self._device) for weight in (expert.gate_up, expert.down)]
        if packed_format is None:
            gate_up, down = (shuffled(self._aiter, weight.to(dtype).contiguous()) for weight in weights)
            return gate_up, None, down, None
        pairs = [scaled(self._aiter, weight, self._fp8) for weight in weights]
        return (*pairs[0], *pairs[1])

    def _mask(self, num_experts: int) -> torch.Tensor | None:
        if not self._expert_parallel:
            return None
        mask = torch.ones(num_experts + 1, dtype=torch.int32, device=self._device)
        mask[-1] = 0
        return mask

    @override
    def apply(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, packed: PackedExperts
    ) -> torch.Tensor:
        if not isinstance(packed, AiterExperts):
            return self._other.apply(x, topk_ids, topk_weights, packed)
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


def _local(ids: torch.Tensor, weights: torch.Tensor, packed: AiterExperts) -> tuple[torch.Tensor, torch.Tensor]:
    """Chosen experts as indices among the packed ones, int32, and their weights.

    Experts of other ranks get the index after the last, which is masked. If there can be any, AITER expects one more
    such slot: since 0.1.16 it looks its settings up by one less (aiter/fused_moe.py, `is_ep`). 0.1.13 looks them up by
    all slots, so it does not find settings tuned for the model and uses its defaults.
    """
    local = ids - packed.first
    if packed.mask is not None:
        count = len(packed.gate_up)
        inside = torch.where((local >= 0) & (local < count), local, count)
        local, weights = pad(inside, (0, 1), value=count), pad(weights, (0, 1))
    return local.int(), weights


def _stacked(parts: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
    """Stacks one part of all experts into one tensor; None if the parts are None."""
    tensors = [part for part in parts if part is not None]
    return torch.stack(tensors) if tensors else None


def _refuse(
    dtype: torch.dtype, packed_format: PackedFormat | None, fp8: torch.dtype, hidden: int, inner: int, plain: bool
) -> str | None:
    if not plain:
        return "AITER's mixture of experts is for silu without biases"
    gate_up = refuse_packed(packed_format, fp8, 2 * inner, hidden, shuffled=True)
    return refuse_dtype(dtype) or gate_up or refuse_packed(packed_format, fp8, hidden, inner, shuffled=True)


def _refuse_route(routing: Routing, num_experts: int, corrected: bool) -> str | None:
    if routing.scoring != "sigmoid":
        grouped = routing.num_groups > 1
        return "AITER's softmax routing has other groups, and no correction" if grouped or corrected else None
    if not corrected or not routing.renormalize:
        return "AITER's sigmoid routing has a correction, and weights that are renormalized"
    if routing.num_groups not in _GROUPS or num_experts % routing.num_groups:
        return f"AITER's sigmoid routing has {_GROUPS} groups, not {routing.num_groups} of {num_experts} experts"
    return None
