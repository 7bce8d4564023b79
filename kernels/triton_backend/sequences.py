"""Search for a program's sequence of the step, on the device: grids know no more than how many rows there are."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sequence_of(cu_seqlens_q, tile, num_seqs, TOKENS: tl.constexpr):
    """The sequence of a tile, and the tile's place among the sequence's.

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
    """Tiles of `tokens` tokens that a step may have, see `sequence_of`."""
    return rows if tokens == 1 else rows // tokens + 2 * seqs
