"""`quantization_config` of published repositories: read as stated, or refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest

from common.config import LayerQuantConfig
from worker.config.quantization import parse_quantization

# Entries for calibration and loaders that repositories have beside those that decide the numbers.
AUTO_GPTQ: Final = {"damp_percent": 0.1, "true_sequential": True, "model_name_or_path": None}
BLOKE: Final = {**AUTO_GPTQ, "model_file_base_name": "model"}
OPTIMUM: Final = {
    "batch_size": 1,
    "block_name_to_quantize": None,
    "cache_block_outputs": True,
    "damp_percent": 0.01,
    "dataset": None,
    "exllama_config": {"version": 1},
    "max_input_length": None,
    "model_seqlen": None,
    "module_name_preceding_first_block": None,
    "modules_in_block_to_quantize": None,
    "pad_token_id": None,
    "tokenizer": None,
    "true_sequential": True,
    "use_cuda_fp16": False,
    "use_exllama": True,
}
GPTQ_MODEL: Final = {
    "checkpoint_format": "gptq",
    "dynamic": None,
    "lm_head": False,
    "meta": {"damp_percent": 0.01, "quantizer": ["gptqmodel:1.3.0"], "static_groups": False, "true_sequential": True},
    "pack_dtype": "int32",
}
QWEN3_AWQ: Final[dict[str, Any]] = {
    "backend": "autoawq",
    "do_fuse": False,
    "exllama_config": None,
    "fuse_max_seq_len": None,
    "modules_to_fuse": None,
}


def gptq(bits: int, group: int, desc_act: bool, more: dict[str, Any], **changes: Any) -> dict[str, Any]:
    own = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": desc_act, "sym": True}
    return {**own, **more, **changes}


def awq(version: str = "gemm", **changes: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": version, **changes}


def compressed(form: str = "pack-quantized", **changes: Any) -> dict[str, Any]:
    weights: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": 128,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "group",
        "symmetric": True,
        "type": "int",
    }
    group = {
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights | {name: value for name, value in changes.items() if name in weights},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "global_compression_ratio": 1.89,
        "ignore": changes.get("ignore", ["lm_head"]),
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.9.4",
    }


def codes(method: str, kind: str = "per_1x128", dtype: str = "int4x2", **more: bool) -> LayerQuantConfig:
    return LayerQuantConfig(kind, dtype, True, method, **more)


def modelopt(algorithm: str, **changes: Any) -> dict[str, Any]:
    number = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    group = {"input_activations": number, "weights": number, "targets": ["Linear"]}
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "producer": {"name": "modelopt", "version": "0.29.0"},
        **changes,
    }


NVFP4: Final = LayerQuantConfig("per_1x16", "fp4x2", True, "modelopt")
SYMMETRIC: Final = codes("gptq", is_symmetric=True)
KIMI: Final = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
SERVED: dict[str, tuple[dict[str, Any], LayerQuantConfig]] = {
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": (gptq(4, 128, False, OPTIMUM), SYMMETRIC),
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8": (
        gptq(8, 128, False, OPTIMUM),
        codes("gptq", dtype="int8x4", is_symmetric=True),
    ),
    "Qwen/Qwen3-30B-A3B-GPTQ-Int4": (
        gptq(4, 128, False, AUTO_GPTQ, checkpoint_format="gptq", static_groups=False),
        SYMMETRIC,
    ),
    "TheBloke/Llama-2-7B-Chat-GPTQ": (gptq(4, 128, False, BLOKE), SYMMETRIC),
    "TheBloke/Llama-2-7B-Chat-GPTQ at gptq-4bit-32g-actorder_True": (
        gptq(4, 32, True, BLOKE),
        codes("gptq", "per_1x32", is_symmetric=True, has_order=True),
    ),
    "TheBloke/Llama-2-7B-Chat-GPTQ at gptq-8bit--1g-actorder_True": (
        gptq(8, -1, True, BLOKE),
        codes("gptq", "per_token", "int8x4", is_symmetric=True),
    ),
    "TheBloke/Mistral-7B-Instruct-v0.2-GPTQ": (
        gptq(4, 128, True, BLOKE),
        codes("gptq", is_symmetric=True, has_order=True),
    ),
    "ModelCloud/Llama-3.2-1B-Instruct-gptqmodel-4bit-vortex-v2.5": (
        gptq(4, 32, True, GPTQ_MODEL),
        codes("gptq", "per_1x32", is_symmetric=True, has_order=True),
    ),
    "hugging-quants/Meta-Llama-3.1-8B-Instruct-GPTQ-INT4": (
        gptq(4, 128, True, OPTIMUM, checkpoint_format="gptq"),
        codes("gptq", is_symmetric=True, has_order=True),
    ),
    "Qwen/Qwen2.5-7B-Instruct-AWQ": (awq(modules_to_not_convert=None), codes("awq")),
    "Qwen/Qwen3-8B-AWQ": (awq(modules_to_not_convert=None, **QWEN3_AWQ), codes("awq")),
    "TheBloke/Llama-2-7B-Chat-AWQ": (awq(), codes("awq")),
    "casperhansen/llama-3-8b-instruct-awq": (awq(modules_to_not_convert=None), codes("awq")),
    "casperhansen/mixtral-instruct-awq": (awq(modules_to_not_convert=["gate"]), codes("awq")),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16": (
        compressed(actorder="weight"),
        codes("compressed-tensors", is_symmetric=True),
    ),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a16": (
        compressed(num_bits=8, strategy="channel", group_size=None),
        codes("compressed-tensors", "per_token", "int8x4", is_symmetric=True),
    ),
    "RedHatAI/Qwen3-8B-quantized.w4a16": (
        compressed(group_size=64),
        codes("compressed-tensors", "per_1x64", is_symmetric=True),
    ),
    "nm-testing/tinyllama-oneshot-w4a16-group128-asym": (compressed(symmetric=False), codes("compressed-tensors")),
    "nm-testing/Meta-Llama-3-8B-Instruct-W4A16-ACTORDER-compressed-tensors-test": (
        compressed(actorder="group"),
        codes("compressed-tensors", is_symmetric=True, has_order=True),
    ),
    "nvidia/Llama-3.1-8B-Instruct-NVFP4": (modelopt("NVFP4", kv_cache_scheme={"num_bits": 8, "type": "float"}), NVFP4),
    "nvidia/Llama-3.1-8B-Instruct-FP8": (
        modelopt("FP8", config_groups=None, kv_cache_scheme=None),
        LayerQuantConfig("per_tensor", "fp8", False, "modelopt"),
    ),
    "RedHatAI/Qwen3-8B-NVFP4": (
        compressed("nvfp4-pack-quantized", type="float", strategy="tensor_group", group_size=16),
        LayerQuantConfig("per_1x16", "fp4x2", True, "compressed-tensors"),
    ),
    "moonshotai/Kimi-K2-Thinking": (
        compressed(group_size=32, ignore=KIMI),
        codes("compressed-tensors", "per_1x32", is_symmetric=True),
    ),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "TheBloke/Llama-2-70B-Chat-GPTQ at gptq-3bit-128g-actorder_True": (gptq(3, 128, True, BLOKE), "weights of 3 bits"),
    "neuralmagic/Mistral-7B-Instruct-v0.3-GPTQ-4bit-marlin": (
        gptq(4, 128, False, AUTO_GPTQ, checkpoint_format="marlin"),
        "gptq checkpoint_format 'marlin' is not supported",
    ),
    "TheBloke/guanaco-33B-GPTQ at gptq-4bit-1024g": (gptq(4, 1024, False, BLOKE), "group_size 1024 is not supported"),
    "casperhansen/vicuna-7b-v1.5-awq-gemv": (awq("gemv"), "awq version 'gemv' is not supported"),
    "nvidia/Llama-3.1-8B-Instruct-W4A8": (modelopt("W4A8_AWQ"), "modelopt quant_algo 'W4A8_AWQ' is not supported"),
    "an NVFP4 of other groups": (
        compressed("nvfp4-pack-quantized", type="float", strategy="tensor_group", group_size=32),
        r"NVFP4 weights of 4 bits \(float\) in groups of 32 are not supported",
    ),
    "OPEA/Qwen2.5-7B-Instruct-int4-sym-inc": (
        {"quant_method": "intel/auto-round", "bits": 4, "group_size": 128, "sym": True},
        "quant_method 'intel/auto-round' is not supported",
    ),
    "unsloth/llama-3-8b-Instruct-bnb-4bit": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        "quant_method 'bitsandbytes' is not supported",
    ),
    "ISTA-DASLab/Llama-2-7b-AQLM-2Bit-1x16-hf": ({"quant_method": "aqlm"}, "quant_method 'aqlm' is not supported"),
    "mobiuslabsgmbh/Llama-3.1-8b-instruct_4bitgs64_hqq": ({"quant_method": "hqq"}, "quant_method 'hqq' is not supp"),
    "RedHatAI/Sparse-Llama-3.1-8B-evolcodealpaca-2of4-quantized.w4a16": (
        compressed("marlin-24"),
        "compressed-tensors format 'marlin-24' is not supported",
    ),
}


@pytest.mark.parametrize("name", list(SERVED))
def test_published_codes_are_read_as_stated(name: str) -> None:
    spec, expected = SERVED[name]
    config = parse_quantization({"quantization_config": spec})
    layer = "model.layers.3.mlp.experts.7.up_proj"
    assert config.of_layer(layer) == expected
    assert not config.layer_quant_configs


def test_lists_of_float_layers_of_published_codes() -> None:
    kimi = parse_quantization({"quantization_config": SERVED["moonshotai/Kimi-K2-Thinking"][0]})
    for layer in ("lm_head", "model.layers.1.self_attn.o_proj", "model.layers.0.mlp.gate_proj"):
        assert kimi.of_layer(layer).quant_type == "no"
    assert kimi.of_layer("model.layers.1.mlp.experts.0.gate_proj").quant_type == "per_1x32"
    mixtral = parse_quantization({"quantization_config": SERVED["casperhansen/mixtral-instruct-awq"][0]})
    assert mixtral.of_layer("model.layers.0.block_sparse_moe.gate").quant_type == "no"


@pytest.mark.parametrize("name", list(REFUSED))
def test_other_published_formats_are_refused_by_name(name: str) -> None:
    spec, problem = REFUSED[name]
    with pytest.raises(ValueError, match=problem) as error:
        parse_quantization({"quantization_config": spec})
    assert "\n" not in str(error.value)


ODD: Final[tuple[Any, ...]] = (None, "x", -1, 0, 1 << 80, 2.5, True, [], [1], {}, {"x": 1}, ["re:("])


def changed(spec: Any, value: Any) -> Iterator[Any]:
    """The settings with each of them, at any depth, replaced by a value."""
    if isinstance(spec, dict):
        for key, own in spec.items():
            yield {**spec, key: value}
            yield from ({**spec, key: inner} for inner in changed(own, value))


def problem_of(spec: Any) -> str:
    """The error of settings that are refused; empty if they are read. Any other error fails the test."""
    try:
        parse_quantization({"quantization_config": spec})
    except (ValueError, KeyError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", list(SERVED))
def test_odd_settings_are_read_or_refused_in_one_line(name: str) -> None:
    spec, _ = SERVED[name]
    for value in ODD:
        for odd in changed(spec, value):
            assert "\n" not in problem_of(odd)
