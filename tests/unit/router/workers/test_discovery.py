"""Workers found by DNS and files, with a name server on loopback and files that change."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import dns.asyncresolver
import dns.rcode
import pytest
import structlog
from structlog.testing import LogCapture

from common.limits import DNS_MIN_REFRESH_S
from router.workers import discovery
from router.workers.addresses import AddressError, parse_targets
from router.workers.discovery import Discovery, read_list
from tests.fake_dns import FakeDns


class Told:
    """Records the lists of a Discovery."""

    def __init__(self) -> None:
        self.lists: list[tuple[str, ...]] = []
        self.discovery = Discovery(self._take)

    def _take(self, workers: Sequence[str]) -> None:
        self.lists.append(tuple(workers))

    async def until(self, *workers: str) -> None:
        await until(lambda: self.lists and self.lists[-1] == workers)


async def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    end = asyncio.get_running_loop().time() + within_s
    while not condition():
        assert asyncio.get_running_loop().time() < end, "condition not reached"
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits longer for each answer: loopback loses none, and a machine may stall. No query is repeated."""
    monkeypatch.setattr(discovery, "DNS_TIMEOUT_S", 60.0)
    make = discovery._Resolver._make

    def make_patient(resolver: discovery._Resolver) -> dns.asyncresolver.Resolver:
        made = make(resolver)
        made.timeout = 60.0
        return made

    monkeypatch.setattr(discovery._Resolver, "_make", make_patient)


@pytest.fixture
async def told() -> AsyncIterator[Told]:
    made = Told()
    yield made
    await made.discovery.stop()


@pytest.fixture
def names() -> Iterator[FakeDns]:
    with FakeDns(["127.0.0.1", "127.0.0.2"]) as server:
        yield server


@pytest.fixture
def logged() -> Iterator[LogCapture]:
    capture = LogCapture()
    structlog.configure(processors=[capture])
    yield capture
    structlog.reset_defaults()


def warnings(logged: LogCapture) -> list[str]:
    return [str(entry["why"]) for entry in logged.entries if entry["log_level"] == "warning"]


async def test_static_workers_are_listed_at_once(told: Told) -> None:
    told.discovery.follow(parse_targets(["b:1", "a:1"]))
    assert told.lists == [("b:1", "a:1")]
    told.discovery.follow(parse_targets(["b:1", "a:1"]))
    assert len(told.lists) == 1
    told.discovery.follow(parse_targets(["c:1"]))
    assert told.lists[1:] == [("c:1",)]


@pytest.mark.slow
async def test_dns_changes_are_followed_and_failures_keep_workers(
    told: Told, names: FakeDns, logged: LogCapture
) -> None:
    """Changing answers, both families, SERVFAIL, NXDOMAIN, an empty answer."""
    told.discovery.follow(parse_targets([names.target(7)]))
    await told.until("127.0.0.1:7", "127.0.0.2:7")
    await asyncio.to_thread(names.change, addresses={"A": ["127.0.0.2", "127.0.0.3"], "AAAA": ["::1"]})
    await told.until("127.0.0.2:7", "127.0.0.3:7", "[::1]:7")
    assert warnings(logged) == []
    for trouble in (dns.rcode.SERVFAIL, dns.rcode.NXDOMAIN):
        await asyncio.to_thread(names.change, rcode=trouble)
        await asyncio.to_thread(names.wait_asked, 3)
    await asyncio.to_thread(names.change, addresses={})
    await asyncio.to_thread(names.wait_asked, 3)
    assert len(told.lists) == 2
    # One warning each for any number of queries. (dnspython's SERVFAIL text names the server.)
    servfail, nxdomain, empty = warnings(logged)
    assert "SERVFAIL" in servfail
    assert (nxdomain, empty) == ("there is no such name", "it has no addresses")
    await asyncio.to_thread(names.change, addresses={"A": ["127.0.0.9"]})
    await told.until("127.0.0.9:7")
    assert logged.entries[-1]["event"] == "worker discovery works again"


