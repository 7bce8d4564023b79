"""Experts: against float64 and transformers' own blocks, and rows against themselves in other batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kernels.interface import ClampedSwiglu, ExpertWeights, PackedFormat, Routing
from kernels.quantized_weight import as_floats
from kernels.triton_backend import experts, mxfp4
from kernels.triton_backend.packed_weight import GROUP
from kernels.triton_backend.routing import route
from kernels.triton_backend.target import INTERPRETER, TARGETS, Settings
from tests.kernels.row_alone import multiply_rows_alone
from tests.unit.kernels.moe_reference import reference_moe

pytestmark = pytest.mark.each_value

CLAMP = ClampedSwiglu(alpha=1.702, limit=1.5)
# HIDDEN and INNER are no multiples of a tile of columns or of K.
HIDDEN, INNER, EXPERTS, SLOTS = 136, 72, 7, 3
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
CPU = torch.device("cpu")
INVARIANT = Settings(TARGETS[INTERPRETER])


def made(dtype: torch.dtype = torch.float32, bias: bool = False, hidden: int = HIDDEN) -> list[ExpertWeights]:
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / math.sqrt(shape[-1])).to(dtype)

    return [
        ExpertWeights(
            drawn(2 * INNER, hidden),
            drawn(hidden, INNER),
            drawn(2 * INNER) if bias else None,
            drawn(hidden) if bias else None,
        )
        for _ in range(EXPERTS)
    ]


def step(rows: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, ids and weights; some experts are chosen by many rows and one by none."""
    generator = torch.Generator().manual_seed(rows)
    likely = torch.tensor([9.0, 5.0, 2.0, 1.0, 0.5, 0.5, 0.0])
    ids = torch.multinomial(likely.expand(rows, -1), SLOTS, generator=generator) if rows else torch.empty(0, SLOTS)
    x = torch.randn(rows, HIDDEN, generator=generator).to(dtype)
    return x, ids.long(), torch.rand(rows, SLOTS, generator=generator)


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "rows", "clamp"),
    [
        (torch.float32, 1, None),
        (torch.float32, 12, None),
        (torch.float32, 12, CLAMP),
        (torch.float16, 12, None),
        (torch.bfloat16, 12, CLAMP),
    ],
)
def test_moe(settings: Settings, dtype: torch.dtype, rows: int, clamp: ClampedSwiglu | None) -> None:
    weights = made(dtype, bias=clamp is not None)
    x, ids, shares = step(rows, dtype)
    out = experts.moe(x, ids, shares, experts.pack(iter(weights), 0, clamp, dtype, None, CPU), settings)
    assert out.dtype == dtype
    close(out, reference_moe(x, ids, shares, weights, clamp), TOLERANCE[dtype])


def test_no_rows() -> None:
    packed = experts.pack(made(torch.float16), 0, None, torch.float16, None, CPU)
    out = experts.moe(*step(0, torch.float16), packed, INVARIANT)
    assert (out.shape, out.dtype) == ((0, HIDDEN), torch.float16)


def test_all_rows_on_one_expert() -> None:
    """The rows fill several tiles, the last one partly."""
    weights = made()
    x, _, shares = step(70)
    ids = torch.full((70, 1), 4)
    out = experts.moe(x, ids, shares[:, :1], experts.pack(weights, 0, None, torch.float32, None, CPU), INVARIANT)
    close(out, reference_moe(x, ids, shares[:, :1], weights, None))


def test_expert_ranks_sum_to_whole_with_empty_rank() -> None:
    weights = made()
    x, ids, shares = step(8)
    parts = [slice(0, 0), slice(0, 3), slice(3, 7)]
    packed = [experts.pack(weights[part], part.start, None, torch.float32, None, CPU) for part in parts]
    outs = [experts.moe(x, ids, shares, one, INVARIANT) for one in packed]
    assert not outs[0].any()
    close(outs[1] + outs[2], reference_moe(x, ids, shares, weights, None))


