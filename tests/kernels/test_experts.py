"""Experts: against float64 and transformers' own blocks, and rows against themselves in other batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import silu

from kernels.interface import ClampedSwiglu, ExpertWeights, Routing
from kernels.triton_backend import experts
from kernels.triton_backend.routing import route
from kernels.triton_backend.target import INTERPRETER, TARGETS, Settings
from tests.kernels.row_alone import multiply_rows_alone

CLAMP = ClampedSwiglu(alpha=1.702, limit=1.5)
# Neither is a multiple of a tile of columns or of K.
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


def expected(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, all_experts: list[ExpertWeights], clamp: bool
) -> torch.Tensor:
    """float64, row by row."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row, (chosen, shares) in enumerate(zip(ids.tolist(), weights.double(), strict=True)):
        for expert, share in zip(chosen, shares, strict=True):
            one = all_experts[expert]
            bias = 0.0 if one.gate_up_bias is None else one.gate_up_bias.double()
            gate, up = (one.gate_up.double() @ x[row].double() + bias).chunk(2)
            inner = _clamped(gate, up) if clamp else silu(gate) * up
            down_bias = 0.0 if one.down_bias is None else one.down_bias.double()
            out[row] += share * (one.down.double() @ inner + down_bias)
    return out


def _clamped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.clamp(max=CLAMP.limit), up.clamp(-CLAMP.limit, CLAMP.limit)
    return gate / (1 + torch.exp(-CLAMP.alpha * gate)) * (up + 1)


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "clamp"),
    [(torch.float32, None), (torch.float32, CLAMP), (torch.float16, None), (torch.bfloat16, None)],
)
@pytest.mark.parametrize("rows", [1, 20])
def test_moe(settings: Settings, dtype: torch.dtype, rows: int, clamp: ClampedSwiglu | None) -> None:
    weights = made(dtype, bias=clamp is not None)
    x, ids, shares = step(rows, dtype)
    out = experts.moe(x, ids, shares, experts.pack(iter(weights), 0, clamp, dtype, None, CPU), settings)
    assert out.dtype == dtype
    close(out, expected(x, ids, shares, weights, clamp is not None), TOLERANCE[dtype])


def test_no_rows(settings: Settings) -> None:
    packed = experts.pack(made(torch.float16), 0, None, torch.float16, None, CPU)
    out = experts.moe(*step(0, torch.float16), packed, settings)
    assert (out.shape, out.dtype) == ((0, HIDDEN), torch.float16)


def test_all_rows_on_one_expert(settings: Settings) -> None:
    """In several tiles, of which the last is not full."""
    weights = made()
    x, _, shares = step(70)
    ids = torch.full((70, 1), 4)
    out = experts.moe(x, ids, shares[:, :1], experts.pack(weights, 0, None, torch.float32, None, CPU), settings)
    close(out, expected(x, ids, shares[:, :1], weights, clamp=False))


def test_ranks_with_some_experts_each_add_up_and_a_rank_may_have_none(settings: Settings) -> None:
    weights = made()
    x, ids, shares = step(12)
    parts = [slice(0, 0), slice(0, 3), slice(3, 7)]
    packed = [experts.pack(weights[part], part.start, None, torch.float32, None, CPU) for part in parts]
    outs = [experts.moe(x, ids, shares, one, settings) for one in packed]
    assert not outs[0].any()
    close(outs[1] + outs[2], expected(x, ids, shares, weights, clamp=False))


def test_a_rank_whose_experts_nobody_chose_adds_zeros(settings: Settings) -> None:
    packed = experts.pack(made(), 100, None, torch.float32, None, CPU)
    assert torch.equal(experts.moe(*step(5), packed, settings), torch.zeros(5, HIDDEN))


def test_rows_may_lie_apart(settings: Settings) -> None:
    packed = experts.pack(made(), 0, None, torch.float32, None, CPU)
    x, ids, shares = step(9)
    wide = torch.full((9, HIDDEN + 40), torch.nan)
    wide[:, 24 : 24 + HIDDEN] = x
    out = experts.moe(x, ids, shares, packed, settings)
    assert torch.equal(experts.moe(wide[:, 24 : 24 + HIDDEN], ids, shares, packed, settings), out)
    strided_ids, strided_shares = ids.t().contiguous().t(), shares.t().contiguous().t()
    assert torch.equal(experts.moe(x, strided_ids, strided_shares, packed, settings), out)


