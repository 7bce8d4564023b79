"""DeepseekV2ForCausalLM (arXiv:2405.04434): DeepSeek-V3's decoder whose experts are chosen by softmax, from all."""

from __future__ import annotations

from typing_extensions import override

from kernels.interface import Routing
from worker.config.model_config import ModelConfig, ModelError
from worker.model.layers.moe import MoEConfig
from worker.model.models.deepseek_v3 import DeepseekV3ForCausalLM


class DeepseekV2ForCausalLM(DeepseekV3ForCausalLM):
    """DeepSeek-V2-Lite and Coder-V2-Lite. The large V2 chooses groups first, by their best expert."""

    corrects = False

    @classmethod
    @override
    def moe_config(cls, config: ModelConfig) -> MoEConfig:
        supported = {"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False}
        for key, value in supported.items():
            if config.source.get(key, value) != value:
                wanted = str(value).lower() if isinstance(value, bool) else value
                raise ModelError(f"config.json: {key} is {config.source[key]!r}; supported: {wanted}")
        routing = Routing(config.count("num_experts_per_tok"), scale=config.number("routed_scaling_factor"))
        return MoEConfig(config.count("n_routed_experts"), config.count("moe_intermediate_size"), routing)
