"""Quantized checkpoints made by numpy alone: number formats by their definitions, files byte by byte.

Each scheme gives the tensors that its method stores for a weight, and the weight that they stand for, number by number.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
# safetensors' dtype and the bytes.
Stored = tuple[str, npt.NDArray[Any]]


def fp8_table(fnuz: bool = False) -> Floats:
    """float32 [256]: the value of each byte; E4M3 without infinities, or with one zero and a bias of 8 (fnuz)."""
    bias = 8 if fnuz else 7
    values = []
    for byte in range(256):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        size = mantissa / 8 * 2.0 ** (1 - bias) if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - bias)
        nan = byte == 0x80 if fnuz else byte & 0x7F == 0x7F
        values.append(math.nan if nan else -size if byte & 0x80 else size)
    return np.array(values, np.float32)


def fp4_table() -> Floats:
    """float32 [16]: the value of each E2M1 number."""
    values = []
    for bits in range(16):
        exponent, mantissa = bits >> 1 & 3, bits & 1
        size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        values.append(-size if bits & 8 else size)
    return np.array(values, np.float32)


def nearest(values: Floats, table: Floats) -> npt.NDArray[np.uint8]:
    """The index of the table's value that is nearest to each."""
    order = np.argsort(table, kind="stable")
    order = order[np.isfinite(table[order])]
    middles = (table[order][1:] + table[order][:-1]) / 2
    return np.asarray(order[np.searchsorted(middles, values)], np.uint8)


def per_block(matrix: Floats, block: tuple[int, int], one: Callable[[Floats], float]) -> Floats:
    """`one` of each block."""
    rows, columns = block
    return np.array(
        [
            [one(matrix[i : i + rows, j : j + columns]) for j in range(0, matrix.shape[1], columns)]
            for i in range(0, matrix.shape[0], rows)
        ],
        np.float32,
    )


def worth(numbers: Floats, scales: Floats, block: tuple[int, int]) -> Floats:
    """Each number times its block's scale."""
    out = np.empty_like(numbers)
    for i in range(numbers.shape[0]):
        for j in range(numbers.shape[1]):
            out[i, j] = np.float32(numbers[i, j]) * np.float32(scales[i // block[0], j // block[1]])
    return out


def bf16(values: Floats) -> tuple[npt.NDArray[np.uint16], Floats]:
    """The values rounded to bfloat16, to the nearest and even ones in the middle: as bits and as float32."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    short = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return short, (short.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class Scheme:
    """A method of quantization.

    Attributes:
        config: `quantization_config`.
        block: rows and columns that share a scale; 0 for all.
        number: `fp8`, `fnuz`, `int8` or `fp4`.
        scale: `F32`, `BF16`, or `E8M0` as U8 or F8_E8M0.
        values_suffix, scales_suffix: endings of names after the weight's own.
        scale_shape: the shape of the stored scales, from that of one for each block.
    """

    config: Mapping[str, Any]
    block: tuple[int, int]
    number: str
    scale: str = "F32"
    values_suffix: str = ""
    scales_suffix: str = "_scale"
    scale_shape: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda shape: shape

    def quantize(self, name: str, weight: Floats) -> tuple[dict[str, Stored], Floats]:
        """What is stored for a weight [N, K], and its worth."""
        block = (self.block[0] or weight.shape[0], self.block[1] or weight.shape[1])
        table = {"fp8": fp8_table(), "fnuz": fp8_table(fnuz=True), "fp4": fp4_table()}.get(self.number)
        largest = 127.0 if table is None else float(np.nanmax(table))
        exact = per_block(weight, block, lambda part: max(float(np.abs(part).max()), 1e-6) / largest)
        stored_scales, scales = self._scales(exact)
        shrunk = weight / np.kron(scales, np.ones(block, np.float32))[: weight.shape[0], : weight.shape[1]]
        stored: Stored
        if table is None:
            values = np.clip(np.round(shrunk), -128, 127).astype(np.int8)
            stored, numbers = ("I8", values), values.astype(np.float32)
        else:
            codes = nearest(shrunk, table)
            numbers = table[codes]
            stored = ("U8", _pairs(codes)) if self.number == "fp4" else (_FP8[self.number], codes)
        shape = self.scale_shape(scales.shape)
        tensors = {
            name + self.values_suffix: stored,
            name + self.scales_suffix: (stored_scales[0], stored_scales[1].reshape(shape)),
        }
        return tensors, worth(numbers, scales, block)

    def _scales(self, exact: Floats) -> tuple[Stored, Floats]:
        if self.scale == "F32":
            return ("F32", exact), exact
        if self.scale == "BF16":
            bits, values = bf16(exact)
            return ("BF16", bits), values
        # The power of two that is not below, with a bias of 127.
        exponents = np.ceil(np.log2(exact)).astype(np.int64)
        return (self.scale, (exponents + 127).astype(np.uint8)), np.exp2(exponents).astype(np.float32)


_FP8 = {"fp8": "F8_E4M3", "fnuz": "F8_E4M3FNUZ"}


def _pairs(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Two codes in each byte, the first in the lower half."""
    return np.asarray(codes[:, 0::2] | codes[:, 1::2] << 4, np.uint8)


def _compressed(strategy: str, kind: str = "float", bits: int = 8, form: str = "", **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": form or f"{kind}-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": {"num_bits": bits, "type": kind, "strategy": "token", "dynamic": True},
                "output_activations": None,
            }
        },
        "quantization_status": "compressed",
    }


