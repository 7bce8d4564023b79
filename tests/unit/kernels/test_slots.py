"""Slots of positions, on the host and on a device, beside a loop over them."""

from __future__ import annotations

import numpy as np
import torch

from kernels.upload import slots_at

SIZE = 4
TABLES = np.array([[7, 2, 9], [3, 5, 1]])
POSITIONS, SEQUENCES = np.array([[0, 3, 4], [11, 8, 7]]), np.array([0, 1, 1])


def test_slots_equal_block_positions() -> None:
    expected = [
        [int(TABLES[s, p // SIZE]) * SIZE + p % SIZE for p, s in zip(row, SEQUENCES.tolist(), strict=True)]
        for row in POSITIONS.tolist()
    ]
    assert slots_at(POSITIONS, SEQUENCES, TABLES, SIZE).tolist() == expected
    # A plan's tables are narrower.
    tables = torch.from_numpy(TABLES).int()
    assert slots_at(torch.from_numpy(POSITIONS), torch.from_numpy(SEQUENCES), tables, SIZE).tolist() == expected
