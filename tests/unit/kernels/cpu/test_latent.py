"""Native latent attention, its indexer and the choice of experts, on each instruction set and any number of threads."""

from __future__ import annotations

from ctypes import CDLL
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch

from kernels.cpu import attention, routing
from kernels.interface import AttentionMetaData, IndexSpec, KVSpec, Routing
from kernels.torch_backend import moe
from kernels.torch_backend.attention import PagedKVCache
from tests.covering import covering
from tests.unit.kernels.cpu.conftest import SOME
from tests.unit.kernels.steps import Rows, metadata, reference_attention, scattered_blocks

pytestmark = pytest.mark.each_value

LENGTHS, BLOCK = [700, 40], 16
DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float8_e4m3fn)]
NARROW = pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES, ids=str)


@dataclass
class Latent:
    """Two sequences in a latent cache with an indexer, whose scores are small whole numbers, many of them equal."""

    native: CDLL
    dtype: torch.dtype
    kv_dtype: torch.dtype
    heads: int
    dim: int
    value_dim: int
    index: IndexSpec = field(default_factory=lambda: IndexSpec(num_heads=5, head_dim=12, topk=90))

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.dim)
        self.blocks = scattered_blocks(LENGTHS, BLOCK, 60, seed=self.dim)
        self.cache = PagedKVCache.allocate(
            KVSpec(1, self.dim, latent_value_dim=self.value_dim, index=self.index), 1, 60, BLOCK, self.kv_dtype
        )
        index = self.cache.index
        assert index is not None
        for cache in (self.cache, index):
            cache.data.copy_(torch.full(cache.data.shape, torch.nan))
        total = sum(LENGTHS)
        keys = torch.randn(total, self.dim, generator=generator).to(self.kv_dtype)
        self.keys = keys.to(self.dtype)
        self.q = torch.randn(total, self.heads, self.dim, generator=generator).to(self.dtype)
        index_shape = self.index.num_heads, self.index.head_dim
        self.index_keys = torch.randint(-1, 2, (total, index_shape[1]), generator=generator).to(self.dtype)
        self.index_q = torch.randint(-1, 2, (total, *index_shape), generator=generator).to(self.dtype)
        self.weights = torch.randint(-2, 3, (total, index_shape[0]), generator=generator).float()
        step = attention.StepArrays(self.step([(0, 0, LENGTHS[0]), (1, 0, LENGTHS[1])]))
        attention.write_latent(self.native, self.cache, 0, self.keys, step)
        attention.write_latent(self.native, index, 0, self.index_keys, step)

    def step(self, work: list[tuple[int, int, int]]) -> AttentionMetaData:
        return metadata([Rows(start, end, self.blocks[i]) for i, start, end in work], BLOCK)

    def rows(self, x: torch.Tensor, work: list[tuple[int, int, int]]) -> torch.Tensor:
        return torch.cat([x[i * LENGTHS[0] + start : i * LENGTHS[0] + end] for i, start, end in work])

    def select(self, work: list[tuple[int, int, int]]) -> attention.SelectedTokens | None:
        step = self.step(work)
        q, weights = self.rows(self.index_q, work), self.rows(self.weights, work)
        arrays = attention.StepArrays(step)
        return attention.select_tokens(self.native, q, weights, self.cache, 0, step, arrays)

    def attend(self, work: list[tuple[int, int, int]], sparse: bool) -> torch.Tensor:
        arrays = attention.StepArrays(self.step(work))
        selection = self.select(work) if sparse else None
        return attention.latent_attention(self.native, self.rows(self.q, work), self.cache, 0, arrays, 0.2, selection)

    def chosen(self, p: int) -> list[int]:
        """Positions selected for the first sequence's token at `p`, by plain arithmetic."""
        products = torch.einsum("hd,kd->hk", self.index_q[p].double(), self.index_keys[: p + 1].double())
        scores = (self.weights[p].double()[:, None] * products.relu()).sum(0).tolist()
        return sorted(sorted(range(p + 1), key=lambda k: (-scores[k], k))[: self.index.topk])


