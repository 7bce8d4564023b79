"""What the layers of a model are made with."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kernels.interface import KernelBackend
from worker.loader import Weights
from worker.model_config import ModelConfig
from worker.parallel import Shard


@dataclass(frozen=True)
class Build:
    """Everything that a layer's constructor may need beside its place in the model.

    Attributes:
        config: the model's shape, whole, whatever the shard.
        kernels: the back end.
        weights: the checkpoint.
        dtype: of weights and activations.
        max_position: positions that rotary tables are made for.
        shard: the part of the model that this rank holds.
        kv_dtype: of the KV cache; `dtype` when None.
        packed_dtype: of the weights of products other than routers, in memory; `dtype` when None.
    """

    config: ModelConfig
    kernels: KernelBackend
    weights: Weights
    dtype: torch.dtype
    max_position: int
    shard: Shard = field(default_factory=Shard)
    kv_dtype: torch.dtype | None = None
    packed_dtype: torch.dtype | None = None
