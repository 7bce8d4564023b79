"""Small random checkpoints in the real Hugging Face layout, written by `transformers` itself.

`make_checkpoint(folder, architecture="qwen3", **shape)`, with one of ARCHITECTURES, or
`python -m tests.checkpoints OUT [key=value ...]`.

The weights are scaled so that greedy streams differ between prompts and do not loop; tests/parity asserts it. The rows
of the special ids give a logit of 0, so greedy decoding never meets an end-of-sequence id by chance.
"""

from __future__ import annotations

import argparse
import json
import math
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

from common.wire.heads import CLASSIFIER, NO_HEAD, OUTPUT_HEAD, Head
from tests.shapes import NAMED

SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
PAD_ID, BOS_ID, EOS_ID, IM_START_ID, IM_END_ID = range(len(SPECIAL_TOKENS))
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEFAULT_SHAPE: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}
LATENT_SHAPE: dict[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "num_nextn_predict_layers": 0,
}
# transformers' prefix of an architecture's classes, and what its configuration has beside or other than DEFAULT_SHAPE.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "phi3": ("Phi3", {}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.15,
            "residual_multiplier": 0.8,
            "logits_scaling": 6.0,
        },
    ),
    "granitemoe": (
        "GraniteMoe",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.15,
            "residual_multiplier": 0.8,
            "logits_scaling": 6.0,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 40,
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": True},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 80}),
    "gemma2": (
        "Gemma2",
        {
            "query_pre_attn_scalar": 16,
            "sliding_window": 40,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    "gemma3_text": ("Gemma3", {"query_pre_attn_scalar": 32, "sliding_window": 40, "sliding_window_pattern": 3}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": 40, "num_hidden_layers": 4}),
    "glm4_moe": (
        "Glm4Moe",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 64,
            "sliding_window": 40,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 256,
                "truncate": False,
            },
        },
    ),
    "deepseek_v2": ("DeepseekV2", {**LATENT_SHAPE, "q_lora_rank": None, "routed_scaling_factor": 1.5}),
    "deepseek_v3": ("DeepseekV3", LATENT_SHAPE),
    # With few index heads many scores are exactly 0, and which of them `transformers` takes changes with the length of
    # the context.
    "deepseek_v32": ("DeepseekV32", {**LATENT_SHAPE, "index_n_heads": 24, "index_head_dim": 16, "index_topk": 24}),
}
# Ends of the names of transformers' classes.
_CLASSES: dict[Head, str] = {OUTPUT_HEAD: "ForCausalLM", NO_HEAD: "Model", CLASSIFIER: "ForSequenceClassification"}
# How strongly a layer changes the residual stream; below about 2 tied checkpoints repeat their last token.
LAYER_GAIN = 3.0
# Weight of q_norm and k_norm; with 1 attention is almost even over a long prompt, and streams depend on the last token.
HEAD_NORM = 2.0

# Weight of Gemma's norms of what a layer adds to the residual stream, which starts with embeddings times 8.
POST_NORM = 8.0


def make_checkpoint(
    folder: Path | str,
    architecture: str = "qwen3",
    *,
    dtype: str = "float32",
    seed: int = 0,
    max_shard_size: str = "5GB",
    tokenizer: bool = True,
    chat_template: bool = True,
    generation: dict[str, Any] | None = None,
    head: Head = OUTPUT_HEAD,
    device: str = "cpu",
    gain: float = LAYER_GAIN,
    **shape: Any,
) -> Path:
    """Writes a checkpoint with random weights and a byte-level tokenizer of the same vocabulary.

    Args:
        folder: made if it is not there.
        architecture: one of ARCHITECTURES.
        dtype: `float32`, `bfloat16` or `float16`; weights are drawn in float32 and rounded.
        seed: of the weights.
        max_shard_size: as in `save_pretrained`; small values give sharded safetensors.
        tokenizer: whether to save the tokenizer beside the model.
        chat_template: whether the tokenizer has a (ChatML) chat template.
        generation: entries of generation_config.json over the defaults.
        head: what it makes of hidden states; a classifier has `num_labels` of the shape.
        device: where the weights are drawn: on a GPU those of a large model take seconds, and are other numbers.
        gain: how strongly a layer changes the residual stream; rounding errors grow with it.
        **shape: entries of config.json over the architecture's and DEFAULT_SHAPE.

    Returns:
        The folder.
    """
    import torch
    import transformers

    prefix, own_shape = ARCHITECTURES[architecture]
    end = _CLASSES[head]
    model_class: Any = getattr(transformers, f"{prefix}Text{end}", None) or getattr(transformers, prefix + end)
    config_class: Any = model_class.config_class
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    entries = {**DEFAULT_SHAPE, **own_shape, **shape}
    if "qk_rope_head_dim" in entries:
        entries["head_dim"] = entries["qk_rope_head_dim"]
    config = config_class(**entries)
    with torch.device(device):
        model = model_class(config).to(torch.float32)
    _draw_weights(model, seed, gain)
    defaults = {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, IM_END_ID], "pad_token_id": PAD_ID}
    generation_class: Any = transformers.GenerationConfig
    model.generation_config = generation_class(**{**defaults, **(generation or {})})
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    if tokenizer:
        write_tokenizer(folder, config.vocab_size, chat_template=chat_template)
    return folder