def _quark(dtype: str, qscheme: str, group_size: int | None = None) -> dict[str, Any]:
    weight = {"dtype": dtype, "qscheme": qscheme, "group_size": group_size, "is_dynamic": False, "symmetric": None}
    spec = {"weight": weight, "input_tensors": {"dtype": dtype, "qscheme": qscheme, "is_dynamic": True}, "bias": None}
    return {"quant_method": "quark", "exclude": ["lm_head", "*.gate"], "global_quant_config": spec}


SCHEMES: dict[str, Scheme] = {
    "deepseek": Scheme(
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        (128, 128),
        "fp8",
        scales_suffix="_scale_inv",
    ),
    "deepseek-e8m0-scales": Scheme(
        {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
        (128, 128),
        "fp8",
        "F8_E8M0",
        scales_suffix="_scale_inv",
    ),
    "fp8-per-tensor": Scheme(
        {"quant_method": "fp8", "activation_scheme": "static"}, (0, 0), "fp8", scale_shape=lambda _: ()
    ),
    "compressed-tensors-fp8-tensor": Scheme(_compressed("tensor"), (0, 0), "fp8", "BF16", scale_shape=lambda _: (1,)),
    "compressed-tensors-fp8-channel": Scheme(_compressed("channel"), (1, 0), "fp8", "BF16"),
    "compressed-tensors-fp8-block": Scheme(_compressed("block", block_structure=[128, 128]), (128, 128), "fp8"),
    "compressed-tensors-fp8-group": Scheme(_compressed("group", group_size=128), (1, 128), "fp8"),
    "compressed-tensors-int8-channel": Scheme(_compressed("channel", "int"), (1, 0), "int8"),
    "compressed-tensors-int8-tensor": Scheme(_compressed("tensor", "int"), (0, 0), "int8", scale_shape=lambda _: (1,)),
    "compressed-tensors-mxfp4": Scheme(
        _compressed("group", bits=4, form="mxfp4-pack-quantized", group_size=32),
        (1, 32),
        "fp4",
        "U8",
        values_suffix="_packed",
    ),
    "w8a8-int8": Scheme({"quant_method": "w8a8_int8"}, (1, 0), "int8"),
    "w8a8-fp8": Scheme({"quant_method": "w8a8_fp8"}, (1, 0), "fp8"),
    "quark-fp8-tensor": Scheme(_quark("fp8_e4m3", "per_tensor"), (0, 0), "fp8", scale_shape=lambda _: ()),
    "quark-fp8-fnuz": Scheme(_quark("fp8_e4m3", "per_tensor"), (0, 0), "fnuz", scale_shape=lambda _: ()),
    "quark-fp8-channel": Scheme(_quark("fp8_e4m3", "per_channel"), (1, 0), "fp8", scale_shape=lambda shape: shape[:1]),
    "quark-int8-channel": Scheme(_quark("int8", "per_channel"), (1, 0), "int8", scale_shape=lambda shape: shape[:1]),
    "quark-mxfp4": Scheme(_quark("fp4", "per_group", 32), (1, 32), "fp4", "U8"),
}


def write_safetensors(file: Path, tensors: Mapping[str, Stored]) -> None:
    """Writes a safetensors file byte by byte."""
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, array) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for _, array in tensors.values():
            stream.write(np.ascontiguousarray(array).tobytes())


# Names of weights that published quantized checkpoints quantize: not embeddings, heads, routers, norms.
PROJECTIONS = re.compile(r".*(_proj|_proj_with_mqa|\.w[123]|\.indexer\.w(q_b|k))\.weight")


def quantize_checkpoint(
    folder: Path, scheme: Scheme, wanted: Callable[[str], bool] = lambda _: True
) -> dict[str, Floats]:
    """Quantizes the `wanted` projections of a float32 checkpoint in place; every weight's worth by name.

    FP4 leaves weights alone whose rows are no whole groups, as quantizers do.
    """
    from safetensors.numpy import load_file

    file = folder / "model.safetensors"
    tensors: dict[str, Stored] = {}
    worths: dict[str, Floats] = {}
    for name, weight in load_file(file).items():
        if PROJECTIONS.fullmatch(name) and wanted(name) and not (scheme.number == "fp4" and weight.shape[1] % 32):
            stored, worths[name] = scheme.quantize(name, weight)
            tensors |= stored
        else:
            tensors[name], worths[name] = ("F32", weight), weight
    write_safetensors(file, tensors)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": scheme.config}))
    return worths
