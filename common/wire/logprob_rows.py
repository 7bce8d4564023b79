"""Logprobs on the wire between workers and routers: one row of four-byte words per token, little endian.

A row has the logprob, the raw logprob (different if the first is of the processed distribution), the probability mass
that the filters kept (float32, NaN without filters) and the rank (uint32). Then follow the ids of the most likely
tokens and their logprobs, best first, and the logprobs of the requested ids. All rows of one request have the same
length, so they are cut and joined as bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from common.params.logprobs import HEAD_WORDS, LogprobLayout

Words = npt.NDArray[np.uint32]
Reals = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs at one position.

    Attributes:
        logprob: of the token there.
        raw: its logprob in the model's own distribution.
        rank: of the token; 1 is the most likely. Ties are ranked by id.
        top: the most likely tokens and their logprobs, best first.
        given: logprobs of the requested ids, in their order.
        kept_mass: probability mass that the filters kept; None for raw logprobs.
    """

    logprob: float
    raw: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
    given: tuple[float, ...] = ()
    kept_mass: float | None = None


def rows_table(
    layout: LogprobLayout,
    logprobs: Reals,
    ranks: npt.NDArray[np.int64],
    top_ids: npt.NDArray[np.int64],
    top: Reals,
    given: Reals,
    *,
    raw: Reals | None = None,
    kept_mass: Reals | None = None,
) -> Words:
    """Rows as an array [R, words], from columns with R entries. `top_ids`, `top` and `given` can have several values
    per row."""
    words = np.empty((len(logprobs), layout.num_words), "<u4")
    reals = words.view("<f4")
    reals[:, 0] = logprobs
    reals[:, 1] = logprobs if raw is None else raw
    reals[:, 2] = np.nan if kept_mass is None else kept_mass
    words[:, 3] = ranks
    split = HEAD_WORDS + layout.top
    words[:, HEAD_WORDS:split] = top_ids[:, : layout.top]
    reals[:, split : split + layout.top] = top[:, : layout.top]
    reals[:, split + layout.top :] = given[:, : layout.given]
    return words


def unpack(layout: LogprobLayout, rows: bytes | bytearray) -> list[TokenLogprobs]:
    """The entries of whole rows.

    Raises:
        ValueError: the last row is incomplete.
    """
    words = np.frombuffer(rows, "<u4").reshape(-1, layout.num_words)
    reals, ints = words.view("<f4").tolist(), words.tolist()
    split = HEAD_WORDS + layout.top
    return [
        TokenLogprobs(
            numbers[0],
            numbers[1],
            ids[3],
            tuple(zip(ids[HEAD_WORDS:split], numbers[split : split + layout.top], strict=True)),
            tuple(numbers[split + layout.top :]),
            None if math.isnan(numbers[2]) else numbers[2],
        )
        for ids, numbers in zip(ints, reals, strict=True)
    ]


def raw_logprobs(layout: LogprobLayout, rows: bytes | bytearray) -> list[float]:
    """The raw logprob of each row.

    Raises:
        ValueError: the last row is incomplete.
    """
    raw: list[float] = np.frombuffer(rows, "<f4").reshape(-1, layout.num_words)[:, 1].tolist()
    return raw


def added(total: float, logprobs: Iterable[float]) -> float:
    """Adds logprobs to `total` one by one, in float64 and token order: the bits do not depend on how they arrived."""
    for logprob in logprobs:
        total += logprob
    return total
