"""All drafts of a step by a head of one layer in one native call (kernels/cpu/native/drafts.cpp)."""

from __future__ import annotations

import ctypes
from ctypes import CDLL, c_int64, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.cpu import fused
from kernels.cpu.fused import KVCache, NativeDecoder, Weight, pointer
from kernels.cpu.library import DTYPES, address, check
from kernels.cpu.linear import PanelLinear
from kernels.interface import DraftHead, DraftStep
from kernels.torch_backend.attention import PagedKVCache


class _Head(ctypes.Structure):
    _fields_ = (
        ("decoder", c_void_p),
        ("combine", Weight),
        ("embedding", c_void_p),
        ("packed_embedding", Weight),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("positions", c_int64),
        ("half", c_int64),
        ("head", Weight),
        ("target_ids", c_void_p),
        ("vocab", c_int64),
        ("limit", c_int64),
    )

    @classmethod
    def of(cls, head: DraftHead, decoder: NativeDecoder) -> _Head:
        embedding: Any = head.embedding
        rows, packed = (None, Weight.of(embedding)) if isinstance(embedding, PanelLinear) else (embedding, Weight())
        return cls(
            decoder.address,
            Weight.of(head.combine),
            pointer(rows),
            packed,
            head.cos.data_ptr(),
            head.sin.data_ptr(),
            head.cos.shape[0],
            head.cos.shape[-1],
            Weight.of(head.head),
            pointer(head.target_ids),
            head.vocab_size,
            head.limit,
        )


class _DraftsStep(ctypes.Structure):
    _fields_ = (
        ("sequences", c_int64),
        ("begins", c_void_p),
        ("starts", c_void_p),
        ("counts", c_void_p),
        ("next_tokens", c_void_p),
        ("token_ids", c_void_p),
        ("states", c_void_p),
        ("states_stride", c_int64),
        ("cache", KVCache),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("asked", c_int64),
        ("asking", c_void_p),
        ("wanted", c_void_p),
        ("most", c_int64),
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("seeds", c_void_p),
        ("choices", c_void_p),
        ("last", c_void_p),
        ("ids", c_void_p),
    )


def is_native(head: DraftHead) -> bool:
    """True if a draft head is packed by the native kernels and not split over ranks."""
    weights, dtype = (head.combine, head.head), head.decoder.norm.dtype
    of_embedding = isinstance(head.embedding, PanelLinear) and head.embedding.code == DTYPES.get(dtype)
    is_embedding = of_embedding or (isinstance(head.embedding, torch.Tensor) and head.embedding.dtype == dtype)
    is_whole = head.decoder.all_reduce is None and fused.is_native(head.decoder)
    return is_whole and is_embedding and all(isinstance(weight, PanelLinear) for weight in weights)


class NativeDrafts:
    """FusedDrafts on the native kernels.

    Args:
        library: which does the work.
        head: for which `is_native`; kept, since the kernels have addresses in it.
    """

    def __init__(self, library: CDLL, head: DraftHead) -> None:
        self._library = library
        decoder = NativeDecoder(library, head.decoder)
        self._kept = head, decoder
        self._native = _Head.of(head, decoder)
        self._address = ctypes.addressof(self._native)
        self._width = head.combine.inner
        self._state_width = 2 * head.combine.columns

    def run(self, step: DraftStep, cache: PagedKVCache) -> tuple[torch.Tensor, npt.NDArray[np.int64]]:
        """Computes a draft head for one step, and its drafts; see FusedDrafts.run."""
        tables, states, params = step.block_tables, step.states, step.params
        most = int(step.wanted.max(initial=0))
        ids = np.empty((len(step.asking), most), np.int64)
        last = torch.empty(len(step.asking), self._state_width, dtype=states.dtype)
        native = _DraftsStep(
            len(step.begins),
            *map(address, (step.begins, step.starts, step.counts, step.next_tokens, step.token_ids)),
            states.data_ptr() + (states.shape[1] - self._width) * states.itemsize,
            states.stride(0),
            KVCache.of(cache),
            tables.ctypes.data,
            tables.strides[0] // tables.itemsize,
            len(step.asking),
            address(step.asking),
            address(step.wanted),
            most,
            *(address(one) for one in (params.temperature, params.top_k, params.top_p, params.min_p)),
            address(step.seeds),
            address(step.choices),
            last.data_ptr(),
            ids.ctypes.data,
        )
        check(self._library.fissile_drafts(self._address, ctypes.addressof(native)))
        return last, ids