async def test_slow_answers_are_waited_for_and_silence_is_a_failure(
    told: Told, names: FakeDns, logged: LogCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    names.delay_s = 0.3
    told.discovery.follow(parse_targets([names.target(7), "static:1"]))
    await told.until("127.0.0.1:7", "127.0.0.2:7", "static:1")
    names.mute = True
    monkeypatch.setattr(discovery, "DNS_TIMEOUT_S", 0.1)
    # A query in flight still has its minute.
    await until(lambda: warnings(logged) == ["the DNS server does not answer"], 120.0)
    assert len(told.lists) == 1


async def test_unknown_name_does_not_delay_other_workers(told: Told, names: FakeDns) -> None:
    names.rcode = dns.rcode.NXDOMAIN
    told.discovery.follow(parse_targets([names.target(7), "static:1"]))
    await told.until("static:1")


@pytest.mark.slow
async def test_dns_ttl_is_kept_unless_worker_is_lost(told: Told, names: FakeDns) -> None:
    names.ttl = 3600
    told.discovery.follow(parse_targets([names.target(7)]))
    await told.until("127.0.0.1:7", "127.0.0.2:7")
    asked = names.asked["A"]
    await asyncio.sleep(1.2)
    assert names.asked["A"] == asked
    names.addresses = {"A": ["127.0.0.3"]}
    told.discovery.refresh()
    await told.until("127.0.0.3:7")
    # Dozens of lost workers do not cause dozens of queries.
    began = time.monotonic()
    for _ in range(50):
        told.discovery.refresh()
        await asyncio.sleep(0.005)
    assert names.asked["A"] <= asked + 2 + (time.monotonic() - began) / DNS_MIN_REFRESH_S


async def test_worker_file_is_followed_and_broken_file_keeps_workers(
    told: Told, tmp_path: Path, logged: LogCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.workers.discovery.WORKER_LIST_POLL_S", 0.02)
    path = tmp_path / "workers.yaml"
    path.write_text("- a:1\n- b:2\n")
    told.discovery.follow(parse_targets([f"file:{path}"]))
    await told.until("a:1", "b:2")
    replace(path, '["b:2", "c:3"]')
    await told.until("b:2", "c:3")
    for broken in ("- b:2\n- c", "", "- b:2\n- ["):
        replace(path, broken)
        await more_warnings(logged)
    path.unlink()
    await until(lambda: "No such file" in warnings(logged)[-1])
    await asyncio.sleep(0.2)
    assert len(warnings(logged)) == 4
    assert all(str(path) in why and "\n" not in why for why in warnings(logged))
    assert len(told.lists) == 2
    replace(path, "d:4\n")
    await told.until("d:4")
    replace(path, "[]")
    await told.until()


async def more_warnings(logged: LogCapture) -> None:
    reported = len(warnings(logged))
    await until(lambda: len(warnings(logged)) > reported)


def replace(path: Path, text: str) -> None:
    """Replaces the file by renaming, as editors and Kubernetes do."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


async def test_new_targets_keep_shared_workers(told: Told, names: FakeDns) -> None:
    told.discovery.follow(parse_targets(["127.0.0.1:7", "x:1"]))
    names.delay_s = 0.2
    told.discovery.follow(parse_targets([names.target(7)]))
    assert told.lists == [("127.0.0.1:7", "x:1")]
    await told.until("127.0.0.1:7", "127.0.0.2:7")
    assert len(told.lists) == 2
    asked = names.asked["A"]
    told.discovery.follow(parse_targets(["y:1"]))
    assert told.lists[2:] == [("y:1",)]
    await asyncio.sleep(0.7)
    assert names.asked["A"] <= asked + 1


def test_too_long_worker_list_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_text("- a:1\n" * 200_000)
    with pytest.raises(AddressError, match="more than 1048576 bytes"):
        read_list(path)
