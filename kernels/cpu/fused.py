"""All layers of a dense model in one native call (kernels/cpu/native/layers.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import CDLL, CFUNCTYPE, c_char, c_double, c_int, c_int64, c_void_p
from typing import Any

import torch

from kernels.cpu.attention import StepArrays
from kernels.cpu.library import DTYPES, KV_DTYPES, check
from kernels.cpu.linear import PanelLinear
from kernels.interface import AttentionMetaData, Decoder, DecoderLayer
from kernels.torch_backend.attention import PagedKVCache


class Weight(ctypes.Structure):
    """A packed weight as the kernels take it."""

    _fields_ = (
        ("dtype", c_int64),
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("columns", c_int64),
        ("inner", c_int64),
        ("order", c_void_p),
    )

    @classmethod
    def of(cls, packed: PanelLinear) -> Weight:
        """Addresses and sizes of a packed weight. The weight must stay alive."""
        return cls(
            packed.code,
            packed.panels.data_ptr(),
            pointer(packed.bias),
            packed.columns,
            packed.inner,
            pointer(packed.order),
        )


class KVCache(ctypes.Structure):
    """The KV cache as the kernels take it."""

    _fields_ = (
        ("dtype", c_int64),
        ("heads", c_int64),
        ("dim", c_int64),
        ("block_size", c_int64),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("layer_stride", c_int64),
    )

    @classmethod
    def of(cls, cache: PagedKVCache) -> KVCache:
        """Addresses and sizes of a KV cache. The cache must stay alive."""
        data = cache.data
        keys = data.data_ptr()
        return cls(
            KV_DTYPES[data.dtype],
            cache.num_kv_heads,
            cache.head_dim,
            cache.block_size,
            keys,
            keys + data.stride(1) * data.itemsize,
            data.stride(0),
        )


class _Layer(ctypes.Structure):
    _fields_ = (
        ("input_norm", c_void_p),
        ("qkv", Weight),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("sinks", c_void_p),
        ("window", c_int64),
        ("out", Weight),
        ("post_norm", c_void_p),
        ("gate_up", Weight),
        ("down", Weight),
    )

    @classmethod
    def of(cls, layer: DecoderLayer) -> _Layer:
        q_norm, k_norm = layer.head_norms or (None, None)
        return cls(
            layer.input_norm.data_ptr(),
            Weight.of(layer.qkv),
            pointer(q_norm),
            pointer(k_norm),
            pointer(layer.sinks),
            layer.window or 0,
            Weight.of(layer.out),
            layer.post_norm.data_ptr(),
            Weight.of(layer.gate_up),
            Weight.of(layer.down),
        )


class _Decoder(ctypes.Structure):
    _fields_ = (
        ("dtype", c_int64),
        ("hidden", c_int64),
        ("heads", c_int64),
        ("inner", c_int64),
        ("eps", c_double),
        ("scale", c_double),
        ("norm", c_void_p),
        ("layers", ctypes.POINTER(_Layer)),
        ("num_layers", c_int64),
        ("aux_layers", ctypes.POINTER(c_int64)),
        ("num_aux", c_int64),
        ("stream_norm", c_void_p),
        ("norms_first", c_int64),
    )


_JOIN: Any = CFUNCTYPE(c_int, c_void_p)


class _DecoderStep(ctypes.Structure):
    _fields_ = (
        ("rows", c_int64),
        ("tokens", c_int64),
        ("x", c_void_p),
        ("embedded", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("half", c_int64),
        ("cache", KVCache),
        ("slots", c_void_p),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("sequences", c_int64),
        ("cu_seqlens", c_void_p),
        ("seq_lens", c_void_p),
        ("wanted", c_void_p),
        ("num_wanted", c_int64),
        ("join", _JOIN),
        ("out", c_void_p),
    )


class _Joiner:
    """Adds the ranks' summands during a native call and keeps exceptions until its end.

    Attributes:
        function: for the native call.
        like: has the dtype and shape of the current step's summand.
        error: the exception that was raised in it.
    """

    def __init__(self, all_reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._all_reduce = all_reduce
        self.function = _JOIN(self._join)
        self.like = torch.empty(0)
        self.error: BaseException | None = None

    def _join(self, address: int) -> int:
        try:
            memory = (c_char * self.like.nbytes).from_address(address)
            summand = torch.frombuffer(memory, dtype=self.like.dtype).view(self.like.shape)
            summand.copy_(self._all_reduce(summand))
        except BaseException as error:
            self.error = error
            return 1
        return 0


def is_native(decoder: Decoder) -> bool:
    """True if all layers are packed by the native kernels."""
    weights = (one for layer in decoder.layers for one in (layer.qkv, layer.out, layer.gate_up, layer.down))
    return all(isinstance(weight, PanelLinear) for weight in weights)


class NativeDecoder:
    """FusedDecoder on the native kernels.

    Args:
        library: which does the work.
        decoder: for which `is_native`; kept, since the kernels have addresses in it.

    Attributes:
        address: of the layers, as the kernels take them.
    """

    def __init__(self, library: CDLL, decoder: Decoder) -> None:
        self._library = library
        self._kept = (
            decoder,
            (_Layer * len(decoder.layers))(*map(_Layer.of, decoder.layers)),
            (c_int64 * len(decoder.aux_layers))(*decoder.aux_layers),
        )
        self._num_parts = 1 + len(decoder.aux_layers)
        self._joiner = None if decoder.all_reduce is None else _Joiner(decoder.all_reduce)
        self._native = _Decoder(
            DTYPES[decoder.norm.dtype],
            decoder.norm.shape[0],
            decoder.num_heads,
            max(layer.down.inner for layer in decoder.layers),
            decoder.eps,
            decoder.scale,
            decoder.norm.data_ptr(),
            self._kept[1],
            len(decoder.layers),
            self._kept[2],
            len(decoder.aux_layers),
            pointer(decoder.stream_norm),
            decoder.norms_first,
        )
        self.address = ctypes.addressof(self._native)

    def run(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: PagedKVCache,
        metadata: AttentionMetaData,
        embedded: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, H] -> [T, (1 + n) H]; cos and sin float32 [T, 1, R/2]; see FusedDecoder."""
        x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
        embedded = None if embedded is None else embedded.contiguous()
        out = x.new_empty(x.shape[0], x.shape[1] * self._num_parts)
        step: StepArrays = metadata.plan.arrays
        native = _DecoderStep(
            x.shape[0],
            step.tokens,
            x.data_ptr(),
            pointer(embedded),
            cos.data_ptr(),
            sin.data_ptr(),
            cos.shape[-1],
            KVCache.of(cache),
            step.slots,
            *step.sequences,
            *_wanted(metadata),
            _JOIN() if self._joiner is None else self._joiner.function,
            out.data_ptr(),
        )
        self._run(native, x)
        return out

    def _run(self, step: _DecoderStep, x: torch.Tensor) -> None:
        if self._joiner is not None:
            self._joiner.like, self._joiner.error = x, None
        failed = self._library.fissile_decoder(self.address, ctypes.addressof(step))
        if self._joiner is not None and self._joiner.error is not None:
            raise self._joiner.error
        check(failed)


def _wanted(metadata: AttentionMetaData) -> tuple[int | None, int]:
    rows = metadata.wanted_rows
    return (None, 0) if rows is None else (rows.ctypes.data, len(rows))


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Address of a tensor's numbers."""
    return None if tensor is None else tensor.data_ptr()
