"""The chain equals compute_hash block by block, and a salt changes every hash."""

from __future__ import annotations

from array import array

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from common.wire.block_hash import compute_hash, hash_chain, salt_root

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=70)
SEEDS = st.integers(0, 2**64 - 1)


def guides_compute_hash(token_ids: list[int], prefix: int = -1) -> int:
    """The guide's compute_hash, on a platform with 64-bit integers."""
    h = xxhash.xxh64()
    if prefix != -1:
        h.update(prefix.to_bytes(8, "little"))
    h.update(np.array(token_ids, dtype=np.int64).tobytes())
    return int(h.intdigest())


def test_known_answers() -> None:
    first = compute_hash([1, 2, 3, 4])
    assert first == guides_compute_hash([1, 2, 3, 4])
    assert compute_hash([5, 6, 7, 8], first) == guides_compute_hash([5, 6, 7, 8], first)
    assert compute_hash([1, 2, 3, 4], 0) != first  # a prefix of 0 is a prefix
    assert compute_hash([]) == 0xEF46DB3751D8E999  # xxh64 of nothing


@given(TOKENS, st.integers(1, 17), st.one_of(st.none(), SEEDS), SEEDS)
def test_chain_is_compute_hash_block_by_block(tokens: list[int], size: int, root: int | None, seed: int) -> None:
    parent, expected = root, []
    for i in range(0, len(tokens) - size + 1, size):
        parent = compute_hash(tokens[i : i + size], parent, seed)
        expected.append(parent)
    assert hash_chain(tokens, size, root=root, seed=seed) == expected
    for kind in "IqQ":
        assert hash_chain(array(kind, tokens), size, root=root, seed=seed) == expected


@given(TOKENS, st.integers(1, 5), st.integers(0, 70))
def test_hash_chain_can_be_continued(tokens: list[int], size: int, cut: int) -> None:
    whole = hash_chain(tokens, size)
    border = min(cut, len(whole))
    parent = whole[border - 1] if border else None
    assert whole[:border] + hash_chain(tokens[border * size :], size, root=parent) == whole


def test_roots() -> None:
    assert salt_root(b"model") is None
    roots = {
        salt_root(b"model", cache_salt=b"a"),
        salt_root(b"model", cache_salt=b"b"),
        salt_root(b"model", adapter_digest=b"a"),
        salt_root(b"other", cache_salt=b"a"),
        salt_root(b"model", cache_salt=b"a", seed=1),
    }
    assert len(roots) == 5
    assert salt_root(b"m", b"ad", b"salt", 7) == xxhash.xxh64_intdigest(b"fissile.kv/1mad\x04\x00\x00\x00salt", 7)
    assert not set(hash_chain([1] * 8, 4)) & set(hash_chain([1] * 8, 4, root=salt_root(b"model", cache_salt=b"a")))
