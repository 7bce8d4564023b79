"""Tensors in codes, whatever file they come from: parts, floats, joins and the reasons against them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from typing_extensions import override

from kernels.cpu.backend import CpuBackend
from kernels.grouped_weight import GroupedWeight
from kernels.quantized_weight import as_floats
from kernels.select import CPU_BACKENDS
from kernels.torch_backend.backend import TorchBackend
from tests.checkpoints import make_checkpoint
from tests.native import backend_or_skip
from tests.stored_weights import grouped_weight
from worker.config.model_config import ModelConfig
from worker.model.layers.build import Build
from worker.model.layers.embedding import Embedding
from worker.model.layers.linear import ColumnLinear, RowLinear
from worker.weights.checkpoint import Weights, no_progress
from worker.weights.grouped_tensors import GroupedTensor
from worker.weights.stored_tensors import Files, MatrixPart

INNER = 256


class HeldTensor(GroupedTensor):
    """Tensor whose codes are in memory."""

    def __init__(self, *experts: GroupedWeight) -> None:
        self._experts = experts
        matrix = experts[0].shape
        self.shape = matrix if len(experts) == 1 else (len(experts), *matrix)
        self.group, self.has_order = experts[0].group, experts[0].order is not None

    @property
    @override
    def num_bytes(self) -> int:
        return sum(each.codes.nbytes for each in self._experts)

    @override
    def read(self, files: Files, rows: slice, expert: int) -> GroupedWeight:
        weight = self._experts[expert]
        zeros, offsets = weight.zeros, weight.offsets
        return replace(
            weight,
            codes=weight.codes[rows].clone(),
            scales=weight.scales[rows].clone(),
            zeros=None if zeros is None else zeros[rows].clone(),
            offsets=None if offsets is None else offsets[rows].clone(),
        )


def drawn(rows: int, *, bits: int = 4, group: int = 32, ordered: bool = False) -> GroupedWeight:
    return grouped_weight(rows, INNER, bits, group, torch.float16, bits == 8, False, ordered)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """Of a model as wide as the drawn weights, with a vocabulary of 40."""
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), tokenizer=False)
    return replace(ModelConfig.from_folder(folder), hidden_size=INNER, vocab_size=40)


def build_of(config: ModelConfig, kernels: str, **tensors: GroupedWeight) -> Build:
    held = {f"{name}.weight": HeldTensor(weight) for name, weight in tensors.items()}
    return Build(config, backend_or_skip(kernels), Weights(held, no_progress), torch.float32, 64)


@pytest.fixture
def keeps_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in (TorchBackend, CpuBackend):
        monkeypatch.setattr(backend, "keeps_quantized", lambda *_: True)


@pytest.mark.parametrize("expert", [0, 1])
def test_parts_equal_parts_of_the_values(expert: int) -> None:
    experts = [drawn(40), drawn(40, group=64)]
    weights = Weights({"w": HeldTensor(*experts)}, no_progress)
    whole = as_floats(experts[expert])
    for rows, columns in ((slice(None), slice(None)), (slice(3, 19), slice(64, 192)), (slice(0, 40), slice(128, 256))):
        part = weights.take_quantized(MatrixPart("w", rows, columns, expert))
        assert torch.equal(as_floats(part), whole[rows, columns])
        one = slice(expert, expert + 1)
        assert torch.equal(weights.take("w", rows=one, middle=rows, columns=columns)[0], whole[rows, columns])


def test_parts_that_cannot_stay_in_codes_say_why() -> None:
    weights = Weights({"w": HeldTensor(drawn(8)), "ordered": HeldTensor(drawn(8, ordered=True))}, no_progress)
    for part, reason in (
        (MatrixPart("w", columns=slice(8, 40)), "32 columns of each rank cut groups of 32"),
        (MatrixPart("ordered", columns=slice(0, 128)), "columns of each rank cut an order by activation"),
        (MatrixPart("w", transposed=True), "stored transposed"),
    ):
        with pytest.raises(ValueError, match=reason):
            weights.take_quantized(part)


@pytest.mark.parametrize("kernels", CPU_BACKENDS)
@pytest.mark.usefixtures("keeps_codes")
def test_products_of_codes_equal_products_of_values(config: ModelConfig, kernels: str) -> None:
    tensors = {"q": drawn(40), "k": drawn(24, bits=8, group=16), "down": drawn(48, ordered=True)}
    build = build_of(config, kernels, **tensors)
    x = torch.randn(5, INNER, generator=torch.Generator().manual_seed(1))
    joined = ColumnLinear(build, {"q": slice(8, 40), "k": slice(None)})
    expected = torch.cat([as_floats(tensors["q"])[8:], as_floats(tensors["k"])]).double()
    assert torch.allclose(joined(x).double(), x.double() @ expected.t(), rtol=1e-4, atol=1e-4)
    down = RowLinear(build, "down", slice(None))
    assert torch.allclose(down(x).double(), x.double() @ as_floats(tensors["down"]).double().t(), rtol=1e-4, atol=1e-4)
    assert build.weights.use.kept == {"q.weight", "k.weight", "down.weight"}


@pytest.mark.parametrize("kernels", CPU_BACKENDS)
@pytest.mark.usefixtures("keeps_codes")
def test_parts_in_different_orders_become_floats(config: ModelConfig, kernels: str) -> None:
    tensors = {"q": drawn(40, ordered=True), "k": drawn(24)}
    build = build_of(config, kernels, **tensors)
    x = torch.randn(5, INNER, generator=torch.Generator().manual_seed(1))
    joined = ColumnLinear(build, {"q": slice(None), "k": slice(None)})
    expected = torch.cat([as_floats(each) for each in tensors.values()]).double()
    assert torch.allclose(joined(x).double(), x.double() @ expected.t(), rtol=1e-4, atol=1e-4)
    assert build.weights.use.reasons().startswith("parts of the product order their columns differently: 2")


@pytest.mark.parametrize("kernels", CPU_BACKENDS)
@pytest.mark.usefixtures("keeps_codes")
def test_embedding_rows_are_the_values(config: ModelConfig, kernels: str) -> None:
    tensors = {"q": drawn(40)}
    embedding = Embedding(build_of(config, kernels, **tensors), "q", for_head=True)
    ids = torch.tensor([3, 39, 0])
    assert torch.equal(embedding(ids), as_floats(tensors["q"])[ids])
