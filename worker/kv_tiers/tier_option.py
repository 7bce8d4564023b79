"""The option `--kv-tiers`: reads it, and opens the tiers that it names."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from common.errors import InvalidFieldError
from common.params.options.types import ByteSize
from worker.kv_tiers.memory_tier import MemoryTier
from worker.kv_tiers.mooncake_tier import MooncakeTier, read_settings
from worker.kv_tiers.shared_tiers import FileTier, RedisTier
from worker.kv_tiers.tiers import HEADER_BYTES, KvTier

VALID: Final = (
    "memory:SIZE, files:FOLDER:SIZE, mooncake://MASTER:PORT?segment=SIZE and redis://HOST:PORT/DATABASE, each at most "
    "once, with commas between"
)
_ORDER: Final = ("memory", "files", "mooncake", "redis")
_FILES: Final = re.compile(r"(.+):([^:]+)")
# Kinds of tiers by the schemes of URLs that differ from them.
_KINDS: Final = {"rediss": "redis"}
# Hex digits of a place's digest.
_DIGITS: Final = 16

# Opens a tier for blocks of a number of bytes.
_Open = Callable[[int], KvTier]


def check_tiers(text: str) -> None:
    """Checks the text of the option.

    Raises:
        InvalidFieldError: it names an unknown tier, one twice, a wrong size, or a store whose client is missing.
    """
    _parts(text)


def is_shared(text: str) -> bool:
    """True if the option names a tier that several workers can use."""
    return not _parts(text).keys() <= {"memory"}


def shared_stores(text: str) -> tuple[str, ...]:
    """The tiers that several workers can use, each as its kind and a digest of its place, such as `redis:1f0a...`.

    The digest has neither user nor password. Tiers are equal if their options name the same place in the same words; a
    slash at the end makes no difference.
    """
    stores = []
    for part in filter(None, (each.strip() for each in text.split(","))):
        kind, _, rest = part.partition(":")
        url = urlsplit(part)
        path = url.path.rstrip("/")
        place = f"{url.hostname}:{url.port}{path}" if url.netloc else str(Path(rest.rpartition(":")[0]).absolute())
        if kind != "memory":
            stores.append(f"{_KINDS.get(kind, kind)}:{hashlib.sha256(place.encode()).hexdigest()[:_DIGITS]}")
    return tuple(stores)


def open_tiers(text: str, block_bytes: int) -> dict[str, KvTier]:
    """The tiers that the option names, in the order: memory, files, Mooncake, Redis.

    Args:
        text: of the option.
        block_bytes: of a KV block.

    Raises:
        InvalidFieldError: as `check_tiers`; or a tier cannot be opened, or has no room for a block.
    """
    parts = _parts(text)
    try:
        return {kind: parts[kind](block_bytes) for kind in _ORDER if kind in parts}
    except OSError as error:
        raise InvalidFieldError("kv_tiers", f"cannot be opened: {error}", "a folder that can be written") from None


def _parts(text: str) -> dict[str, _Open]:
    """Openers of the named tiers."""
    parts: dict[str, _Open] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        kind, opens = _read(part)
        if kind in parts:
            raise InvalidFieldError("kv_tiers", f"names {kind} twice", VALID)
        parts[kind] = opens
    return parts


def _read(part: str) -> tuple[str, _Open]:
    kind, _, rest = part.partition(":")
    if kind in ("redis", "rediss"):
        server = RedisTier(part)
        return "redis", lambda block_bytes: server
    if kind == "mooncake":
        settings = read_settings(part)
        return kind, lambda block_bytes: MooncakeTier(settings, HEADER_BYTES + block_bytes)
    try:
        if kind == "memory":
            size = ByteSize().read(rest)
            return "memory", lambda block_bytes: MemoryTier(_room(size, block_bytes), HEADER_BYTES + block_bytes)
        if kind == "files" and (match := _FILES.fullmatch(rest)):
            folder, most = Path(match[1]), ByteSize().read(match[2])
            return "files", lambda block_bytes: FileTier(folder, _room(most, block_bytes))
    except ValueError as error:
        raise InvalidFieldError("kv_tiers", str(error), VALID) from None
    # A URL of another store may hold a password, so the error shows the kind alone.
    raise InvalidFieldError("kv_tiers", f"names {kind!r}", VALID)


def _room(size: int, block_bytes: int) -> int:
    """The size of a tier that has room for blocks.

    Raises:
        InvalidFieldError: it has room for none.
    """
    least = 2 * (HEADER_BYTES + block_bytes)
    if size < least:
        raise InvalidFieldError("kv_tiers", f"has a tier of {size} bytes", f"at least two blocks, {least}")
    return size
