"""Attempts: bounded, poison after two deaths, exact moves inside a numerics class."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.limits import MAX_ATTEMPTS
from router.failover import Attempts, FailoverPolicy, Loss, Verdict, stall_bound_s

DEATHS = {Loss.DIED, Loss.SILENT, Loss.STALLED, Loss.ENGINE_FAILED}
LIVES = st.lists(
    st.tuples(st.sampled_from([*Loss, None]), st.integers(0, 3), st.sampled_from("xy")), min_size=1, max_size=12
)


@given(lives=LIVES, policy=st.sampled_from(FailoverPolicy))
def test_attempts_against_a_plain_count(lives: list[tuple[Loss | None, int, str]], policy: FailoverPolicy) -> None:
    """A loss of None is a sequence that was given back."""
    attempts, have, deaths, kept, counted = Attempts(), 10, 0, 0, 0
    classes: list[str] = []
    for loss, tokens, numerics in lives:
        attempts.begin("w", numerics, have, now=1.0)
        if loss is None:
            attempts.give_back()
            assert len(attempts) == kept
            continue
        have += tokens
        assert attempts.has_begun(have) == (tokens > 0)
        wanted = next(iter([*classes, *([numerics] if tokens else [])]), None)
        assert attempts.numerics_wanted(policy, have) == (None if policy is FailoverPolicy.ANY else wanted)
        attempts.end(have, 2.0, loss)
        attempts.end(have + 5, 9.0)
        kept += 1
        counted += loss is not Loss.DRAINED
        deaths += loss in DEATHS
        classes += [numerics] if tokens else []
        assert attempts.numerics_wanted(policy, have) == (None if policy is FailoverPolicy.ANY else wanted)
        assert [a.tokens for a in attempts.all][-1] == tokens
        assert attempts.exact == (len(set(classes)) <= 1)
        if deaths >= 2:
            assert attempts.verdict() is Verdict.POISON
            return
        assert attempts.verdict() is (Verdict.GIVE_UP if counted >= MAX_ATTEMPTS else Verdict.RESUBMIT)


def test_workers_that_drain_may_meet_a_request_as_often_as_they_like() -> None:
    attempts = Attempts()
    for i in range(3 * MAX_ATTEMPTS):
        attempts.begin(f"w{i}", "class", 10 + i, now=float(i))
        attempts.end(11 + i, i + 0.5, Loss.DRAINED)
        assert attempts.verdict() is Verdict.RESUBMIT


@pytest.mark.parametrize(
    ("timeout_s", "step_tokens", "rate", "bound_s"),
    [(30.0, 2048, 0.0, 30.0), (30.0, 2048, 10_000.0, 30.0), (30.0, 16_384, 1000.0, 163.84), (1.0, 0, 50.0, 1.0)],
)
def test_the_bound_of_a_step_grows_with_the_longest_prefill(
    timeout_s: float, step_tokens: int, rate: float, bound_s: float
) -> None:
    assert stall_bound_s(timeout_s, step_tokens, rate) == pytest.approx(bound_s)
