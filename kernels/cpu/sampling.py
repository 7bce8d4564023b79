"""Sampling with native kernels (kernels/cpu/native/sampling.cpp); the tokens are those of kernels/sampling.py."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from kernels import logprobs, sampling
from kernels.cpu.library import address
from kernels.interface import AllowedBits, LogitStats, SampleParams
from kernels.penalties import Penalties, penalize
from kernels.philox import Words
from kernels.sampling import Floats, Ids
from kernels.torch_backend.sampling import TorchSamplingOps, moved

# Result for a row that the library has no memory for.
_LEFT = -2
# Arguments of the library for penalties, and for grammar masks.
_PENALTY_COLUMNS = 6
_BIT_COLUMNS = 2


class CpuSamplingOps(TorchSamplingOps):
    """Sampling operations of the reference, with tokens drawn by native kernels."""

    def __init__(self, library: CDLL) -> None:
        self._library = library

    @override
    def sample(
        self,
        logits: torch.Tensor,
        params: SampleParams,
        seeds: npt.NDArray[np.uint64],
        positions: npt.NDArray[np.int64],
        choices: npt.NDArray[np.int64],
        num_rejected: torch.Tensor | None = None,
    ) -> torch.Tensor:
        positions = moved(positions, num_rejected)
        return torch.from_numpy(sample(self._library, logits.numpy(), params, seeds, positions, choices))

    @override
    def logit_stats(
        self, logits: torch.Tensor, tokens: torch.Tensor, top: int, given: npt.NDArray[np.int64]
    ) -> Callable[[], LogitStats]:
        stats = logit_stats(self._library, logits.numpy(), np.maximum(tokens.numpy(), 0), top, given)
        return lambda: stats


def logit_stats(library: CDLL, logits: Floats, tokens: Ids, top: int, given: Ids) -> LogitStats:
    """Statistics of logits for logprobs, on the host; see SamplingOps.logit_stats."""
    if logits.strides[1] != logits.itemsize:
        logits = np.ascontiguousarray(logits)
    count, tokens = len(logits), np.ascontiguousarray(tokens, np.int64)
    stats = LogitStats(
        np.zeros(count, np.float32),
        np.zeros(count, np.int64),
        np.zeros(count, np.int64),
        logits[np.arange(count), tokens],
        np.zeros((count, top), np.int64),
        np.zeros((count, top), np.float32),
        logprobs.gathered(logits, given),
    )
    made = (stats.highest, stats.masses, stats.ranks, stats.top_ids, stats.top)
    library.fissile_logprobs(
        logits.ctypes.data,
        logits.strides[0] // logits.itemsize,
        *logits.shape,
        address(tokens),
        top,
        *(address(one) for one in made),
    )
    # All by one or by the other: the reference's exp differs in its last bits.
    return logprobs.logit_stats(logits, tokens, top, given) if (stats.masses == _LEFT).any() else stats


def sample(library: CDLL, logits: Floats, params: SampleParams, seeds: Words, positions: Ids, choices: Ids) -> Ids:
    """Token ids int64 [S] for float32 logits [S, V]; see SamplingOps.sample.

    The thread that samples a row writes its penalties and its bit mask, except for penalties of a row with biases,
    which come after the biases. Other masks are written before, which makes no difference: minus infinity stays what it
    is. Rows for which the library has no memory are left to kernels/sampling.py.
    """
    penalties = params.penalties
    if penalties is not None and (logits.strides[1] != logits.itemsize or penalties.late is not None):
        penalize(logits, penalties)
        penalties = None
    if params.biased is not None:
        if penalties is not None:
            of_biased = np.isin(penalties.rows, params.biased.rows)
            penalize(logits, penalties.where(of_biased))
            penalties = None if of_biased.all() else penalties.where(~of_biased)
        sampling.write_biases(logits, params.biased)
    sampling.write_masks(logits, params.allowed, params.masked)
    confined = params.confined
    if logits.strides[1] != logits.itemsize:
        # Here, since the library has a copy.
        sampling.confine(logits, confined)
        logits, confined = np.ascontiguousarray(logits), None
    ids = np.empty(len(logits), np.int64)
    given = (params.temperature, params.top_k, params.top_p, params.min_p, seeds, positions, choices, ids)
    wanted = (np.float32, np.int64, np.float32, np.float32, np.uint64, np.int64, np.int64, np.int64)
    columns = [np.ascontiguousarray(column, dtype) for column, dtype in zip(given, wanted, strict=True)]
    of_penalties = [] if penalties is None else _penalty_columns(penalties, len(logits))
    of_bits = [] if confined is None else _bit_columns(confined, len(logits))
    library.fissile_sample(
        logits.ctypes.data,
        logits.strides[0] // logits.itemsize,
        *logits.shape,
        *map(address, columns),
        *(map(address, of_penalties) if of_penalties else [None] * _PENALTY_COLUMNS),
        *(map(address, of_bits) if of_bits else [None] * _BIT_COLUMNS),
        0 if confined is None else confined.bits.shape[1],
    )
    left = np.flatnonzero(ids == _LEFT)
    if len(left):
        rest = replace(
            params,
            temperature=params.temperature[left],
            top_k=params.top_k[left],
            top_p=params.top_p[left],
            min_p=params.min_p[left],
            masked=None,
            penalties=None,
            biased=None,
            allowed=None,
            confined=None,
        )
        ids[left] = sampling.sample(logits[left], rest, seeds[left], positions[left], choices[left])
    return ids


def _bit_columns(confined: AllowedBits, rows: int) -> list[npt.NDArray[np.generic]]:
    """Grammar masks as the library takes them: the index of each row's bits, and the bits."""
    places = np.full(rows, -1, np.int64)
    places[confined.rows] = np.arange(len(confined.rows))
    return [places, np.ascontiguousarray(confined.bits, np.uint32)]


def _penalty_columns(penalties: Penalties, rows: int) -> list[npt.NDArray[np.generic]]:
    """Penalties as the library takes them: each row's index, and addresses of ids, counts and factors."""
    places = np.full(rows, -1, np.int64)
    places[penalties.rows] = np.arange(len(penalties.rows))
    ids = np.array([seen.ids.buffer_info() for seen in penalties.seen], np.int64)
    counts = np.array([seen.output_counts.buffer_info()[0] for seen in penalties.seen], np.int64)
    factors = (penalties.repetition, penalties.presence, penalties.frequency)
    return [places, ids, counts, *(np.ascontiguousarray(one, np.float32) for one in factors)]
