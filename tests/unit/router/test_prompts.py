"""Prompts: what the event loop is spared."""

from __future__ import annotations

import os
import sys
import threading
from array import array
from concurrent.futures import ThreadPoolExecutor

import pytest
from fissile.v1 import inference_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st

from router.prompts import TEXT_THREAD_NICE, _compact, yield_to_loop


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_token_ids_become_compact_from_a_list_and_from_a_message(ids: list[int]) -> None:
    assert _compact(ids) == _compact(pb.TokenIds(ids=ids).ids) == array("I", ids)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux")
def test_text_threads_yield_and_the_others_do_not() -> None:
    def own_nice() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = own_nice()
    with ThreadPoolExecutor(1, initializer=yield_to_loop) as pool:
        assert pool.submit(own_nice).result() == min(19, before + TEXT_THREAD_NICE)
    assert own_nice() == before
