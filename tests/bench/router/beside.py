"""CPU time of routers of several checkouts side by side: `python -m tests.bench.router.beside FOLDER [FOLDER ...]`.

Each has a simulated worker. Short requests: 300 at a time, 64 in flight, to one router after the other, many times: CPU
per request. Long streams (`--long`): 256 to each at once, a token every 100 ms: CPU per token. What else runs on the
machine meets all alike, and CPU time of all threads is read in nanoseconds; look at the median of the differences.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from tests.bench.router.bed import Row, show
from tests.bench.router.load import COUNTERS, PATHS, ROUTER, Plan, bodies
from tests.bench.router.wire import Connection, GrpcConnection, Reply

_CONNECTIONS = 8
_IN_FLIGHT = 64
_STREAMS = 256
_REQUESTS = 300
# Runs in a checkout, with what that checkout has.
_SERVICE = """
import json, sys, tempfile
from pathlib import Path
from tests.bench.router.bed import bench_model
from tests.e2e.service import running_service
from tests.e2e.simulated import wait_workers
options = ["--simulate", sys.argv[1], "--kv-cache-memory", "1GiB", "--max-num-seqs", "2048"]
level = {"FISSILE_LOG_LEVEL": sys.argv[2]}
with tempfile.TemporaryDirectory() as folder, running_service(
    Path(folder), bench_model(), worker_options=options, environment=level
) as running:
    wait_workers(running, 1, within_s=60)
    print(json.dumps([running.router.address, running.router.running.pid]), flush=True)
    sys.stdin.read()
"""


@dataclass(slots=True)
class Side:
    """The router of one checkout, and its measurements, microseconds; `failed` requests returned no token."""

    name: str
    address: str
    pid: int
    connections: list[Connection] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    figures: list[float] = field(default_factory=list)
    failed: int = 0

    def cpu_us(self) -> float:
        """CPU time so far of all live threads."""
        files = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(file.read_text().split()[0]) for file in files) / 1000

    def start(self, i: int, body: bytes) -> Reply:
        return self.connections[i % _CONNECTIONS].start(PATHS[ROUTER], body)

    def tokens(self) -> int:
        """Messages received, of one token each."""
        return sum(len(reply.times) for reply in self.replies)


@contextmanager
def side(folder: Path, preset: str, level: str) -> Iterator[Side]:
    """A service of a checkout."""
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{folder / 'protos'}"}
    with subprocess.Popen(
        [sys.executable, "-c", _SERVICE, preset, level],
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        address, pid = json.loads(child.stdout.readline())
        try:
            yield Side(folder.name, address, pid)
        finally:
            child.stdin.close()


async def requests(one: Side, count: int, made: Iterator[bytes]) -> None:
    """Short requests to one router, until all have been answered."""
    turn = iter(range(count))

    async def keep_busy() -> None:
        for i in turn:
            reply = one.start(i, next(made))
            await reply.ended
            one.failed += not reply.times

    await asyncio.gather(*(keep_busy() for _ in range(_IN_FLIGHT)))


async def measure_short(sides: Sequence[Side], rounds: int, made: Iterator[bytes]) -> None:
    """Every other round in the opposite order; the first one warms up."""
    for number in range(rounds + 1):
        for one in sides if number % 2 else sides[::-1]:
            before = one.cpu_us()
            await requests(one, _REQUESTS, made)
            if number:
                one.figures.append((one.cpu_us() - before) / _REQUESTS)


async def measure_long(sides: Sequence[Side], rounds: int, made: Iterator[bytes]) -> None:
    for i, one in itertools.product(range(_STREAMS), sides):
        one.replies.append(one.start(i, next(made)))
        await asyncio.sleep(0.002)
    await asyncio.sleep(1)
    for _ in range(rounds):
        before = [(one.cpu_us(), one.tokens()) for one in sides]
        await asyncio.sleep(1.5)
        for one, (cpu_us, tokens) in zip(sides, before, strict=True):
            one.figures.append((one.cpu_us() - cpu_us) / max(1, one.tokens() - tokens))


def row(one: Side, first: Side) -> Row:
    """The figures of one checkout, beside the first one's."""
    return {
        "checkout": one.name,
        "median us": statistics.median(one.figures),
        "least us": min(one.figures),
        "more than the first": statistics.median(a - b for a, b in zip(one.figures, first.figures, strict=True)),
        "failed": one.failed,
    }


async def measure(sides: Sequence[Side], options: Mapping[str, int], *, is_long: bool) -> list[Row]:
    for one in sides:
        opened = [await GrpcConnection.open(one.address, COUNTERS[ROUTER]) for _ in range(_CONNECTIONS)]
        one.connections.extend(opened)
    made = bodies(Plan(ROUTER, (), output=options["output"]))
    await (measure_long if is_long else measure_short)(sides, options["rounds"], made)
    return [row(one, sides[0]) for one in sides]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="checkouts, the first to compare with")
    options.add_argument("--long", action="store_true", help="long streams")
    options.add_argument("--output", type=int, default=1, help="tokens of a short answer")
    options.add_argument("--rounds", type=int, default=30)
    options.add_argument("--level", default="info", help="of the routers' log")
    options.add_argument("--json", action="store_true", help="print one line of JSON instead of a table")
    args = options.parse_args()
    preset, output = ("fixed:100ms", 100_000) if args.long else ("fixed:5ms", args.output)
    with ExitStack() as stack:
        sides = [stack.enter_context(side(folder.resolve(), preset, args.level)) for folder in args.folders]
        rows = uvloop.run(measure(sides, {"rounds": args.rounds, "output": output}, is_long=args.long))
    show(rows, as_json=args.json)


if __name__ == "__main__":
    main()
