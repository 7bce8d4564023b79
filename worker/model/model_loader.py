"""Makes a model from its checkpoint, or from the cache of packed weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch

from common.config import Config, QuantizationConfig
from kernels.interface import KernelBackend, PackedFormat
from worker.config.model_config import ModelConfig, ModelError
from worker.model.architectures import CausalModel, draft_head_class, model_class
from worker.model.layers.build import Build
from worker.model.models.eagle3 import Eagle3Head
from worker.model.sharding import Shard
from worker.weights.checkpoint import LoadProgress, Shape, Weights, load_weights, weight_files, weights_digest
from worker.weights.weights_cache import Keeper, Key, WeightsCache, WeightsWriter, sources_digest

Made = TypeVar("Made")


@dataclass(frozen=True)
class Tensors:
    """Source of a checkpoint's tensors: see `load_weights`."""

    expected: Mapping[str, Shape]
    optional: Mapping[str, Shape]
    kept: tuple[str, ...]


class ModelLoader:
    """Makes one rank's part of a model.

    Args:
        config: names the folder; on CPUs its `weights_cache` is used.
        model_config: from the same folder.
        kernels: pack the weights.
        dtype: of weights and activations.
        kv_dtype: of the KV cache.
        packed_format: of the weights in memory; None for `dtype`.
        max_position: number of positions in the rotary tables.
        shard: this rank's part of the model.
        aux_layers: see `Build`.
        drafts: see `Build`.

    Attributes:
        mapped_bytes: bytes of weight files that the process maps; 0 before `load`.
        mapped_file: path of that file; "" without one.
    """

    def __init__(
        self,
        config: Config,
        model_config: ModelConfig,
        kernels: KernelBackend,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        packed_format: PackedFormat | None,
        max_position: int,
        shard: Shard,
        aux_layers: tuple[int, ...] = (),
        drafts: bool = False,
    ) -> None:
        self._config = config
        self._model_config = model_config
        self._kernels = kernels
        self._dtype = dtype
        self._kv_dtype = kv_dtype
        self._packed_format = packed_format
        self._max_position = max_position
        self._shard = shard
        self._aux_layers = aux_layers
        self._drafts = drafts
        self.mapped_bytes, self.mapped_file = 0, ""

    @cached_property
    def weights_digest(self) -> str:
        """Digest of the checkpoint (worker/weights/checkpoint.py)."""
        return weights_digest(self._config.model)

    @torch.inference_mode()
    def load(self, progress: LoadProgress) -> CausalModel:
        """The model, from the cache of packed weights if there is one.

        Raises:
            ModelError: the checkpoint cannot be served; one line.
        """
        architecture, config = model_class(self._model_config.architecture), self._model_config
        kept = architecture.kept_tensors(config)
        expected, optional = architecture.tensor_shapes(config), dict[str, Shape]()
        if self._drafts:
            expected |= architecture.draft_shapes(config)
            optional = architecture.optional_draft_shapes(config)
        return self._load(architecture, Tensors(expected, optional, kept), progress)

    @torch.inference_mode()
    def load_head(self, progress: LoadProgress) -> Eagle3Head:
        """The draft head of a folder that has one, from the cache of packed weights if there is one.

        Raises:
            ModelError: the head cannot be used; one line.
        """
        architecture, config = draft_head_class(self._model_config.architecture), self._model_config
        optional, kept = architecture.optional_shapes(config), architecture.kept_tensors(config)
        return self._load(architecture, Tensors(architecture.tensor_shapes(config), optional, kept), progress)

    def _load(self, make: Callable[[Build], Made], tensors: Tensors, progress: LoadProgress) -> Made:
        def build(kept: Keeper) -> Made:
            return self._build(make, tensors, kept, progress)

        if not self._config.weights_cache or self._kernels.device.type != "cpu":
            return build(WeightsWriter())
        return WeightsCache(Path(self._config.weights_cache)).load(self._key(), build, progress, self._kernels.adopt)

    def _build(self, make: Callable[[Build], Made], tensors: Tensors, kept: Keeper, progress: LoadProgress) -> Made:
        config = self._model_config
        self.mapped_bytes, self.mapped_file = kept.mapped_bytes, kept.mapped_file
        weights = Weights({}, progress)
        if kept.needs_weights:
            weights = load_weights(
                self._config.model,
                tensors.expected,
                progress,
                optional=tensors.optional,
                kept=tensors.kept,
                quantization=_quantization(self._config, config),
            )
        model = make(
            Build(
                config,
                self._kernels,
                weights,
                self._dtype,
                self._max_position,
                self._shard,
                self._kv_dtype,
                self._packed_format,
                kept,
                self._aux_layers,
                self._drafts,
            )
        )
        weights.use.log()
        return model

    def _key(self) -> Key:
        shard, data = self._shard, self._shard.data
        engines = (0, 1) if data is None else (data.rank, data.size)
        return Key(
            weights=self.weights_digest,
            files=weight_files(self._config.model),
            architecture=self._model_config.architecture + (" that drafts" if self._drafts else ""),
            dtype=str(self._dtype),
            layout=repr(self._kernels.layout),
            sources=sources_digest(),
            quantization=repr((_quantization(self._config, self._model_config), self._packed_format)),
            rank=repr((shard.rank, shard.size, shard.expert_parallel, *engines)),
        )


def _quantization(config: Config, model_config: ModelConfig) -> QuantizationConfig:
    given, own = config.quant_config, model_config.quant_config
    if QuantizationConfig() not in (given, own) and given != own:
        raise ModelError("quant_config differs from the checkpoint's own in config.json; leave it at its default")
    return own if given == QuantizationConfig() else given
