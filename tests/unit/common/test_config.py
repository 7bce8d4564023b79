"""Config: defaults, and errors that name the field, its value and the allowed values."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from common.config import (
    CompilationConfig,
    Config,
    LayerQuantConfig,
    ParallelConfig,
    QuantizationConfig,
    SpeculativeConfig,
)
from common.errors import InvalidFieldError
from common.params.checks import require_types


def test_defaults_are_the_guides() -> None:
    config = Config()
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.kv_cache_block_size) == (512, 16_384, 16)
    assert (config.enable_prefix_caching, config.scheduler_delay_factor) == (False, 0.0)
    assert (config.gpu_memory_utilization, config.tensor_parallel_size) == (0.9, 1)
    assert (config.bos_token_id, config.eos_token_id, config.stop_token_ids) == (None, None, ())
    assert config.speculative_config is None
    assert config.parallel_config == ParallelConfig(data_parallel_size=1)
    assert config.compilation_config == CompilationConfig(level=0)
    assert config.quant_config.global_quant_config == LayerQuantConfig("no", "bfloat16", is_dynamic=True)


@pytest.mark.parametrize(
    ("field", "bad", "allowed"),
    [
        ("max_num_seqs", 0, "at least 1"),
        ("max_num_batched_tokens", -5, "at least 1"),
        ("kv_cache_block_size", 0, "1 or a multiple of 16"),
        ("kv_cache_block_size", 24, "1 or a multiple of 16"),
        ("num_kvcache_blocks", -1, "0 or more"),
        ("kv_cache_memory", -1, "0 or more"),
        ("max_model_len", -1, "0 or more"),
        ("scheduler_delay_factor", -0.5, "0 or more"),
        ("scheduler_delay_factor", float("nan"), "0 or more"),
        ("scheduler_delay_factor", float("inf"), "a finite number"),
        ("gpu_memory_utilization", 0.0, r"\(0, 1\]"),
        ("gpu_memory_utilization", 1.5, r"\(0, 1\]"),
        ("dtype", "int4", "auto, float32, bfloat16, float16"),
        ("kv_cache_dtype", "float32", "auto, bfloat16, float16, fp8"),
        ("hash_seed", 1 << 64, "an unsigned 64-bit number"),
        ("hash_seed", -1, "an unsigned 64-bit number"),
        ("bos_token_id", -1, "None, or 0 or more"),
        ("eos_token_id", -1, "None, or 0 or more"),
        ("stop_token_ids", (5, -1), "0 or more"),
    ],
)
def test_config_value_out_of_range_is_refused(field: str, bad: Any, allowed: str) -> None:
    with pytest.raises(InvalidFieldError, match=rf"^{field} is .*; valid: {allowed}$") as caught:
        Config(**{field: bad})
    assert repr(bad) in str(caught.value)


@pytest.mark.parametrize("kind", [Config, ParallelConfig, CompilationConfig, LayerQuantConfig, QuantizationConfig])
def test_every_field_refuses_other_types(kind: type[Any]) -> None:
    for field in dataclasses.fields(kind):
        for other in (object(), [1], b"text", 1j):
            with pytest.raises(InvalidFieldError, match=rf"{field.name} is .*; valid: of type "):
                kind(**{field.name: other})


def test_config_refuses_numbers_of_wrong_type() -> None:
    with pytest.raises(InvalidFieldError, match="max_num_seqs is True; valid: of type int"):
        Config(max_num_seqs=True)
    with pytest.raises(InvalidFieldError, match=r"stop_token_ids is \(1, 'x'\); valid: of type tuple\[int, ...\]"):
        Config(stop_token_ids=(1, "x"))  # type: ignore[arg-type]
    with pytest.raises(InvalidFieldError, match="speculative_config is 1"):
        Config(speculative_config=1)  # type: ignore[arg-type]
    assert Config(gpu_memory_utilization=1, scheduler_delay_factor=2).gpu_memory_utilization == 1


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("tensor_parallel_size", 0, "tensor_parallel_size is 0; valid: at least 1"),
        ("enable_expert_parallel", True, "enable_expert_parallel is True; valid: False with one rank"),
        (
            "parallel_config",
            ParallelConfig(2),
            "data_parallel_size is 2; valid: 1 without enable_expert_parallel",
        ),
        ("compilation_config", CompilationConfig(3), "compilation_config.level is 3; valid: 0: .* not built yet"),
        (
            "quant_config",
            QuantizationConfig(LayerQuantConfig("per_tensor", "int4x2")),
            "quant_config is .*'int4x2'.*; valid: fp8 per_tensor, .*; int8 .*; fp4x2 per_1x16, .*; int4x2",
        ),
        (
            "quant_config",
            QuantizationConfig(layer_quant_configs=(("*.mlp.*", LayerQuantConfig("per_1x32", "fp8")),)),
            "quant_config is .*'per_1x32'.*; valid: fp8 per_tensor",
        ),
    ],
)
def test_config_refuses_unbuilt_features(field: str, value: Any, problem: str) -> None:
    with pytest.raises(InvalidFieldError, match=problem):
        Config(**{field: value})


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: ParallelConfig(0), "parallel_config.data_parallel_size is 0; valid: at least 1"),
        (lambda: CompilationConfig(4), "compilation_config.level is 4; valid: 0, 1, 2, 3"),
        (lambda: CompilationConfig(0, (0,)), r"cudagraph_capture_sizes is \(0,\); valid: sizes of at least 1"),
        (lambda: LayerQuantConfig("per_row"), "quant_config.quant_type is 'per_row'; valid: no, per_tensor, per_token"),
        (lambda: LayerQuantConfig("no", "fp9"), "quant_config.quant_dtype is 'fp9'; valid: float32, bfloat16"),
        (
            lambda: SpeculativeConfig(1, "eagle3"),
            "speculative_config.model is ''; valid: a folder, or a name on the Hub",
        ),
        (lambda: SpeculativeConfig(1, "mtp", "x"), "speculative_config.model is 'x'; valid: empty with method mtp"),
        (lambda: SpeculativeConfig(0), "speculative_config.num_speculative_tokens is 0; valid: 1 to 16"),
    ],
)
def test_config_parts_refuse_unknown_values(make: Any, problem: str) -> None:
    with pytest.raises(InvalidFieldError, match=problem):
        make()


def test_any_number_of_draft_tokens() -> None:
    assert Config(speculative_config=SpeculativeConfig(5)).speculative_config == SpeculativeConfig(5)


def test_types_of_fixed_tuples() -> None:
    layers = (("*.mlp.*", LayerQuantConfig()),)
    require_types(QuantizationConfig(layer_quant_configs=layers))
    for bad in ((("a", LayerQuantConfig(), 1),), (("a", "b"),)):
        with pytest.raises(InvalidFieldError, match="layer_quant_configs"):
            QuantizationConfig(layer_quant_configs=bad)  # type: ignore[arg-type]


def test_config_is_frozen_and_validates_replacements() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().max_num_seqs = 1  # type: ignore[misc]
    assert dataclasses.replace(Config(), num_kvcache_blocks=7).num_kvcache_blocks == 7
    with pytest.raises(InvalidFieldError):
        dataclasses.replace(Config(), num_kvcache_blocks=-7)
