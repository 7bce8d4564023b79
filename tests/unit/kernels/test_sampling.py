"""Sampling against a brute-force reference in Python integers and floats (docs/explanation/determinism.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.params.sampling_checks import float32
from kernels import sampling
from kernels.interface import SampleParams
from kernels.no_token import NO_TOKEN
from kernels.penalties import Penalties, SeenIds, penalize
from kernels.philox import all_token_words
from kernels.sampling import gumbel, kept_ids, sample

pytestmark = pytest.mark.each_value

MASK = 2**32 - 1


@dataclass(frozen=True)
class Row:
    """One row's parameters."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 1
    position: int = 10
    choice: int = 0


def reference_word(row: Row, token: int) -> int:
    c = [token >> 2, row.position, row.choice, 0x46534C31]
    k = [row.seed & MASK, row.seed >> 32]
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b & MASK, (a >> 32) ^ c[3] ^ k[1], a & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c[token & 3]


def reference_kept(scaled: list[float], row: Row) -> list[int]:
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    largest = scaled[order[0]]
    if row.min_p > 0:
        order = [i for i in order if scaled[i] >= float32(largest + float32(math.log(row.min_p)))]
    if row.top_k > 0:
        order = order[: row.top_k]
    if row.top_p < 1:
        masses = {i: round(math.exp(float32(scaled[i] - largest)) * 2**44) for i in order}
        numerator, denominator = row.top_p.as_integer_ratio()
        wanted = -(-numerator * sum(masses.values()) // denominator)
        mass = 0
        for count, i in enumerate(order, start=1):
            mass += masses[i]
            if mass >= wanted:
                order = order[:count]
                break
    return order


def reference_sample(logits: list[float], row: Row) -> int:
    if row.temperature == 0:
        return max(range(len(logits)), key=lambda i: (logits[i], -i))
    scaled = [float32(value / row.temperature) for value in logits]

    def score(i: int) -> float:
        exponential = -math.log1p(-(reference_word(row, i) + 0.5) * 2.0**-32)
        return float32(scaled[i] + float32(-math.log(exponential)))

    return max(reference_kept(scaled, row), key=lambda i: (score(i), -i))


def run(logits: np.ndarray, rows: list[Row]) -> list[int]:
    params = SampleParams(
        np.array([r.temperature for r in rows], np.float32),
        np.array([r.top_k for r in rows], np.int64),
        np.array([r.top_p for r in rows], np.float32),
        np.array([r.min_p for r in rows], np.float32),
    )
    seeds = np.array([r.seed for r in rows], np.uint64)
    positions = np.array([r.position for r in rows], np.int64)
    choices = np.array([r.choice for r in rows], np.int64)
    ids: list[int] = sample(logits, params, seeds, positions, choices).tolist()
    return ids


# Steps of a quarter make ties common, as bfloat16 logits do.
LOGITS = st.lists(st.integers(-40, 40).map(lambda v: v / 4), min_size=1, max_size=60)
ROWS = st.builds(
    Row,
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 2.5]).map(float32),
    top_k=st.integers(0, 70),
    top_p=st.sampled_from([0.01, 0.3, 0.5, 0.9, 0.999, 1.0]).map(float32),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]).map(float32),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**31),
    choice=st.integers(0, 127),
)


@settings(max_examples=200)
@given(logits=LOGITS, rows=st.lists(ROWS, min_size=1, max_size=4))
def test_equals_the_reference(logits: list[float], rows: list[Row]) -> None:
    batch = np.array([logits] * len(rows), np.float32)
    assert run(batch, rows) == [reference_sample(logits, row) for row in rows]


