"""The architectures that can be served. Adding one takes a file in worker/model/models and a line here."""

from __future__ import annotations

from typing import Final

from common.wire.heads import CLASSIFIER, NO_HEAD, OUTPUT_HEAD, Head

# `architectures` entry of config.json -> module:class. Names, so that PyTorch is not needed to read them.
support_model_arch_dict: dict[str, str] = {
    "Qwen2ForCausalLM": "worker.model.models.qwen2:Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM": "worker.model.models.qwen2_moe:Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM": "worker.model.models.qwen3:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "worker.model.models.qwen3_moe:Qwen3MoeForCausalLM",
    "LlamaForCausalLM": "worker.model.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "worker.model.models.mistral:MistralForCausalLM",
    "Phi3ForCausalLM": "worker.model.models.phi3:Phi3ForCausalLM",
    "GraniteForCausalLM": "worker.model.models.granite:GraniteForCausalLM",
    "GraniteMoeForCausalLM": "worker.model.models.granitemoe:GraniteMoeForCausalLM",
    "SmolLM3ForCausalLM": "worker.model.models.smollm3:SmolLM3ForCausalLM",
    "MixtralForCausalLM": "worker.model.models.mixtral:MixtralForCausalLM",
    "Gemma2ForCausalLM": "worker.model.models.gemma2:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "worker.model.models.gemma3_text:Gemma3ForCausalLM",
    "Olmo2ForCausalLM": "worker.model.models.olmo2:Olmo2ForCausalLM",
    "Olmo3ForCausalLM": "worker.model.models.olmo3:Olmo3ForCausalLM",
    "GptOssForCausalLM": "worker.model.models.gpt_oss:GptOssForCausalLM",
    "Glm4MoeForCausalLM": "worker.model.models.glm4_moe:Glm4MoeForCausalLM",
    "DeepseekV2ForCausalLM": "worker.model.models.deepseek_v2:DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM": "worker.model.models.deepseek_v3:DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM": "worker.model.models.deepseek_v32:DeepseekV32ForCausalLM",
}

# Multimodal architectures of which the text part is served -> architecture and `model_type` of that part.
text_part_arch_dict: dict[str, tuple[str, str]] = {
    "Gemma3ForConditionalGeneration": ("Gemma3ForCausalLM", "gemma3_text"),
    "Mistral3ForConditionalGeneration": ("MistralForCausalLM", "mistral"),
    "Qwen3VLForConditionalGeneration": ("Qwen3ForCausalLM", "qwen3_vl_text"),
}
_LINEAR: Final = "layers of linear attention keep a state for each sequence, which blocks of the KV cache cannot hold"
# Architectures that people ask for and that cannot be served -> why.
refused_arch_dict: dict[str, str] = {
    "Qwen3NextForCausalLM": _LINEAR,
    "KimiLinearForCausalLM": _LINEAR,
    "GraniteMoeHybridForCausalLM": _LINEAR,
    "Llama4ForCausalLM": "its layers attend in chunks, and experts take their input times its weight",
    "Llama4ForConditionalGeneration": "its layers attend in chunks, and experts take their input times its weight",
}

_GENERATES: Final = "ForCausalLM"
# Name endings of the same decoders with a head that does not generate.
_OTHER_HEADS: Final[dict[str, Head]] = {"Model": NO_HEAD, "ForSequenceClassification": CLASSIFIER}
# `transformers` names the text part of a multimodal model so, where it generates nothing: `Gemma3TextModel`.
_TEXT: Final = "Text"
# The same for draft heads, which only draft for another model.
draft_head_arch_dict: dict[str, str] = {
    "LlamaForCausalLMEagle3": "worker.model.models.eagle3:Eagle3Head",
}


def parted(architecture: str) -> tuple[str, Head]:
    """Splits an architecture's name into the name of its generating decoder and its head.

    `Qwen3Model` and `Qwen3ForSequenceClassification` give `Qwen3ForCausalLM`. An unknown name is returned as it is,
    with the output head.
    """
    for end, head in _OTHER_HEADS.items():
        decoder = architecture.removesuffix(end).removesuffix(_TEXT) + _GENERATES
        if architecture.endswith(end) and decoder in support_model_arch_dict:
            return decoder, head
    return architecture, OUTPUT_HEAD


def model_type(decoder: str) -> str:
    """`model_type` of a decoder in `transformers`; the module of its class here has the same name."""
    return support_model_arch_dict[decoder].partition(":")[0].rpartition(".")[2]
