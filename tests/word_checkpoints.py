"""Checkpoints of 4 and 8 bits in words of 32 bits, made by numpy alone from what GPTQ, AWQ and compressed-tensors say.

Each scheme gives the tensors that its method stores for a layer, and the weight that they stand for, number by number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.quantizers import PROJECTIONS, Floats, Stored, bf16, fp4_table, fp8_table, nearest, write_safetensors

Codes = npt.NDArray[np.int64]
# Column of a word's first, second, ... four bits (AutoAWQ's `order_map`).
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class WordScheme:
    """A method with its settings.

    Attributes:
        method: `gptq`, `gptq_v2`, `awq` or `compressed-tensors`.
        bits: of a code.
        group: columns that share a scale; -1 for all.
        symmetric: True if every zero point is the middle code.
        ordered: True if groups are of columns in a random order.
        scale: dtype of scales, `F16` or `BF16`.
    """

    method: str
    bits: int = 4
    group: int = 32
    symmetric: bool = False
    ordered: bool = False
    scale: str = "F16"

    @property
    def config(self) -> dict[str, Any]:
        """`quantization_config`, with the entries that published files have."""
        if self.method == "awq":
            settings = {"bits": self.bits, "group_size": self.group, "zero_point": True, "version": "gemm"}
            return {"quant_method": "awq", **settings, "modules_to_not_convert": None}
        if self.method == "compressed-tensors":
            return self._compressed()
        return {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group,
            "desc_act": self.ordered,
            "sym": self.symmetric,
            "static_groups": False,
            "true_sequential": True,
            "damp_percent": 0.01,
            "checkpoint_format": self.method,
        }

    def _compressed(self) -> dict[str, Any]:
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.symmetric,
            "strategy": "channel" if self.group == -1 else "group",
            "group_size": None if self.group == -1 else self.group,
            "dynamic": False,
            "actorder": "group" if self.ordered else None,
            "block_structure": None,
        }
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": group},
            "kv_cache_scheme": None,
            "quantization_status": "compressed",
        }

    def quantize(self, layer: str, weight: Floats, seed: int = 0) -> tuple[dict[str, Stored], Floats]:
        """What is stored for a layer's weight [N, K], and the weight's worth."""
        inner = weight.shape[1]
        group = inner if self.group == -1 else self.group
        # Column k is the `ranks[k]`-th that was quantized.
        is_ordered = self.ordered and group < inner
        ranks = np.random.default_rng(seed).permutation(inner) if is_ordered else np.arange(inner)
        groups = ranks // group
        codes, zeros = np.empty(weight.shape, np.int64), np.empty((len(weight), max(groups) + 1), np.int64)
        exact = np.empty(zeros.shape, np.float32)
        for g in range(zeros.shape[1]):
            exact[:, g], zeros[:, g] = self._range(weight[:, groups == g])
        bits, scales = self._rounded(exact)
        for k in range(inner):
            g = groups[k]
            codes[:, k] = np.clip(np.round(weight[:, k] / scales[:, g]) + zeros[:, g], 0, (1 << self.bits) - 1)
        worth = (codes - zeros[:, groups]).astype(np.float32) * scales[:, groups]
        return self.stored(layer, codes, zeros, (self.scale, bits), groups), worth

    def _range(self, part: Floats) -> tuple[Floats, Codes]:
        """Scale and zero point of each row; zero points from 1, which the first version of GPTQ can store."""
        highest, middle = (1 << self.bits) - 1, 1 << (self.bits - 1)
        if self.symmetric:
            return np.maximum(np.abs(part).max(axis=1) / (middle - 1), 1e-6), np.full(len(part), middle)
        low, high = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
        scale = np.maximum((high - low) / highest, 1e-6)
        return scale, np.clip(np.round(-low / scale), 1, highest).astype(np.int64)

    def _rounded(self, exact: Floats) -> tuple[npt.NDArray[Any], Floats]:
        if self.scale == "BF16":
            return bf16(exact)
        half = exact.astype(np.float16)
        return half, half.astype(np.float32)

    def stored(
        self, layer: str, codes: Codes, zeros: Codes, scales: Stored, groups: npt.NDArray[np.int64]
    ) -> dict[str, Stored]:
        """The tensors of codes [N, K], zero points [N, G], scales [N, G] and the group of each column."""
        dtype, factors = scales
        if self.method == "compressed-tensors":
            tensors: dict[str, Stored] = {
                f"{layer}.weight_packed": ("I32", packed(codes, 1, self.bits)),
                f"{layer}.weight_scale": (dtype, factors),
                f"{layer}.weight_shape": ("I64", np.array(codes.shape, np.int64)),
            }
            if not self.symmetric:
                tensors[f"{layer}.weight_zero_point"] = ("I32", packed(zeros, 0, self.bits))
            if self.ordered and self.group != -1:
                tensors[f"{layer}.weight_g_idx"] = ("I32", groups.astype(np.int32))
            return tensors
        tensors = {f"{layer}.scales": (dtype, np.ascontiguousarray(factors.T))}
        if self.method == "awq":
            tensors[f"{layer}.qweight"] = ("I32", packed(codes.T, 1, self.bits, AWQ_ORDER))
            tensors[f"{layer}.qzeros"] = ("I32", packed(zeros.T, 1, self.bits, AWQ_ORDER))
            return tensors
        less = 1 if self.method == "gptq" else 0
        tensors[f"{layer}.qweight"] = ("I32", packed(codes.T, 0, self.bits))
        tensors[f"{layer}.qzeros"] = ("I32", packed(zeros.T - less, 1, self.bits))
        tensors[f"{layer}.g_idx"] = ("I32", groups.astype(np.int32))
        return tensors


def packed(codes: Codes, axis: int, bits: int, order: tuple[int, ...] = ()) -> npt.NDArray[np.int32]:
    """Words of codes that lie along an axis, the lowest bits first; `order` names the code of each place."""
    lines = codes if axis == 1 else codes.T
    count = 32 // bits
    words = np.zeros((lines.shape[0], -(-lines.shape[1] // count)), np.uint32)
    for line, row in enumerate(lines):
        for word in range(words.shape[1]):
            for place in range(count):
                column = word * count + (order[place] if order else place)
                if column < lines.shape[1]:
                    words[line, word] |= np.uint32(int(row[column]) << (place * bits))
    found = words if axis == 1 else np.ascontiguousarray(words.T)
    return found.view(np.int32)


WORD_SCHEMES: dict[str, WordScheme] = {
    "gptq": WordScheme("gptq"),
    "gptq-sym-g128": WordScheme("gptq", group=128, symmetric=True),
    "gptq-act-order": WordScheme("gptq", ordered=True),
    "gptq-sym-act-order-g64": WordScheme("gptq", group=64, symmetric=True, ordered=True, scale="BF16"),
    "gptq-channel": WordScheme("gptq", group=-1, ordered=True),
    "gptq-v2": WordScheme("gptq_v2", group=64),
    "gptq-8-bits": WordScheme("gptq", bits=8, symmetric=True),
    "gptq-v2-8-bits-act-order": WordScheme("gptq_v2", bits=8, ordered=True),
    "awq": WordScheme("awq"),
    "awq-g128": WordScheme("awq", group=128),
    "awq-channel": WordScheme("awq", group=-1),
    "compressed-tensors": WordScheme("compressed-tensors", symmetric=True, scale="BF16"),
    "compressed-tensors-asymmetric-g128": WordScheme("compressed-tensors", group=128),
    "compressed-tensors-channel": WordScheme("compressed-tensors", group=-1, symmetric=True, scale="BF16"),
    "compressed-tensors-channel-asymmetric": WordScheme("compressed-tensors", group=-1),
    "compressed-tensors-act-order": WordScheme("compressed-tensors", symmetric=True, ordered=True),
    "compressed-tensors-8-bits": WordScheme("compressed-tensors", bits=8, group=64),
}


def write_config(folder: Path, quantization: Mapping[str, Any]) -> None:
    """Puts `quantization_config` into config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": dict(quantization)}))


