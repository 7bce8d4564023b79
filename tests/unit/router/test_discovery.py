"""Addresses of workers."""

from __future__ import annotations

import pytest

from router.discovery import AddressError, static_workers


def test_addresses_one_by_one_or_as_a_list() -> None:
    assert static_workers(["a:1", "10.0.0.1:65535, [::1]:2,"]) == ("a:1", "10.0.0.1:65535", "[::1]:2")


@pytest.mark.parametrize(
    ("addresses", "message"),
    [
        (["a"], "use host:port"),
        (["a:"], "use host:port"),
        ([":1"], "use host:port"),
        (["a:0"], "use host:port"),
        (["a:65536"], "use host:port"),
        (["http://a:1"], "use host:port"),
        (["::1:5"], "use host:port"),
        (["a:1", "b:2,a:1"], "a:1 is named twice"),
        ([], "no worker is named"),
        ([" , "], "no worker is named"),
    ],
)
def test_bad_addresses(addresses: list[str], message: str) -> None:
    with pytest.raises(AddressError, match=message):
        static_workers(addresses)
