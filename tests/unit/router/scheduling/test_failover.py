"""Attempts are bounded, suspects run alone first, poisons are stopped, exact moves keep the numerics class."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.limits import FIRST_TOKENS, LOST_SERIES_S, MAX_ATTEMPTS, MAX_ATTEMPTS_IN_ALL, MAX_DEATHS, MAX_SUSPICIONS
from router.scheduling.failover import Attempts, FailoverPolicy, Loss, LossCounts, Verdict, stall_bound_s

# Ends of attempts that do not count.
PLANNED = {Loss.DRAINED, Loss.HANDED_OVER}
DEATHS = {Loss.DIED, Loss.ENGINE_FAILED}
LIVES = st.lists(
    st.tuples(
        # Every second loss is a death.
        st.sampled_from([*Loss, None]) | st.sampled_from(sorted(DEATHS, key=str)),
        st.sampled_from([0, 0, 1, FIRST_TOKENS - 1, FIRST_TOKENS, 100]),
        st.sampled_from("xy"),
        st.booleans(),
    ),
    min_size=1,
    max_size=30,
)


@given(lives=LIVES, policy=st.sampled_from(FailoverPolicy))
def test_attempts_equal_plain_count(lives: list[tuple[Loss | None, int, str, bool]], policy: FailoverPolicy) -> None:
    """A loss of None is a returned sequence; the flag says that another request ran alone there."""
    attempts, have = Attempts(), 10
    deaths = kept = counted = fruitless = suspicions = 0
    classes: list[str] = []
    alone = False
    for loss, tokens, numerics, excused in lives:
        attempts.begin("w", numerics, have, now=1.0, alone=alone)
        if loss is None:
            attempts.return_unstarted()
            assert len(attempts) == kept
            continue
        have += tokens
        assert attempts.has_begun(have) == (tokens > 0)
        if alone and attempts.has_passed_first_steps(have):
            attempts.share()
        was_alone = attempts.is_alone
        wanted = next(iter([*classes, *([numerics] if tokens else [])]), None)
        assert attempts.numerics_wanted(policy, have) == (None if policy is FailoverPolicy.ANY else wanted)
        attempts.end(have, 2.0, loss, excused=excused and not was_alone)
        attempts.end(have + 5, 9.0)
        kept += 1
        deaths += loss in DEATHS
        counted += loss not in PLANNED
        fruitless = 0 if tokens else fruitless + (loss not in PLANNED)
        suspicions = 0 if tokens >= FIRST_TOKENS else suspicions + (loss in DEATHS and (was_alone or not excused))
        classes += [numerics] if tokens else []
        assert attempts.numerics_wanted(policy, have) == (None if policy is FailoverPolicy.ANY else wanted)
        assert [a.tokens for a in attempts.all][-1] == tokens
        assert attempts.exact == (len(set(classes)) <= 1)
        verdict = attempts.verdict()
        if was_alone and loss in DEATHS:
            assert verdict is Verdict.POISON
            return
        if deaths >= MAX_DEATHS or counted >= MAX_ATTEMPTS_IN_ALL or fruitless >= MAX_ATTEMPTS:
            assert verdict is Verdict.GIVE_UP
            return
        assert verdict is (Verdict.ALONE if suspicions >= MAX_SUSPICIONS else Verdict.RESUBMIT)
        alone = verdict is Verdict.ALONE


def life(losses: Callable[[int, bool], tuple[Loss, int]]) -> tuple[Attempts, Verdict]:
    """Runs a request until the router ends it; `losses` gives the loss and tokens of attempt n, alone or not."""
    attempts, have, verdict = Attempts(), 10, Verdict.RESUBMIT
    while verdict in (Verdict.RESUBMIT, Verdict.ALONE):
        attempts.begin("w", "x", have, now=0.0, alone=verdict is Verdict.ALONE)
        loss, tokens = losses(len(attempts), attempts.is_alone)
        have += tokens
        if attempts.is_alone and attempts.has_passed_first_steps(have):
            attempts.share()
        attempts.end(have, 1.0, loss)
        verdict = attempts.verdict()
    return attempts, verdict


@pytest.mark.parametrize("loss", sorted(DEATHS, key=str))
@pytest.mark.parametrize(("first", "deaths"), [(0, 3), (FIRST_TOKENS - 1, 3), (500, 4)])
def test_poison_verdict_needs_bounded_deaths(loss: Loss, first: int, deaths: int) -> None:
    """It kills at once, or at one point of its answer and then at once after each resume."""
    attempts, verdict = life(lambda n, alone: (loss, first if n == 1 else 0))
    assert (verdict, attempts.deaths, len(attempts)) == (Verdict.POISON, deaths, deaths)


def test_request_killing_late_each_time_is_given_up() -> None:
    attempts, verdict = life(lambda n, alone: (Loss.DIED, 20))
    assert (verdict, attempts.deaths) == (Verdict.GIVE_UP, MAX_DEATHS)


@pytest.mark.parametrize("loss", sorted(set(Loss) - DEATHS - PLANNED, key=str))
def test_unproved_losses_never_convict_request(loss: Loss) -> None:
    """Freezes, unreachable networks, starting and draining workers; a request with tokens gets many attempts."""
    for tokens, most in ((0, MAX_ATTEMPTS), (1, MAX_ATTEMPTS_IN_ALL)):
        attempts, verdict = life(lambda n, alone, tokens=tokens: (loss, tokens))  # type: ignore[misc]
        assert (verdict, attempts.deaths) == (Verdict.GIVE_UP, 0)
        assert len(attempts) == most


def test_flapping_link_ends_no_progressing_stream() -> None:
    """Regression: eight breaks ended the stream."""
    attempts, have = Attempts(), 10
    for n in range(5 * MAX_ATTEMPTS):
        attempts.begin("w", "x", have, now=0.0)
        have += n % 4 == 0
        attempts.end(have, 1.0, Loss.UNREACHABLE)
        assert attempts.verdict() is Verdict.RESUBMIT


def test_suspect_passing_first_steps_is_cleared() -> None:
    attempts, have = Attempts(), 10
    for verdict in (Verdict.RESUBMIT, Verdict.ALONE):
        attempts.begin("w", "x", have, now=0.0)
        attempts.end(have, 1.0, Loss.DIED)
        assert attempts.verdict() is verdict
    attempts.begin("w", "x", have, now=0.0, alone=True)
    have += FIRST_TOKENS
    assert attempts.has_passed_first_steps(have)
    attempts.share()
    attempts.end(have, 1.0, Loss.DIED)
    assert attempts.verdict() is Verdict.RESUBMIT


def test_deaths_beside_a_suspect_are_excused() -> None:
    attempts = Attempts()
    for _ in range(MAX_DEATHS - 1):
        attempts.begin("w", "x", 10, now=0.0)
        attempts.end(10, 1.0, Loss.DIED, excused=True)
        assert attempts.verdict() is Verdict.RESUBMIT


def test_drained_workers_never_exhaust_attempts() -> None:
    attempts = Attempts()
    for i in range(3 * MAX_ATTEMPTS_IN_ALL):
        attempts.begin(f"w{i}", "class", 10 + i, now=float(i))
        attempts.end(10 + i + i % 2, i + 0.5, Loss.DRAINED)
        assert attempts.verdict() is Verdict.RESUBMIT


@pytest.mark.parametrize(
    ("timeout_s", "step_tokens", "rate", "bound_s"),
    [(30.0, 2048, 0.0, 30.0), (30.0, 2048, 10_000.0, 30.0), (30.0, 16_384, 1000.0, 163.84), (1.0, 0, 50.0, 1.0)],
)
def test_stall_bound_grows_with_longest_prefill(
    timeout_s: float, step_tokens: int, rate: float, bound_s: float
) -> None:
    assert stall_bound_s(timeout_s, step_tokens, rate) == pytest.approx(bound_s)


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=6), st.booleans(), st.floats(0, 10))
def test_waits_and_attempts_cover_request_time(steps: list[tuple[float, float]], lost: bool, rest: float) -> None:
    """Waits and attempts cover the whole time without gap or overlap."""
    attempts, now = Attempts(), 5.0
    for number, (wait, run) in enumerate(steps):
        attempts.begin(f"w{number}", "n", 3, now + wait)
        now += wait + run
        attempts.end(3, now, Loss.DIED if lost or number < len(steps) - 1 else None)
    end = now + (rest if lost or not steps else 0.0)
    waits = attempts.waits(5.0, end)
    spans = sorted([(w.began, w.ended) for w in waits] + [(a.began, a.ended or end) for a in attempts.all])
    assert spans[0][0] == 5.0
    assert spans[-1][1] == pytest.approx(end)
    assert all(one[1] == pytest.approx(other[0]) for one, other in itertools.pairwise(spans))
    assert [w.loss for w in waits] == [None, *[Loss.DIED] * (len(waits) - 1)]


def test_loss_counts_outlive_their_worker_for_a_while() -> None:
    losses = LossCounts()
    for worker in ("w0", "w0", "w1"):
        losses.add(worker, Loss.DIED)
    losses.add("w1", Loss.SILENT)
    losses.forget_departed({"w0", "w1"}, 0.0)
    losses.forget_departed({"w0"}, 10.0)
    # It came back in between.
    losses.forget_departed({"w0", "w1"}, 20.0)
    losses.forget_departed({"w0"}, 30.0)
    losses.forget_departed({"w0"}, 30.0 + LOST_SERIES_S - 1)
    assert losses.counts == {("w0", "died"): 2, ("w1", "died"): 1, ("w1", "silent"): 1}
    assert (losses.of_loss(Loss.DIED), losses.of_loss(Loss.SILENT)) == (3, 1)
    losses.forget_departed({"w0"}, 30.0 + LOST_SERIES_S)
    assert losses.counts == {("w0", "died"): 2}
