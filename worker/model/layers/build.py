"""Builder of a model's layers: backend, weights and sharding that they are made with."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kernels.interface import KernelBackend, PackedFormat
from worker.config.model_config import ModelConfig
from worker.model.sharding import Shard
from worker.weights.checkpoint import Weights
from worker.weights.weights_cache import Keeper, Making


@dataclass(frozen=True)
class Build:
    """Everything that a layer's constructor may need beside its place in the model.

    Attributes:
        config: the model's shape, whole, whatever the shard.
        kernels: the back end.
        weights: the checkpoint; read within `kept.keep` only.
        dtype: of weights and activations.
        max_position: positions that rotary tables are made for.
        shard: the part of the model that this rank holds.
        kv_dtype: of the KV cache; `dtype` when None.
        packed_format: of the weights of products other than routers, in memory; in `dtype` when None.
        kept: where every tensor and packed object comes from that a layer keeps of the checkpoint.
        aux_layers: layers before which the residual stream is handed out too, for a draft model.
        drafts: whether the checkpoint's own draft layers are wanted, such as its first MTP layer.
    """

    config: ModelConfig
    kernels: KernelBackend
    weights: Weights
    dtype: torch.dtype
    max_position: int
    shard: Shard = field(default_factory=Shard)
    kv_dtype: torch.dtype | None = None
    packed_format: PackedFormat | None = None
    kept: Keeper = field(default_factory=Making)
    aux_layers: tuple[int, ...] = ()
    drafts: bool = False


def taken(build: Build, name: str, dtype: torch.dtype, rows: slice = slice(None)) -> torch.Tensor:
    """A tensor of the checkpoint that a layer keeps as it is, or rows of it, in `dtype`."""
    return build.kept.keep(name, lambda: build.weights.take(name, rows=rows, dtype=dtype).to(build.kernels.device))
