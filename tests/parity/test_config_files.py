"""The worker reads any spelling of config.json as `transformers` does, or refuses it.

The reference is `AutoConfig.from_pretrained` of the same folder, and the rotary frequencies of its models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tests.checkpoints import ARCHITECTURES, DEFAULT_SHAPE, make_checkpoint
from tests.parity.published_configs import PUBLISHED
from tests.parity.published_others import REFUSED, SERVED
from tests.parity.test_models import close, load_models
from worker.config import transformers_config
from worker.config.model_config import FULL_ATTENTION, SLIDING_ATTENTION, ModelConfig, ModelError, RopeConfig
from worker.model.architectures import model_class
from worker.model.layers.rotary import inverse_frequencies
from worker.model.models.llama import LlamaForCausalLM

SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "tie_word_embeddings",
)
# Settings of some architectures only, under the names that their models read.
OWN = (
    "num_experts_per_tok",
    "norm_topk_prob",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "moe_intermediate_size",
    "n_shared_experts",
    "first_k_dense_replace",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "rope_interleave",
    "index_topk",
    "mlp_layer_types",
    "swiglu_limit",
    "swiglu_alpha",
    "use_qk_norm",
    "qkv_bias",
    "shared_expert_intermediate_size",
    "no_rope_layers",
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "decoder_sparse_step",
    "mlp_only_layers",
    "num_nextn_predict_layers",
    "hidden_activation",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)
EXPERTS = ("num_local_experts", "n_routed_experts")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPES: list[dict[str, Any] | None] = [
    None,
    {},
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "linear", "type": "dynamic", "factor": 3.0, "rope_theta": 7000.0},
    YARN,
    YARN | {"type": "linear", "attention_factor": 1.5},
    {"type": "yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 20, "truncate": False},
    {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 128},
    LLAMA3,
    LLAMA3 | {"original_max_position_embeddings": None},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
    {"type": "longrope", "short_factor": [1.5] * 8, "long_factor": [1.0 + i for i in range(8)]},
    {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
]
# Entries of all architectures, with values found in files.
SPELLINGS: dict[str, list[Any]] = {
    "rope_scaling": ROPES,
    "rope_parameters": ROPES,
    "rope_theta": [5e5, 10_000, 1],
    "partial_rotary_factor": [0.5, 1.0],
    "original_max_position_embeddings": [256],
    "max_position_embeddings": [512],
    "num_key_value_heads": [None, 2, 4],
    "head_dim": [None, 16, 24],
    "rms_norm_eps": [1e-5, 1],
    "hidden_act": ["silu"],
    "attention_bias": [True, False],
    "mlp_bias": [False],
    "tie_word_embeddings": [True, False],
    "dtype": [None, "float16"],
    "torch_dtype": ["bfloat16"],
    "use_sliding_window": [True, False],
    "sliding_window": [None, 40],
    "max_window_layers": [0, 2],
    "layer_types": [
        ["full_attention"] * 3,
        ["sliding_attention", "full_attention", "sliding_attention"],
        ["full_attention"],
        ["deepseek_sparse_attention"] * 3,
    ],
    "num_experts": [6],
    "num_local_experts": [8],
    "n_routed_experts": [16],
    "num_experts_per_tok": [2],
    "n_group": [None, 1, 4],
    "topk_group": [1, 2],
    "norm_topk_prob": [None, True, False],
    "routed_scaling_factor": [1, 2.5],
    "n_shared_experts": [2],
    "first_k_dense_replace": [0, 2],
    "mlp_layer_types": [["dense", "sparse", "sparse"]],
    "num_nextn_predict_layers": [0, 2],
    "num_mtp_layers": [1],
    "q_lora_rank": [None, 24],
    "qk_rope_head_dim": [16],
    "decoder_sparse_step": [2],
    "mlp_only_layers": [None, [1]],
    "use_qk_norm": [True],
    "qkv_bias": [True, False],
    "shared_expert_intermediate_size": [0, 24],
    "swiglu_limit": [5, 7.0],
    "no_rope_layers": [None, [0, 1, 1], [1], [1, 1, 2]],
    "no_rope_layer_interval": [2],
    "logits_scaling": [3.0, 0],
    "rope_local_base_freq": [2000.0],
    "sliding_window_pattern": [2],
    "query_pre_attn_scalar": [16],
    "attn_logit_softcapping": [None, 20.0],
    "final_logit_softcapping": [None, 20.0],
    "use_bidirectional_attention": [False],
    "output_attentions": [False],
    "temperature": [0.5],
}
SHAPE = {
    name: DEFAULT_SHAPE[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
}


@st.composite
def files(draw: st.DrawFn) -> dict[str, Any]:
    """A config.json with entries in any spelling and order."""
    name = draw(st.sampled_from(sorted(ARCHITECTURES)))
    keys = draw(st.lists(st.sampled_from(list(SPELLINGS)), unique=True, max_size=7))
    given = {key: draw(st.sampled_from(SPELLINGS[key])) for key in keys}
    return {
        "architectures": [f"{ARCHITECTURES[name][0]}ForCausalLM"],
        "model_type": name,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        **SHAPE,
        **given,
    }


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=100)
@given(files())
def test_any_spelling_is_read_as_in_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    """Entries under two names, in two places, null, or absent."""
    outcome = compare(tmp_path, config)
    assert "\n" not in outcome
    event(outcome.partition(":")[0])


@pytest.mark.parametrize("name", [*PUBLISHED, *SERVED])
def test_published_file_is_read_as_in_transformers(tmp_path: Path, name: str) -> None:
    assert compare(tmp_path, {**PUBLISHED, **SERVED}[name]) == "equal"


@pytest.mark.parametrize("name", list(REFUSED))
def test_published_file_is_refused_with_a_reason(tmp_path: Path, name: str) -> None:
    config, reason = REFUSED[name]
    outcome = compare(tmp_path, config)
    assert outcome.startswith("refused: ")
    assert reason in outcome
    assert "\n" not in outcome


@pytest.mark.parametrize("name", ["Kimi-K2", "Kimi-K2-Thinking"])
def test_kimi_k2_is_read_as_deepseek_v3(tmp_path: Path, name: str) -> None:
    """Its published file names another model type; its architecture is DeepSeek-V3's."""
    read = []
    for model_type in ("deepseek_v3", "kimi_k2"):
        config = {**PUBLISHED, **SERVED}[name] | {"model_type": model_type}
        (tmp_path / "config.json").write_text(json.dumps(config))
        read.append(ModelConfig.from_folder(tmp_path))
    assert read[0] == read[1]
    assert read[0].architecture == "DeepseekV3ForCausalLM"
    # K2-Thinking's experts alone are stored in codes.
    quantized = read[0].quant_config.of_layer("model.layers.3.mlp.experts.7.up_proj").quant_type
    assert quantized == ("per_1x32" if name == "Kimi-K2-Thinking" else "no")
    for layer in ("model.layers.0.mlp.up_proj", "model.layers.3.mlp.shared_experts.up_proj", "lm_head"):
        assert read[0].quant_config.of_layer(layer).quant_type == "no"


