"""Common arguments of a model's layers: back end, weights, dtypes and sharding."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kernels.interface import KernelBackend, PackedFormat
from worker.config.model_config import ModelConfig
from worker.model.sharding import Shard
from worker.weights.checkpoint import Weights
from worker.weights.weights_cache import Keeper, WeightsWriter


@dataclass(frozen=True)
class Build:
    """Arguments that the layers of a model share.

    Attributes:
        config: the whole model's shape, whatever the shard.
        kernels: the back end.
        weights: the checkpoint; only read inside `kept.keep`.
        dtype: of weights and activations.
        max_position: number of positions in the rotary tables.
        shard: this rank's part of the model.
        kv_dtype: of the KV cache; None for `dtype`.
        packed_format: of the weights of products other than routers, in memory; None for `dtype`.
        kept: source of every tensor and packed object that a layer keeps.
        aux_layers: layers before which the residual stream is returned too, for a draft model.
        drafts: True if the checkpoint's own draft layers are wanted, such as its first MTP layer.
    """

    config: ModelConfig
    kernels: KernelBackend
    weights: Weights
    dtype: torch.dtype
    max_position: int
    shard: Shard = field(default_factory=Shard)
    kv_dtype: torch.dtype | None = None
    packed_format: PackedFormat | None = None
    kept: Keeper = field(default_factory=WeightsWriter)
    aux_layers: tuple[int, ...] = ()
    drafts: bool = False


def taken(build: Build, name: str, dtype: torch.dtype, rows: slice = slice(None)) -> torch.Tensor:
    """A tensor of the checkpoint, or rows of it, in `dtype`, for a layer that keeps it as it is."""
    return build.kept.keep(name, lambda: build.weights.take(name, rows=rows, dtype=dtype).to(build.kernels.device))
