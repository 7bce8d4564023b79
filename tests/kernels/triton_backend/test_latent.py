"""Latent attention and token selection in the interpreter, against plain arithmetic and PyTorch's back end."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch

from kernels.interface import IndexSpec, KVSpec
from kernels.torch_backend.backend import TorchBackend
from kernels.triton_backend import latent, selection
from kernels.triton_backend.kv_cache import DeviceKVCache
from kernels.triton_backend.launch import launch
from kernels.triton_backend.plan import Shape, StepPlan, plan, staged
from kernels.triton_backend.target import INTERPRETER, TARGETS, Settings
from tests.unit.kernels.steps import Rows, metadata, reference_attention, reference_selection, scattered_blocks

pytestmark = pytest.mark.each_value

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
LENGTHS, COUNTS = [1, 40, 70], [1, 3, 1]
WORK = [(i, length - count, length) for i, (length, count) in enumerate(zip(LENGTHS, COUNTS, strict=True))]
INDEX = IndexSpec(num_heads=3, head_dim=8, topk=20)
INVARIANT = Settings(TARGETS[INTERPRETER], batch_invariant=True)
TUNED = Settings(TARGETS[INTERPRETER], batch_invariant=False)
Work = list[tuple[int, int, int]]


def write(cache: DeviceKVCache, layer: int, rows: torch.Tensor, slots: torch.Tensor) -> None:
    blocks, offsets = slots // cache.block_size, slots % cache.block_size
    cache.keys(layer)[blocks, offsets, 0] = rows.to(cache.data.dtype)


def _integers(largest: int, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    return torch.randint(-largest, largest + 1, shape, generator=random).float()


@dataclass
class Sequences:
    """Sequences of `lengths` in a cache whose other slots hold NaN, and their queries."""

    spec: KVSpec = field(default_factory=lambda: KVSpec(1, 48, 32))
    heads: int = 6
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype = torch.float32
    lengths: list[int] = field(default_factory=lambda: LENGTHS)
    settings: Settings = INVARIANT

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.heads)
        num_blocks = sum(-(-length // self.block_size) for length in self.lengths)
        self.blocks = scattered_blocks(self.lengths, self.block_size, num_blocks, seed=self.heads)
        self.cache = DeviceKVCache.allocate(self.spec, 2, num_blocks, self.block_size, self.cache_dtype, CPU)
        # Numbers that both dtypes have.
        self.keys = [
            torch.randn(n, self.spec.head_dim, generator=random).to(self.dtype).to(self.cache_dtype).to(self.dtype)
            for n in self.lengths
        ]
        self.queries = [
            torch.randn(n, self.heads, self.spec.head_dim, generator=random).to(self.dtype) for n in self.lengths
        ]
        fill = metadata([Rows(0, n, b) for n, b in zip(self.lengths, self.blocks, strict=True)], self.block_size)
        self._fill(self.cache, self.keys, torch.from_numpy(fill.slot_mapping))
        if self.spec.index is not None:
            assert self.cache.index is not None
            # Few distinct values, so that many scores are equal.
            shape = (self.spec.index.num_heads, self.spec.index.head_dim)
            self.index_keys = [_integers(1, (n, shape[1]), random).to(self.dtype) for n in self.lengths]
            self.index_queries = [_integers(1, (n, *shape), random).to(self.dtype) for n in self.lengths]
            self.index_weights = [_integers(2, (n, shape[0]), random) for n in self.lengths]
            self._fill(self.cache.index, self.index_keys, torch.from_numpy(fill.slot_mapping))

    @staticmethod
    def _fill(cache: DeviceKVCache, rows: list[torch.Tensor], slots: torch.Tensor) -> None:
        cache.data.copy_(torch.full(cache.data.shape, torch.nan))
        write(cache, 1, torch.cat(rows), slots)

    def plan(self, work: Work, padding: tuple[int, int, int, int]) -> StepPlan:
        """A plan for rows [start, end) of each (sequence, start, end), with padding of rows, sequences, blocks and
        keys."""
        step = metadata([Rows(start, end, self.blocks[i]) for i, start, end in work], self.block_size)
        own = Shape.of(step)
        rows, seqs, blocks, keys = padding
        shape = Shape(own.rows + rows, own.seqs + seqs, own.blocks + blocks, own.max_seqlen_q, own.max_seqlen_k + keys)
        return StepPlan.over(torch.from_numpy(staged(step, shape)), shape)

    def select(self, work: Work, plan: StepPlan) -> torch.Tensor | None:
        if self.spec.index is None:
            return None
        q, weights = rows_of(self.index_queries, work, plan), rows_of(self.index_weights, work, plan)
        return selection.select_tokens(q, weights, self.cache, 1, plan)

    def run(self, work: Work, padding: tuple[int, int, int, int] = (5, 2, 1, 0)) -> list[torch.Tensor]:
        """Attention of each of the `work`'s rows."""
        plan = self.plan(work, padding)
        q = rows_of(self.queries, work, plan)
        out = latent.latent_attention(q, self.cache, 1, plan, 0.2, self.select(work, plan), self.settings)
        assert out.dtype == self.dtype
        counts = [end - start for _, start, end in work]
        assert not out[sum(counts) :].any()
        return list(out[: sum(counts)].split_with_sizes(counts))

    def naive(self, i: int, start: int, end: int) -> torch.Tensor:
        """Plain arithmetic in float64, row by row."""
        outs = []
        for p in range(start, end):
            keys = self.keys[i][None, self.chosen(i, p)]
            values = keys[:, :, : self.spec.latent_value_dim]
            outs.append(reference_attention(self.queries[i][p][None], keys, values, keys.shape[1] - 1, 0.2))
        return torch.cat(outs)

    def chosen(self, i: int, p: int) -> list[int]:
        spec = self.spec.index
        if spec is None:
            return list(range(p + 1))
        return reference_selection(
            self.index_queries[i][p], self.index_keys[i][: p + 1], self.index_weights[i][p], spec.topk
        )

    def check(self, work: Work) -> None:
        tolerance = TOLERANCE[self.dtype]
        for out, (i, start, end) in zip(self.run(work), work, strict=True):
            assert out.shape == (end - start, self.heads, self.spec.latent_value_dim)
            torch.testing.assert_close(out.double(), self.naive(i, start, end), atol=tolerance, rtol=tolerance)


