"""The text part of a multimodal checkpoint equals `transformers`, whichever of its versions saved it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import ARCHITECTURES, DEFAULT_SHAPE, _draw_weights
from tests.parity.test_models import Models, Reference, close, make_runner
from worker.config.model_config import ModelConfig

VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
# transformers' prefix -> architecture and `model_type` of the text part, vision part, and architecture here.
KINDS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "Gemma3": ("gemma3_text", "gemma3_text", {"model_type": "siglip_vision_model", **VISION}, "Gemma3ForCausalLM"),
    "Mistral3": ("mistral", "mistral", {"model_type": "pixtral", **VISION}, "MistralForCausalLM"),
    "Qwen3VL": (
        "qwen3",
        "qwen3_vl_text",
        {
            **{"model_type": "qwen3_vl", "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2},
            **{"out_hidden_size": 64, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        },
        "Qwen3ForCausalLM",
    ),
}
# Images and videos give tokens other positions in each of three parts of a head; texts do not.
MROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [6, 3, 3], "mrope_interleaved": True}


def make_whole_checkpoint(folder: Path, name: str) -> Reference:
    """Writes a multimodal checkpoint of one of KINDS whose text part is random."""
    import transformers

    text, model_type, vision, _ = KINDS[name]
    config_class: Any = getattr(transformers, f"{name}Config")
    model_class: Any = getattr(transformers, f"{name}ForConditionalGeneration")
    shape = (
        DEFAULT_SHAPE | ARCHITECTURES[text][1] | {"model_type": model_type, "tie_word_embeddings": text != "mistral"}
    )
    shape |= {"rope_parameters": MROPE} if text == "qwen3" else {}
    config = config_class(text_config=shape, vision_config=vision, tie_word_embeddings=text != "mistral")
    model = model_class(config).float().eval()
    _draw_weights(model.model.language_model, seed=3)
    model.save_pretrained(folder)
    return Reference(folder, model)


@pytest.mark.parametrize("name", list(KINDS))
def test_text_part_equals_transformers(tmp_path: Path, name: str) -> None:
    reference, architecture = make_whole_checkpoint(tmp_path, name), KINDS[name][3]
    saved = ModelConfig.from_folder(tmp_path)
    assert (saved.architecture, saved.eos_token_ids) == (architecture, (DEFAULT_SHAPE["eos_token_id"],))
    models = Models(reference, make_runner(tmp_path))
    prompt = models.random_prompts([65], seed=1)[0]
    expected = models.reference.logits(prompt)[-1]
    close(models.logits(prompt, 0), expected)

    tensors = {_in_memory(key): tensor for key, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert any(key.startswith(("model.vision_tower.", "model.visual.")) for key in tensors)
    assert "model.language_model.embed_tokens.weight" in tensors
    save_file(tensors, tmp_path / "model.safetensors")
    other = Models(models.reference, make_runner(tmp_path))
    assert torch.equal(other.logits(prompt, 0), models.logits(prompt, 0))


def _in_memory(name: str) -> str:
    """The name that a saved tensor has in the model, and in files of some versions."""
    if name.startswith("language_model.lm_head."):
        return name.removeprefix("language_model.")
    if name.startswith("model."):
        return name
    return "model." + name.replace("language_model.model.", "language_model.", 1)


def test_config_without_text_part_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Gemma3ForConditionalGeneration"]}))
    with pytest.raises(Exception, match="architecture not supported: Gemma3ForConditionalGeneration"):
        ModelConfig.from_folder(tmp_path)
