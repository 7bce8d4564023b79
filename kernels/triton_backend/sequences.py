"""Finds the sequence of a tile on the device, because the grid depends only on the number of rows."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sequence_of(cu_seqlens_q, tile, num_seqs, TOKENS: tl.constexpr):
    """Sequence of a tile, and index of the tile within the sequence.

    Tiles are of TOKENS tokens at positions that are multiples of it, so that r rows lie in up to r // TOKENS + 2. The
    places past a sequence's last tile belong to it too.
    """
    low = 0
    high = num_seqs
    start = 0
    while high - low > 1:
        middle = (low + high) // 2
        middle_start = tl.load(cu_seqlens_q + middle)
        if TOKENS > 1:
            middle_start = middle_start // TOKENS + 2 * middle
        before = middle_start <= tile
        low = tl.where(before, middle, low)
        start = tl.where(before, middle_start, start)
        high = tl.where(before, high, middle)
    return low, tile - start


def num_tiles(rows: int, seqs: int, tokens: int) -> int:
    """Most tiles of `tokens` tokens in a step; see `sequence_of`."""
    return rows if tokens == 1 else rows // tokens + 2 * seqs
