"""Routing and experts of the back ends: against transformers' routers, plain float64, and themselves."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kernels.interface import ClampedSwiglu, ExpertWeights, KernelBackend, Routing
from tests.unit.kernels.moe_reference import reference_moe
from tests.unit.kernels.outputs import FIXED_OUTPUTS

pytestmark = [FIXED_OUTPUTS, pytest.mark.each_value]

CLAMP = ClampedSwiglu(alpha=1.702, limit=1.5)
HIDDEN, INNER, EXPERTS, SLOTS = 24, 20, 7, 3


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), atol=tolerance, rtol=tolerance)


def experts(dtype: torch.dtype = torch.float32, bias: bool = False) -> list[ExpertWeights]:
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / math.sqrt(shape[-1])).to(dtype)

    return [
        ExpertWeights(
            drawn(2 * INNER, HIDDEN),
            drawn(HIDDEN, INNER),
            drawn(2 * INNER) if bias else None,
            drawn(HIDDEN) if bias else None,
        )
        for _ in range(EXPERTS)
    ]


def step(rows: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, ids and weights; some experts are chosen by many rows and one by none."""
    generator = torch.Generator().manual_seed(seed)
    likely = torch.tensor([9.0, 5.0, 2.0, 1.0, 0.5, 0.5, 0.0])
    ids = torch.stack([torch.multinomial(likely, SLOTS, generator=generator) for _ in range(rows)])
    x = torch.randn(rows, HIDDEN, generator=generator).to(dtype)
    return x, ids, torch.rand(rows, SLOTS, generator=generator)


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan])
def test_clamp_limit_of_0_or_less_is_refused(limit: float) -> None:
    """Former fault: native kernels read such a limit as "no clamp" and computed another activation."""
    with pytest.raises(ValueError, match="it must be above 0"):
        ClampedSwiglu(alpha=1.702, limit=limit)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("rows", [1, 16, 100])
@pytest.mark.parametrize("clamp", [None, CLAMP])
def test_moe(
    backend: KernelBackend, dtype: torch.dtype, tolerance: float, rows: int, clamp: ClampedSwiglu | None
) -> None:
    made = experts(dtype, bias=clamp is not None)
    x, ids, weights = step(rows, seed=rows, dtype=dtype)
    out = backend.experts.apply(x, ids, weights, backend.experts.pack(iter(made), 0, clamp, dtype))
    assert out.dtype == dtype
    close(out, reference_moe(x, ids, weights, made, clamp), tolerance)


