"""Sampling by Gumbel noise, exactly as docs/explanation/determinism.md says; numpy, on the host.

Integer masses and the order (value descending, id ascending) make the result independent of tiles, shards and sorting
algorithms. Noise is computed only for the ids that the filters leave.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kernels.interface import AllowedBits, AllowedIds, BiasedIds, MaskedIds, SampleParams
from kernels.no_token import NO_TOKEN
from kernels.penalties import penalize
from kernels.philox import Words, all_token_words, token_words

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
# Seeds, positions and choices of all rows, uint64 [S].
Counters = tuple[Words, Words, Words]

# Weights of top-p: exp(x - max) in units of 2^-44; V < 2^19 keeps their sum within 63 bits.
MASS_ONE = 2.0**44
# Rows whose noise is computed together: bounds the temporary arrays to some tens of MB.
_MAX_FLAT = 1 << 20
# float32 noise errs by at most 0.32, so the best id is within twice that of the best approximate score.
_APPROXIMATE_FROM = 4096
_APPROXIMATE_MARGIN = np.float32(0.75)
_LARGEST_BELOW_ONE = np.float32(1.0 - 2.0**-24)
# How many ids are sorted first when only the most likely ones are wanted; grown until they suffice.
_FIRST_SORTED = 1024


def sample(logits: Floats, params: SampleParams, seeds: Words, positions: Ids, choices: Ids) -> Ids:
    """Token ids int64 [S] for float32 logits [S, V]; see SamplingOps.sample.

    Penalties (kernels/penalties.py) come first, then biases, masks, the division by the temperature and the filters. A
    row with NaN, or whose division overflows, gives the largest number's id; one whose largest number is not finite
    gives NO_TOKEN.
    """
    if params.penalties is not None:
        penalize(logits, params.penalties)
    write_biases(logits, params.biased)
    write_masks(logits, params.allowed, params.masked)
    confine(logits, params.confined)
    ids = np.empty(len(logits), np.int64)
    broken = ~np.isfinite(logits.max(axis=1))
    if broken.any():
        logits = np.where(np.isnan(logits), -np.inf, logits).astype(np.float32)
    largest = logits.max(axis=1)
    greedy = broken | (params.temperature == 0)
    with np.errstate(over="ignore"):
        greedy |= ~np.isfinite(largest / np.where(greedy, np.float32(1), params.temperature))
    filtered = ~greedy & ((params.min_p > 0) | (params.top_k > 0) | (params.top_p < 1))
    counters = (seeds, positions.astype(np.uint64), choices.astype(np.uint64))
    # argmax takes the first of equal values: the lowest id.
    ids[greedy] = logits[greedy].argmax(axis=1)
    per_call = max(1, _MAX_FLAT // logits.shape[1])
    for mask, sample_rows in ((filtered, _sample_filtered), (~greedy & ~filtered, _sample_unfiltered)):
        matching = np.flatnonzero(mask)
        for start in range(0, len(matching), per_call):
            rows = matching[start : start + per_call]
            with np.errstate(over="ignore"):
                scaled = logits[rows] / params.temperature[rows, None]
            ids[rows] = sample_rows(scaled, params, rows, counters)
    ids[~np.isfinite(largest)] = NO_TOKEN
    return ids


def write_biases(logits: Floats, biased: BiasedIds | None) -> None:
    """Writes biases into logits [S, V]; infinite logits stay infinite, and no sum overflows."""
    if biased is not None:
        logits[biased.rows, biased.ids] += biased.biases


def write_masks(logits: Floats, allowed: AllowedIds | None, masked: MaskedIds | None) -> None:
    """Writes minus infinity into logits [S, V] where an id may not be sampled."""
    if allowed is not None:
        kept = logits[allowed.rows, allowed.ids]
        logits[np.unique(allowed.rows)] = -np.inf
        logits[allowed.rows, allowed.ids] = kept
    if masked is not None:
        counts = _counting(masked)
        logits[masked.rows[counts], masked.ids[counts]] = -np.inf


def confine(logits: Floats, confined: AllowedBits | None) -> None:
    """Writes minus infinity into logits [S, V] for ids whose bit is not set."""
    if confined is not None:
        octets = confined.bits.astype("<u4").view(np.uint8)
        kept = np.unpackbits(octets, axis=1, count=logits.shape[1], bitorder="little").view(np.bool_)
        logits[confined.rows] = np.where(kept, logits[confined.rows], np.float32(-np.inf))


def _counting(masked: MaskedIds) -> npt.NDArray[np.bool_]:
    """Selects the mask entries whose condition the row's newest token meets."""
    if masked.after is None or masked.late is None:
        return np.ones(len(masked.rows), np.bool_)
    counting: npt.NDArray[np.bool_] = (masked.after == NO_TOKEN) | (masked.after == masked.late.numpy())
    return counting


