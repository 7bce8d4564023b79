"""The figures of the chaos tests: those of the fault list, and smaller ones for other runs.

`make chaos` sets CHAOS_SCALE=full.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of each fault; times in seconds, fields by the fault's code.

    Attributes:
        f1_streams: that run when a worker is killed.
        f1_tokens: of each of them.
        f2_restarts: of each worker, under load.
        f3_frozen_s: a frozen worker stays so for so long.
        f4_dials: of a port that answers nothing.
        f7_streams: that run when the router is killed.
        c1_rounds: of cancelled streams.
        c1_streams: in each round.
        c3_requests: with deadlines of 1 to 50 ms.
        b1_tokens: of the stream that is read slowly.
        b1_pause_s: between two of its reads.
        b2_clients: that never read.
        a1_s: of overload.
        a2_examples: of each property of the gate.
        m1_frames: of random bytes, in all.
        m2_text_mib: of the longest prompt.
        m3_examples: of random parameters.
        h2_silent_s: of a prefill, with pings all the while.
        h2_ping_s: from one ping to the next.
        h3_age_s: after which a worker ends connections.
        h3_connections: that end so under load.
        flood_s: of calls without a message at each port, in each way.
        engine_streams: on each of two workers, when the engine of one is lost.
        storm_s: of all faults at once.
        storm_clients: that ask all the while.
        storm_burst: calls at once, now and then.
        storm_answers: that are known before.
        drill_s: of clients of the library while routers and workers are killed.
        drill_clients: that ask all the while.
        audit_tokens: of answers that are computed again.
        audit_routers: that do so, one answer at a time each.
    """

    f1_streams: int
    f1_tokens: int
    f2_restarts: int
    f3_frozen_s: float
    f4_dials: int
    f7_streams: int
    c1_rounds: int
    c1_streams: int
    c3_requests: int
    b1_tokens: int
    b1_pause_s: float
    b2_clients: int
    a1_s: float
    a2_examples: int
    m1_frames: int
    m3_examples: int
    h2_silent_s: float
    h2_ping_s: float
    h3_age_s: float
    h3_connections: int
    flood_s: float
    engine_streams: int
    storm_s: float
    storm_clients: int
    storm_burst: int
    storm_answers: int
    drill_s: float
    drill_clients: int
    audit_tokens: int
    audit_routers: int


_FULL = Scale(
    f1_streams=32,
    f1_tokens=200,
    f2_restarts=3,
    f3_frozen_s=10.0,
    f4_dials=100,
    f7_streams=50,
    c1_rounds=10,
    c1_streams=500,
    c3_requests=1000,
    b1_tokens=5000,
    b1_pause_s=1.0,
    b2_clients=100,
    a1_s=10.0,
    a2_examples=2000,
    m1_frames=10_000,
    m3_examples=1000,
    h2_silent_s=60.0,
    h2_ping_s=10.0,
    h3_age_s=2.0,
    h3_connections=8,
    flood_s=4.0,
    engine_streams=8,
    storm_s=300.0,
    storm_clients=24,
    storm_burst=5000,
    storm_answers=60,
    drill_s=120.0,
    drill_clients=64,
    audit_tokens=1_000_000,
    audit_routers=6,
)
_SMALL = Scale(
    f1_streams=32,
    f1_tokens=200,
    f2_restarts=1,
    f3_frozen_s=3.0,
    f4_dials=30,
    f7_streams=20,
    c1_rounds=2,
    c1_streams=60,
    c3_requests=120,
    b1_tokens=900,
    b1_pause_s=0.3,
    b2_clients=30,
    a1_s=2.0,
    a2_examples=40,
    m1_frames=1000,
    m3_examples=60,
    h2_silent_s=4.0,
    h2_ping_s=0.3,
    h3_age_s=1.0,
    h3_connections=4,
    flood_s=1.0,
    engine_streams=2,
    storm_s=18.0,
    storm_clients=8,
    storm_burst=600,
    storm_answers=16,
    drill_s=8.0,
    drill_clients=8,
    audit_tokens=2000,
    audit_routers=1,
)
FULL = os.environ.get("CHAOS_SCALE") == "full"
SCALE = _FULL if FULL else _SMALL
