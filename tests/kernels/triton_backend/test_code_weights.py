"""Products and experts with weights in codes, interpreted: against their definition in numpy, and a row's bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kernels.grouped_weight import GroupedWeight, nearest_codes, stacked_weights
from kernels.interface import GROUPED, ClampedSwiglu, ExpertWeights, PackedFormat
from kernels.quantized_weight import as_floats
from kernels.triton_backend import experts, linear
from kernels.triton_backend.backend import TritonBackend
from kernels.triton_backend.packed_weight import from_codes, kept, pack
from kernels.triton_backend.target import INTERPRETER, TARGETS, Settings
from kernels.triton_backend.tiles import cut
from tests.kernels.row_alone import multiply_rows_alone
from tests.stored_weights import grouped_weight
from tests.unit.kernels.moe_reference import reference_moe

pytestmark = pytest.mark.each_value

Form = tuple[int, int, torch.dtype, bool, bool, bool]
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
CPU = torch.device("cpu")
INVARIANT = Settings(TARGETS[INTERPRETER])
INT4 = PackedFormat(torch.quint4x2)
# bits, columns that share a scale, dtype of the scales; with zeros, with offsets, in an order by activation.
FORMS: list[Form] = [
    (4, 128, F16, True, False, False),
    (4, 128, F16, True, False, True),
    (4, 32, BF16, False, False, False),
    (4, 32, F32, True, True, False),
    (4, 16, F16, True, False, False),
    (4, 64, F16, False, False, True),
    (4, 384, BF16, False, False, False),
    (4, 5000, F16, True, False, True),
    (8, 16, F32, False, False, False),
    (8, 32, F32, True, True, False),
    (8, 128, BF16, True, False, True),
]
# (N, K) on both sides of tiles of columns (32), pieces of K (64) and parts of K.
SHAPES = [(1, 1), (33, 24), (20, 300), (9, 900)]


def test_k_quants_are_kept_in_8_bits_as_one_weight() -> None:
    forms: list[Form] = [(4, 32, torch.int8, True, True, False), (6, 16, torch.int8, False, False, False)]
    weight = stacked_weights([grouped_weight(9, 300, *form) for form in forms])
    wide = kept(weight, F32, None, TARGETS[INTERPRETER])
    assert isinstance(wide, GroupedWeight)
    assert (wide.bits, wide.factors) == (8, None)
    assert torch.equal(as_floats(wide), as_floats(weight))


def defined(weight: GroupedWeight) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """scale * (code - zero), and the offset, of each number in the model's order of columns; both [N, K]."""
    rows, inner = weight.shape
    group = np.arange(inner) // weight.group
    scales = weight.scales.double().numpy()[:, group]
    zeros = weight.middle if weight.zeros is None else weight.zeros.numpy().astype(np.int64)[:, group]
    scaled, offsets = np.empty((rows, inner)), np.zeros((rows, inner))
    order = np.arange(inner) if weight.order is None else weight.order.numpy()
    scaled[:, order] = scales * (weight.codes.numpy().astype(np.int64) - zeros)
    if weight.offsets is not None:
        offsets[:, order] = weight.offsets.double().numpy()[:, group]
    return scaled, offsets


