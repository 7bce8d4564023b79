"""Latent attention, products by head and token selection of the back ends, against plain arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.interface import IndexSpec, KernelBackend, KVSpec
from kernels.torch_backend.attention import PagedKVCache
from kernels.torch_backend.token_selection import highest
from tests.unit.kernels.outputs import FIXED_OUTPUTS
from tests.unit.kernels.steps import Rows, metadata, reference_attention, reference_selection, scattered_blocks

pytestmark = [FIXED_OUTPUTS, pytest.mark.each_value]

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
LENGTHS, COUNTS = [1, 70, 64, 129, 200], [1, 3, 64, 1, 66]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected.double(), atol=tolerance, rtol=tolerance)


@pytest.fixture(params=[1, 3], ids=lambda n: f"{n}-threads")
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("heads", "n", "k"), [(1, 16, 8), (3, 20, 33), (16, 48, 24)])
def test_head_linear(backend: KernelBackend, dtype: torch.dtype, heads: int, n: int, k: int) -> None:
    weight, x = torch.randn(heads, n, k).to(dtype), torch.randn(37, heads, k).to(dtype)
    packed = backend.linear.pack_heads(weight, dtype)
    out = backend.linear.apply_heads(x, packed)
    assert out.dtype == dtype
    expected = torch.einsum("thk,hnk->thn", x.double(), weight.double())
    torch.testing.assert_close(out.double(), expected, atol=20 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    alone = torch.cat([backend.linear.apply_heads(row[None], packed) for row in x])
    for count in (1, 2, 15, 16, 17, 37):
        order = torch.randperm(37)[:count]
        assert torch.equal(backend.linear.apply_heads(x[order], packed), alone[order]), f"{count} rows"


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("width", [7, 32, 128])
def test_layer_norm(backend: KernelBackend, dtype: torch.dtype, width: int) -> None:
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((20, width), (width,), (width,)))
    out = backend.elementwise.layer_norm(x, weight, bias, 1e-6)
    close(out, torch.nn.functional.layer_norm(x.double(), (width,), weight.double(), bias.double(), 1e-6))
    assert torch.equal(out, torch.cat([backend.elementwise.layer_norm(row[None], weight, bias, 1e-6) for row in x]))


@dataclass
class Step:
    """Sequences of LENGTHS in a cache, and a step of the last COUNTS rows of each."""

    spec: KVSpec
    heads: int
    block_size: int
    dtype: torch.dtype
    backend: KernelBackend
    cache_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        num_blocks = sum(-(-length // self.block_size) for length in LENGTHS) + 1
        self.blocks = scattered_blocks(LENGTHS, self.block_size, num_blocks, seed=self.heads)
        self.cache: PagedKVCache = self.backend.kv_cache.allocate(
            self.spec, 2, num_blocks, self.block_size, self.cache_dtype
        )
        self.cache.data[:, :, :-1] = torch.nan
        # Numbers that both dtypes have.
        self.keys = [torch.randn(n, self.spec.head_dim).to(self.cache_dtype).to(self.dtype) for n in LENGTHS]
        fill = metadata([Rows(0, len(k), b) for k, b in zip(self.keys, self.blocks, strict=True)], self.block_size)
        fill.plan = self.backend.attention.plan(fill, self.cache, self.heads)
        self.backend.latent_attention.write(self.cache, 1, torch.cat(self.keys), fill)
        if self.spec.index is not None:
            assert self.cache.index is not None
            self.cache.index.data[:, :, :-1] = torch.nan
            # Few distinct values, so that many scores are equal.
            shape = (self.spec.index.num_heads, self.spec.index.head_dim)
            self.index_keys = [torch.randint(-1, 2, (n, shape[1])).to(self.dtype) for n in LENGTHS]
            self.index_queries = [torch.randint(-1, 2, (n, *shape)).to(self.dtype) for n in LENGTHS]
            self.index_weights = [torch.randint(-2, 3, (n, shape[0])).float() for n in LENGTHS]
            self.backend.latent_attention.write_index(self.cache, 1, torch.cat(self.index_keys), fill)
        self.queries = [torch.randn(n, self.heads, self.spec.head_dim).to(self.dtype) for n in LENGTHS]

    def run(self, work: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Attention of rows [start, end) of each (sequence, start, end), beside five rows of padding."""
        step = metadata([Rows(start, end, self.blocks[i]) for i, start, end in work], self.block_size)
        step.plan = self.backend.attention.plan(step, self.cache, self.heads)
        selection = None
        if self.spec.index is not None:
            queries, weights = self._rows(self.index_queries, work), self._rows(self.index_weights, work)
            selection = self.backend.latent_attention.select_tokens(queries, weights, self.cache, 1, step)
        out = self.backend.latent_attention.apply(self._rows(self.queries, work), self.cache, 1, step, 0.2, selection)
        assert not out[-5:].any()
        return list(out[:-5].split_with_sizes([end - start for _, start, end in work]))

    @staticmethod
    def _rows(rows: list[torch.Tensor], work: list[tuple[int, int, int]]) -> torch.Tensor:
        return torch.cat([*(rows[i][start:end] for i, start, end in work), torch.ones_like(rows[-1][:5])])

    def naive(self, i: int, start: int, end: int) -> torch.Tensor:
        """Plain arithmetic in float64, row by row."""
        outs = []
        for p in range(start, end):
            keys = self.keys[i][None, self._chosen(i, p)]
            values = keys[:, :, : self.spec.latent_value_dim]
            outs.append(reference_attention(self.queries[i][p][None], keys, values, keys.shape[1] - 1, 0.2))
        return torch.cat(outs)

    def _chosen(self, i: int, p: int) -> list[int]:
        spec = self.spec.index
        if spec is None:
            return list(range(p + 1))
        return reference_selection(
            self.index_queries[i][p], self.index_keys[i][: p + 1], self.index_weights[i][p], spec.topk
        )


