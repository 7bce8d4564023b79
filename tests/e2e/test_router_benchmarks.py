"""The router's benchmarks run and report sane figures. Nothing here is about speed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.bench.router.wire import GrpcConnection, SseConnection
from tests.e2e.service import REPOSITORY

TINY: dict[str, list[str]] = {
    "hop": ["--rounds", "1", "--seconds", "1.5", "--streams", "2", "--step", "5ms", "--tokens", "50"],
    "streams": ["--seconds", "0.5", "--streams", "3", "--low", "20", "--high", "2"],
    "facade": ["--seconds", "0.5", "--rounds", "1", "--streams", "3", "--low", "20ms", "--high", "2ms"],
    "delay": ["--seconds", "1", "--routers", "1", "--factors", "1", "--burst", "3", "--prompt", "20", "--output", "4"],
    "observing": ["--seconds", "1", "--rounds", "1", "--in-flight", "2", "--tokens", "20"],
    "beside": [".", "--rounds", "1"],
    "contract_cost": ["--shape", "tiny", "--rounds", "1", "--tokens", "17", "--in-flight", "1", "2"],
    "loop_lag": ["--seconds", "1", "--streams", "2", "--tokens", "500", "--clients", "1", "--step", "20ms"],
}


def report(name: str) -> dict[str, Any]:
    """What a benchmark prints as JSON."""
    command = [sys.executable, "-m", f"tests.bench.router.{name}", "--json", *TINY[name]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "protos")])}
    done = subprocess.run(
        command, check=False, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert all(row.get("failed", 0) == 0 for row in told["rows"]), told
    return dict(told)


@pytest.mark.long
def test_hop() -> None:
    told = report("hop")
    ways = [row["way"] for row in told["rows"]]
    assert ways == ["direct", "router"] * 3 + ["router, text"]
    for row in told["rows"]:
        assert row["tokens"] >= row["requests"] > 0
        assert row["TTFT p50 ms"] > 0
        assert row["TTFT p50 ms"] <= row["TTFT p99 ms"]
        assert row["worker us/token"] >= 0
    assert told["tokenize_ms"] > 0


@pytest.mark.long
def test_streams() -> None:
    told = report("streams")
    assert [(row["server"], row["step ms"]) for row in told["rows"]] == [("router", 20), ("floor", 20), ("router", 2)]
    for row in told["rows"]:
        assert row["tokens/s"] > 0
        assert row["tokens/message"] >= 1
        # Three streams cannot get more than the worker makes.
        assert row["tokens/s"] <= 1.5 * 3 * 1000 / row["step ms"]


@pytest.mark.long
def test_facade() -> None:
    told = report("facade")
    assert [(row["door"], row["streams"]) for row in told["rows"]] == [("gRPC", 3), ("HTTP", 3)] * 2 + [
        ("gRPC", 1),
        ("HTTP", 1),
    ]
    for row in told["rows"]:
        assert row["tokens/s"] > 0
        # An answer of one token has three events by HTTP: the token, the finish and the usage.
        assert row["tokens/message"] >= (1 if row["streams"] > 1 or row["door"] == "gRPC" else 1 / 3)
        assert row["router us/token"] >= 0


@pytest.mark.slow
def test_beside() -> None:
    (row,) = report("beside")["rows"]
    assert row["median us"] > 0
    assert row["more than the first"] == 0


@pytest.mark.long
def test_contract_cost() -> None:
    told = report("contract_cost")
    first, *others = [row for row in told["rows"] if row["in flight"] == 2]
    assert (first["asked for"], first["of nothing"], first["worker added"]) == ("nothing", 1, 0)
    assert len(others) == 7
    for row in (first, *others):
        assert row["us/token"] > 0
        assert row["worker CPU us/token"] > 0
        assert row["router CPU us/token"] > 0


@pytest.mark.long
def test_delay() -> None:
    (row,) = report("delay")["rows"]
    assert row["prefill batch"] >= 1
    assert row["requests/s"] > 0
    assert row["TTFT p50 ms"] > 0


@pytest.mark.long
def test_loop_lag() -> None:
    alone, beside = report("loop_lag")["rows"]
    for row in (alone, beside):
        assert 0 < row["lag p50 ms"] <= row["lag p99 ms"] <= row["lag p99.9 ms"]
        assert row["stream tokens/s"] > 0
    assert alone["prompt tokens/s"] == 0
    assert beside["prompt tokens/s"] > 0


@pytest.mark.parametrize("cut", [1, 3, 7, 10_000])
async def test_lean_client_reads_frames_cut_anywhere(cut: int) -> None:
    data = b"".join(
        [
            b"\0\0\0\x04\0\0\0\0\0",  # SETTINGS
            b"\0\0\x03\x01\x04\0\0\0\x01abc",  # HEADERS
            b"\0\0\x07\0\0\0\0\0\x01\0\0\0\0\x02hi",  # a message
            b"\0\0\x06\0\0\0\0\0\x01\0\0\0\0\x03x",  # a message in two frames
            b"\0\0\x02\0\0\0\0\0\x01yz",
            b"\0\0\0\x01\x05\0\0\0\x01",  # trailers that end the stream
        ]
    )
    connection = GrpcConnection(len)
    connection.connection_made(_Sink())
    reply = connection.start("/x", b"")
    for at in range(0, len(data), cut):
        connection.data_received(data[at : at + cut])
    assert reply.tokens == [2, 3]
    assert reply.last == b"xyz"
    assert reply.ended.done()


@pytest.mark.parametrize("cut", [1, 4, 11, 10_000])
async def test_lean_client_reads_events_cut_anywhere(cut: int) -> None:
    data = b'HTTP/1.1 200 OK\r\n\r\n9\r\ndata: {"a":1}\n\n\r\n3\r\ndata: {}\n\n\r\ndata: [DONE]\n\n\r\n0\r\n\r\n'
    connection = SseConnection(len)
    connection.connection_made(_Sink())
    reply = connection.start("/x", b"")
    for at in range(0, len(data), cut):
        connection.data_received(data[at : at + cut])
    assert reply.tokens == [7, 2]
    assert reply.last == b"{}"
    assert reply.ended.done()


async def test_lean_client_raises_on_refused_request() -> None:
    connection = SseConnection(len)
    connection.connection_made(_Sink())
    reply = connection.start("/x", b"")
    connection.data_received(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\n\r\nno")
    with pytest.raises(ConnectionError, match="503"):
        await reply.ended


class _Sink(asyncio.Transport):
    """A transport that takes everything."""

    def write(self, data: object) -> None:
        """Takes it."""


@pytest.mark.long
def test_observing() -> None:
    rows = report("observing")["rows"]
    assert [(row["observed"], row["in flight"]) for row in rows] == [("metrics", 2), ("everything", 2)]
    assert all(min(row["tokens/s off"], row["tokens/s on"]) > 0 for row in rows)
