"""Structured logs: one line an event on stderr, JSON for machines, aligned text for people at a terminal.

Fields: `ts` (UTC), `level`, `event`, `service`, `trace_id` (of the request in hand, absent outside of one), then the
event's own. Log records of libraries come out in the same format, from WARNING up. Prompts and outputs are never
logged.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, Final, TextIO

import structlog
from structlog.typing import EventDict, Processor

LEVELS: Final = ("debug", "info", "warning", "error")
FORMATS: Final = ("auto", "json", "console")
LEVEL_VARIABLE: Final = "FISSILE_LOG_LEVEL"
FORMAT_VARIABLE: Final = "FISSILE_LOG_FORMAT"

# Trace id (32 hex digits) of the request that the current task works on; empty outside of one.
current_trace_id: ContextVar[str] = ContextVar("current_trace_id", default="")

_FIRST_FIELDS: Final = ("ts", "level", "event", "service", "trace_id")


def setup_logging(
    level: str | None = None, format: str | None = None, *, service: str = "", stream: TextIO | None = None
) -> None:
    """Configures structlog and the standard library's logging for this process.

    Args:
        level: one of LEVELS; default $FISSILE_LOG_LEVEL, else `info`.
        format: one of FORMATS; `auto` is `console` on a terminal, else `json`.
            Default $FISSILE_LOG_FORMAT, else `auto`.
        service: what this process is: `router`, `worker`.
        stream: where the lines go; default stderr.

    Raises:
        ValueError: an unknown level or format.
    """
    level = _checked(level or os.environ.get(LEVEL_VARIABLE) or "info", LEVELS, "log level")
    format = _checked(format or os.environ.get(FORMAT_VARIABLE) or "auto", FORMATS, "log format")
    stream = stream or sys.stderr
    console = format == "console" or (format == "auto" and stream.isatty())
    shared = _shared_processors(service, console)
    render = _renderers(console, stream)
    structlog.configure(
        processors=[*shared, *render],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(stream),
    )
    _route_libraries(shared, render, stream)


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
        return event

    return [structlog.processors.add_log_level, stamp, add_context, _in_order]


def _in_order(_logger: Any, _method: str, event: EventDict) -> EventDict:
    return {key: event.pop(key) for key in _FIRST_FIELDS if key in event} | dict(event)


def _renderers(console: bool, stream: TextIO) -> list[Processor]:
    if not console:
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    return [
        structlog.dev.ConsoleRenderer(
            colors=stream.isatty(),
            sort_keys=False,
            timestamp_key="ts",
            pad_event_to=32,
            exception_formatter=structlog.dev.plain_traceback,
        )
    ]


def _route_libraries(shared: list[Processor], render: list[Processor], stream: TextIO) -> None:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
        )
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.captureWarnings(True)
