"""A new placement learns the workers' caches over open Sessions, if the workers support it."""

from __future__ import annotations

import pytest
from fissile.worker.v1 import worker_pb2 as wpb

from common.delay_gate import DelayGate
from common.wire.protocol import KV_EPOCH_MINOR, PROTO_MINOR
from router.scheduling.placement import PrefixAware
from router.workers.session import SessionLostError
from tests.unit.router.pool import ADDRESS, Site


def cached(placement: PrefixAware) -> set[int]:
    (index,) = placement._indexes.values()
    return index.pool.held(ADDRESS) | {-granule for granule in index.memory.held(ADDRESS)}


def replace_placement(site: Site, placement: PrefixAware) -> None:
    site.requests.configure(DelayGate(0.0), placement, 16, {})
    site.pool.caches.learn_anew(site.pool.sessions())


async def test_new_placement_gets_caches_over_open_sessions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: every Session was broken off to get a snapshot. Granules of the memory tier are negative here."""
    site = Site(monkeypatch)
    session, pool = site.described(), site.pool
    pool.session_up(session, wpb.Welcome(instance_id="i", proto_minor=PROTO_MINOR, kv_events=True))
    pool.kv_events(session, wpb.KvEvents(seq=3, stored=[1, 2, 3]))
    placement = PrefixAware()
    replace_placement(site, placement)
    frames = iter(lambda: session.state.next_frame(0.0), None)
    assert [frame.lane.kv_epoch for frame in frames if frame.HasField("lane")] == [1]
    pool.kv_events(session, wpb.KvEvents(seq=4, after=3, stored=[4]))
    assert cached(placement) == set()
    pool.kv_events(session, wpb.KvEvents(seq=5, snapshot=True, memory_stored=[1, 6], left=5, memory_left=1, epoch=1))
    pool.kv_events(session, wpb.KvEvents(seq=5, after=5, memory_stored=[7], stored=[1, 2, 3, 4, 5], epoch=1))
    pool.kv_events(session, wpb.KvEvents(seq=6, after=5, evicted=[1], memory_evicted=[6], epoch=1))
    assert cached(placement) == {2, 3, 4, 5, -1, -7}
    await site.stop()


async def test_older_worker_reports_cache_on_new_session(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(monkeypatch)
    session = site.described()
    site.pool.session_up(session, wpb.Welcome(instance_id="i", proto_minor=KV_EPOCH_MINOR - 1, kv_events=True))
    site.pool.kv_events(session, wpb.KvEvents(seq=3, stored=[1, 2, 3]))
    replace_placement(site, PrefixAware())
    with pytest.raises(SessionLostError, match="KV events are missing"):
        site.pool.kv_events(session, wpb.KvEvents(seq=4, after=3, stored=[4]))
    await site.stop()
