"""Mixture of experts: a router, experts of which each row uses a few, and perhaps experts shared by all rows.

Ranks hold either a part of every expert's inner units (tensor parallel), or some experts as a whole (expert parallel).
Either way every rank routes every row, computes its part, and one all_reduce adds the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import torch

from common.limits import MAX_MODEL_EXPERTS
from kernels.interface import ClampedSwiglu, ExpertWeights, PackedLinear, Routing
from worker.config.model_config import ModelConfig, ModelError
from worker.model.forward_context import get_forward_context
from worker.model.layers.build import Build, taken
from worker.model.layers.product import product_weight, stay_quantized
from worker.model.sharding import DataParallel, Shard
from worker.weights.checkpoint import Shape
from worker.weights.stored_tensors import MatrixPart

# Rows of each engine that are gathered at a time with data parallelism.
_MAX_GATHERED_ROWS: Final = 1024


@dataclass(frozen=True)
class MoEConfig:
    """Shape of a mixture of experts.

    Attributes:
        num_experts: number of routed experts.
        inner: units of each, on all ranks together.
        routing: how rows choose experts.
        clamp: for an activation other than silu(gate) * up.

    Raises:
        ModelError: the numbers do not fit each other.
    """

    num_experts: int
    inner: int
    routing: Routing
    clamp: ClampedSwiglu | None = None

    def __post_init__(self) -> None:
        routing = self.routing
        if self.num_experts > MAX_MODEL_EXPERTS:
            raise ModelError(f"config.json: a layer has {self.num_experts} experts; at most {MAX_MODEL_EXPERTS}")
        if routing.top_k > self.num_experts:
            raise ModelError(f"num_experts_per_tok {routing.top_k} is more than the {self.num_experts} experts")
        if routing.num_groups == 1:
            return
        size, rest = divmod(self.num_experts, routing.num_groups)
        if rest or size < 2:
            groups = f"{self.num_experts} experts into equal groups of two or more"
            raise ModelError(f"n_group {routing.num_groups} does not split {groups}")
        if not routing.top_k <= routing.top_groups * size <= self.num_experts:
            raise ModelError(
                f"topk_group {routing.top_groups} of n_group {routing.num_groups} groups of {size} experts"
                f" does not hold num_experts_per_tok {routing.top_k}"
            )


@dataclass(frozen=True)
class ExpertShare:
    """A rank's share of the experts.

    Attributes:
        experts: ids.
        inner: inner units of each of them.
    """

    experts: slice
    inner: slice

    @classmethod
    def of(cls, shard: Shard, config: MoEConfig) -> ExpertShare:
        """This rank's share: whole experts with expert parallelism, otherwise a part of every expert.

        Raises:
            ModelError: the inner units cannot be split evenly.
        """
        if shard.expert_parallel:
            return cls(shard.expert_part(config.num_experts), slice(0, config.inner))
        return cls(slice(0, config.num_experts), shard.part(config.inner, "the experts' intermediate size"))

    @property
    def ids(self) -> range:
        """Ids of the experts."""
        return range(self.experts.start, self.experts.stop)


class ExpertRouter:
    """Chooses each row's experts, in float32.

    Args:
        build: shared by the layers.
        name: of `{name}.weight` [E, H] and, if used, `{name}.bias` and `{name}.e_score_correction_bias`.
        routing: how rows choose experts.
        bias: True if the logits have a bias.
        correction: True if the choice has one (arXiv:2412.19437, section 2.1.2).
    """

    def __init__(self, build: Build, name: str, routing: Routing, bias: bool = False, correction: bool = False) -> None:
        self._linear = build.kernels.linear
        self._experts = build.kernels.experts
        self._routing = routing
        self._packed = build.kept.keep(name, lambda: self._pack(build, name, bias))
        correction_name = f"{name}.e_score_correction_bias"
        self._correction = taken(build, correction_name, torch.float32) if correction else None

    def _pack(self, build: Build, name: str, bias: bool) -> PackedLinear:
        own_bias = build.weights.take(f"{name}.bias", dtype=torch.float32) if bias else None
        weight = build.weights.take(f"{name}.weight", dtype=torch.float32)
        return self._linear.pack(weight, own_bias, torch.float32)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, H] -> ids int64 [T, k] and weights float32 [T, k]"""
        logits = self._linear.apply(x.float(), self._packed)
        return self._experts.route(logits, self._routing, self._correction)


