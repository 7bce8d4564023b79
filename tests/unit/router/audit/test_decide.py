"""The audit finds the faulty worker and never convicts a correct one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.audit.decide import Ask, AuditCase, AuditRun, AuditSampler, ConfirmedAnswer, Decision, OpenVerdict, Wrong

RIGHT = b"right"


def audit(answer: bytes, workers: list[str], compute: Callable[[str, int], bytes]) -> tuple[Decision, list[str]]:
    """Runs an audit of worker a's answer; returns the decision and the workers asked."""
    case, asked = AuditCase(AuditRun("a", answer)), list[str]()
    while isinstance(decision := case.next(workers), Ask):
        assert decision.worker_id in workers
        asked.append(decision.worker_id)
        case.runs.append(AuditRun(decision.worker_id, compute(decision.worker_id, asked.count(decision.worker_id))))
        assert len(asked) <= 3
    return decision, asked


def test_audit_passes_equal_answer() -> None:
    assert audit(RIGHT, ["a", "b", "c"], lambda *_: RIGHT) == (ConfirmedAnswer(), ["b"])


def test_audit_without_second_worker_is_unanswered() -> None:
    assert audit(RIGHT, ["a"], lambda *_: RIGHT) == (OpenVerdict(), [])
    assert audit(RIGHT, [], lambda *_: RIGHT) == (OpenVerdict(), [])


@pytest.mark.parametrize("wrong", ["a", "b", "c"])
def test_third_worker_decides_audit(wrong: str) -> None:
    answer = b"wrong" if wrong == "a" else RIGHT
    decision, asked = audit(answer, ["a", "b", "c"], lambda worker, _: b"wrong" if worker == wrong else RIGHT)
    if wrong == "c":
        assert (decision, asked) == (ConfirmedAnswer(), ["b"])
    else:
        assert (decision, asked) == (Wrong(wrong, is_certain=True), ["b", "c"])


def test_audit_of_two_convicts_self_contradicting_worker() -> None:
    """Like a fault that has passed."""
    assert audit(b"wrong", ["a", "b"], lambda *_: RIGHT) == (Wrong("a", is_certain=True), ["b", "a"])
    once = audit(RIGHT, ["a", "b"], lambda worker, n: b"wrong" if (worker, n) == ("b", 1) else RIGHT)
    assert once == (Wrong("b", is_certain=True), ["b", "a", "b"])


def test_audit_of_two_consistent_workers_suspects_answering_one() -> None:
    decision = audit(RIGHT, ["a", "b"], lambda worker, _: b"wrong" if worker == "b" else RIGHT)
    assert decision == (Wrong("a", is_certain=False), ["b", "a", "b"])
    assert audit(RIGHT, ["b"], lambda *_: b"wrong") == (Wrong("a", is_certain=False), ["b"])


@given(st.data())
def test_audit_convicts_only_faulty_worker(data: st.DataObject) -> None:
    """At most one worker computes wrongly, sometimes or always, with any wrong results."""
    workers = data.draw(st.permutations(["a", "b", "c", "d"][: data.draw(st.integers(1, 4))]))
    faulty = data.draw(st.sampled_from(workers))

    def compute(worker: str, _: int) -> bytes:
        return data.draw(st.sampled_from([RIGHT, b"x", b"y"])) if worker == faulty else RIGHT

    answer = compute("a", 0)
    decision, _ = audit(answer, workers, compute)
    if isinstance(decision, Wrong) and decision.is_certain:
        assert decision.worker_id == faulty
    if answer != RIGHT and len(workers) > 2 and isinstance(decision, Wrong):
        assert decision == Wrong("a", is_certain=True)


def test_audit_sample_has_requested_fraction() -> None:
    for fraction in (0.0, 0.01, 0.5, 1.0):
        sampler = AuditSampler(fraction, b"key")
        chosen = [i for i in range(4000) if sampler.wants(f"r{i}", 0)]
        assert abs(len(chosen) / 4000 - fraction) < 0.03
        assert chosen == [i for i in range(4000) if sampler.wants(f"r{i}", 0)]
    one, other = (AuditSampler(0.5, key) for key in (b"a", b"b"))
    assert [one.wants(f"r{i}", 0) for i in range(99)] != [other.wants(f"r{i}", 0) for i in range(99)]
