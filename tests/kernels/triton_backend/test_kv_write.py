"""What is written to the cache of a device, against indexing in PyTorch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels import float8
from kernels.interface import IndexSpec, KVSpec
from kernels.triton_backend.kv_cache import DeviceKVCache
from kernels.triton_backend.kv_write import write_kv, write_rows
from kernels.triton_backend.plan import Shape, StepPlan, plan, staged
from tests.unit.kernels.steps import Rows, metadata

pytestmark = pytest.mark.each_value

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz]
# Rows of two sequences, one in the middle of a block, and a slot that is nowhere.
STEP = metadata([Rows(3, 7, [4, 1]), Rows(0, 2, [6])], 4)


def step_plan(slot_of_row_1: int = -1) -> StepPlan:
    found = plan(STEP, CPU, 4)
    found.slot_mapping[1] = slot_of_row_1
    return found


def written(before: torch.Tensor, rows: torch.Tensor, slots: list[int]) -> torch.Tensor:
    """What a side [blocks, block_size, Hkv, D] holds afterwards, as float32."""
    after = before.float()
    for slot, row in zip(slots, float8.saturated(rows, before.dtype), strict=False):
        if slot >= 0:
            after[slot // after.shape[1], slot % after.shape[1]] = row.float()
    return after


@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [5, 16])
def test_rows_are_rounded_and_lie_in_their_slots(dtype: torch.dtype, cache_dtype: torch.dtype, dim: int) -> None:
    """k and v are parts of one projection; the other layer and the other slots stay as they are."""
    cache = DeviceKVCache.allocate(KVSpec(3, dim), 2, 8, 4, cache_dtype, CPU)
    float8.raw(cache.data).fill_(3)
    before = cache.data.clone()
    fused = torch.randn(6, 10 * dim, generator=torch.Generator().manual_seed(dim)) * 200
    fused[3:5, ::7] = 1e9
    k, v = (fused.to(dtype)[:, i * dim : (i + 3) * dim].view(6, 3, dim) for i in (4, 7))
    found = step_plan()
    write_kv(cache, 1, k, v, found)
    slots = found.slot_mapping.tolist()
    assert torch.equal(cache.keys(1).float(), written(before[1, 0], k, slots))
    assert torch.equal(cache.values(1).float(), written(before[1, 1], v, slots))
    assert torch.equal(float8.raw(cache.data[0]), float8.raw(before[0]))


@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_latent_and_index_rows(cache_dtype: torch.dtype) -> None:
    spec = KVSpec(1, 24, latent_value_dim=16, index=IndexSpec(2, 8, 4))
    cache = DeviceKVCache.allocate(spec, 2, 8, 4, cache_dtype, CPU)
    assert cache.index is not None
    rows = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)) * 300
    found = step_plan()
    slots = found.slot_mapping.tolist()
    for side, k in ((cache, rows[:, 8:32]), (cache.index, rows[:, 32:])):
        before = side.keys(1).clone()
        write_rows(side, 1, k, found)
        assert torch.equal(side.keys(1).float(), written(before, k[:, None], slots))
        assert not float8.raw(side.data[0]).any()


def test_nan_stays_nan_and_is_not_clamped() -> None:
    cache = DeviceKVCache.allocate(KVSpec(1, 2), 1, 8, 4, torch.float8_e4m3fn, CPU)
    k = torch.full((6, 1, 2), torch.nan)
    write_kv(cache, 0, k, torch.full_like(k, -torch.inf), step_plan())
    slot = int(STEP.slot_mapping[0])
    assert cache.keys(0)[slot // 4, slot % 4].float().isnan().all()
    assert (cache.values(0)[slot // 4, slot % 4].float() == -448).all()


def test_padding_is_not_stored() -> None:
    """A plan larger than its step, and fewer rows than the plan has."""
    shape = dataclasses.replace(Shape.of(STEP), rows=9, seqs=4)
    padded = StepPlan.over(torch.from_numpy(staged(STEP, shape)), shape)
    k = torch.randn(9, 1, 4, generator=torch.Generator().manual_seed(1))
    caches = []
    for rows, found in ((6, plan(STEP, CPU, 4)), (9, padded), (6, padded)):
        cache = DeviceKVCache.allocate(KVSpec(1, 4), 1, 8, 4, torch.float32, CPU)
        write_kv(cache, 0, k[:rows], k[:rows], found)
        caches.append(cache.data)
    assert torch.equal(caches[0], caches[1])
    assert torch.equal(caches[0], caches[2])
    assert caches[0].count_nonzero() == 2 * 6 * 4


def test_no_rows() -> None:
    cache = DeviceKVCache.allocate(KVSpec(1, 4), 1, 8, 4, torch.float32, CPU)
    write_kv(cache, 0, torch.empty(0, 1, 4), torch.empty(0, 1, 4), step_plan())
    assert not cache.data.any()


@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_blocks_are_copied_byte_by_byte(cache_dtype: torch.dtype) -> None:
    cache = DeviceKVCache.allocate(
        KVSpec(1, 8, latent_value_dim=6, index=IndexSpec(2, 4, 3)), 3, 5, 4, cache_dtype, CPU
    )
    assert cache.index is not None
    pools = [cache.data.view(torch.uint8), cache.index.data.view(torch.uint8)]
    before = [pool.random_(generator=torch.Generator().manual_seed(1)).clone() for pool in pools]
    cache.copy_blocks([(0, 3), (3, 4), (1, 0), (2, 2)])
    for pool, old in zip(pools, before, strict=True):
        assert torch.equal(pool, old[:, :, [1, 1, 2, 0, 0]])
