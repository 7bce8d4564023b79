"""Measures peers side by side in one run: `python -m tests.bench.peers.run [--peers ...] [--budget MINUTES]`.

Each repetition has, at each concurrency, every peer once, one right after the other, with the same requests. One peer
works at a time; the others rest or are not started. Rows are written as they come: an interrupted run keeps its rows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from common.cli.bench import figures
from common.cli.bench.machine import cpu_model
from common.cli.bench.workload import RandomWorkload
from tests.bench.peers import noise, peak, plan, report
from tests.bench.peers.checkpoint import SHAPES, add_shape_option
from tests.bench.peers.floors import Shape
from tests.bench.peers.folder import AbsentError, PeerFolder, add_folder_option
from tests.bench.peers.http_stream import HttpError
from tests.bench.peers.peers import Peer, PeerError, Setting, make_peers
from tests.bench.peers.runs import Job, Run, WrongWorkError

DEFAULT_PEERS: Final = "fissile,fissile-int8,fissile-offline,vllm,llamacpp-bf16,llamacpp-f16,llamacpp-q8,transformers"
_FAILURES: Final = (
    PeerError,
    WrongWorkError,
    HttpError,
    OSError,
    asyncio.IncompleteReadError,
    grpc.RpcError,
    TimeoutError,
)
# Free memory required before another peer starts; below it the peers that start fastest are stopped.
_FREE_BYTES: Final = 5 << 30
_FIRST_WARM_UP: Final = 8
_WARM_UP_LIMIT_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Output:
    """Where rows go: a file of JSON lines, and a line for people."""

    path: Path

    def write(self, line: Mapping[str, Any], say: str) -> None:
        """At once, so that it stays whatever comes."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{time.strftime('%H:%M:%S')} {say}", flush=True)


class Measurement:
    """The turns of a run, one after the other.

    Args:
        peers: by name.
        source: of the requests.
        requests: of a row, by concurrency.
        budget: of time.
        quiet_s: how long a row waits for a quiet machine before it begins all the same.
        output: of the rows.
    """

    def __init__(
        self,
        peers: Mapping[str, Peer],
        source: RandomWorkload,
        requests: Mapping[int, int],
        budget: plan.Budget,
        quiet_s: float,
        output: Output,
    ) -> None:
        self._peers = dict(peers)
        self._source, self._requests, self._budget = source, requests, budget
        self._quiet_s, self._output = quiet_s, output
        self._start_s: dict[str, float] = {}

    async def run(self, turns: Sequence[plan.Turn]) -> None:
        """Measures; a peer that fails takes no further turn."""
        try:
            for turn in turns:
                if turn.peer in self._peers:
                    await self._turn(turn)
        finally:
            for peer in self._peers.values():
                peer.stop()

    async def _turn(self, turn: plan.Turn) -> None:
        began = time.monotonic()
        if not self._budget.limit(turn, began):
            print(f"{turn.peer} c={turn.concurrency}, repetition {turn.repeat}: no time left", flush=True)
            return
        peer = self._peers[turn.peer]
        for other in self._peers.values():
            if other is peer:
                other.wake()
            else:
                other.rest()
        try:
            await self._prepare(peer)
            # What is left after a start is less than before it.
            if limit_s := self._budget.limit(turn, time.monotonic()):
                await self._row(peer, turn, limit_s)
        except (AbsentError, *_FAILURES) as error:
            del self._peers[turn.peer]
            peer.stop()
            message = " ".join(str(error).split()) or type(error).__name__
            self._output.write({"kind": "absent", "peer": peer.name, "message": message}, f"{peer.name}: {message}")
        self._budget.note(turn, time.monotonic() - began)

    async def _prepare(self, peer: Peer) -> None:
        """Starts it if need be, and warms it up: more the first time, when caches fill and code is compiled."""
        first = not peer.started
        if first:
            self._make_room()
            began = time.monotonic()
            await peer.start()
            self._start_s[peer.name] = time.monotonic() - began
        count = _FIRST_WARM_UP if first else 1
        await peer.run(Job(plan.warm_up(self._source, count), count, _WARM_UP_LIMIT_S))

    def _make_room(self) -> None:
        """Stops peers until there is memory for another, first those whose next start takes least time."""
        started = [peer for peer in self._peers.values() if peer.started]
        for peer in sorted(started, key=lambda peer: self._start_s[peer.name]):
            if free_bytes() >= _FREE_BYTES:
                return
            peer.stop()

    async def _row(self, peer: Peer, turn: plan.Turn, limit_s: float) -> None:
        noise.wait_quiet(self._quiet_s)
        works = plan.works(self._source, turn, self._requests[turn.concurrency])
        before = noise.read(peer.pids)
        run = await peer.run(Job(works, turn.concurrency, limit_s))
        cpu = noise.shares(before, noise.read(peer.pids))
        line = row(turn, run, cpu)
        self._output.write(line, describe(line))


def row(turn: plan.Turn, run: Run, cpu: figures.CpuShares) -> dict[str, Any]:
    """A line of the output."""
    setting = figures.Setting(concurrency=turn.concurrency)
    return {
        "kind": "row",
        "peer": turn.peer,
        "concurrency": turn.concurrency,
        "repeat": turn.repeat,
        "complete": run.complete,
        "quiet": noise.is_quiet(cpu),
        "figures": figures.figures_of(run.records, setting, turn.repeat, cpu=cpu).as_dict(),
    }


