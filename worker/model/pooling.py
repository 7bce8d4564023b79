"""Pools a step's hidden states for the sequences that are embedded (worker/engine/pooling.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from common.params.pooling import LABELS, MEAN
from kernels.upload import to_device
from worker.engine.batch import ScheduledBatch
from worker.engine.pooling import MEAN_LIMIT, MEAN_SCALE
from worker.model.layers.classifier import Classifier

Ints = npt.NDArray[np.int64]
# Waits for pooled states, by sequence.
Pooled: TypeAlias = Callable[[], dict[int, bytes]]
# Rows of float64 in memory at once.
_ROWS = 256


def mean_rows(batch: ScheduledBatch, ends: Ints) -> Ints:
    """int64 [R], ascending: the rows that enter a mean; the sequences' rows end at `ends`."""
    runs = [
        np.arange(ends[i] - batch.num_scheduled_tokens[i], ends[i])
        for i, pooling in batch.pooled.items()
        if pooling == MEAN
    ]
    return np.concatenate(runs) if runs else np.zeros(0, np.int64)


def begin_pooling(batch: ScheduledBatch, hidden: torch.Tensor, classifier: Classifier | None) -> Pooled:
    """Begins to pool a step's hidden states [T, H]. The result waits for the pooled states.

    Args:
        batch: of the step.
        hidden: all states.
        classifier: of the model; None if it has none.
    """
    ends = np.cumsum(np.array(batch.num_scheduled_tokens, np.int64))
    last = [i for i, pooling in batch.pooled.items() if pooling != MEAN]
    # A copy, because the next step may overwrite these rows.
    rows = hidden.index_select(0, to_device(ends[last] - 1, hidden.device)).float()
    sums = {
        batch.req_ids[i]: _sums(hidden[ends[i] - batch.num_scheduled_tokens[i] : ends[i]])
        for i, pooling in batch.pooled.items()
        if pooling == MEAN
    }
    ids = [batch.req_ids[i] for i in last]
    labelled = [place for place, i in enumerate(last) if batch.pooled[i] == LABELS]

    def pooled() -> dict[int, bytes]:
        states = rows.cpu().numpy()
        found = {seq_id: _numbers(row) for seq_id, row in zip(ids, states, strict=True)}
        if labelled:
            assert classifier is not None
            labels = classifier(states[labelled])
            found |= {ids[place]: _numbers(row) for place, row in zip(labelled, labels, strict=True)}
        return found | {seq_id: _summed(*parts) for seq_id, parts in sums.items()}

    return pooled


def _sums(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [H]: sums of rows [R, H] in units of 1 / MEAN_SCALE; and whether all of them are finite and in range."""
    total = torch.zeros(rows.shape[1], dtype=torch.int64, device=rows.device)
    fits = torch.ones((), dtype=torch.bool, device=rows.device)
    for start in range(0, len(rows), _ROWS):
        exact = rows[start : start + _ROWS].double()
        fits &= (exact.abs() < MEAN_LIMIT).all()
        total += (exact * MEAN_SCALE).round().long().sum(0)
    return total, fits


def _numbers(row: npt.NDArray[np.float32]) -> bytes:
    return row.tobytes() if np.isfinite(row).all() else b""


def _summed(total: torch.Tensor, fits: torch.Tensor) -> bytes:
    return total.cpu().numpy().tobytes() if bool(fits) else b""
