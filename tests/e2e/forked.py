"""Workers and routers forked from a process that has already imported PyTorch, `transformers` and their modules.

The imports take two thirds of the processor time that a worker needs until it serves, 1.9 of 2.7 seconds, and more of
a router's. A forked process differs from another in four ways. It has the hash seed of the other forked
processes, PyTorch is loaded in a router too, no `atexit` function runs when it ends, and PyTorch and gRPC have read
their environment variables before. So a test of how a program starts or ends, of what it imports, or of how
much memory it takes runs a new interpreter.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Final

_THREADS: Final = "OMP_NUM_THREADS"
_ONE_THREAD: Final = "1"
_PRELOADED: Final = ("torch", "transformers.models.auto.configuration_auto", "worker.cli.worker", "router.app")
# As a worker sets them before it imports PyTorch and gRPC.
_READ_BY_IMPORTS: Final = {_THREADS: _ONE_THREAD, "GRPC_VERBOSITY": "NONE"}


def can_fork(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """True for a worker or router with one thread in a test, except in `make chaos` and benchmarks, which measure."""
    is_measured = "PYTEST_CURRENT_TEST" not in environment or environment.get("CHAOS_SCALE") == "full"
    return arguments[0] in ("worker", "router") and environment.get(_THREADS) == _ONE_THREAD and not is_measured


class ForkedProcess:
    """`python -m` in a fork, with the methods of `subprocess.Popen` that tests use.

    Args:
        arguments: module and its arguments.
        folder: current folder of the process.
        environment: all its environment variables.
        log: file that gets its standard output and error.
    """

    def __init__(self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path) -> None:
        self.args = list(arguments)
        # Tests read it at once, and the process opens it only when it runs.
        log.touch()
        # Daemons end with the test run.
        self._process = _fork_server().Process(
            target=_run, args=(self.args, folder, dict(environment), log), daemon=True
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end and returns the exit code.

        Raises:
            subprocess.TimeoutExpired: the process still runs after `timeout` seconds.
        """
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def _fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    before = {name: os.environ.get(name) for name in _READ_BY_IMPORTS}
    os.environ.update(_READ_BY_IMPORTS)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context


def _run(arguments: list[str], folder: Path, environment: dict[str, str], log: Path) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    with log.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    sys.argv = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