def test_rank_without_chosen_experts_adds_zeros() -> None:
    packed = experts.pack(made(), 100, None, torch.float32, None, CPU)
    assert torch.equal(experts.moe(*step(2), packed, INVARIANT), torch.zeros(2, HIDDEN))


def test_rows_may_lie_apart() -> None:
    packed = experts.pack(made(), 0, None, torch.float32, None, CPU)
    x, ids, shares = step(4)
    wide = torch.full((4, HIDDEN + 40), torch.nan)
    wide[:, 24 : 24 + HIDDEN] = x
    out = experts.moe(x, ids, shares, packed, INVARIANT)
    assert torch.equal(experts.moe(wide[:, 24 : 24 + HIDDEN], ids, shares, packed, INVARIANT), out)
    strided_ids, strided_shares = ids.t().contiguous().t(), shares.t().contiguous().t()
    assert torch.equal(experts.moe(x, strided_ids, strided_shares, packed, INVARIANT), out)


@pytest.mark.parametrize(
    ("packed_format", "clamp"),
    [
        (None, None),
        pytest.param(PackedFormat(torch.int8), CLAMP, marks=pytest.mark.slow),
        (PackedFormat(torch.int8, quantizes_rows=True), CLAMP),
    ],
)
def test_row_bits_are_independent_of_other_rows(
    monkeypatch: pytest.MonkeyPatch, packed_format: PackedFormat | None, clamp: ClampedSwiglu | None
) -> None:
    """Rows in any order, in parts, alone, and beside rows that give an expert several tiles."""
    multiply_rows_alone(monkeypatch)
    packed = experts.pack(made(bias=True), 0, clamp, torch.float32, packed_format, CPU)
    x, ids, shares = step(10)
    whole = experts.moe(x, ids, shares, packed, INVARIANT)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(3))
    for rows in (order[:5], torch.tensor([9]), torch.cat([order, torch.full((60,), 2)])):
        assert torch.equal(experts.moe(x[rows], ids[rows], shares[rows], packed, INVARIANT), whole[rows])


def blocks() -> dict[str, tuple[Any, Any, dict[str, Any], Routing]]:
    """Transformers' blocks of experts with their routers: class, config, its figures; and our routing."""
    from transformers import GptOssConfig, Qwen3MoeConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    qwen3 = {"num_experts": 6, "moe_intermediate_size": 40, "norm_topk_prob": True}
    gpt_oss = {"num_local_experts": 6, "intermediate_size": 40}
    return {
        "qwen3-moe": (Qwen3MoeSparseMoeBlock, Qwen3MoeConfig, qwen3, Routing(2, renormalize=True)),
        "gpt-oss": (GptOssMLP, GptOssConfig, gpt_oss, Routing(2, "topk_softmax")),
    }


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_experts_equal_transformers(name: str) -> None:
    """The whole block with its router, in float32."""
    block_class, config, figures, routing = blocks()[name]
    block = block_class(config(hidden_size=64, num_experts_per_tok=2, **figures))
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, 6, 64, generator=generator)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        wanted = block(x)
        router, bias = (block.router, block.router.bias) if name == "gpt-oss" else (block.gate, None)
        logits = torch.nn.functional.linear(x[0], router.weight, bias)
        own, clamp = _taken(dict(block.experts.named_parameters()), name)
        packed = experts.pack(own, 0, clamp, torch.float32, None, CPU)
    close(experts.moe(x[0], *route(logits, routing), packed, INVARIANT), (wanted[0] if bias is not None else wanted)[0])


def _taken(theirs: dict[str, torch.Tensor], name: str) -> tuple[list[ExpertWeights], ClampedSwiglu | None]:
    """A block's experts in our order of rows; gpt-oss has gates and ups in turn, and columns for rows."""
    gate_up, down = theirs["gate_up_proj"], theirs["down_proj"]
    if name == "qwen3-moe":
        return [ExpertWeights(one, two) for one, two in zip(gate_up, down, strict=True)], None
    biases = theirs["gate_up_proj_bias"], theirs["down_proj_bias"]
    own = [
        ExpertWeights(
            torch.cat([one[:, 0::2].t(), one[:, 1::2].t()]), two.t(), torch.cat([bias[0::2], bias[1::2]]), other
        )
        for one, two, bias, other in zip(gate_up, down, *biases, strict=True)
    ]
    return own, ClampedSwiglu(1.702, 7.0)


