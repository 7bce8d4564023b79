"""Adoption of a lost router's sequences by another router (rule S12): by hand, against the model."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from fissile.worker.v1 import worker_pb2 as wpb

from common.errors import ApiError
from common.limits import MAX_ORPHANS_PER_FRAME
from common.telemetry.tracing import SpanFactory
from common.wire.adoption import delivered_digest
from common.wire.protocol import ADOPTION_MINOR
from router.requests.adoption_keys import AdoptionKeys
from tests.unit.worker.session.support import FACTS, SteppedEngine, record, simulated_core, simulated_runner, submit
from worker.session import session as session_module
from worker.session.adoption import Orphans
from worker.session.fleet_backlog import FleetLanes
from worker.session.router_state import RouterSequences
from worker.session.session import WorkerSession

KEY = b"key of the answer"
PROMPT = [5, 6, 7]


class Fleet:
    """One worker, and routers by name."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.engine = SteppedEngine(simulated_core(clock=lambda: self.now), lambda: self.now)
        self.orphans: Orphans[RouterSequences] = Orphans()
        self.lanes = FleetLanes()
        self.sequences: dict[str, RouterSequences] = {}

    def dial(self, name: str, live: dict[int, int] | None = None, minor: int = ADOPTION_MINOR) -> Router:
        known = self.sequences.setdefault(
            name, RouterSequences(name, FACTS, self.engine, SpanFactory(), orphans=self.orphans)
        )
        kept = [wpb.LiveSequence(rid=rid, have=have) for rid, have in (live or {}).items()]
        hello = wpb.Hello(router_id=name, lease_ms=5000, live=kept, proto_minor=minor)
        return Router(self, WorkerSession(hello, known, FACTS, self.engine, self.lanes, self.now, lambda: None))

    def lose(self, name: str, router: Router) -> None:
        router.state.close()
        self.sequences[name].detach(self.now + 5)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.now += 0.01
            self.engine.step()


class Router:
    """A router's end: its written frames, and all frames it has read."""

    def __init__(self, fleet: Fleet, state: WorkerSession) -> None:
        self.fleet = fleet
        self.state = state
        self.tokens: dict[int, list[tuple[int, int]]] = {}
        self.ends: dict[int, wpb.SequenceEnd] = {}
        self.starts: list[wpb.SequenceStart] = []
        self.returned: list[int] = []
        self.unknown: list[int] = []
        self.orphans: list[wpb.Orphans] = []

    def write(self, frame: wpb.SessionRequest) -> None:
        self.state.receive(frame, self.fleet.now)

    def adopt(self, rid: int, got: Sequence[int], key: bytes = KEY, deadline_left_ms: int = 0) -> None:
        """Adopts the sequence after the generated tokens `got` that its client has."""
        have, digest = len(PROMPT) + len(got), delivered_digest(got)
        adopt = wpb.Adopt(rid=rid, key=key, have=have, digest=digest, deadline_left_ms=deadline_left_ms)
        self.write(wpb.SessionRequest(adopt=adopt))

    def read(self) -> Router:
        while (frame := self.state.next_frame(self.fleet.now)) is not None:
            kind = frame.WhichOneof("frame")
            if kind == "welcome":
                self.unknown += frame.welcome.unknown
            elif kind == "orphans":
                self.orphans.append(frame.orphans)
            elif kind == "step_output":
                self._read(frame.step_output)
        return self

    def _read(self, step: wpb.StepOutput) -> None:
        at = 0
        for rid, first_pos, n in zip(step.rid, step.first_pos, step.n, strict=True):
            self.tokens.setdefault(rid, []).extend(enumerate(step.token_ids[at : at + n], first_pos))
            at += n
        self.ends.update({end.rid: end for end in step.ends})
        self.starts += step.starts
        self.returned += step.returned

    def made(self, rid: int) -> list[int]:
        return [token for _, token in self.tokens.get(rid, ())]


def answer(max_tokens: int) -> list[int]:
    return simulated_runner().reference(PROMPT, max_tokens, seed=1)


