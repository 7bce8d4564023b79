"""One log line per event, with stable field names for people and machines."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from common.telemetry.logs import _folding, current_request_id, setup_logging
from common.telemetry.tracing import SpanFactory
from router.telemetry.request_span import request_span

ROOT = Path(__file__).parents[4]
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
METADATA = [("traceparent", f"00-{TRACE_ID}-b7ad6b7169203331-01")]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    structlog.reset_defaults()
    logging.captureWarnings(False)
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_fields_and_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    setup_logging(service="router", stream=stream)
    log = structlog.get_logger("router.test")

    with request_span(SpanFactory(), "a/B", METADATA):
        log.info("request accepted", zebra=1, apple=("x", 2))
    log.warning("worker lost", worker_id="w")

    inside, outside = lines(stream)
    assert list(inside) == ["ts", "level", "event", "service", "trace_id", "zebra", "apple"]
    assert (inside["level"], inside["event"], inside["service"]) == ("info", "request accepted", "router")
    assert inside["trace_id"] == TRACE_ID
    assert inside["ts"].endswith("Z")
    assert list(outside) == ["ts", "level", "event", "service", "worker_id"]


def test_explicit_trace_id_overrides_context() -> None:
    stream = io.StringIO()
    setup_logging(stream=stream)
    with request_span(SpanFactory(), "a/B", METADATA):
        structlog.get_logger().info("other", trace_id="mine")

    assert lines(stream)[0]["trace_id"] == "mine"


def test_level_from_argument_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setenv("FISSILE_LOG_LEVEL", "ERROR")
    setup_logging(stream=stream)
    structlog.get_logger().warning("unheard")
    setup_logging("debug", stream=stream)
    structlog.get_logger().debug("heard")

    assert [line["event"] for line in lines(stream)] == ["heard"]


@pytest.mark.parametrize(("level", "format"), [("loud", "json"), ("info", "xml")])
def test_unknown_settings_name_the_choices(level: str, format: str) -> None:
    with pytest.raises(ValueError, match="choose one of"):
        setup_logging(level, format)


def test_library_warnings_use_our_log_format() -> None:
    stream = io.StringIO()
    setup_logging("debug", service="worker", stream=stream)

    logging.getLogger("grpc").info("chatter")
    logging.getLogger("grpc._server").warning("port %d is odd", 7)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", stacklevel=1)

    odd, old = lines(stream)
    assert list(odd)[:4] == ["ts", "level", "event", "service"]
    assert (odd["event"], odd["logger"], odd["service"]) == ("port 7 is odd", "grpc._server", "worker")
    assert old["logger"] == "py.warnings"


def test_logged_exception_is_one_json_line() -> None:
    stream = io.StringIO()
    setup_logging(stream=stream)
    try:
        raise KeyError("x")
    except KeyError:
        structlog.get_logger().exception("engine failed")
        logging.getLogger("lib").exception("lib failed")

    own, library = lines(stream)
    assert "KeyError" in own["exception"]
    assert "KeyError" in library["exception"]


def test_terminal_log_lines_are_readable() -> None:
    stream = Terminal()
    setup_logging(service="router", stream=stream)
    structlog.get_logger().info("request accepted", tokens=3)

    line = stream.getvalue()
    assert "request accepted" in line
    assert not line.startswith("{")


def test_terminal_log_lines_have_no_control_characters() -> None:
    """Names, reasons and tracebacks come from peers and may contain control characters."""
    stream = Terminal()
    setup_logging(service="router", stream=stream)
    evil = "w\x1b]0;owned\x07\x9b31m\u202e\r"
    structlog.get_logger().warning("worker lost", worker_id=evil, model="é")
    logging.getLogger("grpc").warning("from %s", evil)
    try:
        raise ValueError(evil)
    except ValueError:
        structlog.get_logger().exception("failed")
        logging.getLogger("grpc").exception("failed")
    own = re.sub("\x1b\\[[0-9;]*m", "", stream.getvalue())
    assert own.count("owned") == 4
    assert "é" in own
    assert [c for c in own if not c.isprintable() and c != "\n"] == []


def test_format_can_be_forced_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setenv("FISSILE_LOG_FORMAT", "json")
    setup_logging(stream=stream)
    structlog.get_logger().info("x")

    assert lines(stream)[0]["event"] == "x"


def test_lines_of_a_request_carry_its_id() -> None:
    """Code that logs during a request need not know its id."""
    stream = io.StringIO()
    setup_logging(service="router", stream=stream)
    log = structlog.get_logger()
    token = current_request_id.set("r1")
    try:
        with request_span(SpanFactory(), "a/B", METADATA):
            log.warning("odd", why="x")
            log.warning("other", request_id="r2")
    finally:
        current_request_id.reset(token)
    log.warning("outside")

    odd, other, outside = lines(stream)
    assert list(odd) == ["ts", "level", "event", "service", "trace_id", "request_id", "why"]
    assert (odd["request_id"], other["request_id"]) == ("r1", "r2")
    assert "request_id" not in outside


_COLORS = re.compile(r"\x1b\[[0-9;]*m")


@given(
    st.integers(20, 200), st.dictionaries(st.from_regex(r"[a-z]{1,12}", fullmatch=True), st.text("ab 01", max_size=30))
)
def test_folded_log_lines_fit_the_terminal(width: int, fields: dict[str, str]) -> None:
    """A line exceeds the width only if a single field does."""
    whole = " ".join(
        ["12:00:00 [info     ] something happened               ", *(f"{k}={v!r}" for k, v in fields.items())]
    )
    fold: Any = _folding(width)
    lines = fold(None, "info", whole).split("\n")
    # Only blanks may change: a field's text may look like several fields.
    assert " ".join(lines).split() == whole.split()
    assert all(len(line) <= width or line.count("=") <= 1 or line is lines[0] for line in lines)


@pytest.mark.parametrize(
    ("environment", "is_colored"), [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True)]
)
def test_terminal_log_lines_have_colors_and_fit_width(environment: dict[str, str], is_colored: bool) -> None:
    program = (
        "import structlog; from common.telemetry.logs import setup_logging; setup_logging('info')\n"
        "structlog.get_logger('x').info('worker serving', **{f'field{i}': 'v' * i for i in range(12)})"
    )
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    kept = {
        k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "FISSILE_LOG_FORMAT")
    }
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, env={**kept, **environment}, stderr=theirs
    ) as process:
        assert process.wait(60) == 0
    os.close(theirs)
    text = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert bool(_COLORS.search(text)) is is_colored
    lines = _COLORS.sub("", text).splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= 80
