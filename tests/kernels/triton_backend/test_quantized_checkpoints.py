"""Whole quantized checkpoints on interpreted Triton kernels: products multiply the stored numbers.

The reference is PyTorch's kernels on the dequantized weights, in float32, so that no result is rounded in between.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from common.config import Config
from kernels.triton_backend.backend import TritonBackend
from tests.checkpoints import make_checkpoint
from tests.covering import slow_but
from tests.kernels.triton_backend.test_model import answers, config
from tests.quantizers import SCHEMES, quantize_checkpoint
from tests.unit.worker.model.test_sharded_models import in_mxfp4
from worker.config.model_config import ModelConfig
from worker.engine.batch import ScheduledBatch
from worker.engine.sequence import Sequence
from worker.model.layers.build import Build
from worker.model.layers.linear import ColumnLinear, RowLinear
from worker.model.model_runner import ModelRunner
from worker.model.models.qwen3 import Qwen3ForCausalLM
from worker.model.sharding import Shard
from worker.weights.checkpoint import load_weights

# Name -> architecture, scheme, shape, quantized tensors that stay and that are dequantized.
MODELS: dict[str, tuple[str, str, dict[str, Any], int, int]] = {
    "qwen3": ("qwen3", "deepseek", {"hidden_size": 160, "intermediate_size": 288, "num_hidden_layers": 1}, 7, 0),
    "deepseek_v3": ("deepseek_v3", "deepseek", {"hidden_size": 160, "num_hidden_layers": 2}, 38, 2),
    "gpt_oss": ("gpt_oss", "", {"hidden_size": 128, "num_hidden_layers": 1}, 2, 0),
}


@pytest.fixture(scope="module", params=slow_but({"qwen3"}, list(MODELS)))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("quantized") / request.param)


def made(folder: Path) -> Path:
    architecture, scheme, shape, _, _ = MODELS[folder.name]
    make_checkpoint(folder, architecture, **shape)
    if scheme:
        quantize_checkpoint(folder, SCHEMES[scheme])
    else:
        in_mxfp4(folder, folder.parent / "worth")
    return folder


def loaded(folder: Path, kernels: str, **given: Any) -> tuple[ModelRunner, list[Any]]:
    """A runner, and (tensors that stay as they are stored, others that are quantized) of each reading."""
    used = Config(model=str(folder), kernels=kernels, dtype="float32", max_model_len=64, **given)
    with capture_logs() as lines:
        runner = ModelRunner(used, ModelConfig.from_folder(folder))
    runner.allocate_kv_cache(4)
    return runner, [(line["kept"], line["dequantized"]) for line in lines if line["event"] == "quantized weights"]


def logits(runner: ModelRunner) -> torch.Tensor:
    """Logits of two prompts in one step."""
    seqs = [Sequence([7, 77, 177, 277, 377], 16), Sequence([99, 98], 16)]
    for block, seq in enumerate(seqs):
        seq.block_table = [block]
    batch = ScheduledBatch({seq.id: seq for seq in seqs}, [5, 2], 7)
    return runner.run_model(runner.prepare_model(batch))


def test_quantized_logits_equal_dequantized_and_packed_file_is_smaller(folder: Path, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    ours, use = loaded(folder, "triton", weights_cache=cache)
    assert use == [MODELS[folder.name][3:]]
    theirs, use = loaded(folder, "torch", weights_cache=cache)
    assert use == [(0, sum(MODELS[folder.name][3:]))]
    expected, found = logits(theirs), logits(ours)
    error = float((found - expected).norm() / expected.norm())
    assert error < 1e-5
    assert torch.equal(found.argmax(1), expected.argmax(1))
    assert 0 < ours.mapped_bytes < 0.6 * theirs.mapped_bytes
    # A second load, from the file.
    again, use = loaded(folder, "triton", weights_cache=cache)
    assert use == []
    assert again.mapped_bytes == ours.mapped_bytes
    assert torch.equal(logits(again), found)


@pytest.mark.long
def test_quantized_tokens_equal_dequantized(folder: Path) -> None:
    expected, _ = answers(config(folder, kernels="torch"), 4)
    found, _ = answers(config(folder, kernels="triton"), 4)
    assert found == expected


def test_each_quantize_option_has_its_packed_file(tmp_path: Path) -> None:
    folder = made(tmp_path / "qwen3")
    cache = str(tmp_path / "cache")
    _, use = loaded(folder, "triton", weights_cache=cache)
    assert use == [(7, 0)]
    _, use = loaded(folder, "triton", weights_cache=cache, quantize="int8")
    assert use == [(0, 7)]
    assert len(list(Path(cache).glob("*.weights"))) == 2


@pytest.mark.parametrize(("inner", "bytes_per_number"), [(512, 1), (320, 4)])
def test_two_ranks_sum_to_one(tmp_path: Path, inner: int, bytes_per_number: int) -> None:
    """With parts on the borders of blocks; other parts are floats."""
    folder = make_checkpoint(tmp_path, tokenizer=False, num_hidden_layers=1, intermediate_size=inner, hidden_size=160)
    worths = quantize_checkpoint(folder, SCHEMES["deepseek"])
    model_config, kernels = ModelConfig.from_folder(folder), TritonBackend()
    shapes = Qwen3ForCausalLM.tensor_shapes(model_config)
    mlp = "model.layers.0.mlp"
    x = torch.randn(3, 160, generator=torch.Generator().manual_seed(1))
    outs, widths = [], set()
    for rank in range(2):
        weights = load_weights(folder, shapes, quantization=model_config.quant_config)
        build = Build(model_config, kernels, weights, torch.float32, 64, Shard(rank, 2))
        part = build.shard.part(inner, "intermediate_size")
        gate_up = ColumnLinear(build, {f"{mlp}.gate_proj": part, f"{mlp}.up_proj": part})
        down = RowLinear(build, f"{mlp}.down_proj", part)
        assert gate_up.packed.numbers.element_size() == 1
        widths.add(down.packed.numbers.element_size())
        outs.append(down.partial(kernels.elementwise.silu_and_mul(gate_up(x))))
    assert widths == {bytes_per_number}
    gate, up, down_worth = (
        torch.from_numpy(worths[f"{mlp}.{name}.weight"]).double() for name in ("gate_proj", "up_proj", "down_proj")
    )
    inside = torch.nn.functional.silu(x.double() @ gate.t()) * (x.double() @ up.t())
    expected = inside @ down_worth.t()
    assert float((sum(outs) - expected).norm() / expected.norm()) < 1e-5
