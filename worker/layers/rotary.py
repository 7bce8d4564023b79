"""Rotary position embedding: cosines and sines by position."""

from __future__ import annotations

import math

import torch

from worker.model_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """float32 [head_dim / 2], rounded where transformers rounds, so that the angles of far positions agree."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.type == "linear":
        return frequencies / rope.factor
    if rope.type == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Stretches long wavelengths by `factor`, leaves short ones, and blends in between."""
    original = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    longest_kept = original / rope.high_freq_factor
    shortest_stretched = original / rope.low_freq_factor
    smooth = (original / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    stretched = torch.where(wavelengths > shortest_stretched, frequencies / rope.factor, frequencies)
    blended = (1 - smooth) * stretched / rope.factor + smooth * stretched
    between = (wavelengths >= longest_kept) & (wavelengths <= shortest_stretched)
    return torch.where(between, blended, stretched)


class RotaryEmbedding:
    """Tables for positions 0 to max_position - 1.

    The angle is rounded to float32 as in transformers, its cosine and sine are taken in float64.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, max_position: int) -> None:
        positions = torch.arange(max_position, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(rope, head_dim)).double()
        self._cos = angles.cos().to(torch.float32).unsqueeze(1)
        self._sin = angles.sin().to(torch.float32).unsqueeze(1)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines float32 [T, 1, head_dim / 2] of positions int64 [T]."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)
