"""Parameters of sampling on the device, in one copy (kernels/triton_backend/sampling.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from kernels.interface import AllowedIds, BiasedIds, MaskedIds, SampleParams
from kernels.upload import to_device

# Columns in the packed parameters begin at multiples of it: vector loads must be aligned.
_ALIGNMENT = 16


@dataclass(frozen=True)
class DeviceMaskedIds:
    """`MaskedIds` on the device: rows and ids int32 [M], the others int64 [M] or None."""

    rows: torch.Tensor
    ids: torch.Tensor
    after: torch.Tensor | None = None
    late: torch.Tensor | None = None


@dataclass(frozen=True)
class DeviceRows:
    """Parameters of S rows on the device.

    Attributes:
        temperature: float32 [S].
        log_min_p: float32 [S], -inf for off.
        top_k: int32 [S], 0 for off.
        top_p_mantissa: int32 [S]; top_p is exactly mantissa / 2^shift.
        top_p_shift: int32 [S], 0 for off.
        seeds: int64 [S], the bits of the seeds.
        positions: int32 [S], the low 32 bits.
        choices: int32 [S], likewise.
    """

    temperature: torch.Tensor
    log_min_p: torch.Tensor
    top_k: torch.Tensor
    top_p_mantissa: torch.Tensor
    top_p_shift: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    choices: torch.Tensor


@dataclass(frozen=True)
class SampleTensors:
    """Inputs of `sample` besides the logits of S rows: tensors on the device, and facts known on the host.

    Attributes:
        rows: parameters.
        any_drawn: True if a row is not greedy.
        any_top_k: True if a row has one.
        any_top_p: True if a row has one.
        masked: None if no row has any.
    """

    rows: DeviceRows
    any_drawn: bool
    any_top_k: bool
    any_top_p: bool
    masked: DeviceMaskedIds | None

    def moved(self, num_rejected: torch.Tensor) -> SampleTensors:
        """A copy whose positions are lower by `num_rejected`, int64 [S]."""
        positions = self.rows.positions - num_rejected.to(torch.int32)
        return replace(self, rows=replace(self.rows, positions=positions))


def prepare(
    params: SampleParams,
    seeds: npt.NDArray[np.uint64],
    positions: npt.NDArray[np.int64],
    choices: npt.NDArray[np.int64],
    device: torch.device,
) -> SampleTensors:
    """Copies the arguments of SamplingOps.sample except the logits to the device, in one asynchronous copy."""
    rows = _row_columns(params, seeds, positions, choices)
    masked = [] if params.masked is None else _masked_columns(params.masked)
    moved = columns_to_device([*rows, *masked], device)
    return SampleTensors(
        DeviceRows(*moved[: len(rows)]),
        any_drawn=bool((params.temperature != 0).any()),
        any_top_k=bool((params.top_k > 0).any()),
        any_top_p=bool((params.top_p < 1).any()),
        masked=None if params.masked is None else _on_device(params.masked, moved[len(rows) :]),
    )


def _row_columns(
    params: SampleParams,
    seeds: npt.NDArray[np.uint64],
    positions: npt.NDArray[np.int64],
    choices: npt.NDArray[np.int64],
) -> list[npt.NDArray[np.generic]]:
    logarithms = [math.log(value) if value > 0 else -math.inf for value in params.min_p.tolist()]
    fractions, exponents = np.frexp(params.top_p)
    return [
        params.temperature.astype(np.float32),
        np.array(logarithms, np.float32),
        np.clip(params.top_k, 0, 2**31 - 1).astype(np.int32),
        np.ldexp(fractions, 24).astype(np.int32),
        np.where(params.top_p < 1, 24 - exponents, 0).astype(np.int32),
        seeds.astype(np.uint64).view(np.int64),
        _low_words(positions),
        _low_words(choices),
    ]


def _low_words(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    return (numbers & 0xFFFFFFFF).astype(np.uint32).view(np.int32)


def _masked_columns(masked: MaskedIds) -> list[npt.NDArray[np.generic]]:
    columns: list[npt.NDArray[np.generic]] = [masked.rows.astype(np.int32), masked.ids.astype(np.int32)]
    return columns if masked.after is None else [*columns, masked.after.astype(np.int64)]


def _on_device(masked: MaskedIds, moved: list[torch.Tensor]) -> DeviceMaskedIds:
    rows, ids, *after = moved
    return DeviceMaskedIds(rows, ids, after[0] if after else None, masked.late)


def write_biases(logits: torch.Tensor, biased: BiasedIds | None) -> None:
    """Writes biases into logits [S, V] on the device; no logit has two biases."""
    if biased is not None:
        columns: list[npt.NDArray[np.generic]] = [biased.rows, biased.ids, biased.biases]
        rows, ids, biases = columns_to_device(columns, logits.device)
        logits[rows, ids] = logits[rows, ids] + biases


def mask_others(logits: torch.Tensor, allowed: AllowedIds | None) -> None:
    """Writes minus infinity over the ids of logits [S, V] on the device that a row may not sample."""
    if allowed is not None:
        columns: list[npt.NDArray[np.generic]] = [allowed.rows, allowed.ids, np.unique(allowed.rows)]
        rows, ids, masked_rows = columns_to_device(columns, logits.device)
        kept = logits[rows, ids]
        logits.index_fill_(0, masked_rows, -torch.inf)
        logits[rows, ids] = kept


def columns_to_device(columns: list[npt.NDArray[np.generic]], device: torch.device) -> list[torch.Tensor]:
    """Copies one-dimensional arrays to the device together; each begins at a multiple of _ALIGNMENT."""
    ends = np.cumsum([-(-column.nbytes // _ALIGNMENT) * _ALIGNMENT for column in columns]).tolist()
    memory = np.zeros(max(ends[-1], _ALIGNMENT), np.uint8)
    starts = [0, *ends[:-1]]
    for start, column in zip(starts, columns, strict=True):
        memory[start : start + column.nbytes] = np.ascontiguousarray(column).view(np.uint8)
    moved = to_device(memory, device)
    return [
        moved[start : start + column.nbytes].view(torch.from_numpy(column).dtype)
        for start, column in zip(starts, columns, strict=True)
    ]
