"""Which frames of KV events continue what is known, and what the next Hello says of it."""

from __future__ import annotations

from fissile.worker.v1 import worker_pb2 as wpb

from router.kv_feed import KvFeed


def test_changes_continue_one_another() -> None:
    feed = KvFeed("i")
    assert feed.take(wpb.KvEvents(seq=3, stored=[1, 2, 3]))
    assert feed.take(wpb.KvEvents(seq=5, after=3, evicted=[1]))
    assert (feed.seq, feed.goes_on_with("i"), feed.goes_on_with("j")) == (5, True, False)
    assert not feed.take(wpb.KvEvents(seq=9, after=7, stored=[4]))
    assert (feed.seq, feed.goes_on_with("i")) == (0, False)


def test_a_snapshot_counts_when_it_is_whole() -> None:
    feed = KvFeed("i")
    assert feed.take(wpb.KvEvents(seq=4, stored=[9]))
    assert feed.take(wpb.KvEvents(seq=8, stored=[1, 2], snapshot=True, left=3))
    assert feed.seq == 0
    assert feed.take(wpb.KvEvents(seq=8, after=8, stored=[3, 4], left=1))
    assert feed.seq == 0
    assert feed.take(wpb.KvEvents(seq=8, after=8, stored=[5]))
    assert feed.seq == 8
    assert feed.take(wpb.KvEvents(seq=9, after=8, evicted=[5]))


def test_a_lost_piece_of_a_snapshot_is_missed() -> None:
    for late in (
        wpb.KvEvents(seq=8, after=8, stored=[5]),
        wpb.KvEvents(seq=11, after=8, stored=[5, 6, 7]),
        wpb.KvEvents(seq=11, after=8, evicted=[1]),
    ):
        feed = KvFeed("i")
        assert feed.take(wpb.KvEvents(seq=8, stored=[1, 2], snapshot=True, left=3))
        assert not feed.take(late)
        assert feed.take(wpb.KvEvents(seq=12, stored=[1], snapshot=True))
        assert feed.seq == 12
