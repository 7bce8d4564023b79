from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from common.config import LayerQuantConfig, QuantizationConfig
from common.errors import InvalidFieldError
from tests.quantizers import SCHEMES
from tests.word_checkpoints import WORD_SCHEMES
from worker.config.quantization import parse_quantization

GROUP = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}}
QUARK = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, "input_tensors": {"is_dynamic": False}}


def parse(spec: dict[str, Any]) -> QuantizationConfig:
    return parse_quantization({"quantization_config": spec})


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ("deepseek", LayerQuantConfig("per_128x128", "fp8", True, "fp8")),
        ("fp8-per-tensor", LayerQuantConfig("per_tensor", "fp8", False, "fp8")),
        ("compressed-tensors-fp8-channel", LayerQuantConfig("per_token", "fp8", True, "compressed-tensors")),
        ("compressed-tensors-fp8-group", LayerQuantConfig("per_1x128", "fp8", True, "compressed-tensors")),
        ("compressed-tensors-int8-tensor", LayerQuantConfig("per_tensor", "int8", True, "compressed-tensors")),
        ("compressed-tensors-mxfp4", LayerQuantConfig("per_1x32", "fp4x2", True, "compressed-tensors")),
        ("quark-int8-channel", LayerQuantConfig("per_token", "int8", True, "quark")),
        ("quark-mxfp4", LayerQuantConfig("per_1x32", "fp4x2", True, "quark")),
        ("w8a8-int8", LayerQuantConfig("per_token", "int8", True, "w8a8_int8")),
    ],
)
def test_methods(scheme: str, expected: LayerQuantConfig) -> None:
    assert parse(dict(SCHEMES[scheme].config)).global_quant_config == expected


CODES_32 = LayerQuantConfig("per_1x32", "int4x2", True, "gptq")


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ("gptq", CODES_32),
        ("gptq-act-order", replace(CODES_32, has_order=True)),
        ("gptq-channel", replace(CODES_32, quant_type="per_token")),
        ("gptq-v2", replace(CODES_32, quant_type="per_1x64", quant_method="gptq_v2")),
        ("gptq-8-bits", replace(CODES_32, quant_dtype="int8x4", is_symmetric=True)),
        ("awq-g128", replace(CODES_32, quant_type="per_1x128", quant_method="awq")),
        ("compressed-tensors", replace(CODES_32, quant_method="compressed-tensors", is_symmetric=True)),
        (
            "compressed-tensors-channel",
            replace(CODES_32, quant_type="per_token", quant_method="compressed-tensors", is_symmetric=True),
        ),
        (
            "compressed-tensors-act-order",
            replace(CODES_32, quant_method="compressed-tensors", is_symmetric=True, has_order=True),
        ),
    ],
)
def test_methods_of_codes_in_words(scheme: str, expected: LayerQuantConfig) -> None:
    assert parse(WORD_SCHEMES[scheme].config).global_quant_config == expected


def gptq(**settings: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, **settings}


