"""Worker addresses: the forms in which an operator names them, and the workers that DNS answers mean. Pure.

A target is one of (the forms of `--worker`):
  * `HOST:PORT`: one worker.
  * `dns:///NAME:PORT`, `dns://SERVER[:PORT]/NAME:PORT`: every address of a name, in gRPC's syntax. SERVER is the
    address of a DNS server; by default this machine's servers are asked.
  * `file:PATH`: the workers that a file lists.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

import yaml

from common.limits import DNS_EMPTY_S

DNS: Final = "dns:"
FILE: Final = "file:"
DNS_PORT: Final = 53
FORMS: Final = "host:port, dns:///name:port or file:path"

_ADDRESS: Final = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:\[\]/]+):(?P<port>\d{1,5})")
_DNS_TARGET: Final = re.compile(r"dns:(?://(?P<server>[^/]*)/)?(?P<address>[^/]+)")
_EXAMPLE: Final = "for example 127.0.0.1:50061"


class AddressError(ValueError):
    """An invalid address or list; the message says in one line what would be valid."""


@dataclass(frozen=True, slots=True)
class StaticTarget:
    """One worker, host:port."""

    address: str


@dataclass(frozen=True, slots=True)
class DnsTarget:
    """All addresses of `name`, at `port`. `server` is a DNS server's IP address, "" for this machine's servers."""

    name: str
    port: int
    server: str = ""
    server_port: int = DNS_PORT

    def __str__(self) -> str:
        server = _join(self.server, self.server_port) if self.server else ""
        return f"dns://{server}/{self.name}:{self.port}"


@dataclass(frozen=True, slots=True)
class FileTarget:
    """The workers that a file lists."""

    path: Path

    def __str__(self) -> str:
        return f"{FILE}{self.path}"


Target: TypeAlias = StaticTarget | DnsTarget | FileTarget


def parse_address(text: str) -> str:
    """Checks one `host:port`; IPv6 hosts are in brackets.

    Raises:
        AddressError: it is not an address.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise AddressError(f"{text!r} is not a worker's address; use host:port, {_EXAMPLE}")
    return text


def parse_target(text: str) -> Target:
    """Parses one target.

    Raises:
        AddressError: it is not a target.
    """
    if text.startswith(FILE) and len(text) > len(FILE):
        return FileTarget(Path(text.removeprefix(FILE)))
    if text.startswith(DNS):
        return _dns_target(text)
    try:
        return StaticTarget(parse_address(text))
    except AddressError:
        raise AddressError(f"{text!r} is not a worker's address; use {FORMS}, {_EXAMPLE}") from None


def parse_targets(texts: Iterable[str]) -> tuple[Target, ...]:
    """Parses targets; each text has one, or several separated by commas.

    Raises:
        AddressError: one is not a target or is named twice, or there is none.
    """
    parts = [part.strip() for text in texts for part in text.split(",")]
    targets = tuple(parse_target(part) for part in parts if part)
    twice = [part for part in parts if part and parts.count(part) > 1]
    if twice:
        raise AddressError(f"worker {twice[0]} is named twice")
    if not targets:
        raise AddressError("no worker is named; use --worker host:port or FISSILE_WORKERS")
    return targets


def parse_list(text: str) -> tuple[str, ...]:
    """Parses the addresses in a file: a YAML or JSON list, or one address a line. `[]` is valid, an empty file is not.

    Raises:
        AddressError: the text is not a list of addresses.
    """
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    plain = [line for line in lines if line]
    if plain and all(map(_ADDRESS.fullmatch, plain)):
        return tuple(dict.fromkeys(map(parse_address, plain)))
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise AddressError(f"it is not YAML: {' '.join(str(error).split())}") from None
    items = content.split() if isinstance(content, str) else content
    if not isinstance(items, list):
        raise AddressError("it is not a list of addresses; use a YAML or JSON list, or one host:port a line")
    addresses = [parse_address(item if isinstance(item, str) else repr(item)) for item in items]
    return tuple(dict.fromkeys(addresses))


@dataclass(slots=True)
class KnownAddresses:
    """Addresses that DNS has given for a name; they survive failures and short empty answers.

    Each family (A, AAAA) counts by itself: a failed lookup keeps the family's addresses, and an empty answer removes
    them if the other family has some. If both are empty, the addresses are removed after DNS_EMPTY_S: mostly it is a
    Kubernetes Service between two sets of Pods.

    Args:
        port: port of every worker.
    """

    port: int
    _families: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _empty_since: float | None = None

    @property
    def workers(self) -> tuple[str, ...]:
        """host:port of each worker, sorted, so that the order of an answer does not matter."""
        return tuple(sorted({_join(host, self.port) for hosts in self._families.values() for host in hosts}))

    def learn(self, answers: Mapping[str, Iterable[str] | None], now: float) -> bool:
        """Applies the answers by family, None for a failure; False if no family has addresses.

        Args:
            answers: addresses by family.
            now: monotonic seconds.
        """
        given = {family: tuple(hosts) for family, hosts in answers.items() if hosts is not None}
        if any(given.values()):
            self._empty_since = None
            self._families.update(given)
            return True
        if len(given) < len(answers):
            return False
        self._empty_since = now if self._empty_since is None else self._empty_since
        if now - self._empty_since >= DNS_EMPTY_S:
            self._families.clear()
        return False


def _dns_target(text: str) -> DnsTarget:
    match = _DNS_TARGET.fullmatch(text)
    address = None if match is None else _ADDRESS.fullmatch(match["address"])
    if match is None or address is None or not 1 <= int(address["port"]) <= 65535:
        raise AddressError(f"{text!r} is not a DNS target; use dns:///name:port or dns://server/name:port")
    server, _, port = (match["server"] or "").partition(":")
    if (server and not _is_ip(server)) or (port and not port.isdigit()):
        raise AddressError(f"{text!r} names no DNS server; use its IPv4 address, for example dns://10.0.0.10/name:port")
    return DnsTarget(address["host"], int(address["port"]), server, int(port or DNS_PORT))


def _is_ip(text: str) -> bool:
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
