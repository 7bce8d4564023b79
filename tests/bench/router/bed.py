"""What the router's benchmarks share: a model to serve, processes and their CPU time, runs of the load, tables."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from tests.bench.router.load import Plan, Seen
from tests.e2e.service import REPOSITORY, Service, running_service
from tests.e2e.simulated import CONFIG, wait_workers
from tests.unit.router.support import save

CACHE = REPOSITORY / "build" / "bench"
VOCAB_SIZE = 16_384
# Source files that the vocabulary is made of; in order of their names.
_CORPUS_FILES = 60
# Files of the standard library that prompts are made of: none of those.
_PROMPT_FILES = slice(100, 150)
_END = "<|end|>"

Row = Mapping[str, object]


def bench_model() -> Path:
    """A folder that simulated workers serve: a byte-level BPE tokenizer, made once, and a configuration.

    The vocabulary has 16,384 entries and is made of the standard library's sources, as no published one may be assumed
    to be at hand. It tokenizes English and code at about 4 bytes a token.
    """
    folder = CACHE / "model"
    if not (folder / "config.json").is_file():
        config = {**CONFIG, "vocab_size": VOCAB_SIZE, "eos_token_id": 0, "max_position_embeddings": 262_144}
        settings = {"eos_token": _END, "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
        with tempfile.TemporaryDirectory(dir=_made(CACHE)) as made:
            files = {"tokenizer.json": _tokenizer().to_str(), "tokenizer_config.json": json.dumps(settings)}
            save({name: text.encode() for name, text in files.items()}, Path(made) / "model")
            (Path(made) / "model" / "config.json").write_text(json.dumps(config))
            with contextlib.suppress(OSError):  # another run was first
                (Path(made) / "model").rename(folder)
    return folder


def _tokenizer() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sources(slice(0, _CORPUS_FILES)), trainer)
    return tokenizer


def _sources(which: slice) -> list[str]:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return [file.read_text("utf-8", "replace") for file in files[which]]


def prompts(tokens: int, count: int = 4) -> Path:
    """A JSON file with `count` texts of about `tokens` tokens each, which differ from the beginning on."""
    file = CACHE / f"prompts-{tokens}-{count}.json"
    if not file.is_file():
        tokenizer = tokenizers.Tokenizer.from_file(str(bench_model() / "tokenizer.json"))
        corpus = "".join(_sources(_PROMPT_FILES))
        size = 8 * tokens
        starts = [(i * 7919) % max(1, len(corpus) - size) for i in range(count)]
        raw = [f"{i} {(corpus[start:] + corpus)[:size]}" for i, start in enumerate(starts)]
        encoded = tokenizer.encode_batch(raw, add_special_tokens=False)
        texts = [text[: made.offsets[tokens - 1][1]] for text, made in zip(raw, encoded, strict=True)]
        made = file.with_suffix(f".{os.getpid()}")
        made.write_text(json.dumps(texts), "utf-8")
        made.rename(file)
    return file


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def service(
    preset: str, *, workers: int = 1, router_options: Sequence[str] = (), worker_options: Sequence[str] = ()
) -> Iterator[Service]:
    """A router over simulated workers on loopback, logging little, as in production."""
    options = ["--simulate", preset, "--kv-cache-memory", "1GiB", "--max-num-seqs", "2048", *worker_options]
    with (
        tempfile.TemporaryDirectory() as folder,
        running_service(
            Path(folder),
            bench_model(),
            workers=workers,
            worker_options=options,
            router_options=router_options,
            environment={"FISSILE_LOG_LEVEL": "warning"},
        ) as running,
    ):
        wait_workers(running, workers, within_s=60)
        yield running


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, all its threads, ended ones too."""
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@dataclass(frozen=True, slots=True)
class Run:
    """What a load saw, and the CPU seconds that the named processes took meanwhile."""

    seen: Seen
    cpu: Mapping[str, float]
    rss: Mapping[str, float]

    def per_token_us(self, process: str) -> float:
        """CPU of a process per token."""
        return 1e6 * self.cpu[process] / max(1, self.seen.tokens)


class RunningLoad:
    """A load in a separate process."""

    def __init__(self, plan: Plan) -> None:
        # A file, because the results may be megabytes, and a pipe has now and then delivered only their beginning.
        self._folder = tempfile.TemporaryDirectory(prefix="fissile-load-")
        self._seen = Path(self._folder.name) / "seen.json"
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.router.load", json.dumps(asdict(plan)), str(self._seen)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_mark(self) -> None:
        """Waits until the measured part begins, and the second time until it ends.

        Raises:
            RuntimeError: the load failed.
        """
        line = self._line()
        if line not in ("begin", "end"):
            raise RuntimeError(f"the load ended early: {line}")

    def result(self) -> Seen:
        """What it saw.

        Raises:
            RuntimeError: it failed.
        """
        with self._folder:
            with self._child:
                line = self._line()
            if self._child.returncode:
                raise RuntimeError(f"the load ended with {self._child.returncode}: {line}")
            return Seen(**json.loads(self._seen.read_text()))

    def _line(self) -> str:
        assert self._child.stdout is not None
        return self._child.stdout.readline().strip()


def run_load(plan: Plan, processes: Mapping[str, Sequence[int]]) -> Run:
    """Runs a load from its beginning to its end."""
    load = RunningLoad(plan)
    marks: list[dict[str, float]] = []
    for _ in range(2):
        load.wait_mark()
        marks.append({name: sum(map(cpu_s, pids)) for name, pids in processes.items()})
    seen = load.result()
    cpu = {name: marks[1][name] - marks[0][name] for name in processes}
    rss = {name: sum(map(rss_mib, pids)) for name, pids in processes.items()}
    return Run(seen, {**cpu, "client": seen.cpu_s}, rss)


def pids(running: Service) -> dict[str, list[int]]:
    """The processes of a service by their role."""
    return {"router": [running.router.running.pid], "worker": [each.running.pid for each in running.workers]}


def quantile(values: Sequence[float], q: float) -> float:
    """A quantile without interpolation; NaN without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true", help="print one line of JSON instead of a table")
    return made


def show(rows: Sequence[Row], *, as_json: bool, **more: object) -> None:
    """Prints rows of equal keys as a table with the machine's load, or everything as JSON."""
    machine = {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    if as_json:
        print(json.dumps({"rows": [_plain(row) for row in rows], **machine, **more}))
        return
    print(f"{machine['cores']} cores, load {machine['load']}" + "".join(f", {key} {more[key]}" for key in more))
    print("| " + " | ".join(rows[0]) + " |\n|" + " --- |" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(_cell(value) for value in row.values()) + " |")


def _plain(row: Row) -> Row:
    """JSON knows no NaN."""
    return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in row.items()}


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    if math.isnan(value):
        return ""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
