"""Runs, on a machine with a GPU, the checks that only such a machine can run, and prints one report.

    python -m scripts.gpu_first_run --out FOLDER [--stages kernels streams ...] [--seconds 300] [--tiny]

Needs PyTorch, Triton, transformers and the service's packages, no network and no installed Fissile. Stages run one
after the other, their parts in parallel, each part in a process with a time limit. The output of a part is written to
FOLDER/PART.log as it arrives; FOLDER/report.txt is rewritten whenever a part has ended. After `--seconds`, running
parts are stopped, and the report says so. Compiled kernels are kept in FOLDER/triton-cache.tar.gz, which `--cache`
unpacks on the next machine. With `--tiny` all parts run on small shapes, for a try without a GPU (TRITON_INTERPRET=1).
Exits with 1 if a part has failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
WORK = Path(tempfile.gettempdir(), "fissile-gpu")
# Most bytes of a file that is copied back from the machine.
CACHE_BYTES = 15 << 20
# Processes that check kernels, and processes that time tiles; they compile side by side.
VERIFIERS, TUNERS = 5, 6
# Lines of a log in the report; a part's own lines about failures come first.
SHOWN_LINES, FAILURE_LINES = 60, 30
WAYS = (
    "together",
    "alone",
    "eager",
    "not deferred",
    "chunks",
    "few at once",
    "other graphs",
    "preempted",
    "lookup drafts",
    "model drafts",
    "forbidden waits",
    "service",
)


# Prints the machine's GPU and versions, its memory bandwidth and its rate of products.
_MACHINE = """
import os, subprocess, sys
import torch, transformers, triton
from tests.bench.gpu_steps import measured
subprocess.run(["nvidia-smi"], check=False) if torch.cuda.is_available() else None
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
found = measured(device)
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, triton {triton.__version__}, "
      f"transformers {transformers.__version__}, {os.cpu_count()} cores")
