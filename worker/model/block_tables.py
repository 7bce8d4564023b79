"""Block tables as one array that is kept from step to step, so that a step writes only new blocks.

A decode step of 256 sequences of 8,000 tokens has 131,000 entries, of which 16 are new. Rows of the array are wide
enough for the longest sequence so far; pages that were never written take no memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence as Many
from mmap import MADV_NOHUGEPAGE, mmap
from operator import is_
from typing import Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_FEWEST_BLOCKS: Final = 64


class BlockTables:
    """Block tables of successive steps, whose sequences mostly stay the same and in the same order."""

    def __init__(self) -> None:
        self._array = np.zeros((0, 0), np.int64)
        # The list that each row was copied from, kept so that its identity stays unique; and how much of it was
        # copied.
        self._lists: list[list[int]] = []
        self._counts = np.zeros(0, np.int64)

    def of_step(self, tables: Many[list[int]], needed: Ints) -> Ints:
        """The tables of a step.

        Args:
            tables: of its sequences; a list only grows at its end.
            needed: number of blocks of each that the step reads or writes.

        Returns:
            [S, longest], a view that the next call changes; entries past a table's end are 0.

        Raises:
            ValueError: a table has fewer blocks than needed.
        """
        self._fit(len(tables), int(needed.max()))
        if not all(map(is_, tables, self._lists)):
            self._place(tables)
        for row in np.flatnonzero(needed > self._counts[: len(tables)]).tolist():
            self._extend(row, tables[row], int(needed[row]))
        return self._array[: len(tables), : int(needed.max())]

    def _fit(self, rows: int, blocks: int) -> None:
        """Grows the array if needed."""
        have_rows, have_blocks = self._array.shape
        if rows > have_rows or blocks > have_blocks:
            size = max(rows, have_rows), max(blocks + blocks // 2, have_blocks, _FEWEST_BLOCKS)
            array = _untouched(*size)
            for row, count in enumerate(self._counts[: len(self._lists)].tolist()):
                array[row, :count] = self._array[row, :count]
            self._array = array
            self._counts = np.concatenate((self._counts, np.zeros(size[0] - have_rows, np.int64)))
            self._lists += [[] for _ in range(size[0] - have_rows)]

    def _place(self, tables: Many[list[int]]) -> None:
        """Moves each table's copied blocks to the row of its sequence."""
        place = {id(table): row for row, table in enumerate(self._lists)}
        changed = [row for row, table in enumerate(tables) if table is not self._lists[row]]
        sources = [place.get(id(tables[row])) for row in changed]
        moved = [self._array[:0, 0] if at is None else self._array[at, : self._counts[at]].copy() for at in sources]
        for row, blocks in zip(changed, moved, strict=True):
            self._array[row, : len(blocks)] = blocks
            self._array[row, len(blocks) : self._counts[row]] = 0
            self._lists[row], self._counts[row] = tables[row], len(blocks)

    def _extend(self, row: int, table: list[int], needed: int) -> None:
        have = int(self._counts[row])
        if len(table) < needed:
            raise ValueError("a block table does not cover its sequence")
        self._array[row, have:needed] = table[have:needed]
        self._counts[row] = needed


def _untouched(rows: int, blocks: int) -> Ints:
    """Zeros whose pages take memory only when written."""
    memory = mmap(-1, 8 * rows * blocks)
    # Some kernels lack huge pages.
    with contextlib.suppress(OSError):
        memory.madvise(MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.int64).reshape(rows, blocks)