def orphaned(max_tokens: int = 20, steps: int = 6, **fields: object) -> tuple[Fleet, list[int]]:
    """A fleet in which router a has died; what its client has got."""
    fleet = Fleet()
    first = fleet.dial("a")
    first.write(submit(1, record(1, PROMPT, max_tokens, adoption_key=KEY, **fields)))
    fleet.step(steps)
    got = first.read().made(1)
    fleet.lose("a", first)
    return fleet, got


@pytest.mark.parametrize("got", [0, 1, 3])
def test_another_router_continues_after_client_tokens(got: int) -> None:
    fleet, had = orphaned()
    second = fleet.dial("b").read()
    assert [list(each.keys) for each in second.orphans] == [[KEY]]
    assert second.orphans[0].lease_left_ms == 5000
    second.adopt(9, had[:got])
    fleet.step(30)
    assert second.read().tokens[9] == list(enumerate(answer(20), len(PROMPT)))[got:]
    assert (second.ends[9].reason, second.ends[9].end_pos) == (wpb.END_REASON_LENGTH, len(PROMPT) + 20)
    assert [(start.rid, start.prefill_us) for start in second.starts] == [(9, 0)]
    assert fleet.engine.core.scheduler.lifecycle.totals.prompt_tokens == len(PROMPT)
    # The router that was gone comes back: it learns it like any other loss.
    assert fleet.dial("a", {1: len(PROMPT) + 2}).read().unknown == [1]
    assert not fleet.engine.deliveries


def test_ended_and_unstarted_sequences_are_adopted() -> None:
    fleet, had = orphaned(max_tokens=4)
    fleet.step(10)
    second = fleet.dial("b")
    second.adopt(9, had[:1])
    assert second.read().made(9) == answer(4)[1:]
    assert second.ends[9].reason == wpb.END_REASON_LENGTH

    fleet, had = orphaned(steps=0)
    assert had == []
    second = fleet.dial("b")
    second.adopt(9, [])
    fleet.step(30)
    assert second.read().made(9) == answer(20)


def test_mismatched_adoption_is_returned_and_stays_adoptable() -> None:
    fleet, had = orphaned()
    second, third = fleet.dial("b"), fleet.dial("c")
    wrong = [[had[0] + 1], [*had, *answer(40)]]
    for rid, got in enumerate(wrong, start=9):
        second.adopt(rid, got)
    second.adopt(11, had[:1], key=b"another")
    assert second.read().returned == [9, 10, 11]
    third.adopt(5, had[:1])
    second.adopt(12, had[:1])
    fleet.step(30)
    assert third.read().made(5) == answer(20)[1:]
    assert second.read().returned == [9, 10, 11, 12]
    assert second.tokens == {}


def test_adoption_requires_lost_router_and_open_lease() -> None:
    fleet, had = orphaned()
    fleet.dial("a", {1: len(PROMPT) + len(had)})
    second = fleet.dial("b").read()
    second.adopt(9, had)
    assert second.read().returned == [9]
    assert second.orphans == []

    fleet, had = orphaned()
    fleet.sequences["a"].end()
    second = fleet.dial("b").read()
    second.adopt(9, had)
    fleet.step(3)
    assert second.read().returned == [9]
    assert not fleet.engine.deliveries


def test_adopted_sequence_can_be_orphaned_again() -> None:
    fleet, had = orphaned()
    second = fleet.dial("b")
    second.adopt(9, had)
    fleet.step(2)
    more = second.read().made(9)
    fleet.lose("b", second)
    fleet.sequences["a"].end()
    third = fleet.dial("c")
    third.adopt(4, had + more)
    fleet.step(30)
    assert had + more + third.read().made(4) == answer(20)


def test_adopted_sequence_has_deadline_of_adopter() -> None:
    fleet, had = orphaned(deadline_left_ms=100)
    second = fleet.dial("b")
    second.adopt(9, had)
    fleet.step(30)
    assert second.read().ends[9].reason == wpb.END_REASON_LENGTH

    fleet, had = orphaned(max_tokens=500)
    second = fleet.dial("b")
    second.adopt(9, had, deadline_left_ms=50)
    fleet.step(10)
    assert second.read().ends[9].reason == wpb.END_REASON_DEADLINE


