"""Weights of products: in the checkpoint's stored format if the back end can multiply by it, otherwise as floats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from kernels.grouped_weight import GroupedWeight, have_one_order, stacked_weights
from kernels.interface import GROUPED, AnyWeight, QuantizedFormat, QuantizedWeight
from kernels.quantized_weight import as_floats, joined_quant_type, joined_weights
from worker.model.layers.build import Build
from worker.weights.checkpoint import Weights
from worker.weights.grouped_tensors import GroupedTensor
from worker.weights.stored_tensors import MatrixPart, QuantizedTensor

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


def product_weight(build: Build, product: Product, stays: bool) -> AnyWeight:
    """[N, K], read once: in its stored format if `stays` (`stay_quantized`), otherwise in the model's dtype."""
    if not stays:
        return product_floats(build, product)
    parts = [build.weights.take_quantized(part) for part in product]
    if len(parts) == 1:
        return parts[0]
    grouped = [part for part in parts if isinstance(part, GroupedWeight)]
    if not grouped:
        return joined_weights([part for part in parts if isinstance(part, QuantizedWeight)])
    if have_one_order(grouped):
        return stacked_weights(grouped)
    names = [part.name for part in product]
    build.weights.use.kept.difference_update(names)
    build.weights.use.dequantized.update(dict.fromkeys(names, "parts of the product order their columns differently"))
    return torch.cat([as_floats(part).to(build.dtype) for part in grouped])


def product_floats(build: Build, product: Product) -> torch.Tensor:
    """The parts, each converted into its rows of the result."""
    weights, stacks = build.weights, {part.name for part in product if len(build.weights.shape(part.name)) == 3}

    def slices(part: MatrixPart) -> tuple[slice, slice, slice]:
        one = slice(part.expert, part.expert + 1)
        return (one, part.columns, part.rows) if part.name in stacks else (part.rows, part.columns, slice(None))

    shapes = [weights.part_shape(part.name, *slices(part))[part.name in stacks :] for part in product]
    joined = torch.empty(sum(shape[0] for shape in shapes), *shapes[0][1:], dtype=build.dtype)
    for part, place in zip(product, torch.split(joined, [shape[0] for shape in shapes]), strict=True):
        weights.copy_to(place.unsqueeze(0) if part.name in stacks else place, part.name, *slices(part))
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
    numbers = "codes in groups" if stored == GROUPED else str(stored.numbers).removeprefix("torch.")
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
    if all(isinstance(tensor, GroupedTensor) for tensor in tensors):
        return GROUPED
    numbers = {tensor.numbers for tensor in tensors if isinstance(tensor, QuantizedTensor)}
    pairs = [
        (tensor, part) for tensor, part in zip(tensors, product, strict=True) if isinstance(tensor, QuantizedTensor)
    ]
    types, rows = [one.part_quant_type(part) for one, part in pairs], [one.part_rows(part) for one, part in pairs]
    quant_type = joined_quant_type(types, rows)
    if quant_type is None or len(numbers) > 1 or len(pairs) < len(tensors):
        return "parts of the product are stored in several formats"
    return QuantizedFormat(numbers.pop(), quant_type)
