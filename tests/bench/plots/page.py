"""docs/reference/performance.md and the notebook with their tables made anew, between each marker's two lines."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.bench.plots import charts
from tests.bench.plots.results import Result
from tests.bench.plots.tables import TABLES

DOCS: Final = Path(__file__).parents[3] / "docs"
PAGE: Final = DOCS / "reference" / "performance.md"
# The page of current figures, the comparison of doors, and the notebook with all figures.
PAGES: Final = (
    PAGE,
    DOCS / "reference" / "doors-compared.md",
    *sorted((Path(__file__).parents[1] / "results").glob("*.md")),
)
_BLOCK: Final = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str, results: Sequence[Result]) -> str:
    """The page with the tables of `results`. KeyError if a marker names no table."""
    return _BLOCK.sub(lambda block: f"{block[1]}\n{TABLES[block[2]](results)}\n\n{block[3]}", page)


def plots(results: Sequence[Result]) -> Mapping[Path, str]:
    """SVG files by their paths."""
    images = {f"performance-{kind}.svg": charts.service(results, kind) for kind in charts.KINDS}
    images["performance-router.svg"] = charts.router(results)
    return {DOCS / "img" / name: image for name, image in images.items()}


def files(results: Sequence[Result]) -> Mapping[Path, str]:
    """The pages and the plots in them."""
    return {**{path: filled(path.read_text(), results) for path in PAGES}, **plots(results)}
