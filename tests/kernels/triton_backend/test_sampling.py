"""Sampling in the interpreter: the tokens of kernels/sampling.py, which tests/unit/kernels compares with others."""

# Triton reads the annotations of its kernels.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import logprobs
from kernels import sampling as reference
from kernels.interface import AllowedBits, AllowedIds, BiasedIds, MaskedIds, SampleParams
from kernels.no_token import NO_TOKEN
from kernels.penalties import Penalties, SeenIds, penalize
from kernels.triton_backend import sampling
from kernels.triton_backend.launch import launch
from kernels.triton_backend.penalties import penalize as penalize_on_device
from kernels.triton_backend.sample_tensors import prepare
from kernels.triton_backend.sampling import TritonSamplingOps

pytestmark = pytest.mark.each_value

CPU = torch.device("cpu")
Logits = npt.NDArray[np.float32]
Filters = dict[str, list[float]]
INF, NAN = float("inf"), float("nan")
# What rows choose their parameters from.
OFF: Filters = {"top_k": [0], "top_p": [1.0], "min_p": [0.0]}
FILTERS: dict[str, Filters] = {
    "none": OFF,
    "top_k": OFF | {"top_k": [1, 2, 7, 30, 10_000]},
    "top_p": OFF | {"top_p": [0.0, 0.1, 0.5, 0.9, 0.999]},
    "min_p": OFF | {"min_p": [1e-4, 0.05, 0.5, 1.0]},
    "all": {"top_k": [0, 1, 3, 20, 400], "top_p": [1.0, 0.3, 0.8, 0.95], "min_p": [0.0, 0.01, 0.3]},
}


def params(rows: int, rng: np.random.Generator, filters: Filters) -> SampleParams:
    return SampleParams(
        rng.choice([0.2, 0.7, 1.0, 1.0, 3.0], rows).astype(np.float32),
        rng.choice(filters["top_k"], rows).astype(np.int64),
        rng.choice(filters["top_p"], rows).astype(np.float32),
        rng.choice(filters["min_p"], rows).astype(np.float32),
    )


