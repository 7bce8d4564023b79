"""Names of KV blocks for comparing their contents between workers (docs/explanation/audit.md).

Workers of one numerics class hold the same bytes in blocks of equal prefixes. A block's hash cannot name it in that
comparison: an attacker can make two prompts with the same hash, and healthy workers would seem to differ. So a digested
block is named by a cryptographic digest of all tokens up to its end. Which blocks are digested follows from their own
tokens alone, so all workers choose the same ones.

A cache salt decides who may use a block, not what is in it. So names do not contain it, and blocks of two tenants with
the same tokens are compared. Somebody who sees a name could therefore guess its tokens by trial, whatever the salt. The
block's digest allows that too, with more work. So names go to routers alone, which have the prompts; they contain
`--hash-seed`, so that outsiders cannot try; and operators see a label, which is valid at one router until it ends.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterator
from typing import Final

import xxhash

# Domain of the names. A change of the KV blocks' layout in memory, or of the digested data, needs another number,
# because workers of both versions may serve at once.
_DOMAIN: Final = b"fissile kv digest 2\n"
NAME_BYTES: Final = 16
_ID_BYTES: Final = array("I").itemsize


def is_chosen(tokens: bytes | bytearray, below: int) -> bool:
    """True if the block with these tokens is digested.

    Args:
        tokens: of this block alone, packed as uint32.
        below: 2^64 times the share of blocks that are digested.
    """
    return xxhash.xxh64_intdigest(tokens) < below


def block_name(prefix: bytes | bytearray | memoryview, block_size: int, hash_seed: int) -> bytes:
    """Name of the block at the end of a prefix.

    Args:
        prefix: all tokens up to the block's end, packed as uint32.
        block_size: tokens per block.
        hash_seed: fleet-wide seed of the block hashes.
    """
    digest = _begun(block_size, hash_seed)
    digest.update(prefix)
    return digest.digest()


def block_names(token_ids: array[int], block_size: int, hash_seed: int) -> Iterator[bytes]:
    """Names of the full blocks of a sequence, in order."""
    digest, packed, width = _begun(block_size, hash_seed), token_ids.tobytes(), _ID_BYTES * block_size
    for start in range(0, len(packed) - width + 1, width):
        digest.update(packed[start : start + width])
        yield digest.digest()


def _begun(block_size: int, hash_seed: int) -> hashlib.blake2b:
    return hashlib.blake2b(_DOMAIN + struct.pack("<IQ", block_size, hash_seed), digest_size=NAME_BYTES)
