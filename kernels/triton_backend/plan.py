"""Attention plan of a step, as tensors on the device: one copy a step.

Kernels take their grids and constants from the plan's `Shape` alone. So a graph captured with a padded plan serves
every step that fits: its tensors are overwritten, and nothing else changes. Padding sequences have no rows and no keys;
padding rows have the slot -1.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from kernels.interface import AttentionMetaData
from kernels.upload import slots_at, to_device

Staged = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Shape:
    """Size of a step.

    Attributes:
        rows: T, tokens and padding.
        seqs: S, sequences and padding.
        blocks: width of the block tables.
        max_seqlen_q: most rows of a sequence.
        max_seqlen_k: most keys of a sequence.
    """

    rows: int
    seqs: int
    blocks: int
    max_seqlen_q: int
    max_seqlen_k: int

    @classmethod
    def of(cls, metadata: AttentionMetaData) -> Shape:
        """Shape of a step without padding."""
        seqs, blocks = metadata.block_tables.shape
        return cls(
            rows=metadata.num_tokens,
            seqs=seqs,
            blocks=blocks,
            max_seqlen_q=int(np.diff(metadata.cu_seqlens_q).max(initial=0)),
            max_seqlen_k=int(metadata.seq_lens.max(initial=0)),
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of int32 values of each tensor, in their order in memory."""
        return (self.seqs + 1, self.seqs, self.rows, self.seqs * self.blocks)


@dataclass(frozen=True)
class StepPlan:
    """A step on the device. Query row i of sequence s is at position seq_lens[s] - (its rows) + i.

    Attributes:
        memory: int32, holds all that follow.
        shape: sizes.
        cu_seqlens_q: int32 [S+1], where each sequence's rows begin.
        seq_lens: int32 [S], keys visible to each sequence's last row.
        slot_mapping: int32 [T], where each row's key and value are written; -1 for nowhere.
        block_tables: int32 [S, blocks]; entries past a sequence's end are 0 and not read.
    """

    memory: torch.Tensor
    shape: Shape
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor

    @classmethod
    def over(cls, memory: torch.Tensor, shape: Shape) -> StepPlan:
        """The plan over `memory` int32 [sum(shape.sizes)], which may be filled later."""
        borders = np.cumsum([0, *shape.sizes]).tolist()
        cu_seqlens_q, seq_lens, slots, tables = (memory[start:end] for start, end in pairwise(borders))
        return cls(memory, shape, cu_seqlens_q, seq_lens, slots, tables.view(shape.seqs, shape.blocks))


def staged(metadata: AttentionMetaData, shape: Shape) -> Staged:
    """Values of a plan of that shape on the host, int32 [sum(shape.sizes)].

    Raises:
        ValueError: the step does not fit.
    """
    own = Shape.of(metadata)
    if any(getattr(own, name) > getattr(shape, name) for name in Shape.__dataclass_fields__):
        raise ValueError(f"a step of {own} does not fit into {shape}")
    memory = np.zeros(sum(shape.sizes), np.int32)
    starts, lengths, slots, tables = np.split(memory, np.cumsum(shape.sizes)[:-1])
    starts[: own.seqs + 1] = metadata.cu_seqlens_q
    starts[own.seqs + 1 :] = own.rows
    lengths[: own.seqs] = metadata.seq_lens
    slots[: own.rows] = metadata.slot_mapping
    slots[own.rows :] = -1
    tables.reshape(shape.seqs, shape.blocks)[: own.seqs, : own.blocks] = metadata.block_tables
    return memory


def on_device(metadata: AttentionMetaData, shape: Shape, device: torch.device, block_size: int) -> StepPlan:
    """A plan of that shape with a step's values; the copy to the device is asynchronous.

    Raises:
        ValueError: the step does not fit.
    """
    numbers = staged(metadata, shape)
    if metadata.num_rejected is None:
        return StepPlan.over(to_device(numbers, device), shape)
    sequences = metadata.sequences
    given = np.concatenate((numbers, sequences, metadata.positions(sequences)), dtype=np.int32)
    memory = to_device(given, device)
    made, rows = StepPlan.over(memory[: len(numbers)], shape), memory[len(numbers) :].view(2, -1)
    _move(made, rows, metadata.num_rejected, block_size)
    return made


def _move(plan: StepPlan, rows: torch.Tensor, num_rejected: torch.Tensor, block_size: int) -> None:
    """Moves each sequence's rows to positions lower by `num_rejected`, with the slots and key counts of these
    positions.

    Args:
        plan: changed.
        rows: int32 [2, tokens], sequences and positions.
        num_rejected: int64 [sequences].
        block_size: tokens of a block.
    """
    sequences = rows[0].long()
    positions = rows[1] - num_rejected.index_select(0, sequences)
    # Rows of padding keep their -1.
    plan.slot_mapping[: len(sequences)].copy_(slots_at(positions, sequences, plan.block_tables, block_size))
    plan.seq_lens[: len(num_rejected)].sub_(num_rejected)


def plan(metadata: AttentionMetaData, device: torch.device, block_size: int) -> StepPlan:
    """Makes the plan of one step for a block size."""
    return on_device(metadata, Shape.of(metadata), device, block_size)
