"""Native experts: with any number of threads and on every instruction set the same as their parts."""

from __future__ import annotations

from ctypes import CDLL

import pytest
import torch

from kernels.cpu import elementwise, experts, linear
from tests.unit.kernels.test_experts import CLAMP, EXPERTS, step
from tests.unit.kernels.test_experts import experts as drawn


@pytest.mark.parametrize("packed_dtype", [None, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_equal_sum_of_products(each_isa: CDLL, dtype: torch.dtype, packed_dtype: torch.dtype | None) -> None:
    """Products, activation and sum equal the single kernels' to the bit."""
    made = drawn(dtype, bias=True)
    x, ids, weights = step(20, seed=4, dtype=dtype)
    ids[3] = torch.tensor([EXPERTS, -1, 2])
    out = experts.moe(each_isa, x, ids, weights, experts.pack(each_isa, made, 0, None, dtype, packed_dtype))
    for row in range(len(x)):
        total = torch.zeros(x.shape[1])
        for expert, weight in zip(ids[row].tolist(), weights[row], strict=True):
            if not 0 <= expert < EXPERTS:
                continue
            one = made[expert]
            gate_up = linear.pack(each_isa, one.gate_up, one.gate_up_bias, dtype, packed_dtype)
            down = linear.pack(each_isa, one.down, one.down_bias, dtype, packed_dtype)
            inner = elementwise.silu_and_mul(each_isa, linear.linear(each_isa, x[row : row + 1], gate_up))
            total += linear.linear(each_isa, inner, down)[0].float() * weight
        assert torch.equal(out[row], total.to(dtype)), row


@pytest.mark.parametrize("clamp", [None, CLAMP])
def test_threads_do_not_change_bits(threads: CDLL, clamp: object) -> None:
    packed = experts.pack(threads, drawn(bias=True), 0, CLAMP if clamp else None, torch.float32)
    x, ids, weights = step(200, seed=6)
    outs = []
    for count in (1, 2, 3):
        threads.fissile_set_threads(count)
        outs.append(experts.moe(threads, x, ids, weights, packed))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
