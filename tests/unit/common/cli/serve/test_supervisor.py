"""The supervisor with real child processes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from common.cli.core.console import Console
from common.cli.core.errors import CommandError
from common.cli.serve.supervisor import MAX_LINE_BYTES, Child, Supervisor
from common.process import restart_policy
from tests.processes import is_alive

CHILD = "tests.unit.common.cli.serve.a_child"


class Lines(Console):
    """A console that records its lines."""

    def __init__(self) -> None:
        super().__init__(terminal=False)
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)


def child(name: str, *words: str, drain_s: float = 5.0) -> Child:
    return Child(name, CHILD, words, drain_s)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_passes_lines_on_with_the_childs_name() -> None:
    console = Lines()
    supervisor = Supervisor([child("a", "say=hello", "say=2nd", "sleep=60")], console, {})
    running = asyncio.create_task(supervisor.run())
    await until(lambda: len(console.lines) == 2)
    assert await supervisor.stop() == []
    await running
    assert console.lines == ["a | hello", "a | 2nd"]


async def test_refused_child_ends_supervisor_with_its_error() -> None:
    console = Lines()
    children = [child("a", "sleep=60"), child("b", "say=loading", "say=error: port 1 is taken", "exit=2")]
    supervisor = Supervisor(children, console, {})
    with pytest.raises(CommandError, match=r"^port 1 is taken$") as refused:
        await supervisor.run()
    assert refused.value.exit_code == 2
    assert console.lines == ["b | loading"]
    assert await supervisor.stop() == []
    assert not any(each.running for each in children)


async def test_starts_again_with_back_off_and_gives_up_after_three_deaths() -> None:
    console = Lines()
    started = time.monotonic()
    supervisor = Supervisor([child("a", "say=working", "say=error: broken", "exit=7")], console, {})
    with pytest.raises(CommandError, match=r"a died 3 times within a minute \(exited with 7\)") as gave_up:
        await supervisor.run()
    assert gave_up.value.exit_code == 1
    # Back-off of 0.5 s and 1 s.
    assert time.monotonic() - started >= 1.5
    died = ["a died (exited with 7); starting it again in 0.5 s", "a died (exited with 7); starting it again in 1 s"]
    life = ["a | working", "a | error: broken"]
    last = ["the last lines of a:", *["  working", "  error: broken"] * 3]
    assert console.lines == [*life, died[0], *life, died[1], *life, *last]


async def test_killed_child_is_restarted() -> None:
    console = Lines()
    only = child("a", "say=up", "sleep=60")
    supervisor = Supervisor([only], console, {})
    running = asyncio.create_task(supervisor.run())
    await until(lambda: console.lines == ["a | up"])
    assert only.process is not None
    os.kill(only.process.pid, signal.SIGKILL)
    await until(lambda: console.lines.count("a | up") == 2)
    assert "a died (killed by SIGKILL); starting it again in 0.5 s" in console.lines
    await supervisor.stop()
    await running


async def test_supervisor_stop_waits_for_drain_then_kills() -> None:
    console = Lines()
    good = child("good", "exit-on-term=0", "say=up", "sleep=60")
    bad = child("bad", "ignore-term=1", "say=up", "sleep=60", drain_s=0.3)
    supervisor = Supervisor([good, bad], console, {})
    running = asyncio.create_task(supervisor.run())
    await until(lambda: len(console.lines) == 2)
    assert await supervisor.stop() == ["bad"]
    await running
    assert not good.running
    assert not bad.running


async def test_supervisor_stop_during_back_off_starts_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_DELAY_S", "MAX_DELAY_S"):
        monkeypatch.setattr(restart_policy, name, 600.0)
    console = Lines()
    only = child("a", "exit=1")
    supervisor = Supervisor([only], console, {})
    running = asyncio.create_task(supervisor.run())
    await until(lambda: bool(console.lines))
    died = only.process
    assert await supervisor.stop() == []
    await asyncio.wait_for(running, 60)
    assert only.process is died


async def test_stop_right_after_the_start_leaves_no_process() -> None:
    only = child("a", "sleep=60")
    supervisor = Supervisor([only], Lines(), {})
    running = asyncio.create_task(supervisor.run())
    await asyncio.sleep(0)
    await supervisor.stop()
    await asyncio.wait_for(running, 60)
    assert not only.running


@pytest.mark.slow
async def test_child_death_is_seen_while_grandchild_holds_pipe() -> None:
    console = Lines()
    supervisor = Supervisor([child("a", "hold-pipe=300", "exit=1")], console, {})
    running = asyncio.create_task(supervisor.run())
    await until(lambda: any(line.startswith("a died") for line in console.lines))
    await supervisor.stop()
    await running
    for line in console.lines:
        if held := re.fullmatch(r"a \| (\d+)", line):
            assert is_alive(int(held[1]))
            os.kill(int(held[1]), signal.SIGKILL)


async def test_too_long_child_line_is_split() -> None:
    console = Lines()
    supervisor = Supervisor([child("a", f"long={3 * MAX_LINE_BYTES}", "say=after", "sleep=60")], console, {})
    running = asyncio.create_task(supervisor.run())
    await until(lambda: console.lines[-1:] == ["a | after"])
    assert sum(len(line) - len("a | ") for line in console.lines[:-1]) == 3 * MAX_LINE_BYTES
    await supervisor.stop()
    await running


def test_no_child_survives_a_killed_supervisor() -> None:
    program = (
        "import asyncio\n"
        "from common.cli.core.console import Console\n"
        "from common.cli.serve.supervisor import Child, Supervisor\n"
        f"children = [Child(name, {CHILD!r}, ['ignore-term=1', 'say=up', 'sleep=60'], 5.0) for name in 'ab']\n"
        "async def main():\n"
        "    supervisor = Supervisor(children, Console(terminal=False), {})\n"
        "    running = asyncio.create_task(supervisor.run())\n"
        "    while not running.done() and not all(child.last_lines for child in children): await asyncio.sleep(0.01)\n"
        "    print(*(child.process.pid for child in children), flush=True)\n"
        "    await running\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        process.kill()
    end = time.monotonic() + 60
    while any(is_alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(is_alive(pid) for pid in pids)
