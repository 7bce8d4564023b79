"""Floods of calls: clients without a key that begin calls by the thousand and reset, close or hold them.

`python -m tests.chaos.http2_flood ADDRESS KIND CONNECTIONS PATH` floods a port until its standard input ends, and then
prints the number of calls and of bytes.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import threading
import time
from typing import Final, Literal, cast

import hpack

from tests.chaos.raw_http2 import PREFACE

Kind = Literal["reset", "close", "hold"]
# Calls of one connection: as many as the SETTINGS of the main port allow.
_CALLS: Final = 4_000
_SETTINGS: Final = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_SETTINGS_ACK: Final = bytes([0, 0, 0, 4, 1, 0, 0, 0, 0])
_HEADERS, _RST_STREAM = 1, 3
# Seconds that a connection stays open unless it holds its calls, and seconds between its reads of answers.
_TURN_S: Final = 0.2
_LOOK_S: Final = 0.05
_MOST_READ: Final = 1 << 20
_CANCEL: Final = (8).to_bytes(4)


def calls(path: str, *, reset: bool, first: int = 0, count: int = _CALLS) -> bytes:
    """HTTP/2 frames that begin `count` calls without a message, and reset each at once if `reset`."""
    fixed = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "test"}
    fixed |= {"content-type": "application/grpc", "te": "trailers"}
    encoder = hpack.Encoder()
    whole, indexed = encoder.encode(list(fixed.items())), encoder.encode(list(fixed.items()))
    parts = []
    for i in range(first, first + count):
        block, stream = indexed if i else whole, (2 * i + 1).to_bytes(4)
        parts.append(len(block).to_bytes(3) + bytes([_HEADERS, 4]) + stream + block)
        if reset:
            parts.append(bytes([0, 0, 4, _RST_STREAM, 0]) + stream + _CANCEL)
    return b"".join(parts)


class Flood:
    """Connections that each begin calls again and again until the flood is closed.

    Args:
        address: `host:port` of the port that is attacked.
        kind: `reset` resets each call at once; `close` closes the connection after the calls; `hold` keeps them open.
        connections: at a time.

    Attributes:
        begun: calls that were sent.
        sent: bytes that were sent.
    """

    def __init__(self, address: str, kind: Kind, connections: int, path: str) -> None:
        host, _, port = address.rpartition(":")
        self._target = host, int(port)
        self._kind = kind
        self._payload = calls(path, reset=kind == "reset")
        self._stop = threading.Event()
        self.begun = self.sent = 0
        self._threads = [threading.Thread(target=self._attack, daemon=True) for _ in range(connections)]

    def __enter__(self) -> Flood:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _attack(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(OSError), socket.create_connection(self._target, timeout=10) as connection:
                self._use(connection)

    def _use(self, connection: socket.socket) -> None:
        connection.sendall(PREFACE + _SETTINGS + _SETTINGS_ACK)
        connection.sendall(self._payload)
        self.begun += _CALLS
        self.sent += len(self._payload)
        # Answers are read: closing a connection with unread answers resets it, and the server would not see its calls.
        # Answers are not parsed, so that the flood uses little of a processor that it shares with the service.
        end = time.monotonic() + _TURN_S
        while not self._stop.is_set() and (self._kind == "hold" or time.monotonic() < end):
            if select.select([connection], [], [], _LOOK_S)[0] and not connection.recv(_MOST_READ):
                return


def main() -> None:
    """Floods until standard input ends."""
    address, kind, connections, path = sys.argv[1:]
    with Flood(address, cast(Kind, kind), int(connections), path) as flood:
        sys.stdin.read()
    print(flood.begun, flood.sent)


if __name__ == "__main__":
    main()
