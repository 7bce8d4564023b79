"""Structured logs: one line an event on stderr, JSON for machines, aligned text for people at a terminal.

Fields: `ts` (UTC), `level`, `event`, `service`, `trace_id` and `request_id` (of the current request, absent outside of
one), then the event's own. Log records of libraries have the same format, from WARNING up. Prompts and outputs are
never logged. Logging never raises into its caller, and never makes it wait (output.py).
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import shutil
import sys
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, Final, TextIO

import structlog
from structlog.typing import EventDict, Processor

from common.params.names import LEVELS
from common.telemetry.failures import count_failure
from common.telemetry.output import Output, output_of

FORMATS: Final = ("auto", "json", "console")
LEVEL_VARIABLE: Final = "FISSILE_LOG_LEVEL"
FORMAT_VARIABLE: Final = "FISSILE_LOG_FORMAT"
# Columns of the terminal that shows a process's log lines; `fissile serve` sets it for children without a terminal.
WIDTH_VARIABLE: Final = "FISSILE_LOG_WIDTH"
# https://no-color.org and https://force-color.org
NO_COLOR_VARIABLE: Final = "NO_COLOR"
FORCE_COLOR_VARIABLE: Final = "FORCE_COLOR"

# Trace id (32 hex digits) of the current task's request; "" outside of one.
current_trace_id: ContextVar[str] = ContextVar("current_trace_id", default="")
# Printable id of the current task's request; "" outside of one.
current_request_id: ContextVar[str] = ContextVar("current_request_id", default="")

_COLOR: Final = re.compile(r"\x1b\[[0-9;]*m")
# The blank before `name=`, which may be colored.
_BETWEEN_FIELDS: Final = re.compile(rf" (?=(?:{_COLOR.pattern})*[\w.]+(?:{_COLOR.pattern})*=)")
# Indentation of a continued line, up to the column of the level.
_INDENT: Final = " " * 9
_FIRST_FIELDS: Final = ("ts", "level", "event", "service", "trace_id", "request_id")


def setup_logging(
    level: str | None = None, format: str | None = None, *, service: str = "", stream: TextIO | None = None
) -> None:
    """Configures structlog and the standard library's logging for this process.

    Args:
        level: one of LEVELS; default $FISSILE_LOG_LEVEL, else `info`.
        format: one of FORMATS; `auto` is `console` on a terminal, else `json`. Default $FISSILE_LOG_FORMAT, else
            `auto`.
        service: kind of this process: `router`, `worker`.
        stream: receives the lines; default stderr.

    Raises:
        ValueError: an unknown level or format.
    """
    level = _checked(level or os.environ.get(LEVEL_VARIABLE) or "info", LEVELS, "log level")
    format = _checked(format or os.environ.get(FORMAT_VARIABLE) or "auto", FORMATS, "log format")
    stream = stream or sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # to the process's end
    output = output_of(stream)
    console = format == "console" or (format == "auto" and stream.isatty())
    shared = _shared_processors(service, console)
    render = _renderers(console, stream)
    structlog.configure(
        processors=[*shared, *render],
        wrapper_class=_never_raising(structlog.make_filtering_bound_logger(getattr(logging, level.upper()))),
        logger_factory=lambda *_: _Lines(output),
    )
    output.notice = lambda count: _rendered([*shared, *render], "log lines lost: they could not be written", count)
    _route_libraries(shared, render, output)


class _Lines:
    """Sink of structlog's lines of all levels."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def _put(self, line: str) -> None:
        self._output.put(line + "\n")

    debug = info = warning = error = critical = msg = _put


def _never_raising(logger: Any) -> Any:
    """A bound logger. A line that cannot be rendered is counted and written without its fields."""

    class Logger(logger):  # type: ignore[misc]  # made by structlog for a level
        def _proxy_to_logger(self, method_name: str, event: str | None = None, **fields: Any) -> Any:
            try:
                return super()._proxy_to_logger(method_name, event, **fields)
            except Exception as error:
                count_failure("logs")
                with contextlib.suppress(Exception):
                    return super()._proxy_to_logger(method_name, str(event), fields_lost=type(error).__name__)
                return None

    return Logger


