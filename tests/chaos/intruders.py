"""Connections that do not come about, from a process of its own: `python -m tests.chaos.intruders HOST:PORT COUNT`."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import sys
import time
from concurrent.futures import ThreadPoolExecutor

AT_A_TIME = 50


def intrude(i: int, address: str) -> None:
    """Garbage, HTTP/2 in plain text, TLS without a certificate, or nothing for half a second."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as raw:
        if i % 4 == 0:
            raw.sendall(random.Random(i).randbytes(500))
        elif i % 4 == 1:
            raw.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
        elif i % 4 == 2:
            begin_tls(raw)
        else:
            time.sleep(0.5)


def begin_tls(raw: socket.socket) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with contextlib.suppress(OSError), context.wrap_socket(raw) as wrapped:
        wrapped.recv(1)


if __name__ == "__main__":
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        list(pool.map(lambda i: intrude(i, sys.argv[1]), range(int(sys.argv[2]))))
