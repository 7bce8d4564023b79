"""AiterDecoder on a stand-in for AITER against PyTorch's single operations."""

from __future__ import annotations

from typing import Any

import pytest
import structlog
import torch

from kernels.aiter.backend import AiterBackend
from kernels.aiter.library import AiterLibrary
from kernels.interface import AttentionMetaData, KVSpec
from kernels.triton_backend.plan import Shape
from kernels.triton_backend.target import TARGETS, Settings
from tests.kernels.aiter.test_backend import DECODE, MIXED, step
from tests.kernels.aiter.watched import TUNED, Fallback, PlannedAttention, draw
from tests.kernels.dense_layers import REFERENCE, Sizes, by_single_operations, decoder, relative
from tests.unit.kernels.steps import Rows

# `padded` leaves rows and sequences over, as a captured step does.
PADDED = Shape(rows=8, seqs=8, blocks=8, max_seqlen_q=1, max_seqlen_k=128)


class AttentionToWritten(PlannedAttention):
    """Attends to the cache of the Triton back end by PyTorch."""

    def apply(self, q: torch.Tensor, *given: Any) -> torch.Tensor:
        cache, layer, metadata, *scores = given
        own = REFERENCE.kv_cache.allocate(
            KVSpec(cache.num_kv_heads, cache.head_dim), 1, cache.num_blocks, cache.block_size, cache.data.dtype
        )
        own.data[0, :, :-1] = cache.data[layer].transpose(2, 3)
        other = AttentionMetaData(
            metadata.cu_seqlens_q, metadata.seq_lens, metadata.block_tables, metadata.slot_mapping
        )
        other.plan = REFERENCE.attention.plan(other, own, q.shape[1])
        return REFERENCE.attention.apply(q, own, 0, other, *scores)


class WritingFallback(Fallback):
    """Attends to the written keys and values if AITER does not."""

    attention_ops = AttentionToWritten


def run(
    backend: AiterBackend,
    rows: list[Rows],
    padded: Shape | None = None,
    dtype: torch.dtype = torch.bfloat16,
    rotated: int = 32,
    all_reduce: Any = None,
    **sizes: Any,
) -> tuple[float, Any]:
    """The larger error of a step's results and its stored keys and values, and the choice of `rope_write`."""
    layers = Sizes(**sizes)
    both = step(backend, rows, KVSpec(layers.kv_heads, layers.head_dim), dtype, padded)
    tokens = sum(each.count for each in rows)
    x = draw(padded.rows if padded else tokens, layers.hidden, dtype=dtype)
    angles = draw(len(x), 1, rotated // 2, dtype=torch.float32)
    cos, sin = angles.cos(), angles.sin()
    with structlog.testing.capture_logs() as logs:
        fused = backend.fuse_decoder(decoder(backend, dtype, layers, all_reduce), dtype)
        found = fused.run(x, cos, sin, both.found, both.mine)
    assert found.dtype == dtype
    model = decoder(REFERENCE, dtype, layers, all_reduce)
    expected = by_single_operations(model, x[:tokens], cos[:tokens], sin[:tokens], both.expected, both.reference)
    stored = relative(both.found.data.transpose(3, 4), both.expected.data[:, :, :-1])
    (line,) = [line for line in logs if line.get("operation") == "rope_write"]
    return max(relative(found[:tokens], expected), stored), line


@pytest.mark.parametrize(("rows", "padded"), [(MIXED, None), (DECODE, PADDED)])
def test_decoder_layers_equal_reference(library: AiterLibrary, rows: list[Rows], padded: Shape | None) -> None:
    fallback = Fallback()
    error, line = run(AiterBackend(fallback, library, TUNED), rows, padded)
    assert error < 0.02
    assert line["kernels"] == "aiter"
    assert fallback.asked == []
    function = "aiter.ops.triton.fusions.fused_kv_cache:fused_qk_rope_reshape_and_cache"
    assert function in library.called


def test_ranks_are_summed_after_both_products(library: AiterLibrary) -> None:
    summed: list[torch.Size] = []

    def double(x: torch.Tensor) -> torch.Tensor:
        summed.append(x.shape)
        return x * 2

    error, _ = run(AiterBackend(Fallback(), library, TUNED), MIXED, all_reduce=double)
    assert error < 0.02
    assert len(summed) == 2 * 4


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ({"norms_heads": True}, "cosines in the model's dtype"),
        ({"dtype": torch.float16}, "for a model and a cache in bfloat16, not float16"),
        ({"dtype": torch.float32}, "for a model and a cache in bfloat16, not float32"),
        ({"rotated": 16}, "powers of 2, not 16 of 32 rotated, in blocks of 16"),
        ({"head_dim": 48, "rotated": 48}, "powers of 2, not 48 of 48 rotated"),
    ],
)
def test_unsupported_rotation_uses_triton_kernel(library: AiterLibrary, kind: dict[str, Any], reason: str) -> None:
    backend = AiterBackend(WritingFallback(), library, TUNED)
    error, line = run(backend, DECODE, **kind)
    assert error < 0.02
    assert line["kernels"] == "fallback"
    assert reason in line["reason"]


def test_another_network(library: AiterLibrary) -> None:
    """A mixture of experts, for example, sums over the ranks itself."""
    summed: list[torch.Size] = []

    def double(x: torch.Tensor) -> torch.Tensor:
        summed.append(x.shape)
        return x * 2

    backend = AiterBackend(Fallback(), library, TUNED)
    error, line = run(backend, MIXED, all_reduce=double, other_network=True)
    assert error < 0.02
    # As in the reference: attention of both layers, and the network of the first.
    assert len(summed) == 2 * 3
    assert line["kernels"] == "aiter"


def test_batch_invariance_uses_triton_rotation(library: AiterLibrary) -> None:
    """Since 0.1.20 another kernel rotates from 128 rows on."""
    backend = AiterBackend(WritingFallback(), library, Settings(TARGETS["gfx950"], batch_invariant=True))
    error, line = run(backend, DECODE)
    assert error < 0.02
    assert "the worker is batch-invariant" in line["reason"]


def test_no_rows(library: AiterLibrary) -> None:
    backend = AiterBackend(Fallback(), library, TUNED)
    both = step(backend, DECODE, KVSpec(2, 32), torch.bfloat16, None)
    none = torch.empty(0, 1, 16)
    fused = backend.fuse_decoder(decoder(backend, torch.bfloat16, Sizes()), torch.bfloat16)
    assert fused.run(draw(0, 64), none, none, both.found, both.mine).shape == (0, 64)