@pytest.mark.parametrize("name", [name for name in PUBLISHED if "saved" in name or "-4.5" in name])
def test_settings_sent_as_json_equal_those_read_from_folder(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank receives the settings as JSON, so it need not import `transformers`."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    config = ModelConfig.from_folder(tmp_path)
    sent = json.dumps(config.source)
    monkeypatch.delattr(transformers_config, "_config_classes")
    crossed = ModelConfig.from_folder(tmp_path, settings=json.loads(sent))
    assert crossed == config
    assert crossed.source == config.source


@pytest.mark.each_value
@pytest.mark.parametrize("scaling", ROPES)
@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_rope_in_both_spellings_equals_transformers(
    tmp_path: Path, architecture: str, scaling: dict[str, Any] | None
) -> None:
    """Former fault: `rope_scaling` beside `rope_parameters` changed the numbers of transformers, but not ours."""
    shape = {**DEFAULT_SHAPE, **ARCHITECTURES[architecture][1]}
    named = {"architectures": [f"{ARCHITECTURES[architecture][0]}ForCausalLM"], "model_type": architecture}
    for parameters in ROPES:
        compare(tmp_path, {**shape, **named, "rope_scaling": scaling, "rope_parameters": parameters})


def compare(folder: Path, config: dict[str, Any]) -> str:
    """Compares both readings of a file; `equal`, or the refusal by the worker or by `transformers`."""
    from transformers import AutoConfig

    (folder / "config.json").write_text(json.dumps(config))
    try:
        own = ModelConfig.from_folder(folder)
        architecture: Any = model_class(own.architecture)
        shapes = architecture.tensor_shapes(own)
    except ModelError as error:
        return f"refused: {error}"
    try:
        whole: Any = AutoConfig.from_pretrained(folder)
    except Exception as error:
        return f"refused by transformers: {type(error).__name__}"
    reference: Any = whole.get_text_config()
    assert {key: getattr(own, key) for key in SIZES} == {key: getattr(reference, key) for key in SIZES}
    assert own.dtype == str(whole.dtype or reference.dtype or "float32").removeprefix("torch.")
    if getattr(reference, "head_dim", None) is None:
        # Mixtral; without head_dim the scaled rope of transformers fails.
        reference.head_dim = reference.hidden_size // reference.num_attention_heads
    assert own.head_dim == reference.head_dim
    for key in (*OWN, *EXPERTS):
        if hasattr(reference, key):
            assert own.source.get(key) == getattr(reference, key), key
    if hasattr(reference, "qk_rope_head_dim"):
        # The model of transformers fails if head_dim differs from it.
        reference.head_dim = reference.qk_rope_head_dim
    if own.local_rope is None:
        compare_rope(own.rope, own.head_dim, reference)
    else:
        compare_rope(own.rope, own.head_dim, reference, FULL_ATTENTION)
        compare_rope(own.local_rope, own.head_dim, reference, SLIDING_ATTENTION)
    if issubclass(architecture, LlamaForCausalLM):
        windows = [architecture.window(own, layer) for layer in range(own.num_hidden_layers)]
        assert windows == [reference_window(reference, layer) for layer in range(own.num_hidden_layers)]
    experts = {name.split(".experts.")[1].split(".")[0] for name in shapes if ".experts." in name} - {""}
    numbered = {name for name in experts if name.isdigit()}
    if numbered:
        # Qwen2-MoE's class keeps entries with the others' names as they are.
        names = ("num_experts",) if reference.model_type == "qwen2_moe" else EXPERTS
        assert len(numbered) == next(getattr(reference, key) for key in names if hasattr(reference, key))
    return "equal"


def compare_rope(own: RopeConfig, head_dim: int, config: Any, layer_type: str | None = None) -> None:
    """Compares the rotary embedding of all layers, or of the layers of a type."""
    frequencies, attention_factor = reference_rope(config, layer_type)
    assert own.attention_factor == pytest.approx(attention_factor, rel=1e-12)
    rotated = getattr(config, "qk_rope_head_dim", head_dim)
    torch.testing.assert_close(inverse_frequencies(own, rotated), frequencies, rtol=1e-6, atol=0.0)


def reference_rope(config: Any, layer_type: str | None = None) -> tuple[torch.Tensor, float]:
    """Frequencies and attention factor of the `transformers` model of a config, or of its layers of a type."""
    from transformers import AutoModel
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters
    kind = (parameters[layer_type] if layer_type else parameters)["rope_type"]
    if kind != "default":
        made = ROPE_INIT_FUNCTIONS[kind](config, layer_type=layer_type)
        return made[0], float(made[1])
    module = __import__(AutoModel._model_mapping[type(config)].__module__, fromlist=["x"])
    compute = "compute_default_rope_parameters"
    rotary = next(
        one for name, one in vars(module).items() if name.endswith("RotaryEmbedding") and hasattr(one, compute)
    )
    frequencies, factor = rotary.compute_default_rope_parameters(config, layer_type=layer_type)
    return frequencies, float(factor)


def reference_window(config: Any, layer: int) -> int | None:
    """Sliding window of a layer of the `transformers` model; None without one."""
    if config.model_type in ("qwen2", "qwen2_moe", "qwen3", "gpt_oss", "smollm3"):
        slides = config.layer_types[layer] == "sliding_attention" and getattr(config, "use_sliding_window", True)
        return config.sliding_window if slides else None
    if config.model_type in ("gemma2", "gemma3_text", "olmo3"):
        return config.sliding_window if config.layer_types[layer] == "sliding_attention" else None
    return config.sliding_window if config.model_type in ("mistral", "mixtral", "qwen3_moe", "phi3") else None


@pytest.mark.parametrize(
    ("architecture", "entries", "message"),
    [
        (
            "deepseek_v2",
            {"topk_method": "noaux_tc"},
            "topk_method is 'noaux_tc'; supported: greedy, group_limited_greedy",
        ),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True; supported: false"),
        (
            "mistral",
            {"sliding_window": 9, "layer_types": ["full_attention"] * 3},
            "layer_types with full_attention beside",
        ),
        (
            "mistral",
            {"sliding_window": 9, "layer_types": ["chunked_attention"] * 3},
            "layer_types with chunked_attention beside",
        ),
        ("smollm3", {"no_rope_layers": [1, 0]}, "a list has fewer entries than there are layers"),
        ("smollm3", {"no_rope_layers": [1, 2, 0]}, "no_rope_layers must list 0 or 1 for each of 3 layers"),
        ("granite", {"logits_scaling": 0}, "logits_scaling is 0.0; it must be a number above 0"),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "must list"),
        (
            "phi3",
            {"rope_scaling": {"type": "longrope", "short_factor": 1.0, "long_factor": [1.0]}},
            "must be a list of",
        ),
        (
            "phi3",
            {"rope_scaling": {"type": "longrope", "short_factor": [0.0], "long_factor": [1.0]}},
            r"short_factor\[0\]",
        ),
    ],
)
def test_settings_that_no_reading_serves_are_refused(
    tmp_path: Path, architecture: str, entries: dict[str, Any], message: str
) -> None:
    shape = {**DEFAULT_SHAPE, **ARCHITECTURES[architecture][1], "original_max_position_embeddings": 64, **entries}
    named = {"architectures": [f"{ARCHITECTURES[architecture][0]}ForCausalLM"], "model_type": architecture}
    (tmp_path / "config.json").write_text(json.dumps(shape | named))
    with pytest.raises(ModelError, match=message) as refusal:
        model_class(f"{ARCHITECTURES[architecture][0]}ForCausalLM").tensor_shapes(ModelConfig.from_folder(tmp_path))
    assert "\n" not in str(refusal.value)


