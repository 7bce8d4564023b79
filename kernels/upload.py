"""Copies of host arrays for the device that computes a step."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

# On the host, or on a device.
_Ints = TypeVar("_Ints", npt.NDArray[np.int64], torch.Tensor)


def slots_at(positions: _Ints, sequences: _Ints, block_tables: _Ints, block_size: int) -> _Ints:
    """`block * block_size + offset` of each position.

    Args:
        positions: int64, of any shape.
        sequences: int64, of which they are, in a shape that goes with it.
        block_tables: integers [S, longest], block ids of each sequence in order.
        block_size: tokens of a block.
    """
    blocks = positions // block_size
    return positions + (block_tables[sequences, blocks] - blocks) * block_size


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A copy on the device, ordered by the caller's stream; from pinned memory, so that the host does not wait.

    On a CPU the array itself, if it is contiguous.
    """
    host = torch.from_numpy(np.ascontiguousarray(array))
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
