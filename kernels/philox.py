"""Philox4x32-10, the counter-based random numbers of Random123 (Salmon et al., SC 2011), in numpy.

The word of a token depends only on (seed, position, choice, token id), so any rank, shard or batch computes the same
one, in any order (docs/explanation/determinism.md).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# "FSL1", the fourth counter word: a new version of the sampling rules changes it.
DOMAIN = 0x46534C31

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_ROUNDS = 10

Words = npt.NDArray[np.uint64]


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Ten rounds of Philox4x32.

    Args:
        counter: four arrays of 32-bit words held in uint64, of shapes that broadcast.
        key: two such arrays.

    Returns:
        Four arrays of random 32-bit words, held in uint64.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            (product_1 >> _32) ^ c1 ^ k0,
            product_1 & _LOW,
            (product_0 >> _32) ^ c3 ^ k1,
            product_0 & _LOW,
        )
        k0 = (k0 + np.uint64(_WEYL_0)) & _LOW
        k1 = (k1 + np.uint64(_WEYL_1)) & _LOW
    return c0, c1, c2, c3


def _words(blocks: Words, seeds: Words, positions: Words, choices: Words) -> tuple[Words, ...]:
    domain = np.full((1,) * blocks.ndim, DOMAIN, np.uint64)
    return philox4x32((blocks, positions & _LOW, choices & _LOW, domain), (seeds & _LOW, seeds >> _32))


def all_token_words(vocab_size: int, seeds: Words, positions: Words, choices: Words) -> Words:
    """The random words of every token: uint64 [S, vocab_size], for uint64 arrays [S]."""
    blocks = np.arange(-(-vocab_size // 4), dtype=np.uint64)[None, :]
    words = _words(blocks, seeds[:, None], positions[:, None], choices[:, None])
    return np.stack(words, axis=-1).reshape(len(seeds), -1)[:, :vocab_size]


def token_words(token_ids: npt.NDArray[np.int64], seeds: Words, positions: Words, choices: Words) -> Words:
    """The random word of each token id: uint64 [N], for arrays [N]; seed, position and choice are given per id."""
    ids = token_ids.astype(np.uint64)
    words = np.stack(_words(ids >> np.uint64(2), seeds, positions, choices))
    return np.asarray(words[(token_ids & 3), np.arange(len(ids))])
