"""Dispatchers and requests for tests."""

from __future__ import annotations

import random

from common.delay_gate import DelayGate
from common.limits import MAX_QUEUED_REQUESTS, WORKER_WAIT_S
from router.scheduling.dispatcher import Dispatcher, Release
from router.scheduling.fair_queue import TenantShares
from router.scheduling.lane import Lane, LaneKind
from router.scheduling.placement import Placement, RoundRobin
from router.scheduling.queued_request import QueuedRequest
from router.scheduling.worker_load import LoadReport

LENGTHS = {"a": 50, "b": 30, "c": 40}
NUMERICS = {"a": "x", "b": "y", "c": "x"}
TENANTS = ["", "t", "u"]
WAIT_S = 1.0
ROOM = LoadReport(time=0.0, room_tokens=1000, room_seqs=100)


def request(key: int, *, tokens: int = 10, arrival: float = 0.0, deadline: float | None = None) -> QueuedRequest:
    return QueuedRequest(key, "m", tokens, arrival, deadline)


def make_dispatcher(
    gate: DelayGate, placement: Placement, capacity: int = MAX_QUEUED_REQUESTS, worker_wait_s: float = WORKER_WAIT_S
) -> Dispatcher:
    return Dispatcher(gate, placement, TenantShares(), capacity, worker_wait_s)


def make_lane(
    worker: str, model: str, report: LoadReport, shares: TenantShares | None = None, kind: LaneKind | None = None
) -> Lane:
    return Lane(worker, model, report, shares or TenantShares(), kind or LaneKind(), caches_prefixes=True)


def dispatcher(*workers: str, factor: float = 0.0, capacity: int = 100, report: LoadReport = ROOM) -> Dispatcher:
    made = make_dispatcher(DelayGate(factor), RoundRobin(), capacity)
    for worker in workers:
        made.lane_up(worker, "m", report, 0.0)
    return made


def keys(releases: list[Release]) -> dict[str, list[int]]:
    return {release.worker: [r.key for r in release.requests] for release in releases}


def decoding(time: float, latency: float = 0.1) -> LoadReport:
    return LoadReport(time, decoding_seqs=2, room_tokens=1000, room_seqs=10, last_prompt_latency_s=latency)


def can_serve(worker: str, request: QueuedRequest) -> bool:
    return request.numerics in (None, NUMERICS[worker]) and request.most_tokens <= LENGTHS[worker]


def chain(*parts: int) -> list[int]:
    """Granules of a prompt: each identifies the whole prefix, as chain hashes do."""
    rnd = random.Random(0)
    named: list[int] = []
    for part in parts:
        rnd.seed(f"{named[-1] if named else None}/{part}")
        named.append(rnd.getrandbits(64))
    return named