def greedy(logits: Floats) -> Ids:
    """The lowest id of the largest logit of each row of float32 [S, V], int64 [S]; NaN counts as the lowest.

    NO_TOKEN if the largest is not finite.
    """
    numbers = np.where(np.isnan(logits), -np.inf, logits)
    # argmax takes the first of equal values: the lowest id.
    return np.where(np.isfinite(numbers.max(axis=1)), numbers.argmax(axis=1), NO_TOKEN)


def gumbel(words: Words) -> Floats:
    """float32(-log(E)) with E = -log1p(-(y + 0.5) / 2^32), both logarithms in float64."""
    uniform = (words.astype(np.float64) + 0.5) * 2.0**-32
    return np.asarray(-np.log(-np.log1p(-uniform)), np.float32)


def _approximate_gumbel(words: Words) -> Floats:
    """`gumbel` in float32: off by at most 0.32, where the noise is lowest."""
    uniform = np.minimum((words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32), _LARGEST_BELOW_ONE)
    return np.asarray(-np.log(-np.log1p(-uniform)))


def _sample_filtered(scaled: Floats, params: SampleParams, rows: Ids, counters: Counters) -> Ids:
    """Samples rows that have filters, from l / T [R, V] of the rows [R] of the batch."""
    kept = [
        kept_ids(values, int(params.top_k[row]), float(params.top_p[row]), params.min_p[row])
        for row, values in zip(rows, scaled, strict=True)
    ]
    lengths = np.array([len(ids) for ids in kept])
    flat = np.concatenate(kept)
    places = np.repeat(np.arange(len(rows)), lengths)
    scores = scaled[places, flat] + gumbel(token_words(flat, *(counter[rows][places] for counter in counters)))
    ends = np.cumsum(lengths)
    best = [start + scores[start:end].argmax() for start, end in zip(ends - lengths, ends, strict=True)]
    return np.asarray(flat[best])


def _sample_unfiltered(scaled: Floats, params: SampleParams, rows: Ids, counters: Counters) -> Ids:
    """Samples rows without filters; returns token ids int64."""
    words = all_token_words(scaled.shape[1], *(counter[rows] for counter in counters))
    if scaled.shape[1] < _APPROXIMATE_FROM:
        return np.asarray((scaled + gumbel(words)).argmax(axis=1))
    approximate = scaled + _approximate_gumbel(words)
    near = approximate >= approximate.max(axis=1, keepdims=True) - _APPROXIMATE_MARGIN
    scores = np.full_like(scaled, -np.inf)
    scores[near] = scaled[near] + gumbel(words[near])
    return np.asarray(scores.argmax(axis=1))


def kept_ids(scaled: Floats, top_k: int, top_p: float, min_p: np.float32) -> Ids:
    """Ids, ascending, that min_p, top_k and top_p leave, in this order, of one row of l / T [V]."""
    largest = scaled.max()
    kept = np.arange(len(scaled))
    if min_p > 0:
        kept = np.flatnonzero(scaled >= largest + np.float32(math.log(min_p)))
    if 0 < top_k < len(kept):
        kept = kept[most_likely(scaled[kept], top_k)]
    if top_p < 1:
        kept = _top_p(kept, scaled, largest, top_p)
    return np.sort(kept)


def most_likely(values: Floats, count: int) -> Ids:
    """Indices of the `count` largest values in the order (value descending, index ascending)."""
    if count == len(values):
        return np.argsort(-values, kind="stable")
    # Ties at the border: all of them are candidates, the stable sort keeps the lowest indices.
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    candidates = np.flatnonzero(values >= threshold)
    return candidates[np.argsort(-values[candidates], kind="stable")][:count]


def _top_p(kept: Ids, scaled: Floats, largest: np.float32, top_p: float) -> Ids:
    """Smallest prefix of `kept` whose integer mass reaches ceil(top_p * total)."""
    values = scaled[kept]
    masses = np.rint(np.exp((values - largest).astype(np.float64)) * MASS_ONE).astype(np.int64)
    wanted = _ceil_product(top_p, int(masses.sum()))
    count = min(_FIRST_SORTED, len(values))
    while True:
        order = most_likely(values, count)
        sums = np.cumsum(masses[order])
        if sums[-1] >= wanted or count == len(values):
            return np.asarray(kept[order[: int(np.searchsorted(sums, wanted)) + 1]])
        count = min(count * 8, len(values))


def _ceil_product(fraction: float, total: int) -> int:
    """ceil(fraction * total) in exact integers: a float64 product of a 63-bit total would round."""
    numerator, denominator = fraction.as_integer_ratio()
    return -(-numerator * total // denominator)
