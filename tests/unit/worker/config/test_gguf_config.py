"""Settings from the metadata of GGUF files: values, and entries that are refused."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from common.params.sampling_params import model_defaults
from common.text.tokenizer import read_json
from kernels.interface import KernelBackend
from tests.checkpoints import make_checkpoint
from tests.gguf_files import GgufContent, convert, float_tensor
from worker.config.model_config import ModelConfig, ModelError
from worker.config.model_tokenizer import model_tokenizer_files
from worker.model.dtypes import resolve_dtype

FACTORS = float_tensor("F32", torch.ones(8))


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes files of an architecture, each once."""

    @functools.cache
    def content(architecture: str, kind: str = "F32") -> GgufContent:
        folder = tmp_path_factory.mktemp("checkpoint")
        # Of Gemma 3's layers the fourth is the first without a window.
        layers = 4 if architecture == "gemma3_text" else 2
        return convert(make_checkpoint(folder, architecture, num_hidden_layers=layers), kind)

    return content


def changed(content: GgufContent, changes: dict[str, Any], tensors: tuple[str, ...] = ()) -> GgufContent:
    """The file with other metadata (None removes an entry; names without a dot in front are of the architecture)."""
    prefix = content.metadata["general.architecture"]
    named = {key[1:] if key.startswith("/") else f"{prefix}.{key}": value for key, value in changes.items()}
    metadata = {key: value for key, value in {**content.metadata, **named}.items() if value is not None}
    return GgufContent(metadata, content.tensors | dict.fromkeys(tensors, FACTORS))


def config_of(path: Path, content: GgufContent) -> ModelConfig:
    file = path / "m.gguf"
    file.write_bytes(content.to_bytes())
    return ModelConfig.from_folder(file)


# As llama.cpp's converter writes for Granite 4 without linear attention.
GRANITE4 = {
    **{
        "ssm.conv_kernel": 4,
        "ssm.state_size": 128,
        "ssm.group_count": 1,
        "ssm.inner_size": 512,
        "ssm.time_step_rank": 8,
    },
    **{"expert_count": 0, "expert_used_count": 0, "expert_shared_feed_forward_length": 64},
    **{"attention.head_count_kv": [2, 2], "rope.scaling.finetuned": True},
}
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
REFUSED: list[tuple[str, dict[str, Any], tuple[str, ...], str]] = [
    ("llama", {"attention.head_count": [8, 4]}, (), "llama.attention.head_count differs by layer"),
    ("llama", {"attention.head_count": [8] * 3}, (), "llama.attention.head_count lists 3 values for 2 layers"),
    ("llama", {"attention.causal": False}, (), "attention.causal is false"),
    ("llama", {"attention.value_length": 8}, (), "attention.value_length differs from attention.key_length"),
    ("llama", {"rope.dimension_count": 8}, (), "rope.dimension_count is 8 of "),
    ("llama", {"rope.scaling.type": "longrope"}, (), "longrope is supported for phi3 alone, with factors"),
    ("llama", {"rope.scaling.type": "longrope"}, (LONG, SHORT), "longrope is supported for phi3 alone, with factors"),
    ("granite", {"rope.scaling.type": "longrope"}, (LONG, SHORT), "longrope is supported for phi3 alone"),
    ("gemma3_text", {"rope.scaling.type": "longrope"}, (), "longrope is supported for phi3 alone"),
    ("phi3", {"rope.scaling.type": "longrope"}, (), "longrope is supported for phi3 alone, with factors"),
    ("phi3", {}, (LONG,), "rope_factors_long and rope_factors_short need each other"),
    ("phi3", {}, (SHORT,), "rope_factors_long and rope_factors_short need each other"),
    ("phi3", {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, (LONG, SHORT), "no further rope scaling"),
    ("phi3", {}, (LONG, SHORT, "rope_freqs.weight"), "no further rope scaling"),
    ("granite", {"rope.scaling.finetuned": False}, (), "rope.scaling.finetuned is false"),
    ("granitemoe", {"rope.scaling.finetuned": False}, (), "rope.scaling.finetuned is false"),
    ("granite", {"expert_count": 4}, (), "granite.expert_count is not 0"),
    ("granitemoe", {"expert_shared_feed_forward_length": 8}, (), "expert_shared_feed_forward_length is not 0"),
    ("qwen3_moe", {"expert_gating_func": 2}, (), "expert_gating_func must be 1, softmax"),
    ("glm4_moe", {"expert_gating_func": 1}, (), "expert_gating_func must be 2, sigmoid"),
    ("glm4_moe", {"nextn_predict_layers": 3}, (), "nextn_predict_layers is 3, not fewer than block_count"),
    ("deepseek_v3", {"expert_gating_func": 3}, (), "expert_gating_func must be 1, softmax, or 2, sigmoid"),
    ("deepseek_v3", {"rope.dimension_count": 512}, (), "rope.dimension_count is 512; keys have only"),
    ("gemma2", {"attention.sliding_window_pattern": [True]}, (), "sliding_window_pattern lists 1 of 2 layers"),
    ("llama", {"/general.sampling.mirostat": 2}, (), "general.sampling.mirostat is not supported"),
    ("llama", {"/general.sampling.sequence": "kp"}, (), "general.sampling.sequence is not supported"),
    ("llama", {"/general.sampling.xtc_probability": 0.5}, (), "general.sampling.xtc_probability is not supported"),
    ("llama", {"/tokenizer.ggml.suppress_tokens": [3]}, (), "tokenizer.ggml.suppress_tokens is not supported"),
    ("llama", {"/general.sampling.penalty_repeat": 1.1}, (), "penalty_repeat 1.1 for the last 64 tokens; valid: "),
    (
        "llama",
        {"/general.sampling.penalty_repeat": 1.1, "/general.sampling.penalty_last_n": 32},
        (),
        "penalty_repeat 1.1 for the last 32 tokens; valid: penalty_last_n -1",
    ),
    ("llama", {"/tokenizer.ggml.normalizer.lowercase": True}, (), "normalizer.lowercase is not supported"),
    ("llama", {"/tokenizer.ggml.remove_extra_whitespaces": True}, (), "remove_extra_whitespaces is not supported"),
]


@pytest.mark.parametrize(("architecture", "changes", "tensors", "said"), REFUSED)
def test_setting_that_is_not_served_is_refused_by_name(
    tmp_path: Path, contents: Any, architecture: str, changes: dict[str, Any], tensors: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ModelError) as error:
        config_of(tmp_path, changed(contents(architecture), changes, tensors))
    assert said in str(error.value)
    assert str(tmp_path / "m.gguf") in str(error.value)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {"rope.scaling.finetuned": False, "/tokenizer.ggml.add_sep_token": True}),
        ("llama", {"/general.sampling.penalty_last_n": 64, "/general.sampling.sequence": ""}),
        ("llama", {"/general.sampling.mirostat": 0, "/general.sampling.mirostat_tau": 5.0}),
        ("granite", GRANITE4),
        ("qwen3_moe", {"expert_gating_func": 0}),
        ("glm4_moe", {"expert_gating_func": 0}),
        ("deepseek_v3", {"expert_gating_func": 0}),
    ],
)
def test_setting_without_effect_changes_nothing(
    tmp_path: Path, contents: Any, architecture: str, changes: dict[str, Any]
) -> None:
    plain = config_of(tmp_path, contents(architecture))
    assert config_of(tmp_path, changed(contents(architecture), changes)) == plain


