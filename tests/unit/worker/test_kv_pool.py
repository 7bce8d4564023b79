"""The length rule: the length is lowered silently only by default, never a requested one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import Config
from common.errors import InvalidFieldError
from worker.kv_pool import with_pool

BLOCK_BYTES = 1000


def pool(model_len: int = 1024, free: int = 400 * BLOCK_BYTES, **options: Any) -> tuple[int, int]:
    """(blocks, length) for a memory of `free` bytes; a quarter of it, 100 blocks, is the default."""
    config = with_pool(Config(**options), model_len, BLOCK_BYTES, free)
    return config.num_kvcache_blocks, config.max_model_len


def test_model_length_is_lowered_to_cache_size() -> None:
    assert pool(model_len=1600) == (100, 1600)
    assert pool(model_len=1601) == (100, 1600)
    assert pool(model_len=9999, kv_cache_memory=7 * BLOCK_BYTES) == (7, 112)


def test_requested_length_enlarges_default_cache() -> None:
    assert pool(model_len=9999, max_model_len=3200) == (200, 3200)
    with pytest.raises(InvalidFieldError, match="at most 6400: the free memory"):
        pool(model_len=9999, max_model_len=6401)


def test_both_set_and_contradictory_is_refused() -> None:
    assert pool(max_model_len=112, kv_cache_memory=7 * BLOCK_BYTES) == (7, 112)
    with pytest.raises(InvalidFieldError, match="at most 112: the KV cache"):
        pool(max_model_len=113, kv_cache_memory=7 * BLOCK_BYTES)
    with pytest.raises(InvalidFieldError, match="at most 80: the KV cache"):
        pool(max_model_len=113, num_kvcache_blocks=5)


def test_length_beyond_model_maximum_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match="model's own 1024"):
        pool(max_model_len=1025)


def test_pool_without_blocks_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match="kv_cache_memory"):
        pool(kv_cache_memory=999)


def test_no_more_blocks_than_the_running_set_can_hold() -> None:
    assert pool(model_len=32, max_num_seqs=3) == (6, 32)
    assert pool(model_len=32, max_num_seqs=3, num_kvcache_blocks=50) == (50, 32)


@given(
    st.integers(1, 5000), st.integers(0, 5000), st.integers(0, 300), st.integers(1, 1000), st.sampled_from([1, 16, 32])
)
def test_pool_holds_longest_sequence(model_len: int, asked: int, memory: int, free: int, size: int) -> None:
    config = Config(max_model_len=asked, kv_cache_memory=memory, kv_cache_block_size=size)
    try:
        sized = with_pool(config, model_len, 3, free)
    except InvalidFieldError:
        return
    assert 1 <= sized.max_model_len <= sized.num_kvcache_blocks * size
    assert sized.max_model_len <= model_len
    assert asked in (0, sized.max_model_len)
    if not asked:
        assert sized.num_kvcache_blocks * 3 <= (memory or free)


def test_max_model_len_up_to_scaled_length_is_accepted() -> None:
    """Qwen3's model card allows four times the length; without an option the model's own length applies."""
    sized = partial(with_pool, model_len=640, block_bytes=1000, free_bytes=10**6, longest=2048)
    assert sized(Config()).max_model_len == 640
    assert sized(Config(max_model_len=2048)).max_model_len == 2048
    with pytest.raises(InvalidFieldError, match="at most with the model's rope scaling 2048"):
        sized(Config(max_model_len=2049))
