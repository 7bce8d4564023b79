"""Hashes of KV blocks: the chain that routers and workers compute alike (docs/explanation/determinism.md).

A hash is a hint. The router routes by it; a worker finds a block by it and then compares tokens and parent. xxh64 is
not collision-resistant, so equal hashes alone prove nothing.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np
import xxhash

# Blocks per granule. Routers learn the contents of caches in granules; the hash of a granule's last block names it.
GRANULE_BLOCKS: Final = 8
_ROOT_DOMAIN = b"fissile.kv/1"


def compute_hash(token_ids: Sequence[int], prefix: int | None = None, seed: int = 0) -> int:
    """Hash of one full block: xxh64(LE64(prefix) || token ids as little-endian int64).

    The chain of vLLM and nano-vLLM with `seed` 0; "no prefix" is None, never -1.

    Args:
        token_ids: the block's tokens, each in [0, 2^63).
        prefix: hash of the block before it, or the root; None for the first block without salt and adapter.
        seed: fleet-wide hash seed.

    Returns:
        The hash, a uint64.
    """
    return _hash(_little_endian(token_ids), prefix, seed)


def hash_chain(token_ids: Sequence[int], block_size: int, *, root: int | None = None, seed: int = 0) -> list[int]:
    """Hashes of the full blocks of `token_ids`, each chained to the one before it; a partial last block has none.

    The tokens are converted once for the whole prompt; per block only a slice is hashed.

    Args:
        token_ids: the prompt; an array of unsigned numbers is converted without a loop over its items.
        block_size: tokens per block.
        root: parent of the first block (`salt_root`, or the last hash of a chain that is being continued).
        seed: fleet-wide hash seed.
    """
    data = _little_endian(token_ids)
    width = 8 * block_size
    hashes: list[int] = []
    parent = root
    for start in range(0, len(data) - width + 1, width):
        parent = _hash(data[start : start + width], parent, seed)
        hashes.append(parent)
    return hashes


def salt_root(model_digest: bytes, adapter_digest: bytes = b"", cache_salt: bytes = b"", seed: int = 0) -> int | None:
    """Parent hash of the first block; None without salt and adapter.

    Two salts whose roots collide still share nothing: the worker compares (adapter, salt) as a whole.
    """
    if not adapter_digest and not cache_salt:
        return None
    data = _ROOT_DOMAIN + model_digest + adapter_digest + struct.pack("<I", len(cache_salt)) + cache_salt
    return xxhash.xxh64_intdigest(data, seed)


def _little_endian(token_ids: Sequence[int]) -> bytes:
    # The width is fixed here: np.array(...).tobytes() would depend on the platform's int.
    if isinstance(token_ids, array):
        return np.frombuffer(token_ids, dtype=f"u{token_ids.itemsize}").astype("<i8").tobytes()
    words = array("q", token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _hash(tokens: bytes, prefix: int | None, seed: int) -> int:
    return xxhash.xxh64_intdigest(tokens if prefix is None else prefix.to_bytes(8, "little") + tokens, seed)