def test_row_is_independent_of_batch() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (40, 500)).astype(np.float32)
    rows = [
        Row(float32([0, 0.5, 1.0][i % 3]), [0, 20][i % 2], float32([1.0, 0.8][(i // 2) % 2]), seed=i) for i in range(40)
    ]
    together = run(logits, rows)
    assert together == [run(logits[i : i + 1], [rows[i]])[0] for i in range(40)]
    order = rng.permutation(40)
    assert run(logits[order], [rows[i] for i in order]) == [together[i] for i in order]


@pytest.mark.parametrize("scale", [0.0, 1.0, 8.0, 30.0])
def test_large_vocabulary_samples_exact_winner(scale: float) -> None:
    """Above 4,096 ids most noise is computed in float32 only; the winner is the one of float64."""
    rng = np.random.default_rng(int(scale))
    logits = rng.normal(0, 1, (3, 20_000)).astype(np.float32) * np.float32(scale)
    rows = [Row(seed=seed, position=seed * 7) for seed in (1, 2, 3)]
    counters = (np.array(values, np.uint64) for values in ([1, 2, 3], [7, 14, 21], [0, 0, 0]))
    scores = logits + gumbel(all_token_words(20_000, *counters))
    assert run(logits, rows) == scores.argmax(axis=1).tolist()


def test_winner_with_lowest_noise_is_sampled() -> None:
    """Float32 noise is worst at its lowest end: a far larger logit must still win."""
    row = Row(seed=5)
    words = np.array([reference_word(row, token) for token in range(5000)], np.uint64)
    logits = np.full((1, 5000), -20.0, np.float32)
    logits[0, int(words.argmax())] = 20.0
    assert run(logits, [row]) == [int(words.argmax())]


def test_approximate_noise_stays_within_its_margin() -> None:
    words = np.concatenate((np.arange(2000), 2**32 - 1 - np.arange(2000), np.arange(0, 2**32, 99991))).astype(np.uint64)
    error = np.abs(sampling._approximate_gumbel(words) - gumbel(words)).max()
    assert 2 * error < sampling._APPROXIMATE_MARGIN


def test_gumbel_is_finite_for_every_word() -> None:
    assert np.isfinite(gumbel(np.array([0, 1, 2**31, 2**32 - 2, 2**32 - 1], np.uint64))).all()


def test_top_k_keeps_exactly_k_of_equal_values() -> None:
    assert kept_ids(np.zeros(10, np.float32), 3, 1.0, np.float32(0)).tolist() == [0, 1, 2]


def test_top_p_of_equal_values_keeps_the_lowest_ids() -> None:
    assert kept_ids(np.zeros(10, np.float32), 0, 0.5, np.float32(0)).tolist() == [0, 1, 2, 3, 4]


def test_top_p_of_a_flat_large_vocabulary_grows_its_sorted_part() -> None:
    rng = np.random.default_rng(1)
    scaled = rng.normal(0, 0.01, 5000).astype(np.float32)
    row = Row(top_p=float32(0.95))
    assert kept_ids(scaled, 0, row.top_p, np.float32(0)).tolist() == sorted(reference_kept(scaled.tolist(), row))


def test_masked_ids_are_never_sampled() -> None:
    logits = np.full((1, 50), -np.inf, np.float32)
    logits[0, :2] = 0.0
    drawn = {run(logits, [Row(seed=seed, top_k=k)])[0] for seed in range(40) for k in (0, 10)}
    assert drawn == {0, 1}


FILTERED = [Row(), Row(top_k=3), Row(top_p=0.5), Row(min_p=0.5)]


@pytest.mark.parametrize("temperature", [1e-45, 1e-40, 1e-38, 1e-37])
@pytest.mark.parametrize("row", FILTERED)
def test_tiny_temperature_samples_most_likely_id(row: Row, temperature: float) -> None:
    """If the division overflowed for several ids, the lowest of them won."""
    logits = np.random.default_rng(3).normal(0, 10, (6, 300)).astype(np.float32)
    logits[3:] -= 1000
    ids = run(logits, [replace(row, temperature=float32(temperature))] * 6)
    assert ids == logits.argmax(axis=1).tolist()


def test_overflowing_penalty_keeps_logits_finite() -> None:
    logits, one = np.ones((1, 8), np.float32), np.ones(1, np.float32)
    seen = [SeenIds(np.array([3]), [])]
    penalize(logits, Penalties(np.array([0]), seen, np.float32(1e-44) * one, 0 * one, 0 * one))
    assert np.isfinite(logits).all()
    assert run(logits, [Row()]) == [3]


@pytest.mark.parametrize("row", [*FILTERED, Row(temperature=0.0)])
def test_overflowed_rows_do_not_affect_others(row: Row) -> None:
    logits = np.zeros((4, 8), np.float32)
    logits[0, 3], logits[1], logits[2, 5] = np.nan, np.nan, np.inf
    ids = run(logits, [row] * 4)
    assert ids[:3] == [0, NO_TOKEN, NO_TOKEN]
    assert ids[3] == run(logits[3:], [row])[0]


def test_frequencies_follow_the_probabilities() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    count = 20_000
    drawn = run(np.tile(logits, (count, 1)), [Row(seed=9, position=position) for position in range(count)])
    shares = np.bincount(drawn, minlength=4) / count
    assert np.abs(shares - np.exp(logits)).max() < 0.015


IDS = st.lists(st.integers(0, 40), max_size=30)


@given(IDS, IDS, IDS)
def test_seen_ids_update_incrementally(prompt: list[int], output: list[int], more: list[int]) -> None:
    """Counted token by token, or all at once."""
    grown = SeenIds(np.unique(np.array(prompt, np.int64)), output)
    for token in more:
        grown.add(token)
    made = SeenIds(np.unique(np.array(prompt, np.int64)), [*output, *more])
    counts, expected = (dict(zip(one.ids, one.output_counts, strict=True)) for one in (grown, made))
    assert counts == expected
    assert sorted(grown.ids) == sorted({*prompt, *output, *more})