def meant(weight: experts.StackedWeights, inner: int) -> torch.Tensor:
    """[E, N, K] in float64: the dequantized weights."""
    assert weight.scales is not None
    if weight.numbers.dtype == torch.uint8:
        halves = weight.numbers.view(*weight.numbers.shape[:2], -1, 64)
        codes = torch.stack([halves & 15, halves >> 4], 3).flatten(2).long()
        sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        numbers, scales, group = torch.cat([sizes, -sizes])[codes], 2.0 ** (weight.scales.double() - 127), 32
    else:
        numbers, scales, group = weight.numbers.double(), weight.scales.double().mT, GROUP
    return numbers[:, :, :inner] * scales.repeat_interleave(group, 2)[:, :, :inner]


def meant_experts(packed: experts.PackedExperts, own: list[ExpertWeights]) -> list[ExpertWeights]:
    """The dequantized experts in float64, with their own biases."""
    assert packed.gate_up is not None
    assert packed.down is not None
    in_turn, down = meant(packed.gate_up, HIDDEN), meant(packed.down, INNER)
    gate_up = torch.cat([in_turn[:, 0::2], in_turn[:, 1::2]], 1)
    return [
        ExpertWeights(one, two, its.gate_up_bias, its.down_bias)
        for one, two, its in zip(gate_up, down, own, strict=True)
    ]


# Largest error of a packed weight, as parts of its group's largest weight and of itself.
ROUNDINGS = {
    torch.int8: (128, 1 / 254, 0.0),
    torch.float8_e4m3fn: (128, 2.0**-10 / 448, 1 / 16),
    torch.float8_e4m3fnuz: (128, 2.0**-11 / 240, 1 / 16),
    # Up to 8 times a scale is cut to 6 times.
    torch.float4_e2m1fn_x2: (32, 1 / 4, 0.0),
}


