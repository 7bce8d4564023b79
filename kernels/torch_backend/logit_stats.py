"""Statistics of logits for logprobs, in PyTorch, on the logits' device (kernels/logprobs.py).

Sums are of integers and comparisons are exact, so a row's numbers depend on nothing but the device's exp.
"""

from __future__ import annotations

from typing import Final

import torch

from kernels.sampling import MASS_ONE

# Rows that are widened at a time: float64 of a large vocabulary takes a megabyte each.
_ROWS: Final = 16
_LEAST_KEY: Final = -(2**31)
_MOST_ID: Final = 0x7FFFFFFF

# highest, masses, ranks, own, top ids, top, given: see LogitStats.
Columns = tuple[torch.Tensor, ...]


def columns(logits: torch.Tensor, tokens: torch.Tensor, top: int, given: torch.Tensor) -> Columns:
    """Columns of LogitStats for float32 logits [R, V], on the device.

    Args:
        logits: float32 [R, V].
        tokens: int64 [R], each an id.
        top: how many of the likeliest ids.
        given: int64 [R, G].
    """
    every = [slice(start, start + _ROWS) for start in range(0, len(logits), _ROWS)]
    parts = [_of_few(logits[some], tokens[some], given[some], top) for some in every]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def _of_few(logits: torch.Tensor, tokens: torch.Tensor, given: torch.Tensor, top: int) -> Columns:
    highest = logits.amax(dim=1)
    finite = highest.isfinite()
    below = torch.where(finite.unsqueeze(1), logits - highest.unsqueeze(1), 0.0).double()
    masses = (below.exp() * MASS_ONE).round().long().sum(dim=1)
    own = logits.gather(1, tokens.unsqueeze(1))
    ids = torch.arange(logits.shape[1], device=logits.device)
    before = (logits > own) | ((logits == own) & (ids < tokens.unsqueeze(1)))
    # One number for both orders, larger for larger logits and, of equal ones, for lower ids.
    candidates = (_keys(logits).long() << 32) | (_MOST_ID - ids)
    top_ids = _MOST_ID - (candidates.topk(top, dim=1).values & _MOST_ID)
    return (
        highest,
        torch.where(finite, masses, 0),
        1 + before.sum(dim=1),
        own.squeeze(1),
        top_ids,
        logits.gather(1, top_ids),
        logits.gather(1, given),
    )


def _keys(logits: torch.Tensor) -> torch.Tensor:
    """Sort keys int32 of numbers: larger for larger numbers, equal for both zeros."""
    bits = logits.view(torch.int32)
    bits = torch.where(bits == _LEAST_KEY, 0, bits)
    return bits ^ ((bits >> 31) & _MOST_ID)
