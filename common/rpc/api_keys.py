"""API keys of callers: makes them, reads the lines that store them, and finds a shown key. Pure.

A key is 256 random bits, so a plain SHA-256 is as safe to store as a slow hash: nobody can guess keys. A key is looked
up by its digest and compared in constant time. Invariant: no object here holds a key, and no error quotes one.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from common.limits import MAX_API_KEYS, MAX_TENANT_BYTES
from common.params.names import PRIORITIES

PREFIX: Final = "fsl_"
LINE_FORM: Final = "NAME:TENANT:ROLE[,ROLE...]:SHA256[:max-priority=PRIORITY]"
_MAX_PRIORITY: Final = "max-priority="
_NAME = re.compile(rf"[A-Za-z0-9_.@/-]{{1,{MAX_TENANT_BYTES}}}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Role(enum.StrEnum):
    """Permission of a key: which methods it may call."""

    INFER = "infer"
    """Generate, Chat, and what goes with them."""
    ADMIN_READ = "admin-read"
    """Looking at the fleet."""
    ADMIN_WRITE = "admin-write"
    """Changing it: drain, flush, routing."""


class KeyFileError(Exception):
    """Keys that cannot be used. The message is one line that names the place and the problem."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One stored API key: its owner, its permissions and its digest.

    Attributes:
        name: owner, for logs.
        tenant: tenant of its calls; "" lets the call's metadata name the tenant.
        roles: permissions.
        sha256: digest of the key, 64 hex digits.
        max_priority: name of the highest priority class of its calls; "" leaves that to the router's options.
    """

    name: str
    tenant: str
    roles: frozenset[Role]
    sha256: str
    max_priority: str = ""

    def line(self) -> str:
        """The line that stores the key in a file."""
        limit = (f"{_MAX_PRIORITY}{self.max_priority}",) if self.max_priority else ()
        return ":".join((self.name, self.tenant, ",".join(sorted(self.roles)), self.sha256, *limit))


def new_key(name: str, tenant: str, roles: Iterable[Role], max_priority: str = "") -> tuple[str, ApiKey]:
    """Makes a key. Returns the key, which is stored nowhere, and its stored form.

    Raises:
        KeyFileError: the name has characters that a key file cannot hold.
    """
    _check_names(name, tenant, "the new key")
    key = PREFIX + secrets.token_urlsafe(32)
    return key, ApiKey(name, tenant, frozenset(roles), digest_of(key), max_priority)


def digest_of(key: str) -> str:
    """SHA-256 of a key, hex."""
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()


def parse_line(line: str, place: str) -> ApiKey:
    """Reads one line of a key file (LINE_FORM). The tenant may be empty.

    Raises:
        KeyFileError: the line is malformed; the message begins with `place`.
    """
    parts = line.split(":")
    if len(parts) not in (4, 5):
        raise KeyFileError(f"{place} is not a key; a line is {LINE_FORM}")
    name, tenant, roles, sha256 = parts[:4]
    _check_names(name, tenant, place)
    known = {role.value: role for role in Role}
    unknown = [role for role in roles.split(",") if role not in known]
    if unknown:
        raise KeyFileError(f"{place}: role {unknown[0]!r}; allowed: {', '.join(known)}")
    if _DIGEST.fullmatch(sha256) is None:
        raise KeyFileError(f"{place}: no SHA-256 in 64 lower-case hex digits; `fissile keys new` prints the line")
    max_priority = _read_max_priority(parts[4], place) if len(parts) == 5 else ""
    return ApiKey(name, tenant, frozenset(known[role] for role in roles.split(",")), sha256, max_priority)


def _read_max_priority(text: str, place: str) -> str:
    name = text.removeprefix(_MAX_PRIORITY)
    if name == text or name not in PRIORITIES:
        allowed = ", ".join(_MAX_PRIORITY + name for name in PRIORITIES)
        raise KeyFileError(f"{place}: {text!r} after the SHA-256; allowed: {allowed}")
    return name


def _check_names(name: str, tenant: str, place: str) -> None:
    for what, text in (("name", name), ("tenant", tenant or "-")):
        if _NAME.fullmatch(text) is None:
            allowed = f"1 to {MAX_TENANT_BYTES} letters, digits and _ . @ / -"
            raise KeyFileError(f"{place}: {what} {text!r}; allowed: {allowed}")


class KeyRing:
    """The API keys in force, with different names and digests."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._by_digest: Mapping[str, ApiKey] = {key.sha256: key for key in keys}

    def __len__(self) -> int:
        return len(self._by_digest)

    def find(self, key: str) -> ApiKey | None:
        """The entry of a key; None if the key is unknown."""
        digest = digest_of(key)
        found = self._by_digest.get(digest)
        return found if found is not None and hmac.compare_digest(found.sha256, digest) else None


def parse_keys(lines: Iterable[str], place: str) -> list[ApiKey]:
    """Reads the lines of a key file; skips empty lines and lines that begin with #.

    Raises:
        KeyFileError: a line is malformed or repeated, or the file has no keys or too many.
    """
    keys: list[ApiKey] = []
    names: set[str] = set()
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        key = parse_line(text, f"{place}, line {number}")
        if key.name in names or key.sha256 in names:
            raise KeyFileError(f"{place}, line {number}: name {key.name!r} or its key stands there twice")
        names.update((key.name, key.sha256))
        keys.append(key)
    if not 1 <= len(keys) <= MAX_API_KEYS:
        raise KeyFileError(f"{place} holds {len(keys)} keys; allowed: 1 to {MAX_API_KEYS}")
    return keys
