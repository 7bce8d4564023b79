"""The Triton back end as a whole: what it packs weights as, and operations that only it puts together."""

from __future__ import annotations

import pytest
import torch

from kernels.select import select_backend
from kernels.triton_backend import elementwise
from kernels.triton_backend.backend import TritonBackend
from kernels.triton_backend.launch import launch
from worker.dtype import resolve_packed_dtype
from worker.model_config import ModelError


@pytest.mark.parametrize(("name", "tolerance"), [("int8", 0.02), ("fp8", 0.06)])
def test_weights_in_8_bits(name: str, tolerance: float) -> None:
    backend = select_backend("triton")
    assert isinstance(backend, TritonBackend)
    packed_dtype = resolve_packed_dtype(name, torch.float32, backend)
    assert packed_dtype == {"int8": torch.int8, "fp8": backend.settings.target.fp8}[name]
    x, weight = (torch.randn(n, 200, generator=torch.Generator().manual_seed(n)) for n in (3, 50))
    found = backend.linear(x, backend.pack_linear(weight, None, torch.float32, packed_dtype))
    expected = x @ weight.t()
    error = (found - expected).norm() / expected.norm()
    assert 0.001 < error < tolerance


def test_what_cpus_do_not_pack_is_refused() -> None:
    with pytest.raises(ModelError, match="quantize 'fp8' needs kernels of a GPU; here are kernels 'torch' and dtype"):
        resolve_packed_dtype("fp8", torch.float32, select_backend("torch"))


def test_tokens_come_to_the_host_in_order() -> None:
    backend = TritonBackend()
    logits = torch.tensor([[0.0, 3.0, 3.0, 9.0], [float("nan"), 1.0, 0.0, 0.0]])
    ids = backend.argmax(logits, 3)
    assert backend.fetch(ids)() == [1, 1]


def test_a_zero_keeps_its_sign_through_the_interpreter() -> None:
    """What an output held before the kernel, here a zero of the other sign, does not show."""
    x, out = torch.tensor([[-0.0, 1.0]], dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.bfloat16)
    launch(elementwise._silu_and_mul_kernel, (1, 1), x, out, 2, 1, BLOCK=1)
    assert out.signbit().all()
