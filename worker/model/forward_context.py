"""Metadata of the forward pass in progress, for layers that need it.

Layers take tensors only. Facts about the step (slots of the keys, rows of each sequence) come from here. The context
belongs to the thread that runs the step, so that two runners in one process do not share it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

import torch

from common.config import Config
from kernels.interface import AttentionMetaData, KVCache
from worker.model.sharding import DataParallel

__all__ = [
    "AttentionMetaData",
    "Context",
    "DPMetadata",
    "ForwardContext",
    "KVCacheTensor",
    "forward_context",
    "get_forward_context",
    "reset_forward_context",
    "set_forward_context",
    "set_kv_cache_data",
]


@dataclass(frozen=True)
class Context:
    """Description of the step's rows that layers may read.

    Attributes:
        positions: int64 [T], absolute positions; 0 for padding rows.
        num_prefill_seqs: sequences that compute a prompt, or a chunk of one.
        batch_size: sequences.
        graph_bs: rows, padding included.
        is_draft: True if a draft model runs.
    """

    positions: torch.Tensor
    num_prefill_seqs: int
    batch_size: int
    graph_bs: int
    is_draft: bool = False

    @property
    def is_prefill(self) -> bool:
        """True if all sequences compute prompts. Layers and kernels must not use it: mixed steps have both kinds of
        sequences."""
        return self.num_prefill_seqs == self.batch_size


@dataclass(frozen=True)
class KVCacheTensor:
    """One layer's part of the KV cache. The kernel back end defines its layout."""

    layer_num: int
    cache: KVCache


@dataclass
class DPMetadata:
    """Rows of this step in every engine of a data-parallel group.

    Attributes:
        max_tokens_across_dp: largest number of rows of an engine.
        cu_tokens_across_dp: cumulative rows: where each engine's rows begin in the concatenation; the last is the sum.
        local_sizes: rows of each engine in the current chunk; in the whole step outside of `chunked_sizes`.
    """

    max_tokens_across_dp: int
    cu_tokens_across_dp: list[int]
    local_sizes: list[int]

    @classmethod
    def make(cls, num_tokens: list[int]) -> DPMetadata:
        """The metadata of these numbers of rows (`num_tokens_across_dp`)."""
        return cls(max(num_tokens), [0, *accumulate(num_tokens)], num_tokens)

    @staticmethod
    def num_tokens_across_dp(num_tokens: int, data: DataParallel) -> list[int]:
        """Each engine's number of rows. All engines must call it at the same time."""
        counts = torch.zeros(data.size)
        counts[data.rank] = num_tokens
        return [int(count) for count in data.collectives.all_reduce(counts)]

    @contextmanager
    def chunked_sizes(self, max_chunk_size: int, chunk: int) -> Iterator[list[int]]:
        """Splits the step into chunks of at most `max_chunk_size` rows per engine, which bounds the gathered rows.
        Yields each chunk's sizes.

        Engines with fewer rows have none in the last chunks, but still take part.
        """
        whole = self.local_sizes
        self.local_sizes = [max(0, min(max_chunk_size, size - chunk * max_chunk_size)) for size in whole]
        try:
            yield self.local_sizes
        finally:
            self.local_sizes = whole


@dataclass(frozen=True)
class ForwardContext:
    """Everything that a step's layers may use. `kv_cache_data` is keyed by the layer's name, `layers.{i}`."""

    attn_metadata: AttentionMetaData
    atom_config: Config
    context: Context
    kv_cache_data: Mapping[str, KVCacheTensor]
    dp_metadata: DPMetadata | None = None


class _Current(threading.local):
    context: ForwardContext | None = None
    kv_cache_data: Mapping[str, KVCacheTensor] = MappingProxyType({})


_current = _Current()


def set_kv_cache_data(kv_cache_data: Mapping[str, KVCacheTensor]) -> None:
    """Registers the KV cache that this thread's next forward passes read and write.

    `forward_context` does it for each pass: a runner may have been made on another thread, and another runner may have
    run on this one.
    """
    _current.kv_cache_data = kv_cache_data


def set_forward_context(
    attn_metadata: AttentionMetaData, atom_config: Config, context: Context, dp_metadata: DPMetadata | None = None
) -> None:
    """Sets this thread's context for one forward pass, with the registered KV cache."""
    _current.context = ForwardContext(attn_metadata, atom_config, context, _current.kv_cache_data, dp_metadata)


def get_forward_context() -> ForwardContext:
    """This thread's context.

    Raises:
        RuntimeError: no forward pass is in progress.
    """
    if _current.context is None:
        raise RuntimeError("no forward pass is in progress")
    return _current.context


def reset_forward_context() -> None:
    """Ends the forward pass; the KV cache stays registered."""
    _current.context = None


@contextmanager
def forward_context(
    attn_metadata: AttentionMetaData,
    atom_config: Config,
    context: Context,
    kv_cache_data: Mapping[str, KVCacheTensor],
    dp_metadata: DPMetadata | None = None,
) -> Iterator[None]:
    """Sets this thread's context and KV cache while the block runs one forward pass."""
    set_kv_cache_data(kv_cache_data)
    set_forward_context(attn_metadata, atom_config, context, dp_metadata)
    try:
        yield
    finally:
        reset_forward_context()