def awq(**settings: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm", **settings}


def packed(**weights: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True, **weights}
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (gptq(bits=3), "weights of 3 bits are not supported; supported: 4, 8"),
        (gptq(bits="4"), "weights of '4' bits are not supported"),
        (gptq(group_size=48), "group_size 48 is not supported; supported: -1, 32, 64, 128"),
        (gptq(group_size=0), "group_size 0 is not supported"),
        (gptq(group_size=None), "group_size None is not supported"),
        (
            gptq(checkpoint_format="marlin"),
            "checkpoint_format 'marlin' is not supported; supported: gptq, gptq_v2",
        ),
        (gptq(checkpoint_format="bitblas"), "gptq checkpoint_format 'bitblas' is not supported"),
        (gptq(is_marlin_format=True), "gptq checkpoint_format 'marlin' is not supported"),
        (gptq(pack_dtype="int64"), "gptq pack_dtype 'int64' is not supported; supported: int32"),
        (gptq(desc_act="yes"), "desc_act is 'yes'; it must be true or false"),
        (gptq(static_groups=3), "static_groups is 3; it must be true or false"),
        (gptq(sym=1), "sym is 1; it must be true or false"),
        (gptq(dynamic={"+:.*": {"bits": 2}}), "weights of 2 bits are not supported"),
        (gptq(dynamic={"-:(": {}}), "a regular expression after"),
        (gptq(dynamic=[1]), r"dynamic is \[1\]; it must be an object"),
        (gptq(dynamic={"x": 1}), "x is 1; it must be an object"),
        (awq(bits=8), "awq weights of 8 bits are not supported; supported: 4"),
        (awq(version="gemv"), "awq version 'gemv' is not supported; supported: gemm"),
        (awq(version="GEMV_FAST"), "awq version 'gemv_fast' is not supported"),
        (awq(version="marlin"), "awq version 'marlin' is not supported"),
        (awq(backend="llm-awq"), "awq backend 'llm-awq' is not supported; supported: autoawq"),
        (awq(zero_point=False), "awq weights with zero_point False are not supported"),
        (awq(group_size=100), "group_size 100 is not supported"),
        (packed(num_bits=2), "weights of 2 bits are not supported; supported: 4, 8"),
        (packed(type="float"), "pack-quantized weights of type 'float' are not supported; supported: int"),
        (packed(strategy="tensor"), "weights quantized by 'tensor' are not supported; supported: channel, group"),
        (packed(strategy="channel"), "strategy 'channel' has group_size 128; it must be -1 or null"),
        (packed(group_size=None), "group_size None is not supported"),
        (packed(actorder="newest"), "compressed-tensors actorder 'newest' is not supported; supported: group, weight"),
        (packed(symmetric="no"), "symmetric is 'no'; it must be true or false"),
        (
            {**packed(), "transform_config": {"config_groups": {"R1": {}}}},
            "compressed-tensors transform_config is not supported",
        ),
        (
            {**packed(), "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config of format 'sparse-24-bitmask' is not supported; supported: dense",
        ),
    ],
)
def test_unsupported_codes_are_refused_in_one_line(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        parse(spec)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(\w+\.)*x",
        r"(?:a|a)+x",
        r"((a?)b){60}x",
        r"(?P<n>(?:[)]*))+x",
        ".*" * 9,
        "(?x)(a*) *x",
        "(a*)(?#)*x",
    ],
)
def test_pattern_that_may_take_too_long_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="may take too long"):
        parse(gptq(dynamic={f"-:{pattern}": {}}))


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.layers\.\d+\.mlp\.experts\.\d+\..*",
        r"(?:.*\.)?model\.layers\.(?:[0-9]|1[0-9])\.(?!mlp).*$",
        r"lm_head[(*+]\(\)*",
    ],
)
def test_patterns_of_published_checkpoints_are_read(pattern: str) -> None:
    assert parse(gptq(dynamic={f"-:{pattern}": {}})).exclude_layers == (f"re:{pattern}",)


def test_missing_settings_of_codes_are_named() -> None:
    for spec, key in ((gptq(), "bits"), (gptq(), "group_size"), (packed(), "config_groups")):
        with pytest.raises(KeyError, match=key):
            parse({name: value for name, value in spec.items() if name != key})


def test_absent_quantization_config_means_floats() -> None:
    assert parse_quantization({}) == parse_quantization({"quantization_config": None}) == QuantizationConfig()


