"""The choice of experts by the native kernels (kernels/cpu/native/routing.cpp)."""

from __future__ import annotations

from ctypes import CDLL

import torch

from kernels.cpu.library import check
from kernels.interface import Routing

# As in kernels/cpu/native/kernels.hpp.
_SCORINGS = {"softmax": 0, "sigmoid": 1, "topk_softmax": 2}


def route(
    library: CDLL, logits: torch.Tensor, routing: Routing, correction_bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids int64 [T, k] and weights float32 [T, k] by float32 logits [T, E]; see ExpertOps.route."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    bias = None if correction_bias is None else correction_bias.contiguous()
    if routing.scoring == "topk_softmax":
        # The choice uses the logits themselves, and the chosen weights add up to 1.
        bias, routing = None, Routing(routing.top_k, "topk_softmax")
    rows, experts = logits.shape
    ids = torch.empty(rows, routing.top_k, dtype=torch.int64)
    weights = torch.empty(rows, routing.top_k)
    check(
        library.fissile_route(
            logits.data_ptr(),
            logits.stride(0),
            rows,
            experts,
            None if bias is None else bias.data_ptr(),
            _SCORINGS[routing.scoring],
            routing.top_k,
            routing.renormalize,
            routing.num_groups,
            routing.top_groups,
            routing.group_best,
            routing.scale,
            ids.data_ptr(),
            weights.data_ptr(),
        )
    )
    return ids, weights