def _rendered(processors: Sequence[Processor], text: str, count: int) -> str:
    """A warning about lost lines, rendered as a line."""
    event: Any = {"event": text, "lines": count}
    for processor in processors:
        event = processor(None, "warning", event)
    return f"{event}\n"


def _checked(value: str, choices: Sequence[str], what: str) -> str:
    if value.lower() not in choices:
        raise ValueError(f"{what} {value!r}; choose one of {', '.join(choices)}")
    return value.lower()


def _shared_processors(service: str, console: bool) -> list[Processor]:
    stamp = structlog.processors.TimeStamper(fmt="%H:%M:%S" if console else "iso", utc=not console, key="ts")

    def add_context(_logger: Any, _method: str, event: EventDict) -> EventDict:
        if service:
            event["service"] = service
        trace_id = current_trace_id.get()
        if trace_id:
            event.setdefault("trace_id", trace_id)
        request_id = current_request_id.get()
        if request_id:
            event.setdefault("request_id", request_id)
        return event

    return [structlog.processors.add_log_level, stamp, add_context, _in_order]


def _in_order(_logger: Any, _method: str, event: EventDict) -> EventDict:
    return {key: event.pop(key) for key in _FIRST_FIELDS if key in event} | dict(event)


def _renderers(console: bool, stream: TextIO) -> list[Processor]:
    if not console:
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    return [
        _for_terminals,
        structlog.dev.ConsoleRenderer(
            colors=wants_color(stream),
            sort_keys=False,
            timestamp_key="ts",
            pad_event_to=32,
            exception_formatter=_traceback,
        ),
        *([_folding(width)] if (width := _width(stream)) else []),
    ]


def wants_color(stream: TextIO) -> bool:
    """True if text for `stream` may be colored: on a terminal or with FORCE_COLOR, but never with NO_COLOR."""
    if os.environ.get(NO_COLOR_VARIABLE):
        return False
    return bool(os.environ.get(FORCE_COLOR_VARIABLE)) or stream.isatty()


def _width(stream: TextIO) -> int:
    """Columns of the terminal that shows the log lines; 0 without a terminal."""
    given = os.environ.get(WIDTH_VARIABLE, "")
    if given.isdecimal():
        return int(given)
    return shutil.get_terminal_size().columns if stream.isatty() else 0


def _folding(width: int) -> Processor:
    """Makes a log processor that breaks lines wider than `width` columns between two fields, and indents the rest."""

    def fold(_logger: Any, _method: str, text: Any) -> str:
        first, newline, others = str(text).partition("\n")
        lines: list[str] = []
        length = 0
        for part in _BETWEEN_FIELDS.split(first):
            size = len(_COLOR.sub("", part))
            if lines and length + 1 + size > width:
                lines.append(_INDENT + part)
                length = len(_INDENT) + size
            elif lines:
                lines[-1] += " " + part
                length += 1 + size
            else:
                lines, length = [part], size
        return "\n".join(line.rstrip() if line is not lines[-1] else line for line in lines) + newline + others

    return fold


def _for_terminals(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """Removes terminal control sequences from all fields: a field's text can come from a peer, a file or a library."""
    return {key: _printable(value) if isinstance(value, str) else value for key, value in event.items()}


def _traceback(stream: TextIO, exc_info: Any) -> None:
    """Writes a traceback as structlog does, without control sequences: the exception's message can be a peer's."""
    text = io.StringIO()
    structlog.dev.plain_traceback(text, exc_info)
    stream.write(_printable(text.getvalue()))


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


class _Handler(logging.Handler):
    """Handler of the log records of libraries."""

    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record; counts it if that fails."""
        try:
            self._output.put(self.format(record) + "\n")
        except Exception:
            count_failure("logs")


def _route_libraries(shared: list[Processor], render: list[Processor], output: Output) -> None:
    handler = _Handler(output)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
        )
    )
    # Handlers of libraries would report on standard error that they cannot write there.
    logging.raiseExceptions = False
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.captureWarnings(True)