def rows_of(rows: list[torch.Tensor], work: Work, plan: StepPlan) -> torch.Tensor:
    """The rows of the work, with NaN in padding rows and gaps between rows."""
    found = torch.cat([rows[i][start:end] for i, start, end in work])
    wide = found.new_full((plan.shape.rows, *found.shape[1:-1], found.shape[-1] + 3), torch.nan)
    wide[: len(found), ..., : found.shape[-1]] = found
    return wide[..., : found.shape[-1]]


def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So short that these sequences have several, of both lengths."""
    monkeypatch.setattr(latent, "SPLIT_KEYS", 16)
    monkeypatch.setattr(latent, "MAX_SPLITS", 3)


@pytest.mark.parametrize(
    ("spec", "heads", "block_size", "dtype", "splits"),
    [
        (KVSpec(1, 48, 32), 6, 16, torch.float32, False),
        (KVSpec(1, 28, 20), 33, 48, torch.float32, False),
        (KVSpec(1, 32, 32), 16, 16, torch.bfloat16, False),
        (KVSpec(1, 48, 32), 6, 48, torch.float16, True),
        (KVSpec(1, 28, 20, INDEX), 6, 16, torch.bfloat16, False),
        (KVSpec(1, 28, 20, INDEX), 2, 16, torch.float16, True),
    ],
)
def test_attention(
    spec: KVSpec, heads: int, block_size: int, dtype: torch.dtype, splits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if splits:
        short_splits(monkeypatch)
    Sequences(spec, heads, block_size, dtype, dtype).check(WORK)


def test_tiles_of_decodes() -> None:
    Sequences(settings=TUNED).check([(1, 39, 40), (0, 0, 1)])


def test_latent_attention_with_deepseek_widths() -> None:
    Sequences(KVSpec(1, 576, 512), heads=16, lengths=[90, 270]).check([(0, 88, 90), (1, 269, 270)])


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.float32, torch.float8_e4m3fn),
        (torch.float16, torch.float8_e4m3fnuz),
    ],
)
def test_narrow_caches(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    Sequences(KVSpec(1, 28, 20, INDEX), dtype=dtype, cache_dtype=cache_dtype).check([(1, 37, 38), (2, 69, 70)])


@pytest.mark.parametrize("index", [None, INDEX], ids=["dense", "selected"])
def test_latent_attention_equals_reference(index: IndexSpec | None) -> None:
    sequences = Sequences(KVSpec(1, 48, 32, index))
    reference = TorchBackend()
    cache = reference.kv_cache.allocate(sequences.spec, 1, sum(map(len, sequences.blocks)), 16, torch.float32)
    fill = metadata([Rows(0, n, b) for n, b in zip(LENGTHS, sequences.blocks, strict=True)], 16)
    fill.plan = reference.attention.plan(fill, cache, sequences.heads)
    reference.latent_attention.write(cache, 0, torch.cat(sequences.keys), fill)
    step = metadata([Rows(start, end, sequences.blocks[i]) for i, start, end in WORK], 16)
    step.plan = reference.attention.plan(step, cache, sequences.heads)
    chosen = None
    if index is not None:
        reference.latent_attention.write_index(cache, 0, torch.cat(sequences.index_keys), fill)
        q, weights = (of_work(rows) for rows in (sequences.index_queries, sequences.index_weights))
        chosen = reference.latent_attention.select_tokens(q, weights, cache, 0, step)
    expected = reference.latent_attention.apply(of_work(sequences.queries), cache, 0, step, 0.2, chosen)
    torch.testing.assert_close(torch.cat(sequences.run(WORK)), expected, atol=2e-5, rtol=2e-5)


def of_work(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([rows[i][start:end] for i, start, end in WORK])


@pytest.mark.parametrize("index", [None, INDEX], ids=["dense", "selected"])
def test_bits_are_equal_in_any_step(index: IndexSpec | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, in chunks, in a larger step with padding; by a program for each split or for all of them."""
    short_splits(monkeypatch)
    sequences = Sequences(KVSpec(1, 48, 32, index), heads=2)
    # Alone, a row of up to 20 tokens has the dense plan; beside a longer one it selects all.
    places = [(1, 0), (1, 19), (1, 31), (1, 32), (2, 47), (2, 48), (2, 69)]
    alone = {(i, p): sequences.run([(i, p, p + 1)], (0, 0, 0, 0))[0][0] for i, p in places}
    one_program, split = 0, 1 << 30
    works: list[tuple[int, Work]] = [
        (one_program, [(2, 47, 49), (1, 31, 34), (0, 0, 1)]),
        (one_program, [(1, 18, 20), (1, 33, 35), (2, 69, 70)]),
        (split, [(1, 0, 1), (2, 46, 49), (2, 69, 70)]),
        (split, [(1, 32, 34), (2, 69, 70)]),
    ]
    seen = set()
    for full_grid, work in works:
        monkeypatch.setattr(latent, "FULL_GRID", full_grid)
        for out, (i, start, end) in zip(sequences.run(work, (3, 1, 2, 100)), work, strict=True):
            for p in range(start, end):
                if (i, p) in alone:
                    seen.add((i, p))
                    assert torch.equal(out[p - start], alone[i, p]), f"row {p} of sequence {i}"
    assert seen == set(places)


