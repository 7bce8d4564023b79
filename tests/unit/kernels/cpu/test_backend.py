"""What the CPU back end says of itself."""

from __future__ import annotations

from ctypes import CDLL
from pathlib import Path

import pytest

from common.config import Config
from kernels.cpu import build, library
from kernels.select import select_backend
from tests.checkpoints import make_checkpoint
from tests.unit.kernels.test_batch_invariance import torch_threads
from worker.config.model_config import ModelConfig
from worker.model.model_runner import ModelRunner
from worker.model.numerics import numerics_digest


def digest(folder: Path, kernels: str, threads: int, dtype: str = "float32") -> str:
    with torch_threads(threads):
        config = Config(model=str(folder), dtype=dtype, kernels=kernels, max_model_len=512)
        return numerics_digest(ModelRunner(config, ModelConfig.from_folder(folder)))


@pytest.mark.parametrize("model_type", ["qwen3", "deepseek_v3"])
def test_numerics_class_is_independent_of_threads(threads: CDLL, tmp_path: Path, model_type: str) -> None:
    """With experts and latent attention too."""
    folder = make_checkpoint(tmp_path, model_type, num_hidden_layers=2, tokenizer=False)
    assert digest(folder, "cpu", 1) == digest(folder, "cpu", 2) == digest(folder, "cpu", 3)
    assert digest(folder, "torch", 1) != digest(folder, "cpu", 1)


def test_numerics_class_includes_pytorch_threads_if_used(threads: CDLL, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3", num_hidden_layers=2, tokenizer=False)
    assert digest(folder, "cpu", 1, "float16") != digest(folder, "cpu", 2, "float16")


def test_threads_are_pytorchs(threads: CDLL) -> None:
    with torch_threads(3):
        select_backend("cpu")
    assert threads.fissile_threads() == 3


def test_unavailable_cpu_backend_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    load = library.load
    monkeypatch.setattr(library, "load", lambda: load(tmp_path / "library.so"))
    with pytest.raises(ValueError, match="kernels 'cpu': the CPU kernels were not compiled"):
        select_backend("cpu")


def test_library_is_built_from_current_sources(native: CDLL) -> None:
    assert build.is_current()
