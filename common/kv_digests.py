"""Names of KV blocks for the comparison of their contents between workers (docs/operating.md, Audit).

Workers of one numerics class hold the same bytes in blocks of equal prefixes. The hash of a block is no name for that
comparison: two prompts can be made to have the same one, and healthy workers would seem to differ. So a block whose
bytes are digested has a name that is a cryptographic digest of all tokens up to its end. Which blocks are chosen
follows from their own tokens, whatever is before them: all workers choose the same ones, and a prompt that is computed
again under another salt has the same ones chosen.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterator
from typing import Final

import xxhash

# Of names; a change of the layout of KV blocks in memory, or of what digests them, needs another number, since workers
# of both versions may serve at once.
_DOMAIN: Final = b"fissile kv digest 1\n"
NAME_BYTES: Final = 16
_ID_BYTES: Final = array("I").itemsize


def is_chosen(tokens: bytes | bytearray, below: int) -> bool:
    """True if the block with these tokens, packed as uint32, is digested.

    Args:
        tokens: of this block alone.
        below: 2^64 times the share of the blocks that are.
    """
    return xxhash.xxh64_intdigest(tokens) < below


def block_name(prefix: bytes | bytearray | memoryview, cache_salt: bytes, block_size: int) -> bytes:
    """Name of the block at the end of a prefix.

    Args:
        prefix: all tokens up to the block's end, packed as uint32.
        cache_salt: of the sequence.
        block_size: tokens per block.
    """
    digest = _begun(cache_salt, block_size)
    digest.update(prefix)
    return digest.digest()


def block_names(token_ids: array[int], cache_salt: bytes, block_size: int) -> Iterator[bytes]:
    """Names of the full blocks of a sequence, in order."""
    digest, packed, width = _begun(cache_salt, block_size), token_ids.tobytes(), _ID_BYTES * block_size
    for start in range(0, len(packed) - width + 1, width):
        digest.update(packed[start : start + width])
        yield digest.digest()


def _begun(cache_salt: bytes, block_size: int) -> hashlib.blake2b:
    head = struct.pack("<II", block_size, len(cache_salt))
    return hashlib.blake2b(_DOMAIN + head + cache_salt, digest_size=NAME_BYTES)
