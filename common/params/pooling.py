"""Kinds of pooling, and the last step from pooled hidden states to a vector."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from common.params.sampling_params import SamplingParams

Pooling: TypeAlias = Literal["last", "mean", "labels"]
LAST: Final = "last"
MEAN: Final = "mean"
# Of the last state, by the checkpoint's classifier.
LABELS: Final = "labels"
# Those that give vectors.
VECTORS: Final = (LAST, MEAN)
# Parameters of an embedded sequence, which ends with one token of any id.
EMBED_PARAMS: Final = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)

Vectors: TypeAlias = npt.NDArray[np.float32]


def finished(states: bytes, dimensions: int, *, normalize: bool) -> Vectors:
    """Makes the vector for a client from pooled hidden states: float32 [dimensions].

    Sums are in float64 and in a fixed order, so that the bits are the same on every machine.

    Args:
        states: float32, little endian.
        dimensions: how many of the first numbers are kept, before they are normalized.
        normalize: True for a vector of length 1; one of zeros alone stays as it is.
    """
    values: Vectors = np.frombuffer(states, "<f4")[:dimensions]
    if not normalize:
        return values
    length = np.sqrt(row_sums(np.square(values, dtype=np.float64)[None])[0])
    return (values / length).astype(np.float32) if length else values


def row_sums(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Sums of rows [R, N] as [R], each added in an order that depends on N alone."""
    size = rows.shape[1]
    padded = np.zeros((len(rows), 1 << (size - 1).bit_length()), np.float64)
    padded[:, :size] = rows
    while padded.shape[1] > 1:
        padded = padded[:, : padded.shape[1] // 2] + padded[:, padded.shape[1] // 2 :]
    return padded[:, 0]
