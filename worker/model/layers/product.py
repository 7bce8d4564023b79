"""Weights of products: in the checkpoint's stored format if the back end can multiply by it, otherwise as floats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from kernels.interface import QuantizedFormat, QuantizedWeight
from kernels.quantized_weight import joined_quant_type, joined_weights
from worker.model.layers.build import Build
from worker.weights.checkpoint import Weights
from worker.weights.stored_tensors import MatrixPart

# Parts of matrices that are stacked into one weight.
Product = Sequence[MatrixPart]


def stay_quantized(build: Build, products: Iterable[Product]) -> bool:
    """True if the weights of all these products stay in their stored format, which is then one format.

    Otherwise `Weights.use` gets the reason. Ranks with equal shares of a matrix decide alike.
    """
    every = list(products)
    quantized = [part.name for product in every for part in product if build.weights.quantized(part.name) is not None]
    if not quantized:
        return False
    reason = _refusal(build, every)
    if reason is not None:
        build.weights.use.dequantized.update(dict.fromkeys(quantized, reason))
    return reason is None


def product_weight(build: Build, product: Product, stays: bool) -> torch.Tensor | QuantizedWeight:
    """[N, K], read once: in its stored format if `stays` (`stay_quantized`), otherwise in the model's dtype."""
    if not stays:
        return product_floats(build, product)
    parts = [build.weights.take_quantized(part) for part in product]
    return parts[0] if len(parts) == 1 else joined_weights(parts)


def product_floats(build: Build, product: Product) -> torch.Tensor:
    """The parts, each converted into its rows of the result."""
    shapes = [build.weights.part_shape(part.name, part.rows, part.columns) for part in product]
    joined = torch.empty(sum(shape[0] for shape in shapes), *shapes[0][1:], dtype=build.dtype)
    places = torch.split(joined, [shape[0] for shape in shapes])
    for part, place in zip(product, places, strict=True):
        build.weights.copy_to(place, part.name, part.rows, part.columns)
    return joined


def _refusal(build: Build, products: Sequence[Product]) -> str | None:
    if build.packed_format is not None:
        return "quantize asks for other numbers"
    formats = set()
    for product in products:
        stored = _format(build.weights, product)
        if isinstance(stored, str):
            return stored
        formats.add(stored)
    if len(formats) > 1:
        return "experts are stored in several formats"
    (stored,) = formats
    if build.kernels.keeps_quantized(stored, build.dtype):
        return None
    numbers = str(stored.numbers).removeprefix("torch.")
    return f"kernels {build.kernels.name!r} do not multiply {numbers}"


def _format(weights: Weights, product: Product) -> QuantizedFormat | str:
    """Stored format of a product's weight, or the reason why it cannot stay in it."""
    found = [weights.quantized(part.name) for part in product]
    tensors = [tensor for tensor in found if tensor is not None]
    if len(tensors) < len(found):
        return "a part of the product is stored as floats"
    for tensor, part in zip(tensors, product, strict=True):
        refusal = tensor.refusal(part)
        if refusal is not None:
            return refusal
    numbers = {tensor.numbers for tensor in tensors}
    pairs = list(zip(tensors, product, strict=True))
    types, rows = [one.part_quant_type(part) for one, part in pairs], [one.part_rows(part) for one, part in pairs]
    quant_type = joined_quant_type(types, rows)
    if quant_type is None or len(numbers) > 1:
        return "parts of the product are stored in several formats"
    return QuantizedFormat(numbers.pop(), quant_type)
