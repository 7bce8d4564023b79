"""A router asks for snapshots while events and asks are on their way: no gap, and in the end it knows the cache."""

from __future__ import annotations

from collections import deque

import pytest
from fissile.worker.v1 import worker_pb2 as wpb
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from common.limits import KV_EVENTS_S
from router.workers.worker_caches import Continuity, KvEventCursor
from worker.session import cache_events
from worker.session.cache_events import KvCursor, KvLog


class AskMachine(RuleBasedStateMachine):
    """One cursor, one feed, and a wire in each direction on which frames lie for as long as the machine wants."""

    @initialize()
    def begin(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(cache_events, "MAX_KV_FRAME_CHANGES", 2)
        self.log = KvLog(capacity=6)
        self.now = 0.0
        self.present: set[int] = set()
        self.feed = KvEventCursor("i")
        self.dial()

    def teardown(self) -> None:
        self.patch.undo()

    def dial(self) -> None:
        self.up: deque[int] = deque()
        self.down: deque[wpb.KvEvents] = deque()
        if not self.feed.goes_on_with("i"):
            self.feed, self.known = KvEventCursor("i"), set[int]()
        self.feed.open()
        self.cursor = KvCursor(self.log, self.feed.seq, lambda: None)

    @rule(granules=st.lists(st.integers(1, 6), max_size=6))
    def change(self, granules: list[int]) -> None:
        changes = []
        for granule in granules:
            changes.append(~granule if granule in self.present else granule)
            self.present ^= {granule}
        self.log.append(changes)

    @rule()
    def ask(self) -> None:
        # The new placement has an empty index.
        self.known = set()
        self.up.append(self.feed.ask())

    @rule()
    def forget(self) -> None:
        """The stream breaks after a change of placement that the worker has not received."""
        self.known = set()
        self.feed.reset()
        self.dial()

    @rule()
    def break_off(self) -> None:
        self.cursor.close()
        self.dial()

    @rule()
    def worker_reads(self) -> None:
        if self.up:
            self.cursor.restart(self.up.popleft())

    @rule()
    def worker_writes(self) -> None:
        self.now += KV_EVENTS_S
        if (frame := self.cursor.take(self.now)) is not None:
            self.down.append(frame)

    @rule()
    def router_reads(self) -> None:
        if not self.down:
            return
        frame = self.down.popleft()
        continuity = self.feed.accept(frame)
        assert continuity is not Continuity.GAP
        if continuity is Continuity.OUTDATED:
            return
        if frame.snapshot:
            self.known = set()
        assert self.known.isdisjoint(frame.stored), "stored twice"
        self.known |= set(frame.stored)
        assert self.known.issuperset(frame.evicted), "evicted what was not there"
        self.known -= set(frame.evicted)

    @rule()
    def all_arrives(self) -> None:
        while self.up:
            self.worker_reads()
        while self.cursor.due_in(self.now) < float("inf"):
            self.worker_writes()
        while self.down:
            self.router_reads()
        assert (self.known, self.feed.seq) == (self.present, self.log.seq)

    @invariant()
    def what_counts_is_what_was_there(self) -> None:
        if hasattr(self, "feed") and self.feed.seq == self.log.seq:
            assert self.known == (self.present if self.log.seq else set())


AskMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=50)
TestAskMachine = AskMachine.TestCase
