"""Native sampling gives the tokens of kernels/sampling.py, and of the brute-force reference, exactly."""

from __future__ import annotations

from ctypes import CDLL
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.params.sampling_checks import float32
from kernels import sampling as reference
from kernels.cpu import sampling
from kernels.interface import AllowedBits, AllowedIds, BiasedIds, MaskedIds, SampleParams
from kernels.penalties import Penalties, SeenIds, penalize
from tests.unit.kernels.test_sampling import LOGITS, ROWS, Row, reference_sample

pytestmark = pytest.mark.each_value


def arguments(rows: list[Row]) -> tuple[SampleParams, np.ndarray, np.ndarray, np.ndarray]:
    params = SampleParams(
        np.array([r.temperature for r in rows], np.float32),
        np.array([r.top_k for r in rows], np.int64),
        np.array([r.top_p for r in rows], np.float32),
        np.array([r.min_p for r in rows], np.float32),
    )
    seeds = np.array([r.seed for r in rows], np.uint64)
    return params, seeds, np.array([r.position for r in rows]), np.array([r.choice for r in rows])


def check(native: CDLL, logits: np.ndarray, rows: list[Row]) -> None:
    given = arguments(rows)
    ids = sampling.sample(native, logits.copy(), *given)
    assert ids.tolist() == reference.sample(logits.copy(), *given).tolist()


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(logits=LOGITS, rows=st.lists(ROWS, min_size=1, max_size=4))
def test_equals_the_brute_force_reference(native: CDLL, logits: list[float], rows: list[Row]) -> None:
    batch = np.array([logits] * len(rows), np.float32)
    ids = sampling.sample(native, batch, *arguments(rows))
    assert ids.tolist() == [reference_sample(logits, row) for row in rows]


def mixed_rows(count: int, seed: int) -> list[Row]:
    rng = np.random.default_rng(seed)
    return [
        Row(
            float32(rng.choice([0.0, 0.3, 1.0, 2.0])),
            int(rng.choice([0, 0, 1, 20, 300, 10_000])),
            float32(rng.choice([1.0, 1.0, 0.01, 0.5, 0.95, 0.9999])),
            float32(rng.choice([0.0, 0.0, 0.001, 0.1, 1.0])),
            seed=int(rng.integers(2**63)),
            position=int(rng.integers(2**33)),
            choice=int(rng.integers(128)),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("vocab", [1, 3, 17, 1024, 5003])
@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0, 40.0])
def test_equals_numpy_on_every_instruction_set(each_isa: CDLL, vocab: int, scale: float) -> None:
    rng = np.random.default_rng(vocab)
    logits = (rng.normal(0, 1, (60, vocab)) * scale).astype(np.float32)
    check(each_isa, logits, mixed_rows(60, vocab))
    # Ties everywhere, as in bfloat16, zeros of both signs among them.
    ties = np.where(rng.random(logits.shape) < 0.5, np.round(logits * 2) / 2, -0.0).astype(np.float32)
    check(each_isa, ties, mixed_rows(60, vocab))
    check(each_isa, np.round(logits), mixed_rows(60, 7 + vocab))


def test_equals_numpy_on_a_large_vocabulary(native: CDLL) -> None:
    rng = np.random.default_rng(5)
    check(native, rng.normal(0, 2, (24, 151_936)).astype(np.float32), mixed_rows(24, 9))


def seeded_rows(count: int, top_p: float = 1.0) -> list[Row]:
    seeds = np.random.default_rng(11).integers(2**63, size=count)
    return [Row(top_p=top_p, seed=int(seed), position=i) for i, seed in enumerate(seeds)]


