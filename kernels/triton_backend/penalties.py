"""Penalties on the device (kernels/penalties.py)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from kernels.no_token import NO_TOKEN
from kernels.penalties import Penalties
from kernels.triton_backend.launch import launch
from kernels.triton_backend.sample_tensors import columns_to_device

# Entries that a program changes.
_ENTRIES = 256
_LARGEST = tl.constexpr(float(np.finfo(np.float32).max))


# Logits with their penalties.
@triton.jit
def _penalized(value, counts, repetition, presence, frequency):
    # A value that a tiny penalty lets overflow stays finite: infinity means that the model's output is no number.
    limit = tl.where(tl.abs(value) < float("inf"), _LARGEST, float("inf"))
    value = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
    value = tl.where(tl.abs(value) > limit, tl.where(value > 0, limit, -limit), value)
    value -= tl.where(counts > 0, presence, 0.0)
    return value - frequency * counts


# A program changes some logits, each by its own entry; a row has each id once. Rows with a late token know its entry,
# which then counts once more.
@triton.jit(do_not_specialize=["count"])
def _penalize_kernel(
    logits, row_stride, entries_of, ids, output_counts, rows, late, repetition, presence, frequency, found, count,
    BLOCK: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < count
    own = tl.load(entries_of + entry, mask=mask, other=0)
    id = tl.load(ids + entry, mask=mask, other=0)
    place = logits + tl.load(rows + own, mask=mask, other=0) * row_stride + id
    is_late = mask & (id == tl.load(late + own, mask=mask, other=-1))
    counts = tl.load(output_counts + entry, mask=mask, other=0.0) + is_late.to(tl.float32)
    value = _penalized(
        tl.load(place, mask=mask, other=0.0),
        counts,
        tl.load(repetition + own, mask=mask, other=1.0),
        tl.load(presence + own, mask=mask, other=0.0),
        tl.load(frequency + own, mask=mask, other=0.0),
    )
    tl.store(place, value, mask=mask)
    tl.store(found + own, tl.full((BLOCK,), 1, tl.int32), mask=is_late)


# A program changes the logits of late tokens that are in no entry.
@triton.jit(do_not_specialize=["count"])
def _penalize_late_kernel(
    logits, row_stride, rows, late, repetition, presence, frequency, found, count, BLOCK: tl.constexpr
):
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    id = tl.load(late + own, mask=own < count, other=-1)
    mask = (id >= 0) & (tl.load(found + own, mask=own < count, other=1) == 0)
    place = logits + tl.load(rows + own, mask=mask, other=0) * row_stride + id
    value = _penalized(
        tl.load(place, mask=mask, other=0.0),
        tl.full((BLOCK,), 1.0, tl.float32),
        tl.load(repetition + own, mask=mask, other=1.0),
        tl.load(presence + own, mask=mask, other=0.0),
        tl.load(frequency + own, mask=mask, other=0.0),
    )
    tl.store(place, value, mask=mask)


def penalize(logits: torch.Tensor, penalties: Penalties) -> None:
    """Writes penalties (kernels/penalties.py) into float32 logits [S, V] on the device, without waiting for it."""
    sizes = [len(seen.ids) for seen in penalties.seen]
    columns: list[npt.NDArray[np.generic]] = [
        np.repeat(np.arange(len(sizes), dtype=np.int32), sizes),
        np.frombuffer(b"".join(seen.ids.tobytes() for seen in penalties.seen), np.int32),
        np.frombuffer(b"".join(seen.output_counts.tobytes() for seen in penalties.seen), np.float32),
        penalties.rows.astype(np.int64),
        *(one.astype(np.float32) for one in (penalties.repetition, penalties.presence, penalties.frequency)),
    ]
    entries_of, ids, counts, rows, *factors = columns_to_device(columns, logits.device)
    late = torch.full_like(rows, NO_TOKEN) if penalties.late is None else penalties.late
    found = torch.zeros(len(sizes), dtype=torch.int32, device=logits.device)
    launch(
        _penalize_kernel,
        (max(1, triton.cdiv(sum(sizes), _ENTRIES)),),
        *(logits, logits.stride(0), entries_of, ids, counts, rows, late, *factors, found, sum(sizes)),
        BLOCK=_ENTRIES,
        num_warps=4,
        enable_fp_fusion=False,
    )
    if penalties.late is not None:
        launch(
            _penalize_late_kernel,
            (triton.cdiv(len(sizes), _ENTRIES),),
            *(logits, logits.stride(0), rows, late, *factors, found, len(sizes)),
            BLOCK=_ENTRIES,
            num_warps=4,
            enable_fp_fusion=False,
        )
