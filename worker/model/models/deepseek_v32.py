"""DeepseekV32ForCausalLM (arXiv:2512.02556): DeepSeek-V3 whose rows attend to the tokens that an indexer selects."""

from __future__ import annotations

from worker.config.model_config import ModelConfig, ModelError
from worker.model.models.deepseek_v3 import DeepseekV3ForCausalLM


class DeepseekV32ForCausalLM(DeepseekV3ForCausalLM):
    """DeepSeek-V3.2. Up to `index_topk` tokens of context its attention is that of DeepSeek-V3."""

    indexer = True
    layer_type = "indexed_attention"

    @classmethod
    def sparse(cls, config: ModelConfig, layer: int) -> bool:
        """True if `mlp_layer_types` makes the layer a mixture of experts."""
        # Checked although types are given: the config class derives them from this entry if config.json has none.
        config.count("first_k_dense_replace", least=0)
        types = config.listed("mlp_layer_types", str) or []
        if len(types) < config.num_hidden_layers or set(types) - {"dense", "sparse"}:
            raise ModelError("config.json: mlp_layer_types must say dense or sparse for each layer")
        # MTP layers, behind the others, are of the last one's kind.
        return bool(types[min(layer, config.num_hidden_layers - 1)] == "sparse")