@pytest.mark.parametrize("vocab", [64, 700, 1500])
def test_winner_of_flat_row_is_found_at_any_id(each_isa: CDLL, vocab: int) -> None:
    """Without a filter blocks of ids are passed over by a bound on their noise: no block may be that has the winner."""
    rows = seeded_rows(250)
    logits = np.zeros((len(rows), vocab), np.float32)
    tokens = reference.sample(logits.copy(), *arguments(rows))
    assert len(set((tokens // 4).tolist())) > min(vocab // 4, 100) * 0.7  # all over the row
    check(each_isa, logits, rows)


@pytest.mark.slow
@pytest.mark.parametrize(("below", "share"), [(3.0, 0.9), (8.0, 0.9), (13.0, 0.05)])
def test_nucleus_far_below_highest_logit(native: CDLL, below: float, share: float) -> None:
    """A nucleus is looked for among ids near the highest first; these have most of the mass, or a little, or none."""
    rows = seeded_rows(16, top_p=float32(0.97))
    rng = np.random.default_rng(2)
    logits = np.float32(-below) - rng.random((len(rows), 100_000), np.float32) / 2
    logits[:, 70_001] = 0.0
    masses = np.exp(logits.astype(np.float64))
    assert 1 - (masses[:, 70_001] / masses.sum(1)).mean() > share
    check(native, logits, rows)


def test_threads_do_not_change_tokens(threads: CDLL) -> None:
    logits = np.random.default_rng(3).normal(0, 2, (50, 900)).astype(np.float32)
    given = arguments(mixed_rows(50, 3))
    outs = []
    for count in (1, 3):
        threads.fissile_set_threads(count)
        outs.append(sampling.sample(threads, logits, *given).tolist())
    assert outs[0] == outs[1]


@pytest.mark.parametrize("row", [Row(), Row(top_k=3), Row(top_p=0.5), Row(min_p=0.5), Row(temperature=0.0)])
def test_overflowed_and_masked_rows(native: CDLL, row: Row) -> None:
    logits = np.zeros((6, 20), np.float32)
    logits[0, 3], logits[1], logits[2, 5], logits[3, 18] = np.nan, np.nan, np.inf, np.nan
    logits[4] = -np.inf
    logits[5, 2:] = -np.inf
    with np.errstate(all="ignore"):
        check(native, logits, [replace(row, seed=seed) for seed in range(6)])


def test_overflowing_temperature_equals_numpy(native: CDLL) -> None:
    logits = np.random.default_rng(3).normal(0, 100, (9, 30)).astype(np.float32)
    rows = [Row(temperature=float32(t)) for t in (1e-44, 1.0, 1e-38, 0.5, 1e-40, 2.0, 1e-44, 1e-30, 0.0)]
    with np.errstate(all="ignore"):
        check(native, logits, rows)


def greedy_params(rows: int, penalties: Penalties | None = None, masked: MaskedIds | None = None) -> SampleParams:
    """Parameters of greedy rows, whose tokens show the processed logits."""
    zeros, ones = np.zeros(rows, np.float32), np.ones(rows, np.float32)
    return SampleParams(zeros, np.zeros(rows, np.int64), ones, zeros, masked, penalties)


def draw_seen(rng: np.random.Generator, vocab: int, output: int) -> SeenIds:
    """A prompt of up to 40 ids and an output."""
    return SeenIds(np.unique(rng.integers(0, vocab, 40)), rng.integers(0, vocab, output).tolist())


def sampled_both(library: CDLL, logits: np.ndarray, params: SampleParams) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Tokens and processed logits, of the library and of numpy."""
    counters = np.arange(len(logits), dtype=np.uint64), *np.zeros((2, len(logits)), np.int64)
    with np.errstate(all="ignore"):
        both = [[one(written, params, *counters), written] for one, written in (
            (partial(sampling.sample, library), logits.copy(order="K")), (reference.sample, logits.copy()),
        )]  # fmt: skip
    return both[0], both[1]


def same_bits(found: np.ndarray, expected: np.ndarray) -> bool:
    """True if all numbers are the same; a zero's sign and a NaN's bits do not count."""
    return np.array_equal(found + np.float32(0), expected + np.float32(0), equal_nan=True)


@pytest.mark.parametrize("vocab", [7, 64, 1000, 5003])
def test_penalties_equal_numpy_on_every_instruction_set(each_isa: CDLL, vocab: int) -> None:
    """Penalties are written by vectors, to the bit what numpy writes, for any number of ids."""
    rng = np.random.default_rng(vocab)
    logits = (rng.normal(0, 4, (40, vocab)) * rng.choice([0.0, 1.0, 1e-30, 1e30], (40, vocab))).astype(np.float32)
    logits.ravel()[rng.integers(0, logits.size, 30)] = rng.choice([np.inf, -np.inf, np.nan, -0.0], 30)
    rows = rng.permutation(40)[:33]
    seen = [draw_seen(rng, vocab, size) for size in (0, 1, *rng.integers(0, 3 * vocab, 31))]
    given = ((1, 1.1, 0.5, 1e-44), (0, 0.3, -2), (0, 0.7, -2))
    repetition, presence, frequency = (rng.choice(values, 33).astype(np.float32) for values in given)
    penalties = Penalties(rows, seen, repetition, presence, frequency)
    found, expected = sampled_both(each_isa, logits, greedy_params(40, penalties))
    assert found[0].tolist() == expected[0].tolist()
    assert same_bits(found[1], expected[1])
    assert not same_bits(found[1], logits)


def test_penalties_and_masks_equal_numpy(threads: CDLL) -> None:
    """In any memory, with any number of threads, and sampled too; masked ids stay masked."""
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 1, (5, 30)).astype(np.float32)
    logits[0, 3], logits[1, 7], logits[2, 9] = np.inf, np.nan, -np.inf
    seen = [draw_seen(rng, 30, size) for size in (40, 0, 3, 9)]
    columns = [np.array(one, np.float32) for one in ((1.7, 0.5, 1.0, 1e-44), (0.4, 0, -2, 0.1), (0.2, -0.3, 0, 1.9))]
    masked = MaskedIds(np.array([4, 4, 0]), np.array([int(seen[0].ids[0]), 29, 5]))
    greedy = greedy_params(5, Penalties(np.array([4, 0, 1, 2]), seen, columns[0], columns[1], columns[2]), masked)
    drawn = replace(greedy, temperature=np.ones(5, np.float32))
    views = (logits, np.asfortranarray(logits), np.hstack((logits, logits))[:, :30])
    for count, view, params in product((1, 3), views, (greedy, drawn)):
        threads.fissile_set_threads(count)
        found, expected = sampled_both(threads, view, params)
        assert found[0].tolist() == expected[0].tolist()
        assert same_bits(found[1], expected[1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_biases_and_allowed_ids_equal_numpy(threads: CDLL, temperature: float) -> None:
    """Rows with penalties, a bias, both or neither, in one call: biases apply after penalties."""
    rng = np.random.default_rng(4)
    rows, vocab = 6, 200
    logits = rng.normal(0, 3, (rows, vocab)).astype(np.float32)
    logits[0, 3], logits[1, 7], logits[4, 9] = np.inf, np.nan, -np.inf
    seen = [draw_seen(rng, vocab, size) for size in (40, 0, 3)]
    columns = [np.array(one, np.float32) for one in ((1.7, 0.5, 1.0), (0.4, 0, -2), (0.2, -0.3, 0))]
    penalties = Penalties(np.array([4, 0, 2]), seen, columns[0], columns[1], columns[2])
    ids = np.concatenate([rng.permutation(vocab)[:50] for _ in range(3)])
    biased = BiasedIds(np.repeat([4, 5, 1], 50), ids, rng.uniform(-100, 100, 150).astype(np.float32))
    allowed = AllowedIds(np.repeat([4, 3], 50), np.tile(rng.permutation(vocab)[:50], 2))
    masked = MaskedIds(np.array([3, 2]), np.array([int(allowed.ids[0]), 5]))
    plain = greedy_params(rows, penalties, masked)
    params = replace(plain, temperature=np.full(rows, temperature, np.float32), biased=biased, allowed=allowed)
    for count, view in product((1, 3), (logits, np.asfortranarray(logits))):
        threads.fissile_set_threads(count)
        found, expected = sampled_both(threads, view, params)
        assert found[0].tolist() == expected[0].tolist()
        assert same_bits(found[1], expected[1])
    # Against formulas: of the row with all, and of the plain one.
    own = logits.copy()
    penalize(own, penalties)
    value = {token: np.float32(own[4, token] + bias) for token, bias in zip(ids[:50], biased.biases[:50], strict=True)}
    row = [value.get(token, own[4, token]) if token in allowed.ids[:50] else -np.inf for token in range(vocab)]
    assert same_bits(expected[1][4], np.array(row, np.float32))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 200])
def test_allowed_bits_equal_numpy(threads: CDLL, temperature: float, vocab: int) -> None:
    """Rows with penalties, bits, both or neither; words and bits beyond the vocabulary have no effect."""
    rng = np.random.default_rng(vocab)
    rows, words = 6, -(-vocab // 32) + 2
    logits = rng.normal(0, 3, (rows, vocab)).astype(np.float32)
    logits[1, 0], logits[5, -1] = np.nan, np.inf
    seen = [draw_seen(rng, vocab, min(vocab, size)) for size in (40, 0, 3)]
    columns = [np.array(one, np.float32) for one in ((1.7, 0.5, 1.0), (0.4, 0, -2), (0.2, -0.3, 0))]
    penalties = Penalties(np.array([4, 0, 2]), seen, columns[0], columns[1], columns[2])
    bits = rng.integers(1 << 32, size=(4, words), dtype=np.uint32)
    bits[0], bits[1, 0] = 0xFFFFFFFF, 0
    confined = AllowedBits(np.array([3, 4, 1, 5]), bits)
    plain = greedy_params(rows, penalties, None)
    params = replace(plain, temperature=np.full(rows, temperature, np.float32), confined=confined)
    for count, view in product((1, 3), (logits, np.asfortranarray(logits))):
        threads.fissile_set_threads(count)
        found, expected = sampled_both(threads, view, params)
        assert found[0].tolist() == expected[0].tolist()
        assert same_bits(found[1], expected[1])
    # Against the definition, bit by bit.
    own = logits.copy()
    penalize(own, penalties)
    for row, mask in zip(confined.rows, bits, strict=True):
        own[row, [token for token in range(vocab) if not mask[token // 32] >> (token % 32) & 1]] = -np.inf
    assert same_bits(expected[1], own)


@pytest.mark.parametrize("vocab", [63, 64, 65, 1003])
def test_allowed_bits_with_filters_equal_numpy(native: CDLL, vocab: int) -> None:
    """With many allowed tokens, few, one, and none in whole blocks."""
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 3, (40, vocab)).astype(np.float32)
    kept = rng.random((40, -(-vocab // 32) * 32)) < np.repeat([0.99, 0.5, 0.02, 0.0], 10)[:, None]
    kept[np.arange(40), rng.integers(vocab, size=40)] = True
    bits = np.packbits(kept, axis=1, bitorder="little").view(np.uint32)
    params, *counters = arguments(mixed_rows(40, vocab))
    confined = replace(params, confined=AllowedBits(np.arange(40), bits))
    ids = sampling.sample(native, logits.copy(), confined, *counters)
    assert ids.tolist() == reference.sample(logits.copy(), confined, *counters).tolist()
    assert kept[np.arange(40), ids].all()


def test_masks_apply_before_filters(native: CDLL) -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 1, (4, 30)).astype(np.float32)
    params = arguments([Row(temperature=0.0), Row(), Row(top_k=4), Row(top_p=0.5)])
    masked = MaskedIds(np.repeat(np.arange(4), 10), np.tile(np.arange(10), 4))
    steered = (replace(params[0], masked=masked), *params[1:])
    ids = sampling.sample(native, logits.copy(), *steered)
    assert ids.tolist() == reference.sample(logits.copy(), *steered).tolist()
    assert (ids >= 10).all()


def test_rows_of_a_view(native: CDLL) -> None:
    wide = np.random.default_rng(3).normal(0, 1, (9, 40)).astype(np.float32)
    params = arguments(mixed_rows(9, 1))
    expected = reference.sample(wide[:, :33].copy(), *params).tolist()
    assert sampling.sample(native, wide[:, :33], *params).tolist() == expected
    assert sampling.sample(native, np.asfortranarray(wide[:, :33]), *params).tolist() == expected


@settings(max_examples=300)
@given(fraction=st.floats(0, 1, width=32, exclude_max=True), total=st.integers(0, 2**63 - 1))
def test_top_p_mass_equals_kernel_integer_arithmetic(fraction: float, total: int) -> None:
    """The kernel's integer arithmetic, in Python: a float32 is mantissa * 2^-shift."""
    bits = int(np.float32(fraction).view(np.uint32))
    exponent = bits >> 23
    mantissa = (bits & 0x7FFFFF) | (0x800000 if exponent else 0)
    shift = 150 - (exponent or 1)
    assert -(-mantissa * total // 2**shift) == reference._ceil_product(fraction, total)
