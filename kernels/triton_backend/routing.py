"""The choice of experts: one program a row, which finds the best expert as often as a row has slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.interface import Routing
from kernels.triton_backend.launch import launch

# Above all ids of experts and groups.
_NONE = tl.constexpr(1 << 30)


@triton.jit
def _first_of_best(choice, place, free):
    """Lowest of the free places with the largest number, which may be minus infinity."""
    best = tl.max(tl.where(free, choice, float("-inf")))
    return tl.min(tl.where(free & (choice == best), place, _NONE))


@triton.jit
def _in_best_groups(
    choice, there, open_groups, GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST: tl.constexpr
):
    """-inf for experts outside the groups whose BEST best experts score highest, one or two (arXiv:2405.04434 and
    arXiv:2412.19437, both section 2.1.2)."""
    column = tl.arange(0, SIZE)[None, :]
    score = tl.max(choice, 1)
    if BEST > 1:
        first = tl.min(tl.where(choice == score[:, None], column, _NONE), 1)
        others = tl.where(there & (column != first[:, None]), choice, float("-inf"))
        score = _sortable(score + tl.max(others, 1))
    group = tl.arange(0, GROUPS)
    kept = group < 0
    for _ in range(TOP_GROUPS):
        kept = kept | (group == _first_of_best(score, group, open_groups & (kept == 0)))
    return tl.where(kept[:, None], choice, float("-inf"))


@triton.jit
def _sortable(number):
    """NaN as infinity, so that it sorts first as in PyTorch and no comparison loses it."""
    return tl.where(number <= float("inf"), number, float("inf"))


# A program chooses for one row. Experts lie as [groups, experts of a group], both padded to powers of two.
@triton.jit
def _route_kernel(
    logits,
    correction,
    ids,
    weights,
    stride,
    num_groups,
    group_size,
    scale,
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    open_groups = tl.arange(0, GROUPS) < num_groups
    column = tl.arange(0, SIZE)[None, :]
    expert = tl.arange(0, GROUPS)[:, None] * group_size + column
    there = open_groups[:, None] & (column < group_size)
    scores = tl.load(logits + row * stride + expert, mask=there, other=float("-inf"))
    if SCORING == "softmax":
        powers = tl.exp(scores - tl.max(scores))
        scores = tl.div_rn(powers, tl.zeros_like(powers) + tl.sum(powers))
    if SCORING == "sigmoid":
        scores = tl.div_rn(tl.zeros_like(scores) + 1.0, 1.0 + tl.exp(-scores))
    choice = scores
    if correction is not None:
        choice = choice + tl.load(correction + expert, mask=there, other=0.0)
    choice = _sortable(choice)
    if GROUPS > 1:
        choice = _in_best_groups(choice, there, open_groups, GROUPS, SIZE, TOP_GROUPS, GROUP_BEST)
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros([SLOTS], tl.int32)
    shares = tl.full([SLOTS], float("-inf"), tl.float32)
    for i in range(TOP_K):
        best = _first_of_best(choice, expert, there)
        there = there & (expert != best)
        chosen = tl.where(slot == i, best, chosen)
        shares = tl.where(slot == i, tl.sum(tl.where(expert == best, scores, 0.0)), shares)
    if SCORING == "topk_softmax":
        shares = tl.exp(shares - tl.max(shares))
        shares = tl.div_rn(shares, tl.zeros_like(shares) + tl.sum(shares))
    else:
        if RENORMALIZE:
            total = tl.sum(tl.where(slot < TOP_K, shares, 0.0)) + 1e-20
            shares = tl.div_rn(shares, tl.zeros_like(shares) + total)
        shares = shares * scale
    tl.store(ids + row * TOP_K + slot, chosen.to(tl.int64), mask=slot < TOP_K)
    tl.store(weights + row * TOP_K + slot, shares, mask=slot < TOP_K)


def route(
    logits: torch.Tensor, routing: Routing, correction_bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses the experts of each row; rows of `logits` may have gaps between them. See ExpertOps.route.

    Args:
        logits: float32 [T, E].
        routing: how to choose.
        correction_bias: float32 [E] or None.

    Returns:
        ids int64 [T, k] and weights float32 [T, k].
    """
    rows, num_experts = logits.shape
    # The softmax over the chosen has neither groups nor a correction, as in kernels/torch_backend/moe.py.
    plain = routing.scoring == "topk_softmax"
    groups = 1 if plain else routing.num_groups
    ids = torch.empty(rows, routing.top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(rows, routing.top_k, dtype=torch.float32, device=logits.device)
    launch(
        _route_kernel,
        (rows,),
        logits if logits.stride(1) == 1 else logits.contiguous(),
        None if plain else correction_bias,
        ids,
        weights,
        logits.stride(0) if logits.stride(1) == 1 else num_experts,
        groups,
        num_experts // groups,
        float(routing.scale),
        SCORING=routing.scoring,
        RENORMALIZE=routing.renormalize,
        TOP_K=routing.top_k,
        TOP_GROUPS=routing.top_groups,
        GROUP_BEST=routing.group_best,
        GROUPS=triton.next_power_of_2(groups),
        SIZE=triton.next_power_of_2(num_experts // groups),
        SLOTS=triton.next_power_of_2(routing.top_k),
        num_warps=1,
    )
    return ids, weights
