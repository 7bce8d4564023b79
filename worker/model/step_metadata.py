"""Metadata of a step for attention: each sequence's rows are a run of positions."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import numpy.typing as npt

from kernels.interface import AttentionMetaData
from kernels.upload import slots_at
from worker.model.block_tables import BlockTables

Ints = npt.NDArray[np.int64]


def step_metadata(
    starts: Ints, counts: Ints, tables: Many[list[int]], covering: BlockTables, block_size: int
) -> tuple[AttentionMetaData, Ints, Ints]:
    """Metadata of a step of S sequences, without its plan; and the position and the sequence of each row.

    Args:
        starts: int64 [S], the first position of each.
        counts: int64 [S], rows of each, at least one.
        tables: the sequences' block tables, which cover the rows.
        covering: of the steps before this one; the metadata has a view of it.
        block_size: tokens of a block.

    Raises:
        ValueError: a block table does not cover its sequence.
    """
    ends, positions, sequences = np.cumsum(counts), starts, np.arange(len(counts))
    if ends[-1] > len(ends):
        sequences = np.repeat(sequences, counts)
        positions = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
    lengths = starts + counts
    covered = covering.of_step(tables, -(-lengths // block_size))
    metadata = AttentionMetaData(
        cu_seqlens_q=np.concatenate((np.zeros(1, np.int64), ends)),
        seq_lens=lengths,
        block_tables=covered,
        slot_mapping=slots_at(positions, sequences, covered, block_size),
    )
    return metadata, positions, sequences