@pytest.mark.parametrize(("packed_dtype", "clamp"), [(None, None), (torch.int8, CLAMP)])
def test_a_rows_bits_do_not_depend_on_the_other_rows(
    monkeypatch: pytest.MonkeyPatch, packed_dtype: torch.dtype | None, clamp: ClampedSwiglu | None
) -> None:
    """In any order, in parts, alone, and with so many others that an expert has several tiles."""
    multiply_rows_alone(monkeypatch)
    packed = experts.pack(made(bias=True), 0, clamp, torch.float32, packed_dtype, CPU)
    x, ids, shares = step(24)
    whole = experts.moe(x, ids, shares, packed, INVARIANT)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(3))
    for rows in (order[:5], torch.tensor([23]), torch.cat([order, torch.full((41,), 12)])):
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
def test_as_transformers(name: str) -> None:
    """The whole block with its router, in float32."""
    block_class, config, figures, routing = blocks()[name]
    block = block_class(config(hidden_size=64, num_experts_per_tok=2, **figures))
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, 12, 64, generator=generator)
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


def meant(weight: experts.StackedWeights) -> torch.Tensor:
    """[E, N, K] in float64: what numbers and scales stand for."""
    assert weight.scales is not None
    scales = weight.scales.double().repeat_interleave(experts.SCALE_GROUP, 2)
    return weight.numbers.double() * scales[:, :, : weight.numbers.shape[2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_weights_are_the_nearest_multiples_of_their_scales(settings: Settings, dtype: torch.dtype) -> None:
    weights = made(dtype, bias=True)
    packed = experts.pack(weights, 0, None, dtype, torch.int8, CPU)
    assert packed.gate_up is not None
    assert packed.down is not None
    gate_up, down = meant(packed.gate_up), meant(packed.down)
    gate_up = torch.cat([gate_up[:, 0::2], gate_up[:, 1::2]], 1)
    for one, used in zip(weights, gate_up, strict=True):
        sizes = torch.nn.functional.pad(one.gate_up.double().abs(), (0, -HIDDEN % 128)).view(2 * INNER, -1, 128)
        half_scale = (sizes.amax(2) / 254).repeat_interleave(128, 1)[:, :HIDDEN]
        assert bool(((used - one.gate_up.double()).abs() <= half_scale * 1.001).all())
    used = [
        ExpertWeights(one, two, own.gate_up_bias, own.down_bias)
        for one, two, own in zip(gate_up, down, weights, strict=True)
    ]
    x, ids, shares = step(12, dtype)
    close(experts.moe(x, ids, shares, packed, settings), expected(x, ids, shares, used, clamp=False), TOLERANCE[dtype])


def test_int8_weights_that_are_no_numbers_or_nearly_nothing() -> None:
    weight = made()[0]
    weight.gate_up[2, 130] = torch.nan
    weight.gate_up[3, :] = 0.0
    packed = experts.pack([weight], 0, None, torch.float32, torch.int8, CPU).gate_up
    assert packed is not None
    used = torch.cat([meant(packed)[0][0::2], meant(packed)[0][1::2]])
    assert used[2, 128:].isnan().all()
    assert used.isfinite().sum() == used.numel() - (HIDDEN - 128)
    assert not used[3].any()


def test_experts_can_not_be_packed_as_anything() -> None:
    with pytest.raises(ValueError, match=r"float32 can not be packed as torch\.int32"):
        experts.pack(made(), 0, None, torch.float32, torch.int32, CPU)


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


def test_tiles_follow_the_number_of_pairs_only_where_rows_may_depend_on_others() -> None:
    tuned = Settings(TARGETS[INTERPRETER], batch_invariant=False)
    pairs = (1, 64, 1000, 100_000)
    assert len({experts.tiles_for(INVARIANT, count, 8, 2) for count in pairs}) == 1
    assert [experts.tiles_for(tuned, count, 8, 2).rows for count in pairs] == [16, 16, 128, 128]