class MoE:
    """Routed experts and shared ones.

    Args:
        build: shared by the layers.
        name: of the routed experts.
        config: the experts' shape.
        router: [T, H] -> ids and weights.
        experts: those of `ExpertShare.of`, in order.
        shared: [T, H] -> this rank's summand [T, H] of the shared experts.
    """

    def __init__(
        self,
        build: Build,
        name: str,
        config: MoEConfig,
        router: ExpertRouter,
        experts: Iterable[ExpertWeights],
        shared: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._experts = build.kernels.experts
        self._collectives = build.shard.collectives
        self._data = build.shard.data
        self._router = router
        first = ExpertShare.of(build.shard, config).experts.start
        self._packed = build.kept.keep(
            name,
            lambda: build.kernels.experts.pack(experts, first, config.clamp, build.dtype, build.packed_format),
        )
        self._shared = shared

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H], the same on every rank of the engine"""
        if self._data is None:
            out = self._own_experts(x)
            return self._collectives.all_reduce(out if self._shared is None else out + self._shared(x))
        out = torch.cat([*self._over_engines(x, self._data)])
        return out if self._shared is None else out + self._collectives.all_reduce(self._shared(x))

    def _own_experts(self, x: torch.Tensor) -> torch.Tensor:
        ids, weights = self._router(x)
        return self._experts.apply(x, ids, weights, self._packed)

    def _over_engines(self, x: torch.Tensor, data: DataParallel) -> Iterator[torch.Tensor]:
        """Sends the rows of all engines to all experts, chunk by chunk. Yields this engine's rows of the sums."""
        metadata = get_forward_context().dp_metadata
        assert metadata is not None, "data parallelism without DPMetadata"
        for chunk in range(-(-metadata.max_tokens_across_dp // _MAX_GATHERED_ROWS)):
            with metadata.chunked_sizes(_MAX_GATHERED_ROWS, chunk) as sizes:
                first, most = chunk * _MAX_GATHERED_ROWS, max(sizes)
                own = x.new_zeros(most, x.shape[1])
                own[: sizes[data.rank]] = x[first : first + sizes[data.rank]]
                # [most, engines, H]: rows of all engines are interleaved; padding rows of engines with fewer rows are
                # dropped.
                rows = data.collectives.all_gather(own).view(most * data.size, -1)
                out = data.experts.all_reduce(self._own_experts(rows))
                yield out.view(most, data.size, -1)[: sizes[data.rank], data.rank]


@dataclass(frozen=True)
class ExpertNames:
    """Names of the projections in checkpoints with a tensor for each expert: `{prefix}.{id}.{gate}.weight`."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def shapes(self, prefix: str, config: MoEConfig, hidden_size: int) -> dict[str, Shape]:
        """Name and shape of every tensor of every expert."""
        shapes: dict[str, Shape] = {}
        for expert in range(config.num_experts):
            shapes[f"{prefix}.{expert}.{self.gate}.weight"] = (config.inner, hidden_size)
            shapes[f"{prefix}.{expert}.{self.up}.weight"] = (config.inner, hidden_size)
            shapes[f"{prefix}.{expert}.{self.down}.weight"] = (hidden_size, config.inner)
        return shapes

    def take(self, build: Build, prefix: str, config: MoEConfig) -> Iterator[ExpertWeights]:
        """This rank's share, one expert at a time."""
        share = ExpertShare.of(build.shard, config)
        both = [
            [MatrixPart(f"{prefix}.{expert}.{part}.weight", rows=share.inner) for part in (self.gate, self.up)]
            for expert in share.ids
        ]
        downs = [[MatrixPart(f"{prefix}.{expert}.{self.down}.weight", columns=share.inner)] for expert in share.ids]
        both_stay, downs_stay = stay_quantized(build, both), stay_quantized(build, downs)
        for gate_up, down in zip(both, downs, strict=True):
            yield ExpertWeights(product_weight(build, gate_up, both_stay), product_weight(build, down, downs_stay))


def grouped_moe_config(config: ModelConfig) -> MoEConfig:
    """The mixture of DeepSeek-V3, which GLM-4 uses too: sigmoid scores, groups, a correction bias.

    Raises:
        ModelError: config.json describes another kind, or its numbers do not fit.
    """
    for key, supported in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if config.source.get(key, supported) != supported:
            raise ModelError(f"config.json: {key} is {config.source[key]!r}; supported: {supported}")
    routing = Routing(
        top_k=config.count("num_experts_per_tok"),
        scoring="sigmoid",
        renormalize=config.flag("norm_topk_prob"),
        num_groups=config.count("n_group"),
        top_groups=config.count("topk_group"),
        scale=config.number("routed_scaling_factor"),
    )
    return MoEConfig(config.count("n_routed_experts"), config.count("moe_intermediate_size"), routing)


def grouped_moe_shapes(moe: MoEConfig, hidden_size: int, correction: bool) -> dict[str, Shape]:
    """Name, from the layer's `mlp` on, and shape of every tensor of a grouped mixture, without the shared experts."""
    router: dict[str, Shape] = {"mlp.gate.weight": (moe.num_experts, hidden_size)}
    if correction:
        router["mlp.gate.e_score_correction_bias"] = (moe.num_experts,)
    return router | ExpertNames().shapes("mlp.experts", moe, hidden_size)


def grouped_moe(
    build: Build, prefix: str, config: MoEConfig, correction: bool, shared: Callable[[torch.Tensor], torch.Tensor]
) -> MoE:
    """A grouped mixture from `{prefix}.gate` and `{prefix}.experts`; `correction` as in ExpertRouter, `shared` in
    MoE."""
    router = ExpertRouter(build, f"{prefix}.gate", config.routing, correction=correction)
    name = f"{prefix}.experts"
    return MoE(build, name, config, router, ExpertNames().take(build, name, config), shared)
