"""QuantizationConfig from `quantization_config` of config.json: how the weights are stored.

Every method that is read here stores weights by the same few rules: numbers of 8 or 4 bits, and scales for the whole
tensor, for each row, or for blocks. No PyTorch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from common.errors import InvalidFieldError
from common.params.config_parts import WEIGHT_FORMATS, LayerQuantConfig, QuantizationConfig, weight_formats

Spec = Mapping[str, Any]

_CT_FORMATS: Final = ("float-quantized", "int-quantized", "naive-quantized", "mxfp4-pack-quantized", "mixed-precision")
_BLOCKS: Final = {(128, 128): "per_128x128", (1, 128): "per_1x128"}
_GROUPS: Final = {32: "per_1x32", 128: "per_1x128"}
_QUARK_DTYPES: Final = {"fp8_e4m3": "fp8", "int8": "int8", "fp4": "fp4x2"}


def parse_quantization(config: Mapping[str, Any]) -> QuantizationConfig:
    """Quantization that config.json names; the default where it names none.

    Raises:
        ValueError: the method or a setting of it is not supported, or malformed.
        KeyError: a setting is missing.
    """
    spec = config.get("quantization_config")
    if not spec:
        return QuantizationConfig()
    if not isinstance(spec, Mapping):
        raise ValueError(f"quantization_config is {spec!r}; it must be an object")
    method = str(spec.get("quant_method"))
    if method not in _METHODS:
        raise ValueError(f"quant_method {method!r} is not supported; supported: {', '.join(_METHODS)}")
    try:
        parsed = _METHODS[method](spec)
    except (AttributeError, InvalidFieldError, TypeError) as error:
        # Something in it is of another kind than the method says: no object, no list, no pattern of names.
        raise ValueError(f"quantization_config of method {method} is malformed: {error}") from error
    for layer in parsed.layer_configs:
        if layer.quant_type != "no" and layer.quant_type not in WEIGHT_FORMATS[layer.quant_dtype]:
            found = f"{layer.quant_dtype} {layer.quant_type}"
            raise ValueError(f"weights quantized as {found} are not supported; supported: {weight_formats()}")
    return parsed


def _fp8(spec: Spec) -> QuantizationConfig:
    """Reads FP8 of DeepSeek, Qwen or transformers' `FineGrainedFP8Config`: scales of blocks, or one per tensor."""
    if spec.get("fmt", "e4m3") != "e4m3":
        raise ValueError(f"fp8 weights with fmt {spec['fmt']!r} are not supported; supported: e4m3")
    block = spec.get("weight_block_size")
    kind = "per_tensor" if block is None else _block(block)
    dynamic = spec.get("activation_scheme", "dynamic") == "dynamic"
    return QuantizationConfig(LayerQuantConfig(kind, "fp8", dynamic, "fp8"), (), _excluded(spec))


def _mxfp4(spec: Spec) -> QuantizationConfig:
    """Reads MXFP4 of gpt-oss: the experts, as blocks of 32 numbers with a power of two."""
    return QuantizationConfig(LayerQuantConfig("per_1x32", "fp4x2", True, "mxfp4"), (), _excluded(spec))


def _w8a8_int8(spec: Spec) -> QuantizationConfig:
    return QuantizationConfig(LayerQuantConfig("per_token", "int8", True, "w8a8_int8"), (), _excluded(spec))


def _w8a8_fp8(spec: Spec) -> QuantizationConfig:
    return QuantizationConfig(LayerQuantConfig("per_token", "fp8", True, "w8a8_fp8"), (), _excluded(spec))


def _excluded(spec: Spec) -> tuple[str, ...]:
    return _names(spec, "modules_to_not_convert") or _names(spec, "ignored_layers")


def _names(spec: Spec, key: str) -> tuple[str, ...]:
    """Reads a list of names, which may be absent. A single name is refused, because its letters would be taken as
    names."""
    names = spec.get(key)
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"{key} is {names!r}; it must be a list of names")
    return tuple(names or ())