INDEX = IndexSpec(num_heads=3, head_dim=8, topk=20)
WORK = [(i, length - count, length) for i, (length, count) in enumerate(zip(LENGTHS, COUNTS, strict=True))]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("heads", [1, 6, 20])
@pytest.mark.parametrize(("block_size", "index"), [(16, None), (48, None), (16, INDEX), (128, INDEX)])
def test_attention(
    backend: KernelBackend, dtype: torch.dtype, heads: int, block_size: int, index: IndexSpec | None
) -> None:
    step = Step(KVSpec(1, 28, 20, index), heads, block_size, dtype, backend)
    for out, (i, start, end) in zip(step.run(WORK), WORK, strict=True):
        assert out.shape == (end - start, heads, 20)
        close(out, step.naive(i, start, end))
    assert step.cache.data[0, :, :-1].isnan().all(), "another layer was written"
    assert not step.cache.data[:, :, -1].any(), "the zero block was written"


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_narrow_caches(backend: KernelBackend, cache_dtype: torch.dtype) -> None:
    """Index keys are stored in the cache's dtype, as latents are."""
    step = Step(KVSpec(1, 28, 20, INDEX), 6, 16, torch.float32, backend, cache_dtype)
    for out, (i, start, end) in zip(step.run(WORK), WORK, strict=True):
        close(out, step.naive(i, start, end))


@pytest.mark.parametrize(("topk", "index_heads"), [(1, 2), (16, 64), (63, 1), (64, 3), (65, 5), (128, 8), (500, 2)])
def test_selection_at_borders(backend: KernelBackend, topk: int, index_heads: int) -> None:
    """`topk` on both sides of a KV tile and of the lengths, index heads that fill a query tile and that do not."""
    step = Step(KVSpec(1, 12, 8, IndexSpec(index_heads, 4, topk)), 2, 16, torch.float32, backend)
    for out, (i, start, end) in zip(step.run(WORK), WORK, strict=True):
        close(out, step.naive(i, start, end))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("index", [None, INDEX])
def test_bits_are_equal_in_any_step(backend: KernelBackend, index: IndexSpec | None) -> None:
    step = Step(KVSpec(1, 28, 20, index), 3, 16, torch.float32, backend)
    # Alone, a row of up to 20 tokens has the dense plan; beside a longer one it selects all.
    alone = [{p: step.run([(i, p, p + 1)])[0][0] for p in {*range(0, n, 7), n - 1}} for i, n in enumerate(LENGTHS)]
    for work in (
        WORK,
        [(4, 0, 200), (1, 0, 19), (0, 0, 1)],
        [(3, 5, 129), (4, 10, 11), (2, 0, 20)],
        [(4, p, p + 1) for p in range(0, 200, 3)],
        [(1, 0, 20), (2, 3, 17)],
    ):
        for out, (i, start, end) in zip(step.run(work), work, strict=True):
            for p in alone[i].keys() & range(start, end):
                assert torch.equal(out[p - start], alone[i][p]), f"row {p} of sequence {i}"


def test_few_tokens_are_all_attended(backend: KernelBackend) -> None:
    step = Step(KVSpec(1, 12, 8, IndexSpec(2, 4, 200)), 2, 16, torch.float32, backend)
    full = Step(KVSpec(1, 12, 8), 2, 16, torch.float32, backend)
    full.keys, full.queries, full.cache, full.blocks = step.keys, step.queries, step.cache, step.blocks
    for sparse, dense in zip(step.run(WORK), full.run(WORK), strict=True):
        assert torch.equal(sparse, dense)


VALUES = st.sampled_from([-1.5, -0.0, 0.0, 0.25, 3.0, float("nan"), float("-inf")])


@given(st.lists(st.lists(VALUES, min_size=9, max_size=9), min_size=1, max_size=5), st.integers(1, 12), st.data())
def test_highest(rows: list[list[float]], topk: int, data: st.DataObject) -> None:
    visible = data.draw(st.lists(st.integers(1, 9), min_size=len(rows), max_size=len(rows)))
    chosen = highest(torch.tensor(rows), torch.tensor(visible), topk)
    for row, count, found in zip(rows, visible, chosen, strict=True):
        # NaN and -inf last, equal among themselves.
        rank = sorted(range(count), key=lambda k: (-row[k] if row[k] > float("-inf") else float("inf"), k))
        assert found.nonzero().flatten().tolist() == sorted(rank[:topk])


def test_cache_size_equals_request(backend: KernelBackend) -> None:
    spec = KVSpec(1, 12, 8, IndexSpec(2, 4, 10))
    cache = backend.kv_cache.allocate(spec, 3, 10, 16, torch.bfloat16)
    assert cache.index is not None
    assert cache.data.nbytes + cache.index.data.nbytes == 3 * (10 + 1) * 16 * spec.values_per_token * 2
    assert spec.values_per_token == 16
