"""Weights as checkpoints store them, on back ends without such products: as dequantized floats."""

from __future__ import annotations

import pytest
import torch

from kernels.interface import ExpertWeights, KernelBackend
from kernels.quantized_weight import as_floats, with_row_scales
from tests.quantizers import SCHEMES
from tests.stored_weights import quantized_weight

pytestmark = pytest.mark.each_value


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]))


@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_stored_numbers_dequantize_exactly(scheme: str) -> None:
    stored, worth = quantized_weight(scheme, drawn(150, 288))
    assert stored.shape == (150, 288)
    assert torch.equal(as_floats(stored), worth)
    by_rows = with_row_scales(stored)
    assert len(by_rows.scales) == 150
    assert torch.equal(as_floats(by_rows), worth)


def test_floats_are_unchanged() -> None:
    weight = drawn(3, 4).half()
    assert as_floats(weight) is weight


@pytest.mark.parametrize("scheme", ["deepseek", "quark-mxfp4", "w8a8-int8"])
def test_products_of_stored_weights_equal_dequantized(backend: KernelBackend, scheme: str) -> None:
    """Equal to the bit: they are rounded as the loader rounds them."""
    stored, worth = quantized_weight(scheme, drawn(150, 160))
    assert not backend.keeps_quantized(stored.format, torch.float32)
    x, bias = drawn(5, 160).bfloat16(), drawn(150, 1).flatten()
    packed = [backend.linear.pack(weight, bias, torch.bfloat16) for weight in (stored, worth)]
    assert torch.equal(backend.linear.apply(x, packed[0]), backend.linear.apply(x, packed[1]))
    down, down_worth = quantized_weight(scheme, drawn(160, 96))
    gate_up, gate_up_worth = quantized_weight(scheme, drawn(192, 160))
    ids, shares = torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1)
    outs = [
        backend.experts.apply(x, ids, shares, backend.experts.pack([ExpertWeights(*each)], 0, None, torch.bfloat16))
        for each in ((gate_up, down), (gate_up_worth, down_worth))
    ]
    assert torch.equal(*outs)
