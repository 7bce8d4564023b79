"""The choice of a captured step for each decode, on a stand-in for graphs that records its calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from common.config import CompilationConfig, Config, SpeculativeConfig
from common.params.config_parts import NGRAM
from kernels.interface import AttentionMetaData
from worker.model.decode_graphs import DEFAULT_SIZES, DecodeGraphs, StepSize, capture_sizes

CPU = torch.device("cpu")


class Graphs:
    """StepGraphs whose plans are lists: their size, then the written rows. Records the rows it plans."""

    def __init__(self) -> None:
        self.planned: list[int] = []

    def plan(self, cache: Any, num_heads: int, num_seqs: int, most_rows: int, max_seq_len: int) -> list[Any]:
        self.planned.append(num_seqs * most_rows)
        return [(num_seqs, most_rows)]

    def write(self, plan: list[Any], metadata: AttentionMetaData, cache: object) -> None:
        plan.append(metadata.seq_lens.tolist())

    def capture(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        return run


def decode_of(rows: list[int]) -> AttentionMetaData:
    """A decode of sequences of 9 tokens with `rows` rows each."""
    count = len(rows)
    return AttentionMetaData(
        np.cumsum([0, *rows]), np.full(count, 9), np.zeros((count, 1), np.int64), np.zeros(sum(rows), np.int64)
    )


# Rows of the sequences of a step, and the step that runs it: without drafts, and with up to three of each sequence.
CHOSEN = [
    ([1], (1, 1)),
    ([1, 1], (2, 1)),
    ([1, 1, 1], (4, 1)),
    ([1, 1, 1, 1], (4, 1)),
    ([2], (1, 4)),
    ([4], (1, 4)),
    ([1, 3], (2, 4)),
    ([4, 1], (2, 4)),
]


def test_decode_uses_smallest_captured_step_with_room() -> None:
    ran: list[tuple[list[Any], int]] = []
    progress: list[tuple[int, int]] = []

    def decode(token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetaData) -> torch.Tensor:
        ran.append((metadata.plan, len(token_ids)))
        return torch.stack((token_ids, positions), 1).float()

    sizes = (*map(StepSize, (1, 2, 4)), StepSize(1, 4), StepSize(2, 4))
    device_graphs = Graphs()
    graphs = DecodeGraphs(device_graphs, None, 4, 64, sizes, decode, CPU, lambda *at: progress.append(at))
    assert progress == [(done, 5) for done in range(1, 6)]
    assert device_graphs.planned == [8, 4, 4, 2, 1]
    assert [graphs.fits(count, 1) for count in (1, 3, 4, 5)] == [True, True, True, False]
    assert [graphs.fits(*step) for step in ((1, 4), (2, 2), (3, 2), (1, 5))] == [True, True, False, False]
    for rows, (num_seqs, most_rows) in CHOSEN:
        count = sum(rows)
        ids, positions = torch.arange(count) + 7, torch.arange(count) * 2
        hidden = graphs.run(ids, positions, decode_of(rows))
        assert hidden.tolist() == [[i + 7, 2 * i] for i in range(count)]
        plan, ran_rows = ran[-1]
        assert (plan[0], plan[-1], ran_rows) == ((num_seqs, most_rows), [9] * len(rows), num_seqs * most_rows)


@pytest.mark.parametrize(
    ("given", "most", "expected"),
    [((), 6, (1, 2, 4, 6)), ((8, 2), 100, (2, 8)), ((8, 2), 4, (2, 4)), ((), 512, DEFAULT_SIZES)],
)
def test_sizes(given: tuple[int, ...], most: int, expected: tuple[int, ...]) -> None:
    config = Config(max_num_seqs=most, compilation_config=CompilationConfig(cudagraph_capture_sizes=given))
    plain = tuple(map(StepSize, expected))
    assert capture_sizes(config) == plain
    drafting = replace(config, speculative_config=SpeculativeConfig(4, NGRAM))
    assert capture_sizes(drafting) == (*plain, *(StepSize(size, 5) for size in expected if size <= 102))
