"""Logprobs of rows of logits, reference implementation in numpy.

The logarithm is taken of a sum of integers, the masses of top-p (docs/explanation/determinism.md), so that neither the
order of the additions, nor threads, nor ranks matter:

    mass(i) = rint(exp(float64(logit(i) - largest)) * 2^44)
    log Z   = largest + log(sum of the masses * 2^-44)              in float64
    logprob = float32(logit - log Z)

An id more than 31 below the largest adds nothing to the sum, but still has a logprob. Ids are in order of (logit
descending, id ascending); top ids and ranks use that order.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from kernels.interface import LogitStats
from kernels.sampling import MASS_ONE, kept_ids, most_likely

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
# Numbers that are widened at a time.
_MAX_FLAT: Final = 1 << 20


def logit_stats(logits: Floats, tokens: Ids, top: int, given: Ids) -> LogitStats:
    """See SamplingOps.logit_stats."""
    rows, ids = np.arange(len(logits)), np.zeros((len(logits), top), np.int64)
    highest = logits.max(axis=1, initial=-np.inf)
    finite = np.isfinite(highest)
    ranks, masses = np.zeros(len(logits), np.int64), np.zeros(len(logits), np.int64)
    for row in np.flatnonzero(finite):
        values, token = logits[row], tokens[row]
        masses[row] = mass_of(values, highest[row])
        ranks[row] = 1 + np.count_nonzero(values > values[token]) + np.count_nonzero(values[:token] == values[token])
        if top:
            ids[row] = most_likely(values, top)
    return LogitStats(
        highest, masses, ranks, logits[rows, tokens], ids, logits[rows[:, None], ids], gathered(logits, given)
    )


def gathered(logits: Floats, given: Ids) -> Floats:
    """float32 [R, G]: logits [R, V] at the ids [R, G]."""
    return logits[np.arange(len(logits))[:, None], given]


def mass_of(values: Floats, highest: np.float32) -> int:
    """Sum of the masses of one row [V]."""
    total = 0
    for first in range(0, len(values), _MAX_FLAT):
        below = (values[first : first + _MAX_FLAT] - highest).astype(np.float64)
        total += int(np.rint(np.exp(below) * MASS_ONE).astype(np.int64).sum())
    return total


def log_normalizers(stats: LogitStats) -> npt.NDArray[np.float64]:
    """float64 [R]: log Z of each row; NaN for a row without a finite largest logit."""
    rows = zip(stats.highest.tolist(), stats.masses.tolist(), strict=True)
    return np.array([high + math.log(mass / MASS_ONE) if mass else math.nan for high, mass in rows], np.float64)


def processed(logits: Floats, temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[Floats, float]:
    """The distribution that a token is drawn from: one row of logits [V] after penalties and masks, as logits.

    Returns:
        Logits over the temperature, with minus infinity for ids that the filters drop, and the share of the mass that
            they keep. At temperature 0 the logits themselves, all of them.
    """
    if temperature == 0.0:
        return logits, 1.0
    scaled = logits / np.float32(temperature)
    highest = scaled.max()
    if not np.isfinite(highest):
        return scaled, math.nan
    kept = kept_ids(scaled, top_k, top_p, np.float32(min_p))
    left = np.full_like(scaled, -np.inf)
    left[kept] = scaled[kept]
    return left, mass_of(left, highest) / mass_of(scaled, highest)
