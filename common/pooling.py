"""Pooling: the hidden states of a text's tokens become its vector."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from common.sampling_params import SamplingParams

Pooling: TypeAlias = Literal["last", "mean"]
LAST: Final = "last"
MEAN: Final = "mean"
# Of a sequence that is embedded: it ends with one token, whatever that is.
EMBED_PARAMS: Final = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)

Vectors: TypeAlias = npt.NDArray[np.float32]


def finished(states: bytes, dimensions: int, *, normalize: bool) -> Vectors:
    """The vector that a client gets of pooled hidden states: float32 [dimensions].

    Sums are of halves in a fixed order and in float64, so that the bits are the same on every machine.

    Args:
        states: float32, little endian.
        dimensions: so many of the first numbers are kept, before they are normalized.
        normalize: True for a vector of length 1; one of zeros alone stays as it is.
    """
    values: Vectors = np.frombuffer(states, "<f4")[:dimensions]
    if not normalize:
        return values
    length = np.sqrt(_sum(np.square(values, dtype=np.float64)))
    return (values / length).astype(np.float32) if length else values


def _sum(values: npt.NDArray[np.float64]) -> np.float64:
    """The sum of one row, in an order that depends on its length alone."""
    padded = np.zeros(1 << (len(values) - 1).bit_length(), np.float64)
    padded[: len(values)] = values
    while len(padded) > 1:
        padded = padded[: len(padded) // 2] + padded[len(padded) // 2 :]
    return np.float64(padded[0])
