"""Sampling parameters of a step's sequences as arrays, kept while the sequences stay the same."""

from __future__ import annotations

import numpy as np

from worker.engine.batch import SequenceColumns


class SampleArrays:
    """Sampling parameters of a step's sequences, one array for each parameter.

    Args:
        columns: of the sequences.
    """

    def __init__(self, columns: SequenceColumns) -> None:
        self._columns = columns
        self.temperature = np.array(columns.temperatures, np.float32)
        self.top_k = np.array(columns.top_ks, np.int64)
        self.top_p = np.array(columns.top_ps, np.float32)
        self.min_p = np.array(columns.min_ps, np.float32)
        self.seeds = np.array(columns.seeds, np.uint64)
        self.choices = np.array(columns.choices, np.int64)

    def of(self, columns: SequenceColumns) -> SampleArrays:
        """Parameters of a step's sequences; the same object as in the last step if the sequences are the same."""
        return self if columns is self._columns else SampleArrays(columns)
