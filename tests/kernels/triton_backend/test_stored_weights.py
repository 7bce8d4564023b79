"""Weights packed as checkpoints store them: products and experts equal those of the dequantized weights."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kernels.interface import ClampedSwiglu, ExpertWeights, PackedFormat, QuantizedFormat
from kernels.quantized_weight import as_floats
from kernels.triton_backend import experts, packed_weight
from kernels.triton_backend.backend import TritonBackend
from kernels.triton_backend.target import INTERPRETER, TARGETS, Settings
from tests.kernels.row_alone import multiply_rows_alone
from tests.kernels.triton_backend.targets import backend_for
from tests.quantizers import SCHEMES
from tests.stored_weights import quantized_weight
from tests.unit.kernels.moe_reference import reference_moe

pytestmark = pytest.mark.each_value

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
HIDDEN, INNER, EXPERTS = 160, 96, 4
KEPT = [name for name, scheme in SCHEMES.items() if scheme.number != "fnuz"]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / math.sqrt(shape[-1])


def backend_of(fp8: torch.dtype, batch_invariant: bool = True) -> TritonBackend:
    return backend_for(replace(TARGETS[INTERPRETER], fp8=fp8), batch_invariant)


@pytest.mark.parametrize(("scheme", "fp8"), [(scheme, FN) for scheme in KEPT] + [("deepseek", FNUZ)])
def test_stored_linear_weight_is_packed_unchanged(scheme: str, fp8: torch.dtype) -> None:
    backend = backend_of(fp8)
    stored, worth = quantized_weight(scheme, drawn(140, 160))
    assert backend.keeps_quantized(stored.format, torch.bfloat16)
    bias, x = drawn(140, 1).flatten(), drawn(3, 160, seed=1)
    packed = backend.linear.pack(stored, bias, torch.float32)
    assert packed.numbers.dtype == (fp8 if stored.numbers.dtype == FN else stored.numbers.dtype)
    expected = x.double() @ worth.double().t() + bias.double()
    torch.testing.assert_close(backend.linear.apply(x, packed).double(), expected, atol=2e-5, rtol=2e-5)


def test_unsupported_stored_format_is_dequantized() -> None:
    """FP8 of which the target has not all numbers, or none; and where other numbers are asked for."""
    stored, worth = quantized_weight("quark-fp8-fnuz", drawn(40, 130))
    ours = backend_of(FN)
    assert not ours.keeps_quantized(stored.format, torch.float32)
    assert backend_of(FNUZ).keeps_quantized(stored.format, torch.float32)
    packed = ours.linear.pack(stored, None, torch.float32)
    assert torch.equal(packed.numbers, worth)
    as_int8 = ours.linear.pack(stored, None, torch.float32, PackedFormat(torch.int8))
    assert torch.equal(as_int8.numbers, ours.linear.pack(worth, None, torch.float32, PackedFormat(torch.int8)).numbers)
    assert not ours.keeps_quantized(QuantizedFormat(FN, "per_token"), torch.float64)
    old = replace(TARGETS[INTERPRETER], has_fp8=False)
    assert not packed_weight.keeps(QuantizedFormat(FN, "per_128x128"), torch.bfloat16, old)
    assert packed_weight.keeps(QuantizedFormat(torch.int8, "per_128x128"), torch.bfloat16, old)
    assert backend_for(old).packed_format("fp8", torch.float32) is None


def stored_experts(scheme: str, bias: bool, inner: int = INNER) -> tuple[list[ExpertWeights], list[ExpertWeights]]:
    """Experts as stored, and their dequantized floats."""
    stored, floats = [], []
    for seed in range(EXPERTS):
        gate_up, gate_up_worth = quantized_weight(scheme, drawn(2 * inner, HIDDEN, seed=seed))
        down, down_worth = quantized_weight(scheme, drawn(HIDDEN, inner, seed=seed + 100))
        biases = (drawn(2 * inner, 1, seed=seed).flatten(), drawn(HIDDEN, 1, seed=seed).flatten()) if bias else ()
        stored.append(ExpertWeights(gate_up, down, *biases))
        floats.append(ExpertWeights(gate_up_worth, down_worth, *biases))
    return stored, floats


@pytest.mark.parametrize(
    ("scheme", "clamp", "fp8"),
    [
        ("deepseek", None, FN),
        ("deepseek", ClampedSwiglu(1.7, 1.5), FNUZ),
        ("fp8-per-tensor", None, FN),
        ("compressed-tensors-fp8-group", None, FN),
        ("compressed-tensors-int8-channel", None, FN),
        ("quark-mxfp4", None, FN),
        ("quark-mxfp4", ClampedSwiglu(1.7, 1.5), FN),
    ],
)
def test_stored_experts_are_packed_unchanged(scheme: str, clamp: ClampedSwiglu | None, fp8: torch.dtype) -> None:
    stored, floats = stored_experts(scheme, bias=clamp is not None)
    x, shares = drawn(5, HIDDEN, seed=7), torch.rand(5, 2)
    ids = torch.tensor([[0, 1], [2, 0], [1, 3], [3, 2], [0, 3]])
    expected = reference_moe(x, ids, shares, floats, clamp)
    backend = backend_of(fp8)
    packed = backend.experts.pack(iter(stored), 0, clamp, torch.float32)
    assert packed.gate_up is not None
    assert packed.down is not None
    assert packed.gate_up.numbers.element_size() == packed.down.numbers.element_size() == 1
    torch.testing.assert_close(backend.experts.apply(x, ids, shares, packed).double(), expected, atol=2e-5, rtol=2e-5)
    if clamp is None:
        tuned = Settings(backend.settings.target, batch_invariant=False)
        torch.testing.assert_close(experts.moe(x, ids, shares, packed, tuned).double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("scheme", ["deepseek", "quark-mxfp4"])
def test_row_bits_are_independent_of_other_rows(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    multiply_rows_alone(monkeypatch)
    backend = backend_of(FN)
    experts_packed = backend.experts.pack(stored_experts(scheme, bias=False)[0], 0, None, torch.float32)
    linear_packed = backend.linear.pack(quantized_weight(scheme, drawn(40, HIDDEN))[0], None, torch.float32)
    x, ids, shares = drawn(20, HIDDEN, seed=7), torch.arange(20)[:, None] % EXPERTS, torch.ones(20, 1)
    rows = torch.tensor([17, 3, 4])
    whole = backend.experts.apply(x, ids, shares, experts_packed)
    assert torch.equal(backend.experts.apply(x[rows], ids[rows], shares[rows], experts_packed), whole[rows])
    assert torch.equal(backend.linear.apply(x[rows], linear_packed), backend.linear.apply(x, linear_packed)[rows])


def test_blocks_of_experts_stay_blocks() -> None:
    """Blocks with either gates or ups only: 256 units have two blocks of each, alternating like their rows."""
    stored, floats = stored_experts("deepseek", bias=False, inner=256)
    packed = backend_of(FN).experts.pack(stored[:2], 0, None, torch.float32)
    assert packed.gate_up is not None
    assert packed.down is not None
    assert packed.gate_up.scales is not None
    assert packed.down.scales is not None
    assert packed.gate_up.scales.shape == (2, 2, 4)
    assert packed.down.scales.shape == (2, 2, 2)
    x, ids, shares = drawn(2, HIDDEN, seed=7), torch.tensor([[0, 1], [1, 0]]), torch.rand(2, 2)
    expected = reference_moe(x, ids, shares, floats, None)
    found = backend_of(FN).experts.apply(x, ids, shares, packed)
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("which", ["gate_up", "down"])
@pytest.mark.parametrize("scheme", ["deepseek", "quark-mxfp4"])
def test_one_expert_weight_may_be_dequantized(scheme: str, which: str) -> None:
    """A rank's part of the other weight cuts groups."""
    stored, floats = stored_experts(scheme, bias=False)
    mixed = [
        replace(one, **{which: as_floats(getattr(other, which))}) for one, other in zip(stored, floats, strict=True)
    ]
    x, shares, ids = drawn(3, HIDDEN, seed=7), torch.rand(3, 2), torch.tensor([[0, 1], [2, 0], [1, 3]])
    packed = backend_of(FN).experts.pack(mixed, 0, None, torch.float32)
    assert packed.gate_up is not None
    assert packed.down is not None
    assert {packed.gate_up.numbers.element_size(), packed.down.numbers.element_size()} == {1, 4}
    expected = reference_moe(x, ids, shares, floats, None)
    torch.testing.assert_close(
        backend_of(FN).experts.apply(x, ids, shares, packed).double(), expected, atol=2e-5, rtol=2e-5
    )


def test_unsupported_stored_experts_are_dequantized() -> None:
    stored, floats = stored_experts("quark-fp8-fnuz", bias=False)
    packed, expected = (backend_of(FN).experts.pack(each, 0, None, torch.float32) for each in (stored, floats))
    for found, wanted in ((packed.gate_up, expected.gate_up), (packed.down, expected.down)):
        assert found is not None
        assert wanted is not None
        assert torch.equal(found.numbers, wanted.numbers)
