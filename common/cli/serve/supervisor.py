"""Keeps child processes running: starts them, passes their output on, starts them again when they die, ends them.

A child's output is a pipe that is read line by line. A line that begins with `error:` is not passed on at once: when
the child exits with 2 (a bad option, a bad model, a taken port), it is what the supervisor itself ends with.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.cli.core.console import Console
from common.cli.core.errors import CommandError
from common.process.restart_policy import GiveUp, RestartPolicy
from common.process.tasks import keep_running

REFUSED = 2
_SEPARATOR = " | "
LAST_LINES = 20
# Longer than any line a child writes on purpose; a longer one is cut.
MAX_LINE_BYTES = 1 << 20
OUTPUT_GRACE_S = 1.0


@dataclass(slots=True)
class Child:
    """One child: what to run, its process, its last lines of output, its deaths.

    `drain_s` is how long it may take to end after SIGTERM.
    """

    name: str
    module: str
    arguments: Sequence[str]
    drain_s: float
    process: asyncio.subprocess.Process | None = None
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    error_line: str = ""
    policy: RestartPolicy = field(default_factory=RestartPolicy)

    @property
    def running(self) -> bool:
        """True if the process exists."""
        return self.process is not None and self.process.returncode is None


class Supervisor:
    """Runs children until `stop`.

    Invariants: at most one process per child; after `stop` returns no process is left; after `stop` has been called
    none is started.
    """

    def __init__(self, children: Sequence[Child], console: Console, environment: Mapping[str, str]) -> None:
        self._children = children
        self._console = console
        self._environment = {**os.environ, **environment}
        self._stopping = asyncio.Event()
        self._width = _name_width(children)

    async def run(self) -> None:
        """Keeps all children running; returns after `stop`.

        Raises:
            CommandError: a child exited with 2 (exit code 2, the child's own line), or died too often (exit code 1).
        """
        # No TaskGroup: when one child is given up, the output of the others is passed on until they have ended too.
        await asyncio.gather(*(self._keep(child) for child in self._children))

    async def _keep(self, child: Child) -> None:
        while not self._stopping.is_set():
            code = await self._run_once(child)
            if self._stopping.is_set():
                return
            if code == REFUSED:
                raise CommandError(child.error_line.partition(":")[2].strip() or f"{child.name} exited with 2", REFUSED)
            delay_s = self._delay_after(child, code)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)

    async def _run_once(self, child: Child) -> int:
        """Starts the child and passes its output on until it ends. Returns its exit code, negative for a signal."""
        child.error_line = ""
        # Not asyncio's own pipe: with that one `wait` would wait for grandchildren that hold the pipe open.
        read_end, write_end = os.pipe()
        passing_on = asyncio.create_task(self._pass_on(child, read_end))
        try:
            child.process = await self._start(child, write_end)
        finally:
            os.close(write_end)
        if self._stopping.is_set():
            # `stop` did not see this process yet.
            _signal(child, signal.SIGKILL)
        code = await child.process.wait()
        await asyncio.wait({passing_on}, timeout=OUTPUT_GRACE_S)
        passing_on.cancel()
        return code

    async def _start(self, child: Child, output: int) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "common.process.exec_child",
            str(os.getpid()),
            child.module,
            *child.arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=self._environment,
            # Ctrl-C goes to a terminal's whole foreground group; children are ended by the supervisor, in order.
            process_group=0,
        )

    async def _pass_on(self, child: Child, read_end: int) -> None:
        """Reads the child's output to its end, line by line."""
        output = asyncio.StreamReader(MAX_LINE_BYTES)
        with os.fdopen(read_end, "rb") as pipe:
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(output), pipe
            )
            try:
                await keep_running("output of a child", lambda: self._pass_lines_on(child, output), child=child.name)
            finally:
                transport.close()

    async def _pass_lines_on(self, child: Child, output: asyncio.StreamReader) -> None:
        while line := await _read_line(output):
            text = line.decode(errors="replace").rstrip("\r\n")
            child.last_lines.append(text)
            if text.lower().startswith("error:"):
                child.error_line = text
            else:
                self._child_line(child, text)

    def _child_line(self, child: Child, text: str) -> None:
        self._console.line(f"{child.name:<{self._width}}{_SEPARATOR}{text}")

    def _delay_after(self, child: Child, code: int) -> float:
        """Prints how the child ended. Returns the seconds to wait before starting it again."""
        if child.error_line:
            self._child_line(child, child.error_line)
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        decision = child.policy.died(time.monotonic())
        if isinstance(decision, GiveUp):
            self._console.line(f"the last lines of {child.name}:")
            for text in child.last_lines:
                self._console.line(f"  {text}")
            raise CommandError(f"{child.name} died {decision.deaths} times within a minute ({how})", 1)
        self._console.line(f"{child.name} died ({how}); starting it again in {decision.delay_s:g} s")
        return decision.delay_s

    async def stop(self) -> list[str]:
        """Ends the children one after the other, in order: SIGTERM, and SIGKILL when that takes too long.

        Returns the names of the children that had to be killed.
        """
        self._stopping.set()
        return [child.name for child in self._children if not await _end(child)]

    def kill(self) -> None:
        """Ends all children at once."""
        self._stopping.set()
        for child in self._children:
            _signal(child, signal.SIGKILL)


def _name_width(children: Sequence[Child]) -> int:
    return max(len(child.name) for child in children)


def prefix_width(children: Sequence[Child]) -> int:
    """Columns of the prefix `name | ` before each line of a child."""
    return _name_width(children) + len(_SEPARATOR)


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    """Reads the next line, or the first part of a long line; empty at the end."""
    try:
        return await stream.readuntil()
    except asyncio.IncompleteReadError as end:
        return end.partial
    except asyncio.LimitOverrunError as overrun:
        return await stream.readexactly(overrun.consumed)


async def _end(child: Child) -> bool:
    """Ends one child. Returns False when it had to be killed."""
    if child.process is None or not child.running:
        return True
    _signal(child, signal.SIGTERM)
    try:
        await asyncio.wait_for(child.process.wait(), child.drain_s)
    except TimeoutError:
        _signal(child, signal.SIGKILL)
        await child.process.wait()
        return False
    return True


def _signal(child: Child, which: signal.Signals) -> None:
    if child.process is not None and child.running:
        # It may end between the look and the signal.
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(which)