def make_mtp_checkpoint(folder: Path | str, architecture: str, **shape: Any) -> Path:
    """`make_checkpoint` of a model with one MTP layer, which is its last layer with what joins states and tokens.

    Its embedding is the model's, stored again; its head is its own.
    """
    from safetensors.torch import load_file, save_file

    count = shape.pop("num_hidden_layers", DEFAULT_SHAPE["num_hidden_layers"])
    folder = make_checkpoint(folder, architecture, num_hidden_layers=count + 1, tie_word_embeddings=False, **shape)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": count, "num_nextn_predict_layers": 1}
    config |= {key: config[key][:count] for key in ("layer_types", "mlp_layer_types") if config.get(key)}
    (folder / "config.json").write_text(json.dumps(config))
    hidden, embedding = config["hidden_size"], tensors["model.embed_tokens.weight"]
    drawn = _drawn(
        {
            "enorm.weight": (hidden,),
            "hnorm.weight": (hidden,),
            "eh_proj.weight": (hidden, 2 * hidden),
            "shared_head.norm.weight": (hidden,),
            "shared_head.head.weight": tuple(embedding.shape),
        },
        embedding.dtype,
    )
    own = {f"model.layers.{count}.{name}": tensor for name, tensor in drawn.items()}
    own[f"model.layers.{count}.embed_tokens.weight"] = embedding.clone()
    save_file(tensors | own, folder / "model.safetensors")
    return folder


def make_eagle3_head(folder: Path | str, target: Path, *, seed: int = 0, **entries: Any) -> Path:
    """Writes a random EAGLE-3 head for the model in `target`; `entries` of config.json over its shape."""
    import torch
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    own = json.loads((target / "config.json").read_text())
    keys = ("hidden_size", "vocab_size", "rms_norm_eps", "max_position_embeddings", "head_dim", "dtype")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "intermediate_size": 72,
        "rope_theta": 5000.0,
        "draft_vocab_size": own["vocab_size"] - 60,
        **{key: own[key] for key in keys},
        **entries,
    }
    (folder / "config.json").write_text(json.dumps(config))
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["draft_vocab_size"]
    queries, keys_width = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 3 * own["hidden_size"]),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys_width, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys_width, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, queries),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    tensors = _drawn(shapes, getattr(torch, config["dtype"]), seed)
    generator = torch.Generator().manual_seed(seed)
    drafted = torch.randperm(config["vocab_size"], generator=generator)[:vocab].sort().values
    tensors["d2t"] = drafted - torch.arange(vocab)
    tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill_(0, drafted, True)
    save_file(tensors, folder / "model.safetensors")
    return folder