# Changes of a saved config.json that the worker once read as other settings.
EDITS: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn beside the default": ("qwen3", {"rope_scaling": YARN}),
    "yarn up to twice its config's length": ("qwen3", {"rope_scaling": YARN, "max_position_embeddings": 65}),
    "llama3 beside the default": ("llama", {"rope_scaling": LLAMA3}),
    "linear beside yarn": ("gpt_oss", {"rope_scaling": {"type": "linear", "factor": 3.0}}),
    "original length outside of llama3": (
        "llama",
        {"rope_scaling": LLAMA3, "original_max_position_embeddings": 300},
    ),
    "experts under two names": ("qwen3_moe", {"num_local_experts": 7, "num_experts": 7}),
    "theta at two places": ("mixtral", {"rope_theta": 77.0}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name.startswith("yarn") else pytest.mark.slow) for name in EDITS]
)
def test_logits_with_two_spellings_equal_transformers(tmp_path: Path, name: str) -> None:
    """Former fault: log-probabilities differed by up to 7.7."""
    architecture, changes = EDITS[name]
    folder = make_checkpoint(tmp_path, architecture, tokenizer=False)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    models = load_models(folder)
    prompt = models.random_prompts([130], seed=1)[0]
    close(models.logits(prompt, 0), models.reference.logits(prompt)[-1])