def describe(line: Mapping[str, Any]) -> str:
    """The same for people."""
    what = line["figures"]
    times = [
        f"{label} p50 {what[name]['p50']:.0f} p99 {what[name]['p99']:.0f} ms"
        for label, name in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"))
        if what[name]
    ]
    cpu = what["cpu"]
    marks = [
        mark
        for mark, shown in (("DOES NOT COUNT: others ran", not line["quiet"]), ("CUT SHORT", not line["complete"]))
        if shown
    ]
    head = f"{line['peer']} c={line['concurrency']} #{line['repeat']}: {what['output_tokens_per_s']:.1f} tok/s"
    load = (
        f"{what['ok']} requests in {what['duration_s']:.0f} s, cores {cpu['service']:.0%}, foreign {cpu['foreign']:.1%}"
    )
    return ", ".join([head, *times, load, *marks])


def free_bytes() -> int:
    """Memory that new processes can use, from /proc/meminfo."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text}: numbers are 1 or more")
    return numbers


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_folder_option(parser)
    add_shape_option(parser)
    parser.add_argument("--peers", default=DEFAULT_PEERS, help=f"comma-separated (default: {DEFAULT_PEERS})")
    parser.add_argument("--concurrency", type=_numbers, default=[1, 8, 32])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--requests", type=_numbers, help="of a row, one number per concurrency")
    parser.add_argument("--quick", action="store_true", help="a few short answers per row: does it work at all")
    parser.add_argument("--budget", type=float, help="minutes for everything; sizes rows when --requests is absent")
    parser.add_argument("--row-limit", type=float, default=400.0, help="seconds after which a row is cut short")
    parser.add_argument("--wait-quiet", type=float, default=20.0, help="seconds that a row waits for a quiet machine")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of each peer")
    parser.add_argument("--nice", type=int, default=0, help="of everything, for example -15 (as root)")
    parser.add_argument("--seed", type=int, default=0, help="of the requests")
    parser.add_argument("--output", type=Path, help="JSON lines, appended to (default: FOLDER/results/TIME.jsonl)")
    options = parser.parse_args()
    if options.requests and len(options.requests) != len(options.concurrency):
        parser.error("--requests: one number for each of --concurrency")
    return options


def _requests(options: argparse.Namespace, peers: int, machine: Mapping[str, Any], seconds: float) -> dict[int, int]:
    if options.requests:
        return dict(zip(options.concurrency, options.requests, strict=True))
    if options.quick:
        return dict.fromkeys(options.concurrency, plan.QUICK_REQUESTS)
    if options.budget is None:
        return {c: plan.full_requests(c) for c in options.concurrency}
    shape, limits = Shape.of(machine["config"]), report.machine_of(machine)
    return plan.fitting_requests(options.concurrency, peers * options.repeat, seconds, limits, shape)


async def measure(options: argparse.Namespace, output: Output) -> None:
    """The whole run.

    Raises:
        AbsentError: there is no compiler for the machine's limits.
        ValueError: a peer is not known.
    """
    began = time.monotonic()
    every = make_peers(Setting(PeerFolder(options.folder.resolve()), options.shape, options.threads))
    names = options.peers.split(",")
    if unknown := [name for name in names if name not in every]:
        raise ValueError(f"--peers: {unknown[0]} is not known; choose from {','.join(every)}")
    noise.wait_quiet(options.wait_quiet)
    limits = peak.measure(options.threads)
    config = SHAPES[options.shape]
    output_tokens = plan.QUICK_TOKENS if options.quick else plan.OUTPUT_TOKENS
    about = {"cpu": cpu_model(), "threads": options.threads, "shape": options.shape, "config": config}
    about["output_tokens"] = output_tokens
    machine = {"kind": "machine", "read": limits.read, "flops": limits.flops, "seed": options.seed, **about}
    output.write(machine, f"{limits.read / 1e9:.1f} GB/s read, {limits.flops / 1e9:.0f} GFLOP/s")
    end = None if options.budget is None else began + options.budget * 60
    requests = _requests(options, len(names), machine, 0.0 if end is None else end - time.monotonic())
    print(f"requests of a row by concurrency: {requests}", flush=True)
    measurement = Measurement(
        {name: every[name] for name in names},
        plan.workload(options.seed, config["vocab_size"], output_tokens),
        requests,
        plan.Budget(end, options.row_limit),
        options.wait_quiet,
        output,
    )
    await measurement.run(list(plan.turns(names, options.concurrency, options.repeat)))


def main() -> None:
    """Prints a line per row, and the tables at the end, also after Ctrl-C."""
    options = parse()
    os.setpriority(os.PRIO_PROCESS, 0, options.nice)
    # Peers are ended by whatever ends this.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    path = options.output or options.folder / "results" / time.strftime("%Y%m%d-%H%M%S.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        asyncio.run(measure(options, Output(path)))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    except (AbsentError, ValueError, PermissionError, subprocess.CalledProcessError) as error:
        sys.exit(str(error))
    print(f"\n{path}\n{report.text(report.read(path))}")


if __name__ == "__main__":
    main()