@pytest.mark.parametrize("packed_dtype", list(ROUNDINGS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_weights(dtype: torch.dtype, packed_dtype: torch.dtype) -> None:
    """Packed weights are near the weights, and the products use them."""
    weights = made(dtype, bias=True)
    packed = experts.pack(weights, 0, None, dtype, PackedFormat(packed_dtype), CPU)
    used = meant_experts(packed, weights)
    group, of_largest, of_own = ROUNDINGS[packed_dtype]
    for one, its in zip(weights, used, strict=True):
        for own, stand_in in ((one.gate_up, its.gate_up), (one.down, its.down)):
            weight, near = as_floats(own).double(), as_floats(stand_in)
            sizes = torch.nn.functional.pad(weight.abs(), (0, -weight.shape[1] % group)).view(len(weight), -1, group)
            largest = sizes.amax(2).repeat_interleave(group, 1)[:, : weight.shape[1]]
            assert bool(((near - weight).abs() <= 1.001 * (of_largest * largest + of_own * weight.abs())).all())
    x, ids, shares = step(4, dtype)
    close(experts.moe(x, ids, shares, packed, INVARIANT), reference_moe(x, ids, shares, used, None), TOLERANCE[dtype])


def rounded(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Each row to the nearest multiples of its scale, in float64."""
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scales = rows.float().abs().amax(1, keepdim=True) / largest
    shrunk = rows.float() / scales
    return (shrunk.round() if dtype == torch.int8 else shrunk.to(dtype)).double() * scales.double()


def rounded_moe(
    x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, own: list[ExpertWeights], dtype: torch.dtype
) -> torch.Tensor:
    """The experts in float64, with rounded weights and rows, pair by pair."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row, (chosen, weights) in enumerate(zip(ids, shares, strict=True)):
        for expert, weight in zip(chosen.tolist(), weights.double(), strict=True):
            gate, up = (rounded(x[row : row + 1], dtype) @ rounded(own[expert].gate_up, dtype).t()).chunk(2, 1)
            inner = rounded(torch.nn.functional.silu(gate) * up, dtype)
            out[row] += weight * (inner @ rounded(own[expert].down, dtype).t())[0]
    return out


@pytest.mark.parametrize("packed_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("rows", [1, 12])
def test_weights_and_rows_of_8_bits(settings: Settings, packed_dtype: torch.dtype, rows: int) -> None:
    """A number between two products may lie at the border of two roundings; others are the same."""
    weights = made()
    x, ids, shares = step(rows)
    packed = experts.pack(weights, 0, None, torch.float32, PackedFormat(packed_dtype, quantizes_rows=True), CPU)
    found = experts.moe(x, ids, shares, packed, settings)
    wanted = rounded_moe(x, ids, shares, weights, packed_dtype)
    assert (found - wanted).norm() < 1e-3 * wanted.norm()
    exact = reference_moe(x, ids, shares, weights, None)
    assert 5e-3 < (wanted - exact).norm() / exact.norm() < {torch.int8: 0.03, torch.float8_e4m3fn: 0.1}[packed_dtype]


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("packed_dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_overflowed_row_gives_nan(packed_dtype: torch.dtype) -> None:
    """Other rows stay finite, and so do pairs of another rank's experts, for which this rank computes nothing."""
    packed = experts.pack(made()[:3], 0, None, torch.float32, PackedFormat(packed_dtype, quantizes_rows=True), CPU)
    x, ids, shares = step(6)
    ids[:] = torch.tensor([0, 2, 5])
    x[4, 7] = torch.inf
    out = experts.moe(x, ids, shares, packed, INVARIANT)
    assert out.isfinite().all(1).tolist() == [True, True, True, True, False, True]
    assert out[4].isnan().all()


def test_mxfp4_weights_are_packed_unchanged() -> None:
    generator = torch.Generator().manual_seed(4)
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])

    def drawn(rows: int, inner: int) -> torch.Tensor:
        codes = torch.randint(0, 8, (rows, inner), generator=generator)
        codes[: rows // 2] %= torch.randint(1, 8, (rows // 2, 1), generator=generator)
        signs = 1 - 2 * torch.randint(0, 2, (rows, inner), generator=generator)
        powers = torch.randint(-20, 3, (rows, -(-inner // 32)), generator=generator).repeat_interleave(32, 1)
        return (sizes[codes] * signs * 2.0 ** powers[:, :inner]).bfloat16()

    own = [ExpertWeights(drawn(2 * INNER, HIDDEN), drawn(HIDDEN, INNER)) for _ in range(2)]
    packed = experts.pack(own, 0, None, torch.bfloat16, PackedFormat(torch.float4_e2m1fn_x2), CPU)
    for one, its in zip(own, meant_experts(packed, own), strict=True):
        assert torch.equal(as_floats(one.gate_up).double(), as_floats(its.gate_up))
        assert torch.equal(as_floats(one.down).double(), as_floats(its.down))


def test_mxfp4_rounds_to_the_nearest_and_to_even_in_the_middle() -> None:
    sizes = torch.tensor([0.25, 0.26, 0.75, 0.74, 1.25, 1.75, 2.5, 3.5, 5, 5.1, 6, 7, 4, 0.1] + [0] * 18)
    wanted = torch.tensor([0, 0.5, 1, 0.5, 1, 2, 2, 4, 4, 6, 6, 6, 4, 0] + [0] * 18)
    numbers, scales = mxfp4.quantized(torch.stack([sizes, -sizes]))
    packed = experts.StackedWeights(numbers[None], scales[None], None)
    assert torch.equal(meant(packed, 32)[0].float(), torch.stack([wanted, -wanted]))


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("packed_dtype", list(ROUNDINGS))
def test_group_with_nan_weight_gives_nan(packed_dtype: torch.dtype) -> None:
    weight = made()[0]
    as_floats(weight.gate_up)[:, :] = 0.0
    down = as_floats(weight.down)
    down[5, 40] = torch.inf
    down[6, 40] = torch.nan
    packed = experts.pack([weight], 0, None, torch.float32, PackedFormat(packed_dtype), CPU)
    x, _, shares = step(2)
    out = experts.moe(x, torch.zeros(2, 1, dtype=torch.int64), shares[:, :1], packed, INVARIANT)
    assert out[:, 5:7].isnan().all()
    assert not out[:, :5].any()
    assert not out[:, 7:].any()


def test_unsupported_packed_format_of_experts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"float32 cannot be packed as PackedFormat\(dtype=torch\.int32"):
        experts.pack(made(), 0, None, torch.float32, PackedFormat(torch.int32), CPU)
    with pytest.raises(ValueError, match="float4_e2m1fn_x2, quantizes_rows=True"):
        experts.pack(made(), 0, None, torch.float32, PackedFormat(torch.float4_e2m1fn_x2, quantizes_rows=True), CPU)


@pytest.mark.parametrize("block", [16, 2048])
def test_pairs_are_sorted_by_expert_and_tiles_padded(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Against lists; ids 5 to 9 are this rank's, and 7 has no row."""
    monkeypatch.setattr(experts, "_SORT_BLOCK", block)
    likely = torch.tensor([1.0, 1, 1, 1, 1, 9, 3, 0, 1, 2, 1])
    ids = torch.multinomial(likely.expand(25, -1), 3, generator=torch.Generator().manual_seed(1))
    places = ids.flatten().tolist()
    tiles: list[tuple[int, list[int]]] = []
    for expert in range(5):
        mine = [pair for pair, one in enumerate(places) if one == 5 + expert]
        tiles += [(expert, mine[start : start + 4]) for start in range(0, len(mine), 4)]
    work = experts._sorted(ids, 5, 5, 4)
    assert work.experts.tolist() == [expert for expert, _ in tiles] + [-1] * (len(work.experts) - len(tiles))
    listed = work.pairs.view(-1, 4).tolist()
    assert listed[: len(tiles)] == [pairs + [-1] * (4 - len(pairs)) for _, pairs in tiles]


@pytest.mark.parametrize(("num_pairs", "num_experts"), [(1, 1), (1, 8), (5, 2), (64, 3), (65, 1), (130, 2)])
def test_no_choice_needs_more_tiles(num_pairs: int, num_experts: int) -> None:
    """All choices of how many pairs each of up to three experts gets, against counting."""

    def most(pairs: int, left: int) -> int:
        if left == 1:
            return -(-pairs // 64)
        return max(-(-own // 64) + most(pairs - own, left - 1) for own in range(pairs + 1))

    bound = experts.most_tiles(num_pairs, num_experts, 64)
    assert bound == most(num_pairs, min(num_experts, 3)) or num_experts > 3
    assert bound <= num_pairs


def test_tiles_depend_on_pair_count_only_when_tuned() -> None:
    tuned = Settings(TARGETS[INTERPRETER], batch_invariant=False)
    pairs = (1, 64, 1000, 100_000)
    assert len({experts.tiles_for(INVARIANT, count, 8, 2, 2, False) for count in pairs}) == 1
    assert [experts.tiles_for(tuned, count, 8, 2, 2, False).rows for count in pairs] == [16, 16, 128, 128]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("is_invariant", [True, False])
def test_both_products_have_tiles_of_as_many_rows(target: str, is_invariant: bool) -> None:
    settings = Settings(TARGETS[target], is_invariant)
    for num_pairs in (1, 256, 512, 4096):
        of_float32 = ((4, 4, False), (4, 1, False), (4, 1, True))
        of_half = ((2, 2, False), (2, 1, False), (2, 1, True))
        for kinds in (of_float32, of_half):
            assert len({experts.tiles_for(settings, num_pairs, 8, *kind).rows for kind in kinds}) == 1
