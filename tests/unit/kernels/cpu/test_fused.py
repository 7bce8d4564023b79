"""All layers in one native call give the bits of single operations, in every kind of step and layer."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.config import Config
from kernels.cpu import instruction_sets, library
from kernels.cpu.backend import CpuBackend
from kernels.decoder_layers import DecoderLayers
from kernels.interface import AttentionMetaData, Decoder, DecoderLayer, KVSpec
from kernels.torch_backend.attention import PagedKVCache
from tests.checkpoints import make_checkpoint
from tests.native import select_or_skip
from tests.unit.kernels.steps import Rows, metadata, scattered_blocks
from worker.config.model_config import ModelConfig
from worker.engine.batch import ScheduledBatch
from worker.engine.sequence import Sequence
from worker.model import model_runner
from worker.model.model_runner import ModelRunner
from worker.ranks.collectives import PeerLostError

pytestmark = pytest.mark.each_value

BLOCK, LAYERS = 16, 2
# One is longer than the rows that pass the feed-forward network at a time.
LENGTHS = [600, 40, 3]
# A chunk, a whole prompt, a decode; then decodes of all.
STEPS = ([(0, 590), (0, 40)], [(590, 591), (39, 40), (0, 3)], [(591, 600), (2, 3)])


@dataclass(frozen=True)
class Kind:
    """What layers may have or not."""

    hidden: int = 40
    heads: int = 4
    kv_heads: int = 2
    dim: int = 20
    inner: int = 56
    rotary: int = 20
    bias: bool = False
    norms: bool = False
    window: int | None = None
    sinks: bool = False
    padding: int = 0


KINDS = {
    "llama": Kind(),
    "qwen3": Kind(norms=True, dim=32, rotary=32),
    "biases": Kind(bias=True, heads=3, kv_heads=3, dim=24, rotary=8),
    "window, sinks, padding": Kind(window=33, sinks=True, padding=5, heads=8, kv_heads=1),
    # Products in whole tiles and panels, which AMX reads in place and ends in the activation.
    "whole tiles": Kind(hidden=64, dim=32, rotary=32, inner=96),
}


Reduce = Callable[[torch.Tensor], torch.Tensor]


class Model:
    """Random layers, packed by a back end, and a cache whose unwritten slots are NaN."""

    def __init__(
        self,
        kind: Kind,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        all_reduce: Reduce | None = None,
        instruction_set: str = instruction_sets.AUTO,
    ) -> None:
        self.kind, self.backend, self.dtype = kind, CpuBackend(instruction_set), dtype
        self._generator = torch.Generator().manual_seed(7)
        norm = 1 + self.drawn(kind.hidden)
        layers = tuple(self.layer() for _ in range(LAYERS))
        self.decoder = Decoder(layers, norm, 1e-5, kind.heads, kind.dim**-0.5, all_reduce)
        self.cache = PagedKVCache.allocate(KVSpec(kind.kv_heads, kind.dim), LAYERS, 50, BLOCK, kv_dtype)
        self.cache.data[:] = torch.nan
        self.blocks = scattered_blocks(LENGTHS, BLOCK, 50, seed=3)

    def drawn(self, *shape: int) -> torch.Tensor:
        values: torch.Tensor = torch.randn(shape, generator=self._generator) * float(shape[-1]) ** -0.5 * 2
        return values.to(self.dtype)

    def packed(self, columns: int, inner: int) -> Any:
        bias = self.drawn(columns) if self.kind.bias else None
        return self.backend.linear.pack(self.drawn(columns, inner), bias, self.dtype)

    def layer(self) -> DecoderLayer:
        kind = self.kind
        width = kind.heads * kind.dim
        return DecoderLayer(
            input_norm=1 + self.drawn(kind.hidden),
            qkv=self.packed(width + 2 * kind.kv_heads * kind.dim, kind.hidden),
            head_norms=(1 + self.drawn(kind.dim), 1 + self.drawn(kind.dim)) if kind.norms else None,
            window=kind.window,
            sinks=self.drawn(kind.heads).float() if kind.sinks else None,
            out=self.packed(kind.hidden, width),
            post_norm=1 + self.drawn(kind.hidden),
            gate_up=self.packed(2 * kind.inner, kind.hidden),
            down=self.packed(kind.hidden, kind.inner),
        )

    def single(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: AttentionMetaData) -> torch.Tensor:
        """The layers, operation by operation."""
        do, eps, residual = self.backend, self.decoder.eps, None
        streams: list[torch.Tensor] = []
        join = self.decoder.all_reduce or torch.clone
        for i, layer in enumerate(self.decoder.layers):
            if residual is None:
                normed, residual = do.elementwise.rms_norm(x, layer.input_norm, eps), x
            else:
                normed, residual = do.elementwise.add_rms_norm(x, residual, layer.input_norm, eps)
            streams.append(residual)
            heads = do.linear.apply(normed, layer.qkv).view(len(x), -1, self.kind.dim)
            q, k, v = heads.split_with_sizes([self.kind.heads, self.kind.kv_heads, self.kind.kv_heads], dim=1)
            if layer.head_norms is not None:
                q, k = (
                    do.elementwise.rms_norm(one, norm, eps) for one, norm in zip((q, k), layer.head_norms, strict=True)
                )
            q, k = do.elementwise.rope(q, k, cos, sin)
            do.attention.write(self.cache, i, k, v, step)
            attended = do.attention.apply(q, self.cache, i, step, self.decoder.scale, layer.window, layer.sinks)
            out = join(do.linear.apply(attended.flatten(1), layer.out))
            x, residual = do.elementwise.add_rms_norm(out, residual, layer.post_norm, eps)
            x = join(do.linear.apply(do.elementwise.silu_and_mul(do.linear.apply(x, layer.gate_up)), layer.down))
        assert residual is not None
        states = do.elementwise.add_rms_norm(x, residual, self.decoder.norm, eps)[0]
        return torch.cat((states, *(streams[layer] for layer in self.decoder.aux_layers)), dim=1)

    def step(self, spans: list[tuple[int, int]]) -> AttentionMetaData:
        rows = [Rows(*span, blocks) for span, blocks in zip(spans, self.blocks, strict=False)]
        made = metadata(rows, BLOCK)
        made.plan = self.backend.attention.plan(made, self.cache, self.kind.heads)
        return made


def check(
    kind: Kind,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    threads: int = 1,
    all_reduce: Reduce | None = None,
    instruction_set: str = instruction_sets.AUTO,
) -> None:
    """Step after step, each over the cache that both have filled alike."""
    one, other = (Model(kind, dtype, kv_dtype, all_reduce, instruction_set) for _ in range(2))
    fused = other.backend.fuse_decoder(other.decoder, kv_dtype)
    assert fused is not None
    for spans in STEPS:
        rows = sum(end - begin for begin, end in spans) + kind.padding
        x, angles = one.drawn(rows, kind.hidden), torch.rand(rows, 1, kind.rotary // 2) * 6
        kept = x.clone()
        one.backend._library.fissile_set_threads(1)
        expected = one.single(x, angles.cos(), angles.sin(), one.step(spans))
        one.backend._library.fissile_set_threads(threads)
        actual = fused.run(x, angles.cos(), angles.sin(), other.cache, other.step(spans))
        assert torch.equal(actual, expected)
        assert actual.isfinite().all()
        assert torch.equal(x, kept)
        assert torch.equal(*(model.cache.data.float().nan_to_num(7.0) for model in (one, other)))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_decoder_bits_equal_single_operations(threads: CDLL, dtype: torch.dtype, kind: Kind) -> None:
    for count in (1, 3):
        check(kind, dtype, dtype, count)


@pytest.mark.parametrize("aux_layers", [(0,), (1, 0, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_residual_streams_are_returned_with_states(
    threads: CDLL, dtype: torch.dtype, aux_layers: tuple[int, ...]
) -> None:
    """Equal to the bit, in any order, and for all rows, whichever rows are wanted."""
    kind = KINDS["window, sinks, padding"]
    one, other = (Model(kind, dtype, dtype) for _ in range(2))
    one.decoder = replace(one.decoder, aux_layers=aux_layers)
    fused = other.backend.fuse_decoder(one.decoder, dtype)
    assert fused is not None
    for spans in STEPS:
        rows = sum(end - begin for begin, end in spans) + kind.padding
        x, angles = one.drawn(rows, kind.hidden), torch.rand(rows, 1, kind.rotary // 2) * 6
        expected = one.single(x, angles.cos(), angles.sin(), one.step(spans))
        for last_only in (False, True):
            step = other.step(spans)
            wanted = step.cu_seqlens_q[1:] - 1 if last_only else np.arange(rows)
            step.wanted_rows = wanted if last_only else None
            actual = fused.run(x, angles.cos(), angles.sin(), other.cache, step)
            assert torch.equal(actual[:, kind.hidden :], expected[:, kind.hidden :])
            assert torch.equal(actual[wanted, : kind.hidden], expected[wanted, : kind.hidden])


@pytest.mark.parametrize("norms_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_draft_layer_takes_embeddings_and_states(threads: CDLL, dtype: torch.dtype, norms_first: bool) -> None:
    """Equal to single operations to the bit; the residual stream is returned with the normed states."""
    kind = KINDS["whole tiles"]
    one, other = (Model(kind, dtype, dtype) for _ in range(2))
    width = kind.heads * kind.dim + 2 * kind.kv_heads * kind.dim
    layer = replace(one.decoder.layers[0], qkv=one.packed(width, 2 * kind.hidden))
    decoder = replace(
        one.decoder, layers=(layer,), aux_layers=(1,), stream_norm=1 + one.drawn(kind.hidden), norms_first=norms_first
    )
    fused, layers = other.backend.fuse_decoder(decoder, dtype), DecoderLayers(decoder, one.backend)
    assert fused is not None
    for spans in STEPS:
        rows = sum(end - begin for begin, end in spans) + kind.padding
        x, embedded = one.drawn(rows, kind.hidden), one.drawn(rows, kind.hidden)
        angles, step = torch.rand(rows, 1, kind.rotary // 2) * 6, one.step(spans)

        def rope_write(
            qkv: torch.Tensor, _: DecoderLayer, index: int, angles: torch.Tensor = angles, step: Any = step
        ) -> torch.Tensor:
            heads = qkv.view(len(qkv), -1, kind.dim)
            q, k, v = heads.split_with_sizes([kind.heads, kind.kv_heads, kind.kv_heads], dim=1)
            q, k = one.backend.elementwise.rope(q, k, angles.cos(), angles.sin())
            one.backend.attention.write(one.cache, index, k, v, step)
            return q

        expected = layers.run(x, one.cache, step, rope_write, embedded)
        actual = fused.run(x, angles.cos(), angles.sin(), other.cache, other.step(spans), embedded)
        assert actual.shape == (rows, 2 * kind.hidden)
        assert torch.equal(actual, expected)
        stream = actual[:, kind.hidden :]
        assert torch.equal(actual[:, : kind.hidden], one.backend.elementwise.rms_norm(stream, decoder.norm, 1e-5))


@pytest.mark.parametrize("all_reduce", [None, lambda x: x * 1.5], ids=["alone", "ranks"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_wanted_rows_have_bits_of_all_rows(
    threads: CDLL, dtype: torch.dtype, kind: Kind, all_reduce: Reduce | None
) -> None:
    whole, other = (Model(kind, dtype, dtype, all_reduce) for _ in range(2))
    in_whole, in_other = (model.backend.fuse_decoder(model.decoder, dtype) for model in (whole, other))
    assert in_whole is not None
    assert in_other is not None
    for spans in STEPS:
        rows = sum(end - begin for begin, end in spans) + kind.padding
        x, angles = whole.drawn(rows, kind.hidden), torch.rand(rows, 1, kind.rotary // 2) * 6
        arguments = x, angles.cos(), angles.sin()
        expected = in_whole.run(*arguments, whole.cache, whole.step(spans))
        step = other.step(spans)
        # With no wanted row keys and values are still stored.
        for counts in product((0, 1, 37), repeat=len(spans)):
            borders = zip(counts, step.cu_seqlens_q.tolist(), step.cu_seqlens_q[1:].tolist(), strict=False)
            wanted = [row for count, begin, end in borders for row in range(max(begin, end - count), end)]
            step.wanted_rows = np.array(wanted, np.int64)
            actual = in_other.run(*arguments, other.cache, step)
            assert torch.equal(actual[step.wanted_rows], expected[step.wanted_rows])
            assert torch.equal(*(model.cache.data.float().nan_to_num(7.0) for model in (whole, other)))


@pytest.mark.slow
@pytest.mark.parametrize("instruction_set", ["amx_emulated", "avx512bf16_emulated"])
def test_also_by_instructions_for_bfloat16(threads: CDLL, instruction_set: str) -> None:
    select_or_skip(threads, instruction_set)
    try:
        check(KINDS["whole tiles"], torch.bfloat16, torch.bfloat16, 2, instruction_set=instruction_set)
    finally:
        library.select(threads)


@pytest.mark.parametrize("all_reduce", [lambda x: x * 1.5, lambda x: x.mul_(1.5)], ids=["another", "in_place"])
def test_ranks_reduce_within_fused_call(threads: CDLL, all_reduce: Reduce) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check(KINDS["biases"], dtype, dtype, 2, all_reduce)


def test_all_reduce_error_leaves_fused_decoder(threads: CDLL) -> None:
    met = 0

    def lost(x: torch.Tensor) -> torch.Tensor:
        nonlocal met
        met += 1
        if met == 3:
            raise PeerLostError("gone")
        return x

    model = Model(KINDS["llama"], torch.float32, torch.float32, lost)
    fused = model.backend.fuse_decoder(model.decoder, torch.float32)
    assert fused is not None
    x, angles = model.drawn(630, model.kind.hidden), torch.rand(630, 1, 10)
    for _ in range(2):
        met = 0
        with pytest.raises(PeerLostError, match="gone"):
            fused.run(x, angles.cos(), angles.sin(), model.cache, model.step(STEPS[0]))
        assert met == 3


def test_fused_decoder_with_other_cache_dtype(threads: CDLL) -> None:
    check(KINDS["qwen3"], torch.float32, torch.bfloat16)
    for kv_dtype in (torch.float32, torch.float16, torch.float8_e4m3fn):
        check(KINDS["qwen3"], torch.bfloat16, kv_dtype)


def test_layers_without_native_kernels_are_not_fused(native: CDLL) -> None:
    model = Model(Kind(), torch.float32, torch.float32)
    assert model.backend.fuse_decoder(model.decoder, torch.float64) is None
    half = model.backend.linear.pack(torch.zeros(40, 56), None, torch.float16)
    other = replace(model.decoder, layers=(*model.decoder.layers, replace(model.decoder.layers[0], down=half)))
    assert model.backend.fuse_decoder(other, torch.float32) is None


class SingleOperations(CpuBackend):
    """Never fuses."""

    def fuse_decoder(self, decoder: Decoder, kv_dtype: torch.dtype) -> None:
        return None


def runner_of(folder: Path) -> ModelRunner:
    config = Config(model=str(folder), kernels="cpu", max_model_len=64)
    runner = ModelRunner(config, ModelConfig.from_folder(folder))
    runner.allocate_kv_cache(8)
    return runner


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fused_model_logits_equal_single_operations(
    native: CDLL, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, architecture: str, dtype: str
) -> None:
    bias: dict[str, Any] = {"attention_bias": True, "mlp_bias": True} if architecture == "llama" else {}
    folder = make_checkpoint(tmp_path, architecture, dtype=dtype, num_hidden_layers=3, tokenizer=False, **bias)
    fused = runner_of(folder)
    monkeypatch.setattr(model_runner, "select_backend", lambda *_: SingleOperations())
    single = runner_of(folder)
    assert fused.model._fused is not None  # type: ignore[attr-defined]
    assert single.model._fused is None  # type: ignore[attr-defined]
    seqs = [Sequence(list(range(5, 5 + n)), 16) for n in (20, 3)]
    for i, seq in enumerate(seqs):
        seq.block_table = [3 * i, 3 * i + 1]
    batch = ScheduledBatch({seq.id: seq for seq in seqs}, [20, 3], 23)
    logits = [runner.run_model(runner.prepare_model(batch)) for runner in (fused, single)]
    assert torch.equal(*logits)
