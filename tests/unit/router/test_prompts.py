"""Prompts: what the event loop is spared."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from array import array
from concurrent.futures import ThreadPoolExecutor

import pytest
from fissile.v1 import inference_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st

from common.limits import TOKENIZE_THREADS
from router.prompts import LONG_TEXT, LONG_TEXT_NICE, PromptEncoder, _compact, yield_to_loop


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_token_ids_become_compact_from_a_list_and_from_a_message(ids: list[int]) -> None:
    assert _compact(ids) == _compact(pb.TokenIds(ids=ids).ids) == array("I", ids)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux")
def test_text_threads_yield_and_the_others_do_not() -> None:
    def own_nice() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = own_nice()
    with ThreadPoolExecutor(1, initializer=yield_to_loop) as pool:
        assert pool.submit(own_nice).result() == min(19, before + LONG_TEXT_NICE)
    assert own_nice() == before


async def test_a_short_text_does_not_wait_behind_long_ones() -> None:
    encoder, end = PromptEncoder(), threading.Event()
    long = [asyncio.create_task(encoder._run(end.wait, LONG_TEXT + 1)) for _ in range(2 * TOKENIZE_THREADS)]
    try:
        assert await asyncio.wait_for(encoder._run(lambda: "done", LONG_TEXT), 60) == "done"
        assert not any(task.done() for task in long)
    finally:
        end.set()
        await asyncio.gather(*long)
        encoder.close()
