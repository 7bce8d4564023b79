"""Checks at start whether tiles of different shapes give a row the same bits on this GPU.

A tile's shape decides which rows and columns a program computes. It does not decide the order in which numbers of K are
added, because every tile walks K forward. But whether matrix instructions of different shapes add alike depends on the
hardware and the compiler. Results are compared in float32: a difference in the last bit shows in one of some 10,000
numbers of bfloat16. On an H200 with Triton 3.6 tiles agree (docs/explanation/kernels.md). If they agree,
batch-invariant kernels use tiles that suit the number of rows; if not, one tile for all, which is slower.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import structlog
import torch

from kernels.interface import AttentionMetaData, KVSpec
from kernels.triton_backend import attention, linear, packed_weight, plan
from kernels.triton_backend.kv_cache import DeviceKVCache
from kernels.triton_backend.target import Settings
from kernels.triton_backend.tiles import Cut, Tiles, table_for

log = structlog.get_logger(__name__)

# Rows, columns and K of the products that are compared: several tiles of each kind, some not full.
_ROWS, _COLUMNS, _INNER = 300, 768, 1024
# Query heads, key heads, keys and rows of the attention that is compared, and tokens of its KV blocks.
_HEADS, _KV_HEADS, _KEYS, _LAST_ROWS, _BLOCK_SIZE = 8, 2, 1300, 40, 16
_MEASURED_TARGETS = frozenset(["sm_90"])


class TileAgreement:
    """Measures whether tiles of different shapes give equal bits, once for each dtype.

    Args:
        settings: of the back end.
        device: where kernels run.
    """

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self._settings = settings
        self._device = device
        self._products: dict[torch.dtype, bool] = {}
        self._attention: dict[tuple[torch.dtype, int], bool] = {}

    def of_products(self, dtype: torch.dtype) -> bool:
        """True if products give the same bits with every tile of the table."""
        if dtype not in self._products:
            agrees = self._settings.target.name in _MEASURED_TARGETS and self._compare_products(dtype)
            self._products[dtype] = agrees
        return self._products[dtype]

    def of_attention(self, dtype: torch.dtype, head_dim: int) -> bool:
        """True if attention gives the same bits with tiles of all ROW_SIZES, in prompts and decodes, with key tiles
        dealt out or not."""
        key = dtype, head_dim
        if key not in self._attention:
            agrees = self._settings.target.name in _MEASURED_TARGETS and self._compare_attention(dtype, head_dim)
            self._attention[key] = agrees
        return self._attention[key]

    def _compare_products(self, dtype: torch.dtype) -> bool:
        x, weight = self._draw(dtype, _ROWS, _INNER), self._draw(dtype, _COLUMNS, _INNER)
        packed = packed_weight.pack(weight, None, dtype, None, self._device)

        def multiply(tiles: Tiles) -> torch.Tensor:
            return linear.linear_in(x, packed, Cut(tiles, 2, _INNER // 2, split=True), self._settings, torch.float32)

        results = [multiply(tiles) for tiles in table_for(self._settings.target, "half").all]
        return self._all_equal("products", results)

    def _compare_attention(self, dtype: torch.dtype, head_dim: int) -> bool:
        blocks = -(-_KEYS // _BLOCK_SIZE)
        cache = DeviceKVCache.allocate(KVSpec(_KV_HEADS, head_dim), 1, blocks, _BLOCK_SIZE, dtype, self._device)
        cache.data.copy_(self._draw(dtype, *cache.data.shape))
        q = self._draw(dtype, _LAST_ROWS, _HEADS, head_dim)
        prompt = self._step(blocks, (_KEYS - _LAST_ROWS, _KEYS))
        decodes = self._step(blocks, *((end - 1, end) for end in range(_KEYS - _LAST_ROWS + 1, _KEYS + 1)))
        scores, group = attention.Scores(head_dim**-0.5), _HEADS // _KV_HEADS
        results = []
        for step, rows in product((prompt, decodes), attention.ROW_SIZES):
            tiles = attention.shaped_tiles(rows, group, q, cache, self._settings)
            for dealt in (1, 3):
                own = replace(tiles, dealt=dealt)
                results.append(attention.attend(q, cache, 0, step, scores, own, torch.float32))
        return self._all_equal("attention", results)

    def _step(self, blocks: int, *spans: tuple[int, int]) -> plan.StepPlan:
        """Plans a step in which each span [start, end) of one sequence is a separate sequence over the same blocks."""
        starts, ends = np.array(spans, np.int64).T
        metadata = AttentionMetaData(
            cu_seqlens_q=np.concatenate((np.zeros(1, np.int64), (ends - starts).cumsum())),
            seq_lens=ends,
            block_tables=np.tile(np.arange(blocks, dtype=np.int64), (len(spans), 1)),
            slot_mapping=np.full(int((ends - starts).sum()), -1, np.int64),
        )
        return plan.plan(metadata, self._device, _BLOCK_SIZE)

    def _draw(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(shape, generator=generator).to(self._device, dtype)

    def _all_equal(self, what: str, results: list[torch.Tensor]) -> bool:
        agree = all(torch.equal(one, other) for one, other in pairwise(results))
        if not agree:
            log.warning(f"tiles of {what} disagree: one tile serves any number of rows, which is slower")
        return agree
