"""Native norms, rotation, activation: rows alone, on every instruction set; where PyTorch is exact, its bits."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL

import pytest
import torch

from kernels.cpu import elementwise
from kernels.torch_backend.backend import TorchBackend

pytestmark = pytest.mark.each_value

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
UNIT = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7}


def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * 3).to(dtype)


def close(actual: torch.Tensor, exact: torch.Tensor, units: float) -> None:
    tolerance = units * UNIT[actual.dtype]
    torch.testing.assert_close(actual.double(), exact, rtol=tolerance, atol=tolerance)


@DTYPES
@pytest.mark.parametrize("width", [1, 7, 48, 100, 1024])
def test_norms(each_isa: CDLL, dtype: torch.dtype, width: int) -> None:
    x, residual, weight, bias = (drawn(*shape, dtype=dtype) for shape in ((9, width), (9, width), (width,), (width,)))
    total = x + residual
    for rows, added in ((x, None), (total, residual)):
        wide = rows.double()
        out, normed = elementwise.norm(each_isa, x, weight, 1e-5, residual=added)
        assert torch.equal(normed, rows)
        close(out, wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double(), 6)
    wide = x.double() - x.double().mean(-1, keepdim=True)
    scaled = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    close(elementwise.norm(each_isa, x, weight, 1e-5, bias)[0], scaled * weight.double() + bias.double(), 20)


def test_sums_are_rounded_as_pytorch_rounds(each_isa: CDLL) -> None:
    """Sums of every bfloat16, denormals, infinities and NaN included, and another one."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).view(256, 256)
    residual = x.flatten()[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))].view_as(x)
    total = elementwise.norm(each_isa, x, torch.ones(256, dtype=x.dtype), 1e-5, residual=residual)[1]
    expected = x + residual
    numbers = ~expected.isnan()
    assert torch.equal(~total.isnan(), numbers)
    assert torch.equal(total[numbers].view(torch.int16), expected[numbers].view(torch.int16))


@DTYPES
@pytest.mark.parametrize("inner", [1, 5, 40, 640])
def test_silu_and_mul(each_isa: CDLL, dtype: torch.dtype, inner: int) -> None:
    x = drawn(7, 2 * inner, dtype=dtype) * 4
    gate, up = x.double().chunk(2, -1)
    close(elementwise.silu_and_mul(each_isa, x), gate / (1 + torch.exp(-gate)) * up, 4)


@DTYPES
@pytest.mark.parametrize("inner", [1, 5, 40, 640])
def test_gelu_and_mul(each_isa: CDLL, dtype: torch.dtype, inner: int) -> None:
    x = drawn(7, 2 * inner, dtype=dtype) * 4
    gate, up = x.double().chunk(2, -1)
    close(elementwise.silu_and_mul(each_isa, x, gelu=True), torch.nn.functional.gelu(gate, approximate="tanh") * up, 4)


@pytest.mark.parametrize("width", [1, 5, 40, 640])
def test_softcap(each_isa: CDLL, width: int) -> None:
    x = drawn(7, width + 3, dtype=torch.float32)[:, :width] * 20
    x[0, 0], x[1, 0] = torch.inf, -torch.inf
    close(elementwise.softcap(each_isa, x, 30.0), 30 * torch.tanh(x.double() / 30), 60)


def test_silu_of_extreme_inputs(each_isa: CDLL) -> None:
    gate = torch.tensor([[-1e30, -200.0, -88.5, -0.0, 0.0, 88.5, 200.0, 1e30, torch.nan]])
    out = elementwise.silu_and_mul(each_isa, torch.cat((gate, torch.ones_like(gate)), 1))[0]
    assert out[:3].abs().max() < 1e-6 * 1e30 * 1e-24
    assert out[3:8].tolist() == gate[0, 3:8].tolist()
    assert out[8].isnan()


@DTYPES
@pytest.mark.parametrize(("dim", "half"), [(8, 4), (24, 12), (64, 32), (96, 20), (104, 48), (5, 1)])
def test_rope_bits_equal_pytorch(each_isa: CDLL, dtype: torch.dtype, dim: int, half: int) -> None:
    qkv, angles = drawn(6, 7, dim, dtype=dtype), drawn(6, 1, half, dtype=torch.float32)
    q, k, _ = qkv.split_with_sizes([4, 2, 1], 1)
    cos, sin = angles.cos(), angles.sin()
    for x, expected in zip((q, k), TorchBackend().elementwise.rope(q, k, cos, sin), strict=True):
        assert torch.equal(elementwise.rope(each_isa, x, cos, sin), expected)


def operations(dtype: torch.dtype) -> dict[str, Callable[[CDLL, torch.Tensor], torch.Tensor]]:
    """Each a function of the rows of x [T, 96]."""
    weight, bias = drawn(96, dtype=dtype), drawn(96, dtype=dtype)
    angles = drawn(1, 1, 12, dtype=torch.float32)

    def turned(native: CDLL, x: torch.Tensor) -> torch.Tensor:
        cos, sin = (f(angles).expand(len(x), 1, 12) for f in (torch.cos, torch.sin))
        return elementwise.rope(native, x.view(len(x), 4, 24), cos, sin).flatten(1)

    return {
        "rms_norm": lambda native, x: elementwise.norm(native, x, weight, 1e-6)[0],
        "add_rms_norm": lambda native, x: torch.cat(elementwise.norm(native, x, weight, 1e-6, residual=x.flip(1))),
        "head norm": lambda native, x: elementwise.norm(native, x.view(-1, 4, 24), weight[:24], 1e-6)[0].flatten(1),
        "layer_norm": lambda native, x: elementwise.norm(native, x, weight, 1e-6, bias)[0],
        "silu_and_mul": elementwise.silu_and_mul,
        "gelu_and_mul": lambda native, x: elementwise.silu_and_mul(native, x, gelu=True),
        "softcap": lambda native, x: elementwise.softcap(native, x.float(), 4.0),
        "rope": turned,
    }


@DTYPES
@pytest.mark.parametrize("name", list(operations(torch.float32)))
def test_rows_and_threads_do_not_change_bits(threads: CDLL, dtype: torch.dtype, name: str) -> None:
    operation = operations(dtype)[name]
    x = drawn(500, 96, dtype=dtype)
    whole = operation(threads, x)
    alone = [operation(threads, row[None]) for row in x[:20]]
    for i, row in enumerate(alone):
        assert torch.equal(row, whole[i :: len(x)]), i
    for count in (2, 3):
        threads.fissile_set_threads(count)
        assert torch.equal(operation(threads, x), whole)


@DTYPES
def test_rows_of_views(native: CDLL, dtype: torch.dtype) -> None:
    wide = drawn(5, 6, 40, dtype=dtype)
    weight = drawn(24, dtype=dtype)
    for view in (wide[:, 1:4, 3:27], wide[:, ::2, 8:32], wide.transpose(1, 2)[:, :, :24].transpose(1, 2)[..., :24]):
        expected = elementwise.norm(native, view.contiguous(), weight, 1e-6)[0]
        assert torch.equal(elementwise.norm(native, view, weight, 1e-6)[0], expected)
    flat = wide.flatten(1)[:, 10:70]
    assert torch.equal(elementwise.silu_and_mul(native, flat), elementwise.silu_and_mul(native, flat.contiguous()))
