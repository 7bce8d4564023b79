"""Messages of calls by their kinds."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from google.protobuf.message import Message

from fissile.v1 import inference_pb2 as pb

T = TypeVar("T")
# Metadata that says when a call was sent.
REQUEST_START = "x-request-start"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
Request: TypeAlias = "pb.GenerateRequest | pb.ChatRequest"
Response: TypeAlias = "pb.GenerateResponse | pb.ChatResponse"
# Metadata as gRPC takes it: pairs of name and value.
SentMetadata: TypeAlias = "tuple[tuple[str, str | bytes], ...]"


@dataclass(frozen=True, slots=True)
class Unary(Generic[T]):
    """A call with one answer: the method's name, its request, and a function that reads the answer."""

    method: str
    request: Message
    made_of: Callable[[Any], T]


@functools.cache
def clock_name() -> str:
    """Name of this machine's clock, which all processes of its kernel share; "" if the system has none.

    A digest of the kernel's boot id. The id itself would name the machine to every router.
    """
    try:
        return hashlib.sha256(b"fissile " + _BOOT_ID.read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def started(unix_s: float) -> tuple[tuple[str, str], ...]:
    """Metadata of a call that was sent at a time of this machine's clock; empty if that clock has no name.

    Routers with another clock leave it out.
    """
    return ((REQUEST_START, f"t={unix_s:.6f};clock={clock_name()}"),) if clock_name() else ()


def with_start(metadata: SentMetadata, unix_s: float) -> SentMetadata:
    """The metadata of a call that is sent now, with that time unless it has one."""
    has_start = any(name == REQUEST_START for name, _ in metadata)
    return metadata if has_start else (*metadata, *started(unix_s))
