"""Sampling by the native kernels (kernels/cpu/native/sampling.cpp): the tokens are those of kernels/sampling.py."""

from __future__ import annotations

from ctypes import CDLL
from dataclasses import replace

import numpy as np

from kernels import sampling
from kernels.cpu.library import address
from kernels.interface import SampleParams
from kernels.philox import Words
from kernels.sampling import Floats, Ids


def sample(library: CDLL, logits: Floats, params: SampleParams, seeds: Words, positions: Ids, choices: Ids) -> Ids:
    """Token ids int64 [S] for float32 logits [S, V]; see KernelBackend.sample.

    Penalties and masks are written first, as there; rows whose division by the temperature overflows are left to it.
    """
    if params.penalties is not None:
        sampling.penalize(logits, params.penalties)
    if params.masked is not None:
        logits[params.masked.rows, params.masked.ids] = -np.inf
    if logits.strides[1] != logits.itemsize:
        logits = np.ascontiguousarray(logits)
    ids = np.empty(len(logits), np.int64)
    given = (params.temperature, params.top_k, params.top_p, params.min_p, seeds, positions, choices, ids)
    wanted = (np.float32, np.int64, np.float32, np.float32, np.uint64, np.int64, np.int64, np.int64)
    columns = [np.ascontiguousarray(column, dtype) for column, dtype in zip(given, wanted, strict=True)]
    library.fissile_sample(
        logits.ctypes.data, logits.strides[0] // logits.itemsize, *logits.shape, *(address(one) for one in columns)
    )
    left = np.flatnonzero(ids < 0)
    if len(left):
        rest = replace(
            params,
            temperature=params.temperature[left],
            top_k=params.top_k[left],
            top_p=params.top_p[left],
            min_p=params.min_p[left],
            penalties=None,
            masked=None,
        )
        ids[left] = sampling.sample(logits[left], rest, seeds[left], positions[left], choices[left])
    return ids