def test_expert_ranks_sum_to_whole_with_empty_rank(backend: KernelBackend) -> None:
    made = experts()
    x, ids, weights = step(50, seed=1)
    parts = [slice(0, 0), slice(0, 3), slice(3, 7)]
    packed = [backend.experts.pack(made[part], part.start, None, torch.float32) for part in parts]
    outs = [backend.experts.apply(x, ids, weights, one) for one in packed]
    assert not outs[0].any()
    close(outs[1] + outs[2], reference_moe(x, ids, weights, made, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clamp", [None, CLAMP])
def test_row_bits_are_independent_of_other_rows(
    backend: KernelBackend, dtype: torch.dtype, clamp: ClampedSwiglu | None
) -> None:
    packed = backend.experts.pack(experts(dtype, bias=True), 0, clamp, dtype)
    x, ids, weights = step(90, seed=2, dtype=dtype)
    alone = torch.cat(
        [backend.experts.apply(x[i : i + 1], ids[i : i + 1], weights[i : i + 1], packed) for i in range(len(x))]
    )
    generator = torch.Generator().manual_seed(3)
    for count in (2, 15, 16, 17, 90):
        order = torch.randperm(90, generator=generator)[:count]
        assert torch.equal(backend.experts.apply(x[order], ids[order], weights[order], packed), alone[order]), (
            f"{count} rows"
        )


def routers() -> dict[str, tuple[Any, Routing]]:
    """Transformers' routers with random weights, and ours."""
    from transformers import DeepseekV2Config, Glm4MoeConfig, GptOssConfig, MixtralConfig, Qwen3MoeConfig
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    made: dict[str, tuple[Any, Any, dict[str, Any], Routing]] = {
        "qwen3-moe": (Qwen3MoeTopKRouter, Qwen3MoeConfig, {"num_experts": 12}, Routing(3)),
        "qwen3-moe-norm": (
            Qwen3MoeTopKRouter,
            Qwen3MoeConfig,
            {"num_experts": 12, "norm_topk_prob": True},
            Routing(3, renormalize=True),
        ),
        "mixtral": (MixtralTopKRouter, MixtralConfig, {"num_local_experts": 5}, Routing(3, renormalize=True)),
        "gpt-oss": (GptOssTopKRouter, GptOssConfig, {"num_local_experts": 12}, Routing(3, "topk_softmax")),
        "glm4-moe": (
            Glm4MoeTopkRouter,
            Glm4MoeConfig,
            {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
            Routing(3, "sigmoid", renormalize=True, num_groups=4, top_groups=2, scale=2.5),
        ),
        "deepseek-v2": (
            DeepseekV2TopkRouter,
            DeepseekV2Config,
            {
                "n_routed_experts": 12,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "topk_method": "group_limited_greedy",
                "n_group": 4,
                "topk_group": 2,
                "routed_scaling_factor": 16.0,
            },
            Routing(3, num_groups=4, top_groups=2, group_best=1, scale=16.0),
        ),
        "glm4-moe-one-group": (
            Glm4MoeTopkRouter,
            Glm4MoeConfig,
            {"n_routed_experts": 12, "norm_topk_prob": False},
            Routing(3, "sigmoid"),
        ),
    }
    found = {}
    for name, (router_class, config_class, shape, routing) in made.items():
        found[name] = (router_class(config_class(hidden_size=HIDDEN, num_experts_per_tok=3, **shape)), routing)
    return found


@pytest.mark.parametrize("name", list(routers()))
def test_route(backend: KernelBackend, name: str) -> None:
    router, routing = routers()[name]
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in (*router.parameters(), *router.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.4)
        x = torch.randn(200, HIDDEN, generator=generator)
        logits, weights, ids = router(x)
        buffers = dict(router.named_buffers())
        chosen, shares = backend.experts.route(logits, routing, buffers.get("e_score_correction_bias"))
    dense, expected_dense = (torch.zeros(logits.shape) for _ in range(2))
    close(dense.scatter_(1, chosen, shares), expected_dense.scatter_(1, ids, weights.float()), 1e-6)
    assert chosen.dtype == torch.int64
    assert shares.dtype == torch.float32


@pytest.mark.parametrize("num_experts", [8, 12, 60, 128, 256])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "topk_softmax"])
def test_route_of_row_is_independent_of_other_rows(backend: KernelBackend, num_experts: int, scoring: Any) -> None:
    logits = torch.randn(100, num_experts, generator=torch.Generator().manual_seed(8)) * 3
    routing = Routing(6, scoring, renormalize=True)
    ids, weights = backend.experts.route(logits, routing)
    for row in range(len(logits)):
        alone_ids, alone_weights = backend.experts.route(logits[row : row + 1], routing)
        assert torch.equal(alone_ids[0], ids[row])
        assert torch.equal(alone_weights[0], weights[row])


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "topk_softmax"])
def test_equal_experts_are_chosen_by_lower_id(backend: KernelBackend, scoring: Any) -> None:
    logits = torch.zeros(2, 40)
    logits[:, 31] = 1.0
    ids, _ = backend.experts.route(logits, Routing(4, scoring))
    assert ids.tolist() == [[31, 0, 1, 2]] * 2
    grouped = Routing(4, scoring, num_groups=10, top_groups=2) if scoring != "topk_softmax" else Routing(4, scoring)
    ids, _ = backend.experts.route(torch.zeros(2, 40), grouped)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
