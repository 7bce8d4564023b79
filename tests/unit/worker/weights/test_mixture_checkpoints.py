"""What checkpoints of mixtures have beside the tensors of the model, or lack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.config import Config
from tests.checkpoints import make_checkpoint
from worker.config.model_config import ModelConfig, ModelError
from worker.model.model_runner import ModelRunner

LAYERS = 2


def checkpoint(folder: Path, architecture: str, mtp_layers: int) -> Path:
    """A checkpoint whose config.json names `mtp_layers` MTP layers without their tensors."""
    made = make_checkpoint(folder, architecture, tokenizer=False, num_hidden_layers=LAYERS)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": mtp_layers}))
    return made


def amend(folder: Path, tensors: dict[str, torch.Tensor | None]) -> None:
    """Adds tensors to the weights, or removes the tensors that are None."""
    file = folder / "model.safetensors"
    kept = {**load_file(file), **tensors}
    save_file({name: tensor for name, tensor in kept.items() if tensor is not None}, file)


def load(folder: Path) -> ModelRunner:
    config = Config(model=str(folder), dtype="float32", max_model_len=64)
    return ModelRunner(config, ModelConfig.from_folder(folder))


def mtp_tensors(layer: int) -> dict[str, torch.Tensor | None]:
    """Tensors of an MTP layer as in GLM-4.5 and DeepSeek-V3: a decoder layer and its projection."""
    prefix = f"model.layers.{layer}"
    return {
        f"{prefix}.eh_proj.weight": torch.ones(64, 128),
        f"{prefix}.enorm.weight": torch.ones(64),
        f"{prefix}.hnorm.weight": torch.ones(64),
        f"{prefix}.embed_tokens.weight": torch.ones(384, 64),
        f"{prefix}.shared_head.head.weight": torch.ones(384, 64),
        f"{prefix}.mlp.experts.0.up_proj.weight": torch.ones(40, 64),
    }


@pytest.mark.parametrize("architecture", ["glm4_moe", "deepseek_v3"])
def test_mtp_layers_are_optional(tmp_path: Path, architecture: str) -> None:
    folder = checkpoint(tmp_path, architecture, mtp_layers=1)
    load(folder)
    amend(folder, mtp_tensors(LAYERS))
    load(folder)
    amend(folder, mtp_tensors(LAYERS + 1))
    with pytest.raises(ModelError, match=rf"surplus model\.layers\.{LAYERS + 1}\."):
        load(folder)


@pytest.mark.parametrize(
    ("architecture", "tensor"),
    [
        ("qwen3_moe", "model.layers.1.mlp.experts.6.up_proj.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.4.w2.weight"),
        ("glm4_moe", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("gpt_oss", "model.layers.1.self_attn.sinks"),
        ("gpt_oss", "model.layers.0.mlp.experts.down_proj_bias"),
    ],
)
def test_missing_tensor_is_named(tmp_path: Path, architecture: str, tensor: str) -> None:
    folder = checkpoint(tmp_path, architecture, mtp_layers=0)
    assert tensor in load_file(folder / "model.safetensors")
    amend(folder, {tensor: None})
    with pytest.raises(ModelError) as error:
        load(folder)
    assert f"missing {tensor}" in str(error.value)


def test_surplus_expert_is_named(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "qwen3_moe", mtp_layers=0)
    amend(folder, {"model.layers.0.mlp.experts.7.up_proj.weight": torch.ones(40, 64)})
    with pytest.raises(ModelError, match=r"surplus model\.layers\.0\.mlp\.experts\.7\.up_proj\.weight"):
        load(folder)
