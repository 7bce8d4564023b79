"""Line charts as SVG: panels side by side over the same categories, one legend. The same input gives the same bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

_WIDTH, _HEIGHT, _GAP, _LEFT = 250, 210, 70, 62
_TOP, _LEGEND_ROW, _LEGEND_COLUMN = 62, 20, 240
_INK, _GRID = "#333333", "#dddddd"
# A log axis over more than this has fewer marks.
_MANY: Final = 80
# Room below a panel: labels of the categories and of the axis.
_BELOW: Final = 52


@dataclass(frozen=True, slots=True)
class Style:
    """Looks of a line. `dash` as SVG's stroke-dasharray, empty for a solid one; `marker` False for a bare line."""

    label: str
    color: str
    dash: str = ""
    marker: bool = True


@dataclass(frozen=True, slots=True)
class Point:
    """A value at a category; hollow if `counts` is False."""

    category: int
    value: float
    counts: bool = True


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart: lines by the key of their style. `log` for a logarithmic axis, whose values must be above 0."""

    title: str
    log: bool
    lines: Mapping[str, Sequence[Point]]


def render(
    title: str, axis: str, categories: Sequence[str], panels: Sequence[Panel], styles: Mapping[str, Style]
) -> str:
    """A whole SVG file: `panels` over `categories`, and a legend with the `styles` in use."""
    used = [style for key, style in styles.items() if any(key in panel.lines for panel in panels)]
    width = _LEFT + len(panels) * (_WIDTH + _GAP) - _GAP + 20
    columns = max(1, (width - 20) // _LEGEND_COLUMN)
    legend_top = _TOP + _HEIGHT + _BELOW
    height = legend_top + math.ceil(len(used) / columns) * _LEGEND_ROW + 8
    body = [_text(_LEFT, 24, title, size=15, weight="bold")]
    for i, panel in enumerate(panels):
        body += _panel(_LEFT + i * (_WIDTH + _GAP), panel, axis, categories, styles)
    for i, style in enumerate(used):
        body += _legend(20 + i % columns * _LEGEND_COLUMN, legend_top + i // columns * _LEGEND_ROW, style)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="11">'
    )
    background = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", background, *body, "</svg>", ""])


def ticks(least: float, most: float, *, log: bool) -> list[float]:
    """Round values that enclose the data: from 0 in equal steps, or 1, 2, 5, 10, ... (1, 3, 10, ...) on a log axis."""
    if not log:
        step = _round_step(most / 5)
        return [i * step for i in range(math.ceil(most / step - 1e-9) + 1)]
    exponents = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 2)
    digits = (1, 2, 5) if most < _MANY * least else (1, 3)
    every = [digit * 10.0**exponent for exponent in exponents for digit in digits]
    first = max(i for i, tick in enumerate(every) if tick <= least)
    last = min(i for i, tick in enumerate(every) if tick >= most and i > first)
    return every[first : last + 1]


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= least)


def _panel(left: int, panel: Panel, axis: str, categories: Sequence[str], styles: Mapping[str, Style]) -> Iterator[str]:
    values = [point.value for line in panel.lines.values() for point in line]
    marks = ticks(min(values), max(values), log=panel.log)
    bottom = _TOP + _HEIGHT

    def x(category: int) -> float:
        return left + _WIDTH * (category + 0.5) / len(categories)

    def y(value: float) -> float:
        low, high, here = (math.log10(v) if panel.log else v for v in (marks[0], marks[-1], value))
        return bottom - _HEIGHT * (here - low) / (high - low)

    yield _text(left, _TOP - 12, panel.title, size=12, weight="bold")
    for mark in marks:
        yield _stroke(left, y(mark), left + _WIDTH, y(mark), _GRID)
        yield _text(left - 6, y(mark) + 4, f"{mark:,.10g}", anchor="end")
    yield _stroke(left, bottom, left + _WIDTH, bottom, _INK)
    for i, name in enumerate(categories):
        yield _text(x(i), bottom + 16, name, anchor="middle")
    yield _text(left + _WIDTH / 2, bottom + 33, axis, anchor="middle")
    for key, style in styles.items():
        yield from _line([(x(p.category), y(p.value), p.counts) for p in panel.lines.get(key, ())], style)


def _line(points: Sequence[tuple[float, float, bool]], style: Style) -> Iterator[str]:
    if len(points) > 1:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
        yield f'<polyline points="{path}" fill="none"{_pen(style)}/>'
    for x, y, counts in points if style.marker else ():
        fill = style.color if counts else "#ffffff"
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{fill}" stroke="{style.color}" stroke-width="1.5"/>'


def _legend(left: int, top: int, style: Style) -> Iterator[str]:
    yield f'<line x1="{left}" y1="{top}" x2="{left + 30}" y2="{top}"{_pen(style)}/>'
    yield from _line([(left + 15, top, True)], style)
    yield _text(left + 38, top + 4, style.label)


def _pen(style: Style) -> str:
    dash = f' stroke-dasharray="{style.dash}"' if style.dash else ""
    return f' stroke="{style.color}" stroke-width="1.8"{dash}'


def _stroke(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"/>'


def _text(x: float, y: float, text: str, *, size: int = 11, anchor: str = "start", weight: str = "normal") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text {place} fill="{_INK}">{escape(text)}</text>'