@NARROW
@pytest.mark.parametrize(("heads", "dim", "value_dim"), [(2, 96, 64), (3, 96, 64), (20, 50, 37)])
@pytest.mark.parametrize("sparse", [False, True])
def test_against_float64(
    each_attention: CDLL, dtype: torch.dtype, kv_dtype: torch.dtype, heads: int, dim: int, value_dim: int, sparse: bool
) -> None:
    made = Latent(each_attention, dtype, kv_dtype, heads, dim, value_dim)
    out = made.attend([(0, 600, 700), (1, 0, 40)], sparse)
    for p in (600, 650, 699):
        keys = made.keys[None, made.chosen(p) if sparse else slice(0, p + 1)]
        exact = reference_attention(made.q[p][None], keys, keys[..., :value_dim], keys.shape[1] - 1, 0.2)[0]
        tolerance = 2e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(out[p - 600].double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("some_attention", "dtypes", "sparse"),
    covering(SOME, DTYPES, [False, True]),
    indirect=["some_attention"],
    ids=str,
)
def test_chunks_batches_and_threads_do_not_change_bits(
    some_attention: CDLL, dtypes: tuple[torch.dtype, torch.dtype], sparse: bool
) -> None:
    dtype, kv_dtype = dtypes
    made = Latent(some_attention, dtype, kv_dtype, 6, 80, 48)
    whole = made.attend([(0, 0, 700)], sparse)
    for count in (1, 3):
        some_attention.fissile_set_threads(count)
        for start, end in pairwise((0, 1, 37, 64, 90, 91, 512, 640, 699, 700)):
            assert torch.equal(made.attend([(0, start, end)], sparse), whole[start:end]), f"rows {start} to {end}"
        mixed = made.attend([(1, 3, 40), (0, 500, 700)], sparse)
        assert torch.equal(mixed[37:], whole[500:])
        # Alone the rows attend to all tokens; beside a longer sequence they select all of them.
        assert torch.equal(mixed[:37], made.attend([(1, 3, 40)], sparse))


@pytest.mark.parametrize(
    ("some_attention", "heads", "sparse"),
    covering(SOME, [16, 40, 130], [False, True]),
    indirect=["some_attention"],
    ids=str,
)
def test_row_of_many_heads_is_equal_alone(some_attention: CDLL, heads: int, sparse: bool) -> None:
    made = Latent(some_attention, torch.bfloat16, torch.bfloat16, heads, 96, 64)
    whole = made.attend([(0, 620, 650)], sparse)
    for p in (620, 639, 640, 649):
        assert torch.equal(made.attend([(0, p, p + 1)], sparse)[0], whole[p - 620]), f"token {p}"


def test_selected_tokens(each_isa: CDLL) -> None:
    made = Latent(each_isa, torch.float32, torch.float32, 1, 16, 8)
    selection = made.select([(0, 0, 700)])
    assert selection is not None
    for p in (0, 5, 88, 89, 90, 91, 127, 128, 400, 699):
        expected = made.chosen(p)
        assert selection.positions[p, : len(expected)].tolist() == expected, f"token {p}"
    assert made.select([(0, 0, 90)]) is None


def test_nan_scores_rank_last(each_isa: CDLL) -> None:
    made = Latent(each_isa, torch.float32, torch.float32, 1, 16, 8)
    made.index_q[699] = 1.0
    made.weights[699] = 1.0
    index = made.cache.index
    assert index is not None
    for p in range(0, 700, 2):
        index.data[0, 0, made.blocks[0][p // BLOCK], 0, p % BLOCK] = torch.nan if p % 4 else -torch.inf
    made.index_keys[1::2] = torch.randint(-1, 2, made.index_keys[1::2].shape).float()
    attention.write_latent(each_isa, index, 0, made.index_keys[1:2], attention.StepArrays(made.step([(0, 1, 2)])))
    selection = made.select([(0, 699, 700)])
    assert selection is not None
    # -inf times a positive query is cut off at zero like any negative product.
    assert not [p for p in selection.positions[0].tolist() if p % 4 == 2]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "topk_softmax"])
@pytest.mark.parametrize(("num_experts", "groups"), [(7, 1), (60, 1), (64, 8), (256, 8)])
def test_route_is_as_pytorchs(each_isa: CDLL, scoring: Any, num_experts: int, groups: int) -> None:
    generator = torch.Generator().manual_seed(num_experts)
    # Half of the logits are whole numbers, many of them equal.
    logits = torch.randn(50, num_experts, generator=generator) * 3
    logits[::2] = logits[::2].round()
    bias = torch.randn(num_experts, generator=generator)
    made = Routing(6, scoring, True, groups, max(1, groups // 2), 2.5)
    for correction_bias in (None, bias):
        ids, weights = routing.route(each_isa, logits, made, correction_bias)
        expected_ids, expected = moe.TorchExpertOps().route(logits, made, correction_bias)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def test_nan_row_routes_to_distinct_experts(each_isa: CDLL) -> None:
    logits = torch.full((3, 16), torch.nan)
    logits[1] = -torch.inf
    for made in (Routing(4), Routing(4, "sigmoid", True, 4, 2), Routing(4, "topk_softmax")):
        ids, _ = routing.route(each_isa, logits, made, None)
        assert all(len(set(row)) == 4 and set(row) <= set(range(16)) for row in ids.tolist())