print(f"{found.name}: a copy moves {found.bandwidth / 1e9:.0f} GB/s, a product {found.rate / 1e12:.1f} TFLOP/s")
"""


@dataclass(frozen=True)
class Part:
    """One process of a stage.

    Attributes:
        name: of the process and of its log.
        command: arguments of Python.
        limit_s: seconds after which it is stopped.
        shown: lines of its log in the report, from the end.
    """

    name: str
    command: list[str]
    limit_s: float
    shown: int = SHOWN_LINES


@dataclass(frozen=True)
class RunStage:
    """Parts that run side by side.

    Attributes:
        name: its name in `--stages`.
        parts: in the order in which they begin.
        at_once: processes that run at a time.
    """

    name: str
    parts: list[Part]
    at_once: int = 1


@dataclass(frozen=True)
class Folders:
    """Folders for the files of a run.

    Attributes:
        out: report, logs and figures.
        work: checkpoints and streams, which stay on the machine.
    """

    out: Path
    work: Path

    @property
    def small(self) -> Path:
        """Checkpoint whose streams are compared."""
        return self.work / "small"

    @property
    def large(self) -> Path:
        """Checkpoint whose speed is measured."""
        return self.work / "large"


@dataclass
class Report:
    """Outcome of each part, written to a file whenever one has ended."""

    path: Path
    started: float
    blocks: list[str] = field(default_factory=list)
    num_failed: int = 0

    def add(self, part: Part, outcome: str, seconds: float, log: Path) -> None:
        """Adds a part that has ended."""
        self.num_failed += outcome != "passed"
        head = f"== {part.name}: {outcome} after {seconds:.1f} s ({time.monotonic() - self.started:.0f} s in all)"
        self.blocks.append("\n".join((head, *_excerpt(log, part.shown))))
        self.path.write_text("\n\n".join(self.blocks) + "\n")
        print(head, flush=True)


def _excerpt(log: Path, shown: int) -> list[str]:
    """Lines about failures, then the last lines."""
    lines = log.read_text(errors="replace").splitlines()
    failures = [line for line in lines[:-shown] if line.startswith("FAILED") or "Error" in line]
    return [*failures[:FAILURE_LINES], *lines[-shown:]]


def stages(folders: Folders, is_tiny: bool) -> Iterator[RunStage]:
    """All stages, in their order."""
    device, dtype = ("cpu", "float32") if is_tiny else ("cuda", "bfloat16")

    def checkpoint(folder: Path, shape: str) -> list[str]:
        entries = [str(folder), "max_position_embeddings=32768"]
        return ["-m", "tests.checkpoints", *entries, "--device", device, "--dtype", dtype, "--shape", shape]

    yield RunStage("machine", [Part("machine", ["-c", _MACHINE], 60)])
    verifiers = [
        Part(
            f"kernels-{number}",
            ["-m", "tests.kernels.verify_triton", "--share", f"{number}/{VERIFIERS}", *(["rope"] if is_tiny else [])],
            150,
        )
        for number in range(1, VERIFIERS + 1)
    ]
    checkpoints = [
        Part("small-checkpoint", checkpoint(folders.small, "tiny" if is_tiny else "qwen3-0.6b"), 120, 5),
        Part("large-checkpoint", checkpoint(folders.large, "tiny" if is_tiny else "qwen3-8b"), 150, 5),
    ]
    yield RunStage("kernels", [*checkpoints, *verifiers], at_once=2 + VERIFIERS)
    # Interpreted products depend on the number of rows, so drafts would differ. And no interpreter waits for a GPU.
    ways = [way for way in WAYS if not is_tiny or way not in ("lookup drafts", "model drafts", "forbidden waits")]
    yield RunStage("streams", [_streams(way, folders, is_tiny) for way in ways], at_once=2 if is_tiny else 6)
    files = [str(_streams_file(folders, way)) for way in ways]
    yield RunStage("compared", [Part("compared", ["-m", "tests.kernels.verify_streams", "compare", *files], 30)])
    tuning = ["-m", "tests.bench.gpu_tiles", *(["--tiny"] if is_tiny else [])]
    tuners = 1 if is_tiny else TUNERS
    yield RunStage(
        "tiles",
        [
            Part(
                f"tiles-{number}",
                [*tuning, "--share", f"{number}/{tuners}", "--json", str(folders.out / f"tiles-{number}.json")],
                150,
                0,
            )
            for number in range(1, tuners + 1)
        ],
        at_once=tuners,
    )
    trace = ["-m", "tests.bench.gpu_trace", "--model", str(folders.large), "--json", str(folders.out / "trace.json")]
    trace += ["--batches", "1", "8", "64", "256"]
    yield RunStage("trace", [Part("trace", trace, 100)])
    # A process for each way: memory of an engine's graphs is freed only when its process ends.
    for name, tiny, limit in (
        ("steps", ["--batches", "1", "--prefill", "16", "--context", "8", "--steps", "3"], 100),
        ("batch", ["--requests", "2", "--context", "8", "--tokens", "3"], 150),
    ):
        parts = []
        for way in ("invariant, graphs", "tuned, graphs"):
            title = f"{name}-{way.partition(',')[0]}"
            command = ["-m", f"tests.bench.gpu_{name}", "--model", str(folders.large), "--ways", way]
            command += ["--json", str(folders.out / f"{title}.json"), *(tiny if is_tiny else [])]
            parts.append(Part(title, command, limit))
        yield RunStage(name, parts)


def _streams(way: str, folders: Folders, is_tiny: bool) -> Part:
    command = ["-m", "tests.kernels.verify_streams", "run", way, "--model", str(folders.small)]
    command += ["--out", str(_streams_file(folders, way))]
    if is_tiny:
        command += ["--requests", "3", "--longest", "20", "--tokens", "3", "--kv-memory", str(8 << 20)]
    return Part(f"streams-{way.replace(' ', '-')}", command, 150, 12)


def _streams_file(folders: Folders, way: str) -> Path:
    return folders.work / f"streams-{way.replace(' ', '-')}.json"


def run_part(part: Part, report: Report, folders: Folders, deadline: float) -> None:
    """Runs one part to its end, its limit or the deadline."""
    log, started = folders.out / f"{part.name}.log", time.monotonic()
    limit = min(part.limit_s, deadline - started)
    if limit <= 0:
        log.write_text("")
        report.add(part, "not begun: the time was over", 0.0, log)
        return
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-u", *part.command], cwd=REPOSITORY, stdout=file, stderr=file, start_new_session=True
        )
        try:
            code = process.wait(limit)
            outcome = "passed" if code == 0 else f"FAILED with exit code {code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            outcome = f"STOPPED at its limit of {limit:.0f} s"
    report.add(part, outcome, time.monotonic() - started, log)


def keep_cache(folder: Path, archive: Path) -> None:
    """Packs compiled Triton kernels without human-readable stages; deletes an archive beyond CACHE_BYTES."""
    with tarfile.open(archive, "w:gz", compresslevel=6) as packed:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.suffix not in (".ttir", ".ttgir", ".llir", ".ptx", ".source"):
                packed.add(path, path.relative_to(folder))
    if archive.stat().st_size > CACHE_BYTES:
        archive.unlink()


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    names = [stage.name for stage in stages(Folders(Path(), Path()), is_tiny=True)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="Folder for the report, logs and figures.")
    parser.add_argument(
        "--stages", nargs="+", choices=names, default=names, help="Stages to run, in their order. Default: all."
    )
    parser.add_argument("--seconds", type=float, default=360, help="Time limit of everything. Default: 360.")
    parser.add_argument("--tiny", action="store_true", help="Run on small shapes, for a try without a GPU.")
    parser.add_argument("--cache", type=Path, help="Compiled kernels of an earlier run with the same --work.")
    parser.add_argument("--work", type=Path, default=WORK, help=f"Folder for checkpoints, 18 GB. Default: {WORK}.")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    report = Report(options.out / "report.txt", started)
    folders, cache = Folders(options.out.resolve(), options.work), options.work / "triton"
    cache.mkdir(parents=True, exist_ok=True)
    if options.cache:
        with tarfile.open(options.cache) as packed:
            packed.extractall(cache, filter="data")
    os.environ["TRITON_CACHE_DIR"] = str(cache)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        (str(REPOSITORY), str(REPOSITORY / "protos"), os.environ.get("PYTHONPATH", ""))
    )
    for stage in stages(folders, options.tiny):
        if stage.name in options.stages:
            with ThreadPoolExecutor(stage.at_once) as pool:
                for part in stage.parts:
                    pool.submit(run_part, part, report, folders, started + options.seconds)
    keep_cache(cache, options.out / "triton-cache.tar.gz")
    print(f"\n{report.path.read_text()}\n{report.num_failed} parts failed, {time.monotonic() - started:.0f} s in all")
    return 1 if report.num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
