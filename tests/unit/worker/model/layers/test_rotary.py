"""Rotary tables against what transformers computes from the same config.json."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.processes import resident_bytes
from worker.config.model_config import RopeConfig, ropes
from worker.config.transformers_config import read_settings
from worker.model.layers import rotary
from worker.model.layers.rotary import RotaryEmbedding, inverse_frequencies

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


def rope_of(config: dict[str, Any]) -> RopeConfig:
    """The RopeConfig of a Llama's config.json."""
    return ropes(read_settings(config, "llama"))[0]


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
    rope = rope_of({"rope_parameters": parameters, "max_position_embeddings": 2048})
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
    assert rope_of(old) == rope_of(new)


def test_tables_are_made_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float64 tables of a million positions, computed at once, took gigabytes. Pieces have the same numbers."""
    rope, positions = rope_of({"rope_theta": 1e4}), torch.arange(300)
    whole = RotaryEmbedding(rope, 64, 300)(positions)
    sizes: list[int] = []
    outer = torch.outer

    def counted(positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        sizes.append(len(positions))
        return outer(positions, frequencies)

    monkeypatch.setattr(rotary, "_PIECE", 128)
    monkeypatch.setattr(torch, "outer", counted)
    pieces = RotaryEmbedding(rope, 64, 300)(positions)
    assert sizes == [128, 128, 44]
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))


@pytest.mark.parametrize("threads", [1, 3])
def test_lazy_rotary_pieces_have_equal_bits(threads: int) -> None:
    """Pieces are made by steps, on other threads and in other numbers than at the start."""
    rope = rope_of({"rope_parameters": PARAMETERS["llama3"], "max_position_embeddings": 2048})
    length = 3 * rotary._PIECE + 77
    positions = torch.arange(length)
    expected = RotaryEmbedding(rope, 96, length)(positions)
    made = RotaryEmbedding(rope, 96, length)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for last in (0, rotary._PIECE, rotary._PIECE - 1, length - 1):
            got = made(torch.tensor([last, 3]))
            assert all(torch.equal(one, other[[last, 3]]) for one, other in zip(got, expected, strict=True))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(made(positions), expected, strict=True))


def test_rotary_table_of_million_positions_grows_on_demand() -> None:
    """0.5 GB and 5 s at the start, for positions that hardly an answer reaches."""
    rope = rope_of({"rope_parameters": PARAMETERS["default"], "max_position_embeddings": 2048})
    before = resident_bytes()
    made = RotaryEmbedding(rope, 256, 1 << 20)
    made(torch.tensor([0, 5000]))
    assert resident_bytes() - before < 100e6
    assert made(torch.empty(0, dtype=torch.int64))[0].shape == (0, 1, 64)
