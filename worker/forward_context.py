"""Metadata of the forward pass in progress, for layers that need it (seed 003 section 4).

Layers take tensors only; what depends on the step - where keys are written, which rows belong to which sequence - they
read here. The context belongs to the thread that runs the step, so that two runners in one process do not meet.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from common.config import Config
from kernels.interface import AttentionMetaData, KVCache

__all__ = [
    "AttentionMetaData",
    "Context",
    "ForwardContext",
    "KVCacheTensor",
    "get_forward_context",
    "reset_forward_context",
    "set_forward_context",
    "set_kv_cache_data",
]


@dataclass(frozen=True)
class Context:
    """The rows of the step.

    Attributes:
        positions: int64 [T], absolute positions; 0 for padding rows.
        num_prefill_seqs: sequences that compute a prompt, or a chunk of one.
        batch_size: sequences.
        graph_bs: rows, padding included.
        is_draft: whether a draft model runs.
    """

    positions: torch.Tensor
    num_prefill_seqs: int
    batch_size: int
    graph_bs: int
    is_draft: bool = False

    @property
    def is_prefill(self) -> bool:
        """Whether all sequences compute prompts. Of a mixed step one boolean says nothing (seed 004), so no layer and
        no kernel may ask: every sequence attends by its own lengths."""
        return self.num_prefill_seqs == self.batch_size


@dataclass(frozen=True)
class KVCacheTensor:
    """One layer's part of the KV cache, whose layout the kernel back end owns."""

    layer_num: int
    cache: KVCache


@dataclass(frozen=True)
class ForwardContext:
    """Everything that a step's layers may ask for. `kv_cache_data` is keyed by the layer's name, `layers.{i}`."""

    attn_metadata: AttentionMetaData
    atom_config: Config
    context: Context
    kv_cache_data: Mapping[str, KVCacheTensor]


class _Current(threading.local):
    context: ForwardContext | None = None
    kv_cache_data: Mapping[str, KVCacheTensor] = MappingProxyType({})


_current = _Current()


def set_kv_cache_data(kv_cache_data: Mapping[str, KVCacheTensor]) -> None:
    """Registers the KV cache that this thread's coming forward passes read and write.

    A runner does it before each of its passes, not once as in the seed: it may have been made on another thread, and
    another runner may have had a pass on this one.
    """
    _current.kv_cache_data = kv_cache_data


def set_forward_context(attn_metadata: AttentionMetaData, atom_config: Config, context: Context) -> None:
    """Sets this thread's context for one forward pass, with the registered KV cache."""
    _current.context = ForwardContext(attn_metadata, atom_config, context, _current.kv_cache_data)


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
