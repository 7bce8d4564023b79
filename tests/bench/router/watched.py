"""A router that reports its event loop's lag: `python -m tests.bench.router.watched WORKER...`.

The router of `fissile router`, with its event loop, in a separate process, sampled more often than for its metrics.
Prints its port, and the counts so far for every line on standard input.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence

from common.telemetry.logs import setup_logging
from router.app import Router, run_on_loop
from router.options import RouterOptions
from router.telemetry.loop_lag import LoopLag
from tests.bench.router.lag_histogram import LagHistogram
from tests.e2e.service import REPOSITORY

_INTERVAL_S = 0.01


class WatchedRouter:
    """The process, from outside."""

    def __init__(self, workers: Sequence[str]) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.router.watched", *workers],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = f"127.0.0.1:{self._answer()}"

    @property
    def pid(self) -> int:
        return self._child.pid

    def lag(self) -> LagHistogram:
        """What its loop's lag has been since its start."""
        assert self._child.stdin is not None
        self._child.stdin.write("\n")
        self._child.stdin.flush()
        return LagHistogram(json.loads(self._answer()))

    def stop(self) -> None:
        self._child.kill()
        self._child.communicate()

    def _answer(self) -> str:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError("the router has ended")
        return line


async def _serve(workers: Sequence[str]) -> None:
    router = Router(RouterOptions(workers=workers, port=0))
    await router.start()
    seen = LagHistogram()
    LoopLag(seen.record, interval_s=_INTERVAL_S).start()
    print(router.server.port, flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(seen.counts), flush=True)


def main() -> None:
    """Serves until it is killed."""
    setup_logging("warning", service="router")
    run_on_loop(_serve(sys.argv[1:]))


if __name__ == "__main__":
    main()
