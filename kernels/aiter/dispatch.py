"""Decides which operations AITER computes, by its version and the model's numbers."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final

import structlog
import torch

from kernels.aiter.library import AiterLibrary
from kernels.interface import PackedFormat

_log = structlog.get_logger(__name__)

AITER: Final = "aiter"
# Dtypes of models.
NARROW: Final = (torch.bfloat16, torch.float16)
# Numbers of a row, and rows, that AITER's shuffled layout of weights takes together (aiter/ops/shuffle.py).
_SHUFFLED_ROWS, _SHUFFLED_COLUMNS = 16, 32

# Functions that not every supported version has -> the first that does.
SINCE: Final = {
    "aiter.ops.triton.attention.mla:mla_decode_fwd": "0.1.16",
    "aiter.ops.triton.attention.mla:mla_prefill_fwd": "0.1.16",
}


@dataclass(frozen=True)
class Operation:
    """One of our operations and its counterpart in AITER.

    Attributes:
        functions: of AITER that it calls.
        row_by_row: True if a row's bits can depend on nothing else: no sum, and one kernel for all numbers of rows.
    """

    functions: tuple[str, ...]
    row_by_row: bool = False


OPERATIONS: Final = {
    "rms_norm": Operation(("aiter.ops.rmsnorm:rmsnorm2d_fwd",)),
    "add_rms_norm": Operation(("aiter.ops.rmsnorm:rmsnorm2d_fwd_with_add",)),
    "layer_norm": Operation(("aiter.ops.norm:layernorm2d_fwd",)),
    "rope": Operation(("aiter.ops.rope:rope_cached_2c_fwd",), row_by_row=True),
    "rope_write": Operation(("aiter.ops.triton.fusions.fused_kv_cache:fused_qk_rope_reshape_and_cache",)),
    "silu_and_mul": Operation(("aiter.ops.activation:silu_and_mul",), row_by_row=True),
    "route": Operation(("aiter.ops.moe_op:topk_softmax", "aiter.ops.topk:biased_grouped_topk")),
    "linear": Operation(("aiter.tuned_gemm:gemm_a16w16",)),
    "quantized_linear": Operation(
        (
            "aiter.ops.shuffle:shuffle_weight",
            "aiter.ops.quant:per_token_quant_hip",
            "aiter.ops.gemm_op_a8w8:gemm_a8w8_bpreshuffle",
        )
    ),
    "block_linear": Operation(("aiter.ops.quant:per_group_quant_hip", "aiter.ops.gemm_op_a8w8:gemm_a8w8_blockscale")),
    "moe": Operation(("aiter.ops.shuffle:shuffle_weight", "aiter.fused_moe:fused_moe")),
    "block_moe": Operation(("aiter.ops.shuffle:shuffle_weight", "aiter.fused_moe:fused_moe")),
    "attention": Operation(("aiter.ops.triton.attention.unified_attention:unified_attention",)),
    "latent_attention": Operation(
        ("aiter.ops.triton.attention.mla:mla_decode_fwd", "aiter.ops.triton.attention.mla:mla_prefill_fwd")
    ),
    "all_reduce": Operation(
        (
            "aiter.ops.communication:init_dist_env",
            "aiter.dist.communication_op:tensor_model_parallel_all_reduce",
            "aiter.dist.parallel_state:graph_capture",
            "aiter.ops.communication:destroy_dist_env",
        )
    ),
}


class Choices:
    """Operations that AITER computes for a model.

    Args:
        library: the AITER installation.
        batch_invariant: True to leave AITER only operations that are row by row.
        other: name of the back end for the other operations.
    """

    def __init__(self, library: AiterLibrary, batch_invariant: bool, other: str) -> None:
        self._missing = {name: _why_missing(name, library, batch_invariant) for name in OPERATIONS}
        self._other = other
        self._taken: dict[Hashable, bool] = {}
        self._logged: set[tuple[str, str | None]] = set()

    def takes(self, operation: str, refusal: Callable[..., str | None], *facts: Hashable) -> bool:
        """True if AITER computes an operation on numbers of that kind; the answer never changes.

        Args:
            operation: one of OPERATIONS.
            refusal: gives the reason why not for `facts`; None for none.
            facts: dtypes and sizes, as the model has them.
        """
        key = (operation, *facts)
        taken = self._taken.get(key)
        if taken is None:
            taken = self._taken[key] = self._decide(operation, self._missing[operation] or refusal(*facts))
        return taken

    def _decide(self, operation: str, reason: str | None) -> bool:
        if (operation, reason) not in self._logged:
            self._logged.add((operation, reason))
            because = {} if reason is None else {"reason": reason}
            _log.info("kernels chosen", operation=operation, kernels=self._other if reason else AITER, **because)
        return reason is None


def _why_missing(operation: str, library: AiterLibrary, batch_invariant: bool) -> str | None:
    offered = OPERATIONS[operation]
    if batch_invariant and not offered.row_by_row:
        return "AITER chooses its kernels by the number of rows, and the worker is batch-invariant"
    missing = [function for function in offered.functions if function not in library.functions]
    return f"aiter {library.version} has no {missing[0]}; {SINCE[missing[0]]} is the first" if missing else None


def refuse_dtype(dtype: torch.dtype) -> str | None:
    """Reason why AITER has no kernels for a model's dtype; None for none."""
    return None if dtype in NARROW else f"AITER's kernels are for bfloat16 and float16, not {text(dtype)}"


def refuse_stored(dtype: torch.dtype, stored: torch.dtype, fp8: torch.dtype) -> str | None:
    """Reason why AITER does not read a KV cache in `stored`; None for none."""
    if stored in (dtype, fp8):
        return refuse_dtype(dtype)
    return f"AITER's KV cache has the model's dtype or {text(fp8)}, not {text(stored)}"


def refuse_packed(
    packed_format: PackedFormat | None, fp8: torch.dtype, rows: int, columns: int, shuffled: bool
) -> str | None:
    """Reason why AITER cannot pack a weight [rows, columns]; None if it can."""
    if packed_format is not None and packed_format != PackedFormat(fp8, quantizes_rows=True):
        what = "weights and rows" if packed_format.quantizes_rows else "weights only"
        return f"AITER has weights and rows in {text(fp8)}, not {what} in {text(packed_format.dtype)}"
    if shuffled and (rows % _SHUFFLED_ROWS or columns % _SHUFFLED_COLUMNS):
        return f"AITER shuffles weights of multiples of 16 x 32, not {rows} x {columns}"
    return None


def text(dtype: torch.dtype) -> str:
    """Name of a dtype without the prefix `torch.`."""
    return str(dtype).removeprefix("torch.")
