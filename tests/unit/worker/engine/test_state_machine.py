"""Scheduler and block manager under any order of events: the oracle (oracle.py) finds no error. No PyTorch.

What hypothesis finds it shrinks to few events, sequences and tokens; rare coincidences are for the workloads
(test_workloads.py), which are longer and cheaper.
"""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.unit.worker.engine.speculation.trial import Trial, random_group, random_sequence, random_setting
from worker.engine.sequence import Sequence

NUM_EXAMPLES = 400
# Of the long mode.
NUM_LONG = int(os.environ.get("FISSILE_EXAMPLES", "100000"))
_RANDOMS = st.randoms(use_true_random=False)


class SchedulerMachine(RuleBasedStateMachine):
    """Sequences come, go and are preempted while steps are scheduled, land or are interrupted."""

    @initialize(rnd=_RANDOMS)
    def start(self, rnd: random.Random) -> None:
        self.trial = Trial(*random_setting(rnd), twins=random.Random(0))

    def sequence(self, rnd: random.Random) -> Sequence:
        return random_sequence(rnd, self.trial)

    @rule(rnd=_RANDOMS)
    def add(self, rnd: random.Random) -> None:
        self.trial.add(self.sequence(rnd))

    @rule(rnd=_RANDOMS, count=st.integers(1, 4))
    def add_group(self, rnd: random.Random, count: int) -> None:
        self.trial.add_group(random_group(rnd, self.trial, count))

    @precondition(lambda self: self.trial.lives)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.trial.abort(data.draw(st.integers(0, len(self.trial.lives) - 1)))

    @precondition(lambda self: self.trial.running())
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.trial.preempt(data.draw(st.sampled_from(self.trial.running())))

    @rule(seconds=st.sampled_from([0.01, 0.5]))
    def wait(self, seconds: float) -> None:
        self.trial.now += seconds
        self.trial.expire()

    @precondition(lambda self: len(self.trial.oracle.flights) < self.trial.depth)
    @rule()
    def schedule(self) -> None:
        self.trial.schedule()
        self.trial.scheduler.check_integrity()

    @precondition(lambda self: self.trial.oracle.flights)
    @rule()
    def land(self) -> None:
        self.trial.land()

    @precondition(lambda self: len(self.trial.oracle.flights) == 1)
    @rule()
    def discard(self) -> None:
        self.trial.discard()

    @rule(count=st.integers(1, 6))
    def turns(self, count: int) -> None:
        for _ in range(count):
            self.trial.turn()

    def teardown(self) -> None:
        if hasattr(self, "trial"):
            self.trial.finish()


class LongMachine(SchedulerMachine):
    """The same, for as long as one likes."""


_SETTINGS = settings(max_examples=NUM_EXAMPLES, stateful_step_count=12, suppress_health_check=list(HealthCheck))
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = _SETTINGS
TestLong = pytest.mark.long(LongMachine.TestCase)
TestLong.settings = settings(_SETTINGS, max_examples=NUM_LONG, stateful_step_count=40)
