"""Digest of delivered tokens, which the router that adopts a sequence and its worker compare."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Final

DIGEST_BYTES: Final = 16


def delivered_digest(token_ids: Sequence[int]) -> bytes:
    """Digest of generated tokens, which adopter and worker compare."""
    return hashlib.blake2b(array("I", token_ids).tobytes(), digest_size=DIGEST_BYTES).digest()
