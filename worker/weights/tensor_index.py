"""Finds the tensors that a model expects in a checkpoint, and names every one that does not fit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from common.params.config_parts import LayerQuantConfig, QuantizationConfig
from worker.config.model_config import ModelError
from worker.weights.nvfp4_tensor import MODELOPT_NVFP4, Nvfp4Tensor, nvfp4_names, nvfp4_shapes
from worker.weights.packed_words import (
    CODE_BITS,
    COMPRESSED,
    WordEntries,
    WordLayout,
    WordTensor,
    group_size,
    word_layout,
    word_shapes,
)
from worker.weights.safetensors_file import Entry, Shape
from worker.weights.stored_tensors import (
    Files,
    FloatTensor,
    QuantizedTensor,
    StoredTensor,
    matrix_shape,
    scales_shape,
)

FLOATS: Final = ("F32", "BF16", "F16")
# Tensors of ids, of draft heads.
IDS: Final = {"d2t": "I64"}
# Dtype of the quantization -> dtypes of safetensors.
VALUES: Final = {"fp8": ("F8_E4M3", "F8_E4M3FNUZ"), "int8": ("I8",), "fp4x2": ("U8",)}
SCALES: Final = {"fp8": (*FLOATS, "F8_E8M0"), "int8": FLOATS, "fp4x2": ("U8", "F8_E8M0")}
# Buffers that older transformers wrote and that follow from config.json.
DERIVED_SUFFIXES: Final = (".rotary_emb.inv_freq",)
# Suffixes of scales of the KV cache and of queries. They are not used: a cache in fp8 has a scale of 1.
KV_SCALE_SUFFIXES: Final = (
    ".k_scale",
    ".kv_scale",
    ".q_scale",
    ".v_scale",
    ".k_proj.output_scale",
    ".v_proj.output_scale",
)
# Suffixes of scales of activations and of the KV cache. Neither is quantized by these scales here.
ACTIVATION_SUFFIXES: Final = (
    ".activation_scale",
    ".input_global_scale",
    ".input_scale",
    ".output_scale",
    *KV_SCALE_SUFFIXES,
)
# Tensors that published checkpoints do not have in codes.
_FLOATS_BESIDE_CODES: Final = ("embed_tokens.weight", "lm_head.weight")
# Suffixes of codes in words.
_CODES_SUFFIXES: Final = (".qweight", ".weight_packed")
# How many tensor names an error spells out.
_NAMES_SHOWN: Final = 5


@dataclass(frozen=True)
class _Layout:
    """Endings of the names under which a checkpoint may store a tensor; `transposed` as in QuantizedTensor."""

    values: str
    scales: tuple[str, ...]
    transposed: bool = False


# Floats; FP8 and INT8 of all methods; FP4 of Quark.
_PLAIN: Final = _Layout("", ("_scale_inv", "_scale"))
# FP4 of compressed-tensors.
_PACKED: Final = _Layout("_packed", ("_scale",))
# FP4 of gpt-oss.
_BLOCKS: Final = _Layout("_blocks", ("_scales",), transposed=True)
_LAYOUTS: Final = (_PLAIN, _PACKED, _BLOCKS)


# Prefixes of the names of a text decoder, and those of the same tensors in a multimodal checkpoint, as transformers 4
# and 5 save it; and prefixes of the names of its other parts.
TEXT_PARTS: Final = (("", "language_model."), ("model.", "model.language_model."))
OTHER_PARTS: Final = tuple(
    f"{prefix}{part}." for prefix in ("", "model.") for part in ("vision_tower", "multi_modal_projector", "visual")
)


class CheckpointIndex:
    """Search for a model's tensors in a checkpoint.

    Args:
        entries: every tensor of the checkpoint.
        quantization: how its weights are quantized.
        prefixes: the beginning of the model's names, and what the checkpoint's have in its place.
    """

    def __init__(
        self, entries: Mapping[str, Entry], quantization: QuantizationConfig, prefixes: tuple[str, str] = ("", "")
    ) -> None:
        self._entries = entries
        self._prefixes = prefixes
        self._quantization = quantization
        self._used: set[str] = set()
        self._missing: list[str] = []
        self._misshapen: list[str] = []
        self._mistyped: list[str] = []

    def stored(self, name: str) -> str:
        """Name in the checkpoint for a name, or the beginning of a name, in the model."""
        own, stored = self._prefixes
        return stored + name.removeprefix(own) if name.startswith(own) else name

    def find(self, expected: Mapping[str, Shape], kept: tuple[str, ...] = ()) -> dict[str, StoredTensor]:
        """Finds each expected tensor.

        Args:
            expected: name and shape of every tensor of the model.
            kept: beginnings of names of further tensors that may be there and are left alone.

        Raises:
            ModelError: tensors are missing, surplus, or of another shape or dtype; names them.
        """
        places = {name: self._find(self.stored(name), shape) for name, shape in expected.items()}
        found = {name: tensor for name, tensor in places.items() if tensor is not None}
        kept = (*map(self.stored, kept), *(OTHER_PARTS if self._prefixes in TEXT_PARTS else ()))
        surplus = [name for name in self._entries.keys() - self._used if not self._is_harmless(name, kept)]
        files = Files()
        surplus = [name for name in surplus if not self._is_zero_bias(name, files)]
        # Some checkpoints with tied embeddings store the head again.
        surplus = [] if surplus == ["lm_head.weight"] else surplus
        texts = (
            ("missing ", self._missing),
            ("surplus ", surplus),
            ("", self._misshapen),
            ("of a dtype that is not expected: ", self._mistyped),
        )
        problems = [prefix + some(sorted(names)) for prefix, names in texts if names]
        has_codes = any(name.endswith(_CODES_SUFFIXES) for name in self._entries)
        if problems and has_codes and self._quantization == QuantizationConfig():
            problems.append("they are quantized, but config.json has no quantization_config")
        if problems:
            raise ModelError(f"the weights do not fit config.json: {'; '.join(problems)}")
        return found

    def _is_harmless(self, name: str, kept: tuple[str, ...]) -> bool:
        quantized = self._quantization != QuantizationConfig()
        return name.endswith(DERIVED_SUFFIXES + (ACTIVATION_SUFFIXES if quantized else ())) or name.startswith(kept)

    def _is_zero_bias(self, name: str, files: Files) -> bool:
        """True if a tensor is a bias of zeros beside codes. AutoGPTQ wrote one for every layer, also of models without
        biases."""
        layer = name.removesuffix(".bias")
        has_codes = name != layer and f"{layer}.qweight" in self._used
        return has_codes and self._entries[name].dtype in FLOATS and not files.tensor(self._entries[name]).any()

    def _find(self, name: str, shape: Shape) -> StoredTensor | None:
        config = self._quantization.of_layer(name.removesuffix(".weight"))
        words = word_layout(name, self._entries, config)
        if words is not None:
            return self._in_words(name, shape, words)
        if config.quant_type == "per_1x16" and self._has_bytes(name) and len(shape) == 2:
            return self._in_nvfp4(name, shape)
        layout = next((each for each in _LAYOUTS if name + each.values in self._entries), None)
        if layout is None:
            self._missing.append(name)
            return None
        values = self._use(name + layout.values)
        if values.dtype in FLOATS or values.dtype == IDS.get(name):
            self._check_shape(name, values, shape)
            return FloatTensor(values)
        return self._quantized(name, shape, layout, values)

    def _use(self, name: str) -> Entry:
        self._used.add(name)
        return self._entries[name]

    def _quantized(self, name: str, shape: Shape, layout: _Layout, values: Entry) -> QuantizedTensor | None:
        config = self._quantization.of_layer(name.removesuffix(".weight"))
        # Codes in words and NVFP4 have names of their own.
        is_other = config.quant_type in ("no", "per_1x16") or len(shape) < 2
        wanted = () if is_other else VALUES.get(config.quant_dtype, ())
        scales_name = next((name + each for each in layout.scales if name + each in self._entries), None)
        scales = self._use(scales_name) if scales_name else None
        if values.dtype not in wanted:
            self._mistyped.append(f"{name + layout.values} is {values.dtype}, expected {_or((*wanted, *FLOATS))}")
            return None
        if scales is None or scales_name is None:
            self._missing.append(_or(tuple(name + each for each in layout.scales)))
            return None
        packed = config.quant_dtype == "fp4x2"
        self._check_shape(name + layout.values, values, _values_shape(shape, layout, packed))
        grain = _grain(config, matrix_shape(shape, layout.transposed))
        self._check_scales(scales_name, scales, config, shape, layout)
        return QuantizedTensor(shape, values, scales, grain, packed, layout.transposed)

    def _in_words(self, name: str, shape: Shape, layout: WordLayout) -> WordTensor | None:
        layer = name.removesuffix(".weight")
        config = self._quantization.of_layer(layer)
        codes = self._use(layer + layout.codes)
        if config.quant_dtype not in CODE_BITS or len(shape) != 2:
            self._mistyped.append(f"{layer}{layout.codes} is {codes.dtype}, expected {_or(FLOATS)}")
            return None
        found = self._parts(layer, word_shapes(layout, config, shape))
        if found is None:
            return None
        if layout.shape and layer + layout.shape in self._entries:
            found |= self._parts(layer, {layout.shape: (("I32", "I64"), (2,))}) or {}
        entries = WordEntries(
            codes,
            found[layout.scales],
            found.get(layout.zeros),
            found.get(layout.order),
            found.get(layout.shape),
        )
        return WordTensor(
            shape=shape,
            group=group_size(config, shape[1]),
            has_order=config.has_order,
            layer=layer,
            layout=layout,
            entries=entries,
            bits=CODE_BITS[config.quant_dtype],
            is_symmetric=config.is_symmetric,
        )

    def _has_bytes(self, name: str) -> bool:
        """True if a weight is stored as bytes, under a name for NVFP4."""
        entry = self._entries.get(name + nvfp4_names(name, self._entries).numbers)
        return entry is not None and entry.dtype not in FLOATS

    def _in_nvfp4(self, name: str, shape: Shape) -> Nvfp4Tensor | None:
        names = nvfp4_names(name, self._entries)
        found = self._parts(name, nvfp4_shapes(names, shape))
        if found is None:
            return None
        numbers, scales, factor = (found[ending] for ending in (names.numbers, names.scales, names.factor))
        return Nvfp4Tensor(shape=shape, numbers=numbers, scales=scales, factor=factor, divides=names.divides)

    def _parts(self, start: str, wanted: Mapping[str, tuple[tuple[str, ...], Shape]]) -> dict[str, Entry] | None:
        """Tensors whose names begin with `start`, by ending; None if one is missing. Others are named in errors."""
        found: dict[str, Entry] = {}
        for ending, (dtypes, expected) in wanted.items():
            if start + ending not in self._entries:
                self._missing.append(start + ending)
                continue
            found[ending] = entry = self._use(start + ending)
            if expected or math.prod(entry.shape) != 1:
                self._check_shape(start + ending, entry, expected)
            if entry.dtype not in dtypes:
                self._mistyped.append(f"{start}{ending} is {entry.dtype}, expected {_or(dtypes)}")
        return found if len(found) == len(wanted) else None

    def _check_shape(self, name: str, entry: Entry, shape: Shape) -> None:
        if entry.shape != shape:
            self._misshapen.append(f"{name} is {list(entry.shape)}, expected {list(shape)}")

    def _check_scales(self, name: str, entry: Entry, config: LayerQuantConfig, shape: Shape, layout: _Layout) -> None:
        if entry.dtype not in SCALES[config.quant_dtype]:
            self._mistyped.append(f"{name} is {entry.dtype}, expected {_or(SCALES[config.quant_dtype])}")
        matrix = matrix_shape(shape, layout.transposed)
        wanted = (*shape[:-2], *scales_shape(matrix, _grain(config, matrix)))
        one_for_all = config.quant_type == "per_tensor" and math.prod(entry.shape) == 1
        if _without_ones(entry.shape) != _without_ones(wanted) and not one_for_all:
            self._misshapen.append(f"{name} is {list(entry.shape)}, expected {list(wanted)}")


def stored_as(name: str, shape: Shape, quantization: QuantizationConfig) -> dict[str, tuple[str, Shape]]:
    """Names, safetensors dtypes and shapes that a checkpoint may have for a tensor, quantized if that is possible.

    Also where checkpoints have floats, as for embeddings and routers, which are dequantized when they are read.
    """
    config = quantization.of_layer(name.removesuffix(".weight"))
    packed = config.quant_dtype == "fp4x2"
    layout = _BLOCKS if packed and len(shape) > 2 else _PACKED if packed else _PLAIN
    if config.quant_type == "no" or len(shape) < 2:
        return {name: ("BF16", shape)}
    if config.quant_dtype in CODE_BITS or config.quant_type == "per_1x16":
        return _stored_in_groups(name, shape, config)
    matrix = matrix_shape(shape, layout.transposed)
    if packed and matrix[1] % 32:
        return {name: ("BF16", shape)}
    scales = (*shape[:-2], *scales_shape(matrix, _grain(config, matrix)))
    return {
        name + layout.values: (VALUES[config.quant_dtype][0], _values_shape(shape, layout, packed)),
        name + layout.scales[-1]: (SCALES[config.quant_dtype][0], scales),
    }


def _stored_in_groups(name: str, shape: Shape, config: LayerQuantConfig) -> dict[str, tuple[str, Shape]]:
    """See `stored_as`. Weights with an order of columns are floats here: zeros are no order."""
    if len(shape) != 2 or name.endswith(_FLOATS_BESIDE_CODES) or config.has_order:
        return {name: ("BF16", shape)}
    if config.quant_type == "per_1x16":
        parts = nvfp4_shapes(MODELOPT_NVFP4, shape)
        return {name + ending: (dtypes[0], each) for ending, (dtypes, each) in parts.items()}
    found = word_shapes(COMPRESSED, config, shape)
    return {name.removesuffix(".weight") + ending: (dtypes[0], each) for ending, (dtypes, each) in found.items()}


def some(names: list[str]) -> str:
    """Lists the first names, and the number of others."""
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


def _values_shape(shape: Shape, layout: _Layout, packed: bool) -> Shape:
    if not packed:
        return shape
    num_rows, num_columns = matrix_shape(shape, layout.transposed)
    inner = (num_columns // 32, 16) if layout.values == "_blocks" else (num_columns // 2,)
    return (*shape[:-2], num_rows, *inner)


def _grain(config: LayerQuantConfig, matrix: tuple[int, int]) -> tuple[int, int]:
    num_rows, num_columns = matrix
    return {
        "per_tensor": (num_rows, num_columns),
        "per_token": (1, num_columns),
        "per_1x32": (1, 32),
        "per_1x128": (1, 128),
        "per_128x128": (128, 128),
    }[config.quant_type]


def _without_ones(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)


def _or(choices: tuple[str, ...]) -> str:
    *others, last = choices
    return f"{', '.join(others)} or {last}" if others else last