def drawn(n: int, k: int, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n * k)
    return torch.randn(n, generator=generator).to(dtype), torch.randn(rows, k, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_equal_their_definition(form: Form, dtype: torch.dtype, settings: Settings) -> None:
    """Within one rounding of float64, and the error of float32 sums."""
    for n, k in SHAPES:
        weight = grouped_weight(n, k, *form)
        bias, x = drawn(n, k, 19, dtype)
        used = bias if n % 2 else None
        packed = from_codes(weight, used, dtype, CPU)
        scaled, offsets = defined(weight)
        added = 0.0 if used is None else used.double().numpy()
        for rows in (x, x[:2]):
            numbers = rows.double().numpy()
            exact = numbers @ (scaled - offsets).T + added
            size = np.abs(numbers) @ (np.abs(scaled) + np.abs(offsets)).T + np.abs(added)
            out = linear.linear(rows, packed, settings)
            assert (out.shape, out.dtype) == ((len(rows), n), dtype)
            error = np.abs(out.double().numpy() - exact)
            assert (error <= 0.5 * torch.finfo(dtype).eps * np.abs(exact) + 3e-6 * size).all(), (n, k)


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_and_zero_points_have_their_values(bits: int) -> None:
    """To the bit: a product of float32 and, with an offset, a difference, each rounded once."""
    count = 1 << bits
    zeros = torch.tensor([*range(16), *((127, 128, 254, 255) if bits == 8 else ())], dtype=torch.uint8)[:, None]
    codes = torch.arange(count, dtype=torch.uint8).expand(len(zeros), count).contiguous()
    scales = torch.rand(len(zeros), 1, generator=torch.Generator().manual_seed(1))
    steps = codes.numpy().astype(np.int64) - zeros.numpy().astype(np.int64)
    scaled = scales.numpy() * steps.astype(np.float32)
    for offsets, expected in ((None, scaled), (torch.full((len(zeros), 1), 0.3), scaled - np.float32(0.3))):
        weight = GroupedWeight(codes, bits, count, scales, zeros, offsets)
        out = linear.linear(torch.eye(count), from_codes(weight, None, F32, CPU), INVARIANT)
        assert np.array_equal(out.t().numpy(), expected)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_row_bits_are_independent_of_other_rows(monkeypatch: pytest.MonkeyPatch, form: Form) -> None:
    """Rows alone, in parts and in another order, and where K is split among programs and where it is not."""
    multiply_rows_alone(monkeypatch)
    bias, x = drawn(33, 300, 35, F32)
    packed = from_codes(grouped_weight(33, 300, *form), bias, F32, CPU)
    assert cut(INVARIANT, "single", 1, 33, 300).split
    assert not cut(INVARIANT, "single", 35, 33, 300).split
    whole = linear.linear(x, packed, INVARIANT)
    order = torch.randperm(35, generator=torch.Generator().manual_seed(3))
    for rows in (order, order[:17], torch.tensor([20]), torch.tensor([34, 1, 2])):
        assert torch.equal(linear.linear(x[rows], packed, INVARIANT), whole[rows])


def test_rows_may_lie_apart(settings: Settings) -> None:
    weight = grouped_weight(33, 300, *FORMS[1])
    packed, x = from_codes(weight, None, F32, CPU), drawn(33, 300, 5, F32)[1]
    wide = torch.full((5, 350), torch.nan)
    wide[:, 20:320] = x
    assert torch.equal(linear.linear(wide[:, 20:320], packed, settings), linear.linear(x, packed, settings))
    assert linear.linear(x[:0], packed, settings).shape == (0, 33)


@pytest.mark.parametrize("form", [FORMS[1], FORMS[3]], ids=str)
def test_argmax_of_a_head_in_codes(form: Form, settings: Settings) -> None:
    packed, x = from_codes(grouped_weight(40, 300, *form), None, F32, CPU), drawn(40, 300, 5, F32)[1]
    expected = linear.linear(x, packed, settings)[:, :35].argmax(1)
    assert torch.equal(linear.argmax(x, packed, 35, settings), expected)
    with pytest.raises(ValueError, match=r"a weight of torch\.uint8 has no rows"):
        linear.rows(packed, torch.tensor([0]))


def test_int4_products_are_those_of_nearest_codes() -> None:
    backend = TritonBackend()
    weight = torch.randn(40, 160, generator=torch.Generator().manual_seed(1))
    packed_format = backend.packed_format("int4", BF16)
    assert packed_format == INT4
    packed = backend.linear.pack(weight, None, BF16, packed_format)
    expected = from_codes(nearest_codes(weight.bfloat16()), None, BF16, CPU)
    assert torch.equal(packed.numbers, expected.numbers)
    assert packed.scales is not None
    assert expected.scales is not None
    assert torch.equal(packed.scales, expected.scales)
    assert packed.numbers.shape == (40, 128)
    # Codes of a checkpoint are rounded once more.
    stored = grouped_weight(40, 160, *FORMS[0])
    again = backend.linear.pack(stored, None, F32, packed_format)
    assert torch.equal(again.numbers, pack(as_floats(stored), None, F32, torch.quint4x2, CPU).numbers)
    assert not backend.linear.has_rows(packed)


def test_codes_of_checkpoints_are_kept() -> None:
    backend, stored = TritonBackend(), grouped_weight(40, 160, *FORMS[0])
    assert all(backend.keeps_quantized(GROUPED, dtype) for dtype in (F32, F16, BF16))
    assert not backend.keeps_quantized(GROUPED, torch.float64)
    packed = backend.linear.pack(stored, None, F16)
    assert packed.codes is not None
    assert packed.numbers.shape == (40, 128)
    assert packed.scales is not None
    assert packed.scales.dtype == F16


HIDDEN, INNER = 160, 96
CLAMP = ClampedSwiglu(1.7, 1.5)


def in_codes(up_forms: list[Form], down_forms: list[Form], bias: bool = False) -> list[ExpertWeights]:
    made = []
    for up, down in zip(up_forms, down_forms, strict=True):
        biases = (torch.linspace(-1, 1, 2 * INNER), torch.linspace(1, -1, HIDDEN)) if bias else ()
        made.append(
            ExpertWeights(grouped_weight(2 * INNER, HIDDEN, *up), grouped_weight(HIDDEN, INNER, *down), *biases)
        )
    return made


def step(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, two of three experts for each, and their shares."""
    draw = torch.Generator().manual_seed(7)
    ids = torch.rand(rows, 3, generator=draw).argsort(1)[:, :2].contiguous()
    return torch.randn(rows, HIDDEN, generator=draw) / 8, ids, torch.rand(rows, 2, generator=draw)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5 * float(expected.abs().max()))


# Experts of one form, of forms that differ, with act-order of some, and of 8 bits.
EXPERTS: dict[str, tuple[list[Form], list[Form], ClampedSwiglu | None]] = {
    "gptq": ([FORMS[0]] * 3, [FORMS[4]] * 3, None),
    "mixed": ([FORMS[0], FORMS[2], FORMS[8]], [FORMS[3], FORMS[4], FORMS[2]], None),
    "ordered": ([FORMS[1], FORMS[5], FORMS[0]], [FORMS[7]] * 3, CLAMP),
    "8 bits": ([FORMS[9]] * 3, [FORMS[10]] * 3, CLAMP),
}


@pytest.mark.parametrize("kind", list(EXPERTS))
def test_experts_in_codes_equal_dequantized(kind: str, settings: Settings) -> None:
    ups, downs, clamp = EXPERTS[kind]
    weights = in_codes(ups, downs, clamp is not None)
    x, ids, shares = step(5)
    packed = TritonBackend().experts.pack(iter(weights), 0, clamp, F32)
    for one in (packed.gate_up, packed.down):
        assert one is not None
        assert one.codes is not None
        assert one.numbers.dtype == torch.uint8
    close(experts.moe(x, ids, shares, packed, settings), reference_moe(x, ids, shares, weights, clamp))


@pytest.mark.parametrize("kind", ["mixed", "ordered"])
def test_expert_row_bits_are_independent_of_other_rows(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    multiply_rows_alone(monkeypatch)
    ups, downs, clamp = EXPERTS[kind]
    packed = TritonBackend().experts.pack(in_codes(ups, downs), 0, clamp, F32)
    x, ids, shares = step(20)
    whole = experts.moe(x, ids, shares, packed, INVARIANT)
    for rows in (torch.tensor([17, 3, 4]), torch.tensor([9]), torch.cat((torch.arange(20), torch.full((60,), 2)))):
        assert torch.equal(experts.moe(x[rows], ids[rows], shares[rows], packed, INVARIANT), whole[rows])


def test_int4_experts_are_those_of_nearest_codes() -> None:
    draw = torch.Generator().manual_seed(4)
    floats = [
        ExpertWeights(
            torch.randn(2 * INNER, HIDDEN, generator=draw) / 12, torch.randn(HIDDEN, INNER, generator=draw) / 9
        )
        for _ in range(3)
    ]
    rounded = [
        ExpertWeights(nearest_codes(as_floats(one.gate_up)), nearest_codes(as_floats(one.down))) for one in floats
    ]
    x, ids, shares = step(5)
    packed = TritonBackend().experts.pack(iter(floats), 0, None, F32, INT4)
    found = experts.moe(x, ids, shares, packed, INVARIANT)
    assert torch.equal(
        found, experts.moe(x, ids, shares, TritonBackend().experts.pack(rounded, 0, None, F32), INVARIANT)
    )
    close(found, reference_moe(x, ids, shares, rounded, None))


def test_experts_in_codes_and_floats_become_floats() -> None:
    """A single expert is in floats if its gates and ups order their columns differently."""
    weights = in_codes([FORMS[1]] * 3, [FORMS[0]] * 3)
    weights[1] = replace(weights[1], gate_up=as_floats(weights[1].gate_up))
    packed = TritonBackend().experts.pack(iter(weights), 0, None, F32)
    assert packed.gate_up is not None
    assert packed.down is not None
    assert packed.gate_up.codes is None
    assert packed.down.codes is not None
    x, ids, shares = step(5)
    close(experts.moe(x, ids, shares, packed, INVARIANT), reference_moe(x, ids, shares, weights, None))


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_group_with_nan_weight_gives_nan(number: float) -> None:
    weight = torch.zeros(20, 300)
    weight[2, 200] = number
    out = linear.linear(torch.ones(3, 300), pack(weight, None, F32, torch.quint4x2, CPU), INVARIANT)
    assert not out[:, 2].isfinite().any()
    assert not out[:, :2].any()
    assert not out[:, 3:].any()
