"""What a mixture of experts gives, row by row in float64."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from kernels.interface import ClampedSwiglu, ExpertWeights
from kernels.quantized_weight import as_floats


def reference_moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    all_experts: list[ExpertWeights],
    clamp: ClampedSwiglu | None,
) -> torch.Tensor:
    """x [T, H] through the experts `ids` [T, k], summed with `weights` [T, k]: float64 [T, H]."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row, (chosen, shares) in enumerate(zip(ids.tolist(), weights.double(), strict=True)):
        for expert, share in zip(chosen, shares, strict=True):
            one = all_experts[expert]
            bias = 0.0 if one.gate_up_bias is None else one.gate_up_bias.double()
            gate, up = (as_floats(one.gate_up).double() @ x[row].double() + bias).chunk(2)
            inner = silu(gate) * up if clamp is None else _clamped(gate, up, clamp)
            down_bias = 0.0 if one.down_bias is None else one.down_bias.double()
            out[row] += share * (as_floats(one.down).double() @ inner + down_bias)
    return out


def _clamped(gate: torch.Tensor, up: torch.Tensor, clamp: ClampedSwiglu) -> torch.Tensor:
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return gate / (1 + torch.exp(-clamp.alpha * gate)) * (up + 1)
