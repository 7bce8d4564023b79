"""Names of KV blocks for the comparison of their contents between workers (docs/operating.md, Audit).

Workers of one numerics class hold the same bytes in blocks of equal prefixes. The hash of a block is no name for that
comparison: two prompts can be made to have the same one, and healthy workers would seem to differ. So a block whose
bytes are digested has a name that is a cryptographic digest of all tokens up to its end. Which blocks are chosen
follows from their own tokens, whatever is before them: all workers choose the same ones.

A cache salt decides who may use a block, not what is in it. So it is in no name: what two tenants have computed of the
same tokens, on two workers or on one, is compared. Who sees a name could therefore find out, by trying, what tokens it
stands for, whatever the salt. That tells them no more than the digest beside it, which no salt has ever changed, but
for less work. So names go to routers alone, which have the prompts; `--hash-seed` is in them, so that nobody can try
who does not know it; and an operator sees a label instead, which means something at one router until it ends.
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
_DOMAIN: Final = b"fissile kv digest 2\n"
NAME_BYTES: Final = 16
_ID_BYTES: Final = array("I").itemsize


def is_chosen(tokens: bytes | bytearray, below: int) -> bool:
    """True if the block with these tokens, packed as uint32, is digested.

    Args:
        tokens: of this block alone.
        below: 2^64 times the share of the blocks that are.
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
