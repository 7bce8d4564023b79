"""How fast a model on two machines notices a lost rank and serves again, on network namespaces.

    python -m tests.bench.lost_ranks --rounds 2

Prints for each fault: seconds until the worker does not serve, and from the end of the fault until it serves.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc

from tests.checkpoints import make_checkpoint
from tests.networks import Machines, Weather, bad_cable, machines

_LIMIT_S = 120.0
_LOOK_S = 0.02
_DELAY_S = 0.005
# Three losses within a minute end a worker.
_APART_S = 25.0


def faults(pair: Machines, weather: Weather) -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
    """How each fault begins and ends."""

    def cut(is_cut: bool) -> None:
        weather.is_cut = is_cut

    def mend_late() -> None:
        time.sleep(10)
        cut(False)

    rank = pair.remote_rank
    return {
        "rank killed": (lambda: os.kill(rank, signal.SIGKILL), lambda: None),
        "machine 1 killed and started": (lambda: pair.kill(1), lambda: pair.start(1)),
        "network cut, then whole": (lambda: cut(True), lambda: cut(False)),
        "network cut, whole 10 s later": (lambda: cut(True), mend_late),
        "rank frozen, then thawed": (lambda: os.kill(rank, signal.SIGSTOP), lambda: os.kill(rank, signal.SIGCONT)),
    }


def seconds_until(is_so: Callable[[], bool]) -> float:
    """Seconds until a condition holds."""
    begin = time.monotonic()
    while not is_so():
        assert time.monotonic() - begin < _LIMIT_S
        time.sleep(_LOOK_S)
    return time.monotonic() - begin


def measure(name: str, pair: Machines, weather: Weather, expected: list[int]) -> None:
    """Causes one fault during a stream, and prints its times."""
    begin, end = faults(pair, weather)[name]
    weather.delay_s = _DELAY_S
    began = threading.Event()

    def read() -> None:
        with contextlib.suppress(grpc.RpcError):
            for _ in pair.stream(400):
                began.set()

    reader = threading.Thread(target=read)
    reader.start()
    began.wait(_LIMIT_S)
    begin()
    noticed = seconds_until(lambda: not pair.first.is_serving())
    weather.delay_s = 0.0
    end()
    serves = seconds_until(pair.first.is_serving)
    reader.join()
    assert pair.generate() == expected
    print(f"{name}: noticed after {noticed:.1f} s, serves {serves:.1f} s after the fault's end", flush=True)


def main() -> None:
    """Measures each fault in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder, bad_cable() as (wire, weather):
        model = make_checkpoint(Path(folder), "qwen3")
        begin = time.monotonic()
        with machines(wire, model, Path(folder)) as pair:
            print(f"start: {time.monotonic() - begin:.1f} s", flush=True)
            expected = pair.generate()
            for name in [*faults(pair, weather)] * rounds:
                measure(name, pair, weather, expected)
                time.sleep(_APART_S)


if __name__ == "__main__":
    main()
