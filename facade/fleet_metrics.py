"""`/metrics` of a facade: vLLM's names for the figures of its routers, added up.

An endpoint picker reads the metrics of a server at the port that it sends requests to. The facade has none of these
figures itself, so it reads the routers' ports for metrics, at most once in SCRAPE_EVERY_S however often it is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from common.limits import MAX_SCRAPED_BYTES, SCRAPE_EVERY_S, SCRAPE_ROUTER_TIMEOUT_S
from common.rpc.tls import ClientTls
from common.telemetry import names
from common.telemetry.prometheus import TEXT_TYPE
from facade.http.exchange import Exchange

PATH: Final = "/metrics"
_PREFIX: Final = "vllm:"
_MEANS: Final = frozenset({names.VLLM_KV_USAGE})
_ALIKE: Final = frozenset({names.VLLM_CACHE_CONFIG})
_TYPE: Final = (b"content-type", TEXT_TYPE.encode())


def fleet_text(texts: Sequence[str]) -> str:
    """Adds up the metrics of several routers that have vLLM's names.

    The use of KV caches is averaged, and equal descriptions of caches count once.

    Args:
        texts: in Prometheus' text format, as routers write it.
    """
    # By metric: lines that describe it, and the values of its series.
    heads: dict[str, list[str]] = {}
    series: dict[str, dict[str, list[float]]] = {}
    for text in texts:
        metric, head = "", list[str]()
        for line in text.splitlines():
            if line.startswith("# "):
                word, metric = (*line.split(" ", 3)[1:], "")[:2]
                head = [*head, line] if word == "TYPE" else [line]
            elif metric.startswith(_PREFIX):
                heads.setdefault(metric, head)
                key, _, value = line.rpartition(" ")
                series.setdefault(metric, {}).setdefault(key, []).append(float(value))
    lines = [f"# TYPE {names.FACADE_ROUTERS} gauge", f"{names.FACADE_ROUTERS} {len(texts)}"]
    for metric, values in series.items():
        lines += heads[metric]
        lines += [f"{key} {_number(_together(metric, each))}" for key, each in values.items()]
    return "".join(f"{line}\n" for line in lines)


def _together(metric: str, values: Sequence[float]) -> float:
    if metric in _ALIKE:
        return max(values)
    return math.fsum(values) / (len(values) if metric in _MEANS else 1)


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)


class FleetMetrics:
    """Reads the metrics of routers and adds them up.

    Args:
        addresses: of the routers' ports for metrics, `HOST:PORT`; a host stands for all its addresses.
        tls: for these ports; None reads plain text.
        clock: monotonic seconds.
    """

    def __init__(
        self, addresses: Sequence[str], tls: ClientTls | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._targets = [address.rpartition(":")[::2] for address in addresses]
        self._tls = tls
        self._clock = clock
        self._lock = asyncio.Lock()
        self._read_at = -math.inf
        self._text: bytes | None = None

    async def respond(self, exchange: Exchange) -> None:
        """Responds with the metrics; with 503 if no router answers."""
        exchange.is_probe = True
        async with self._lock:
            if self._clock() - self._read_at >= SCRAPE_EVERY_S:
                self._text = await self._read()
                self._read_at = self._clock()
        if self._text is None:
            await exchange.respond_json({"error": {"message": "no router shows its metrics"}}, 503)
        else:
            await exchange.respond(200, self._text, [_TYPE])

    async def _read(self) -> bytes | None:
        """The text of all routers that answer; None if there are none."""
        found = await asyncio.gather(*(self._resolved(host, port) for host, port in self._targets))
        texts = await asyncio.gather(*(self._scrape(*each) for each in dict.fromkeys(_all(found))))
        answered = [text for text in texts if text is not None]
        return fleet_text(answered).encode() if answered else None

    async def _resolved(self, host: str, port: str) -> list[tuple[str, str, int]]:
        """All addresses of a host, with its name."""
        try:
            async with asyncio.timeout(SCRAPE_ROUTER_TIMEOUT_S):
                places = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError):
            return []
        return [(host.strip("[]"), str(place[0]), int(place[1])) for *_, place in places]

    async def _scrape(self, name: str, address: str, port: int) -> str | None:
        """The text of one router; None if it does not answer."""
        try:
            async with asyncio.timeout(SCRAPE_ROUTER_TIMEOUT_S):
                answer = await self._get(name, address, port)
        except (OSError, ValueError, TimeoutError):
            return None
        head, _, body = answer.partition(b"\r\n\r\n")
        return body.decode("utf-8", "replace") if head.startswith(b"HTTP/1.1 200 ") else None

    async def _get(self, name: str, address: str, port: int) -> bytes:
        if self._tls is None:
            reader, writer = await asyncio.open_connection(address, port)
        else:
            context = await asyncio.to_thread(_context, self._tls)
            reader, writer = await asyncio.open_connection(
                address, port, ssl=context, server_hostname=self._tls.name or name
            )
        try:
            writer.write(f"GET {PATH} HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n".encode())
            parts, size = [], 0
            while part := await reader.read(1 << 16):
                parts.append(part)
                size += len(part)
                if size > MAX_SCRAPED_BYTES:
                    raise ValueError("too long")
            return b"".join(parts)
        finally:
            with contextlib.suppress(OSError):
                writer.close()


def _all(found: Iterable[Iterable[tuple[str, str, int]]]) -> Iterable[tuple[str, str, int]]:
    return (each for places in found for each in places)


def _context(tls: ClientTls) -> ssl.SSLContext:
    """A context from the files as they are now."""
    context = ssl.create_default_context(cafile=tls.ca)
    # As in gRPC, where any certificate of the CA file is trusted.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if tls.cert is not None:
        context.load_cert_chain(tls.cert, tls.key)
    return context
