"""A name server on loopback: answers from a table that tests change, late, wrong or not at all when they want it so."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset


class FakeDns:
    """Use as a context manager.

    Attributes:
        port: where it listens, UDP on 127.0.0.1.
        addresses: of every name, by family: `A`, `AAAA`.
        ttl: of the answers, seconds.
        rcode: of the answers.
        delay_s: before each answer.
        mute: answers nothing.
        asked: number of questions, by family.
    """

    def __init__(self, addresses: Sequence[str] = (), ttl: int = 0) -> None:
        self.addresses: dict[str, Sequence[str]] = {"A": addresses}
        self.ttl = ttl
        self.rcode = dns.rcode.NOERROR
        self.delay_s = 0.0
        self.mute = False
        self.asked: Counter[str] = Counter()
        self._answered: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        self._ended = False
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def target(self, port: int) -> str:
        """The target of workers at `port` behind a name that this server knows."""
        return f"dns://127.0.0.1:{self.port}/workers.test:{port}"

    def __enter__(self) -> FakeDns:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self._ended = True
        # Wakes the thread.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.sendto(b"", ("127.0.0.1", self.port))
        self._thread.join(60)
        self._socket.close()

    def change(self, *, addresses: Mapping[str, Sequence[str]] | None = None, rcode: int = dns.rcode.NOERROR) -> None:
        """Changes the answers between two look-ups: both families of each are answered alike.

        For those who ask for both, and no question twice.
        """
        wait_until(lambda: self._changed_between_look_ups(addresses, rcode))

    def _changed_between_look_ups(self, addresses: Mapping[str, Sequence[str]] | None, rcode: int) -> bool:
        with self._lock:
            if not self._answered["A"] == self._answered["AAAA"] == self.asked["A"] == self.asked["AAAA"]:
                return False
            self.rcode = dns.rcode.Rcode(rcode)
            if addresses is not None:
                self.addresses = dict(addresses)
            return True

    def wait_asked(self, more: int = 1, within_s: float = 60.0) -> None:
        """Waits until it has been asked so many more times for A."""
        wanted = self.asked["A"] + more
        wait_until(lambda: self.asked["A"] >= wanted, within_s)

    def _serve(self) -> None:
        while True:
            data, peer = self._socket.recvfrom(4096)
            if self._ended:
                return
            query = dns.message.from_wire(data)
            with self._lock:
                self.asked[dns.rdatatype.to_text(query.question[0].rdtype)] += 1
            if not self.mute:
                threading.Timer(self.delay_s, self._answer, (query, peer)).start()

    def _answer(self, query: dns.message.Message, peer: tuple[str, int]) -> None:
        question = query.question[0]
        family = dns.rdatatype.to_text(question.rdtype)
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.RA
        with self._lock:
            rcode, addresses = self.rcode, self.addresses
            self._answered[family] += 1
        answer.set_rcode(rcode)
        hosts = addresses.get(family, ()) if rcode == dns.rcode.NOERROR else ()
        if hosts:
            answer.answer.append(dns.rrset.from_text(question.name, self.ttl, "IN", family, *hosts))
        if not self._ended:
            self._socket.sendto(answer.to_wire(), peer)


def wait_until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    """Polls until it is so."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "condition not reached"
        time.sleep(0.01)
