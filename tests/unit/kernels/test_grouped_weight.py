"""Weights in codes: values by the definition in numpy, parts of columns, and joins in one exact form."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kernels.grouped_weight import (
    GroupedWeight,
    column_part,
    cut_refusal,
    joined,
    padded_rows,
    row_part,
    stacked_weights,
)
from kernels.quantized_weight import as_floats
from tests.stored_weights import grouped_weight

FORMS = [
    (bits, group, scale, with_zeros, with_offsets, ordered)
    for bits, group in ((4, 32), (4, 128), (4, 256), (4, 1000), (8, 16), (8, 64))
    for scale in (torch.float16, torch.bfloat16, torch.float32)
    for with_zeros, with_offsets, ordered in ((False, False, False), (True, False, True), (True, True, False))
]
# Scales, and offsets of the first, in codes with factors.
FACTORED = [(4, 32, torch.int8, True, True, False), (6, 16, torch.int8, False, False, True)]


def values(weight: GroupedWeight) -> npt.NDArray[np.float32]:
    """Each number by the definition, one operation of numpy at a time."""
    rows, inner = weight.shape
    out = np.empty((rows, inner), np.float32)
    codes, scales = weight.codes.numpy().astype(np.int64), weight.scales.float().numpy()
    factors = np.ones((rows, inner, 2), np.float32) if weight.factors is None else weight.factors.float().numpy()
    for n in range(rows):
        for k in range(inner):
            g = k // weight.group
            zero = weight.middle if weight.zeros is None else int(weight.zeros[n, g])
            value = np.float32(scales[n, g]) * factors[n, k // 128, 0] * np.float32(codes[n, k] - zero)
            if weight.offsets is not None:
                value = value - np.float32(weight.offsets[n, g]) * factors[n, k // 128, 1]
            out[n, k if weight.order is None else int(weight.order[k])] = value
    return out


@pytest.mark.parametrize("form", FORMS + FACTORED, ids=str)
def test_dequantized_values_equal_the_definition(form: tuple[int, int, torch.dtype, bool, bool, bool]) -> None:
    weight = grouped_weight(5, 300, *form)
    assert np.array_equal(as_floats(weight).numpy(), values(weight))


@pytest.mark.parametrize("columns", [slice(0, 128), slice(128, 256), slice(64, 192), slice(160, 300), slice(None)])
@pytest.mark.parametrize("group", [16, 32, 128, 256, 300])
def test_column_part_equals_columns_of_the_values(group: int, columns: slice) -> None:
    weight = grouped_weight(7, 300, 4, group, torch.float16, True, True, False)
    assert cut_refusal(columns, 300, group, False) is None
    part = column_part(weight, columns)
    assert torch.equal(as_floats(part), as_floats(weight)[:, columns])


@pytest.mark.parametrize(
    ("columns", "keeps"), [(slice(0, 128), True), (slice(128, 300), True), (slice(64, 192), False)]
)
@pytest.mark.parametrize("form", [(*form[:5], False) for form in FACTORED], ids=str)
def test_column_part_keeps_factors_of_whole_blocks(
    form: tuple[int, int, torch.dtype, bool, bool, bool], columns: slice, keeps: bool
) -> None:
    weight = grouped_weight(7, 300, *form)
    part = column_part(weight, columns)
    assert (part.factors is not None) == keeps
    assert torch.equal(as_floats(part), as_floats(weight)[:, columns])


def test_columns_that_no_group_fits_are_refused() -> None:
    weight = grouped_weight(7, 300, 4, 32, torch.float16, False, False, False)
    with pytest.raises(ValueError, match="40 columns of each rank cut groups of 32"):
        column_part(weight, slice(40, 80))
    with pytest.raises(ValueError, match="cut an order by activation"):
        column_part(grouped_weight(7, 256, 4, 32, torch.float16, False, False, True), slice(0, 128))


@pytest.mark.parametrize("other", [form for form in FORMS + FACTORED if not form[-1]], ids=str)
def test_joined_weights_have_the_values_of_the_parts(other: tuple[int, int, torch.dtype, bool, bool, bool]) -> None:
    weights = [
        grouped_weight(5, 256, 4, 32, torch.float16, False, False, False),
        grouped_weight(3, 256, *other),
        grouped_weight(2, 256, 8, 16, torch.float32, True, True, False),
    ]
    assert torch.equal(as_floats(joined(weights)), torch.cat([as_floats(each) for each in weights]))
    assert torch.equal(as_floats(stacked_weights(weights)), torch.cat([as_floats(each) for each in weights]))


def test_weights_of_one_form_are_stacked_as_they_are() -> None:
    weights = [grouped_weight(rows, 300, *FACTORED[0]) for rows in (5, 3)]
    stacked = stacked_weights(weights)
    assert isinstance(stacked, GroupedWeight)
    assert stacked.factors is not None
    assert torch.equal(as_floats(stacked), torch.cat([as_floats(each) for each in weights]))


def test_joined_weights_need_one_order() -> None:
    ordered = grouped_weight(5, 256, 4, 32, torch.float16, False, False, True)
    assert torch.equal(as_floats(joined([ordered, ordered])), as_floats(ordered).repeat(2, 1))
    for join in (joined, stacked_weights):
        with pytest.raises(ValueError, match="in different orders"):
            join([ordered, replace(ordered, order=None)])


@pytest.mark.parametrize("form", [FORMS[2], *FACTORED], ids=str)
def test_row_part_equals_rows_of_the_values(form: tuple[int, int, torch.dtype, bool, bool, bool]) -> None:
    weight = grouped_weight(9, 300, *form)
    for rows in (slice(2, 7), slice(1, None, 2)):
        assert torch.equal(as_floats(row_part(weight, rows)), as_floats(weight)[rows])


@pytest.mark.parametrize("scale", [torch.float16, torch.int8])
def test_padded_rows_are_zeros(scale: torch.dtype) -> None:
    weight = padded_rows(grouped_weight(5, 256, 4, 32, scale, True, True, False), 8)
    assert weight.shape == (8, 256)
    assert not as_floats(weight)[5:].any()


@pytest.mark.parametrize("group", [8, 24, 48, 96, 160, 0])
def test_groups_that_kernels_lack_are_refused(group: int) -> None:
    groups = -(-1000 // group) if group else 1
    with pytest.raises(ValueError, match=r"groups of .* are not supported; supported: 16, 32, 64, 128"):
        GroupedWeight(torch.zeros(2, 1000, dtype=torch.uint8), 4, group, torch.ones(2, groups))
