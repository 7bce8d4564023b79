"""The forward context belongs to its thread, and has the KV cache that was registered last on it."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from common.config import Config
from worker.model.forward_context import (
    AttentionMetaData,
    Context,
    KVCacheTensor,
    forward_context,
    get_forward_context,
    reset_forward_context,
    set_forward_context,
    set_kv_cache_data,
)

NONE = np.zeros(1, np.int64)
METADATA = AttentionMetaData(NONE, NONE, NONE.reshape(1, 1), NONE)
CONTEXT = Context(torch.zeros(1, dtype=torch.int64), num_prefill_seqs=0, batch_size=1, graph_bs=1)


def test_forward_pass_has_registered_cache() -> None:
    first, second = {"layers.0": KVCacheTensor(0, "first")}, {"layers.0": KVCacheTensor(0, "second")}
    config = Config()
    for cache in (first, second, first):
        set_kv_cache_data(cache)
        set_forward_context(METADATA, config, CONTEXT)
        now = get_forward_context()
        assert (now.attn_metadata, now.atom_config, now.context) == (METADATA, config, CONTEXT)
        assert now.kv_cache_data is cache
        reset_forward_context()
        with pytest.raises(RuntimeError, match="no forward pass"):
            get_forward_context()
    set_kv_cache_data({})


def test_forward_contexts_are_per_thread() -> None:
    set_kv_cache_data({"layers.0": KVCacheTensor(0, "mine")})
    set_forward_context(METADATA, Config(), CONTEXT)
    seen: list[object] = []

    def other() -> None:
        try:
            get_forward_context()
        except RuntimeError as error:
            seen.append(str(error))
        set_forward_context(METADATA, Config(), CONTEXT)
        seen.append(dict(get_forward_context().kv_cache_data))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == ["no forward pass is in progress", {}]
    assert get_forward_context().kv_cache_data
    reset_forward_context()
    set_kv_cache_data({})


def test_forward_context_ends_with_block() -> None:
    """Even if the pass fails."""
    cache = {"layers.0": KVCacheTensor(0, "mine")}
    with forward_context(METADATA, Config(), CONTEXT, cache):
        assert get_forward_context().kv_cache_data is cache
    with pytest.raises(ZeroDivisionError), forward_context(METADATA, Config(), CONTEXT, cache):
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="no forward pass"):
        get_forward_context()
    set_kv_cache_data({})
