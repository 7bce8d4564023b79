"""Whole checkpoints in codes on interpreted Triton kernels: products multiply the codes, not dequantized weights.

The reference is PyTorch's kernels on the values of the codes, in float32, so that no result is rounded in between.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.covering import slow_but
from tests.gguf_files import convert
from tests.kernels.row_alone import multiply_rows_alone
from tests.kernels.triton_backend.test_model import answers, config
from tests.kernels.triton_backend.test_quantized_checkpoints import loaded, logits
from tests.native import backend_or_skip
from tests.parity.test_gguf import WIDE
from tests.unit.worker.weights.test_word_checkpoints import made
from worker.config.model_config import ModelConfig
from worker.model.model_runner import ModelRunner
from worker.model.numerics import numerics_digest

# Architecture, scheme of the words or type of a GGUF file, quantized tensors that stay in codes.
MODELS = [
    ("qwen3", "gptq-sym-g128", 7),
    ("qwen2", "gptq-act-order", 7),
    ("llama", "awq-g128", 7),
    ("qwen3", "compressed-tensors-asymmetric-g128", 7),
    ("qwen2", "compressed-tensors", 7),
    ("qwen2", "gptq-v2-8-bits-act-order", 7),
    ("qwen3_moe", "gptq", 25),
    ("mixtral", "gptq-act-order", 19),
    ("llama", "Q4_0", 8),
    ("llama", "Q4_K", 8),
    ("llama", "Q6_K", 8),
]
FIRST = {MODELS[1], MODELS[2]}


def checkpoints(folder: Path, architecture: str, scheme: str) -> tuple[Path, Path]:
    """A checkpoint in codes, and one of floats with the same values."""
    if not scheme.startswith("Q"):
        made(folder, scheme, architecture)
        return folder / "packed", folder / "worth"
    make_checkpoint(folder / "worth", architecture, **{**WIDE, "num_hidden_layers": 1})
    file = folder / "m.gguf"
    file.write_bytes(convert(folder / "worth", scheme).to_bytes())
    return file, folder / "worth"


@pytest.mark.parametrize("model", slow_but(FIRST, MODELS), ids=str)
def test_logits_equal_those_of_dequantized_weights(tmp_path: Path, model: tuple[str, str, int]) -> None:
    *kind, kept = model
    packed, worth = checkpoints(tmp_path, *kind)
    cache = str(tmp_path / "cache")
    ours, ((stay, _),) = loaded(packed, "triton", weights_cache=cache)
    assert stay == kept
    theirs, _ = loaded(worth, "torch", weights_cache=cache)
    expected, found = logits(theirs), logits(ours)
    assert float((found - expected).norm() / expected.norm()) < 1e-5
    assert torch.equal(found.argmax(1), expected.argmax(1))
    assert 0 < ours.mapped_bytes < theirs.mapped_bytes
    # A second load, from the file.
    again, use = loaded(packed, "triton", weights_cache=cache)
    assert use == []
    assert torch.equal(logits(again), found)


@pytest.mark.slow
def test_codes_have_their_own_numerics_class(tmp_path: Path) -> None:
    """The probe's bits differ from those of the same values as floats, and are the same at each start."""
    packed, worth = checkpoints(tmp_path, "qwen3", "compressed-tensors")
    # A probe of few tokens.
    configs = [config(each, kernels="triton", max_model_len=4) for each in (packed, packed, worth)]
    digests = [numerics_digest(ModelRunner(each, ModelConfig.from_folder(each.model))) for each in configs]
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


def test_int4_logits_equal_those_of_native_kernels(tmp_path: Path) -> None:
    """Both multiply the same codes in float32, each in its own order."""
    backend_or_skip("cpu")
    folder = make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1, hidden_size=160, intermediate_size=288)
    ours, theirs = (loaded(folder, kernels, quantize="int4")[0] for kernels in ("triton", "cpu"))
    expected, found = logits(theirs), logits(ours)
    assert float((found - expected).norm() / expected.norm()) < 1e-5
    floats, _ = loaded(folder, "torch")
    assert float((found - logits(floats)).norm() / expected.norm()) > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("given", [{"kind": ("qwen2", "gptq-act-order")}, {"quantize": "int4"}], ids=["gptq", "int4"])
def test_answers_are_equal_alone_batched_and_in_chunks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: dict[str, Any]
) -> None:
    multiply_rows_alone(monkeypatch)
    kind = given.pop("kind", None)
    folder = checkpoints(tmp_path, *kind)[0] if kind else make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    settings = [{"max_num_seqs": 1}, {"max_num_batched_tokens": 24}, {"max_num_batched_tokens": 7}]
    found = [answers(config(folder, kernels="triton", **given, **each), 3)[0] for each in settings]
    assert found[0] == found[1] == found[2]
