"""A prompt goes to the worker whose cache has most of it, and the index stays within its bounds."""

from __future__ import annotations

import gc
import os
import random
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from common.delay_gate import DelayGate
from common.limits import EXPECTED_S
from router.scheduling.placement import CacheChange, PrefixAware
from router.scheduling.prefix_index import BYTES_PER_ENTRY, PrefixIndex
from router.scheduling.queued_request import QueuedRequest
from router.scheduling.worker_load import LoadReport
from tests.unit.router.scheduling.dispatching import make_dispatcher

GRANULE_TOKENS = 128
MIB = 1 << 20


class LruCache:
    """The cache of one worker, by brute force."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.granules: OrderedDict[int, None] = OrderedDict()

    def depth(self, prompt: list[int]) -> int:
        return next((i for i, granule in enumerate(prompt) if granule not in self.granules), len(prompt))

    def serve(self, prompt: list[int]) -> CacheChange:
        """Uses and computes a prompt; a prefix is evicted after its continuations."""
        stored = [granule for granule in prompt if granule not in self.granules]
        for granule in reversed(prompt):
            self.granules[granule] = None
            self.granules.move_to_end(granule)
        evicted = []
        while len(self.granules) > self.capacity:
            evicted.append(self.granules.popitem(last=False)[0])
        return CacheChange([g for g in stored if g in self.granules], [g for g in evicted if g not in stored])


def random_prompt(rnd: random.Random) -> list[int]:
    """Granules of a prompt from a tree: each identifies its whole prefix."""
    prompt: list[int] = []
    for _ in range(rnd.randrange(1, 30)):
        branch = rnd.choice((0, 0, 0, 1)) if prompt else rnd.randrange(6)
        prompt.append(hash((prompt[-1] if prompt else 0, branch)) & (2**64 - 1) or 1)
    return prompt


def test_prefix_aware_choice_equals_lru_oracle() -> None:
    rnd = random.Random(5)
    dispatcher = make_dispatcher(DelayGate(0.0), PrefixAware(1 << 12))
    idle = LoadReport(0.0, 0, 0, 0, 100_000, 100, prefill_rate=10_000.0)
    caches = {f"w{i}": LruCache(60) for i in range(5)}
    for worker in caches:
        dispatcher.lane_up(worker, "m", idle, 0.0)
    hits = 0
    for key in range(500):
        now = key * (EXPECTED_S + 0.1)
        for worker in caches:
            dispatcher.report(worker, LoadReport(now, 0, 0, 0, 100_000, 100, 0.0, 10_000.0, submit_seen=10**9))
        prompt = random_prompt(rnd)
        depths = {worker: cache.depth(prompt) for worker, cache in caches.items()}
        tokens = len(prompt) * GRANULE_TOKENS + 1
        dispatcher.arrive(QueuedRequest(key, "m", tokens, now, granules=prompt, granule_tokens=GRANULE_TOKENS), now)
        (release,) = dispatcher.decide(now)
        assert depths[release.worker] == max(depths.values())
        assert release.requests[0].work == tokens - max(depths.values()) * GRANULE_TOKENS
        hits += max(depths.values()) > 0
        dispatcher.assignment.placement.cache_changed(release.worker, caches[release.worker].serve(prompt))
    assert 100 < hits < 500


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_prefix_index_is_bounded_under_a_million_prefixes() -> None:
    rnd, batch = np.random.default_rng(1), 4096
    before = resident_bytes()
    index = PrefixIndex(1 << 17)
    for i in range(16):
        index.add_worker(f"w{i}")
    for i in range(1_000_000 // batch + 1):
        names = rnd.integers(1, 2**64, batch, np.uint64).tolist()
        index.store(f"w{i % 16}", names)
        for first in range(0, 100, 4):
            index.expect(f"w{i % 16}", names[first : first + 4], now=i / 100)
    assert index.nbytes == BYTES_PER_ENTRY << 17
    assert len(index) == index.capacity == 1 << 17
    # Expected prefixes are in dictionaries: here those of the last 2 s, 25 prompts per 10 ms.
    marks = sum(map(len, index._expected._until.values()))
    assert marks <= 201 * 25 * 4
    assert resident_bytes() - before < index.nbytes + marks * 400 + 8 * MIB
