from __future__ import annotations

import pytest
import torch

from kernels.torch_backend import TorchBackend
from kernels.triton_backend import elementwise

REFERENCE = TorchBackend()
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("inner", [1, 96, 1500])
def test_silu_and_mul(dtype: torch.dtype, rows: int, inner: int) -> None:
    x = torch.randn(rows, 2 * inner, generator=torch.Generator().manual_seed(inner)).to(dtype)
    found, expected = elementwise.silu_and_mul(x), REFERENCE.silu_and_mul(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
