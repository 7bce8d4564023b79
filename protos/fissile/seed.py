"""The seed of a request that names none (docs/explanation/determinism.md)."""

from __future__ import annotations

import hashlib


def derive_seed(request_id: str) -> int:
    """The uint64 seed that router and LLMEngine give a request without one: first 8 bytes of blake2b, little endian.

    The same `request_id` gives the same stream again, also on another router after the first one died.
    """
    return int.from_bytes(hashlib.blake2b(request_id.encode()).digest()[:8], "little")