def test_sequence_past_old_deadline_is_not_adopted() -> None:
    fleet, had = orphaned(max_tokens=500, deadline_left_ms=100)
    fleet.step(20)
    second = fleet.dial("b")
    second.adopt(9, had)
    assert second.read().returned == [9]


def test_draining_worker_returns_adopted_rid() -> None:
    fleet, had = orphaned()
    second = fleet.dial("b")
    second.state.drain(fleet.now + 5)
    second.adopt(9, had)
    assert second.read().returned == [9]


def test_adoption_from_start_without_kept_digests_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.session.outbox.MAX_SENT_LOGPROBS", 8)
    sent = 40
    fleet = Fleet()
    first = fleet.dial("a")
    first.write(submit(1, record(1, PROMPT, sent, adoption_key=KEY, logits_every=1)))
    for _ in range(sent - 10):
        fleet.step()
        first.read()
    had = first.made(1)
    fleet.lose("a", first)
    second = fleet.dial("b")
    second.adopt(9, [])
    assert second.read().returned == [9]
    second.adopt(10, had)
    fleet.step(20)
    assert had + second.read().made(10) == answer(sent)


def test_orphans_are_announced_to_connected_routers_in_bounded_frames() -> None:
    fleet, _ = orphaned()
    older = fleet.dial("old", minor=ADOPTION_MINOR - 1)
    assert older.read().orphans == []
    there = fleet.dial("b").read()
    third = fleet.dial("c")
    count = MAX_ORPHANS_PER_FRAME + 1
    records = [record(rid, PROMPT, adoption_key=rid.to_bytes(4, "little")) for rid in range(1, count + 1)]
    third.write(submit(1, *records[:4000]))
    third.write(submit(2, *records[4000:8000]))
    third.write(submit(3, *records[8000:]))
    fleet.lose("c", third)
    assert sorted(len(each.keys) for each in there.read().orphans) == [1, 1, MAX_ORPHANS_PER_FRAME]
    assert len(fleet.dial("d").read().orphans) == 3


def test_adoption_key_length_is_bounded() -> None:
    fleet = Fleet()
    router = fleet.dial("a")
    router.write(submit(1, record(1, PROMPT, adoption_key=bytes(33))))
    assert router.read().ends[1].message.startswith("adoption_key has 33 bytes")
    with pytest.raises(ApiError) as caught:
        router.adopt(2, [], key=bytes(33))
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT


def test_adoption_keys_cover_every_answer_input() -> None:
    ids = array("I", [1, 2])

    def key(tenant: str = "t", request_id: str = "r", model: str = "m", **fields: Any) -> bytes:
        return AdoptionKeys(tenant, request_id, model, ids).of_answer(record(1, ids, **fields))

    others = [
        key(tenant="tr", request_id=""),
        key(tenant="", request_id="tr"),
        key(model="n"),
        AdoptionKeys("t", "r", "m", array("I", [2, 1])).of_answer(record(1, ids)),
        key(cache_salt=b"s"),
        key(seed=2),
        key(choice=1),
        key(priority=wpb.PRIORITY_HIGH),
        key(logits_every=1),
        key(params=wpb.SamplingParams(temperature=0.5)),
    ]
    assert len({key(), *others}) == len(others) + 1
    # Every attempt of one answer has the same key.
    again = record(1, ids, keep=True, deadline_left_ms=5, traceparent="p", tracestate="s", adoption_key=b"k")
    again.rid = 77
    assert AdoptionKeys("t", "r", "m", ids).of_answer(again) == key()


def test_unread_adoptions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each unknown key on a stream that is never read stayed in memory."""
    monkeypatch.setattr(session_module, "MAX_ROUTER_SEQS", 20)
    fleet = Fleet()
    router = fleet.dial("b")
    for rid in range(20):
        router.adopt(rid, [], key=bytes(16))
    with pytest.raises(ApiError, match="more than 20 sequences") as caught:
        router.adopt(20, [], key=bytes(16))
    assert caught.value.reason == "SESSION_BOUNDS"
    assert len(router.read().returned) == 20
