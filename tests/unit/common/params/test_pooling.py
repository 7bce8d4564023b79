"""Vectors are cut, then normalized; their length is summed in a fixed order."""

from __future__ import annotations

import numpy as np
import pytest

from common.params.pooling import finished


@pytest.mark.parametrize("dimensions", [1, 2, 7, 64, 100])
def test_vectors_are_cut_and_then_normalized(dimensions: int) -> None:
    states = np.random.default_rng(dimensions).normal(size=100).astype(np.float32)
    cut = states[:dimensions].astype(np.float64)
    np.testing.assert_array_equal(finished(states.tobytes(), dimensions, normalize=False), states[:dimensions])
    normalized = finished(states.tobytes(), dimensions, normalize=True)
    assert normalized.dtype == np.float32
    np.testing.assert_allclose(normalized, cut / np.linalg.norm(cut), rtol=1e-7)


def test_zero_vector_is_not_normalized() -> None:
    assert finished(np.zeros(4, np.float32).tobytes(), 3, normalize=True).tolist() == [0.0, 0.0, 0.0]
