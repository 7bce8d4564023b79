"""GraniteMoeForCausalLM (Granite 3 1B-A400M, 3B-A800M): Granite with a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from kernels.interface import ExpertWeights, Routing
from worker.config.model_config import ModelConfig
from worker.model.layers.build import Build
from worker.model.layers.moe import ExpertRouter, ExpertShare, MoE, MoEConfig
from worker.model.layers.product import product_weight, stay_quantized
from worker.model.models.granite import GraniteForCausalLM
from worker.weights.checkpoint import Shape
from worker.weights.stored_tensors import MatrixPart

_MIXTURE = "block_sparse_moe"


class GraniteMoeForCausalLM(GraniteForCausalLM):
    """Granite 3, MoE: softmax over the chosen experts only."""

    @classmethod
    def moe_config(cls, config: ModelConfig) -> MoEConfig:
        """The experts' shape."""
        routing = Routing(config.count("num_experts_per_tok"), "topk_softmax")
        return MoEConfig(config.count("num_local_experts"), config.intermediate_size, routing)

    def make_mlp(self, build: Build, prefix: str, layer: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """A mixture of experts, its output multiplied by `residual_multiplier`."""
        prefix = prefix.removesuffix("mlp") + _MIXTURE
        config, factor = self.moe_config(build.config), build.config.positive("residual_multiplier")
        router = ExpertRouter(build, f"{prefix}.router.layer", config.routing)
        mixture = MoE(build, f"{prefix}.experts", config, router, _experts(build, prefix, config))
        return lambda x: mixture(x) * factor

    @classmethod
    def mlp_shapes(cls, config: ModelConfig, layer: int) -> dict[str, Shape]:
        """Name and shape of every tensor of a layer's mixture; all experts of a projection are one tensor."""
        moe, hidden = cls.moe_config(config), config.hidden_size
        return {
            f"{_MIXTURE}.router.layer.weight": (moe.num_experts, hidden),
            f"{_MIXTURE}.input_linear.weight": (moe.num_experts, 2 * moe.inner, hidden),
            f"{_MIXTURE}.output_linear.weight": (moe.num_experts, hidden, moe.inner),
        }


def _experts(build: Build, prefix: str, config: MoEConfig) -> Iterator[ExpertWeights]:
    """This rank's share, one expert at a time; a stored matrix has all gates, then all ups."""
    share = ExpertShare.of(build.shard, config)
    ups = slice(share.inner.start + config.inner, share.inner.stop + config.inner)
    both = [
        [MatrixPart(f"{prefix}.input_linear.weight", rows, expert=expert) for rows in (share.inner, ups)]
        for expert in share.ids
    ]
    downs = [[MatrixPart(f"{prefix}.output_linear.weight", columns=share.inner, expert=one)] for one in share.ids]
    both_stay, downs_stay = stay_quantized(build, both), stay_quantized(build, downs)
    for gate_up, down in zip(both, downs, strict=True):
        yield ExpertWeights(product_weight(build, gate_up, both_stay), product_weight(build, down, downs_stay))
