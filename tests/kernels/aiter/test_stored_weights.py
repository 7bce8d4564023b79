"""Checkpoints' weights of 8 bits as AITER multiplies them: what is kept as it is stored, and what is not AITER's."""

from __future__ import annotations

import pytest
import structlog
import torch

from kernels.aiter.backend import AiterBackend
from kernels.aiter.blocks import AiterBlockLinear
from kernels.aiter.experts import AiterExperts
from kernels.aiter.library import AiterLibrary
from kernels.interface import (
    ClampedSwiglu,
    ExpertWeights,
    PackedFormat,
    QuantizedWeight,
)
from kernels.quantized_weight import as_floats
from kernels.triton_backend.target import TARGETS, Settings
from tests.kernels.aiter.watched import NARROW, REFERENCE, TUNED, Fallback, Remembering, draw, fallback_of
from tests.stored_weights import grouped_weight, quantized_weight

pytestmark = pytest.mark.each_value


def stored(rows: int, columns: int, scheme: str = "deepseek", seed: int = 0) -> tuple[QuantizedWeight, torch.Tensor]:
    """A weight as a checkpoint stores it, and its dequantized values; its blocks have very different sizes."""
    sizes = draw(-(-rows // 128), -(-columns // 128), dtype=torch.float32, seed=99).exp()
    blocks = sizes.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return quantized_weight(scheme, draw(rows, columns, seed=seed) * columns**-0.5 * blocks)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
@pytest.mark.parametrize("dtype", NARROW)
def test_block_scaled_linear_equals_reference(library: AiterLibrary, target: str, dtype: torch.dtype) -> None:
    backend = AiterBackend(Fallback(), library, Settings(TARGETS[target], False))
    weight, worth = stored(192, 256)
    x, bias = draw(5, 256, dtype=dtype), draw(192)
    packed = backend.linear.pack(weight, bias, dtype)
    assert isinstance(packed, AiterBlockLinear)
    assert packed.weight.dtype == backend.fp8
    found = backend.linear.apply(x, packed)
    assert found.dtype == dtype
    assert distance(found, torch.nn.functional.linear(x.float(), worth, bias.to(dtype).float())) < 0.05
    assert backend.linear.apply(x[:0], packed).shape == (0, 192)
    assert backend.linear.argmax(x, packed, 50).tolist() == found[:, :50].argmax(1).tolist()
    assert fallback_of(backend) == ["sampling.argmax"]
    backend.adopt(packed)


def test_rows_have_a_scale_for_each_group(library: AiterLibrary) -> None:
    """With one scale for a row, a group beside one 100,000 times as large would vanish."""
    backend = AiterBackend(Fallback(), library, TUNED)
    worth = draw(64, 256)
    worth[:, 128:] = 0
    weight, exact = quantized_weight("deepseek", worth)
    x = draw(5, 256)
    x[:, :128] *= 0.01
    x[:, 128:] *= 1000
    found = backend.linear.apply(x, backend.linear.pack(weight, None, torch.bfloat16))
    assert distance(found, x.float() @ exact.t()) < 0.05


def test_stored_numbers_are_kept(library: AiterLibrary) -> None:
    """Stored numbers are equal to the bit, in the FP8 of either architecture."""
    weight, worth = stored(144, 256)
    for target in ("gfx942", "gfx950"):
        packed = AiterBackend(Fallback(), library, Settings(TARGETS[target], False)).linear.pack(
            weight, None, torch.bfloat16
        )
        scales = packed.scale.repeat_interleave(128, 0)[:144].repeat_interleave(128, 1)
        assert torch.equal(packed.weight.float() * scales, worth)


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_experts_stored_by_blocks(library: AiterLibrary, target: str, expert_parallel: bool) -> None:
    backend = AiterBackend(Fallback(), library, Settings(TARGETS[target], False), expert_parallel)
    pairs = [(stored(256, 256, seed=i), stored(256, 128, seed=10 + i)) for i in range(3)]
    first, x = 1, draw(6, 256)
    ids = torch.stack([torch.randperm(3, generator=torch.Generator().manual_seed(i))[:2] for i in range(6)]) + first
    if expert_parallel:
        ids[0, 0], ids[1, 1] = 0, 4
    weights = draw(6, 2, dtype=torch.float32).abs()
    mine = [ExpertWeights(gate_up[0], down[0]) for gate_up, down in pairs]
    packed = backend.experts.pack(iter(mine), first, None, torch.bfloat16)
    assert isinstance(packed, AiterExperts)
    assert packed.gate_up.dtype == packed.down.dtype == backend.fp8
    floats = [ExpertWeights(gate_up[1], down[1]) for gate_up, down in pairs]
    expected = REFERENCE.experts.apply(x, ids, weights, REFERENCE.experts.pack(floats, first, None, torch.bfloat16))
    assert distance(backend.experts.apply(x, ids, weights, packed), expected) < 0.06
    assert fallback_of(backend) == []


@pytest.mark.parametrize(
    ("scheme", "rows", "columns", "dtype", "reason"),
    [
        ("deepseek", 192, 256, torch.float32, "for bfloat16 and float16, not float32"),
        ("deepseek", 72, 256, torch.bfloat16, "multiples of 16 x 128, not 72 x 256"),
        ("deepseek", 64, 192, torch.bfloat16, "multiples of 16 x 128, not 64 x 192"),
        ("compressed-tensors-fp8-channel", 64, 128, torch.bfloat16, "not float8_e4m3fn per_token"),
        ("compressed-tensors-fp8-group", 64, 128, torch.bfloat16, "not float8_e4m3fn per_1x128"),
        ("compressed-tensors-int8-channel", 64, 128, torch.bfloat16, "not int8 per_token"),
        ("compressed-tensors-mxfp4", 64, 128, torch.bfloat16, "rounds the inputs of MXFP4 products too"),
    ],
)
def test_unsupported_stored_weights_use_fallback(
    library: AiterLibrary, scheme: str, rows: int, columns: int, dtype: torch.dtype, reason: str
) -> None:
    backend = AiterBackend(Fallback(), library, TUNED)
    weight, worth = stored(rows, columns, scheme)
    x = draw(3, columns, dtype=dtype)
    with structlog.testing.capture_logs() as logs:
        found = backend.linear.apply(x, backend.linear.pack(weight, None, dtype))
    assert distance(found, x.float() @ worth.t()) < 0.02
    assert [line["operation"] for line in logs] == ["block_linear"]
    assert reason in logs[0]["reason"]
    assert fallback_of(backend) == ["linear.pack", "linear.apply"]


@pytest.mark.parametrize(
    ("scheme", "hidden", "inner", "dtype", "clamp", "reason"),
    [
        ("deepseek", 128, 128, torch.float16, None, "for bfloat16, not float16"),
        ("deepseek", 128, 64, torch.bfloat16, None, "sizes by 128, not 128 and 64"),
        ("deepseek", 192, 128, torch.bfloat16, None, "sizes by 128, not 192 and 128"),
        ("deepseek", 128, 128, torch.bfloat16, ClampedSwiglu(1.7, 7.0), "silu without biases"),
        ("compressed-tensors-mxfp4", 128, 128, torch.bfloat16, None, "inputs of MXFP4 products too"),
    ],
)
def test_unsupported_stored_experts_use_fallback(
    library: AiterLibrary,
    scheme: str,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    clamp: ClampedSwiglu | None,
    reason: str,
) -> None:
    backend = AiterBackend(Fallback(), library, TUNED)
    expert = ExpertWeights(stored(2 * inner, hidden, scheme)[0], stored(hidden, inner, scheme)[0])
    with structlog.testing.capture_logs() as logs:
        packed = backend.experts.pack([expert], 0, clamp, dtype)
        backend.experts.apply(
            draw(2, hidden, dtype=dtype), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), packed
        )
    assert [line["operation"] for line in logs] == ["block_moe"]
    assert reason in logs[0]["reason"]
    assert fallback_of(backend) == ["experts.pack", "experts.apply"]


def test_unsupported_stored_weights_are_dequantized(library: AiterLibrary) -> None:
    """One of two is a rank's part that cuts blocks (Qwen3-235B-A3B on eight), or they are packed in another format."""
    (gate_up, worth), (down, down_worth) = stored(256, 128), stored(128, 128)
    int8 = PackedFormat(torch.int8)
    cases: list[tuple[ExpertWeights, PackedFormat | None, str]] = [
        (ExpertWeights(gate_up, down_worth), None, "the parts of ranks cut blocks"),
        (ExpertWeights(worth, down), None, "the parts of ranks cut blocks"),
        (ExpertWeights(gate_up, down), int8, "not packed in another format"),
    ]
    for expert, packed_format, reason in cases:
        fallback = Remembering()
        backend = AiterBackend(fallback, library, TUNED)
        with structlog.testing.capture_logs() as logs:
            backend.experts.pack([expert], 0, None, torch.bfloat16, packed_format)
        assert [(line["operation"], reason in line["reason"]) for line in logs] == [("block_moe", True)]
        assert fallback.formats == [packed_format]
    backend = AiterBackend(Remembering(), library, TUNED)
    with structlog.testing.capture_logs() as logs:
        backend.linear.pack(gate_up, None, torch.bfloat16, int8)
    assert [line["operation"] for line in logs] == ["block_linear"]
    assert "not packed in another format" in logs[0]["reason"]


@pytest.mark.parametrize("which", ["gate_up", "down", "both"])
def test_weights_in_codes_use_fallback(library: AiterLibrary, which: str) -> None:
    """Also where only some weights of the experts are in codes."""
    backend = AiterBackend(Fallback(), library, TUNED)
    codes = grouped_weight(256, 128, 4, 128, torch.float16, True, False, False)
    down = grouped_weight(128, 128, 4, 128, torch.float16, True, False, False)
    expert = ExpertWeights(
        as_floats(codes) if which == "down" else codes, as_floats(down) if which == "gate_up" else down
    )
    backend.linear.apply(draw(2, 128), backend.linear.pack(codes, None, torch.bfloat16))
    packed = backend.experts.pack([expert], 0, None, torch.bfloat16)
    backend.experts.apply(draw(2, 128), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), packed)
    assert fallback_of(backend) == ["linear.pack", "linear.apply", "experts.pack", "experts.apply"]


def test_stored_weights_with_batch_invariance(library: AiterLibrary) -> None:
    """Or packed as something else: the other back end's."""
    fallback = Fallback()
    backend = AiterBackend(fallback, library, Settings(TARGETS["gfx950"], batch_invariant=True))
    weight, _ = stored(128, 128)
    backend.linear.pack(weight, None, torch.bfloat16)
    backend.experts.pack([ExpertWeights(stored(256, 128)[0], stored(128, 128)[0])], 0, None, torch.bfloat16)
    assert fallback.asked == ["linear.pack", "experts.pack"]
    with pytest.raises(ValueError, match="do not pack"):
        AiterBackend(fallback, library, TUNED).linear.pack(weight, None, torch.bfloat16, PackedFormat(torch.int8))
