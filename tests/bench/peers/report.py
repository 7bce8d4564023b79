"""Tables of measurements: `python -m tests.bench.peers.report FILE...`, for files of `run` and `steps`.

If some rows of a peer were disturbed or cut short, only the others count; if all were, its figures are in brackets.
Ratios are of rows of the same repetition, their median.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.bench.peers.floors import Machine, Shape, closed_loop_bound
from tests.bench.peers.plan import PROMPTS

REFERENCE: Final = "vllm"
# Bytes of a weight by the end of a peer's name. Q8_0, Q4_0 and our int4 have a scale of two bytes for 32 numbers, our
# int8 one of four for 128. Q4_K_M has Q6_K for the head and for half of some projections: this is its mean for the
# shape of Qwen3-0.6B, by the size of its file.
_WEIGHT_BYTES: Final = {"-q8": 34 / 32, "-int8": 1.0 + 4 / 128, "-q4_0": 18 / 32, "-q4_k_m": 5.17 / 8, "-int4": 18 / 32}
Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Cell:
    """The rows of a peer at one concurrency.

    Attributes:
        rows: those that count, or all when none does; by repetition.
        counted: how many count.
        all: how many there are.
    """

    rows: Mapping[int, Line]
    counted: int
    all: int

    @classmethod
    def of(cls, lines: Sequence[Line]) -> Cell:
        """Of the lines of one peer and concurrency."""
        good = [line for line in lines if line["quiet"] and line["complete"]]
        return cls({line["repeat"]: line for line in good or lines}, len(good), len(lines))

    def median(self, value: Callable[[Line], float]) -> float:
        return statistics.median(value(line) for line in self.rows.values())

    def ratio(self, other: Cell | None, value: Callable[[Line], float]) -> float | None:
        """To the same repetitions of another peer; None when they share none."""
        shared = [] if other is None else [key for key in self.rows if key in other.rows]
        ratios = [value(self.rows[key]) / value(other.rows[key]) for key in shared if other is not None]
        return statistics.median(ratios) if ratios else None


def tokens_per_s(line: Line) -> float:
    """Output tokens per second of a row."""
    return float(line["figures"]["output_tokens_per_s"])


def in_ms(name: str, which: str) -> Callable[[Line], float]:
    """A percentile of a row's times."""

    def value(line: Line) -> float:
        summary = line["figures"][name]
        return float(summary[which]) if summary else 0.0

    return value


def weight_bytes(peer: str) -> float:
    """Bytes that a peer reads per weight."""
    return next((size for end, size in _WEIGHT_BYTES.items() if peer.endswith(end)), 2.0)


def cells(lines: Iterable[Line]) -> dict[tuple[int, str], Cell]:
    """By concurrency and peer, in the order in which they first ran."""
    found: dict[tuple[int, str], list[Line]] = {}
    for line in lines:
        if line["kind"] == "row" and line["figures"]["ok"]:
            found.setdefault((line["concurrency"], line["peer"]), []).append(line)
    return {key: Cell.of(rows) for key, rows in found.items()}


HEADER: Final = (
    "c",
    "peer",
    "rows",
    "tok/s",
    "TTFT p50",
    "p99",
    "TPOT p50",
    "p99",
    "cores",
    "tok/s : vllm",
    "TTFT : vllm",
    "of bound",
    "GB/s",
)


def service_table(lines: Sequence[Line]) -> list[str]:
    """The table of all peers; times in milliseconds, `of bound` against phases in series."""
    every = cells(lines)
    machine = next((line for line in lines if line["kind"] == "machine"), None)
    rows = [
        _row(concurrency, peer, cell, every.get((concurrency, REFERENCE)), machine)
        for (concurrency, peer), cell in sorted(every.items(), key=lambda item: item[0][0])
    ]
    return table(HEADER, rows)


