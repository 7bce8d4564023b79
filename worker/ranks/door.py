"""Port where a rank and the process that waits for it prove the secret to each other; others are refused.

The door sends a challenge, the rank answers with a hello that has an HMAC of it and a challenge of its own, and the
door's welcome has an HMAC of that. The secret itself is never sent.

Invariants:
  * No connection ends the process, and a silent one delays no other: all are read side by side. A flood can delay a
    rank, since the oldest connection is refused beyond MAX_RANK_GUESTS; the rank knocks again.
  * Before the proof a frame has at most MAX_HELLO_BYTES, and no arrays or classes, on both sides.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from common.limits import MAX_HELLO_BYTES, MAX_RANK_FRAME_BYTES, MAX_RANK_GUESTS, RANK_TCP_TIMEOUT_S
from worker.ranks.frames import FrameError, FrameReader, encode, messages, receive

log = structlog.get_logger(__name__)

SECRET_VARIABLE: Final = "FISSILE_DIST_SECRET"
_NONCE_BYTES: Final = 32
_RANK: Final = b"rank"
_DOOR: Final = b"door"
_KNOCK_AGAIN_S: Final = 0.5
_KEEPALIVE_S: Final = 2
# tcpi_retransmits and tcpi_last_ack_recv of Linux's struct tcp_info.
_TCP_INFO: Final = struct.Struct("=2xB53xI")
_REFUSED_LOG_S: Final = 10.0


@dataclass(eq=False, slots=True)
class Guest:
    """A connection to the door.

    Attributes:
        rank: the rank that it proved to be; -1 before.
    """

    sock: socket.socket
    address: str
    nonce: bytes
    ends: float
    reader: FrameReader = field(default_factory=lambda: FrameReader(MAX_HELLO_BYTES, has_extensions=False))
    rank: int = -1


class Door:
    """Listens for ranks of other processes.

    Args:
        host: address to listen on.
        port: 0 takes any.
        secret: of all ranks; empty admits any rank that reaches the port.
        clock: monotonic seconds.

    Raises:
        OSError: the address cannot be listened on.
    """

    def __init__(self, host: str, port: int, secret: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._secret = secret
        self._clock = clock
        self._listener = listen(host, port)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        # The oldest first.
        self._guests: list[Guest] = []

    @property
    def port(self) -> int:
        """Port that the door listens on."""
        return int(self._listener.getsockname()[1])

    def admit(self, missing: Container[int], timeout_s: float) -> Guest | None:
        """Waits up to `timeout_s` for a missing rank. Returns its blocking socket, which the caller owns."""
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                self._open()
            elif key.data not in self._guests:
                # A later connection of this batch has taken its place.
                continue
            elif (guest := self._hear(key.data, missing)) is not None:
                return guest
        for guest in [each for each in self._guests if each.ends <= self._clock()]:
            self._refuse(guest, f"no hello within {RANK_TCP_TIMEOUT_S:g} s")
        return None

    def close(self) -> None:
        """Stops listening, and closes the connections that are not admitted."""
        for guest in self._guests:
            guest.sock.close()
        self._guests.clear()
        self._selector.close()
        self._listener.close()

    def _open(self) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError:
            # The client has closed the connection already.
            return
        sock.setblocking(False)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        guest = Guest(sock, str(address[0]), nonce, self._clock() + RANK_TCP_TIMEOUT_S)
        if len(self._guests) >= MAX_RANK_GUESTS:
            self._refuse(self._guests[0], f"{MAX_RANK_GUESTS} later connections have sent no hello")
        self._guests.append(guest)
        self._selector.register(sock, selectors.EVENT_READ, guest)
        try:
            notice_lost_machine(sock)
            sock.sendall(encode(("challenge", nonce)))
        except OSError as error:
            self._refuse(guest, str(error))

    def _hear(self, guest: Guest, missing: Container[int]) -> Guest | None:
        try:
            message = next(receive(guest.sock, guest.reader), None)
            if message is None:
                return None
            guest.rank, nonce = check_hello(message, missing, guest.nonce, self._secret)
            guest.sock.sendall(encode(("welcome", prove(self._secret, _DOOR, nonce, guest.rank))))
        except (OSError, EOFError, FrameError) as error:
            self._refuse(guest, str(error) or "it sent no hello")
            return None
        self._forget(guest)
        guest.sock.setblocking(True)
        return guest

    def _refuse(self, guest: Guest, why: str) -> None:
        log.warning("connection refused: not one of the missing ranks", peer=guest.address, why=why)
        self._forget(guest)
        guest.sock.close()

    def _forget(self, guest: Guest) -> None:
        self._selector.unregister(guest.sock)
        self._guests.remove(guest)


def check_hello(message: Any, missing: Container[int], nonce: bytes, secret: str) -> tuple[int, bytes]:
    """Rank that a hello proves, and its challenge for the door, or an error.

    Raises:
        FrameError: the message is no hello, its rank is not missing, or its proof is of another secret.
    """
    if not isinstance(message, tuple) or len(message) != 5 or message[0] != "hello":
        raise FrameError("it sent no hello")
    _, rank, _, proof, challenge = message
    if type(rank) is not int or not isinstance(proof, bytes) or not isinstance(challenge, bytes):
        raise FrameError("it sent no hello")
    if not hmac.compare_digest(proof, prove(secret, _RANK, nonce, rank)):
        raise FrameError("its --dist-secret is another one")
    if len(challenge) != _NONCE_BYTES:
        raise FrameError("it sent no hello")
    if rank not in missing:
        raise FrameError(f"rank {rank} is not missing")
    return rank, challenge


def prove(secret: str, side: bytes, nonce: bytes, rank: int) -> bytes:
    """HMAC by which one side of a connection proves to the sender of `nonce` that it knows the secret.

    The sides, a door and a rank, differ, so that neither can send back the other's proof.
    """
    return hmac.digest(secret.encode(), b"%s %d " % (side, rank) + nonce, hashlib.sha256)


def knock(sock: socket.socket, rank: int, secret: str) -> FrameReader:
    """Answers a door's challenge and waits until it admits this rank.

    Returns:
        Reader of further messages, which have no arrays or classes until the caller allows them.

    Raises:
        OSError: the connection broke, or the door does not answer within the socket's timeout.
        EOFError: the door has refused this rank, or is closed.
        FrameError: the peer is no door, or knows another secret.
    """
    reader = FrameReader(MAX_HELLO_BYTES, has_extensions=False)
    received = messages(sock, reader)
    own = secrets.token_bytes(_NONCE_BYTES)
    match next(received):
        case ("challenge", bytes(nonce)):
            sock.sendall(encode(("hello", rank, os.getpid(), prove(secret, _RANK, nonce, rank), own)))
        case _:
            raise FrameError("it sent no challenge")
    match next(received):
        case ("welcome", bytes(proof)):
            if not hmac.compare_digest(proof, prove(secret, _DOOR, own, rank)):
                raise FrameError("it does not know the secret: --dist-secret must be the same everywhere")
        case _:
            raise FrameError("it sent no welcome")
    reader.max_bytes = MAX_RANK_FRAME_BYTES
    return reader


def knock_until_admitted(
    host: str, port: int, rank: int, secret: str, check: Callable[[], None] = lambda: None
) -> tuple[socket.socket, FrameReader]:
    """Connects to a door until it admits this rank. The socket has a timeout of RANK_TCP_TIMEOUT_S.

    Logs every 10 s why the door cannot be reached or refuses this rank: a firewall drops connections without a word.

    Args:
        host: address of the door.
        port: port of the door.
        rank: number that this process proves.
        secret: of all ranks.
        check: called before each attempt; an error from it ends the attempts.
    """
    told = -_REFUSED_LOG_S
    while True:
        check()
        with contextlib.ExitStack() as stack:
            try:
                sock = stack.enter_context(socket.create_connection((host, port), RANK_TCP_TIMEOUT_S))
                notice_lost_machine(sock)
                reader = knock(sock, rank, secret)
            except (EOFError, FrameError, OSError) as error:
                if time.monotonic() - told >= _REFUSED_LOG_S:
                    told = time.monotonic()
                    _log_not_admitted(f"{host}:{port}", error)
            else:
                stack.pop_all()
                return sock, reader
        time.sleep(_KNOCK_AGAIN_S)


def _log_not_admitted(address: str, error: Exception) -> None:
    if isinstance(error, OSError):
        log.info("waiting for the port of another rank", address=address, why=str(error))
    else:
        why = str(error) or "it refused this rank: --dist-secret must be the same everywhere"
        log.warning("not admitted among the ranks", address=address, why=why)


def notice_lost_machine(sock: socket.socket) -> None:
    """Lets operations of a TCP connection fail about RANK_TCP_TIMEOUT_S after the other machine has vanished.

    Keepalive covers idle connections, and TCP_USER_TIMEOUT those with bytes in flight. Both sides must read within that
    time: TCP_USER_TIMEOUT also ends a connection whose receive buffer stays full (see `allow_slow_reader`).
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, round(RANK_TCP_TIMEOUT_S / _KEEPALIVE_S) - 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(RANK_TCP_TIMEOUT_S * 1000))


def allow_slow_reader(sock: socket.socket) -> None:
    """Lets the other side leave bytes unread for any time. While bytes are in flight, ask `is_machine_lost`."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)


def is_machine_lost(sock: socket.socket) -> bool:
    """True if a TCP connection repeats bytes and the other machine has acknowledged none for RANK_TCP_TIMEOUT_S.

    The kernel itself would repeat them for a quarter of an hour. It does not repeat bytes while the other side's
    receive buffer is full, so a slow reader is no lost machine.
    """
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    repeats, since_acknowledged_ms = _TCP_INFO.unpack(info)
    return bool(repeats and since_acknowledged_ms > RANK_TCP_TIMEOUT_S * 1000)


def listen(host: str, port: int) -> socket.socket:
    """Opens a listening socket on this address only.

    Raises:
        OSError: the address cannot be listened on.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener
