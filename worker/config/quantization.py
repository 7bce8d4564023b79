"""QuantizationConfig from `quantization_config` of config.json: how the weights are stored.

Every method that is read here stores weights by the same few rules: numbers of 8 or 4 bits, and scales for the whole
tensor, for each row, or for blocks; zero points and an order of columns for some. No PyTorch here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from common.errors import InvalidFieldError
from common.params.config_parts import REGEX, WEIGHT_FORMATS, LayerQuantConfig, QuantizationConfig, weight_formats

Spec = Mapping[str, Any]

_CT_WORDS: Final = "pack-quantized"
_CT_NVFP4: Final = "nvfp4-pack-quantized"
_CT_FORMATS: Final = (
    "float-quantized",
    "int-quantized",
    "naive-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
    _CT_WORDS,
    _CT_NVFP4,
)
_NVFP4_GROUP: Final = 16
_BLOCKS: Final = {(128, 128): "per_128x128", (1, 128): "per_1x128"}
_GROUPS: Final = {32: "per_1x32", 128: "per_1x128"}
# Settings of codes in words: bits -> dtype, columns of a group -> granularity, and GPTQ's two kinds of zero points.
_CODES: Final = {4: "int4x2", 8: "int8x4"}
_CODE_GROUPS: Final = {-1: "per_token", 32: "per_1x32", 64: "per_1x64", 128: "per_1x128"}
_GPTQ_FORMATS: Final = ("gptq", "gptq_v2")
# compressed-tensors' `actorder` -> whether `weight_g_idx` is stored.
_CT_ORDERS: Final = {None: False, False: False, "weight": False, "static": False, "group": True, "dynamic": True}
# Parts of a pattern of names: escapes, sets of characters, beginnings and ends of groups, repetitions, alternatives.
_PARTS: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?[:=!]|\?<[=!]|\?P<\w*>)?|\)|[*+?{]|\|", re.DOTALL)
_MOST_REPETITIONS: Final = 8
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
    for name in (*parsed.exclude_layers, *(name for name, _ in parsed.layer_quant_configs)):
        if _is_slow(name):
            raise ValueError(
                f"the pattern {name[:80]!r} may take too long; supported: at most {_MOST_REPETITIONS} repetitions, "
                "none of a group with repetitions or alternatives"
            )
    for layer in parsed.layer_configs:
        if layer.quant_type != "no" and layer.quant_type not in WEIGHT_FORMATS[layer.quant_dtype]:
            found = f"{layer.quant_dtype} {layer.quant_type}"
            raise ValueError(f"weights quantized as {found} are not supported; supported: {weight_formats()}")
    return parsed


def _is_slow(name: str) -> bool:
    """True if a search for a name may take exponential time: nested repetitions, or very many."""
    if not name.startswith(REGEX):
        return name.count("*") > _MOST_REPETITIONS
    pattern = name.removeprefix(REGEX)
    # A repetition may stand apart from its group behind a comment, or behind a blank with the flag `x`.
    if re.search(r"\(\?(?:#|[a-z-]*x)", pattern):
        return True
    # For each open group, whether it has repetitions or alternatives.
    groups = [False]
    count = 0
    for found in _PARTS.finditer(pattern):
        part = found[0]
        if part[0] == "(":
            groups.append(False)
        elif part == ")" and len(groups) > 1:
            varies = groups.pop()
            if varies and pattern[found.end() : found.end() + 1] in ("*", "+", "{"):
                return True
            groups[-1] |= varies
        elif part in ("*", "+", "?", "{", "|"):
            groups[-1] = True
            count += part != "|"
    return count > _MOST_REPETITIONS


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


def _gptq(spec: Spec) -> QuantizationConfig:
    """Reads GPTQ of AutoGPTQ, GPTQModel and AutoRound; `dynamic` has other settings for some layers.

    The checkpoint's tensors say which layers are quantized, whatever `lm_head` and `modules_in_block_to_quantize` say.
    """
    form = "marlin" if spec.get("is_marlin_format") else spec.get("checkpoint_format") or spec.get("format") or "gptq"
    if form not in _GPTQ_FORMATS:
        raise ValueError(f"gptq checkpoint_format {form!r} is not supported; supported: {', '.join(_GPTQ_FORMATS)}")
    if spec.get("pack_dtype", "int32") != "int32":
        raise ValueError(f"gptq pack_dtype {spec['pack_dtype']!r} is not supported; supported: int32")
    named, excluded = [], list(_excluded(spec))
    for name, own in _object(spec.get("dynamic") or {}, "dynamic").items():
        pattern = REGEX + name.removeprefix("+:").removeprefix("-:")
        if name.startswith("-:"):
            excluded.append(pattern)
        else:
            named.append((pattern, _gptq_layer({**spec, **_object(own, name)}, form)))
    return QuantizationConfig(_gptq_layer(spec, form), tuple(named), tuple(excluded))


def _gptq_layer(spec: Spec, form: str) -> LayerQuantConfig:
    kind = _group(spec["group_size"])
    by_activation, is_put_back = _flag(spec, "desc_act"), _flag(spec, "static_groups")
    has_order = by_activation and not is_put_back and kind != "per_token"
    return LayerQuantConfig(kind, _codes(spec["bits"]), True, form, _flag(spec, "sym"), has_order)


def _awq(spec: Spec) -> QuantizationConfig:
    """Reads AWQ of AutoAWQ in its `gemm` form, which almost all published files have."""
    version = str(spec.get("version") or spec.get("checkpoint_format") or "gemm").lower()
    if version != "gemm":
        raise ValueError(f"awq version {version!r} is not supported; supported: gemm")
    if spec.get("backend", "autoawq") != "autoawq":
        raise ValueError(f"awq backend {spec['backend']!r} is not supported; supported: autoawq")
    if spec.get("zero_point", True) is not True:
        raise ValueError(f"awq weights with zero_point {spec['zero_point']!r} are not supported; supported: true")
    bits = spec["w_bit" if "w_bit" in spec else "bits"]
    if type(bits) is not int or bits != 4:
        raise ValueError(f"awq weights of {bits!r} bits are not supported; supported: 4")
    kind = _group(spec["q_group_size" if "q_group_size" in spec else "group_size"])
    return QuantizationConfig(LayerQuantConfig(kind, _codes(bits), True, "awq"), (), _excluded(spec))


def _codes(bits: Any) -> str:
    if type(bits) is not int or bits not in _CODES:
        raise ValueError(f"weights of {bits!r} bits are not supported; supported: {', '.join(map(str, _CODES))}")
    return _CODES[bits]


def _group(size: Any) -> str:
    if type(size) is not int or size not in _CODE_GROUPS:
        supported = ", ".join(map(str, _CODE_GROUPS))
        raise ValueError(f"group_size {size!r} is not supported; supported: {supported}")
    return _CODE_GROUPS[size]


def _flag(spec: Spec, key: str) -> bool:
    """True if a setting is true; False if it is false, null or absent. Anything else is refused."""
    value = spec.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key} is {value!r}; it must be true or false")
    return bool(value)


def _object(value: Any, key: str) -> Spec:
    """Returns a setting that must be an object.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} is {value!r}; it must be an object")
    return value


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
    if _has_settings(spec.get("transform_config"), "config_groups"):
        raise ValueError("compressed-tensors transform_config is not supported; supported: none")
    sparsity = _object(spec.get("sparsity_config") or {}, "sparsity_config").get("format", "dense")
    if sparsity != "dense":
        raise ValueError(
            f"compressed-tensors sparsity_config of format {sparsity!r} is not supported; supported: dense"
        )
    everywhere = LayerQuantConfig()
    named = []
    for group_name, settings in _object(spec["config_groups"], "config_groups").items():
        group = _object(settings, group_name)
        if (group_form := group.get("format") or form) not in _CT_FORMATS:
            supported = ", ".join(_CT_FORMATS)
            raise ValueError(f"compressed-tensors format {group_form!r} is not supported; supported: {supported}")
        layer = _CT_LAYERS.get(group_form, _compressed_tensors_layer)(group)
        for target in _names(group, "targets"):
            if target == "Linear":
                everywhere = layer
            else:
                named.append((target, layer))
    return QuantizationConfig(everywhere, tuple(named), _names(spec, "ignore"))


