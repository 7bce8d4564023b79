"""Keepalive pings of clients: any regular rate is accepted, with or without a call; a flood ends the connection."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator

import h2.config
import h2.connection
import h2.events
import pytest

from common.rpc.server import GrpcServer


@pytest.fixture
async def port() -> AsyncIterator[int]:
    rpc = GrpcServer("127.0.0.1", 0, [])
    await rpc.start()
    yield rpc.port
    await rpc.stop(0)


# A call that stays open without further messages after the first.
WATCH = {":method": "POST", ":scheme": "http", ":path": "/grpc.health.v1.Health/Watch", ":authority": "test"}
WATCH |= {"content-type": "application/grpc", "te": "trailers"}


def ping(port: int, count: int, pause_s: float, *, calls: bool = False) -> tuple[int, bytes]:
    """Pings a connection with or without an open call; returns the number of answers and the server's GOAWAY text."""
    http = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    http.initiate_connection()
    if calls:
        http.send_headers(1, list(WATCH.items()))
        http.send_data(1, bytes(5), end_stream=True)
    answered = 0
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        for number in range(count):
            http.ping(number.to_bytes(8, "big"))
            connection.sendall(http.data_to_send())
            while answered <= number:
                for event in http.receive_data(connection.recv(65_536)):
                    answered += isinstance(event, h2.events.PingAckReceived)
                    if isinstance(event, h2.events.ConnectionTerminated):
                        return answered, event.additional_data or b""
            time.sleep(pause_s)
    return answered, b""


@pytest.mark.parametrize("calls", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_regular_client_pings_keep_connection(calls: bool, port: int) -> None:
    """By default gRPC closes a connection after two pings within five minutes; here none is too many."""
    assert await asyncio.to_thread(ping, port, 30, 0.06, calls=calls) == (30, b"")


async def test_flood_of_pings_ends_its_connection(port: int) -> None:
    """Regression: the server answered any number."""
    answered, why = await asyncio.to_thread(ping, port, 5000, 0.0)
    assert why == b"too_many_pings"
    assert answered < 5000
