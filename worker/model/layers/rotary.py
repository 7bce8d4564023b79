"""Rotary position embedding: cosines and sines by position."""

from __future__ import annotations

import math
from typing import Final

import torch

from worker.config.model_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_position: int = 0) -> torch.Tensor:
    """float32 [rotary_dim / 2], rounded where transformers rounds, so that the angles of far positions agree.

    `longrope` takes its long factors if a sequence may be longer than the original length. `transformers` takes them
    from the step on in which a sequence gets longer, so that its tokens depend on the chunks of the prefill.
    """
    rotary_dim = rope.rotary_dim(head_dim)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).to(torch.float32) / rotary_dim
    if rope.type == "yarn":
        return _yarn(rope.theta**exponents, rope, rotary_dim)
    if rope.type == "longrope":
        is_long = max_position > rope.original_max_position_embeddings
        return 1.0 / (torch.tensor(rope.long_factors if is_long else rope.short_factors) * rope.theta**exponents)
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.type == "linear":
        return frequencies / rope.factor
    if rope.type == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Stretches long wavelengths by `factor`, keeps short ones, and blends in between."""
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
    """Keeps dimensions that rotate often within the original length, stretches those that rotate seldom, and blends in
    between.

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
    """The pair of dimensions that rotates `rotations` times within the original length."""
    longest = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
    return rotary_dim * math.log(longest) / (2 * math.log(rope.theta))


# Positions whose angles are made at a time: in float64 the tables of a million positions take gigabytes.
_PIECE: Final = 16_384


class RotaryEmbedding:
    """Tables for positions 0 to max_position - 1.

    The angle is rounded to float32 as in transformers; its cosine and sine are taken in float64. On a CPU a piece of
    the tables is made, and takes memory, when one of its positions is first used. A million positions take 5 s and 0.5
    GB, and most answers end long before. On other devices all pieces are made at once, because checking positions there
    would wait for the device. Not thread-safe.

    Args:
        rope: wavelengths, and whether only the first part of a head is rotated.
        head_dim: of the rotated heads.
        max_position: positions of the tables.
        device: of the tables.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, max_position: int, device: torch.device | str = "cpu") -> None:
        self._frequencies = inverse_frequencies(rope, head_dim, max_position)
        self._attention_factor = rope.attention_factor
        self._max_position = max_position
        self._num_made = 0
        # Pages that were never written take no memory.
        self._cos, self._sin = (
            torch.empty(max_position, 1, len(self._frequencies), dtype=torch.float32, device=device) for _ in range(2)
        )
        if self._cos.device.type != "cpu":
            self._make(max_position)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines float32 [T, 1, rotary_dim / 2] of positions int64 [T]."""
        if self._num_made < self._max_position and len(positions):
            self.make(int(positions.max()) + 1)
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines float32 [P, 1, rotary_dim / 2] of all positions; valid as far as `make` went."""
        return self._cos, self._sin

    def make(self, num_positions: int) -> None:
        """Fills the tables for the first `num_positions` positions."""
        if num_positions > self._num_made:
            self._make(num_positions)

    def _make(self, num_positions: int) -> None:
        """Fills the missing pieces up to `num_positions`, which does not change their bits."""
        with torch.inference_mode():
            while self._num_made < min(num_positions, self._max_position):
                piece = slice(self._num_made, min(self._num_made + _PIECE, self._max_position))
                places = torch.arange(piece.start, piece.stop, dtype=torch.float32)
                angles = torch.outer(places, self._frequencies).double()
                for table, values in ((self._cos, angles.cos()), (self._sin, angles.sin())):
                    table[piece, 0] = (values * self._attention_factor).to(table.device, torch.float32)
                self._num_made = piece.stop
