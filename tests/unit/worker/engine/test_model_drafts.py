"""Drafts that a model makes: never at a loss, whatever it takes, whatever steps take and whatever lies between them.

Sequences are simulated whose drafts are right with a probability that only the test knows, on a machine whose steps and
proposals take what only the test knows; time is added up from the begin of each step to that of the next one.
"""

from __future__ import annotations

import random
from itertools import count
from typing import TypeAlias

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.unit.mutants import Mutant, assert_noticed
from tests.unit.worker.engine.test_draft_lengths import Cost, curve
from worker.engine.draft_lengths import DraftLengths
from worker.engine.draft_savings import DraftSavings
from worker.engine.model_drafts import ModelDrafts, has_taken_in
from worker.engine.proposal_costs import Proposal, ProposalCosts
from worker.engine.sequence import Sequence
from worker.engine.step_costs import StepCosts

MOST = 4
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)


class Machine:
    """Sequences that decode at once, with drafts of a model.

    Args:
        right: the probability that a draft is right behind right ones.
        cost: seconds of a step by its rows.
        first: seconds of the first draft of all sequences, and of taking the rows in.
        further: seconds of each further one.
        between: seconds between two steps.
        num_seqs: that decode.
        seed: of the draws.
        noise: durations vary by this part.
        believed: what proposals are said to take, in what they do.
    """

    def __init__(
        self,
        right: float,
        cost: Cost,
        first: float,
        further: float,
        between: float,
        num_seqs: int,
        seed: int,
        *,
        noise: float = 0.0,
        believed: float = 1.0,
    ) -> None:
        self.lengths = DraftLengths(MOST, adapts=True)
        self.lengths.costs = StepCosts({rows: cost(rows) for rows in SIZES})
        known = (dict.fromkeys((1, 8, 32), believed * seconds) for seconds in (first, further))
        self.lengths.proposals = ProposalCosts(*known)
        self.model = ModelDrafts(self.lengths)
        self.right, self.cost, self.first, self.further, self.between = right, cost, first, further, between
        self.seconds, self.tokens, self.made, self.verified = 0.0, 0, 0, 0
        self._noise, self._rnd, self._ids = noise, random.Random(seed), count()
        self._ended: float | None = None
        self._drafts: dict[int, list[int]] = {}
        self.seqs: dict[int, Sequence] = {}
        self.take(num_seqs)

    def take(self, num_seqs: int) -> None:
        """Other sequences, so many, instead of those that there are."""
        self.seqs = {seq.id: seq for seq in (Sequence([1], 16, id=next(self._ids)) for _ in range(num_seqs))}
        self._drafts = {}

    def step(self) -> None:
        # What comes is 0s; a wrong draft is a 1.
        drafts, num_seqs = self._drafts, len(self.seqs)
        chosen = self.lengths.choose(drafts, self.seqs, num_seqs)
        self.lengths.decided(drafts, self.seqs, chosen)
        most = dict.fromkeys(self.seqs, MOST)
        wanted = {} if self.model.rests else self.model.plan(most, self.seqs, num_seqs)
        rows = num_seqs + sum(map(len, chosen.values()))
        longest = max(wanted.values(), default=0)
        duration_s = self.cost(rows) + (self.first + (longest - 1) * self.further if wanted else 0.0)
        duration_s *= 1 + self._rnd.uniform(-self._noise, self._noise)
        wall_s = duration_s + self.between
        proposal = Proposal(rows, len(wanted), longest) if wanted else None
        self.lengths.took(num_seqs, rows, duration_s, wall_s, proposal)
        for seq_id, seq in self.seqs.items():
            own = chosen.get(seq_id, [])
            accepted = own.index(1) if 1 in own else len(own)
            if own:
                self.lengths.verified(seq, len(own), accepted)
            elif seq.draft_history is not None and seq.draft_history.shadow:
                self.lengths.came(seq.draft_history, 0)
            self.tokens += 1 + accepted
            self.verified += len(own)
        self._drafts = {
            seq_id: [int(self._rnd.random() >= self.right) for _ in range(most)] for seq_id, most in wanted.items()
        }
        self.made += sum(wanted.values())
        self.seconds += wall_s

    def rate(self, steps: int) -> float:
        """Tokens per second of so many steps."""
        tokens, seconds = self.tokens, self.seconds
        for _ in range(steps):
            self.step()
        return (self.tokens - tokens) / (self.seconds - seconds)

    @property
    def plain(self) -> float:
        """Tokens per second without drafts."""
        return len(self.seqs) / (self.cost(len(self.seqs)) + self.between)

    def excess(self, steps: int) -> float:
        """What so many steps take, in what plain ones take for the same tokens."""
        return self.plain / self.rate(steps)


