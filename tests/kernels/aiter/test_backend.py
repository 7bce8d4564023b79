"""AiterBackend on a stand-in for AITER (fake_aiter.py) against PyTorch's back end: arguments and results.

The numbers of AITER's kernels are not tested here; no machine of ours can run them (docs/reference/rocm.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import structlog
import torch

from kernels.aiter.backend import AiterBackend
from kernels.aiter.dispatch import SINCE
from kernels.aiter.experts import AiterExperts
from kernels.aiter.library import AiterLibrary, AiterUnavailableError
from kernels.aiter.linear import AiterLinear, AiterScaledLinear
from kernels.interface import (
    AttentionMetaData,
    ClampedSwiglu,
    ExpertWeights,
    KVSpec,
    PackedFormat,
    Routing,
    SampleParams,
)
from kernels.no_token import NO_TOKEN
from kernels.triton_backend import plan as step_plan
from kernels.triton_backend.backend import TritonBackend
from kernels.triton_backend.packed_weight import PackedWeight
from kernels.triton_backend.plan import Shape, StepPlan
from kernels.triton_backend.target import TARGETS, Settings
from tests.kernels.aiter.watched import CPU, NARROW, REFERENCE, TUNED, Fallback, close, draw, fallback_of
from tests.unit.kernels.steps import Rows, metadata, scattered_blocks

pytestmark = pytest.mark.each_value
SIZE, BLOCKS = 16, 40


@pytest.mark.parametrize("dtype", NARROW)
def test_norms(backend: AiterBackend, dtype: torch.dtype) -> None:
    x, residual, weight, bias = (draw(*shape, dtype=dtype, seed=7) for shape in ((5, 48), (5, 48), (48,), (48,)))
    before = (x.clone(), residual.clone())
    close(backend.elementwise.rms_norm(x, weight, 1e-5), REFERENCE.elementwise.rms_norm(x, weight, 1e-5))
    found, expected = (each.elementwise.add_rms_norm(x, residual, weight, 1e-5) for each in (backend, REFERENCE))
    close(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    close(
        backend.elementwise.layer_norm(x, weight, bias, 1e-5), REFERENCE.elementwise.layer_norm(x, weight, bias, 1e-5)
    )
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])
    assert fallback_of(backend) == []


def test_norm_of_heads(backend: AiterBackend) -> None:
    """Queries are a slice of each row of the projection, and so is a latent."""
    qkv, weight = draw(6, 8, 32), draw(32)
    rows = draw(6, 40)[:, :32]
    close(backend.elementwise.rms_norm(rows, weight, 1e-6), REFERENCE.elementwise.rms_norm(rows, weight, 1e-6))
    close(
        backend.elementwise.rms_norm(qkv[:, :5], weight, 1e-6), REFERENCE.elementwise.rms_norm(qkv[:, :5], weight, 1e-6)
    )


@pytest.mark.parametrize("rotary_dim", [16, 32])
def test_rope(backend: AiterBackend, rotary_dim: int) -> None:
    qkv, angles = draw(6, 9, 32), draw(6, 1, rotary_dim // 2, dtype=torch.float32)
    before = qkv.clone()
    q, k = qkv[:, :5], qkv[:, 5:7]
    for found, expected in zip(
        backend.elementwise.rope(q, k, angles.cos(), angles.sin()),
        REFERENCE.elementwise.rope(q, k, angles.cos(), angles.sin()),
        strict=True,
    ):
        assert found.shape == expected.shape
        close(found, expected)
    assert torch.equal(qkv, before)
    assert fallback_of(backend) == []


@pytest.mark.parametrize("dtype", NARROW)
def test_silu_and_mul(backend: AiterBackend, dtype: torch.dtype) -> None:
    x = draw(4, 2 * 48, dtype=dtype)
    close(backend.elementwise.silu_and_mul(x), REFERENCE.elementwise.silu_and_mul(x))
    assert fallback_of(backend) == []


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(backend: AiterBackend, dtype: torch.dtype, with_bias: bool) -> None:
    x, weight, bias = draw(5, 40, dtype=dtype), draw(70, 40), draw(70) if with_bias else None
    packed, reference = backend.linear.pack(weight, bias, dtype), REFERENCE.linear.pack(weight, bias, dtype)
    assert isinstance(packed, AiterLinear)
    torch.testing.assert_close(
        backend.linear.apply(x, packed), REFERENCE.linear.apply(x, reference), rtol=2e-2, atol=0.1
    )
    ids = torch.tensor([3, 69, 3])
    assert torch.equal(backend.linear.rows(packed, ids), weight.to(dtype)[ids])
    assert backend.linear.apply(x[:0], packed).shape == (0, 70)


def test_linear_argmax(backend: AiterBackend) -> None:
    weight = torch.eye(32, dtype=torch.bfloat16)
    x = torch.zeros(5, 32, dtype=torch.bfloat16)
    x[0, [7, 9]] = 2.0
    x[1, 30] = 9.0
    x[1, 3] = 1.0
    x[3] = -torch.inf
    x[4, 5] = torch.nan
    packed = AiterLinear(weight, None)
    rows = backend.linear.argmax(x[:3], packed, 20)
    assert rows.tolist() == [7, 3, 0]
    assert fallback_of(backend) == ["sampling.argmax"]
    odd = AiterLinear(torch.ones(3, 32, dtype=torch.bfloat16), None)
    assert backend.linear.argmax(x[3:], odd, 3).tolist() == [NO_TOKEN, NO_TOKEN]
    weight[5] = torch.nan
    assert backend.linear.argmax(x[:2], packed, 20).tolist() == [7, 3]


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_in_fp8(library: AiterLibrary, target: str, with_bias: bool) -> None:
    backend = AiterBackend(Fallback(), library, Settings(TARGETS[target], False))
    assert backend.fp8 == (torch.float8_e4m3fnuz if target == "gfx942" else torch.float8_e4m3fn)
    x, weight, bias = draw(5, 64), draw(48, 64), draw(48) if with_bias else None
    packed = backend.linear.pack(weight, bias, torch.bfloat16, PackedFormat(backend.fp8, quantizes_rows=True))
    assert isinstance(packed, AiterScaledLinear)
    assert packed.weight.dtype == backend.fp8
    found = backend.linear.apply(x, replace(packed, weight=packed.weight.clone())).float()
    expected = REFERENCE.linear.apply(x, REFERENCE.linear.pack(weight, bias, torch.bfloat16)).float()
    assert (found - expected).norm() / expected.norm() < 0.05
    assert fallback_of(backend) == []


@dataclass(frozen=True)
class Step:
    """A step, with the caches of both back ends holding the same."""

    found: Any
    expected: Any
    mine: AttentionMetaData
    reference: AttentionMetaData


def step(backend: AiterBackend, rows: list[Rows], spec: KVSpec, dtype: torch.dtype, padded: Shape | None) -> Step:
    mine, reference = metadata(rows, SIZE), metadata(rows, SIZE)
    found: Any = backend.kv_cache.allocate(spec, 2, BLOCKS, SIZE, dtype)
    expected: Any = REFERENCE.kv_cache.allocate(spec, 2, BLOCKS, SIZE, dtype)
    earlier = draw(*found.data.shape).to(dtype)
    found.data.copy_(earlier)
    expected.data[:, :, :-1] = earlier.transpose(3, 4)
    mine.plan = step_plan.plan(mine, CPU, SIZE)
    if padded is not None:
        mine.plan = StepPlan.over(torch.from_numpy(step_plan.staged(mine, padded)), padded)
    reference.plan = REFERENCE.attention.plan(reference, expected, 4)
    return Step(found, expected, mine, reference)


def sequences(counts: list[int], lengths: list[int]) -> list[Rows]:
    blocks = scattered_blocks(lengths, SIZE, BLOCKS, seed=3)
    return [Rows(end - count, end, ids) for count, end, ids in zip(counts, lengths, blocks, strict=True)]


MIXED, DECODE = sequences([1, 20, 3], [37, 20, 65]), sequences([1, 1, 1], [37, 1, 65])
PADDED = [
    (MIXED, None),
    (DECODE, None),
    (MIXED, Shape(rows=30, seqs=5, blocks=8, max_seqlen_q=32, max_seqlen_k=128)),
    (DECODE, Shape(rows=8, seqs=8, blocks=8, max_seqlen_q=1, max_seqlen_k=128)),
    # More sequences than rows: AITER would write past the last row.
    (DECODE, Shape(rows=3, seqs=8, blocks=8, max_seqlen_q=1, max_seqlen_k=128)),
]


@pytest.mark.parametrize(("rows", "padded"), PADDED)
@pytest.mark.parametrize("window", [None, 1, 24])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention(
    backend: AiterBackend, rows: list[Rows], padded: Shape | None, window: int | None, with_sinks: bool
) -> None:
    spec, tokens = KVSpec(2, 32), sum(each.count for each in rows)
    run = step(backend, rows, spec, torch.bfloat16, padded)
    count = padded.rows if padded else tokens
    q = draw(count, 8, 32)[:, :4]
    sinks = draw(4, dtype=torch.float32) if with_sinks else None
    found = backend.attention.apply(q, run.found, 1, run.mine, 0.2, window, sinks)
    close(found[:tokens], REFERENCE.attention.apply(q[:tokens], run.expected, 1, run.reference, 0.2, window, sinks))
    assert not found[tokens:].any()
    assert fallback_of(backend) == []


def test_aiter_backend_over_triton(library: AiterLibrary) -> None:
    """AITER on the Triton back end: its cache, its plans, plans of captured steps, and operations outside AITER."""
    backend = AiterBackend(TritonBackend(batch_invariant=False), library, TUNED)
    run = step(backend, DECODE, KVSpec(2, 32), torch.bfloat16, None)
    graphs = backend.graphs
    assert graphs is not None
    captured = graphs.plan(run.found, 4, num_seqs=5, most_rows=1, max_seq_len=128)
    graphs.write(captured, run.mine, run.found)
    run.mine.plan = captured
    q, k, v = draw(5, 4, 32), draw(5, 2, 32), draw(5, 2, 32, seed=1)
    backend.attention.write(run.found, 1, k, v, run.mine)
    REFERENCE.attention.write(run.expected, 1, k[:3], v[:3], run.reference)
    found = backend.attention.apply(q, run.found, 1, run.mine, 0.2)
    close(found[:3], REFERENCE.attention.apply(q[:3], run.expected, 1, run.reference, 0.2))
    assert not found[3:].any()
    x, weight = draw(3, 64, dtype=torch.float32), draw(48, 64, dtype=torch.float32)
    for name in ("int8", "w8a8_int8"):
        packed_format = backend.packed_format(name, torch.float32)
        product = backend.linear.apply(x, backend.linear.pack(weight, None, torch.float32, packed_format))
        assert (product - x @ weight.t()).norm() / product.norm() < 0.02
    weight_only = backend.linear.pack(weight, None, torch.bfloat16, backend.packed_format("fp8", torch.bfloat16))
    assert isinstance(weight_only, PackedWeight)
    assert not weight_only.quantizes_rows


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_attention_with_fp8_cache(library: AiterLibrary, target: str) -> None:
    backend = AiterBackend(Fallback(), library, Settings(TARGETS[target], False))
    run = step(backend, MIXED, KVSpec(2, 32), backend.fp8, None)
    q = draw(24, 4, 32)
    found = backend.attention.apply(q, run.found, 1, run.mine, 0.2)
    close(found, REFERENCE.attention.apply(q, run.expected, 1, run.reference, 0.2))
    assert fallback_of(backend) == []


@pytest.mark.parametrize(("rows", "padded"), PADDED)
def test_latent_attention(backend: AiterBackend, library: AiterLibrary, rows: list[Rows], padded: Shape | None) -> None:
    spec, tokens = KVSpec(1, 48, latent_value_dim=32), sum(each.count for each in rows)
    run = step(backend, rows, spec, torch.bfloat16, padded)
    q = draw(padded.rows if padded else tokens, 4, 48)
    found = backend.latent_attention.apply(q, run.found, 1, run.mine, 0.2, None)
    assert found.shape == (len(q), 4, 32)
    if not set(SINCE) <= library.functions:
        assert fallback_of(backend) == ["latent_attention.apply"]
        return
    close(found[:tokens], REFERENCE.latent_attention.apply(q[:tokens], run.expected, 1, run.reference, 0.2, None))
    assert not found[tokens:].any()
    assert fallback_of(backend) == []


def test_selected_attention_uses_fallback(backend: AiterBackend) -> None:
    run = step(backend, MIXED, KVSpec(1, 48, latent_value_dim=32), torch.bfloat16, None)
    backend.latent_attention.write(run.found, 1, draw(24, 48), run.mine)
    backend.latent_attention.apply(draw(24, 4, 48), run.found, 1, run.mine, 0.2, "selected")
    assert fallback_of(backend) == ["latent_attention.write", "latent_attention.apply"]


@pytest.mark.parametrize(
    "routing",
    [
        Routing(2),
        Routing(3, renormalize=True, scale=2.5),
        Routing(2, scoring="topk_softmax"),
        Routing(4, "sigmoid", renormalize=True, num_groups=4, top_groups=2, scale=2.5),
        Routing(4, "sigmoid", renormalize=True),
    ],
)
def test_route(backend: AiterBackend, routing: Routing) -> None:
    logits = draw(9, 16, dtype=torch.float32)
    bias = draw(16, dtype=torch.float32) if routing.scoring == "sigmoid" else None
    (ids, weights), expected = (each.experts.route(logits, routing, bias) for each in (backend, REFERENCE))
    assert torch.equal(ids, expected[0])
    assert ids.dtype == torch.int64
    close(weights, expected[1])
    assert fallback_of(backend) == []


def sigmoid(num_groups: int = 1, renormalize: bool = True) -> tuple[torch.Tensor, Routing, torch.Tensor]:
    """What `route` is asked for."""
    routing = Routing(2, "sigmoid", renormalize, num_groups, num_groups)
    return draw(2, 12, dtype=torch.float32), routing, draw(12, dtype=torch.float32)


def experts(count: int, hidden: int, inner: int) -> list[ExpertWeights]:
    pairs = [(draw(2 * inner, hidden, seed=i) * 0.3, draw(hidden, inner, seed=i) * 0.3) for i in range(count)]
    return [ExpertWeights(gate_up, down) for gate_up, down in pairs]


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_moe(library: AiterLibrary, first: int, quantized: bool, expert_parallel: bool) -> None:
    backend = AiterBackend(Fallback(), library, TUNED, expert_parallel)
    x, weights = draw(6, 64), experts(4, 64, 32)
    last = 8 if expert_parallel else first + 4
    least = 0 if expert_parallel else first
    ids = torch.stack([torch.randperm(last - least, generator=torch.Generator().manual_seed(i))[:3] for i in range(6)])
    slot_weights = draw(6, 3, dtype=torch.float32).abs()
    packed_format = PackedFormat(backend.fp8, quantizes_rows=True) if quantized else None
    packed = backend.experts.pack(iter(weights), first, None, torch.bfloat16, packed_format)
    assert isinstance(packed, AiterExperts)
    assert (packed.mask is not None) == expert_parallel
    found = backend.experts.apply(x, ids + least, slot_weights, packed)
    reference = REFERENCE.experts.pack(weights, first, None, torch.bfloat16)
    expected = REFERENCE.experts.apply(x, ids + least, slot_weights, reference)
    # The reference rounds between the two products.
    assert (found - expected).float().norm() / expected.float().norm() < (0.08 if quantized else 0.01)
    assert backend.experts.apply(x[:0], ids[:0], slot_weights[:0], packed).shape == (0, 64)
    assert fallback_of(backend) == []


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (lambda b: b.elementwise.rms_norm(draw(2, 8, dtype=torch.float32), torch.ones(8), 1e-6), "not float32"),
        (lambda b: b.linear.pack(draw(8, 8), None, torch.float32), "not float32"),
        (lambda b: b.experts.pack(experts(2, 24, 16), 0, None, torch.bfloat16), "16 x 32, not 32 x 24"),
        (lambda b: b.experts.pack(experts(2, 64, 32), 0, ClampedSwiglu(1.7, 7.0), torch.bfloat16), "without biases"),
        (lambda b: b.experts.route(draw(2, 8, dtype=torch.float32), Routing(2, "sigmoid")), "has a correction"),
        (lambda b: b.experts.route(*sigmoid(num_groups=3)), "not 3 of 12 experts"),
        (lambda b: b.experts.route(*sigmoid(renormalize=False)), "that are renormalized"),
        (lambda b: b.experts.route(draw(2, 8, dtype=torch.float32), Routing(2, num_groups=4)), "has other groups"),
    ],
)
def test_unsupported_operations_use_fallback(library: AiterLibrary, asked: Any, reason: str) -> None:
    with structlog.testing.capture_logs() as logs:
        backend = AiterBackend(Fallback(), library, TUNED)
        asked(backend)
        asked(backend)
    assert len(fallback_of(backend)) == 2
    (line,) = logs
    assert line["event"] == "kernels chosen"
    assert line["kernels"] == "fallback"
    assert reason in line["reason"]


def test_reason_for_fallback_is_logged_once(library: AiterLibrary) -> None:
    backend = AiterBackend(Fallback(), library, TUNED)
    with structlog.testing.capture_logs() as logs:
        for rows in (8, 16, 24):
            backend.linear.pack(draw(rows, 8), None, torch.float32)
            backend.linear.pack(draw(rows, 8), None, torch.bfloat16)
    assert [line["kernels"] for line in logs] == ["fallback", "aiter"]


def test_unsupported_attention_uses_fallback(library: AiterLibrary) -> None:
    backend = AiterBackend(Fallback(), library, TUNED)
    with structlog.testing.capture_logs() as logs:
        for spec, dtype in ((KVSpec(2, 24), torch.bfloat16), (KVSpec(2, 32), torch.float8_e4m3fn)):
            run = step(backend, DECODE, KVSpec(2, 32), torch.bfloat16, None)
            cache = backend.kv_cache.allocate(spec, 1, 4, 16, dtype)
            backend.attention.apply(draw(3, 4, spec.head_dim), cache, 0, run.mine, 0.2)
        backend.attention.apply(draw(3, 4, 32), run.found, 0, run.mine, 0.2, softcap=50.0)
    assert fallback_of(backend) == ["attention.apply"] * 3
    assert [line["reason"] for line in logs] == [
        "AITER's attention is for heads of 32 to 256, by 16, not 24",
        "AITER's KV cache has the model's dtype or float8_e4m3fnuz, not float8_e4m3fn",
        "our attention alone bounds scores",
    ]


def test_latent_attention_of_more_heads(backend: AiterBackend) -> None:
    """More than 16 heads fall back, as before 0.1.20; a rank of DeepSeek-V3 on eight GPUs has 16."""
    run = step(backend, MIXED, KVSpec(1, 48, latent_value_dim=32), torch.bfloat16, None)
    backend.latent_attention.apply(draw(24, 17, 48), run.found, 1, run.mine, 0.2, None)
    assert fallback_of(backend) == ["latent_attention.apply"]


def test_packed_formats_of_triton_are_refused(library: AiterLibrary) -> None:
    """AITER and PyTorch refuse these formats; only the Triton back end packs them."""
    backend = AiterBackend(Fallback(), library, TUNED)
    formats = (PackedFormat(torch.int8), PackedFormat(torch.int8, quantizes_rows=True), PackedFormat(backend.fp8))
    with structlog.testing.capture_logs() as logs:
        for packed_format in formats:
            with pytest.raises(ValueError, match="do not pack"):
                backend.linear.pack(draw(48, 64), None, torch.bfloat16, packed_format)
            with pytest.raises(ValueError, match="do not pack"):
                backend.experts.pack(experts(1, 64, 32), 0, None, torch.bfloat16, packed_format)
    assert {line["reason"].partition(", not ")[2] for line in logs} == {
        "weights only in int8",
        "weights and rows in int8",
        "weights only in float8_e4m3fnuz",
    }


def test_aiter_packed_formats(backend: AiterBackend) -> None:
    """The Triton stand-in has no packed formats."""
    assert backend.packed_format("w8a8_fp8", torch.bfloat16) == PackedFormat(backend.fp8, quantizes_rows=True)
    assert backend.packed_format("w8a8_fp8", torch.float32) is None
    for name in ("int8", "fp8", "w8a8_int8"):
        assert backend.packed_format(name, torch.bfloat16) is None


def test_batch_invariance_keeps_only_elementwise_operations(library: AiterLibrary) -> None:
    fallback = Fallback()
    backend = AiterBackend(fallback, library, Settings(TARGETS["gfx950"], batch_invariant=True))
    assert backend.batch_invariant
    x, angles = draw(4, 8, 32), draw(4, 1, 16, dtype=torch.float32)
    backend.elementwise.rope(x, x, angles.cos(), angles.sin())
    backend.elementwise.silu_and_mul(x.flatten(1))
    run = step(backend, DECODE, KVSpec(2, 32), torch.bfloat16, None)
    assert fallback.asked == []
    linear = backend.linear.pack(draw(64, 64), None, torch.bfloat16)
    backend.linear.apply(draw(4, 64), linear)
    backend.attention.apply(draw(3, 4, 32), run.found, 1, run.mine, 0.2)
    backend.elementwise.rms_norm(x, draw(32), 1e-6)
    mixture = backend.experts.pack(experts(2, 64, 32), 0, None, torch.bfloat16)
    backend.experts.apply(draw(1, 64), torch.tensor([[0]]), torch.ones(1, 1), mixture)
    backend.experts.route(draw(1, 8, dtype=torch.float32), Routing(2))
    assert fallback.asked == [
        "linear.pack",
        "linear.apply",
        "attention.apply",
        "elementwise.rms_norm",
        "experts.pack",
        "experts.apply",
        "experts.route",
    ]
    assert not AiterBackend(fallback, library, TUNED).batch_invariant


def test_empty_inputs(backend: AiterBackend) -> None:
    x, weight = draw(0, 32), draw(32)
    assert backend.elementwise.rms_norm(x, weight, 1e-6).shape == (0, 32)
    assert backend.elementwise.silu_and_mul(x).shape == (0, 16)
    assert backend.experts.route(torch.empty(0, 8), Routing(2))[0].shape == (0, 2)


def test_aiter_backend_properties(backend: AiterBackend, library: AiterLibrary) -> None:
    assert (backend.name, backend.description, backend.row_multiple) == ("aiter", "aiter:gfx942", 1)
    assert backend.numerics[:4] == ("aiter", library.version, "gfx942", False)
    assert backend.numerics[-4:] == backend.fallback.numerics
    other = AiterBackend(Fallback(), library, Settings(TARGETS["gfx950"], False))
    assert len({backend.numerics, other.numerics}) == len({backend.layout, other.layout}) == 2
    assert backend.is_fast(torch.bfloat16)
    assert (backend.device, backend.graphs) == (CPU, None)
    assert backend.sampling.fetch(torch.tensor([3, 1]))() == [3, 1]
    for packed in (AiterLinear(draw(2, 2), None), REFERENCE.linear.pack(draw(2, 2), None, torch.float32)):
        backend.adopt(packed)
    with pytest.raises(AiterUnavailableError, match="are for gfx942 and gfx950; this is sm_90"):
        AiterBackend(Fallback(), library, Settings(TARGETS["sm_90"], False))


def test_sampling_is_never_aiters(backend: AiterBackend) -> None:
    zero, whole = np.zeros(1, np.float32), np.zeros(1, np.int64)
    params = SampleParams(temperature=zero, top_k=whole, top_p=zero + 1, min_p=zero)
    ids = backend.sampling.sample(torch.tensor([[0.0, 3.0, 1.0]]), params, whole.astype(np.uint64), whole, whole)
    assert ids.tolist() == [1]
    assert fallback_of(backend) == ["sampling.sample"]
