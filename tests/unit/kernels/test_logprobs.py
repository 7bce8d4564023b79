"""Logprobs equal float64's in every back end, and do not depend on the batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kernels import logprobs
from kernels.cpu import sampling as native_sampling
from kernels.interface import LogitStats
from kernels.torch_backend import logit_stats
from tests.native import native_library

Stats = Callable[[np.ndarray, np.ndarray, int, np.ndarray], LogitStats]
VOCABS = (1, 40, 1003, 20_000)


def on_device(logits: np.ndarray, tokens: np.ndarray, top: int, given: np.ndarray) -> LogitStats:
    made = logit_stats.columns(torch.from_numpy(logits), torch.from_numpy(tokens), top, torch.from_numpy(given))
    return LogitStats(*(column.numpy() for column in made))


@pytest.fixture(params=["reference", "native", "torch"])
def stats(request: pytest.FixtureRequest) -> Stats:
    if request.param == "native":
        library = native_library()
        return lambda *given: native_sampling.logit_stats(library, *given)
    return {"reference": logprobs.logit_stats, "torch": on_device}[request.param]


def drawn(vocab: int, rows: int = 5) -> tuple[np.ndarray, np.ndarray, int, np.ndarray]:
    """Logits with many equal ones, ids that are left out, and one row that is all alike."""
    rng = np.random.default_rng(vocab)
    logits = np.round(rng.normal(size=(rows, vocab)) * 6).astype(np.float32) / np.float32(4)
    logits[0] = -0.0
    logits[0, ::2] = 0.0
    logits[1, vocab // 2 + 1 :] = -np.inf
    logits[2, 0] = 90.0
    return logits, rng.integers(vocab, size=rows), min(20, vocab), rng.integers(vocab, size=(rows, 3))


@pytest.mark.parametrize("vocab", VOCABS)
def test_logprobs_equal_float64(stats: Stats, vocab: int) -> None:
    logits, tokens, top, given = drawn(vocab)
    found = stats(logits, tokens, top, given)
    exact = logits.astype(np.float64)
    log_z = np.log(np.exp(exact - exact.max(axis=1, keepdims=True)).sum(axis=1)) + exact.max(axis=1)
    np.testing.assert_allclose(logprobs.log_normalizers(found), log_z, rtol=0, atol=1e-6)
    for row, token in enumerate(tokens):
        order = sorted(range(vocab), key=lambda i, row=row: (-logits[row, i], i))  # type: ignore[misc]
        assert found.ranks[row] == order.index(token) + 1
        assert found.top_ids[row].tolist() == order[:top]
        assert found.top[row].tolist() == logits[row, order[:top]].tolist()
        assert found.own[row] == logits[row, token]
        assert found.given[row].tolist() == logits[row, given[row]].tolist()


@pytest.mark.parametrize("vocab", VOCABS)
def test_row_statistics_are_equal_alone(stats: Stats, vocab: int) -> None:
    logits, tokens, top, given = drawn(vocab, rows=40)
    together = stats(logits, tokens, top, given)
    for row in range(len(logits)):
        alone = stats(logits[row : row + 1], tokens[row : row + 1], top, given[row : row + 1])
        for name in LogitStats.__dataclass_fields__:
            assert getattr(alone, name)[0].tobytes() == getattr(together, name)[row].tobytes(), name


def test_nan_row_has_zero_mass(stats: Stats) -> None:
    logits = np.zeros((3, 300), np.float32)
    logits[0] = np.nan
    logits[1] = -np.inf
    found = stats(logits, np.zeros(3, np.int64), 2, np.zeros((3, 0), np.int64))
    assert [mass == 0 for mass in found.masses] == [True, True, False]
    assert np.isnan(logprobs.log_normalizers(found)).tolist() == [True, True, False]


def test_native_masses_are_close_to_reference() -> None:
    """The native exp differs in its last bits, which reach a float32 in one row of thousands."""
    given = drawn(20_000)
    ours, reference = native_sampling.logit_stats(native_library(), *given), logprobs.logit_stats(*given)
    np.testing.assert_allclose(ours.masses, reference.masses, rtol=1e-12)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"), [(0.0, 2, 0.5, 0.9), (1.0, 0, 1.0, 0.0), (0.7, 9, 0.8, 0.01)]
)
def test_processed_logits_keep_filtered_tokens(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    row = np.random.default_rng(1).normal(size=500).astype(np.float32) * 3
    left, kept_mass = logprobs.processed(row, temperature, top_k, top_p, min_p)
    scaled = row.astype(np.float64) / (temperature or 1.0)
    shares = np.exp(scaled - scaled.max())
    shares /= shares.sum()
    kept = np.isfinite(left)
    assert kept_mass == pytest.approx(shares[kept].sum(), abs=1e-6)
    if temperature == 0.0:
        assert kept.all()
        assert left.tolist() == row.tolist()
    elif top_k:
        assert kept.sum() <= top_k
        assert shares[kept].min() >= shares[~kept].max()
