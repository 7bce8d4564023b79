"""Rotary tables against what transformers computes from the same config.json."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from worker.layers.rotary import RotaryEmbedding, inverse_frequencies
from worker.model_config import rope_config

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "original_max_position_embeddings": 256}
PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "partial_rotary_factor": 0.75,
    },
    "yarn": {**YARN, "factor": 8.0},
    "yarn-partial": {**YARN, "factor": 8.0, "partial_rotary_factor": 0.5},
    "yarn-untruncated": {**YARN, "factor": 32.0, "truncate": False, "beta_fast": 20.0, "beta_slow": 2.0},
    "yarn-mscale": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn-one-mscale": {**YARN, "factor": 40.0, "mscale": 0.7},
    "yarn-attention-factor": {**YARN, "factor": 4.0, "attention_factor": 1.25},
    "yarn-without-factor": {**YARN, "factor": None},
    "yarn-without-stretch": {**YARN, "factor": 1.0},
    "yarn-one-border": {**YARN, "factor": 4.0, "beta_fast": 1e-9, "beta_slow": 1e-9},
}


@pytest.mark.parametrize("name", list(PARAMETERS))
def test_frequencies_and_factor(name: str) -> None:
    from transformers import Glm4MoeConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding

    parameters = {"partial_rotary_factor": 1.0, **PARAMETERS[name]}
    config_class: Any = Glm4MoeConfig
    config = config_class(head_dim=96, max_position_embeddings=2048, rope_parameters=dict(parameters))
    reference: Any = ROPE_INIT_FUNCTIONS.get(
        parameters["rope_type"], Glm4MoeRotaryEmbedding.compute_default_rope_parameters
    )
    frequencies, attention_factor = reference(config)
    rope = rope_config({"rope_parameters": parameters, "max_position_embeddings": 2048})
    assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)
    torch.testing.assert_close(inverse_frequencies(rope, 96), frequencies, rtol=1e-6, atol=0.0)
    cos, sin = RotaryEmbedding(rope, 96, 300)(torch.tensor([0, 7, 299]))
    assert cos.shape == sin.shape == (3, 1, len(frequencies))
    angles = torch.tensor([0, 7, 299])[:, None] * frequencies
    torch.testing.assert_close(cos[:, 0], angles.cos() * attention_factor, rtol=0.0, atol=1e-4)
    torch.testing.assert_close(sin[:, 0], angles.sin() * attention_factor, rtol=0.0, atol=1e-4)


def test_spellings_of_older_checkpoints() -> None:
    old = {
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"type": "yarn", "factor": 8.0},
        "original_max_position_embeddings": 256,
    }
    new = {"rope_parameters": PARAMETERS["yarn-partial"], "max_position_embeddings": 2048}
    assert rope_config(old) == rope_config(new)