def pack_checkpoint(folder: Path, scheme: WordScheme, also: str = "") -> dict[str, Floats]:
    """Packs the projections of a float32 checkpoint in place, and the weight `also`; every weight's worth by name.

    Projections of one input have one order of columns, as quantizers give them.
    """
    from safetensors.numpy import load_file

    file = folder / "model.safetensors"
    tensors: dict[str, Stored] = {}
    worths: dict[str, Floats] = {}
    for name, weight in load_file(file).items():
        if PROJECTIONS.fullmatch(name) or name == also:
            stored, worths[name] = scheme.quantize(name.removesuffix(".weight"), weight)
            tensors |= stored
        else:
            tensors[name], worths[name] = ("F32", weight), weight
    write_safetensors(file, tensors)
    write_config(folder, scheme.config)
    return worths


def nvfp4(name: str, weight: Floats, *, is_modelopt: bool) -> tuple[dict[str, Stored], Floats]:
    """What ModelOpt or compressed-tensors store for a weight [N, K] in NVFP4, and its worth."""
    table, eighths = fp4_table(), fp8_table()
    largest = np.float32(np.abs(weight).max() / (6.0 * 448.0))
    # compressed-tensors stores the reciprocal.
    factor = largest if is_modelopt else np.float32(1.0) / largest
    blocks = np.abs(weight).reshape(len(weight), -1, 16).max(axis=2)
    codes = nearest((blocks / (6.0 * largest)).astype(np.float32), eighths)
    scales = eighths[codes] * factor if is_modelopt else eighths[codes] / factor
    spread = np.maximum(np.repeat(scales, 16, axis=1), np.float32(1e-12))
    numbers = nearest((weight / spread).astype(np.float32), table)
    halves = np.asarray(numbers[:, 0::2] | numbers[:, 1::2] << 4, np.uint8)
    endings = ("", "_scale_2") if is_modelopt else ("_packed", "_global_scale")
    tensors: dict[str, Stored] = {
        name + endings[0]: ("U8", halves),
        f"{name}_scale": ("F8_E4M3", codes),
        name + endings[1]: ("F32", np.array(factor if is_modelopt else [factor], np.float32)),
    }
    return tensors, table[numbers] * np.repeat(scales, 16, axis=1)
