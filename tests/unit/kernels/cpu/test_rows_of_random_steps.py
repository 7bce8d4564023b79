"""Native attention of a few rows of sequences, as in steps that verify drafts: the bits of rows computed alone."""

from __future__ import annotations

import random
from ctypes import CDLL
from dataclasses import dataclass

import pytest
import torch

from kernels.cpu import attention
from kernels.interface import KVSpec
from kernels.torch_backend.attention import PagedKVCache
from tests.unit.kernels.steps import Rows, metadata, scattered_blocks

# Steps that a case draws.
STEPS = 25
# Sums of one token more or less, and of a tile of 64 keys and of several.
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 130, 191, 193, 256, 513, 580)
DTYPES = (
    *[(torch.bfloat16, torch.bfloat16)] * 4,
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float32),
)


@dataclass(frozen=True)
class Shape:
    """Heads, dtypes and blocks of a layer; with a width of values its attention is latent."""

    kv_heads: int
    group: int
    dim: int
    value_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    block: int
    window: int | None
    sinks: bool
    softcap: float


def drawn_shape(rnd: random.Random) -> Shape:
    latent = rnd.random() < 0.15
    dim = rnd.choice((32, 64, 96, 128, 160, 24, 40))
    dtype, kv_dtype = rnd.choice(DTYPES)
    return Shape(
        kv_heads=1 if latent else rnd.choice((1, 2)),
        group=rnd.choice((1, 2, 2, 3, 4, 5, 7, 8, 16)),
        dim=dim,
        value_dim=rnd.choice([wide for wide in (16, 24, 32, 64, 96) if wide <= dim]) if latent else 0,
        dtype=dtype,
        kv_dtype=kv_dtype,
        block=rnd.choice((1, 5, 16, 16, 64)),
        window=None if latent else rnd.choice((None, None, 1, 2, 33, 65, 128)),
        sinks=not latent and rnd.random() < 0.3,
        softcap=0.0 if latent or rnd.random() < 0.6 else rnd.choice((1.0, 50.0)),
    )


class Layer:
    """A shape's cache of some sequences; unwritten slots are NaN, and now and then a written one."""

    def __init__(self, native: CDLL, shape: Shape, rnd: random.Random) -> None:
        self._native, self._shape = native, shape
        self.lengths = [rnd.choice(LENGTHS) for _ in range(rnd.choice((1, 1, 2, 3)))]
        count = sum(-(-length // shape.block) for length in self.lengths) + 2
        self.tables = scattered_blocks(self.lengths, shape.block, count, seed=rnd.randrange(1 << 30))
        spec = KVSpec(shape.kv_heads, shape.dim, shape.value_dim)
        self._cache = PagedKVCache.allocate(spec, 1, count, shape.block, shape.kv_dtype)
        self._cache.data.copy_(torch.full(self._cache.data.shape, torch.nan))
        k, v = (torch.randn(sum(self.lengths), shape.kv_heads, shape.dim).to(shape.dtype) for _ in range(2))
        rows = [Rows(0, length, table) for length, table in zip(self.lengths, self.tables, strict=True)]
        step = attention.StepArrays(metadata(rows, shape.block))
        if shape.value_dim:
            attention.write_latent(native, self._cache, 0, k[:, 0], step)
        else:
            attention.write_kv(native, self._cache, 0, k, v, step)
        if rnd.random() < 0.2:
            self._cache.data[0, -1, rnd.randrange(count), :, rnd.randrange(shape.block)] = torch.nan
        self._sinks = torch.randn(shape.kv_heads * shape.group) if shape.sinks else None

    def attend(self, q: torch.Tensor, rows: list[Rows]) -> torch.Tensor:
        """Bits of the rows, all NaN alike."""
        step = attention.StepArrays(metadata(rows, self._shape.block))
        if self._shape.value_dim:
            out = attention.latent_attention(self._native, q, self._cache, 0, step, 0.2, None)
        else:
            own = (self._shape.window, self._sinks, self._shape.softcap)
            out = attention.attention(self._native, q, self._cache, 0, step, 0.2, *own)
        return out.nan_to_num(7.0).view(torch.int16 if q.dtype == torch.bfloat16 else torch.int32)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=(pytest.mark.long, pytest.mark.sampled)) for seed in range(1, 40))]
)
def test_rows_of_random_steps_equal_decodes(some_attention: CDLL, seed: int) -> None:
    rnd = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(STEPS):
        shape = drawn_shape(rnd)
        layer = Layer(some_attention, shape, rnd)
        counts = [min(length, rnd.randrange(1, 10)) for length in layer.lengths]
        q = torch.randn(sum(counts), shape.kv_heads * shape.group, shape.dim).to(shape.dtype)
        places = list(zip(counts, layer.lengths, layer.tables, strict=True))
        some_attention.fissile_set_threads(rnd.choice((1, 3)))
        together = layer.attend(q, [Rows(end - count, end, table) for count, end, table in places])
        tokens = [(at, table) for count, end, table in places for at in range(end - count, end)]
        for row in rnd.sample(range(len(tokens)), min(4, len(tokens))):
            at, table = tokens[row]
            alone = layer.attend(q[row : row + 1], [Rows(at, at + 1, table)])
            assert torch.equal(alone[0], together[row]), f"{shape}: {counts} rows of {layer.lengths}, row {row}"
