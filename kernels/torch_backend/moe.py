"""Mixture of experts in PyTorch, batch-invariant: other rows' choices do not change a row's bits.

The rows that chose an expert fill row tiles of that expert (kernels/torch_backend/linear.py), so a row has the same
product whichever rows share its tile. A row's results are weighted and added in float32 in the order of its slots, the
best expert first, never in the order of experts, which would depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from kernels.interface import ClampedSwiglu, ExpertOps, ExpertWeights, PackedFormat, Routing
from kernels.quantized_weight import as_floats
from kernels.torch_backend import elementwise, linear
from kernels.torch_backend.linear import ROW_TILE, PackedLinear

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TorchPackedExperts:
    """This rank's experts, the first of which has the id `first`."""

    first: int
    gate_up: list[PackedLinear]
    down: list[PackedLinear]
    clamp: ClampedSwiglu | None


class TorchExpertOps(ExpertOps):
    """Expert operations in which each expert's rows fill tiles of their own."""

    @override
    def route(
        self, logits: torch.Tensor, routing: Routing, correction_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if routing.scoring == "topk_softmax":
            best, ids = _top(logits, routing.top_k)
            return ids, torch.softmax(best, -1)
        scores = torch.softmax(logits, -1) if routing.scoring == "softmax" else elementwise.sigmoid(logits)
        choice = scores if correction_bias is None else scores + correction_bias
        _, ids = _top(_in_best_groups(choice, routing), routing.top_k)
        weights = scores.gather(1, ids)
        if routing.renormalize:
            # The sigmoid's formula in DeepSeek-V3 and its heirs; a softmax's best is never so small that it shows.
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids, weights * routing.scale

    @override
    def pack(
        self,
        weights: Iterable[ExpertWeights],
        first: int,
        clamp: ClampedSwiglu | None,
        dtype: torch.dtype,
        packed_format: PackedFormat | None = None,
    ) -> TorchPackedExperts:
        linear.require_float(packed_format)
        packed = TorchPackedExperts(first, [], [], clamp)
        # One by one, so that only one expert is held twice.
        for expert in weights:
            packed.gate_up.append(linear.pack(as_floats(expert.gate_up), expert.gate_up_bias, dtype))
            packed.down.append(linear.pack(as_floats(expert.down), expert.down_bias, dtype))
        return packed

    @override
    def apply(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, packed: TorchPackedExperts
    ) -> torch.Tensor:
        rows, hidden = x.shape
        work = _tiled(topk_ids.numpy() - packed.first, len(packed.gate_up))
        with_zeros = x.new_zeros(rows + 1, hidden)
        with_zeros[:rows] = x
        inputs = with_zeros.index_select(0, torch.from_numpy(work.rows))
        outputs = x.new_empty(len(work.rows) + 1, hidden)
        outputs[-1] = 0.0
        if len(work.rows):
            chosen = work.experts.tolist()
            gate_up = x.new_empty(len(inputs), packed.gate_up[0].weight_t.shape[1])
            linear.multiply(inputs, gate_up, [packed.gate_up[expert] for expert in chosen])
            inner = elementwise.silu_and_mul(gate_up) if packed.clamp is None else clamped_swiglu(gate_up, packed.clamp)
            linear.multiply(inner, outputs[:-1], [packed.down[expert] for expert in chosen])
        return _combined(outputs, torch.from_numpy(work.places), topk_weights).to(x.dtype)


def _top(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest values and their ids, the lower id first among equals, which `torch.topk` leaves open."""
    best, ids = torch.sort(values, dim=-1, descending=True, stable=True)
    return best[..., :count].contiguous(), ids[..., :count].contiguous()


def _in_best_groups(choice: torch.Tensor, routing: Routing) -> torch.Tensor:
    """-inf for experts outside the groups whose best experts score highest (arXiv:2405.04434 and arXiv:2412.19437, both
    section 2.1.2)."""
    if routing.num_groups == 1:
        return choice
    groups = choice.view(len(choice), routing.num_groups, -1)
    best, _ = _top(groups, routing.group_best)
    _, kept = _top(best[..., 0] + best[..., 1] if routing.group_best > 1 else best[..., 0], routing.top_groups)
    hidden = torch.ones(groups.shape[:2], dtype=torch.bool).scatter_(1, kept, False)
    return groups.masked_fill(hidden.unsqueeze(-1), -torch.inf).view(choice.shape)


@dataclass(frozen=True)
class _Tiled:
    """Pairs of row and slot in row tiles, each tile of one expert.

    Attributes:
        experts: int64 [tiles], index of this rank's expert.
        rows: int64 [tiles * ROW_TILE], the row at each place; T for padding.
        places: int64 [T, k], the place of each pair; the number of places for an expert of another rank.
    """

    experts: Ints
    rows: Ints
    places: Ints


def _tiled(ids: Ints, num_experts: int) -> _Tiled:
    rows, slots = ids.shape
    experts = ids.ravel()
    mine = np.flatnonzero((experts >= 0) & (experts < num_experts))
    pairs = mine[np.argsort(experts[mine], kind="stable")]
    counts = np.bincount(experts[pairs], minlength=num_experts)
    tiles = -(-counts // ROW_TILE)
    starts = (np.cumsum(tiles) - tiles) * ROW_TILE
    places = np.arange(len(pairs)) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
    count = int(tiles.sum()) * ROW_TILE
    row_at = np.full(count, rows, np.int64)
    row_at[places] = pairs // slots
    place_of = np.full(rows * slots, count, np.int64)
    place_of[pairs] = places
    return _Tiled(np.repeat(np.arange(num_experts), tiles), row_at, place_of.reshape(rows, slots))


def _combined(outputs: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sums the outputs of each row's experts: float32 [T, H]; no product is fused with a sum."""
    total = outputs.new_zeros(len(places), outputs.shape[1], dtype=torch.float32)
    for slot_places, slot_weights in zip(places.unbind(1), weights.unbind(1), strict=True):
        part = outputs.index_select(0, slot_places).float()
        total.add_(part.mul_(slot_weights.unsqueeze(1)))
    return total


def clamped_swiglu(gate_up: torch.Tensor, clamp: ClampedSwiglu) -> torch.Tensor:
    """gpt-oss's activation (`ClampedSwiglu`) in float32, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate = gate.clamp(max=clamp.limit)
    glu = elementwise.sigmoid(gate * clamp.alpha).mul_(gate)
    return glu.mul_(up.clamp(-clamp.limit, clamp.limit).add_(1.0)).to(gate_up.dtype)