def test_layer_quant_config_overrides_global() -> None:
    mlp = {"targets": ["re:.*mlp.*"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
    spec = {
        "quant_method": "compressed-tensors",
        "config_groups": {"a": GROUP, "b": mlp},
        "ignore": ["lm_head", "re:.*gate$"],
    }
    config = parse(spec)
    assert config.of_layer("model.layers.0.self_attn.q_proj").quant_dtype == "fp8"
    assert config.of_layer("model.layers.0.mlp.up_proj").quant_dtype == "int8"
    assert config.of_layer("model.layers.0.mlp.gate").quant_type == "no"
    assert config.of_layer("lm_head").quant_type == "no"
    quark = parse({"quant_method": "quark", "global_quant_config": {"weight": None},
                   "layer_quant_config": {"*.mlp.*": QUARK}, "exclude": ["*.gate"]})  # fmt: skip
    assert quark.of_layer("model.layers.0.mlp.up_proj") == LayerQuantConfig("per_tensor", "fp8", False, "quark")
    assert quark.of_layer("model.layers.0.mlp.gate").quant_type == "no"
    assert quark.of_layer("model.layers.0.self_attn.q_proj").quant_type == "no"


@pytest.mark.parametrize(
    ("name", "fits", "does_not"),
    [
        ("lm_head", ("lm_head", "model.lm_head"), ("lm_head2", "my_lm_head")),
        ("model.layers.1", ("model.layers.1", "model.layers.1.mlp.up_proj"), ("model.layers.10.mlp.up_proj",)),
        ("mlp.gate", ("model.layers.0.mlp.gate",), ("model.layers.0.mlp.gate_proj",)),
        ("model.layers.*.self_attn", ("model.layers.7.self_attn.q_proj",), ("model.layers.7.mlp.up_proj",)),
        ("*router*", ("model.layers.7.mlp.router", "a.my_router_2.b"), ("model.layers.7.mlp",)),
        ("re:.*gate$", ("model.layers.7.mlp.gate",), ("model.layers.7.mlp.gate_proj",)),
        ("re:model.layers.[01]", ("model.layers.1.mlp",), ("my.model.layers.1", "model.layers.2")),
        ("a.b+c", ("a.b+c",), ("a.bbc", "axb+c")),
    ],
)
def test_names_of_layers(name: str, fits: tuple[str, ...], does_not: tuple[str, ...]) -> None:
    config = QuantizationConfig(LayerQuantConfig("per_tensor", "fp8"), exclude_layers=(name,))
    assert all(config.of_layer(layer).quant_type == "no" for layer in fits)
    assert all(config.of_layer(layer).quant_type == "per_tensor" for layer in does_not)


def test_invalid_exclude_pattern_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match=r"quant_config is 're:\('; valid: a regular expression"):
        QuantizationConfig(exclude_layers=("re:(",))


def ct(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "tensor", **weights}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quant_method 'bitsandbytes' is not supported; supported: fp8, compr",
        ),
        ({"quant_method": "auto-round"}, "quant_method 'auto-round' is not supported"),
        ({"bits": 4}, "quant_method 'None' is not supported"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' are not supported; supported: e4m3"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"blocks of \[64, 64\] are not .*: \[128, 128\], \[1"),
        ({**ct(), "format": "marlin-24"}, "format 'marlin-24' is not supported"),
        (ct(symmetric=False), "zero points are not supported"),
        (ct(num_bits=4, type="int"), r"weights of 4 bits \(int\) are not supported"),
        (ct(num_bits=4, strategy="group", group_size=128), "fp4x2 per_1x128 are not supported; supported: fp8 per_t"),
        (ct(strategy="group", group_size=64), "group_size 64 is not supported; supported: 32, 128"),
        (ct(strategy="tensor_group"), "quantized by 'tensor_group' are not supported"),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int4", "qscheme": "per_group"}}},
            "dtype 'int4' are not supported; supported: fp8_e4m3, int8, fp4",
        ),
        ({"quant_method": "quark", "global_quant_config": {"weight": [QUARK, QUARK]}}, "quantized twice"),
        ({"quant_method": "quark", "layer_type_quant_config": {"Linear": QUARK}}, "layer_type_quant_config is not s"),
    ],
)
def test_unsupported_quantization_is_refused_in_one_line(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        parse(spec)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fp8", "quantization_config is 'fp8'; it must be an object"),
        ([1], r"quantization_config is \[1\]; it must be an object"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "in blocks of 128 are not supported; supported: "),
        ({"quant_method": "fp8", "weight_block_size": [[1], 2]}, r"in blocks of \[\[1\], 2\] are not supported"),
        # A string would be read as eight layers of one letter each, and the head's weight as fp8.
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "'lm_head'; it must be a list of names"),
        ({**ct(), "ignore": [1]}, r"ignore is \[1\]; it must be a list of names"),
        ({**ct(), "ignore": ["re:("]}, "of method compressed-tensors is malformed: .* a regular expression"),
        ({**ct(), "ignore": ["re:" + "(" * 5000 + ")" * 5000]}, "is malformed: .* a regular expression"),
        ({**ct(), "ignore": ["re:a{99999999999999999999}"]}, "is malformed: .* a regular expression"),
        ({**ct(), "config_groups": [1]}, r"config_groups is \[1\]; it must be an object"),
        ({**ct(), "config_groups": {"g": 1}}, "g is 1; it must be an object"),
        ({**ct(), "sparsity_config": [1]}, r"sparsity_config is \[1\]; it must be an object"),
        (ct(num_bits=None), "weights of None bits"),
        (ct(num_bits=math.inf), "weights of inf bits"),
        (ct(num_bits=[8]), r"weights of \[8\] bits"),
        ({"quant_method": "quark", "global_quant_config": 1}, "global_quant_config is 1; it must be an object"),
        ({"quant_method": "quark", "layer_quant_config": "x"}, "layer_quant_config is 'x'; it must be an object"),
    ],
)
def test_malformed_quantization_error_is_one_line(spec: Any, message: str) -> None:
    """An AttributeError with its traceback, or letters for names."""
    with pytest.raises(ValueError, match=message) as error:
        parse(spec)
    assert "\n" not in str(error.value)


def test_missing_quantization_setting_is_named() -> None:
    with pytest.raises(KeyError, match="config_groups"):
        parse({"quant_method": "compressed-tensors"})