def best(machine: Machine) -> float:
    """Tokens per second of the best fixed number of drafts, on average."""
    rates = [machine.plain]
    for most in range(1, MOST + 1):
        each = sum(machine.right**i for i in range(most + 1))
        step_s = machine.cost(len(machine.seqs) * (1 + most)) + machine.first + (most - 1) * machine.further
        rates.append(len(machine.seqs) * each / (step_s + machine.between))
    return max(rates)


WORKLOADS = st.tuples(
    st.lists(st.sampled_from([0.0, 0.0, 0.01, 0.05, 0.3, 1.0]), min_size=3, max_size=60),
    st.tuples(st.sampled_from([0.0, 0.1, 0.5, 2.0, 9.0]), st.sampled_from([0.0, 0.1, 0.5, 3.0])),
    st.sampled_from([0.0, 0.3, 2.0]),
    st.sampled_from([0.0, 0.1, 0.3, 0.6, 0.8, 0.95]),
    st.sampled_from([1, 2, 8, 32]),
    st.sampled_from([0.0, 0.05]),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.integers(0, 99),
)
Workload: TypeAlias = tuple[list[float], tuple[float, float], float, float, int, float, float, int]


def machine_of(workload: Workload) -> Machine:
    seconds, (first, further), between, right, num_seqs, noise, believed, seed = workload
    return Machine(right, curve(seconds), first, further, between, num_seqs, seed, noise=noise, believed=believed)


def never_loses(workload: Workload) -> None:
    """From the first step on, and when it all changes."""
    machine = machine_of(workload)
    assert machine.excess(300) <= 1.03
    machine.take(33 - workload[4])
    machine.right = 0.5 * machine.right
    assert machine.excess(300) <= 1.03
    machine.first, machine.further = 2 * machine.first, 2 * machine.further
    assert machine.excess(300) <= 1.03


@settings(max_examples=20, deadline=None, phases=(Phase.generate,))
@given(WORKLOADS)
def test_it_never_takes_longer_than_plain_decoding(workload: Workload) -> None:
    never_loses(workload)


@pytest.mark.parametrize("right", [0.6, 0.8, 0.95])
@pytest.mark.parametrize("costs", [(0.1, 0.1, 0.0), (0.4, 0.3, 0.0), (0.4, 0.3, 2.0)])
@pytest.mark.parametrize("num_seqs", [1, 8])
def test_it_comes_close_to_the_best_number(right: float, costs: tuple[float, float, float], num_seqs: int) -> None:
    machine = Machine(right, curve([0.02]), *costs, num_seqs, 1)
    machine.rate(200)
    assert machine.rate(3000) >= 0.88 * best(machine)


def test_time_between_steps_is_what_drafts_save() -> None:
    """Drafts that cost what they bring pay where steps lie far apart."""
    costs = curve([0.02])
    assert Machine(0.6, costs, 0.6, 0.6, 0.0, 1, 1).rate(500) < 1.05
    apart = Machine(0.6, costs, 0.6, 0.6, 3.0, 1, 1)
    assert apart.rate(1000) > 1.15 * apart.plain


def test_a_model_that_is_not_worth_it_rests() -> None:
    machine = Machine(0.3, curve([0.02]), 0.4, 0.4, 0.0, 1, 1)
    machine.rate(500)
    before = machine.made
    machine.rate(1000)
    assert 0 < machine.made - before < 60, "a trial now and then"


