"""docs/reference/limits.md has the numbers of common/limits.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common import limits
from common.limits import MIB

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "limits.md").read_text("utf-8")
ROWS = {row[0]: row[1] for row in re.findall(r"^\| ([^|]+) \| ([^|]+) \|", TEXT, re.MULTILINE)}


@pytest.mark.parametrize(
    ("subject", "number", "unit"),
    [
        ("message", limits.MAX_REQUEST_BYTES / MIB, " MiB"),
        ("answers of a request (`n`)", limits.MAX_ANSWERS, ""),
        ("texts of an `Embed`, documents of a `Rerank`", limits.MAX_EMBED_INPUTS, ""),
        ("texts of an `Embed`, documents of a `Rerank`", limits.MAX_DOCUMENTS, ""),
        ("metadata of a call", limits.MAX_METADATA_BYTES / 1024, " KiB"),
        ("requests of one `ModelStreamInfer` that run at a time", limits.MAX_STREAM_ITEMS, ""),
        ("time until a call's message arrives", limits.REQUEST_READ_TIMEOUT_S, " s"),
        ("calls at a time on one connection", limits.MAX_STREAMS_PER_CONNECTION, ""),
        ("calls at a time on one connection", limits.MAX_SIDE_STREAMS_PER_CONNECTION, ""),
        ("new calls of a port that wait for the event loop", limits.MAX_UNACCEPTED_CALLS, ""),
        ("new calls of a port that wait for the event loop", limits.MAX_UNACCEPTED_CALLS_HARD, ""),
        ("calls of a port whose message has not arrived", limits.MAX_UNREAD_CALLS, ""),
        ("`Watch` of health", limits.MAX_HEALTH_WATCHES, ""),
        ("log lines of refused calls", limits.MAX_REFUSAL_LINES, ""),
        ("time until TLS and HTTP/2 have begun", limits.HANDSHAKE_TIMEOUT_S, " s"),
        ("a connection without calls", limits.CONNECTION_IDLE_S / 60, " min"),
        ("the port of metrics", limits.MAX_SCRAPE_CONNECTIONS, ""),
        ("the port of metrics", limits.MAX_SCRAPE_REQUEST_BYTES / 1024, " KiB"),
        ("the port of metrics", limits.SCRAPE_TIMEOUT_S, " s"),
        ("the port of metrics", limits.SCRAPE_IDLE_S, " s"),
        ("API keys", limits.MAX_API_KEYS, ""),
        ("HTTP: body, headers", limits.MAX_REQUEST_BYTES / MIB, " MiB"),
        ("HTTP: body, headers", limits.MAX_METADATA_BYTES / 1024, " KiB"),
        ("HTTP: all bodies that arrive at a time", limits.MAX_UPLOAD_BYTES / MIB, " MiB"),
        ("HTTP: connections", limits.MAX_HTTP_CONNECTIONS, ""),
        ("HTTP: an answer or a stream that the caller does not read", limits.SLOW_CLIENT_TIMEOUT_S, " s"),
        ("HTTP: chunks of a body with less than 64 bytes", limits.MAX_SMALL_CHUNKS, ""),
        ("HTTP: prompts of a completion", limits.MAX_PROMPTS_AT_ONCE, ""),
        ("chat template", limits.MAX_TEMPLATE_S, " s"),
    ],
)
def test_documented_limit_equals_code(subject: str, number: float, unit: str) -> None:
    assert re.search(rf"(?<![\d,]){number:,.10g}{unit}\b", ROWS[subject])
