"""Measures one forward pass, and profiles it with PyTorch's profiler."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from kernels.cpu.library import LibraryUnavailableError, load
from worker.engine.batch import Runner, ScheduledBatch

# Forward passes before the first that counts, and those that do.
_WARMUPS: Final = 2
_TIMED: Final = 5
# The profiler's own name for a pass.
_PASS: Final = "ProfilerStep"


class OperatorTime(NamedTuple):
    """One operator of a forward pass.

    Attributes:
        name: as in the trace.
        calls: number of calls.
        self_s: seconds of all calls, without those of operators that they call; on the device if any runs there.
        part: of the same of all operators.
    """

    name: str
    calls: int
    self_s: float
    part: float


def forward_s(runner: Runner, batch: ScheduledBatch) -> float:
    """Seconds of a forward pass without the profiler: the median of several, after warm-up passes."""
    seconds = []
    for _ in range(_WARMUPS + _TIMED):
        begin = time.perf_counter()
        runner.forward(batch)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[_WARMUPS:])


def profile_step(runner: Runner, batch: ScheduledBatch, trace: Path) -> list[OperatorTime]:
    """Profiles one forward pass and writes its trace. Returns its operators, those with most time first.

    Raises:
        OSError: the trace cannot be written.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    # The first call under the profiler takes milliseconds more.
    passes = schedule(wait=0, warmup=1, active=1, repeat=1)
    with _named_native_calls(), profile(activities=activities, record_shapes=True, schedule=passes) as made:
        for _ in range(2):
            runner.forward(batch)
            made.step()
    # PyTorch does not raise if it cannot write the file.
    trace.touch()
    made.export_chrome_trace(str(trace))
    events = [event for event in made.key_averages() if not event.key.startswith(_PASS)]
    on_device = any(event.self_device_time_total for event in events)
    times = [event.self_device_time_total if on_device else event.self_cpu_time_total for event in events]
    whole = max(1e-9, sum(times))
    found = [
        OperatorTime(event.key, event.count, us / 1e6, us / whole) for event, us in zip(events, times, strict=True)
    ]
    return sorted(found, key=lambda operator: operator.self_s, reverse=True)


@contextmanager
def _named_native_calls() -> Iterator[None]:
    """Names each call of the native CPU kernels, which PyTorch does not know, in the profile."""
    try:
        library = load()
    except LibraryUnavailableError:
        yield
        return
    functions = {name: function for name, function in vars(library).items() if name.startswith("fissile_")}

    def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function, assigned=())
        def call(*arguments: Any) -> Any:
            with record_function(name):
                return function(*arguments)

        return call

    for name, function in functions.items():
        setattr(library, name, named(name, function))
    try:
        yield
    finally:
        vars(library).update(functions)
