"""Sampling by the reference (kernels/sampling.py): logits and tokens are on the host."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from kernels import logprobs, sampling
from kernels.interface import LogitStats, SampleParams, SamplingOps


class TorchSamplingOps(SamplingOps):
    """Sampling operations of the reference, on the host."""

    @override
    def argmax(self, logits: torch.Tensor, limit: int) -> torch.Tensor:
        return argmax(logits, limit)

    @override
    def fetch(self, ids: torch.Tensor) -> Callable[[], list[int]]:
        return ids.tolist

    @override
    def sample(
        self,
        logits: torch.Tensor,
        params: SampleParams,
        seeds: npt.NDArray[np.uint64],
        positions: npt.NDArray[np.int64],
        choices: npt.NDArray[np.int64],
        num_rejected: torch.Tensor | None = None,
    ) -> torch.Tensor:
        positions = moved(positions, num_rejected)
        return torch.from_numpy(sampling.sample(logits.numpy(), params, seeds, positions, choices))

    @override
    def logit_stats(
        self, logits: torch.Tensor, tokens: torch.Tensor, top: int, given: npt.NDArray[np.int64]
    ) -> Callable[[], LogitStats]:
        stats = logprobs.logit_stats(logits.numpy(), np.maximum(tokens.numpy(), 0), top, given)
        return lambda: stats


def moved(positions: npt.NDArray[np.int64], num_rejected: torch.Tensor | None) -> npt.NDArray[np.int64]:
    """Positions of `SamplingOps.sample`, corrected for rejected drafts."""
    return positions if num_rejected is None else positions - num_rejected.numpy()


def argmax(logits: torch.Tensor, limit: int) -> torch.Tensor:
    """Column of the largest logit of each row: int64 [S]; see `SamplingOps.argmax`."""
    return torch.from_numpy(sampling.greedy(logits[:, :limit].float().numpy()))
