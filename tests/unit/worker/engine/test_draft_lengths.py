"""How many drafts are verified: never at a loss, close to the best fixed number, and again when they get better.

Sequences are simulated whose drafts are right with a probability that only the test knows, on a machine whose steps
take what only the test knows; time is added up.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engine.draft_lengths import DraftLengths, StepCosts
from worker.engine.sequence import Sequence

MOST = 8
# Seconds of a step by its rows: flat as where weights are read once; with a kink as int8 has one; as dear as rows.
COSTS: dict[str, Callable[[int], float]] = {
    "flat": lambda rows: 1.0,
    "bfloat16": lambda rows: 1.0 + 0.01 * min(rows, 12) + 0.05 * max(0, rows - 12),
    "int8": lambda rows: 1.0 if rows <= 4 else 0.75 + 0.12 * rows,
    "compute": float,
}


class Machine:
    """Sequences that decode at once, with drafts; or without any where `lengths` is None.

    Args:
        lengths: decides.
        right: the probability that a draft is right behind right ones.
        cost: seconds of a step by its rows.
        num_seqs: that decode.
        seed: of the draws.
    """

    def __init__(
        self, lengths: DraftLengths, right: float, cost: Callable[[int], float], num_seqs: int, seed: int
    ) -> None:
        self.lengths = lengths
        self.right = right
        self.seqs = {seq.id: seq for seq in (Sequence([1], 16, id=i) for i in range(num_seqs))}
        self.seconds = 0.0
        self.tokens = 0
        self.verified = 0
        self._cost = cost
        self._rnd = random.Random(seed)

    def step(self) -> None:
        # What comes is 0s; a wrong draft is a 1.
        drafts = {seq_id: [int(self._rnd.random() >= self.right) for _ in range(MOST)] for seq_id in self.seqs}
        chosen = self.lengths.choose(drafts, self.seqs, len(self.seqs))
        rows = len(self.seqs) + sum(map(len, chosen.values()))
        for seq_id, seq in self.seqs.items():
            own = chosen.get(seq_id, [])
            self.lengths.decided(seq, drafts[seq_id], len(own))
            accepted = own.index(1) if 1 in own else len(own)
            if own:
                self.lengths.verified(seq, len(own), accepted)
            elif seq.draft_history is not None and seq.draft_history.shadow:
                self.lengths.came(seq.draft_history, 0)
            self.tokens += 1 + accepted
            self.verified += len(own)
        self.lengths.costs.note(rows, self._cost(rows))
        self.seconds += self._cost(rows)

    def rate(self, steps: int) -> float:
        """Tokens per second of so many steps."""
        tokens, seconds = self.tokens, self.seconds
        for _ in range(steps):
            self.step()
        return (self.tokens - tokens) / (self.seconds - seconds)


def fixed(right: float, cost: Callable[[int], float], num_seqs: int, count: int) -> float:
    """Tokens per second with always so many drafts, on average."""
    each = sum(right**i for i in range(count + 1))
    return num_seqs * each / cost(num_seqs * (1 + count))


@pytest.mark.parametrize("name", list(COSTS))
@pytest.mark.parametrize("num_seqs", [1, 8])
@pytest.mark.parametrize("right", [0.0, 0.3, 0.6, 0.9])
def test_it_never_loses_and_comes_close_to_the_best_number(name: str, num_seqs: int, right: float) -> None:
    machine = Machine(DraftLengths(MOST, adapts=True), right, COSTS[name], num_seqs, 1)
    machine.rate(100)
    found = machine.rate(1500)
    assert found >= 0.97 * fixed(right, COSTS[name], num_seqs, 0)
    assert found >= 0.88 * max(fixed(right, COSTS[name], num_seqs, count) for count in range(MOST + 1))


@pytest.mark.parametrize("name", ["flat", "int8"])
def test_drafts_that_get_better_are_taken_up_again(name: str) -> None:
    machine = Machine(DraftLengths(MOST, adapts=True), 0.0, COSTS[name], 1, 2)
    machine.rate(200)
    before = machine.verified
    machine.rate(200)
    assert machine.verified == before, "a step verified drafts that are never right"
    machine.right = 0.95
    machine.rate(60)
    assert machine.rate(100) > 1.5


def test_without_it_all_drafts_are_verified() -> None:
    machine = Machine(DraftLengths(MOST, adapts=False), 0.0, COSTS["compute"], 3, 3)
    machine.rate(10)
    assert machine.verified == 10 * 3 * MOST


@settings(max_examples=200)
@given(
    st.dictionaries(st.integers(0, 5), st.lists(st.integers(0, 9), min_size=1, max_size=MOST)),
    st.lists(st.tuples(st.integers(1, 60), st.floats(1e-4, 10.0)), max_size=30),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, MOST)), max_size=30),
)
def test_choices_are_beginnings_of_what_there_is(
    drafts: dict[int, list[int]], steps: list[tuple[int, float]], learned: list[tuple[int, int]]
) -> None:
    lengths = DraftLengths(MOST, adapts=True)
    seqs = {i: Sequence([1], 16, id=i) for i in range(6)}
    for rows, duration_s in steps:
        lengths.costs.note(rows, duration_s)
    for seq_id, accepted in learned:
        lengths.verified(seqs[seq_id], MOST, accepted)
    chosen = lengths.choose(drafts, seqs, len(seqs))
    assert all(own and drafts[seq_id][: len(own)] == own for seq_id, own in chosen.items())
    count = sum(map(len, chosen.values()))
    expected = len(seqs) + sum(sum(lengths._gains(seqs[seq_id], len(own))) for seq_id, own in chosen.items())
    if count:
        # What was measured says that it pays.
        assert expected / lengths.costs.of(len(seqs) + count) > len(seqs) / lengths.costs.of(len(seqs))


class TestStepCosts:
    def test_what_is_not_measured_lies_between_what_is(self) -> None:
        costs = StepCosts()
        assert costs.of(3) == costs.of(30)
        for _ in range(5):
            costs.note(2, 1.0)
            costs.note(4, 3.0)
        found = [costs.of(rows) for rows in (1, 2, 3, 4, 6)]
        assert found == pytest.approx([1.0, 1.0, 2.0, 3.0, 5.0], rel=0.01)

    def test_a_first_step_that_was_slow_is_soon_tried_again(self) -> None:
        costs = StepCosts()
        costs.note(8, 9.0)
        for _ in range(200):
            costs.note(1, 1.0)
        assert costs.of(8) < 1.0
        costs.note(8, 1.5)
        assert costs.of(8) < 2.0

    def test_one_slow_step_counts_little(self) -> None:
        costs = StepCosts()
        for duration_s in (1.0, 1.0, 500.0):
            costs.note(1, duration_s)
        assert costs.of(1) < 1.2

    def test_what_was_not_measured_for_long_counts_less(self) -> None:
        costs = StepCosts()
        for _ in range(3):
            costs.note(8, 9.0)
        for _ in range(1000):
            costs.note(1, 1.0)
        assert 3.0 < costs.of(8) < 3.6
        assert costs.of(1) == pytest.approx(1.0, rel=0.01)
