"""Keys of sequences that outlive their router; another router adopts them by key (docs/explanation/architecture.md,
S12).

An answer is a function of its request, so a key is a digest of everything that the answer depends on, and of its owner.
A router that has the same request makes the same key; without the request and its id the key cannot be made. Pure.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from typing import Final, Protocol

from fissile.worker.v1 import worker_pb2 as wpb

# A change of the digested data needs another number, because routers of two versions serve at once.
_DOMAIN: Final = b"fissile adoption 1\n"
KEY_BYTES: Final = 16
_OF_THE_ATTEMPT: Final = ("rid", "traceparent", "tracestate", "keep", "deadline_left_ms", "adoption_key")


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...

    def digest(self) -> bytes: ...

    def copy(self) -> _Hash: ...


class AdoptionKeys:
    """Adoption keys of the answers to one request.

    Args:
        tenant: of the request.
        request_id: of the request.
        model: identity of the model that answers.
        token_ids: the prompt, uint32.
    """

    def __init__(self, tenant: str, request_id: str, model: str, token_ids: array[int]) -> None:
        self._of_request: _Hash = hashlib.blake2b(_DOMAIN, digest_size=KEY_BYTES)
        for part in (tenant.encode(), request_id.encode(), model.encode(), token_ids.tobytes()):
            # Each part follows its length, so that two different requests never give the same bytes.
            self._of_request.update(struct.pack("<Q", len(part)))
            self._of_request.update(part)

    def of_answer(self, record: wpb.SubmitSequence) -> bytes:
        """The key of one answer: a digest of its record without the fields that differ between attempts."""
        kept = wpb.SubmitSequence()
        kept.CopyFrom(record)
        for name in _OF_THE_ATTEMPT:
            kept.ClearField(name)
        one = self._of_request.copy()
        one.update(kept.SerializeToString(deterministic=True))
        return one.digest()