@pytest.mark.parametrize(("stored", "expected"), [(0.0, 1.0), (2.5, 2.5), (None, 1.0)])
def test_scale_of_experts_is_one_where_the_file_has_none(
    tmp_path: Path, contents: Any, stored: float | None, expected: float
) -> None:
    config = config_of(tmp_path, changed(contents("glm4_moe"), {"expert_weights_scale": stored}))
    assert config.source["routed_scaling_factor"] == expected


def test_sampling_entries_are_defaults_of_requests(tmp_path: Path, contents: Any) -> None:
    names = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.1}
    entries = names | {"penalty_last_n": -1}
    content = changed(contents("llama"), {f"/general.sampling.{name}": value for name, value in entries.items()})
    given = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}
    assert config_of(tmp_path, content).sampling_defaults == model_defaults(given) != model_defaults({})
    # A folder's generation_config.json takes their place.
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.3}')
    assert ModelConfig.from_folder(tmp_path).sampling_defaults == model_defaults({"temperature": 0.3})


@pytest.mark.parametrize("has_file", [False, True])
def test_routers_and_engines_have_the_same_defaults(tmp_path: Path, contents: Any, has_file: bool) -> None:
    """Former fault: a router had those of the table, because it got no generation_config.json."""
    content = changed(contents("llama"), {"/general.sampling.temp": 0.6})
    config_of(tmp_path, content)
    if has_file:
        (tmp_path / "generation_config.json").write_text('{"top_p": 0.3}')
    of_router = model_defaults(read_json(model_tokenizer_files(tmp_path), "generation_config.json"))
    assert of_router == ModelConfig.from_folder(tmp_path).sampling_defaults != model_defaults({})


class Kernels:
    """Back end that is fast with the given dtypes."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        self._dtypes = dtypes

    def is_fast(self, dtype: torch.dtype) -> bool:
        return dtype in self._dtypes


def test_auto_dtype_of_a_file_is_never_float16(tmp_path: Path, contents: Any) -> None:
    """Activations of Gemma 2 and 3, gpt-oss and DeepSeek-V2 overflow float16; llama.cpp has them in float32."""
    gpu = cast("KernelBackend", Kernels(torch.float32, torch.bfloat16, torch.float16))
    cpu = cast("KernelBackend", Kernels(torch.float32, torch.bfloat16))
    halves, floats, codes = (config_of(tmp_path, contents("gemma2", kind)) for kind in ("F16", "F32", "Q8_0"))
    assert (resolve_dtype("auto", halves, gpu), resolve_dtype("auto", halves, cpu)) == (torch.bfloat16, torch.float32)
    assert (resolve_dtype("auto", floats, gpu), resolve_dtype("auto", codes, gpu)) == (torch.float32, torch.bfloat16)
    assert resolve_dtype("float16", halves, gpu) == torch.float16
    checkpoint = replace(halves, source={})
    assert resolve_dtype("auto", checkpoint, gpu) == torch.float16