def _compressed_tensors(spec: Spec) -> QuantizationConfig:
    form = spec.get("format", "float-quantized")
    everywhere = LayerQuantConfig()
    named = []
    for group in spec["config_groups"].values():
        if (group_form := group.get("format") or form) not in _CT_FORMATS:
            supported = ", ".join(_CT_FORMATS)
            raise ValueError(f"compressed-tensors format {group_form!r} is not supported; supported: {supported}")
        layer = _compressed_tensors_layer(group)
        for target in _names(group, "targets"):
            if target == "Linear":
                everywhere = layer
            else:
                named.append((target, layer))
    return QuantizationConfig(everywhere, tuple(named), _names(spec, "ignore"))


def _compressed_tensors_layer(group: Spec) -> LayerQuantConfig:
    weights, activations = group["weights"], group.get("input_activations") or {}
    if weights is None:
        return LayerQuantConfig()
    if weights.get("symmetric") is False:
        raise ValueError("compressed-tensors weights with zero points are not supported; supported: symmetric")
    number = (str(weights.get("type", "int")), int(weights["num_bits"]))
    dtypes = {("float", 8): "fp8", ("int", 8): "int8", ("float", 4): "fp4x2"}
    if number not in dtypes:
        raise ValueError(
            f"compressed-tensors weights of {number[1]} bits ({number[0]}) are not supported; "
            "supported: float 8, int 8, float 4"
        )
    kind = _granularity(str(weights["strategy"]), weights.get("block_structure"), weights.get("group_size"))
    return LayerQuantConfig(kind, dtypes[number], bool(activations.get("dynamic", True)), "compressed-tensors")


def _quark(spec: Spec) -> QuantizationConfig:
    if spec.get("layer_type_quant_config"):
        raise ValueError("quark's layer_type_quant_config is not supported; supported: layer_quant_config")
    named = tuple((name, _quark_layer(layer)) for name, layer in (spec.get("layer_quant_config") or {}).items())
    return QuantizationConfig(_quark_layer(spec["global_quant_config"]), named, _names(spec, "exclude"))


def _quark_layer(layer: Spec) -> LayerQuantConfig:
    weight, inputs = layer["weight"], layer.get("input_tensors") or {}
    if weight is None:
        return LayerQuantConfig()
    if not isinstance(weight, Mapping):
        raise ValueError("quark weights that are quantized twice are not supported; supported: one format")
    dtype = str(weight["dtype"])
    if dtype not in _QUARK_DTYPES:
        raise ValueError(f"quark weights of dtype {dtype!r} are not supported; supported: {', '.join(_QUARK_DTYPES)}")
    if dtype == "int8" and weight.get("symmetric") is False:
        raise ValueError("quark weights with zero points are not supported; supported: symmetric")
    kind = _granularity(str(weight["qscheme"]).removeprefix("per_"), None, weight.get("group_size"))
    dynamic = isinstance(inputs, Mapping) and bool(inputs.get("is_dynamic", True))
    return LayerQuantConfig(kind, _QUARK_DTYPES[dtype], dynamic, "quark")


def _granularity(strategy: str, block: Any, group_size: Any) -> str:
    if strategy == "block":
        return _block(block)
    if strategy == "group":
        if group_size not in _GROUPS:
            raise ValueError(f"group_size {group_size} is not supported; supported: {', '.join(map(str, _GROUPS))}")
        return _GROUPS[group_size]
    kinds = {"tensor": "per_tensor", "channel": "per_token"}
    if strategy not in kinds:
        raise ValueError(
            f"weights quantized by {strategy!r} are not supported; supported: {', '.join(kinds)}, block, group"
        )
    return kinds[strategy]


def _block(block: Any) -> str:
    sizes = tuple(block or ())
    if sizes not in _BLOCKS:
        supported = ", ".join(str(list(each)) for each in _BLOCKS)
        raise ValueError(f"weights quantized in blocks of {block} are not supported; supported: {supported}")
    return _BLOCKS[sizes]


_METHODS: Final[dict[str, Callable[[Spec], QuantizationConfig]]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "quark": _quark,
    "mxfp4": _mxfp4,
    "w8a8_int8": _w8a8_int8,
    "w8a8_fp8": _w8a8_fp8,
}
