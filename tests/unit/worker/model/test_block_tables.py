"""A step's block tables equal the tables of its sequences, whatever the earlier steps."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.processes import resident_bytes
from worker.model.block_tables import BlockTables


@pytest.mark.parametrize("seed", range(30))
def test_tables_equal_sequences(seed: int) -> None:
    """Sequences come, go, change places, grow, and get other blocks."""
    rnd, tables = random.Random(seed), BlockTables()
    live = [[rnd.randrange(1, 1000) for _ in range(rnd.randint(1, 9))] for _ in range(6)]
    for _ in range(60):
        for table in live:
            if rnd.random() < 0.3:
                table += [rnd.randrange(1, 1000) for _ in range(rnd.choice([1, 1, 40]))]
        if rnd.random() < 0.2:
            live[rnd.randrange(len(live))] = [rnd.randrange(1, 1000) for _ in range(rnd.randint(1, 5))]
        if rnd.random() < 0.2:
            rnd.shuffle(live)
        step = live[: rnd.randint(1, len(live))] if rnd.random() < 0.5 else rnd.sample(live, rnd.randint(1, len(live)))
        needed = np.array([rnd.randint(1, len(table)) for table in step])
        found = tables.of_step(step, needed)
        assert found.shape == (len(step), needed.max())
        for row, table, count in zip(found.tolist(), step, needed.tolist(), strict=True):
            assert row[:count] == table[:count]
            # A column after a row's blocks holds the table's own block or zero.
            assert all(block in (0, *table[i : i + 1]) for i, block in enumerate(row))


def test_table_shorter_than_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="does not cover"):
        BlockTables().of_step([[1, 2]], np.array([3]))


def test_one_long_sequence_does_not_widen_other_tables() -> None:
    """Former fault: one table of a million tokens among 255 short ones took 134 MB and 11 ms in every step."""
    tables, step = BlockTables(), [[7] * 65_536, *([i] * 4 for i in range(255))]
    before = resident_bytes()
    found = tables.of_step(step, np.array([len(table) for table in step]))
    assert found.shape == (256, 65_536)
    assert resident_bytes() - before < 16 << 20
