"""Decode steps captured for fixed numbers of sequences (CUDA and HIP graphs).

A step of n sequences runs as the smallest captured one that has room for n; the rows past them are padding, which
writes no slot and is not read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from common.config import Config
from kernels.interface import AttentionMetaData, AttentionPlan, KVCache, StepGraphs

# Batch sizes captured by default, up to `max_num_seqs`.
DEFAULT_SIZES = (1, 2, 4, *range(8, 129, 8), *range(144, 257, 16), *range(288, 513, 32))

# Runs a decode: token ids and positions int64 [rows], metadata -> hidden states [rows, H].
Decode = Callable[[torch.Tensor, torch.Tensor, AttentionMetaData], torch.Tensor]


def capture_sizes(config: Config) -> tuple[int, ...]:
    """Numbers of sequences to capture, ascending; the configured ones, or the default ones."""
    wanted = config.compilation_config.cudagraph_capture_sizes
    return tuple(sorted({min(size, config.max_num_seqs) for size in wanted or DEFAULT_SIZES}))


@dataclass(frozen=True)
class CapturedStep:
    """One captured decode.

    Attributes:
        token_ids: int64 [rows], what it reads.
        positions: int64 [rows], likewise.
        plan: of its attention, likewise.
        replay: hidden states [rows, H], to be read before the next replay of any step.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    plan: AttentionPlan
    replay: Callable[[], torch.Tensor]


class DecodeGraphs:
    """The captured steps of one model over one KV cache.

    Args:
        graphs: of the kernel back end.
        cache: that the steps read and write.
        num_heads: Hq of this rank.
        max_seq_len: tokens of the longest sequence.
        sizes: numbers of sequences, ascending.
        decode: runs one.
        device: of the inputs.
        progress: called with (captured, to capture).
    """

    def __init__(
        self,
        graphs: StepGraphs,
        cache: KVCache,
        num_heads: int,
        max_seq_len: int,
        sizes: tuple[int, ...],
        decode: Decode,
        device: torch.device,
        progress: Callable[[int, int], None],
    ) -> None:
        self._graphs = graphs
        self._sizes = sizes
        self._steps: dict[int, CapturedStep] = {}
        # The largest first, so that the smaller ones find its memory.
        for size in reversed(sizes):
            plan = graphs.plan(cache, num_heads, size, max_seq_len)
            self._steps[size] = self._captured(size, plan, decode, device)
            progress(len(self._steps), len(sizes))

    def _captured(self, rows: int, plan: AttentionPlan, decode: Decode, device: torch.device) -> CapturedStep:
        token_ids, positions = torch.zeros(2, rows, dtype=torch.int64, device=device)
        metadata = _padding(rows)
        metadata.plan = plan
        replay = self._graphs.capture(lambda: decode(token_ids, positions, metadata))
        return CapturedStep(token_ids, positions, plan, replay)

    def fits(self, num_seqs: int) -> bool:
        """True if a decode of so many sequences has been captured."""
        return num_seqs <= self._sizes[-1]

    def run(self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetaData) -> torch.Tensor:
        """Hidden states [n, H] of a decode of n sequences that `fits`, to be read before the next `run`."""
        count = len(token_ids)
        step = self._steps[self._sizes[bisect_left(self._sizes, count)]]
        self._graphs.write(step.plan, metadata)
        step.token_ids[:count].copy_(token_ids, non_blocking=True)
        step.positions[:count].copy_(positions, non_blocking=True)
        return step.replay()[:count]


def _padding(rows: int) -> AttentionMetaData:
    """A decode of no sequence, with so many padding rows."""
    nothing = np.zeros(0, np.int64)
    return AttentionMetaData(
        cu_seqlens_q=np.zeros(rows + 1, np.int64),
        seq_lens=np.zeros(rows, np.int64),
        block_tables=np.zeros((rows, 0), np.int64),
        slot_mapping=nothing,
    )