def _drawn(shapes: dict[str, tuple[int, ...]], dtype: Any, seed: int = 1) -> dict[str, Any]:
    """Normal weights and norms around 1."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {
        name: (1 + 0.2 * one if one.dim() == 1 else one * LAYER_GAIN / math.sqrt(one.shape[1])).to(dtype)
        for name, one in drawn.items()
    }


def write_tokenizer(folder: Path | str, vocab_size: int, *, chat_template: bool = True) -> None:
    """Saves a byte-level BPE tokenizer with exactly `vocab_size` ids: special tokens, 256 bytes, pairs and
    triples of letters.

    Raises:
        ValueError: `vocab_size` is less than MIN_VOCAB_SIZE.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size is {vocab_size}; a byte-level tokenizer needs at least {MIN_VOCAB_SIZE}")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = _merges(vocab_size - MIN_VOCAB_SIZE)
    tokens = [*SPECIAL_TOKENS, *alphabet, *(a + b for a, b in merges)]
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast_class: Any = PreTrainedTokenizerFast
    fast = fast_class(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    if chat_template:
        fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def _merges(count: int) -> list[tuple[str, str]]:
    """Pairs of common letters, a space (`Ġ` in byte-level spelling) first among them; then pairs with a third one."""
    letters = "ĠetaoinshrdlucmfwypvbgkjqxzETAOINSHRDLUCMFWYPVBGKJQXZ0123456789.,!?"
    pairs = list(product(letters, letters))
    merges = list(islice(chain(pairs, ((a + b, c) for (a, b), c in product(pairs, letters))), count))
    if len(merges) < count:
        raise ValueError(f"at most {MIN_VOCAB_SIZE + len(merges)} ids can be made")
    return merges


def _draw_weights(model: Any, seed: int, gain: float = LAYER_GAIN) -> None:
    """Normal weights with std gain / sqrt(fan in), norms around a constant; output rows of special ids are zero.

    Tensors of all experts are [E, outputs, inputs], in gpt-oss [E, inputs, outputs].
    """
    import torch

    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)

    def normal(shape: torch.Size, std: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device) * std

    is_gemma = model.config.model_type.startswith("gemma")
    with torch.no_grad():
        corrections = ((n, b) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias"))
        for name, weight in (*model.named_parameters(), *corrections):
            if name.endswith("norm.weight"):
                mean = HEAD_NORM if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
                mean = POST_NORM if is_gemma and "post_" in name else mean
                # Gemma multiplies by 1 + weight.
                weight.copy_(mean - is_gemma + normal(weight.shape, 0.2))
            elif name.endswith(("bias", "sinks")):
                weight.copy_(normal(weight.shape, 0.3))
            elif "embed_tokens" in name or "lm_head" in name:
                weight.copy_(normal(weight.shape, 2.0 / math.sqrt(weight.shape[1])))
                weight[: len(SPECIAL_TOKENS)] = 0.0
            else:
                inputs = weight.shape[1 if model.config.model_type == "gpt_oss" else -1]
                weight.copy_(normal(weight.shape, gain / math.sqrt(inputs)))


def main() -> None:
    """`python -m tests.checkpoints OUT [--architecture llama] [--shape qwen3-8b] [hidden_size=256 ...]`."""
    parser = argparse.ArgumentParser(description="Writes a small random checkpoint with a byte-level tokenizer.")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--architecture", choices=tuple(ARCHITECTURES), default="qwen3")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shape", choices=tuple(NAMED), help="shape that the entries are added to")
    parser.add_argument("--device", default="cpu", help="where weights are drawn")
    parser.add_argument("entries", nargs="*", help="entries of config.json, as key=value with a JSON value")
    options = parser.parse_args()
    given = {key: json.loads(value) for key, _, value in (entry.partition("=") for entry in options.entries)}
    shape = NAMED.get(options.shape, {}) | given
    make_checkpoint(
        options.out, options.architecture, dtype=options.dtype, seed=options.seed, device=options.device, **shape
    )


if __name__ == "__main__":
    main()
