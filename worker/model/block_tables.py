"""Block tables as one array that lives from step to step: a step writes only the blocks that are new.

A decode step of 256 sequences of 8,000 tokens has 131,000 entries, of which 16 are new. Rows of the array are wide
enough for the longest sequence so far; what has never been written takes no memory.
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
    """The tables of one step after the other, for sequences that mostly come again in the same order."""

    def __init__(self) -> None:
        self._array = np.zeros((0, 0), np.int64)
        # The list that each row was read from, kept so that no other one can be taken for it, and how far.
        self._lists: list[list[int]] = []
        self._counts = np.zeros(0, np.int64)

    def of_step(self, tables: Many[list[int]], needed: Ints) -> Ints:
        """The tables of a step.

        Args:
            tables: of its sequences; a list only ever grows at its end.
            needed: how many blocks of each the step reads or writes.

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
        """Makes the array large enough."""
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
        """Gives each table its row; what other rows have of it is moved."""
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
    """Zeros that take memory only where they are written, page by page: rows are far apart."""
    memory = mmap(-1, 8 * rows * blocks)
    # Not every kernel knows huge pages.
    with contextlib.suppress(OSError):
        memory.madvise(MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.int64).reshape(rows, blocks)