def _has_settings(value: Any, key: str) -> bool:
    """True if an optional object has a non-empty entry."""
    return bool(value.get(key)) if isinstance(value, Mapping) else bool(value)


def _words_layer(group: Spec) -> LayerQuantConfig:
    """Reads integer weights that compressed-tensors packs into words of 32 bits."""
    weights = _object(group["weights"], "weights")
    kind, bits, strategy = str(weights.get("type", "int")), weights["num_bits"], weights.get("strategy")
    if kind != "int":
        raise ValueError(f"compressed-tensors {_CT_WORDS} weights of type {kind!r} are not supported; supported: int")
    size = weights.get("group_size")
    if strategy == "channel":
        size = -1 if size is None else size
        if size != -1:
            raise ValueError(f"compressed-tensors strategy 'channel' has group_size {size!r}; it must be -1 or null")
    elif strategy != "group":
        raise ValueError(f"weights quantized by {strategy!r} are not supported; supported: channel, group")
    order = weights.get("actorder")
    if not isinstance(order, str | bool | None) or order not in _CT_ORDERS:
        raise ValueError(f"compressed-tensors actorder {order!r} is not supported; supported: group, weight, null")
    is_symmetric = weights.get("symmetric") is None or _flag(weights, "symmetric")
    has_order = _CT_ORDERS[order] and strategy == "group"
    return LayerQuantConfig(_group(size), _codes(bits), True, "compressed-tensors", is_symmetric, has_order)


