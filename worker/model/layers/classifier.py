"""The head of a classifying checkpoint: scores of labels from the hidden state of the last token."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from common.params.pooling import row_sums
from worker.model.layers.build import Build, taken

Floats = npt.NDArray[np.float32]


class Classifier:
    """Products with `score.weight` [L, H], on the host.

    They use float32 numbers, whatever the model's dtype, and float64 sums in a fixed order. So the bits depend on the
    state alone, on every back end. All ranks have the whole state and the whole weight.

    Args:
        build: shared by the layers.
    """

    def __init__(self, build: Build) -> None:
        self._weight = taken(build, "score.weight", torch.float32).cpu().numpy().astype(np.float64)

    def __call__(self, states: Floats) -> Floats:
        """[S, H] -> [S, L]"""
        labels = [row_sums(states * row) for row in self._weight]
        return np.stack(labels, axis=1).astype(np.float32)
