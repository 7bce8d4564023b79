"""Which step runs which decode, on a stand-in for graphs that notes what it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from common.config import CompilationConfig, Config
from kernels.interface import AttentionMetaData
from worker.model.decode_graphs import DEFAULT_SIZES, DecodeGraphs, capture_sizes

CPU = torch.device("cpu")


class Graphs:
    """StepGraphs whose plans are lists: their rows, then what was written."""

    def plan(self, cache: Any, num_heads: int, rows: int, max_seq_len: int) -> list[Any]:
        return [rows]

    def write(self, plan: list[Any], metadata: AttentionMetaData) -> None:
        plan.append(metadata.seq_lens.tolist())

    def capture(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        return run


def decode_of(lengths: list[int]) -> AttentionMetaData:
    count = len(lengths)
    return AttentionMetaData(
        np.arange(count + 1), np.array(lengths), np.zeros((count, 1), np.int64), np.zeros(count, np.int64)
    )


def test_a_decode_takes_the_smallest_step_that_has_room() -> None:
    ran: list[tuple[list[Any], int]] = []
    progress: list[tuple[int, int]] = []

    def decode(token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetaData) -> torch.Tensor:
        ran.append((metadata.plan, len(token_ids)))
        return torch.stack((token_ids, positions), 1).float()

    graphs = DecodeGraphs(Graphs(), None, 4, 64, (1, 2, 4), decode, CPU, lambda *at: progress.append(at))
    assert progress == [(1, 3), (2, 3), (3, 3)]
    assert [graphs.fits(n) for n in (1, 3, 4, 5)] == [True, True, True, False]
    for count, rows in ((1, 1), (2, 2), (3, 4), (4, 4)):
        ids, positions = torch.arange(count) + 7, torch.arange(count) * 2
        hidden = graphs.run(ids, positions, decode_of([9] * count))
        assert hidden.tolist() == [[i + 7, 2 * i] for i in range(count)]
        plan, ran_rows = ran[-1]
        assert (plan[0], plan[-1], ran_rows) == (rows, [9] * count, rows)


@pytest.mark.parametrize(
    ("given", "most", "expected"),
    [((), 6, (1, 2, 4, 6)), ((8, 2), 100, (2, 8)), ((8, 2), 4, (2, 4)), ((), 512, DEFAULT_SIZES)],
)
def test_sizes(given: tuple[int, ...], most: int, expected: tuple[int, ...]) -> None:
    config = Config(max_num_seqs=most, compilation_config=CompilationConfig(cudagraph_capture_sizes=given))
    assert capture_sizes(config) == expected
