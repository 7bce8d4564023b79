"""The door at --dist-init admits ranks and refuses every other connection, whatever it sends."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgpack
import pytest
from structlog.testing import capture_logs

from common.limits import MAX_HELLO_BYTES, MAX_RANK_GUESTS
from worker.ranks.collectives import open_store, reach_store
from worker.ranks.door import Door, Guest, check_hello, knock, knock_until_admitted, prove
from worker.ranks.frames import FrameError, FrameReader, encode, messages

HOST, SECRET = "127.0.0.1", "a secret of the test"
FUZZED = 600
# An array of two numbers, as frames carry it.
EXTENSION = msgpack.ExtType(2, msgpack.packb(["<u1", [2], b"\0\0"]))


@contextmanager
def opened(secret: str = SECRET, clock: Callable[[], float] | None = None) -> Iterator[tuple[Door, list[Guest]]]:
    """A door that admits ranks 1 and 2 on a thread, and the list of its admitted guests."""
    door = Door(HOST, 0, secret) if clock is None else Door(HOST, 0, secret, clock)
    admitted: list[Guest] = []
    stop = threading.Event()

    def admit() -> None:
        while not stop.is_set():
            if (guest := door.admit({1, 2}, 0.01)) is not None:
                admitted.append(guest)

    thread = threading.Thread(target=admit)
    thread.start()
    try:
        yield door, admitted
    finally:
        stop.set()
        thread.join()
        door.close()
        for guest in admitted:
            guest.sock.close()


def ranks_of(admitted: list[Guest], count: int) -> list[int]:
    """Admitted ranks, as soon as there are `count`: a rank is welcomed before the door returns its guest."""
    end = time.monotonic() + 60
    while len(admitted) < count:
        assert time.monotonic() < end
        time.sleep(0.01)
    return [guest.rank for guest in admitted]


def stranger_bytes(rnd: random.Random) -> bytes:
    """Frames that differ from a hello in some way, and bytes that are no frames."""

    def framed(body: bytes) -> bytes:
        return struct.pack("<I", len(body)) + body

    nested = msgpack.packb(["x"])
    for _ in range(rnd.randrange(1, 2000)):
        nested = msgpack.packb(msgpack.ExtType(rnd.choice([1, 2]), nested))
    values: list[Any] = [None, True, 1, -1, 2**63, 1.5, "hello", b"x" * 32, [], {}, [[1]], EXTENSION]
    hello: list[Any] = ["hello", 1, 7, bytes(32), bytes(32)]
    hello[rnd.randrange(5)] = rnd.choice(values)
    classes = ["SamplingParams", "ParallelConfig", "QuantizationConfig", "SpeculativeConfig", "Config", "Popen"]
    refused = msgpack.ExtType(1, msgpack.packb([rnd.choice(classes), *rnd.choices([-5, "x", None], k=3)]))
    return rnd.choice(
        [
            rnd.randbytes(rnd.randrange(64)),
            framed(rnd.randbytes(rnd.randrange(64))),
            struct.pack("<I", rnd.randrange(2**32)) + rnd.randbytes(8),
            framed(nested),
            framed(msgpack.packb(hello)),
            framed(msgpack.packb(hello[: rnd.randrange(5)])),
            framed(msgpack.packb(["hello", refused, 1, bytes(32), bytes(32)])),
            framed(b"\x91" * rnd.randrange(1, 250)),
            b"GET / HTTP/1.1\r\n\r\n",
        ]
    )


def test_fuzzed_frames_are_refused_and_ranks_join() -> None:
    """Former fault: one frame ended the waiting process, by SIGSEGV or exit code 2."""
    rnd = random.Random(3)
    frames = [stranger_bytes(rnd) for _ in range(FUZZED)]

    def send(data: bytes) -> None:
        with contextlib.suppress(OSError), socket.create_connection((HOST, door.port), 20) as sock:
            sock.sendall(data)
            if rnd.random() < 0.5:
                sock.shutdown(socket.SHUT_WR)
                sock.recv(1 << 16)

    with capture_logs() as lines, opened() as (door, admitted):
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(send, frames))
        for rank in (1, 2):
            sock, _ = knock_until_admitted(HOST, door.port, rank, SECRET)
            sock.close()
        assert ranks_of(admitted, 2) == [1, 2]
    refused = [line for line in lines if line["event"].startswith("connection refused")]
    assert 0 < len(refused) <= FUZZED


def values_of_all_types() -> Iterator[bytes]:
    """msgpack bodies of one value: every type in each of its widths."""
    whole: list[Any] = [None, False, True, 1.5, {}, {"hello": {}}, {1: 2}, [], [[]], "", "hello", b""]
    whole += [sign for bits in (5, 8, 16, 32, 63) for sign in (2**bits - 1, -(2**bits))]
    whole += [text for count in (1, 40, 200) for text in ("x" * count, b"x" * count, [0] * count)]
    whole += [msgpack.ExtType(code, bytes(count)) for code in (0, 1, 2, 127) for count in (0, 1, 2, 4, 8, 16, 17)]
    whole += [EXTENSION, msgpack.Timestamp(1), msgpack.Timestamp(1, 1), msgpack.Timestamp(2**40, 1)]
    yield from map(msgpack.packb, whole)
    # A class with its default values, a 32-bit float, and the byte that no type has.
    yield msgpack.packb(msgpack.ExtType(1, msgpack.packb(["SamplingParams"])))
    yield msgpack.packb(1.5, use_single_float=True)
    yield b"\xc1"


def frames_like(message: tuple[object, ...]) -> Iterator[bytes]:
    """Frames of a value of each type: alone, in a list, and in place of each part of a message."""
    parts = [msgpack.packb(part) for part in message]
    for value in values_of_all_types():
        mixed = [[*parts[:place], value, *parts[place + 1 :]] for place in range(len(parts))]
        for body in (value, *(bytes([0x90 | len(each)]) + b"".join(each) for each in ([value], *mixed))):
            yield struct.pack("<I", len(body)) + body


def is_closed(sock: socket.socket) -> bool:
    """True if the other side has ended the connection; takes what it has sent."""
    if not select.select([sock], [], [], 0)[0]:
        return False
    try:
        return not sock.recv(1 << 16)
    except ConnectionResetError:
        return True


def test_door_refuses_values_of_every_type() -> None:
    """Former fault: 25 bytes with an array ended the start of the engine by ValueError."""
    door = Door(HOST, 0, SECRET)
    with contextlib.closing(door), capture_logs():
        for data in frames_like(("hello", 1, 7, bytes(32), bytes(32))):
            with socket.create_connection((HOST, door.port), 20) as sock:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                end = time.monotonic() + 60
                while not is_closed(sock):
                    assert door.admit({1, 2}, 0.1) is None
                    assert time.monotonic() < end


@pytest.mark.parametrize("first", [b"", encode(("challenge", bytes(32)))], ids=["challenge", "welcome"])
def test_rank_refuses_values_of_every_type(first: bytes) -> None:
    """Former fault: whoever listened at the address of a door could end the rank by ValueError."""
    for data in frames_like(("welcome", bytes(32)) if first else ("challenge", bytes(32))):
        ours, stranger = socket.socketpair()
        with ours, stranger:
            stranger.sendall(first + data)
            stranger.shutdown(socket.SHUT_WR)
            with pytest.raises((EOFError, FrameError)):
                knock(ours, 1, SECRET)


def test_oldest_connection_may_speak_while_it_is_evicted() -> None:
    """Former fault: one batch of events evicted the connection and then read it, which ended the process."""
    door = Door(HOST, 0, SECRET)
    with contextlib.ExitStack() as stack:
        stack.callback(door.close)
        guests = []
        for _ in range(MAX_RANK_GUESTS):
            guests.append(stack.enter_context(socket.create_connection((HOST, door.port), 20)))
            while not select.select([guests[-1]], [], [], 0)[0]:
                assert door.admit({1}, 0.1) is None
        rank = stack.enter_context(socket.create_connection((HOST, door.port), 60))
        guests[0].sendall(b"x")
        with stack.enter_context(ThreadPoolExecutor(1)) as pool:
            proved = pool.submit(knock, rank, 1, SECRET)
            while (guest := door.admit({1}, 0.1)) is None:
                assert not proved.done()
            proved.result()
            stack.enter_context(guest.sock)
        assert guest.rank == 1
        while not is_closed(guests[0]):
            assert select.select([guests[0]], [], [], 60)[0]


def test_unreachable_door_is_logged_with_address_and_error() -> None:
    """Former fault: a rank behind a firewall waited for ever without a word."""
    left = iter([None])

    def check() -> None:
        next(left)

    with socket.socket() as closed, capture_logs() as lines:
        closed.bind((HOST, 0))
        port = closed.getsockname()[1]
        with pytest.raises(StopIteration):
            knock_until_admitted(HOST, port, 1, SECRET, check)
    assert [(line["event"], line["address"]) for line in lines] == [
        ("waiting for the port of another rank", f"{HOST}:{port}")
    ]
    assert "Connection refused" in lines[0]["why"]


@pytest.mark.parametrize("theirs", ["", "another", SECRET + "x"])
def test_rank_with_another_secret_is_refused(theirs: str) -> None:
    with capture_logs() as lines, opened() as (door, admitted):
        with socket.create_connection((HOST, door.port), 20) as sock, pytest.raises(EOFError):
            knock(sock, 1, theirs)
        assert not admitted
    assert [line["why"] for line in lines] == ["its --dist-secret is another one"]


def test_proof_of_another_challenge_is_refused() -> None:
    """An eavesdropper cannot use a proof of an earlier challenge."""
    with capture_logs() as lines, opened() as (door, admitted):
        with socket.create_connection((HOST, door.port), 20) as sock:
            sock.sendall(encode(("hello", 1, 1, prove(SECRET, b"rank", bytes(32), 1), bytes(32))))
            with contextlib.suppress(ConnectionResetError), sock.makefile("rb") as answers:
                answers.read()
        assert not admitted
    assert [line["why"] for line in lines] == ["its --dist-secret is another one"]


def test_silent_connections_do_not_delay_ranks() -> None:
    """Former fault: each silent connection delayed the others by 8 s."""
    with contextlib.ExitStack() as stack:
        door, admitted = stack.enter_context(opened())
        silent = [
            stack.enter_context(socket.create_connection((HOST, door.port), 20)) for _ in range(2 * MAX_RANK_GUESTS)
        ]
        sock = stack.enter_context(socket.create_connection((HOST, door.port), 20))
        knock(sock, 1, SECRET)
        # The oldest connections were refused to make room.
        with silent[0].makefile("rb") as answers:
            assert answers.read()
        assert ranks_of(admitted, 1) == [1]


def test_missing_hello_is_refused_in_time() -> None:
    now = [0.0]
    with (
        capture_logs() as lines,
        opened(clock=lambda: now[0]) as (door, _),
        socket.create_connection((HOST, door.port), 20) as sock,
        sock.makefile("rb") as answers,
    ):
        assert answers.read(4)
        now[0] = 8.0
        answers.read()
    assert [line["why"] for line in lines] == ["no hello within 8 s"]


def test_hello_size_is_bounded() -> None:
    """The largest hello has at most MAX_HELLO_BYTES, so the door reads little before a proof."""
    largest = ("hello", 2**31, 2**22, prove(SECRET, b"rank", bytes(32), 2**31), bytes(32))
    assert len(encode(largest)) - 4 <= MAX_HELLO_BYTES
    assert list(FrameReader(MAX_HELLO_BYTES).feed(encode(largest))) == [largest]


def answer_knock(sock: socket.socket, secret: str, *later: object) -> None:
    """Plays a door that admits any rank with a welcome of `secret`, and sends `later` in the same segment."""
    sock.settimeout(60)
    sock.sendall(encode(("challenge", bytes(32))))
    _, rank, _, _, nonce = next(messages(sock, FrameReader()))
    sock.sendall(b"".join(map(encode, [("welcome", prove(secret, b"door", nonce, rank)), *later])))


def test_message_sent_with_welcome_is_kept() -> None:
    """On a busy machine both come in one read."""
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        ours.settimeout(60)
        answered = pool.submit(answer_knock, theirs, SECRET, ("large", bytes(2 * MAX_HELLO_BYTES)), ("later",))
        received = messages(ours, knock(ours, 1, SECRET))
        assert [next(received), next(received)] == [("large", bytes(2 * MAX_HELLO_BYTES)), ("later",)]
        answered.result()


@pytest.mark.parametrize("theirs", ["", "another"])
def test_rank_refuses_door_without_secret(theirs: str) -> None:
    """Former fault: a rank took calls from whoever listened at --dist-init."""
    ours, stranger = socket.socketpair()
    with ours, stranger, ThreadPoolExecutor(1) as pool:
        ours.settimeout(60)
        answered = pool.submit(answer_knock, stranger, theirs, ("load", 1))
        with pytest.raises(FrameError, match="it does not know the secret"):
            knock(ours, 1, SECRET)
        answered.result()


def test_door_refuses_its_own_proof_from_a_rank() -> None:
    """A stranger cannot let one side compute the proof that the other side wants."""
    nonce = bytes(32)
    assert prove(SECRET, b"door", nonce, 1) != prove(SECRET, b"rank", nonce, 1)
    with pytest.raises(FrameError, match="its --dist-secret is another one"):
        check_hello(("hello", 1, 1, prove(SECRET, b"door", nonce, 1), nonce), {1}, nonce, SECRET)


def test_store_listens_only_on_its_address() -> None:
    """Torch listens on all interfaces, whatever the host."""
    store, port = open_store(HOST)
    assert reach_store(HOST, port).port == store.port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 20)