def randoms(
    rows: int, rng: np.random.Generator
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Seeds, positions and choices."""
    return rng.integers(0, 2**64, rows, np.uint64), rng.integers(0, 2**20, rows), rng.integers(0, 128, rows)


def random_logits(rows: int, vocab: int, rng: np.random.Generator) -> Logits:
    """Narrow and wide rows; half of them coarse, so that there are ties."""
    logits = rng.normal(size=(rows, vocab)) * rng.choice([0.5, 2.0, 6.0], (rows, 1))
    coarse = rng.random((rows, 1)) < 0.5
    return np.asarray(np.where(coarse, np.round(logits * 2) / 2, logits), np.float32)


def assert_same(logits: Logits, given: SampleParams, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """The same tokens, and the same logits afterwards."""
    counters = randoms(len(logits), rng)
    expected_logits, found_logits = logits.copy(), torch.from_numpy(logits.copy())
    with np.errstate(all="ignore"):
        expected = reference.sample(expected_logits, given, *counters)
        found = sampling.sample(found_logits, prepare(given, *counters, CPU)).numpy()
    assert found.tolist() == expected.tolist(), given
    assert np.array_equal(found_logits.numpy(), expected_logits, equal_nan=True)
    return expected


@pytest.mark.parametrize("filters", list(FILTERS))
@pytest.mark.parametrize("vocab", [37, 700, 2500])
def test_sampled_tokens_equal_numpy(filters: str, vocab: int) -> None:
    rng = np.random.default_rng([vocab, *filters.encode()])
    rows = 6 if vocab < 1000 else 3
    assert_same(random_logits(rows, vocab, rng), params(rows, rng, FILTERS[filters]), rng)


@pytest.mark.long
@pytest.mark.parametrize("filters", list(FILTERS))
@pytest.mark.parametrize("seed", range(10))
def test_sampled_tokens_of_many_rows_equal_numpy(filters: str, seed: int) -> None:
    rng = np.random.default_rng([seed, *filters.encode()])
    vocab = int(rng.integers(1, 6000))
    assert_same(random_logits(24, vocab, rng), params(24, rng, FILTERS[filters]), rng)


FLOATS = st.one_of(
    st.integers(-6, 6).map(float),
    st.sampled_from([INF, -INF, NAN, 0.0, -0.0, 3e38, -3e38, 1e-40, 1.0]),
    st.floats(-60, 60, width=32),
)
ROWS = st.tuples(
    st.lists(FLOATS, min_size=1, max_size=12),
    st.sampled_from([0.0, 1e-30, 1e-3, 0.7, 1.0, 1e30]),
    st.integers(0, 13),
    st.sampled_from([1.0, 0.0, 1e-38, 0.2, 0.5, 0.99999994]),
    st.sampled_from([0.0, 1e-38, 0.1, 1.0]),
    st.integers(0, 2**32),
)
Row = tuple[list[float], float, int, float, float, int]


def assert_same_row(row: Row) -> None:
    values, temperature, top_k, top_p, min_p, seed = row
    given = SampleParams(
        np.array([temperature], np.float32),
        np.array([top_k]),
        np.array([top_p], np.float32),
        np.array([min_p], np.float32),
    )
    assert_same(np.array([values], np.float32), given, np.random.default_rng(seed))


@settings(max_examples=10, deadline=None)
@given(ROWS)
def test_any_row(row: Row) -> None:
    assert_same_row(row)


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(ROWS)
def test_any_row_of_many(row: Row) -> None:
    assert_same_row(row)


def test_ties_at_border_keep_lowest_ids() -> None:
    """Over several chunks, at the border of top_k, of top_p, and of top_p within top_k."""
    rows, vocab = 3, 5000
    logits = np.zeros((rows, vocab), np.float32)
    logits[:, ::100] = 1.0
    given = SampleParams(
        np.ones(rows, np.float32),
        np.array([4200, 0, 4300]),
        np.array([1, 0.75, 0.9], np.float32),
        np.zeros(rows, np.float32),
    )
    assert_same(logits, given, np.random.default_rng(3))


def test_top_p_prefix_ends_at_exact_mass() -> None:
    """A quarter of four equal masses is one of them, half is two."""
    fractions = np.array([0.25, 0.25, 0.25, 0.5, 0.5, 0.5], np.float32)
    given = SampleParams(np.ones(6, np.float32), np.zeros(6, np.int64), fractions, np.zeros(6, np.float32))
    found = assert_same(np.zeros((6, 4), np.float32), given, np.random.default_rng(15))
    assert found[:3].tolist() == [0, 0, 0]
    assert found[3:].max() == 1


@pytest.mark.parametrize("temperature", [1e-44, 1e-38, 1e-4, 1e4, 3e38])
def test_extreme_temperatures(temperature: float) -> None:
    rng = np.random.default_rng(4)
    given = params(3, rng, FILTERS["all"])
    given.temperature[:] = temperature
    assert_same(random_logits(3, 50, rng), given, rng)


def test_greedy_and_nan_rows_in_mixed_batch() -> None:
    rng = np.random.default_rng(5)
    logits = random_logits(7, 40, rng)
    logits[1, 5:] = -INF
    logits[2] = -INF
    logits[3, 7] = logits[3, 9] = INF
    logits[4, 3] = NAN
    logits[5] = NAN
    given = params(7, rng, FILTERS["all"])
    given.temperature[[0, 3]] = 0
    found = assert_same(logits, given, rng)
    assert found[[2, 3, 5]].tolist() == [NO_TOKEN] * 3


@pytest.mark.parametrize("late", [None, [5, 29, NO_TOKEN, 7]], ids=["known", "late"])
def test_penalties(late: list[int] | None) -> None:
    """A token that only the device knows counts as the others do, whether its row has seen its id before or not."""
    rng = np.random.default_rng(6)
    rows, vocab = 4, 30
    given = Penalties(
        np.array([4, 0, 2, 1]),
        [SeenIds(np.array([5, 3, 9]), [5, 5, 2]), SeenIds(np.arange(20), [7] * 3), SeenIds(rng.choice(vocab, 9), []),
         SeenIds(np.empty(0, np.int64), rng.integers(0, vocab, 40).tolist())],
        rng.choice([0.5, 1.3, 1e-44], rows).astype(np.float32),
        rng.choice([0.0, 0.7, -0.2], rows).astype(np.float32),
        rng.choice([0.0, 0.1, -0.3], rows).astype(np.float32),
        None if late is None else torch.tensor(late),
    )  # fmt: skip
    logits = rng.normal(size=(rows + 1, vocab)).astype(np.float32)
    logits[0, 3], logits[1, 7], logits[2, 9] = INF, NAN, -INF
    expected, found = logits.copy(), torch.from_numpy(logits.copy())
    penalize(expected, given)
    penalize_on_device(found, given)
    assert np.array_equal(found.numpy(), expected, equal_nan=True)
    assert not np.array_equal(logits, expected, equal_nan=True)


def test_masks() -> None:
    rng = np.random.default_rng(6)
    rows, vocab = 4, 30
    masked = MaskedIds(np.array([0, 0, 1, 3]), np.array([0, 29, 7, 7]))
    own = params(rows, rng, FILTERS["all"])
    own.temperature[2] = 0
    logits = rng.normal(size=(rows, vocab)).astype(np.float32)
    both = SampleParams(own.temperature, own.top_k, own.top_p, own.min_p, masked)
    assert_same(logits, both, np.random.default_rng(7))


def test_masks_depend_on_late_tokens() -> None:
    """An id is masked if the late token is the one that it must not follow."""
    rng = np.random.default_rng(12)
    logits = rng.normal(size=(3, 20)).astype(np.float32)
    logits[:, 7] = 9.0
    rows, ids = np.array([0, 0, 1, 1, 2, 2]), np.array([7, 3, 7, 7, 7, 4])
    after = np.array([5, NO_TOKEN, 6, 5, 6, 6])
    masked = MaskedIds(rows, ids, after, torch.tensor([5, 5, 5, 5, NO_TOKEN, NO_TOKEN]))
    zeros, ones = np.zeros(3, np.float32), np.ones(3, np.float32)
    assert_same(logits, SampleParams(zeros, np.zeros(3, np.int64), ones, zeros, masked), rng)
    written = torch.from_numpy(logits.copy())
    sampling.sample(
        written, prepare(SampleParams(zeros, np.zeros(3, np.int64), ones, zeros, masked), *randoms(3, rng), CPU)
    )
    assert np.argwhere(written.isneginf().numpy()).tolist() == [[0, 3], [0, 7], [1, 7]]


def test_biases_and_allowed_ids() -> None:
    rng = np.random.default_rng(13)
    logits = rng.normal(size=(4, 300)).astype(np.float32)
    logits[1, 5] = np.nan
    biased = BiasedIds(np.array([0, 0, 1, 3]), np.array([4, 299, 5, 7]), np.array([3, -100, 2, 0.1], np.float32))
    allowed = AllowedIds(np.array([0, 0, 3, 3, 3]), np.array([4, 299, 7, 8, 0]))
    own = params(4, rng, FILTERS["all"])
    given = replace(own, biased=biased, allowed=allowed, masked=MaskedIds(np.array([3]), np.array([8])))
    counters = randoms(4, rng)
    expected, found = logits.copy(), torch.from_numpy(logits.copy())
    ids = reference.sample(expected, given, *counters)
    assert TritonSamplingOps(CPU).sample(found, given, *counters).tolist() == ids.tolist()
    assert np.array_equal(found.numpy(), expected, equal_nan=True)


def test_bits() -> None:
    """Allowed bits of some rows, over more than a program's chunk, for a vocabulary that ends within a word."""
    rng = np.random.default_rng(14)
    logits = rng.normal(size=(4, 1050)).astype(np.float32)
    logits[3, 8] = np.nan
    bits = rng.integers(1 << 32, size=(3, 40), dtype=np.uint32)
    bits[1, 4:] = 0
    given = replace(params(4, rng, FILTERS["all"]), confined=AllowedBits(np.array([3, 0, 2]), bits))
    counters = randoms(4, rng)
    expected, found = logits.copy(), torch.from_numpy(logits.copy())
    ids = reference.sample(expected, given, *counters)
    assert TritonSamplingOps(CPU).sample(found, given, *counters).tolist() == ids.tolist()
    assert np.array_equal(found.numpy(), expected, equal_nan=True)
    assert np.isneginf(expected[0, 128:]).all()


def test_row_is_independent_of_other_rows() -> None:
    rng = np.random.default_rng(8)
    logits, given = random_logits(5, 300, rng), params(5, rng, FILTERS["all"])
    seeds, positions, choices = randoms(5, rng)
    together = sampling.sample(torch.from_numpy(logits), prepare(given, seeds, positions, choices, CPU))
    for row in (0, 4):
        one = slice(row, row + 1)
        alone = SampleParams(given.temperature[one], given.top_k[one], given.top_p[one], given.min_p[one])
        tensors = prepare(alone, seeds[one], positions[one], choices[one], CPU)
        assert sampling.sample(torch.from_numpy(logits[one]), tensors).tolist() == together[one].tolist()


def test_rows_of_a_wider_tensor() -> None:
    rng = np.random.default_rng(9)
    wide = torch.full((3, 80), 100.0)
    logits = random_logits(3, 50, rng)
    wide[:, :50] = torch.from_numpy(logits)
    given, counters = params(3, rng, FILTERS["all"]), randoms(3, rng)
    found = sampling.sample(wide[:, :50], prepare(given, *counters, CPU))
    assert found.tolist() == reference.sample(logits, given, *counters).tolist()


def test_no_rows() -> None:
    rng = np.random.default_rng(10)
    tensors = prepare(params(0, rng, OFF), *randoms(0, rng), CPU)
    assert sampling.sample(torch.empty(0, 50), tensors).tolist() == []
    assert sampling.greedy(torch.empty(0, 50), 50).tolist() == []


def test_parameters_are_moved_together() -> None:
    rng = np.random.default_rng(11)
    one = np.ones(3, np.float32)
    given = SampleParams(one, np.arange(3), one, one, MaskedIds(np.arange(3), np.arange(3)))
    tensors = prepare(given, *randoms(3, rng), CPU)
    assert tensors.masked is not None
    columns = [*vars(tensors.rows).values(), tensors.masked.rows, tensors.masked.ids]
    assert len({column.untyped_storage().data_ptr() for column in columns}) == 1
    assert all(column.data_ptr() % 16 == columns[0].data_ptr() % 16 for column in columns)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "limit"), [(5, 5), (2500, 2300), (1024, 1)])
def test_greedy(dtype: torch.dtype, vocab: int, limit: int) -> None:
    logits = torch.from_numpy(random_logits(6, vocab, np.random.default_rng(12))).to(dtype)
    logits[1, 0] = torch.nan
    logits[2] = torch.nan
    logits[3] = -torch.inf
    logits[4, 1:] = 50.0
    found = sampling.greedy(logits, limit)
    assert found.dtype == torch.int64
    assert found.tolist() == reference.greedy(logits[:, :limit].float().numpy()).tolist()


def test_zeros_are_equal() -> None:
    assert sampling.greedy(torch.tensor([[-1.0, -0.0, 0.0]]), 3).tolist() == [1]


@triton.jit
def _words_kernel(seed, position, choice, domain, blocks, words, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    found = tl.philox(tl.load(seed), tl.load(blocks + index), tl.load(position), tl.load(choice), tl.load(domain))
    for part in tl.static_range(4):
        tl.store(words + 4 * index + part, found[part].to(tl.int32, bitcast=True))


def philox_words(blocks: list[int], position: int, choice: int, domain: int, seed: int) -> npt.NDArray[np.uint32]:
    """Random words [blocks, 4]."""
    words = torch.empty(len(blocks), 4, dtype=torch.int32)
    one = (torch.from_numpy(np.array([word], np.uint32).view(np.int32)) for word in (position, choice, domain))
    key = torch.from_numpy(np.array([seed], np.uint64).view(np.int64))
    counters = torch.from_numpy(np.array(blocks, np.uint32).view(np.int32))
    launch(_words_kernel, (1,), key, *one, counters, words, COUNT=len(blocks))
    return words.numpy().view(np.uint32)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers_of_random123(counter: str, key: str, expected: str) -> None:
    block, position, choice, domain = (int(word, 16) for word in counter.split())
    low, high = (int(word, 16) for word in key.split())
    found = philox_words([block], position, choice, domain, low | high << 32)
    assert " ".join(f"{word:08x}" for word in found[0]) == expected


@triton.jit
def _gumbel_kernel(words, noise, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    tl.store(noise + index, sampling._gumbel(tl.load(words + index).to(tl.uint32, bitcast=True)))


def test_noise_equals_numpy_and_draws_follow_softmax() -> None:
    """The chi-square statistic of 8,192 draws of 8 tokens is below the 0.999 quantile for 7 degrees of freedom."""
    words = philox_words(list(range(1 << 14)), 5, 6, 7, 8)
    words[0, :4] = [0, 1, 2**32 - 1, 2**31]
    noise = torch.empty(1 << 16)
    launch(_gumbel_kernel, (1,), torch.from_numpy(words.view(np.int32)), noise, COUNT=1 << 16)
    assert np.array_equal(noise.numpy(), reference.gumbel(words.reshape(-1).astype(np.uint64)))
    logits = np.linspace(-1, 1, 8)
    draws = (noise.numpy().reshape(-1, 8) + logits).argmax(axis=1)
    expected = np.exp(logits) / np.exp(logits).sum() * len(draws)
    statistic = ((np.bincount(draws, minlength=8) - expected) ** 2 / expected).sum()
    assert statistic < 24.32


@triton.jit
def _ceil_product_kernel(mantissas, shifts, totals, out, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    found = sampling._ceil_product(tl.load(mantissas + index), tl.load(shifts + index), tl.load(totals + index))
    tl.store(out + index, found)


def test_top_p_mass_fraction_is_exact() -> None:
    rng = np.random.default_rng(13)
    cases = [
        (int(rng.integers(0, 2**24)), int(rng.integers(24, 180)), int(rng.integers(0, 2 ** int(rng.integers(1, 63)))))
        for _ in range(512 - 12)
    ]
    cases += [(2**24 - 1, 24, 2**63 - 1), (0, 24, 5)]
    cases += [(2**23 + 1, shift, total) for shift in (24, 31, 32, 33, 94) for total in (1, 2**32 - 1)]
    columns = torch.tensor(cases, dtype=torch.int64).t().contiguous()
    out = torch.empty(512, dtype=torch.int64)
    launch(_ceil_product_kernel, (1,), *columns, out, COUNT=512)
    assert out.tolist() == [-(-mantissa * total // 2**shift) for mantissa, shift, total in cases]


def test_logit_statistics_equal_reference() -> None:
    rng = np.random.default_rng(8)
    logits = rng.normal(size=(20, 1500)).astype(np.float32) * 4
    logits[3] = np.nan
    tokens, ids = rng.integers(0, 1500, 20), rng.integers(0, 1500, (20, 2))
    tokens[3] = NO_TOKEN
    found = TritonSamplingOps(CPU).logit_stats(torch.from_numpy(logits), torch.from_numpy(tokens), 5, ids)()
    expected = logprobs.logit_stats(logits, np.maximum(tokens, 0), 5, ids)
    rows = np.flatnonzero(expected.masses)
    assert found.masses[3] == 0
    for name in ("highest", "ranks", "own", "top_ids", "top", "given"):
        assert getattr(found, name)[rows].tolist() == getattr(expected, name)[rows].tolist(), name
    np.testing.assert_allclose(found.masses[rows], expected.masses[rows], rtol=1e-12)
