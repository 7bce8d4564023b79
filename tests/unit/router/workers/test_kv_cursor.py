"""KvEventCursor: the frames of KV events that continue its state, and the state in the next Hello."""

from __future__ import annotations

from fissile.worker.v1 import worker_pb2 as wpb

from router.workers.worker_caches import Continuity, KvEventCursor

NEXT, OUTDATED, GAP = Continuity


def test_kv_events_continue_in_sequence() -> None:
    feed = KvEventCursor("i")
    assert feed.accept(wpb.KvEvents(seq=3, stored=[1, 2, 3])) is NEXT
    assert feed.accept(wpb.KvEvents(seq=5, after=3, evicted=[1])) is NEXT
    assert (feed.seq, feed.goes_on_with("i"), feed.goes_on_with("j")) == (5, True, False)
    assert feed.accept(wpb.KvEvents(seq=9, after=7, stored=[4])) is GAP
    assert (feed.seq, feed.goes_on_with("i")) == (0, False)


def test_kv_snapshot_counts_when_complete() -> None:
    feed = KvEventCursor("i")
    assert feed.accept(wpb.KvEvents(seq=4, stored=[9])) is NEXT
    assert feed.accept(wpb.KvEvents(seq=8, stored=[1, 2], snapshot=True, left=3)) is NEXT
    assert feed.seq == 0
    assert feed.accept(wpb.KvEvents(seq=8, after=8, stored=[3, 4], left=1)) is NEXT
    assert feed.seq == 0
    assert feed.accept(wpb.KvEvents(seq=8, after=8, stored=[5])) is NEXT
    assert feed.seq == 8
    assert feed.accept(wpb.KvEvents(seq=9, after=8, evicted=[5])) is NEXT


def test_lost_snapshot_piece_is_a_gap() -> None:
    for late in (
        wpb.KvEvents(seq=8, after=8, stored=[5]),
        wpb.KvEvents(seq=11, after=8, stored=[5, 6, 7]),
        wpb.KvEvents(seq=11, after=8, evicted=[1]),
    ):
        feed = KvEventCursor("i")
        assert feed.accept(wpb.KvEvents(seq=8, stored=[1, 2], snapshot=True, left=3)) is NEXT
        assert feed.accept(late) is GAP
        assert feed.accept(wpb.KvEvents(seq=12, stored=[1], snapshot=True)) is NEXT
        assert feed.seq == 12


def test_kv_events_before_requested_snapshot_are_ignored() -> None:
    """Regression: only a gap led to a snapshot, and it ended the Session."""
    feed = KvEventCursor("i")
    assert feed.accept(wpb.KvEvents(seq=3, stored=[1, 2, 3])) is NEXT
    assert feed.ask() == 1
    # A stream that breaks now restarts from an empty state.
    assert (feed.seq, feed.goes_on_with("i")) == (0, False)
    assert feed.accept(wpb.KvEvents(seq=5, after=3, evicted=[1])) is OUTDATED
    assert feed.accept(wpb.KvEvents(seq=5, snapshot=True, stored=[2, 3], left=1)) is OUTDATED
    assert feed.accept(wpb.KvEvents(seq=6, snapshot=True, stored=[2], left=2, epoch=1)) is NEXT
    assert feed.ask() == 2
    assert feed.accept(wpb.KvEvents(seq=6, after=6, stored=[3, 4], epoch=1)) is OUTDATED
    assert feed.accept(wpb.KvEvents(seq=6, snapshot=True, stored=[2, 3, 4], epoch=2)) is NEXT
    assert feed.accept(wpb.KvEvents(seq=7, after=6, stored=[5], epoch=2)) is NEXT
    assert (feed.seq, feed.goes_on_with("i")) == (7, True)


def test_kv_answer_without_snapshot_is_a_gap() -> None:
    for epoch in (1, 2):
        feed = KvEventCursor("i")
        feed.ask()
        # With an empty cache and no pending snapshot request, the first change would continue the state.
        assert feed.accept(wpb.KvEvents(seq=1, stored=[1], epoch=epoch)) is GAP


def test_empty_kv_cache_answers_snapshot_request() -> None:
    feed = KvEventCursor("i")
    feed.ask()
    assert feed.accept(wpb.KvEvents(snapshot=True, epoch=1)) is NEXT
    assert feed.accept(wpb.KvEvents(seq=1, stored=[1], epoch=1)) is NEXT
    assert feed.seq == 1


def test_snapshot_requests_are_counted_per_stream() -> None:
    feed = KvEventCursor("i")
    feed.ask()
    assert feed.accept(wpb.KvEvents(seq=4, snapshot=True, stored=[1], epoch=1)) is NEXT
    assert feed.goes_on_with("i")
    feed.open()
    assert feed.accept(wpb.KvEvents(seq=5, after=4, stored=[2])) is NEXT
    assert feed.ask() == 1
