"""Decode steps captured for fixed numbers of sequences (CUDA and HIP graphs), with and without drafts.

A step runs as the smallest captured one with enough sequences and rows per sequence. The remaining rows are padding,
which writes no slot and is not read. In a step that verifies drafts, sequences may have different numbers of drafts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from common.config import Config
from kernels.interface import AttentionMetaData, AttentionPlan, KVCache, StepGraphs

# Batch sizes captured by default, up to `max_num_seqs`.
DEFAULT_SIZES = (1, 2, 4, *range(8, 129, 8), *range(144, 257, 16), *range(288, 513, 32))
# Most rows of a captured step that verifies drafts. In larger steps drafts gain nothing.
_MOST_VERIFIED: Final = 512

# Runs a decode: token ids and positions int64 [rows], metadata -> hidden states [rows, H].
Decode = Callable[[torch.Tensor, torch.Tensor, AttentionMetaData], torch.Tensor]


@dataclass(frozen=True)
class StepSize:
    """Size of a captured step.

    Attributes:
        num_seqs: sequences.
        most_rows: rows of each: its newest token, and its drafts.
    """

    num_seqs: int
    most_rows: int = 1

    @property
    def num_rows(self) -> int:
        return self.num_seqs * self.most_rows


def capture_sizes(config: Config) -> tuple[StepSize, ...]:
    """Steps to capture, for each configured (or default) number of sequences, ascending: without drafts, then with as
    many as a step may verify."""
    wanted = config.compilation_config.cudagraph_capture_sizes
    counts = sorted({min(size, config.max_num_seqs) for size in wanted or DEFAULT_SIZES})
    plain = tuple(map(StepSize, counts))
    if (spec := config.speculative_config) is None:
        return plain
    verifying = (StepSize(count, 1 + spec.num_speculative_tokens) for count in counts)
    return (*plain, *(size for size in verifying if size.num_rows <= _MOST_VERIFIED))


@dataclass(frozen=True)
class CapturedStep:
    """One captured decode.

    Attributes:
        token_ids: int64 [rows], input of the graph.
        positions: int64 [rows], input of the graph.
        plan: of its attention, input of the graph.
        replay: hidden states [rows, H]; valid until the next replay of any step.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    plan: AttentionPlan
    replay: Callable[[], torch.Tensor]


class DecodeGraphs:
    """The captured steps of one model over one KV cache.

    Args:
        graphs: of the kernel back end.
        cache: read and written by the steps.
        num_heads: Hq of this rank.
        max_seq_len: tokens of the longest sequence.
        sizes: see `capture_sizes`.
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
        sizes: tuple[StepSize, ...],
        decode: Decode,
        device: torch.device,
        progress: Callable[[int, int], None],
    ) -> None:
        self._graphs = graphs
        self._cache = cache
        # Captured numbers of sequences, by most rows of a sequence.
        self._counts = _by_most_rows(sizes)
        self._steps: dict[StepSize, CapturedStep] = {}
        # The largest first, so that smaller ones reuse its memory.
        for size in sorted(sizes, key=lambda size: -size.num_rows):
            plan = graphs.plan(cache, num_heads, size.num_seqs, size.most_rows, max_seq_len)
            self._steps[size] = self._captured(size, plan, decode, device)
            progress(len(self._steps), len(sizes))

    def _captured(self, size: StepSize, plan: AttentionPlan, decode: Decode, device: torch.device) -> CapturedStep:
        token_ids, positions = torch.zeros(2, size.num_rows, dtype=torch.int64, device=device)
        metadata = _padding(size)
        metadata.plan = plan
        replay = self._graphs.capture(lambda: decode(token_ids, positions, metadata))
        return CapturedStep(token_ids, positions, plan, replay)

    def fits(self, num_seqs: int, most_rows: int) -> bool:
        """True if a decode of `num_seqs` sequences with `most_rows` rows each has been captured."""
        return self._size(num_seqs, most_rows) is not None

    def run(self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetaData) -> torch.Tensor:
        """Hidden states [T, H] of a decode that `fits`; valid until the next `run`."""
        count, lengths = len(token_ids), np.diff(metadata.cu_seqlens_q)
        size = self._size(len(lengths), int(lengths.max()))
        assert size is not None
        step = self._steps[size]
        self._graphs.write(step.plan, metadata, self._cache)
        step.token_ids[:count].copy_(token_ids, non_blocking=True)
        step.positions[:count].copy_(positions, non_blocking=True)
        return step.replay()[:count]

    def _size(self, num_seqs: int, most_rows: int) -> StepSize | None:
        """The smallest captured step that is large enough; None if there is none."""
        for rows, counts in self._counts.items():
            if most_rows <= rows and num_seqs <= counts[-1]:
                return StepSize(counts[bisect_left(counts, num_seqs)], rows)
        return None


def _by_most_rows(sizes: Iterable[StepSize]) -> dict[int, list[int]]:
    counts: dict[int, list[int]] = {}
    for size in sorted(sizes, key=lambda size: (size.most_rows, size.num_seqs)):
        counts.setdefault(size.most_rows, []).append(size.num_seqs)
    return counts


def _padding(size: StepSize) -> AttentionMetaData:
    """Metadata of a decode of padding rows alone."""
    return AttentionMetaData(
        cu_seqlens_q=np.zeros(size.num_seqs + 1, np.int64),
        seq_lens=np.zeros(size.num_seqs, np.int64),
        block_tables=np.zeros((size.num_seqs, 0), np.int64),
        slot_mapping=np.zeros(0, np.int64),
    )
