"""Rotary position embedding: cosines and sines by position."""

from __future__ import annotations

import math

import torch

from worker.model_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """float32 [rotary_dim / 2], rounded where transformers rounds, so that the angles of far positions agree."""
    rotary_dim = rope.rotary_dim(head_dim)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).to(torch.float32) / rotary_dim
    if rope.type == "yarn":
        return _yarn(rope.theta**exponents, rope, rotary_dim)
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


def _yarn(wavelengths: torch.Tensor, rope: RopeConfig, rotary_dim: int) -> torch.Tensor:
    """Keeps what turns often within the original length, stretches what turns seldom, and blends in between.

    `wavelengths` are by theta alone and lack their factor of 2 pi (arXiv:2309.00071, section 3.2).
    """
    low, high = (_dim_of(rotations, rope, rotary_dim) for rotations in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    places = torch.arange(rotary_dim // 2, dtype=torch.float32)
    stretched = ((places - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return (1.0 / (rope.factor * wavelengths)) * stretched + (1.0 / wavelengths) * (1 - stretched)


def _dim_of(rotations: float, rope: RopeConfig, rotary_dim: int) -> float:
    """The pair of dimensions that turns so often within the original length."""
    longest = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
    return rotary_dim * math.log(longest) / (2 * math.log(rope.theta))


class RotaryEmbedding:
    """Tables for positions 0 to max_position - 1.

    The angle is rounded to float32 as in transformers, its cosine and sine are taken in float64.

    Args:
        rope: which wavelengths, and whether only the first part of a head is rotated.
        head_dim: of the heads that are rotated.
        max_position: positions of the tables.
        device: where they lie.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, max_position: int, device: torch.device | str = "cpu") -> None:
        positions = torch.arange(max_position, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(rope, head_dim)).double()
        self._cos = (angles.cos() * rope.attention_factor).to(device, torch.float32).unsqueeze(1)
        self._sin = (angles.sin() * rope.attention_factor).to(device, torch.float32).unsqueeze(1)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines float32 [T, 1, rotary_dim / 2] of positions int64 [T]."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)
