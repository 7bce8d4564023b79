"""Mixture of experts by the native kernels: products of each expert's rows, added in the order of a row's slots."""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import CDLL
from dataclasses import dataclass

import torch
from typing_extensions import override

from kernels.cpu import linear
from kernels.cpu.fallback import Fallback
from kernels.cpu.library import DTYPES, check
from kernels.cpu.routing import route
from kernels.interface import ClampedSwiglu, ExpertOps, ExpertWeights, PackedFormat, Routing
from kernels.quantized_weight import alike_experts
from kernels.torch_backend.moe import TorchPackedExperts


@dataclass(frozen=True)
class PanelExperts:
    """This rank's E experts, the first of which has the id `first`; none of them leaves the tensors empty.

    Attributes:
        gate_up: int8 [E, bytes of a packed weight [2I, H]].
        down: int8 [E, bytes of a packed weight [H, I]].
        code: as PanelLinear's, of `gate_up`.
        down_code: the same of `down`.
        gate_up_bias: float32 [E, 2I] or None.
        down_bias: float32 [E, H] or None.
        inner: I.
        order: int64 [E, H], as PanelLinear's, of `gate_up`; None if all are in order.
        down_order: int64 [E, I], the same of `down`.
    """

    first: int
    count: int
    gate_up: torch.Tensor
    down: torch.Tensor
    code: int
    down_code: int
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    inner: int
    clamp: ClampedSwiglu | None
    order: torch.Tensor | None = None
    down_order: torch.Tensor | None = None


class CpuExpertOps(ExpertOps):
    """Experts in native kernels if they support the model's dtype. The routing is native for any dtype."""

    def __init__(self, library: CDLL, fallback: Fallback) -> None:
        self._library = library
        self._fallback = fallback
        self._torch = fallback.backend.experts

    @override
    def route(
        self, logits: torch.Tensor, routing: Routing, correction_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return route(self._library, logits, routing, correction_bias)

    @override
    def pack(
        self,
        weights: Iterable[ExpertWeights],
        first: int,
        clamp: ClampedSwiglu | None,
        dtype: torch.dtype,
        packed_format: PackedFormat | None = None,
    ) -> PanelExperts | TorchPackedExperts:
        if dtype in DTYPES:
            return pack(self._library, weights, first, clamp, dtype, linear.packed_dtype(packed_format))
        self._fallback.used = True
        packed: TorchPackedExperts = self._torch.pack(weights, first, clamp, dtype, packed_format)
        return packed

    @override
    def apply(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        packed: PanelExperts | TorchPackedExperts,
    ) -> torch.Tensor:
        if isinstance(packed, PanelExperts):
            return moe(self._library, x, topk_ids, topk_weights, packed)
        return self._torch.apply(x, topk_ids, topk_weights, packed)


def pack(
    library: CDLL,
    experts: Iterable[ExpertWeights],
    first: int,
    clamp: ClampedSwiglu | None,
    dtype: torch.dtype,
    packed_dtype: torch.dtype | None = None,
) -> PanelExperts:
    """Packs experts one by one, in `dtype`, one of `DTYPES`; `packed_dtype` as in `linear.pack`."""
    gate_up, down, inner = [], [], 0
    for expert in alike_experts(experts):
        gate_up.append(linear.pack_any(library, expert.gate_up, expert.gate_up_bias, dtype, packed_dtype))
        down.append(linear.pack_any(library, expert.down, expert.down_bias, dtype, packed_dtype))
        inner = expert.down.shape[1]
    panels = linear.stacked(gate_up), linear.stacked(down)
    code, down_code = (packed[0].code if packed else 0 for packed in (gate_up, down))
    biases, orders = (_biases(gate_up), _biases(down)), (_orders(gate_up), _orders(down))
    return PanelExperts(first, len(down), *panels, code, down_code, *biases, inner, clamp, *orders)


def _biases(packed: list[linear.PanelLinear]) -> torch.Tensor | None:
    biases = [one.bias for one in packed if one.bias is not None]
    return torch.stack(biases) if biases else None


def _orders(packed: list[linear.PanelLinear]) -> torch.Tensor | None:
    if all(one.order is None for one in packed):
        return None
    return torch.stack([torch.arange(one.inner) if one.order is None else one.order for one in packed])


def moe(
    library: CDLL, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, packed: PanelExperts
) -> torch.Tensor:
    """Sum of the outputs of this rank's experts for x [T, H], weighted: [T, H]; other ranks' experts count as zeros."""
    x, ids, weights = x.contiguous(), topk_ids.contiguous(), topk_weights.contiguous()
    rows, hidden = x.shape
    out = torch.empty(rows, hidden, dtype=x.dtype)
    check(
        library.fissile_moe(
            DTYPES[x.dtype],
            x.data_ptr(),
            rows,
            hidden,
            packed.inner,
            ids.shape[1],
            ids.data_ptr(),
            weights.data_ptr(),
            packed.first,
            packed.count,
            packed.code,
            packed.gate_up.data_ptr(),
            None if packed.gate_up_bias is None else packed.gate_up_bias.data_ptr(),
            None if packed.order is None else packed.order.data_ptr(),
            packed.down_code,
            packed.down.data_ptr(),
            None if packed.down_bias is None else packed.down_bias.data_ptr(),
            None if packed.down_order is None else packed.down_order.data_ptr(),
            0.0 if packed.clamp is None else packed.clamp.alpha,
            0.0 if packed.clamp is None else packed.clamp.limit,
            out.data_ptr(),
        )
    )
    return out
