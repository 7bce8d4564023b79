"""Division of matrix products among programs: tables for each architecture, and parts of K.

K is summed in `parts` of equal length, each from zero, and the parts are added in order. So one program may do them
all, or a program each part and another kernel the sum: the bits are the same, and a few rows still keep the whole
device busy. Where a row's bits must not depend on the others, tiles and parts are chosen without looking at the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kernels.triton_backend.packed_weight import GROUP
from kernels.triton_backend.target import INTERPRETER, CompileTarget, Settings

# Operands of a product: floats of 2 bytes; float32 in full precision; floats of 2 bytes times numbers that are first
# converted to such floats; numbers of 8 bits on both sides.
Operands = Literal["half", "single", "widened", "eight"]


@dataclass(frozen=True)
class Tiles:
    """Tile that one program computes, and its compiler settings.

    Attributes:
        rows: of x, at least 16 for matrix instructions.
        columns: rows of the weight.
        inner: numbers of K that are multiplied at once.
        warps: of the program.
        stages: of its software pipeline.
    """

    rows: int
    columns: int
    inner: int
    warps: int = 4
    stages: int = 2


@dataclass(frozen=True)
class Table:
    """The tiles of an architecture for one kind of operands.

    Attributes:
        invariant: tiles for any number of rows.
        by_rows: (largest number of rows, tiles), ascending; the last entry serves any number. The first of several
            tiles that gives most processors a program is used, otherwise the last.
        part_columns: columns per program from which the number of parts of K follows in batch-invariant settings; 0
            uses the parts of `invariant`.
    """

    invariant: Tiles
    by_rows: tuple[tuple[int, tuple[Tiles, ...]], ...]
    part_columns: int = 0

    @property
    def all(self) -> list[Tiles]:
        """All distinct tiles of the table."""
        return list(dict.fromkeys((self.invariant, *(each for _, tiles in self.by_rows for each in tiles))))


@dataclass(frozen=True)
class Cut:
    """Division of one product.

    Attributes:
        tiles: of its programs.
        parts: of K.
        part_length: numbers of K in each, a multiple of `tiles.inner` and of 128; the last may have fewer.
        split: True if each part has a program of its own.
    """

    tiles: Tiles
    parts: int
    part_length: int
    split: bool


_NVIDIA: dict[Operands, Table] = {
    # Measured on an H200 by tests/bench/gpu_tiles.py (docs/explanation/kernels.md).
    "half": Table(
        Tiles(64, 128, 64, stages=4),
        (
            (16, (Tiles(16, 64, 256, stages=4),)),
            (64, (Tiles(64, 128, 64, stages=4), Tiles(64, 64, 128, stages=5), Tiles(64, 32, 256, stages=4))),
            (512, (Tiles(128, 128, 64, 8, 5), Tiles(64, 128, 64, stages=5), Tiles(128, 64, 64, 8, 5))),
            (0, (Tiles(128, 128, 64, 8, 4),)),
        ),
        part_columns=32,
    ),
    "single": Table(
        Tiles(32, 64, 32, stages=3), ((16, (Tiles(16, 64, 32, stages=3),)), (0, (Tiles(64, 64, 32, stages=3),)))
    ),
    "widened": Table(
        Tiles(64, 64, 128, stages=3),
        (
            (16, (Tiles(16, 32, 128, stages=4),)),
            (128, (Tiles(64, 64, 128, stages=3),)),
            (0, (Tiles(128, 64, 128, 8, 3),)),
        ),
    ),
    "eight": Table(
        Tiles(64, 128, 128, stages=4),
        (
            (16, (Tiles(16, 32, 256, stages=4),)),
            (128, (Tiles(64, 128, 128, stages=4),)),
            (0, (Tiles(128, 128, 128, 8, 4),)),
        ),
    ),
}

# 64 KiB on the chip (gfx942), of which a pipeline of two stages takes one of its tiles.
_AMD: dict[Operands, Table] = {
    "half": Table(
        Tiles(64, 128, 64),
        (
            (16, (Tiles(16, 32, 256),)),
            (64, (Tiles(64, 64, 128),)),
            (256, (Tiles(64, 128, 64),)),
            (1024, (Tiles(128, 128, 64),)),
            (0, (Tiles(256, 128, 64, 8),)),
        ),
    ),
    "single": Table(Tiles(32, 64, 32), ((16, (Tiles(16, 64, 32),)), (0, (Tiles(64, 64, 32),)))),
    "widened": Table(
        Tiles(64, 64, 128),
        ((16, (Tiles(16, 32, 128),)), (128, (Tiles(64, 64, 128),)), (0, (Tiles(128, 128, 64, 8),))),
    ),
    "eight": Table(
        Tiles(64, 128, 128),
        ((16, (Tiles(16, 32, 256),)), (128, (Tiles(64, 128, 128),)), (0, (Tiles(128, 128, 128, 8),))),
    ),
}

# For NVIDIA architectures without figures of ours: within 99 KiB.
_NVIDIA_SMALL: dict[Operands, Table] = {
    "half": Table(
        Tiles(64, 128, 64, stages=3), ((16, (Tiles(16, 32, 128, stages=4),)), (0, (Tiles(64, 128, 64, stages=3),)))
    ),
    "single": _NVIDIA["single"],
    "widened": Table(
        Tiles(64, 64, 128, stages=2), ((16, (Tiles(16, 32, 128, stages=3),)), (0, (Tiles(64, 64, 128, stages=2),)))
    ),
    "eight": Table(
        Tiles(64, 128, 128, stages=3), ((16, (Tiles(16, 32, 128, stages=4),)), (0, (Tiles(64, 128, 128, stages=3),)))
    ),
}

# Small, so that a test has several tiles of each kind.
_TINY = Table(Tiles(16, 32, 32), ((16, (Tiles(16, 16, 64),)), (0, (Tiles(32, 32, 16),))))
_INTERPRETED: dict[Operands, Table] = dict.fromkeys(("half", "single", "widened", "eight"), _TINY)

_TABLES = {"gfx942": _AMD, "gfx950": _AMD, "sm_90": _NVIDIA, INTERPRETER: _INTERPRETED}
# Programs that run at once, one on each compute unit or multiprocessor.
_PROCESSORS = {"gfx942": 304, "gfx950": 256, "sm_90": 132, INTERPRETER: 4}
_UNKNOWN_PROCESSORS = 100
# Fewest tiles of K in a part, so that its sum is worth it; and most parts in a sum.
_LEAST_TILES = 4
_MOST_PARTS = 8


def cut(
    settings: Settings,
    operands: Operands,
    rows: int,
    columns: int,
    inner: int,
    heads: int = 1,
    tiles_agree: bool = False,
) -> Cut:
    """Chooses how to multiply x [rows, inner] by a weight [columns, inner], for each of `heads`.

    In batch-invariant settings the bits follow from the weight's shape alone. So do parts, and tiles unless they agree.

    Args:
        settings: of the back end.
        operands: kind of the operands.
        rows, columns, inner: T, N and K.
        heads: products of this shape.
        tiles_agree: True if tiles of any shape give the same bits.
    """
    table = table_for(settings.target, operands)
    processors = _PROCESSORS.get(settings.target.name, _UNKNOWN_PROCESSORS)
    by_rows = tiles_agree or not settings.batch_invariant
    tiles = _by_rows(table, rows, columns, heads, processors) if by_rows else table.invariant
    programs = _programs(tiles, rows, columns, heads)
    if settings.batch_invariant:
        width, least_inner = table.part_columns or table.invariant.columns, table.invariant.inner
        parts = _parts(-(-columns // width) * heads, processors, inner, least_inner)
    else:
        parts = _parts(programs, processors, inner, tiles.inner)
    # A part has whole groups of scales and whole tiles: of every tile in the table if several serve the same weight.
    unit = max(GROUP, *(each.inner for each in (table.all if tiles_agree else [tiles])))
    length = -(-inner // (parts * unit)) * unit
    return Cut(tiles, parts, length, parts > 1 and programs < processors)


def table_for(target: CompileTarget, operands: Operands) -> Table:
    """Tiles of a target; an unknown architecture has the smallest of its maker."""
    return _TABLES.get(target.name, _AMD if target.is_amd else _NVIDIA_SMALL)[operands]


def _by_rows(table: Table, rows: int, columns: int, heads: int, processors: int) -> Tiles:
    options = next((tiles for most, tiles in table.by_rows if rows <= most), table.by_rows[-1][1])
    filling = (each for each in options if 3 * _programs(each, rows, columns, heads) >= 2 * processors)
    return next(filling, options[-1])


def _programs(tiles: Tiles, rows: int, columns: int, heads: int) -> int:
    return -(-rows // tiles.rows) * -(-columns // tiles.columns) * heads


def _parts(programs: int, processors: int, inner: int, tile: int) -> int:
    """Number of parts of K: the least power of two that gives every processor about one program, if parts stay long
    enough."""
    parts = 1
    while parts < _MOST_PARTS and programs * parts * 10 < processors * 9 and inner >= 2 * parts * _LEAST_TILES * tile:
        parts *= 2
    return parts


def compiler_options(tiles: Tiles, target: CompileTarget) -> dict[str, int]:
    """Compiler options of a kernel with these tiles."""
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    if target.is_amd:
        # Matrix instructions of 16 x 16, and on gfx942 two of them for each wide read from the chip's memory.
        options |= {"matrix_instr_nonkdim": 16, "kpack": 2 if target.name == "gfx942" else 1}
    return options
