"""A whole model whose weights and rows have 8 bits, against PyTorch's kernels over the same roundings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config import Config
from common.params.sampling_params import SamplingParams
from kernels.interface import AnyWeight, PackedFormat
from kernels.quantized_weight import as_floats
from kernels.torch_backend import linear as row_tiles
from kernels.torch_backend.backend import TorchBackend
from kernels.torch_backend.sampling import argmax
from tests.checkpoints import make_checkpoint
from worker.config.model_config import ModelConfig
from worker.llm_engine import LLMEngine
from worker.model import model_runner
from worker.model.model_runner import ModelRunner
from worker.model.numerics import numerics_digest

PROMPTS = [[7, 8, 9], list(range(20, 28))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


def rounded(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Each row to the nearest multiples of its scale."""
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scales = rows.float().abs().amax(-1, keepdim=True) / largest
    shrunk = rows.float() / scales.where(scales > 0, 1.0)
    return (shrunk.round() if dtype == torch.int8 else shrunk.to(dtype).float()) * scales


class RoundingLinearOps(row_tiles.TorchLinearOps):
    """Rounds weights when they are packed, and rows when they are multiplied."""

    def __init__(self) -> None:
        self._rounded: dict[int, torch.dtype] = {}

    def pack(
        self,
        weight: AnyWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        packed_format: PackedFormat | None = None,
    ) -> row_tiles.PackedLinear:
        if packed_format is None:
            return super().pack(weight, bias, dtype)
        packed = super().pack(rounded(as_floats(weight), packed_format.dtype), bias, dtype)
        self._rounded[id(packed)] = packed_format.dtype
        return packed

    def apply(self, x: torch.Tensor, packed: row_tiles.PackedLinear) -> torch.Tensor:
        dtype = self._rounded.get(id(packed))
        return super().apply(x if dtype is None else rounded(x, dtype), packed)

    def argmax(self, x: torch.Tensor, packed: row_tiles.PackedLinear, limit: int) -> torch.Tensor:
        return argmax(self.apply(x, packed).float(), limit)


class RoundingBackend(TorchBackend):
    """PyTorch's kernels, over weights and rows that are rounded and stored as float32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = RoundingLinearOps()

    def packed_format(self, name: str, dtype: torch.dtype) -> PackedFormat:  # type: ignore[override]
        return PackedFormat(torch.int8 if name == "w8a8_int8" else torch.float8_e4m3fn, quantizes_rows=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=1)


def config(folder: Path, quantize: str, **options: Any) -> Config:
    common = Config(
        model=str(folder),
        dtype="float32",
        quantize=quantize,
        kernels="triton",
        max_model_len=16,
        num_kvcache_blocks=12,
        max_num_batched_tokens=24,
    )
    return replace(common, **options)


def answers(settings: Config, prompts: Iterable[list[int]] = PROMPTS) -> list[list[int]]:
    engine = LLMEngine(settings)
    found = engine.generate(list(prompts), GREEDY)
    engine.close()
    return [answer["token_ids"] for answer in found]


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["w8a8_int8", "w8a8_fp8"])
def test_w8a8_tokens_equal_rounded_reference(monkeypatch: pytest.MonkeyPatch, folder: Path, quantize: str) -> None:
    found = answers(config(folder, quantize))
    monkeypatch.setattr(model_runner, "select_backend", lambda *_: RoundingBackend())
    assert found == answers(config(folder, quantize, kernels="torch"))


def test_w8a8_has_its_numerics_class(folder: Path) -> None:
    settings = [config(folder, quantize, max_model_len=4) for quantize in ("no", "int8", "w8a8_int8")]
    runners = [ModelRunner(each, ModelConfig.from_folder(each.model)) for each in settings]
    assert len({numerics_digest(runner) for runner in runners}) == 3
