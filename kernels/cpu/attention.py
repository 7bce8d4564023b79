"""Attention and the writing of the KV cache by the native kernels (kernels/cpu/native/attention.cpp)."""

from __future__ import annotations

from ctypes import CDLL

import numpy as np
import numpy.typing as npt
import torch

from kernels.cpu.library import DTYPES, address, check
from kernels.interface import AttentionMetaData
from kernels.paged_attention import PagedKVCache


class StepArrays:
    """A step's metadata as the kernels take it, made once per step; keeps the arrays alive.

    Attributes:
        tokens: rows that are tokens.
        slots: address of the tokens' slots.
        sequences: the arguments that say whose rows and keys are where.

    Raises:
        ValueError: an array is not contiguous int64, which the kernels would misread.
    """

    def __init__(self, metadata: AttentionMetaData) -> None:
        self.tokens = metadata.num_tokens
        self.slots = _address(metadata.slot_mapping)
        self.sequences = (
            _address(metadata.block_tables),
            metadata.block_tables.shape[1],
            len(metadata.seq_lens),
            _address(metadata.cu_seqlens_q),
            _address(metadata.seq_lens),
        )
        self._kept = metadata


def write_kv(
    library: CDLL, cache: PagedKVCache, layer: int, k: torch.Tensor, v: torch.Tensor, step: StepArrays
) -> None:
    """Stores the first rows of k and v [T, Hkv, D], those that are tokens, in their slots."""
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    sides = cache.data[layer]
    library.fissile_write_kv(
        DTYPES[k.dtype],
        DTYPES[cache.data.dtype],
        k.data_ptr(),
        k.stride(0),
        k.stride(1),
        v.data_ptr(),
        v.stride(0),
        v.stride(1),
        step.tokens,
        cache.num_kv_heads,
        cache.head_dim,
        cache.block_size,
        step.slots,
        sides[0].data_ptr(),
        sides[1].data_ptr(),
    )


def attention(
    library: CDLL,
    q: torch.Tensor,
    cache: PagedKVCache,
    layer: int,
    step: StepArrays,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Causal attention of q [T, Hq, D] over the cache: [T, Hq, D]; see KernelBackend.attention."""
    if q.stride(2) != 1:
        q = q.contiguous()
    rows, heads, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype) if rows == step.tokens else torch.zeros(q.shape, dtype=q.dtype)
    wide_sinks = None if sinks is None else sinks.float().contiguous()
    sides = cache.data[layer]
    check(
        library.fissile_attention(
            DTYPES[q.dtype],
            DTYPES[cache.data.dtype],
            q.data_ptr(),
            q.stride(0),
            q.stride(1),
            sides[0].data_ptr(),
            sides[1].data_ptr(),
            heads,
            cache.num_kv_heads,
            dim,
            cache.block_size,
            *step.sequences,
            scale,
            window or 0,
            None if wide_sinks is None else wide_sinks.data_ptr(),
            out.data_ptr(),
        )
    )
    return out


def _address(values: npt.NDArray[np.int64]) -> int:
    """Of int64 numbers.

    Raises:
        ValueError: they are something else, which the kernels would misread.
    """
    if values.dtype != np.int64:
        raise ValueError(f"attention metadata: int64 expected, not {values.dtype}")
    return address(values)