def test_prefill_bits_equal_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    short_splits(monkeypatch)
    sequences = Sequences(heads=2, lengths=[36])
    borders = [29, 30, 33, 36]
    whole = sequences.run([(0, borders[0], borders[-1])])[0]
    chunks = [sequences.run([(0, start, end)])[0] for start, end in pairwise(borders)]
    assert torch.equal(torch.cat(chunks), whole)


@pytest.mark.parametrize(("topk", "index_heads"), [(1, 2), (40, 20), (69, 1), (70, 3)])
def test_selection(topk: int, index_heads: int) -> None:
    """Exactly the tokens that the contract says, in order; `topk` on both sides of the lengths."""
    sequences = Sequences(KVSpec(1, 12, 8, IndexSpec(index_heads, 4, topk)))
    plan = sequences.plan(WORK, (2, 1, 0, 0))
    found = sequences.select(WORK, plan)
    if topk >= max(LENGTHS):
        assert found is None
        return
    assert found is not None
    assert (found.dtype, found.shape) == (torch.int32, (plan.shape.rows, topk))
    rows = [(i, p) for i, start, end in WORK for p in range(start, end)]
    for row, (i, p) in zip(found.tolist(), rows, strict=False):
        expected = sequences.chosen(i, p)
        assert row == expected + [-1] * (topk - len(expected))
    assert (found[len(rows) :] == -1).all()


