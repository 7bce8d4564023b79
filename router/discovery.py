"""Which workers there are: a static list of addresses. DNS and files come with a later issue."""

from __future__ import annotations

import re
from collections.abc import Iterable

_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:\[\]/]+):(?P<port>\d{1,5})")


class AddressError(ValueError):
    """An address that can not be dialled; one line that says what would be valid."""


def parse_address(text: str) -> str:
    """Checks one `host:port`; IPv6 hosts stand in brackets.

    Raises:
        AddressError: it is none.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise AddressError(f"{text!r} is not a worker's address; use host:port, for example 127.0.0.1:50061")
    return text


def static_workers(addresses: Iterable[str]) -> tuple[str, ...]:
    """The workers named on the command line: each element one address, or several separated by commas.

    Raises:
        AddressError: one of them is no address, or stands twice, or there is none.
    """
    parts = [part.strip() for text in addresses for part in text.split(",")]
    workers = tuple(parse_address(part) for part in parts if part)
    twice = sorted({worker for worker in workers if workers.count(worker) > 1})
    if twice:
        raise AddressError(f"worker {twice[0]} is named twice")
    if not workers:
        raise AddressError("no worker is named; use --worker host:port or FISSILE_WORKERS")
    return workers
