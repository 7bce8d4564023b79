"""The log line of a call costs no time if its level is off."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import structlog

from common.rpc.request_log import RequestLog
from common.telemetry.request_record import RequestRecord, current_record


class Context:
    """The context of a call."""

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def code(self) -> int:
        return 0

    def time_remaining(self) -> None:
        return None


class Details:
    """The handler details of a call."""

    method = "/fissile.v1.InferenceService/Generate"


async def call(requests: RequestLog) -> Any:
    """Makes a call through the log's interceptor; returns its handler."""

    async def serve(request: object, context: object) -> str:
        current_record().generates = True
        return "answer"

    return await called(requests, grpc.stream_unary_rpc_method_handler(serve))


async def called(requests: RequestLog, handler: Any) -> Any:
    async def found(_: object) -> Any:
        return handler

    served: Any = await requests.intercept_service(found, Details())  # type: ignore[arg-type]
    assert await served.stream_unary(None, Context()) == "answer"
    return served


@pytest.mark.parametrize(("level", "lines"), [("info", 1), ("warning", 0)])
async def test_filtered_request_line_is_not_built(level: str, lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: its fields were built at every log level."""
    made: list[RequestRecord] = []
    fields = RequestRecord.fields

    def counted(record: RequestRecord, now: float) -> dict[str, Any]:
        made.append(record)
        return fields(record, now)

    monkeypatch.setattr(RequestRecord, "fields", counted)
    stream, requests = io.StringIO(), RequestLog()
    structlog.configure(
        processors=[structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(stream),
    )
    try:
        await call(requests)
    finally:
        structlog.reset_defaults()
    said = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(line["event"], line["status"]) for line in said] == [("request ended", "OK")] * lines
    assert len(made) == lines
    assert not requests._open


async def test_logged_handler_is_made_once_per_method() -> None:
    """Regression: each call built two handlers."""

    async def serve(request: object, context: object) -> str:
        return "answer"

    requests = RequestLog()
    handler: Any = grpc.stream_unary_rpc_method_handler(serve)
    assert await called(requests, handler) is await called(requests, handler)


async def unary(request: object, context: object) -> str:
    raise grpc.aio.InternalError("Failed to execute the batch")


async def streaming(request: object, context: object) -> AsyncIterator[str]:
    raise grpc.aio.InternalError("Failed to execute the batch")
    yield "part"


async def drained(parts: AsyncIterator[str]) -> list[str]:
    return [part async for part in parts]


@pytest.mark.parametrize("kind", ["stream_unary", "stream_stream"])
async def test_cancelled_foreign_call_is_not_logged_as_error(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: cancelled calls of foreign servicers and unknown methods were UNKNOWN, logged with a traceback."""
    ends: list[RequestRecord] = []
    monkeypatch.setattr(RequestLog, "_write", lambda _, record: ends.append(record))

    async def found(_: object) -> Any:
        return getattr(grpc, f"{kind}_rpc_method_handler")(unary if kind == "stream_unary" else streaming)

    served: Any = await RequestLog().intercept_service(found, Details())  # type: ignore[arg-type]
    run = getattr(served, kind)(None, Context())
    with pytest.raises(asyncio.CancelledError):
        await (run if kind == "stream_unary" else drained(run))
    (end,) = ends
    assert (end.code, end.crash, end.level) == (grpc.StatusCode.CANCELLED, None, "info")
