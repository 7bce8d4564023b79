"""Progress at a terminal and elsewhere."""

from __future__ import annotations

import io

from structlog.testing import capture_logs

from worker.progress import StartProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def load(progress: StartProgress, clock: Clock) -> None:
    progress.stage("loading weights")
    for percent in range(0, 101):
        clock.now += 0.0625
        progress.bytes(percent << 20, 100 << 20)
    progress.stage("warming up")
    progress.done()


def test_one_updating_line_on_a_terminal() -> None:
    terminal, clock = Terminal(), Clock()
    with capture_logs() as logs:
        load(StartProgress(terminal, clock), clock)
    shown = terminal.getvalue()
    assert "\n" not in shown
    assert shown.count(" % of 100 MiB\x1b[K") == 50
    assert shown.endswith("\r\x1b[K")
    assert [entry["stage"] for entry in logs] == ["loading weights", "warming up"]


def test_progress_is_logged_periodically_without_terminal() -> None:
    stream, clock = io.StringIO(), Clock()
    with capture_logs() as logs:
        load(StartProgress(stream, clock), clock)
    assert stream.getvalue() == ""
    assert [entry["event"] for entry in logs] == ["starting", "loading", "loading", "loading", "starting"]


def test_things_are_counted() -> None:
    terminal, clock = Terminal(), Clock()
    progress = StartProgress(terminal, clock)
    for done in (1, 2):
        clock.now += 0.0625
        progress.count(done, 35)
    progress.done()
    assert terminal.getvalue() == "\r2 of 35\x1b[K\r\x1b[K"
    with capture_logs() as logs:
        progress = StartProgress(io.StringIO(), clock)
        clock.now += 2.5
        progress.count(3, 35)
    assert logs == [{"event": "progress", "done": 3, "total": 35, "log_level": "info"}]
