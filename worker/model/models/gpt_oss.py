"""GptOssForCausalLM (gpt-oss-20b, 120b): sinks, alternating windows, experts with biases and a clamped activation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from typing_extensions import override

from kernels.grouped_weight import GroupedWeight, joined, row_part
from kernels.interface import AnyWeight, ClampedSwiglu, ExpertWeights, QuantizedWeight, Routing
from kernels.quantized_weight import selected_rows
from worker.config.model_config import ModelConfig, ModelError
from worker.model.layers.build import Build, taken
from worker.model.layers.linear import WHOLE
from worker.model.layers.moe import ExpertRouter, ExpertShare, MoE, MoEConfig
from worker.model.layers.product import stay_quantized
from worker.model.models.llama import LlamaAttention, LlamaForCausalLM, refuse_partial_rotary
from worker.model.sharding import times
from worker.weights.checkpoint import Shape
from worker.weights.stored_tensors import MatrixPart


class GptOssAttention(LlamaAttention):
    """Attention in which each head has a score that takes part in the softmax without a value."""

    def sinks(self, build: Build, prefix: str, heads: slice) -> torch.Tensor | None:
        """`{prefix}.sinks` of this rank's heads."""
        return taken(build, f"{prefix}.sinks", torch.float32, rows=heads)


class GptOssForCausalLM(LlamaForCausalLM):
    """gpt-oss: softmax over the chosen experts only, biases everywhere."""

    attention = GptOssAttention

    @classmethod
    @override
    def check(cls, config: ModelConfig) -> None:
        refuse_partial_rotary(config)
        if not config.attention_bias:
            raise ModelError("attention_bias false is not supported for GptOssForCausalLM")
        for layer in range(config.num_hidden_layers):
            cls.window(config, layer)

    @classmethod
    def window(cls, config: ModelConfig, layer: int) -> int | None:
        """The sliding window of a layer that `layer_types` calls sliding; None for other layers."""
        return config.listed_window(layer)

    @classmethod
    def moe_config(cls, config: ModelConfig) -> MoEConfig:
        """The experts' shape."""
        clamp = ClampedSwiglu(config.number("swiglu_alpha"), config.positive("swiglu_limit"))
        routing = Routing(config.count("num_experts_per_tok"), "topk_softmax")
        return MoEConfig(config.count("num_local_experts"), config.intermediate_size, routing, clamp)

    def make_mlp(self, build: Build, prefix: str, layer: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """A mixture of experts."""
        config = self.moe_config(build.config)
        router = ExpertRouter(build, f"{prefix}.router", config.routing, bias=True)
        return MoE(build, f"{prefix}.experts", config, router, _experts(build, f"{prefix}.experts", config))

    @classmethod
    def attention_shapes(cls, config: ModelConfig) -> dict[str, Shape]:
        """Llama's tensors and the sinks."""
        return super().attention_shapes(config) | {"self_attn.sinks": (config.num_attention_heads,)}

    @classmethod
    def mlp_shapes(cls, config: ModelConfig, layer: int) -> dict[str, Shape]:
        """Name and shape of every tensor of a layer's mixture; all experts of a projection are one tensor."""
        moe, hidden = cls.moe_config(config), config.hidden_size
        return {
            "mlp.router.weight": (moe.num_experts, hidden),
            "mlp.router.bias": (moe.num_experts,),
            "mlp.experts.gate_up_proj": (moe.num_experts, hidden, 2 * moe.inner),
            "mlp.experts.gate_up_proj_bias": (moe.num_experts, 2 * moe.inner),
            "mlp.experts.down_proj": (moe.num_experts, moe.inner, hidden),
            "mlp.experts.down_proj_bias": (moe.num_experts, hidden),
        }


def _experts(build: Build, prefix: str, config: MoEConfig) -> Iterator[ExpertWeights]:
    """This rank's share, one expert at a time: weights stand [inputs, outputs], gates and ups alternate."""
    share = ExpertShare.of(build.shard, config)
    both = times(share.inner, 2)
    adds_down_bias = build.shard.expert_parallel or build.shard.rank == 0
    gate_ups = [MatrixPart(f"{prefix}.gate_up_proj", both, WHOLE, expert, transposed=True) for expert in share.ids]
    downs = [MatrixPart(f"{prefix}.down_proj", WHOLE, share.inner, expert, transposed=True) for expert in share.ids]
    gate_ups_stay = stay_quantized(build, [[part] for part in gate_ups])
    downs_stay = stay_quantized(build, [[part] for part in downs])
    for gate_up, down in zip(gate_ups, downs, strict=True):
        one = slice(gate_up.expert, gate_up.expert + 1)
        gate_up_bias = build.weights.take(f"{prefix}.gate_up_proj_bias", rows=one, columns=both, dtype=build.dtype)[0]
        down_bias = (
            build.weights.take(f"{prefix}.down_proj_bias", rows=one, dtype=build.dtype)[0] if adds_down_bias else None
        )
        yield ExpertWeights(
            gate_up=_gates_then_ups(_weight(build, gate_up, gate_ups_stay)),
            down=_weight(build, down, downs_stay),
            gate_up_bias=torch.cat((gate_up_bias[0::2], gate_up_bias[1::2])),
            down_bias=down_bias,
        )


def _weight(build: Build, part: MatrixPart, stays: bool) -> AnyWeight:
    """[N, K] of one expert, as it is stored if it `stays`, else in the model's dtype."""
    if stays:
        return build.weights.take_quantized(part)
    one = slice(part.expert, part.expert + 1)
    return build.weights.take(part.name, rows=one, middle=part.columns, columns=part.rows, dtype=build.dtype)[0].t()


def _gates_then_ups(weight: AnyWeight) -> AnyWeight:
    if isinstance(weight, QuantizedWeight):
        return selected_rows(weight, slice(0, None, 2), slice(1, None, 2))
    if isinstance(weight, GroupedWeight):
        return joined([row_part(weight, slice(first, None, 2)) for first in (0, 1)])
    assert isinstance(weight, torch.Tensor)
    # As it lies in memory, [K, N]: rows of a transposed view are copied number by number.
    stored = weight.t()
    return torch.cat((stored[:, 0::2], stored[:, 1::2]), dim=1).t()
