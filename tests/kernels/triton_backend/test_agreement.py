"""Tiles by rows are used if a trial shows that they give the same bits; otherwise one tile is used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from kernels.interface import KVSpec
from kernels.triton_backend import agreement, attention, linear
from kernels.triton_backend.agreement import TileAgreement
from kernels.triton_backend.attention import ROW_SIZES, WHOLE, tiles_of
from kernels.triton_backend.backend import TritonBackend
from kernels.triton_backend.kv_cache import DeviceKVCache
from kernels.triton_backend.plan import Shape
from kernels.triton_backend.target import INTERPRETER, TARGETS, Settings
from kernels.triton_backend.tiles import cut, table_for
from tests.kernels.row_alone import multiply_rows_alone

CPU = torch.device("cpu")
SETTINGS = Settings(TARGETS[INTERPRETER])
BF16, FP32 = torch.bfloat16, torch.float32


class Agrees:
    """Agreement of a GPU whose tiles all give the same bits."""

    def of_products(self, dtype: torch.dtype) -> bool:
        return True

    def of_attention(self, dtype: torch.dtype, head_dim: int) -> bool:
        return True


AGREEING = Settings(TARGETS["sm_90"], agreement=Agrees())


def integers(_: TileAgreement, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Numbers whose products and sums are exact in float32."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> TileAgreement:
    """An agreement that tries the interpreter's tiles on small integers, since BLAS has no fixed order of sums."""
    multiply_rows_alone(monkeypatch)
    monkeypatch.setattr(TileAgreement, "_draw", integers)
    monkeypatch.setattr(agreement, "_MEASURED_TARGETS", frozenset([INTERPRETER]))
    small = {"_ROWS": 20, "_COLUMNS": 48, "_INNER": 256, "_KEYS": 90, "_LAST_ROWS": 3, "_HEADS": 4}
    for name, value in small.items():
        monkeypatch.setattr(agreement, name, value)
    return TileAgreement(SETTINGS, CPU)


@pytest.mark.slow
def test_tiles_with_equal_bits_agree(compared: TileAgreement) -> None:
    assert compared.of_products(FP32)
    assert compared.of_attention(FP32, 16)


def test_tiles_of_other_targets_are_not_tried() -> None:
    untried = TileAgreement(SETTINGS, CPU)
    assert not untried.of_products(FP32)
    assert not untried.of_attention(FP32, 16)


def test_product_with_tile_dependent_bits_disagrees(compared: TileAgreement, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = linear.linear_in

    def differing(x: torch.Tensor, packed: Any, plan: Any, *rest: Any) -> Any:
        return whole(x, packed, plan, *rest) * (1 + plan.tiles.rows * 2.0**-23)

    monkeypatch.setattr(linear, "linear_in", differing)
    with capture_logs() as logs:
        assert not compared.of_products(FP32)
    assert ["products" in entry["event"] for entry in logs] == [True]


@pytest.mark.parametrize("differs_by", [pytest.param("block_m", marks=pytest.mark.slow), "dealt"])
def test_attention_with_tile_dependent_bits_disagrees(
    compared: TileAgreement, monkeypatch: pytest.MonkeyPatch, differs_by: str
) -> None:
    whole = attention.attend

    def differing(q: Any, cache: Any, layer: int, plan: Any, scores: Any, tiles: Any, *rest: Any) -> Any:
        return whole(q, cache, layer, plan, scores, tiles, *rest) * (1 + getattr(tiles, differs_by) * 2.0**-23)

    monkeypatch.setattr(attention, "attend", differing)
    assert not compared.of_attention(FP32, 16)


def test_agreement_is_cached(compared: TileAgreement, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second question launches no kernel, as a captured step requires."""
    assert compared.of_products(FP32)
    monkeypatch.setattr(linear, "linear_in", None)
    assert compared.of_products(FP32)


def test_interpreted_backend_uses_one_tile() -> None:
    assert TritonBackend().settings.agreement is None


@pytest.mark.parametrize(
    ("columns", "inner"), [(6144, 4096), (4096, 12_288), (1024, 2048), (256, 7168), (151_936, 4096)]
)
def test_parts_of_agreeing_tiles_depend_on_weight_only(columns: int, inner: int) -> None:
    """The parts of K are the same for any number of rows, and each has whole tiles of K."""
    parts = set()
    for rows in range(1, 1500, 7):
        found = cut(AGREEING, "half", rows, columns, inner, tiles_agree=True)
        assert found.part_length % found.tiles.inner == 0
        parts.add((found.parts, found.part_length))
    assert len(parts) == 1


def test_agreeing_tiles_follow_the_rows() -> None:
    tiles = [cut(AGREEING, "half", rows, 24_576, 4096, tiles_agree=True).tiles.rows for rows in (1, 64, 8192)]
    assert tiles == [16, 64, 128]
    alone = {cut(AGREEING, "half", rows, 24_576, 4096).tiles for rows in (1, 64, 8192)}
    assert alone == {table_for(AGREEING.target, "half").invariant}


def test_few_columns_have_narrow_tiles() -> None:
    """Narrow tiles give most processors a program."""
    wide, narrow = (cut(AGREEING, "half", 64, columns, 4096, tiles_agree=True).tiles for columns in (24_576, 4096))
    assert wide.columns > narrow.columns


def test_attention_rows_use_compared_tiles() -> None:
    cache = DeviceKVCache.allocate(KVSpec(8, 128), 1, 1, 16, BF16, torch.device("meta"))

    def tiles(rows: int, seqs: int, settings: Settings) -> attention.AttentionTiles:
        q = torch.empty(rows, 32, 128, dtype=BF16, device="meta")
        return tiles_of(q, cache, Shape(rows, seqs, 64, rows // seqs, 1024), WHOLE, settings)

    found = {replace(tiles(rows, 1, AGREEING), block_m=0, heads=0, dealt=0, num_warps=0) for rows in range(1, 200)}
    assert len(found) == 1
    assert {tiles(rows, 1, AGREEING).block_m for rows in range(1, 200)} == set(ROW_SIZES)
    assert tiles(64, 64, AGREEING).block_m == ROW_SIZES[0]
    assert {tiles(rows, 1, replace(AGREEING, agreement=None)).block_m for rows in range(1, 200)} == {64}
