from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from common.hub import default_model_name, hub_model
from common.params.sampling_params import SamplingParams
from common.wire.heads import CLASSIFIER, NO_HEAD, OUTPUT_HEAD
from tests.hostile_models import nested
from worker.config.model_config import ModelConfig, ModelError, RopeConfig
from worker.config.stored_names import stored_names
from worker.model.architectures import model_class

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "rope_theta": 500000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 4}
QWEN3_MOE = {**QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "moe_intermediate_size": 16}
GLM4 = {
    **QWEN3,
    "architectures": ["Glm4MoeForCausalLM"],
    "n_routed_experts": 8,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
}
GEMMA3 = {**QWEN3, "architectures": ["Gemma3ForCausalLM"], "sliding_window": 64}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
GPT_OSS = {**QWEN3, "architectures": ["GptOssForCausalLM"], "num_local_experts": 8}


def write(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> Path:
    config = {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_defaults_of_an_older_checkpoint(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(write(tmp_path))
    assert config.architecture == "LlamaForCausalLM"
    assert (config.num_key_value_heads, config.head_dim) == (4, 16)
    assert config.rope == RopeConfig(500000.0)
    assert config.dtype == "bfloat16"
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (False, False, False)
    assert config.sampling_defaults == SamplingParams()


@pytest.mark.parametrize(
    ("changes", "head", "num_labels"),
    [
        ({"architectures": ["LlamaModel"], "tie_word_embeddings": True}, NO_HEAD, 0),
        ({"architectures": ["LlamaForCausalLM"], "num_labels": 3}, OUTPUT_HEAD, 0),
        ({"architectures": ["LlamaForSequenceClassification"]}, CLASSIFIER, 2),
        ({"architectures": ["LlamaForSequenceClassification"], "num_labels": 3}, CLASSIFIER, 3),
        ({"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}, CLASSIFIER, 1),
    ],
)
def test_architecture_selects_head(tmp_path: Path, changes: dict[str, Any], head: str, num_labels: int) -> None:
    config = ModelConfig.from_folder(write(tmp_path, **changes))
    assert (config.head, config.num_labels, config.generates) == (head, num_labels, head == OUTPUT_HEAD)
    assert (config.architecture, config.tie_word_embeddings) == (changes["architectures"][0], False)


def test_related_architecture_has_decoder_defaults(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"head_dim": None, "max_position_embeddings": None, "num_key_value_heads": 4}
    configs = [
        ModelConfig.from_folder(write(tmp_path, architectures=[f"Qwen3{end}"], **changes))
        for end in ("ForCausalLM", "Model", "ForSequenceClassification")
    ]
    assert {(config.head_dim, config.max_position_embeddings) for config in configs} == {(128, 32768)}
    with pytest.raises(ModelError, match=r"BertModel; supported: Qwen2ForCausalLM, .* and the same with Model or"):
        ModelConfig.from_folder(write(tmp_path, architectures=["BertModel"]))


@pytest.mark.parametrize(
    ("names", "tied", "generates"),
    [
        (["embed_tokens.weight", "norm.weight"], False, False),
        (["embed_tokens.weight", "norm.weight"], True, True),
        (["embed_tokens.weight", "lm_head.weight"], False, True),
        # What is missing there is an error when it is loaded.
        (["model.embed_tokens.weight"], False, True),
        ([], False, True),
    ],
)
def test_decoder_without_head_tensor_does_not_generate(
    tmp_path: Path, names: list[str], tied: bool, generates: bool
) -> None:
    write(tmp_path, tie_word_embeddings=tied)
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "model.safetensors")
    assert ModelConfig.from_folder(tmp_path).generates == generates
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors")})
    )
    assert ModelConfig.from_folder(tmp_path).generates == generates


def test_unreadable_files_fail_at_load(tmp_path: Path) -> None:
    for content in (b"", b"\xff" * 20, b"\x02\0\0\0\0\0\0\0{]", b"\x02\0\0\0\0\0\0\0[]"):
        (tmp_path / "model.safetensors").write_bytes(content)
        assert stored_names(tmp_path) == frozenset()


def test_generation_config_names_bos_and_sampling_and_both_files_name_ends(tmp_path: Path) -> None:
    generation = {"eos_token_id": [7, 8], "bos_token_id": None, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    config = ModelConfig.from_folder(write(tmp_path, generation))
    assert (config.bos_token_id, config.eos_token_ids) == (1, (7, 8, 2))
    assert config.sampling_defaults == SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
    assert ModelConfig.from_folder(write(tmp_path, {"eos_token_id": 2, "bos_token_id": 3})).bos_token_id == 3
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (2,)
    # The config class defaults to the first Llama's ids, which name other tokens in later models.
    config = ModelConfig.from_folder(write(tmp_path, {}, eos_token_id=None, bos_token_id=None))
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())


def test_rope_spellings(tmp_path: Path) -> None:
    old = write(tmp_path, rope_scaling={"type": "linear", "factor": 2.0})
    assert ModelConfig.from_folder(old).rope == RopeConfig(500000.0, "linear", 2.0)
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    new = write(tmp_path, rope_theta=None, rope_parameters=parameters)
    assert ModelConfig.from_folder(new).rope == RopeConfig(10000.0, "llama3", 8.0, 1.0, 4.0, 256)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["FalconForCausalLM"]},
            "not supported: FalconForCausalLM; supported: ",
        ),
        ({"architectures": None}, "architecture not supported: none named"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
            "rope scaling 'dynamic' is not supported; supported: def",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method 'hqq' is not supported; supported: fp8"),
        ({"quantization_config": {"quant_method": "quark"}}, "'global_quant_config' is missing"),
        ({"torch_dtype": "float64"}, "dtype 'float64' is not supported"),
        ({"vocab_size": "many"}, "vocab_size is 'many'; it must be a whole number"),
        ({"vocab_size": 0}, "vocab_size is 0; it must be a positive integer"),
        ({**QWEN3_MOE, "norm_topk_prob": 1}, "norm_topk_prob is 1; it must be true or false"),
        ({**GLM4, "routed_scaling_factor": "2"}, "routed_scaling_factor is '2'; it must be a number"),
        ({"head_dim": 1.5}, "head_dim is 1.5; it must be a whole number or null"),
        ({"attention_bias": "no"}, "attention_bias is 'no'; it must be true or false"),
        ({"rope_scaling": [1]}, "rope_scaling is [1]; it must be an object"),
        ({"rope_parameters": "yarn"}, "rope_parameters is 'yarn'; it must be an object"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters differs by layer, which is not supported; give one for all layers",
        ),
        (
            {**GEMMA3, "rope_parameters": {"full_attention": {**YARN_ROPE, "truncate": False}}},
            "truncate of full_attention is False; it must be true",
        ),
        (
            {**GEMMA3, "rope_parameters": {"full_attention": 3, "sliding_attention": {"rope_type": "default"}}},
            "full_attention of rope_parameters is 3; it must be an object",
        ),
        ({"per_layer_config": {"0": {"hidden_size": 8}}}, "per_layer_config is not supported; leave it out"),
        ({"attribute_map": {"hidden_size": "vocab_size"}}, "attribute_map is not supported; leave it out"),
        (
            {"model_type": "mistral"},
            "model_type 'mistral' does not fit the architecture LlamaForCausalLM",
        ),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim 15, of which 15 are rotated: rotary embeddings need an even number"),
        ({"head_dim": 20, "partial_rotary_factor": 0.25}, "head_dim 20, of which 5 are rotated"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5; it must be above 0 and at most 1"),
    ],
)
def test_unsupported_config_error_is_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as error:
        ModelConfig.from_folder(write(tmp_path, **changes))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
        ({**GEMMA3, "hidden_activation": "silu"}, "hidden_activation 'silu' is not supported; supported: gelu_pyt"),
        ({**GEMMA3, "use_bidirectional_attention": True}, "use_bidirectional_attention is not supported for Gemma3F"),
        ({**GEMMA3, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported for Gemma3ForCausalLM"),
        ({**GEMMA3, "final_logit_softcapping": 0.0}, "final_logit_softcapping is 0.0; it must be a number above 0"),
        ({**GEMMA3, "sliding_window": 0}, "sliding_window is 0; it must be an integer of at least 1"),
        ({**GEMMA3, "query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0; it must be a number above 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported for LlamaForCausalLM"),
        ({"use_sliding_window": True}, "sliding window attention is not supported for LlamaForCausalLM"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "sliding window attention is not supported for LlamaForCausalLM",
        ),
        (
            {**QWEN3, "layer_types": ["full_attention", "sliding_attention"]},
            "layer_types has sliding_attention, but use_sliding_window is not true",
        ),
        (
            {**QWEN3, "layer_types": ["full_attention"]},
            "layer_types must list 2 layers",
        ),
        ({**QWEN3_MOE, "layer_types": ["full_attention"] * 2}, "layer_types is not supported for Qwen3MoeForCausalLM"),
        ({**QWEN3_MOE, "num_experts": 0}, "num_experts is 0; it must be an integer of at least 1"),
        ({**QWEN3_MOE, "num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than the 8 experts"),
        ({**QWEN3_MOE, "decoder_sparse_step": 0}, "decoder_sparse_step is 0; it must be an integer of at least 1"),
        ({**GLM4, "num_local_experts": "8"}, "n_routed_experts is '8'; it must be an integer of at least 1"),
        ({**GLM4, "scoring_func": "softmax"}, "scoring_func is 'softmax'; supported: sigmoid"),
        ({**GLM4, "n_group": 3}, "n_group 3 does not split 8 experts into equal groups of two or more"),
        ({**GLM4, "n_group": 8}, "n_group 8 does not split 8 experts into equal groups of two or more"),
        ({**GLM4, "n_group": 4, "num_experts_per_tok": 3}, "does not hold num_experts_per_tok 3"),
        ({**GLM4, "n_group": 4, "topk_group": 5}, "topk_group 5 of n_group 4 groups of 2 experts"),
        ({**GLM4, "use_sliding_window": True}, "sliding window attention is not supported for Glm4MoeForCausalLM"),
        ({**GPT_OSS, "layer_types": ["full_attention", "chunked"]}, "layer type 'chunked' is not supported"),
        ({**GPT_OSS, "attention_bias": False}, "attention_bias false is not supported"),
        ({**GPT_OSS, "num_local_experts": 10**9}, "a layer has 1000000000 experts; at most 2048"),
        # The native kernels read a limit of 0 as "no limit".
        ({**GPT_OSS, "swiglu_limit": 0.0}, "swiglu_limit is 0.0; it must be a number above 0"),
        ({**GPT_OSS, "swiglu_limit": -1}, "swiglu_limit is -1.0; it must be a number above 0"),
        ({**GPT_OSS, "swiglu_alpha": float("nan")}, "swiglu_alpha is nan; it must be a number"),
    ],
)
def test_unsupported_option_of_architecture_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    config = ModelConfig.from_folder(write(tmp_path, **changes))
    with pytest.raises(ModelError) as error:
        model_class(config.architecture).tensor_shapes(config)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_architecture_defaults_equal_transformers(tmp_path: Path) -> None:
    from transformers import Glm4MoeConfig, GptOssConfig, LlamaConfig, MixtralConfig, Qwen3Config, Qwen3MoeConfig

    for config_class in (LlamaConfig, Qwen3Config, Qwen3MoeConfig, MixtralConfig, Glm4MoeConfig, GptOssConfig):
        made: Any = config_class
        reference = made(rope_parameters={"rope_type": "default"})
        named = config_class.__name__.replace("Config", "ForCausalLM")
        folder = write(tmp_path, architectures=[named], rope_theta=None, rms_norm_eps=None, num_key_value_heads=4)
        config = ModelConfig.from_folder(folder)
        assert config.rms_norm_eps == reference.rms_norm_eps, named
        assert config.rope.theta == reference.rope_parameters["rope_theta"], named
        assert config.rope.partial_rotary_factor == reference.rope_parameters.get("partial_rotary_factor", 1.0), named
        assert config.attention_bias == reference.to_dict().get("attention_bias", False), named


def test_missing_and_malformed_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        ModelConfig.from_folder(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        ModelConfig.from_folder(tmp_path)
    for content in ("{", "[]", "\xff"):
        (tmp_path / "config.json").write_text(content, "latin-1")
        with pytest.raises(ModelError, match="download the checkpoint again"):
            ModelConfig.from_folder(tmp_path)


@pytest.fixture
def other_user() -> Iterator[None]:
    """A user without the rights of root."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    yield
    if is_root:
        os.seteuid(0)


def test_folder_of_another_user_is_refused_in_one_line(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = write(tmp_path)
    tmp_path.chmod(0)
    request.getfixturevalue("other_user")
    with pytest.raises(ModelError, match="cannot be read: Permission denied; change the path or its permissions"):
        ModelConfig.from_folder(folder)
    assert hub_model(str(folder)) is None
    assert default_model_name(str(folder)) == folder.name


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0; it must be a number above 0"),
        ({"rms_norm_eps": 0}, r"rms_norm_eps is 0\.0; it must be a number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; it must be a number above 0"),
        ({"rope_theta": 0}, "rope_theta is 0; it must be a number above 0"),
        ({"rope_theta": -3}, "rope_theta is -3; it must be a number above 0"),
        ({"rope_parameters": {"rope_theta": -3.0}}, "rope_theta is -3.0; it must be a number above 0"),
        ({"rope_scaling": {"type": "linear", "factor": 0.0}}, "factor is 0.0; it must be a number above 0"),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "factor is inf; it must be a number above 0"),
        ({"rope_parameters": LLAMA3 | {"factor": 0}}, "factor is 0; it must be a number above 0"),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, "low_freq_factor and high_freq_factor are both 1.0"),
        (
            {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 0}},
            "original_max_position_embeddings is 0; it must be a positive integer",
        ),
        ({"rope_parameters": YARN | {"factor": 0.0}}, "factor is 0.0; it must be a number above 0"),
        (
            {"rope_parameters": YARN | {"attention_factor": -1.0}},
            "attention_factor is -1.0; it must be a number above 0",
        ),
        (
            {"rope_parameters": YARN | {"original_max_position_embeddings": 0}},
            "original_max_position_embeddings is 0; it must be a positive integer",
        ),
        ({"rope_parameters": YARN | {"rope_theta": 1}}, "rope_theta is 1; it must be above 1 with yarn"),
        ({"rope_theta": 10**400}, "rope_theta is 1000.*; it must be a number above 0"),
        ({"head_dim": nested(700)}, "head_dim is nested too deeply|is not valid JSON: it is nested too deeply"),
        ({**QWEN3, "layer_types": [False, "x"]}, "layer_types is .*; it must be a list of names or null"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000.*; it must be a number"),
        ({**QWEN3_MOE, "num_experts": 2048, "num_hidden_layers": 1000}, "2048 experts in each layer are too many; at "),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers is 1000.*; it must be 1 to 1024"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be 1 to 1024"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be 1 to 2147483647"),
        ({"num_attention_heads": -8}, "num_attention_heads is -8; it must be 1 to 2147483647"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True; it must be a whole number"),
        ({"eos_token_id": ["a"]}, r"eos_token_id is \['a'\]; it must be a token id, or a list of them"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'; it must be a list of names"),
        ({"architectures": True}, "architectures is True; it must be a list of names"),
        ({"architectures": [["x"]], "text_config": {}}, r"architectures is \[\['x'\]\]; it must be a list of names"),
    ],
)
def test_invalid_config_value_error_is_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """Served NaN, counted as 1, ended in a traceback, or named no file."""
    with pytest.raises(ModelError, match=message) as raised:
        ModelConfig.from_folder(write(tmp_path, **changes))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "value", "valid"),
    [
        (str, 5, "names"),
        (str, "full", "names"),
        (str, [[1]], "names"),
        (int, True, "whole numbers"),
        (int, [True], "whole"),
    ],
)
def test_invalid_config_list_error_is_one_line(tmp_path: Path, kind: type[Any], value: Any, valid: str) -> None:
    """A TypeError with its traceback, of each architecture that reads one."""
    config = ModelConfig.from_folder(write(tmp_path, mlp_layer_types=value))
    with pytest.raises(ModelError, match=rf"config\.json: mlp_layer_types is .*; it must be a list of {valid}"):
        config.listed("mlp_layer_types", kind)
    assert config.listed("layer_types", kind) is None


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({}, 512),
        ({"rope_scaling": {"type": "linear", "factor": 2.5}}, 1280),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, 512),
        ({"rope_scaling": YARN}, 512),
        ({"rope_scaling": YARN | {"factor": 8.0}}, 1024),
        ({"rope_parameters": YARN | {"factor": 1e300}}, 2**31 - 1),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 2048),
        ({"rope_scaling": LLAMA3}, 512),
    ],
)
def test_longest_length_is_the_scaled_rope_length(tmp_path: Path, rope: dict[str, Any], longest: int) -> None:
    """As in vLLM, --max-model-len may be at most the original length times yarn's factor."""
    assert ModelConfig.from_folder(write(tmp_path, **rope)).longest_len == longest


def test_oversized_window_error_is_one_line(tmp_path: Path) -> None:
    """An OverflowError of the attention's own numbers, with its traceback."""
    config = ModelConfig.from_folder(write(tmp_path, sliding_window=10**30))
    with pytest.raises(ModelError, match=r"config\.json: sliding_window is 1000.*; it must be at most 2147483647"):
        config.count("sliding_window", 4096)