@pytest.mark.parametrize("believed", [1.0, 3.0])
def test_drafts_that_get_better_are_taken_up_again(believed: float) -> None:
    """Nor does it end drafts for good if they are thought to take longer than they do."""
    machine = Machine(0.1, curve([0.02]), 0.1, 0.1, 0.0, 1, 1, believed=believed)
    machine.rate(500)
    machine.right = 0.95
    machine.rate(2500)
    assert machine.rate(300) > 1.5 * machine.plain


def test_a_sequence_that_was_not_taken_in_is_left_alone() -> None:
    lengths = DraftLengths(MOST, adapts=True)
    seqs = {i: Sequence([1] * 80, 16, id=i) for i in range(2)}
    seqs[0].num_missed, seqs[1].num_missed = 41, 40
    assert [has_taken_in(seq) for seq in seqs.values()] == [False, True]
    assert ModelDrafts(lengths).plan({0: 3, 1: 2}, seqs, 2) == {1: 2}


def test_without_adaption_it_makes_all_drafts() -> None:
    lengths, seqs = DraftLengths(MOST, adapts=False), {0: Sequence([1], 16, id=0)}
    seqs[0].num_missed = 1
    assert ModelDrafts(lengths).plan({0: 3}, seqs, 1) == {0: 3}


def test_prompts_are_taken_in_for_a_small_part_of_the_time() -> None:
    """Where drafts do not pay: so that they may later."""
    machine, taken = Machine(0.1, curve([0.02]), 2.0, 2.0, 0.0, 1, 1), 0
    for _ in range(1000):
        if machine.model.takes_prompts:
            machine.lengths.took_in(1)
            taken += 1
        machine.step()
    assert 3 <= taken <= 6, "two seconds of a thousand, each"
    assert machine.model.takes_prompts is machine.lengths.may_take_in


def test_what_proposals_take_is_on_a_line_and_learnt() -> None:
    costs = ProposalCosts({1: 1.0, 8: 2.4}, {1: 0.5, 8: 0.5})
    assert [costs.of(Proposal(rows, rows, 1)) for rows in (1, 3, 8, 16)] == pytest.approx([1.0, 1.4, 2.4, 4.8])
    assert costs.of(Proposal(8, 4, 3)) == pytest.approx(3.4)
    assert costs.of(Proposal(8)) == pytest.approx(2.4)
    for _ in range(100):
        costs.note(Proposal(8, 8, 1), 7.2)
    assert costs.of(Proposal(1, 1, 1)) == pytest.approx(3.0, rel=1e-3)
    assert ProposalCosts().of(Proposal(8, 8, 4)) == 0.0


LOSSES: list[Workload] = [
    ([0.02] * 3, (9.0, 3.0), 0.0, 0.6, 1, 0.0, 1.0, 1),
    ([0.02] * 3, (2.0, 0.5), 0.0, 0.6, 8, 0.05, 0.3, 2),
    ([1.0] * 3, (0.5, 0.5), 2.0, 0.3, 2, 0.05, 1.0, 3),
    ([0.02] * 3, (0.4, 0.4), 0.0, 0.3, 1, 0.0, 1.0, 4),
]
MUTANTS = [
    Mutant("proposals are free", DraftLengths, "drafting_s", "self.proposals.of(proposal)", "0.0"),
    Mutant("any gain is enough", ModelDrafts, "_best", "(rate := tokens / seconds) > best", "(rate := 1.0) > 0.0"),
    Mutant("all drafts are right", DraftLengths, "verified", "learn_run(num_accepted,", "learn_run(num_drafts,"),
    Mutant("a trial has no end", ModelDrafts, "_tried", "self._trial -= 1", "pass"),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.trap)
def test_a_fault_shows(mutant: Mutant) -> None:
    """Of the decision alone: the account would end what loses."""
    account = Mutant("no account", DraftSavings, "allows_beyond", "self._balance_s >= -seconds", "True")
    with account.applied():
        assert_noticed(mutant, lambda number: never_loses(LOSSES[number]), range(len(LOSSES)))


@pytest.mark.parametrize("decision", MUTANTS, ids=lambda mutant: mutant.trap)
def test_the_account_ends_what_loses_whatever_the_decision_says(decision: Mutant) -> None:
    """But for the first step, where that alone is beyond all that may be lost."""
    with decision.applied():
        for workload in LOSSES[1:]:
            never_loses(workload)
