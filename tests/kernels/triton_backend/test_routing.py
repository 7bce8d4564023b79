"""The choice of experts: ids exactly as the reference chooses them."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from kernels.interface import Routing
from kernels.torch_backend.backend import TorchBackend
from kernels.triton_backend.routing import route

REFERENCE = TorchBackend()
ROUTINGS = {
    "mixtral": (8, Routing(2, renormalize=True)),
    "qwen3": (128, Routing(8, renormalize=True)),
    "qwen2": (60, Routing(4)),
    "gpt-oss": (32, Routing(4, "topk_softmax")),
    "deepseek-v3": (256, Routing(8, "sigmoid", renormalize=True, num_groups=8, top_groups=4, scale=2.5)),
    "three-groups": (12, Routing(3, "sigmoid", num_groups=3, top_groups=2, scale=0.5)),
    "deepseek-v2": (160, Routing(6, num_groups=8, top_groups=3, group_best=1, scale=16.0)),
    "grouped-softmax": (40, Routing(5, num_groups=10, top_groups=3)),
    "most": (512, Routing(16, renormalize=True)),
    "all-of-one": (1, Routing(1, "sigmoid")),
}


def same(found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=2e-6, atol=1e-7)


def drawn(rows: int, num_experts: int) -> torch.Tensor:
    return torch.randn(rows, num_experts, generator=torch.Generator().manual_seed(num_experts)) * 2


@pytest.mark.parametrize("name", list(ROUTINGS))
def test_route(name: str) -> None:
    num_experts, routing = ROUTINGS[name]
    logits = drawn(4, num_experts)
    same(route(logits, routing), REFERENCE.experts.route(logits, routing))
    correction = torch.rand(num_experts, generator=torch.Generator().manual_seed(1)) - 0.5
    same(route(logits, routing, correction), REFERENCE.experts.route(logits, routing, correction))


@pytest.mark.parametrize("name", list(ROUTINGS))
def test_equal_experts_are_ordered_by_id(name: str) -> None:
    num_experts, routing = ROUTINGS[name]
    few = torch.randint(0, 3, (3, num_experts), generator=torch.Generator().manual_seed(3)).float()
    few[0] = 0.0
    same(route(few, routing), REFERENCE.experts.route(few, routing))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "topk_softmax"])
def test_strided_rows_are_independent(
    scoring: Literal["softmax", "sigmoid", "topk_softmax"],
) -> None:
    wide, routing = drawn(3, 200), Routing(6, scoring, renormalize=True)
    ids, weights = route(wide[:, 30:150], routing)
    same((ids, weights), REFERENCE.experts.route(wide[:, 30:150].contiguous(), routing))
    for row in range(3):
        alone_ids, alone_weights = route(wide[row : row + 1, 30:150].contiguous(), routing)
        assert torch.equal(alone_ids[0], ids[row])
        assert torch.equal(alone_weights[0], weights[row])
    by_column = wide[:, 30:150].t().contiguous().t()
    assert torch.equal(route(by_column, routing)[1], weights)


def test_no_rows() -> None:
    ids, weights = route(torch.empty(0, 8), Routing(2))
    assert (ids.shape, ids.dtype, weights.shape, weights.dtype) == ((0, 2), torch.int64, (0, 2), torch.float32)


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_extreme_logits_choose_distinct_experts_in_range() -> None:
    """Rows with all scores 0 or NaN must choose distinct experts within range."""
    logits = torch.tensor([[-300.0, 0.0, -300.0, -300.0], [-torch.inf, 1.0, -torch.inf, 2.0], [torch.nan, 1, 2, 3]])
    for routing in (Routing(3), Routing(3, "topk_softmax"), Routing(3, "sigmoid")):
        ids, _ = route(logits, routing)
        assert torch.equal(ids, REFERENCE.experts.route(logits, routing)[0]), routing
