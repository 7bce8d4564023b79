"""Layers with random weights, and what PyTorch's single operations make of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernels.interface import AttentionMetaData, Decoder, DecoderLayer, KernelBackend
from kernels.torch_backend.backend import TorchBackend

REFERENCE = TorchBackend()


@dataclass(frozen=True)
class Sizes:
    """Of the layers.

    Attributes:
        hidden: H.
        inner: I.
        heads: Hq.
        kv_heads: Hkv.
        head_dim: D.
        norms_heads: whether there are norms of heads.
        other_network: whether the second layer has no gated network, but another.
    """

    hidden: int = 64
    inner: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    norms_heads: bool = False
    other_network: bool = False


def decoder(
    backend: KernelBackend,
    dtype: torch.dtype,
    sizes: Sizes,
    all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Decoder:
    """Two layers, the second with a window and sinks; the same bfloat16 numbers for every back end and dtype."""
    random = torch.Generator().manual_seed(1)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=random) * scale).bfloat16().to(backend.device)

    def norm(size: int) -> torch.Tensor:
        return (1 + draw(size, scale=0.1)).to(dtype)

    def product(rows: int, columns: int, bias: bool = False) -> Any:
        weight = draw(rows, columns, scale=columns**-0.5)
        return backend.linear.pack(weight, draw(rows) if bias else None, dtype)

    def layer(window: int | None) -> DecoderLayer:
        width = sizes.heads * sizes.head_dim
        gated = window is None or not sizes.other_network
        return DecoderLayer(
            input_norm=norm(sizes.hidden),
            qkv=product(width + 2 * sizes.kv_heads * sizes.head_dim, sizes.hidden, bias=True),
            head_norms=(norm(sizes.head_dim), norm(sizes.head_dim)) if sizes.norms_heads else None,
            window=window,
            sinks=None if window is None else draw(sizes.heads).float(),
            out=product(sizes.hidden, width),
            post_norm=norm(sizes.hidden),
            gate_up=product(2 * sizes.inner, sizes.hidden) if gated else None,
            down=product(sizes.hidden, sizes.inner) if gated else None,
            network=None if gated else torch.tanh,
        )

    layers = (layer(None), layer(24))
    return Decoder(layers, norm(sizes.hidden), 1e-5, sizes.heads, sizes.head_dim**-0.5, all_reduce)


def by_single_operations(
    model: Decoder, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: Any, metadata: AttentionMetaData
) -> torch.Tensor:
    """What FusedDecoder.run gives of a decoder of REFERENCE, and writes to its cache."""
    kv_heads, eps, reduce = cache.num_kv_heads, model.eps, model.all_reduce or (lambda each: each)
    residual, x = x, torch.zeros_like(x)
    for index, layer in enumerate(model.layers):
        normed, residual = REFERENCE.elementwise.add_rms_norm(x, residual, layer.input_norm, eps)
        heads = REFERENCE.linear.apply(normed, layer.qkv).view(len(x), -1, cache.head_dim)
        q, k, v = heads[:, : model.num_heads], heads[:, model.num_heads : -kv_heads], heads[:, -kv_heads:]
        if layer.head_norms:
            q, k = (
                REFERENCE.elementwise.rms_norm(each, norm, eps)
                for each, norm in zip((q, k), layer.head_norms, strict=True)
            )
        q, k = REFERENCE.elementwise.rope(q, k, cos, sin)
        REFERENCE.attention.write(cache, index, k, v, metadata)
        found = REFERENCE.attention.apply(q, cache, index, metadata, model.scale, layer.window, layer.sinks)
        x = reduce(REFERENCE.linear.apply(found.flatten(1), layer.out))
        normed, residual = REFERENCE.elementwise.add_rms_norm(x, residual, layer.post_norm, eps)
        if layer.network is not None:
            x = layer.network(normed)
        else:
            x = reduce(
                REFERENCE.linear.apply(
                    REFERENCE.elementwise.silu_and_mul(REFERENCE.linear.apply(normed, layer.gate_up)), layer.down
                )
            )
    return REFERENCE.elementwise.add_rms_norm(x, residual, model.norm, eps)[0]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The Euclidean norm of the difference, relative to the expected value's."""
    wide = expected.double()
    return float((found.double().cpu() - wide).norm() / wide.norm())
