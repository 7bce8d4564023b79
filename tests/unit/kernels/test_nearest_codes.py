"""Rounding to codes of 4 bits: the same on every processor, and however many numbers are rounded at once."""

from __future__ import annotations

import pytest
import torch

from kernels import grouped_weight
from kernels.grouped_weight import nearest_codes

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def divide_as_a_gpu(dividend: torch.Tensor, divisor: torch.Tensor | float) -> torch.Tensor:
    """Divides by a number of the host as PyTorch does on a GPU: by its reciprocal, in the tensor's dtype."""
    if isinstance(divisor, torch.Tensor):
        return torch.div(dividend, divisor)
    return dividend * torch.tensor(divisor, dtype=dividend.dtype).reciprocal()


def drawn(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(300, 1000, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_chooses_what_a_cpu_chooses(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = drawn(dtype)
    expected = nearest_codes(weight)
    monkeypatch.setattr(torch.Tensor, "__truediv__", divide_as_a_gpu)
    made = nearest_codes(weight)
    assert torch.equal(made.codes, expected.codes)
    assert torch.equal(made.scales, expected.scales)


@pytest.mark.parametrize("numbers", [1, 7000, 1 << 24])
def test_codes_do_not_depend_on_how_many_are_rounded_at_once(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = drawn(torch.float32)
    expected = nearest_codes(weight)
    monkeypatch.setattr(grouped_weight, "_CPU_PIECE", numbers)
    made = nearest_codes(weight)
    assert torch.equal(made.codes, expected.codes)
    assert torch.equal(made.scales, expected.scales)
