"""The Triton back end as a whole: its packed formats, and its composed operations."""

from __future__ import annotations

import pytest
import torch
from triton.backends.compiler import GPUTarget

from kernels.interface import ExpertWeights, PackedFormat
from kernels.select import select_backend
from kernels.triton_backend import elementwise, target
from kernels.triton_backend.backend import TritonBackend
from kernels.triton_backend.launch import launch
from tests.kernels.triton_backend.targets import backend_for
from worker.config.model_config import ModelError
from worker.model.dtypes import resolve_packed_format


@pytest.mark.parametrize(
    ("name", "tolerance"), [("int8", 0.02), ("fp8", 0.06), ("w8a8_int8", 0.03), ("w8a8_fp8", 0.08)]
)
def test_weights_in_8_bits(name: str, tolerance: float) -> None:
    backend = select_backend("triton")
    assert isinstance(backend, TritonBackend)
    packed_format = resolve_packed_format(name, torch.float32, backend)
    quantizes_rows, narrow = name.startswith("w8a8"), torch.int8 if "int8" in name else backend.settings.target.fp8
    assert packed_format == PackedFormat(narrow, quantizes_rows)
    x, weight = (torch.randn(n, 200, generator=torch.Generator().manual_seed(n)) for n in (3, 50))
    packed = backend.linear.pack(weight, None, torch.float32, packed_format)
    assert packed.quantizes_rows == quantizes_rows
    assert packed.numbers.dtype == narrow
    found = backend.linear.apply(x, packed)
    expected = x @ weight.t()
    error = (found - expected).norm() / expected.norm()
    assert 0.001 < error < tolerance


@pytest.mark.parametrize("name", ["fp8", "w8a8_int8"])
def test_experts_in_8_bits(name: str) -> None:
    backend = TritonBackend()
    expert = ExpertWeights(torch.ones(4, 8), torch.ones(8, 2))
    packed = backend.experts.pack([expert], 0, None, torch.float32, backend.packed_format(name, torch.float32))
    assert packed.down is not None
    assert packed.down.numbers.dtype == (torch.int8 if "int8" in name else backend.settings.target.fp8)
    assert packed.down.quantizes_rows == name.startswith("w8a8")


@pytest.mark.parametrize("name", ["fp8", "w8a8_int8", "w8a8_fp8"])
@pytest.mark.parametrize("kernels", ["torch", "cpu"])
def test_packed_formats_of_gpus_are_refused_on_cpu(kernels: str, name: str) -> None:
    wanted = (
        rf"quantize '{name}' needs kernels of a GPU( that has FP8)?; here are kernels '{kernels}' and dtype float32"
    )
    with pytest.raises(ModelError, match=wanted):
        resolve_packed_format(name, torch.float32, select_backend(kernels))


def test_unknown_gpu_has_distinct_name() -> None:
    """Files of packed weights and the numerics class are keyed by this name."""
    gpus = [GPUTarget("hip", "gfx942", 64), GPUTarget("hip", "gfx90a", 64), GPUTarget("cuda", 80, 32)]
    backends = [backend_for(target.of(gpu)) for gpu in gpus]
    assert [backend.settings.target.name for backend in backends] == ["gfx942", "gfx90a", "sm_80"]
    assert len({backend.numerics for backend in backends}) == len({backend.layout for backend in backends}) == 3
    known, other, ampere = (backend.settings.target for backend in backends)
    assert known is target.TARGETS["gfx942"]
    assert (other.is_amd, other.shared_bytes, other.has_fp8) == (True, known.shared_bytes, False)
    assert (ampere.is_amd, ampere.has_fp8, target.of(GPUTarget("cuda", 89, 32)).has_fp8) == (False, False, True)


def test_tokens_arrive_on_host_in_order() -> None:
    backend = TritonBackend()
    logits = torch.tensor([[0.0, 3.0, 3.0, 9.0], [float("nan"), 1.0, 0.0, 0.0]])
    ids = backend.sampling.argmax(logits, 3)
    assert backend.sampling.fetch(ids)() == [1, 1]


def test_zero_keeps_sign_in_interpreter() -> None:
    """The earlier content of an output, here a zero of the other sign, must not show."""
    x, out = torch.tensor([[-0.0, 1.0]], dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.bfloat16)
    launch(elementwise._silu_and_mul_kernel, (1, 1), x, out, 2, 1, GELU=False, BLOCK=1)
    assert out.signbit().all()
