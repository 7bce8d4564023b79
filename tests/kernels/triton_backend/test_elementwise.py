"""Norms, rope and activation in the interpreter against PyTorch's, and to the bit against themselves."""

from __future__ import annotations

import pytest
import torch

from kernels.torch_backend.backend import TorchBackend
from kernels.triton_backend import elementwise

pytestmark = pytest.mark.each_value

REFERENCE = TorchBackend()
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EPS = 1e-5
# Rows, heads and further dimensions; heads are slices of wider rows.
SHAPES = [(0, 96), (1, 1), (5, 96), (3, 1500), (0, 4, 8), (5, 3, 64), (2, 7, 33), (2, 2, 3, 16)]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sliced(x: torch.Tensor) -> torch.Tensor:
    """The same numbers as a part of wider rows, as q, k and v are of one projection's."""
    wide = torch.cat((torch.full_like(x, torch.nan), x, torch.full_like(x, torch.nan)), dim=1)
    return wide[:, x.shape[1] : 2 * x.shape[1]]


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[found.dtype], atol=TOLERANCE[found.dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("inner", [1, 96, 1500])
def test_silu_and_mul(dtype: torch.dtype, rows: int, inner: int) -> None:
    x = torch.randn(rows, 2 * inner, generator=torch.Generator().manual_seed(inner)).to(dtype)
    assert_near(elementwise.silu_and_mul(x), REFERENCE.elementwise.silu_and_mul(x))
    assert_near(elementwise.silu_and_mul(x, gelu=True), REFERENCE.elementwise.gelu_and_mul(x))


@pytest.mark.parametrize("width", [1, 96, 1500])
def test_softcap(width: int) -> None:
    x = 10 * torch.randn(5, width + 2, generator=torch.Generator().manual_seed(width))[:, :width]
    assert_near(elementwise.softcap(x, 8.0), REFERENCE.elementwise.softcap(x, 8.0))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)
    expected = REFERENCE.elementwise.rms_norm(x, weight, EPS)
    assert_near(elementwise.rms_norm(x, weight, EPS), expected)
    if len(shape) == 3:
        assert_near(elementwise.rms_norm(sliced(x), weight, EPS), expected)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, residual = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    weight = random(shape[-1], dtype=dtype, seed=2)
    normed, total = elementwise.add_rms_norm(x, sliced(residual), weight, EPS)
    expected_norm, expected_total = REFERENCE.elementwise.add_rms_norm(x, residual, weight, EPS)
    assert_near(total, expected_total)
    assert_near(normed, expected_norm)


def test_residual_sum_is_rounded_before_norm() -> None:
    x, residual = torch.full((1, 8), 2048.0).half(), torch.ones(1, 8).half()
    _, total = elementwise.add_rms_norm(x, residual, torch.ones(8).half(), EPS)
    assert torch.equal(total, x)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", SHAPES)
def test_layer_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = 3.0 + random(*shape, dtype=dtype)
    weight, bias = random(shape[-1], dtype=dtype, seed=1), random(shape[-1], dtype=dtype, seed=2)
    expected = REFERENCE.elementwise.layer_norm(x, weight, bias, EPS)
    assert_near(elementwise.layer_norm(x, weight, bias, EPS), expected)


def angles(rows: int, rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = random(rows, 1, rotary_dim // 2, seed=3) * 3.0
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize(
    ("q_heads", "k_heads", "head_dim", "rotary_dim"), [(4, 2, 16, 16), (3, 1, 24, 24), (20, 3, 80, 32), (1, 5, 7, 2)]
)
def test_rope(dtype: torch.dtype, rows: int, q_heads: int, k_heads: int, head_dim: int, rotary_dim: int) -> None:
    q, k = random(rows, q_heads, head_dim, dtype=dtype), random(rows, k_heads, head_dim, dtype=dtype, seed=1)
    cos, sin = angles(rows, rotary_dim)
    expected_q, expected_k = REFERENCE.elementwise.rope(q, k, cos, sin)
    found_q, found_k = elementwise.rope(sliced(q), sliced(k), cos, sin)
    assert_near(found_q, expected_q)
    assert_near(found_k, expected_k)


def test_row_is_independent_of_other_rows() -> None:
    """A row has equal bits alone and among others, for tiles of one row and of many."""
    for shape in [(9, 1500), (9, 3, 16)]:
        x, weight = random(*shape), random(shape[-1], seed=1)
        shuffled = x.flip(0)
        cos, sin = angles(9, 8)
        whole = elementwise.add_rms_norm(shuffled, shuffled, weight, EPS)[0]
        centred = elementwise.layer_norm(shuffled, weight, weight, EPS)
        for row in range(9):
            alone = x[row : row + 1]
            assert torch.equal(elementwise.rms_norm(alone + alone, weight, EPS)[0], whole[8 - row])
            assert torch.equal(elementwise.layer_norm(alone, weight, weight, EPS)[0], centred[8 - row])
        if len(shape) == 3:
            rotated = elementwise.rope(x, x, cos, sin)[0]
            found = elementwise.rope(x[4:5], x[4:5], cos[4:5], sin[4:5])
            assert torch.equal(found[0][0], rotated[4])
            assert torch.equal(found[1][0], rotated[4])
