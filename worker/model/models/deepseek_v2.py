"""DeepseekV2ForCausalLM (arXiv:2405.04434): DeepSeek-V3's decoder whose experts are chosen by softmax."""

from __future__ import annotations

from typing_extensions import override

from kernels.interface import Routing
from worker.config.model_config import ModelConfig, ModelError
from worker.model.layers.moe import MoEConfig
from worker.model.models.deepseek_v3 import DeepseekV3ForCausalLM


class DeepseekV2ForCausalLM(DeepseekV3ForCausalLM):
    """DeepSeek-V2 and Coder-V2, large and Lite. The large ones choose groups first, by their best expert."""

    corrects = False

    @classmethod
    @override
    def moe_config(cls, config: ModelConfig) -> MoEConfig:
        supported = {
            "topk_method": ("greedy", "group_limited_greedy"),
            "scoring_func": ("softmax",),
            "norm_topk_prob": (False,),
        }
        for key, values in supported.items():
            if (found := config.source.get(key, values[0])) not in values:
                wanted = ", ".join("false" if value is False else str(value) for value in values)
                raise ModelError(f"config.json: {key} is {found!r}; supported: {wanted}")
        is_grouped = config.source.get("topk_method") == "group_limited_greedy"
        routing = Routing(
            config.count("num_experts_per_tok"),
            num_groups=config.count("n_group") if is_grouped else 1,
            top_groups=config.count("topk_group") if is_grouped else 1,
            group_best=1,
            scale=config.number("routed_scaling_factor"),
        )
        return MoEConfig(config.count("n_routed_experts"), config.count("moe_intermediate_size"), routing)
