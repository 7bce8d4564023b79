"""Native attention: the bits of a row in any chunk, batch, split of its keys and number of threads; NaN all around."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL
from itertools import pairwise

import numpy as np
import pytest
import torch

from kernels.cpu import attention, library
from kernels.interface import KVSpec
from kernels.torch_backend.attention import PagedKVCache
from tests.covering import covering
from tests.native import select_or_skip
from tests.processes import resident_bytes
from tests.unit.kernels.cpu.conftest import SOME
from tests.unit.kernels.steps import Rows, metadata, reference_attention, scattered_blocks, stored

pytestmark = pytest.mark.each_value

LENGTH, BLOCK = 1300, 16
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
CACHES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float8_e4m3fn),
]


def filled(
    native: CDLL, heads: int, dim: int, dtype: torch.dtype, kv_dtype: torch.dtype | None = None, block: int = BLOCK
) -> tuple[PagedKVCache, list[list[int]]]:
    """A cache with two sequences, one longer than two splits of 512 keys; unwritten slots are NaN."""
    lengths, count = [LENGTH, 75], 1600 // block
    blocks = scattered_blocks(lengths, block, count, seed=dim)
    cache = PagedKVCache.allocate(KVSpec(heads, dim), 1, count, block, kv_dtype or dtype)
    cache.data.copy_(torch.full(cache.data.shape, torch.nan))
    step = metadata([Rows(0, n, table) for n, table in zip(lengths, blocks, strict=True)], block)
    generator = torch.Generator().manual_seed(dim)
    k, v = (torch.randn(sum(lengths), heads, dim, generator=generator).to(dtype) for _ in range(2))
    attention.write_kv(native, cache, 0, k, v, attention.StepArrays(step))
    return cache, blocks


def attend(
    native: CDLL,
    cache: PagedKVCache,
    q: torch.Tensor,
    rows: list[Rows],
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    block: int = BLOCK,
    softcap: float = 0.0,
) -> torch.Tensor:
    step = attention.StepArrays(metadata(rows, block))
    return attention.attention(native, q, cache, 0, step, 0.2, window, sinks, softcap)


@DTYPES
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (3, 1, 24), (2, 2, 128), (16, 1, 20)])
@pytest.mark.parametrize(("window", "softcap"), [(None, 0.0), (600, 0.0), (600, 3.0)])
def test_against_float64(
    each_attention: CDLL, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, window: int | None, softcap: float
) -> None:
    cache, blocks = filled(each_attention, kv_heads, dim, dtype)
    sinks = torch.linspace(-2.0, 4.0, heads)
    rows = [Rows(LENGTH - 30, LENGTH, blocks[0]), Rows(74, 75, blocks[1])]
    q = torch.randn(31, heads, dim).to(dtype)
    out = attend(each_attention, cache, q, rows, window, sinks, softcap=softcap)
    for part, row in ((slice(0, 30), rows[0]), (slice(30, 31), rows[1])):
        keys, values = stored(cache, 0, row.blocks, row.end)
        exact = reference_attention(q[part], keys, values, row.start, 0.2, window, sinks, softcap)
        tolerance = 2e-6 if dtype == torch.float32 else 8e-3
        torch.testing.assert_close(out[part].double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("some_attention", "dtypes", "shape", "window"),
    covering(SOME, CACHES, [(4, 2, 64), (3, 1, 24), (2, 2, 16)], [None, 1, 65]),
    indirect=["some_attention"],
    ids=str,
)
def test_chunks_batches_and_threads_do_not_change_bits(
    some_attention: CDLL, dtypes: tuple[torch.dtype, torch.dtype], shape: tuple[int, int, int], window: int | None
) -> None:
    (dtype, kv_dtype), (heads, kv_heads, dim) = dtypes, shape
    cache, (blocks, others) = filled(some_attention, kv_heads, dim, dtype, kv_dtype)
    q, sinks = torch.randn(LENGTH, heads, dim).to(dtype), torch.randn(heads)
    whole = attend(some_attention, cache, q, [Rows(0, LENGTH, blocks)], window, sinks)
    other = attend(some_attention, cache, q[:75], [Rows(0, 75, others)], window, sinks)
    for count in (1, 2, 5):
        some_attention.fissile_set_threads(count)
        for start, end in pairwise((0, 1, 2, 37, 64, 65, 512, 513, 1023, 1024, 1200, LENGTH - 1, LENGTH)):
            alone = attend(some_attention, cache, q[start:end], [Rows(start, end, blocks)], window, sinks)
            assert torch.equal(alone, whole[start:end]), f"rows {start} to {end} by {count} threads"
        mixed = [Rows(74, 75, others), Rows(900, LENGTH, blocks), Rows(3, 70, others)]
        rows = torch.cat((q[74:75], q[900:], q[3:70]))
        expected = torch.cat((other[74:75], whole[900:], other[3:70]))
        assert torch.equal(attend(some_attention, cache, rows, mixed, window, sinks), expected)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("spoiled", [40, 41])
def test_tokens_before_window_have_no_effect(
    some_attention: CDLL, heads: int, kv_heads: int, dim: int, spoiled: int
) -> None:
    """Even an overflowed token with a visible neighbour has no effect, in a prefill and in decodes."""
    window, end = 33, 140
    cache, (blocks, _) = filled(some_attention, kv_heads, dim, torch.bfloat16)
    q = torch.randn(end, heads, dim).bfloat16()
    first = spoiled + window
    kept = attend(some_attention, cache, q, [Rows(0, end, blocks)], window)[first:]
    cache.data[0, :, blocks[spoiled // BLOCK], :, spoiled % BLOCK] = torch.nan
    assert torch.equal(attend(some_attention, cache, q, [Rows(0, end, blocks)], window)[first:], kept)
    for row in (first, first + 1, first + 2):
        alone = attend(some_attention, cache, q[row : row + 1], [Rows(row, row + 1, blocks)], window)
        assert torch.equal(alone[0], kept[row - first]), f"row {row}"


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (3, 1), (7, 1)])
@pytest.mark.parametrize("dim", [32, 64, 128, 160])
@pytest.mark.parametrize("window", [None, 33])
def test_decode_rows_equal_prefill_rows(
    some_attention: CDLL, heads: int, kv_heads: int, dim: int, window: int | None
) -> None:
    """With few query heads to a key head, which take the direct path, and with more; keys end within a pair and after
    it."""
    cache, (blocks, _) = filled(some_attention, kv_heads, dim, torch.bfloat16)
    q = torch.randn(150, heads, dim).bfloat16()
    whole = attend(some_attention, cache, q, [Rows(0, 150, blocks)], window)
    for row in (0, 1, 2, 31, 63, 64, 65, 127, 148, 149):
        alone = attend(some_attention, cache, q[row : row + 1], [Rows(row, row + 1, blocks)], window)
        assert torch.equal(alone[0], whole[row]), f"row {row}"


@pytest.mark.slow
def test_many_sequences_at_once(some_attention: CDLL) -> None:
    cache, (blocks, _) = filled(some_attention, 2, 32, torch.bfloat16)
    q = torch.randn(LENGTH, 6, 32).bfloat16()
    whole = attend(some_attention, cache, q, [Rows(0, LENGTH, blocks)])
    ends = np.random.default_rng(0).permutation(LENGTH)[:70] + 1
    some_attention.fissile_set_threads(3)
    decoded = attend(some_attention, cache, q[ends - 1], [Rows(end - 1, end, blocks) for end in ends.tolist()])
    assert torch.equal(decoded, whole[ends - 1])


@DTYPES
@pytest.mark.parametrize("spoiled", [100, 101])
def test_overflowed_later_tokens_have_no_effect(some_attention: CDLL, dtype: torch.dtype, spoiled: int) -> None:
    """The first and the second of a pair of neighbours."""
    cache, (blocks, _) = filled(some_attention, 1, 32, dtype)
    q = torch.randn(LENGTH, 4, 32).to(dtype)
    kept = attend(some_attention, cache, q, [Rows(0, LENGTH, blocks)])
    cache.data[0, :, blocks[spoiled // BLOCK], :, spoiled % BLOCK] = torch.nan
    out = attend(some_attention, cache, q, [Rows(0, LENGTH, blocks)])
    assert torch.equal(out[:spoiled], kept[:spoiled])
    assert out[spoiled:].isnan().all()


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (5, 1), (9, 1), (24, 1), (4, 2)])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("spoiled", [torch.nan, -torch.inf])
def test_overflowed_values_give_nan_in_rows_with_access(
    some_attention: CDLL, heads: int, kv_heads: int, window: int | None, spoiled: float
) -> None:
    """For tokens whose rows are in one tile and in several; keys stay finite."""
    end, places = 150, [50, 101]
    cache, (blocks, _) = filled(some_attention, kv_heads, 64, torch.bfloat16)
    q = torch.randn(end, heads, 64).bfloat16()
    kept = attend(some_attention, cache, q, [Rows(0, end, blocks)], window)
    for place in places:
        cache.data[0, 1, blocks[place // BLOCK], :, place % BLOCK] = spoiled
    out = attend(some_attention, cache, q, [Rows(0, end, blocks)], window)
    tokens = torch.arange(end)[:, None]
    sees = ((tokens >= torch.tensor(places)) & (tokens < torch.tensor(places) + (window or end))).any(1)
    assert torch.equal(out[~sees], kept[~sees])
    assert not out[sees].isfinite().any()
    for row in (49, 50, 51, 63, 89, 90, 100, 101, 149):
        alone = attend(some_attention, cache, q[row : row + 1], [Rows(row, row + 1, blocks)], window)
        assert torch.equal(alone[0].nan_to_num(7.0), out[row].nan_to_num(7.0)), f"row {row}"


@pytest.mark.parametrize("dim", [32, 40])
@pytest.mark.parametrize("window", [None, 70])
def test_block_size_does_not_change_bits(some_attention: CDLL, dim: int, window: int | None) -> None:
    outs = []
    for block in (16, 1, 5, 24, 32, 64, 80):
        cache, (blocks, others) = filled(some_attention, 2, dim, torch.bfloat16, block=block)
        q = torch.randn(61, 6, dim, generator=torch.Generator().manual_seed(1)).bfloat16()
        rows = [Rows(LENGTH - 58, LENGTH, blocks), Rows(74, 75, others), Rows(32, 34, others)]
        outs.append(attend(some_attention, cache, q, rows, window, block=block))
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("processors", ["avx512bf16", "amx"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 128), (3, 1, 24), (2, 2, 32), (20, 1, 64)])
def test_processor_pair_products_equal_emulation(
    native: CDLL, processors: str, heads: int, kv_heads: int, dim: int
) -> None:
    """Equal to the bit, for decodes and longer parts."""
    outs = []
    for name in (f"{processors}_emulated", processors):
        select_or_skip(native, name)
        cache, (blocks, others) = filled(native, kv_heads, dim, torch.bfloat16)
        q = torch.randn(140, heads, dim, generator=torch.Generator().manual_seed(1)).bfloat16()
        rows = [Rows(LENGTH - 64, LENGTH, blocks), Rows(74, 75, others), Rows(0, 75, others)]
        outs.append(attend(native, cache, q, rows, window=301))
        library.select(native)
    assert torch.equal(*outs)


NARROW = [torch.bfloat16, torch.float16, torch.float8_e4m3fn]


def hard_to_round(dtype: torch.dtype) -> torch.Tensor:
    """All numbers of a narrow `dtype`, midpoints between neighbours, numbers beside them, and numbers out of range."""
    codes = torch.arange(2 ** (8 * dtype.itemsize))
    numbers = codes.to(torch.uint8 if dtype.itemsize == 1 else torch.uint16).view(dtype).float()
    finite = numbers[numbers.isfinite()].sort().values
    middles = (finite[1:].double() + finite[:-1].double()).div(2).float()
    beside = [middles.nextafter(torch.tensor(torch.inf)), middles.nextafter(torch.tensor(-torch.inf))]
    beyond = torch.tensor([3.4e38, -3.4e38, torch.inf, -torch.inf, torch.nan, 464.0, -65520.0, 1e-45, -0.0])
    return torch.cat((finite, middles, *beside, beyond))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_dtype", [torch.float32, *NARROW], ids=str)
def test_narrow_cache_equals_pytorch_rounding(each_isa: CDLL, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    heads, dim = 2, 1021
    numbers = hard_to_round(torch.float16 if kv_dtype == torch.float32 else kv_dtype).to(dtype)
    count = -(-len(numbers) // (heads * dim))
    k = torch.zeros(count * heads * dim, dtype=dtype)
    k[: len(numbers)] = numbers
    k = k.view(count, heads, dim)
    cache, expected = (PagedKVCache.allocate(KVSpec(heads, dim), 1, 20, BLOCK, kv_dtype) for _ in range(2))
    step = metadata([Rows(0, count, list(range(19, -1, -1)))], BLOCK)
    attention.write_kv(each_isa, cache, 0, k, -k, attention.StepArrays(step))
    slots = torch.from_numpy(step.slot_mapping)
    rows = (slots[:, None] // BLOCK * heads + torch.arange(heads)) * BLOCK + slots[:, None] % BLOCK
    expected.write(0, rows.flatten(), k, -k)
    stored_numbers, wanted = (one.data.float() for one in (cache, expected))
    assert torch.equal(stored_numbers.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert torch.equal(stored_numbers.isnan(), wanted.isnan())
    assert torch.equal(stored_numbers.signbit() & (wanted == 0), wanted.signbit() & (wanted == 0))


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (3, 1, 24)])
def test_narrow_caches_are_read_exactly(
    each_isa: CDLL, kv_dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> None:
    narrow, blocks = filled(each_isa, kv_heads, dim, torch.float32, kv_dtype)
    wide = PagedKVCache(narrow.data.float(), dim)
    rows = [Rows(LENGTH - 30, LENGTH, blocks[0]), Rows(74, 75, blocks[1])]
    q = torch.randn(31, heads, dim)
    assert torch.equal(attend(each_isa, narrow, q, rows), attend(each_isa, wide, q, rows))


@pytest.mark.parametrize("name", ["seq_lens", "cu_seqlens_q", "block_tables", "slot_mapping"])
def test_misaligned_metadata_is_refused(name: str) -> None:
    step = metadata([Rows(0, 5, [3]), Rows(0, 3, [2])], BLOCK)
    kept = getattr(step, name)
    setattr(step, name, kept.astype(np.int32))
    with pytest.raises(ValueError, match="int64 expected, not int32"):
        attention.StepArrays(step)
    # Rows of tables may be apart, as in a wider table; the elements of a row may not.
    apart = np.repeat(kept, 2, axis=-1)[..., ::2]
    setattr(step, name, apart)
    with pytest.raises(ValueError, match=r"contiguous|with strides"):
        attention.StepArrays(step)


def repeated(native: CDLL, kv_heads: int, dim: int) -> PagedKVCache:
    """A cache of one block, which serves as any number of blocks."""
    cache = PagedKVCache.allocate(KVSpec(kv_heads, dim), 1, 1, 64, torch.bfloat16)
    k, v = (torch.randn(64, kv_heads, dim, generator=torch.Generator().manual_seed(1)).bfloat16() for _ in range(2))
    attention.write_kv(native, cache, 0, k, v, attention.StepArrays(metadata([Rows(0, 64, [0])], 64)))
    return cache


def check_a_long_sequence_beside_short_ones() -> None:
    """Attends to one long and 29 short sequences by 64 threads; their bits, and the memory that it takes."""
    threads = library.load()
    library.select(threads)
    cache = repeated(threads, 8, 128)
    lengths = [65_536, *[10] * 29]
    rows = [Rows(length - 1, length, [0] * -(-length // 64)) for length in lengths]
    q = torch.randn(len(rows), 32, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
    threads.fissile_set_threads(1)
    expected = attend(threads, cache, q, rows, block=64)
    threads.fissile_set_threads(64)

    def call() -> tuple[torch.Tensor, int]:
        before = resident_bytes()
        return attend(threads, cache, q, rows, block=64), resident_bytes() - before

    # The memory is the calling thread's own: a new one begins without any.
    with ThreadPoolExecutor(1) as pool:
        found, grown = pool.submit(call).result()
    assert torch.equal(found, expected)
    assert grown < 100 << 20, f"{grown >> 20} MiB"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is in memory")
@pytest.mark.usefixtures("native")
def test_long_sequence_beside_short_ones_uses_little_memory() -> None:
    """Former fault: each tile had as many states as the longest tile, of as many rows as a full one: 797 MB, never
    freed.

    In a process of its own: 64 helpers stay as long as their process, and each call of any later test wakes them.
    """
    check = "check_a_long_sequence_beside_short_ones"
    done = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import {check}; {check}()"],
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is in memory")
def test_attention_splits_beyond_memory_run_in_waves(threads: CDLL) -> None:
    """Bounded, and with the same bits; here 70 MB of states, of which 64 MB are kept at most."""
    cache = repeated(threads, 8, 256)
    end = 90_000
    rows = [Rows(end - 48, end, [0] * -(-end // 64)), Rows(9, 10, [0])]
    q = torch.randn(49, 8, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    threads.fissile_set_threads(1)
    expected = attend(threads, cache, q, rows, block=64)
    threads.fissile_set_threads(5)

    def call() -> tuple[torch.Tensor, int]:
        before = resident_bytes()
        return attend(threads, cache, q, rows, block=64), resident_bytes() - before

    with ThreadPoolExecutor(1) as pool:
        found, grown = pool.submit(call).result()
    assert torch.equal(found, expected)
    assert grown < 80 << 20, f"{grown >> 20} MiB"
