"""The process that holds Mooncake's client library for one worker.

`python -m common.process.exec_child PARENT worker.kv_tiers.mooncake_process SOCKET_FD MEMORY_FD SETTINGS`.

The library blocks for 30 s when the master hangs and for 90 s when it starts without one; here that holds up no call of
the worker. It prints lines of its own form, which the worker logs as events. Values pass through slots of shared
memory, which the library reads and writes itself; the socket carries only requests and results. The process ends when
the worker closes the socket.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import queue
import socket
import struct
import sys
import threading
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, Final

GET: Final = 1
PUT: Final = 2
DROP: Final = 3
# Operation, slot, bytes of the value, name.
REQUEST: Final = struct.Struct("<BIQ24s")
# Slot, and what the library returned: bytes of a value that was read, 0, or a negative error.
RESULT: Final = struct.Struct("<Iq")
NUM_SLOTS: Final = 8
# The library's staging buffer, which values in slots do not need.
_BUFFER_BYTES: Final = 16 << 20
_PREFIX: Final = "fissile:kv:"


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """Settings with which the library joins a store.

    Attributes:
        master: `host:port` of the store's master.
        segment_bytes: memory that this worker adds to the store.
        protocol: `tcp` or `rdma`.
        device: network devices of RDMA, with commas between; empty lets the library choose.
        host: address at which other workers reach this one; empty takes the one towards the master.
    """

    master: str
    segment_bytes: int = 0
    protocol: str = "tcp"
    device: str = ""
    host: str = ""

    def to_json(self) -> str:
        """The settings as an argument of the process."""
        return json.dumps(asdict(self))

    def reached_at(self) -> str:
        """Address of this machine for other workers. Raises OSError."""
        if self.host:
            return self.host
        host, _, port = self.master.rpartition(":")
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as sock:
            # Sends no packet; the kernel chooses the address from its routes.
            sock.connect(address)
            return str(sock.getsockname()[0])


class MooncakeServer:
    """Carries out the worker's requests, as many at once as there are slots.

    Args:
        sock: to the worker.
        store: the library's client, set up.
        memory: the slots.
    """

    def __init__(self, sock: socket.socket, store: Any, memory: mmap.mmap) -> None:
        self._sock = sock
        self._store = store
        self._width = len(memory) // NUM_SLOTS
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if store.register_buffer(self._address, len(memory)):
            raise OSError("Mooncake cannot register the memory of values")
        self._requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def serve(self) -> None:
        """Reads requests until the worker closes the socket."""
        for _ in range(NUM_SLOTS):
            threading.Thread(target=self._work, daemon=True).start()
        while request := self._sock.recv(REQUEST.size):
            self._requests.put(request)

    def _work(self) -> None:
        while True:
            operation, slot, size, name = REQUEST.unpack(self._requests.get())
            result = self._result(operation, f"{_PREFIX}{name.hex()}", self._address + slot * self._width, size)
            self._sock.send(RESULT.pack(slot, result))

    def _result(self, operation: int, key: str, address: int, size: int) -> int:
        if operation == GET:
            return int(self._store.get_into(key, address, size))
        if operation == PUT:
            return int(self._store.put_from(key, address, size))
        return int(self._store.remove(key, True))


def main() -> None:
    """Joins the store and serves the worker."""
    sock, memory = socket.socket(fileno=int(sys.argv[1])), mmap.mmap(int(sys.argv[2]), 0)
    settings = MooncakeSettings(**json.loads(sys.argv[3]))
    store = import_module("mooncake.store").MooncakeDistributedStore()
    code = store.setup(
        settings.reached_at(),
        "P2PHANDSHAKE",
        settings.segment_bytes,
        _BUFFER_BYTES,
        settings.protocol,
        settings.device,
        settings.master,
    )
    if code:
        sys.exit(f"Mooncake's client cannot join the store of {settings.master}: error {code}")
    MooncakeServer(sock, store, memory).serve()
    # Without the library's own end, which waits seconds for a dead master.
    os._exit(0)


if __name__ == "__main__":
    main()