def _row(concurrency: int, peer: str, cell: Cell, reference: Cell | None, machine: Line | None) -> list[str]:
    speed, ttft = cell.median(tokens_per_s), in_ms("ttft_ms", "p50")
    figures = [f"{speed:.1f}"]
    figures += [f"{cell.median(in_ms(name, which)):.0f}" for name in ("ttft_ms", "tpot_ms") for which in ("p50", "p99")]
    figures.append(f"{cell.median(lambda line: line['figures']['cpu']['service']):.2f}")
    figures += [_times(cell.ratio(reference, value)) for value in (tokens_per_s, ttft)]
    figures.append("-" if machine is None else f"{speed / _bound(machine, concurrency, peer):.0%}")
    figures.append("-" if machine is None else f"{_bytes_per_s(machine, concurrency, peer, cell) / 1e9:.1f}")
    if not cell.counted:
        figures = [f"({figure})" for figure in figures]
    return [str(concurrency), peer, f"{cell.counted}/{cell.all}", *figures]


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _bound(line: Line, concurrency: int, peer: str) -> float:
    prompt = (PROMPTS.low + PROMPTS.high) // 2
    machine, shape = machine_of(line), Shape.of(line["config"])
    return closed_loop_bound(shape, machine, concurrency, prompt, line["output_tokens"], weight_bytes(peer)).in_series


def _bytes_per_s(line: Line, concurrency: int, peer: str, cell: Cell) -> float:
    """Bytes that a decode step reads at least, over the median time of one."""
    context = (PROMPTS.low + PROMPTS.high + line["output_tokens"]) // 2
    step_s = cell.median(in_ms("tpot_ms", "p50")) / 1e3
    read = Shape.of(line["config"]).decode_bytes(concurrency, context, weight_bytes(peer))
    return read / step_s if step_s else 0.0


def machine_of(line: Line) -> Machine:
    """Of a line of kind `machine`."""
    return Machine(line["read"], line["flops"])


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table, columns aligned."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    ruler = ["-" * width for width in widths]
    return [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in (header, ruler, *rows)
    ]


STEP_HEADER: Final = ("quantize", "step", "best ms", "median ms", "floor ms", "of floor", "TFLOP/s", "counts")


def step_table(lines: Sequence[Line]) -> list[str]:
    """The table of `steps`; the share of the floor is of the median."""
    rows = [
        [
            line["weights"],
            line["step"],
            f"{line['best_s'] * 1e3:.1f}",
            f"{line['median_s'] * 1e3:.1f}",
            f"{line['floor_s'] * 1e3:.1f}",
            f"{line['floor_s'] / line['median_s']:.0%}",
            f"{line['flops'] / line['median_s'] / 1e12:.3f}",
            "yes" if line["quiet"] else "no: others ran",
        ]
        for line in lines
        if line["kind"] == "step"
    ]
    return table(STEP_HEADER, rows)


def pair_lines(lines: Sequence[Line]) -> list[str]:
    """What is compared between Fissile's own rows: gRPC with offline, int8 with bf16."""
    every = cells(lines)
    pairs = [
        ("fissile", "fissile-offline"),
        ("fissile-int8", "fissile"),
        ("fissile-int8", "llamacpp-q8"),
        ("fissile-int4", "fissile"),
        ("fissile-int4", "llamacpp-q4_0"),
        ("fissile-int4", "llamacpp-q4_k_m"),
        *((f"fissile-{kind}", f"llamacpp-{kind}") for kind in ("q8", "q4_0", "q4_k_m")),
    ]
    found = []
    for concurrency in sorted({concurrency for concurrency, _ in every}):
        for one, other in pairs:
            cell, against = every.get((concurrency, one)), every.get((concurrency, other))
            ratio = cell.ratio(against, tokens_per_s) if cell else None
            if ratio is not None:
                found.append(f"c={concurrency}: {one} has {ratio:.2f} times the tok/s of {other}")
    return found


def text(lines: Sequence[Line]) -> str:
    """Everything there is to say about these lines."""
    parts = [
        f"{line['cpu']}, {line['threads']} threads: "
        f"{line['read'] / 1e9:.1f} GB/s read, {line['flops'] / 1e9:.0f} GFLOP/s"
        for line in lines
        if line["kind"] == "machine"
    ]
    if any(line["kind"] == "row" for line in lines):
        parts += ["", *service_table(lines), "", *pair_lines(lines)]
    if any(line["kind"] == "step" for line in lines):
        parts += ["", *step_table(lines)]
    parts += [f"{line['peer']}: {line['message']}" for line in lines if line["kind"] == "absent"]
    return "\n".join(parts)


def read(path: Path) -> list[Line]:
    """The lines of a file; a last one that was cut off is left out."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    print(text([line for file in parser.parse_args().files for line in read(file)]))


if __name__ == "__main__":
    main()