def _nvfp4_layer(group: Spec) -> LayerQuantConfig:
    weights = _object(group["weights"], "weights")
    if (weights["num_bits"], weights.get("type"), weights.get("group_size")) != (4, "float", _NVFP4_GROUP):
        found = f"{weights['num_bits']} bits ({weights.get('type')}) in groups of {weights.get('group_size')}"
        raise ValueError(f"NVFP4 weights of {found} are not supported; supported: 4 bits (float) in groups of 16")
    return LayerQuantConfig("per_1x16", "fp4x2", True, "compressed-tensors")


_CT_LAYERS: Final[dict[str, Callable[[Spec], LayerQuantConfig]]] = {_CT_WORDS: _words_layer, _CT_NVFP4: _nvfp4_layer}


def _modelopt(spec: Spec) -> QuantizationConfig:
    """Reads FP8 and NVFP4 of NVIDIA's ModelOpt."""
    algorithm = str(spec["quant_algo"])
    layers = {
        "FP8": LayerQuantConfig("per_tensor", "fp8", False, "modelopt"),
        "NVFP4": LayerQuantConfig("per_1x16", "fp4x2", True, "modelopt"),
    }
    if algorithm not in layers:
        raise ValueError(f"modelopt quant_algo {algorithm!r} is not supported; supported: {', '.join(layers)}")
    for name, group in _object(spec.get("config_groups") or {}, "config_groups").items():
        if algorithm == "NVFP4":
            _nvfp4_layer(_object(group, name))
    return QuantizationConfig(layers[algorithm], (), _names(spec, "ignore") or _names(spec, "exclude_modules"))


def _compressed_tensors_layer(group: Spec) -> LayerQuantConfig:
    if group["weights"] is None:
        return LayerQuantConfig()
    weights = _object(group["weights"], "weights")
    activations = _object(group.get("input_activations") or {}, "input_activations")
    if weights.get("symmetric") is False:
        raise ValueError("compressed-tensors weights with zero points are not supported; supported: symmetric")
    kind_of_numbers, bits = str(weights.get("type", "int")), weights["num_bits"]
    dtypes = {("float", 8): "fp8", ("int", 8): "int8", ("float", 4): "fp4x2"}
    number = (kind_of_numbers, bits if type(bits) is int else 0)
    if number not in dtypes:
        raise ValueError(
            f"compressed-tensors weights of {bits!r} bits ({kind_of_numbers}) are not supported; "
            "supported: float 8, int 8, float 4"
        )
    kind = _granularity(str(weights["strategy"]), weights.get("block_structure"), weights.get("group_size"))
    return LayerQuantConfig(kind, dtypes[number], bool(activations.get("dynamic", True)), "compressed-tensors")


def _quark(spec: Spec) -> QuantizationConfig:
    if spec.get("layer_type_quant_config"):
        raise ValueError("quark's layer_type_quant_config is not supported; supported: layer_quant_config")
    layers = _object(spec.get("layer_quant_config") or {}, "layer_quant_config")
    named = tuple((name, _quark_layer(_object(layer, name))) for name, layer in layers.items())
    everywhere = _quark_layer(_object(spec["global_quant_config"], "global_quant_config"))
    return QuantizationConfig(everywhere, named, _names(spec, "exclude"))


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
        if type(group_size) is not int or group_size not in _GROUPS:
            raise ValueError(f"group_size {group_size!r} is not supported; supported: {', '.join(map(str, _GROUPS))}")
        return _GROUPS[group_size]
    kinds = {"tensor": "per_tensor", "channel": "per_token"}
    if strategy not in kinds:
        raise ValueError(
            f"weights quantized by {strategy!r} are not supported; supported: {', '.join(kinds)}, block, group"
        )
    return kinds[strategy]


def _block(block: Any) -> str:
    found = [kind for sizes, kind in _BLOCKS.items() if block == list(sizes)]
    if not found:
        supported = ", ".join(str(list(each)) for each in _BLOCKS)
        raise ValueError(f"weights quantized in blocks of {block} are not supported; supported: {supported}")
    return found[0]


_METHODS: Final[dict[str, Callable[[Spec], QuantizationConfig]]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "modelopt": _modelopt,
    "quark": _quark,
    "mxfp4": _mxfp4,
    "w8a8_int8": _w8a8_int8,
    "w8a8_fp8": _w8a8_fp8,
}
