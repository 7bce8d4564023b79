"""Follows an operator's targets: static addresses, DNS names and files. `addresses` decides what answers mean.

Invariants:
  * `changed` is not called before every target has answered once, so that new targets do not remove workers that they
    name themselves.
  * A target that fails keeps its last workers, with one warning until it works again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

import dns.asyncresolver
import dns.exception
import dns.resolver
import structlog

from common.files import UnreadableFileError, read_file
from common.limits import (
    DNS_MAX_REFRESH_S,
    DNS_MIN_REFRESH_S,
    DNS_TIMEOUT_S,
    MAX_WORKER_LIST_BYTES,
    WORKER_LIST_POLL_S,
)
from common.process.tasks import keep_running
from router.workers.addresses import (
    AddressError,
    DnsTarget,
    FileTarget,
    KnownAddresses,
    StaticTarget,
    Target,
    parse_list,
)

log = structlog.get_logger(__name__)

_FAMILIES: Final = ("A", "AAAA")


def read_list(path: Path) -> tuple[str, ...]:
    """The workers that a file lists.

    Raises:
        AddressError: it cannot be read, or is not a list; one line that names the file.
    """
    try:
        return parse_list(read_file(path, MAX_WORKER_LIST_BYTES).decode("utf-8"))
    except UnreadableFileError as error:
        raise AddressError(f"worker list {error}") from None
    except UnicodeDecodeError:
        raise AddressError(f"worker list {path}: it is not UTF-8") from None
    except AddressError as error:
        raise AddressError(f"worker list {path}: {error}") from None


class _Troubles:
    """Logs each new kind of failure of a target once, and its end."""

    def __init__(self, target: Target) -> None:
        self._target = str(target)
        self._why = ""

    def failed(self, why: str, kept: int) -> None:
        """Notes a failure; `kept` workers stay known."""
        if why != self._why:
            log.warning("worker discovery failed", target=self._target, why=why, kept=kept)
        self._why = why

    def over(self) -> None:
        if self._why:
            log.info("worker discovery works again", target=self._target)
        self._why = ""


async def _follow_file(target: FileTarget) -> AsyncIterator[tuple[str, ...]]:
    """Yields the list after each read of the file, changed or not."""
    troubles = _Troubles(target)
    known: tuple[str, ...] = ()
    while True:
        try:
            known = await asyncio.to_thread(read_list, target.path)
        except AddressError as error:
            troubles.failed(str(error), len(known))
        else:
            troubles.over()
        yield known
        await asyncio.sleep(WORKER_LIST_POLL_S)


class _Resolver:
    """Looks up the addresses of one DNS name."""

    def __init__(self, target: DnsTarget) -> None:
        self._target = target
        self.known = KnownAddresses(target.port)
        # Created late: a machine without resolv.conf may still have static workers.
        self._resolver: dns.asyncresolver.Resolver | None = None
        self._troubles = _Troubles(target)

    async def ask(self) -> float:
        """Looks the name up once; returns the seconds until the next lookup."""
        results = await asyncio.gather(*(self._family(family) for family in _FAMILIES))
        answers = {family: hosts for family, (hosts, _, _) in zip(_FAMILIES, results, strict=True)}
        learned = self.known.learn(answers, asyncio.get_running_loop().time())
        reasons = [why for hosts, _, why in results if hosts is None or not learned]
        if reasons:
            self._troubles.failed(reasons[0] or "it has no addresses", len(self.known.workers))
        else:
            self._troubles.over()
        ttl = min((ttl for hosts, ttl, _ in results if hosts), default=0.0)
        return min(max(ttl, DNS_MIN_REFRESH_S), DNS_MAX_REFRESH_S)

    async def _family(self, family: str) -> tuple[list[str] | None, float, str]:
        """Addresses (None for a failure), their time to live in seconds, and why there are none ("" for no reason)."""
        try:
            if self._resolver is None:
                self._resolver = self._make()
            answer = await self._resolver.resolve(
                self._target.name,
                family,
                raise_on_no_answer=False,
                search=not self._target.server,
                lifetime=DNS_TIMEOUT_S,
            )
        except dns.resolver.NXDOMAIN:
            return [], 0.0, "there is no such name"
        except dns.resolver.LifetimeTimeout:
            return None, 0.0, "the DNS server does not answer"
        except (dns.exception.DNSException, OSError) as error:
            return None, 0.0, " ".join(str(error).split())
        hosts = [] if answer.rrset is None else [str(record.address) for record in answer.rrset]
        return hosts, float(answer.chaining_result.minimum_ttl), ""

    def _make(self) -> dns.asyncresolver.Resolver:
        made = dns.asyncresolver.Resolver(configure=not self._target.server)
        if self._target.server:
            made.nameservers, made.port = [self._target.server], self._target.server_port
        return made


class Discovery:
    """The workers of all targets together.

    Args:
        changed: called with all addresses, each once and in order of the targets, when they have changed.
    """

    def __init__(self, changed: Callable[[Sequence[str]], None]) -> None:
        self._changed = changed
        self._told: tuple[str, ...] | None = None
        self._targets: tuple[Target, ...] = ()
        # By target: its workers, None before its first answer.
        self._lists: dict[Target, tuple[str, ...] | None] = {}
        self._tasks: dict[Target, asyncio.Task[None]] = {}
        self._ask_again: dict[Target, asyncio.Event] = {}

    def follow(self, targets: Sequence[Target]) -> None:
        """Replaces the targets."""
        self._targets = tuple(targets)
        for gone in self._lists.keys() - set(targets):
            self._forget(gone)
        for target in targets:
            if target not in self._lists:
                self._begin(target)
        self._tell()

    def refresh(self) -> None:
        """Looks up all DNS names soon, because a lost worker often means a changed answer."""
        for event in self._ask_again.values():
            event.set()

    async def stop(self) -> None:
        """Stops following the targets."""
        tasks = list(self._tasks.values())
        for target in list(self._lists):
            self._forget(target)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, target: Target) -> None:
        self._lists[target] = (target.address,) if isinstance(target, StaticTarget) else None
        match target:
            case FileTarget():
                self._tasks[target] = self._follow(target, lambda: self._watch_file(target))
            case DnsTarget():
                self._ask_again[target] = asyncio.Event()
                self._tasks[target] = self._follow(target, lambda: self._resolve(target))
            case StaticTarget():
                pass

    def _follow(self, target: Target, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        return asyncio.create_task(keep_running("discovery", work, target=str(target)), name=f"workers {target}")

    def _forget(self, target: Target) -> None:
        del self._lists[target]
        self._ask_again.pop(target, None)
        if (task := self._tasks.pop(target, None)) is not None:
            task.cancel()

    async def _watch_file(self, target: FileTarget) -> None:
        async for workers in _follow_file(target):
            self._learn(target, workers)

    async def _resolve(self, target: DnsTarget) -> None:
        resolver, again = _Resolver(target), self._ask_again[target]
        while True:
            again.clear()
            wait_s = await resolver.ask()
            self._learn(target, resolver.known.workers)
            # Bounds the queries to a name server, for any number of refreshes.
            await asyncio.sleep(DNS_MIN_REFRESH_S)
            await _until(again, wait_s - DNS_MIN_REFRESH_S)

    def _learn(self, target: Target, workers: tuple[str, ...]) -> None:
        if target in self._lists and self._lists[target] != workers:
            self._lists[target] = workers
            self._tell()

    def _tell(self) -> None:
        lists = [self._lists[target] for target in self._targets]
        workers = tuple(dict.fromkeys(address for each in lists if each is not None for address in each))
        if None not in lists and workers != self._told:
            self._told = workers
            self._changed(workers)


async def _until(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(max(0.0, timeout_s)):
            await event.wait()
    except TimeoutError:
        pass
