"""Worker addresses from options, files and DNS."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.limits import DNS_EMPTY_S
from router.workers.addresses import (
    AddressError,
    DnsTarget,
    FileTarget,
    KnownAddresses,
    StaticTarget,
    parse_list,
    parse_targets,
)


def test_targets_one_by_one_or_as_a_list() -> None:
    assert parse_targets(["a:1", "10.0.0.1:65535, [::1]:2,"]) == (
        StaticTarget("a:1"),
        StaticTarget("10.0.0.1:65535"),
        StaticTarget("[::1]:2"),
    )
    assert parse_targets(["dns:///workers.ns.svc:50051,file:/etc/w.yaml", "dns://10.0.0.10:5353/w:1", "dns:w:2"]) == (
        DnsTarget("workers.ns.svc", 50051),
        FileTarget(Path("/etc/w.yaml")),
        DnsTarget("w", 1, "10.0.0.10", 5353),
        DnsTarget("w", 2),
    )


def test_targets_are_printed_as_given() -> None:
    for text in ("dns:///w:1", "dns://10.0.0.10:53/w:1", "file:/etc/w.yaml"):
        assert str(parse_targets([text])[0]) == text


@pytest.mark.parametrize(
    ("addresses", "message"),
    [
        (["a"], "use host:port, dns:///name:port or file:path"),
        (["a:"], "use host:port"),
        ([":1"], "use host:port"),
        (["a:0"], "use host:port"),
        (["a:65536"], "use host:port"),
        (["http://a:1"], "use host:port"),
        (["::1:5"], "use host:port"),
        (["file:"], "use host:port"),
        (["dns:///a"], "not a DNS target; use dns:///name:port"),
        (["dns:///a:0"], "not a DNS target"),
        (["dns://a:1"], "not a DNS target"),
        (["dns://ns.example/a:1"], "names no DNS server; use its IPv4 address"),
        (["dns://1.2.3.4:x/a:1"], "names no DNS server"),
        (["a:1", "b:2,a:1"], "a:1 is named twice"),
        ([], "no worker is named"),
        ([" , "], "no worker is named"),
    ],
)
def test_bad_targets(addresses: list[str], message: str) -> None:
    with pytest.raises(AddressError, match=message):
        parse_targets(addresses)


@pytest.mark.parametrize(
    "text", ["- a:1\n- '[::1]:2'\n", '["a:1", "[::1]:2"]', "# workers\n- a:1\n- '[::1]:2'\n- a:1\n"]
)
def test_lists_of_a_file(text: str) -> None:
    assert parse_list(text) == ("a:1", "[::1]:2")


def test_worker_file_may_have_one_address_per_line() -> None:
    assert parse_list("10.0.0.1:50061\n# the second one\n10.0.0.2:50061\n") == ("10.0.0.1:50061", "10.0.0.2:50061")
    assert parse_list("a:1 # the first one\n\n[::1]:2\na:1\n") == ("a:1", "[::1]:2")
    assert parse_list("[]") == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a list of addresses"),
        ("workers: [a:1]", "not a list of addresses"),
        ("7", "not a list of addresses"),
        ("- a:1\n- [", "not YAML"),
        ("a:1\nb", "'b' is not a worker's address"),
        ("a:0", "'a:0' is not a worker's address"),
        ("- a", "'a' is not a worker's address"),
        ("- 7", "'7' is not a worker's address"),
        ("- {a: 1}", "not a worker's address"),
    ],
)
def test_bad_lists(text: str, message: str) -> None:
    with pytest.raises(AddressError, match=message) as caught:
        parse_list(text)
    assert "\n" not in str(caught.value)


def test_failed_dns_query_keeps_addresses() -> None:
    known = KnownAddresses(5)
    both = ["10.0.0.1:5", "10.0.0.2:5", "[::1]:5"]
    silence: list[dict[str, list[str] | None]] = [{"A": None, "AAAA": None}, {"A": [], "AAAA": []}]
    silence.append({"A": None, "AAAA": []})
    assert not known.learn(silence[2], 0.0)
    assert list(known.workers) == []
    assert known.learn({"A": ["10.0.0.2", "10.0.0.1"], "AAAA": ["::1"]}, 0.0)
    assert list(known.workers) == both
    for silent in silence:
        assert not known.learn(silent, 1.0)
        assert list(known.workers) == both
    # A family whose query fails keeps its addresses; one that is empty beside another loses them.
    assert known.learn({"A": ["10.0.0.3"], "AAAA": None}, 2.0)
    assert list(known.workers) == ["10.0.0.3:5", "[::1]:5"]
    assert known.learn({"A": ["10.0.0.3"], "AAAA": []}, 3.0)
    assert list(known.workers) == ["10.0.0.3:5"]


def test_name_empty_for_long_loses_its_workers() -> None:
    """Regression: its old addresses were dialled for ever. A failed query does not count as an empty answer."""
    known = KnownAddresses(5)
    empty: dict[str, list[str] | None] = {"A": [], "AAAA": []}
    known.learn({"A": ["10.0.0.1"], "AAAA": []}, 0.0)
    known.learn(empty, 1.0)
    known.learn(empty, DNS_EMPTY_S)
    known.learn({"A": None, "AAAA": []}, 10 * DNS_EMPTY_S)
    assert list(known.workers) == ["10.0.0.1:5"]
    known.learn({"A": ["10.0.0.1"], "AAAA": []}, 11 * DNS_EMPTY_S)
    known.learn(empty, 12 * DNS_EMPTY_S)
    assert list(known.workers) == ["10.0.0.1:5"]
    assert not known.learn(empty, 13 * DNS_EMPTY_S)
    assert list(known.workers) == []
    assert known.learn({"A": ["10.0.0.1"], "AAAA": []}, 14 * DNS_EMPTY_S)
    assert list(known.workers) == ["10.0.0.1:5"]