def test_selection_in_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = Sequences(KVSpec(1, 12, 8, INDEX))
    plan = sequences.plan(WORK, (2, 1, 0, 0))
    whole = sequences.select(WORK, plan)
    assert whole is not None
    monkeypatch.setattr(selection, "PANEL_BYTES", 4 * 70 * 3)
    panels = sequences.select(WORK, plan)
    assert panels is not None
    assert torch.equal(panels, whole)


def test_captured_selection_cost_follows_sequence_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for a million tokens reads only the existing ones: the interpreter would take minutes for all."""
    sequences = Sequences(KVSpec(1, 12, 8, INDEX))
    found = []
    for most_programs, block, keys in ((2048, 2048, 0), (1, 16, 0), (13, 64, 1_000_000)):
        monkeypatch.setattr(selection, "PROGRAMS", most_programs)
        monkeypatch.setattr(selection, "PROGRAM_KEYS", 64)
        monkeypatch.setattr(selection, "SELECT_BLOCK", block)
        found.append(sequences.select(WORK, sequences.plan(WORK, (2, 1, 0, keys))))
    assert all(found[0] is not None and each is not None and torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("block", [16, 128])
def test_highest_orders_are_selected_by_bit(block: int) -> None:
    """The highest of any int32 numbers, with few and many equal ones, against a sort; rows see 40 to 100 of 100."""
    random = torch.Generator().manual_seed(1)
    lowest, highest = -(2**31) + 1, 2**31 - 1
    spans = [(lowest, highest), (-300, 300), (0, 3), (5, 6), (highest - 1, highest), (lowest, lowest + 70_000)]
    orders = torch.stack([torch.randint(low, high, (100,), generator=random) for low, high in spans]).to(torch.int32)
    step = metadata([Rows(39 + 12 * i, 40 + 12 * i, [i]) for i in range(len(spans))], 128)
    found = torch.full((len(spans), 41), 7, dtype=torch.int32)
    made = plan(step, CPU, 128)
    fixed = (made.cu_seqlens_q, made.seq_lens, found, 0, len(spans), 100, 41)
    launch(selection._select_kernel, (len(spans),), orders, *fixed, BLOCK=block)
    for row, (order, chosen) in enumerate(zip(orders.tolist(), found.tolist(), strict=True)):
        visible = range(40 + 12 * row)
        expected = sorted(sorted(visible, key=lambda position: (-order[position], position))[:41])
        assert chosen == expected + [-1] * (41 - len(expected))


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
def test_scores_without_an_order() -> None:
    """Zeros of both signs are equal; NaN and minus infinity are equal and last."""
    sequences = Sequences(KVSpec(1, 12, 8, IndexSpec(1, 4, 6)), lengths=[8])
    assert sequences.cache.index is not None
    slots = torch.from_numpy(metadata([Rows(0, 8, sequences.blocks[0])], 16).slot_mapping)
    scores = torch.tensor([torch.nan, 0.0, -torch.inf, -0.0, 2.0, -1.0, torch.nan, 0.0])
    keys = torch.zeros(8, 4)
    # A negative weight turns zeros into -0.0, and infinite scores into -inf.
    keys[:, 0] = scores.abs()
    write(sequences.cache.index, 1, keys, slots)
    q, weights = torch.zeros(1, 1, 4), torch.ones(1, 1)
    q[:, :, 0] = 1.0
    plan = sequences.plan([(0, 7, 8)], (0, 0, 0, 0))
    found = selection.select_tokens(q, weights, sequences.cache, 1, plan)
    assert found is not None
    assert found.tolist() == [[1, 2, 3, 4, 5, 7]]
    found = selection.select_tokens(q, -weights, sequences.cache, 1, plan)
    assert found is not None
    assert found.tolist() == [[0, 1, 3, 4, 5, 7]]


def test_empty_steps() -> None:
    sequences = Sequences(KVSpec(1, 12, 8, INDEX))
    empty = plan(metadata([Rows(5, 5, sequences.blocks[1])], 16), CPU, 16)
    assert latent.latent_attention(torch.empty(0, 6, 12), sequences.cache, 1, empty, 0.2, None, INVARIANT).shape == (
        0,
        6,
        8,
    )
