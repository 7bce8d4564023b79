"""Drafts that a model makes: never at a loss, whatever it takes, whatever steps take and whatever lies between them.

Simulated (draft_machine.py); time is added up from the begin of each step to that of the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from typing_extensions import override

from tests.unit.mutants import Mutant, assert_noticed
from tests.unit.worker.engine.speculation.draft_machine import SIZES, Cost, DraftMachine, curve
from worker.engine.sequence import Sequence
from worker.engine.speculation.draft_controller import DraftController
from worker.engine.speculation.draft_rates import DraftRates
from worker.engine.speculation.step_costs import Proposal, StepCosts

MOST = 4
# Tokens of a prompt.
PROMPT = 20
# Plain steps behind drafts until one takes what plain ones take.
COLD = 6


class Machine(DraftMachine):
    """Sequences with drafts of a model.

    Args:
        right, cost, num_seqs, seed, noise, interrupted: as of DraftMachine.
        first: seconds of the first draft of all sequences, and of taking up to 32 rows in; in proportion beyond.
        further: seconds of each further one.
        between: seconds between two steps.
        believed: what proposals are said to take, in what they do.
        cold: a plain step behind others takes longer by this part, the next ones by less.
        answer: steps of a sequence, and then there are others, with prompts; 0 for no end.
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
        interrupted: tuple[float, float] = (0.0, 0.0),
        believed: float = 1.0,
        cold: float = 0.0,
        answer: int = 0,
    ) -> None:
        controller = DraftController(MOST, adapts=True)
        known = (dict.fromkeys((1, 8, 32), believed * seconds) for seconds in (first, further))
        controller.costs = StepCosts({rows: cost(rows) for rows in SIZES}, 0.0, *known)
        self.first, self.further, self.between = first, further, between
        self.made = 0
        self._cold, self._answer = cold, answer
        self._num_plain, self._num_steps = COLD, 0
        self._prompts_s, self._saved = 0.0, 0.0
        self._drafts: dict[int, list[int]] = {}
        super().__init__(controller, right, cost, num_seqs, seed, noise, interrupted)

    @override
    def take(self, num_seqs: int) -> None:
        super().take(num_seqs)
        self._drafts = {}
        if self._answer:
            self._prompts()

    def _prompts(self) -> None:
        """A step of the prompt that all have, for which the model takes what it takes for other rows."""
        rows = PROMPT
        self.seconds += self.cost(rows)
        self._prompts_s += self.cost(rows)
        wanted = self._wanted(has_prompts=True)
        if wanted or self.controller.takes_prompts(len(self.seqs)):
            longest = max(wanted.values(), default=0)
            self.seconds += self.proposal_s(rows, max(1, longest))
            self.controller.note_prompts(self.cost(rows), Proposal(rows, len(wanted), longest))
            self._make(wanted)
        else:
            self.controller.note_prompts(self.cost(rows), None)
            for seq in self.seqs.values():
                seq.num_missed = seq.num_tokens
        for seq in self.seqs.values():
            seq.token_ids += [0] * PROMPT

    def proposal_s(self, rows: int, longest: int) -> float:
        """Seconds that the model takes for so many drafts in a step of so many rows."""
        return self.first * max(1.0, rows / 32) + (longest - 1) * self.further

    def _wanted(self, *, has_prompts: bool = False) -> dict[int, int]:
        if not self.controller.looks(has_prompts=has_prompts):
            return {}
        most = {seq_id: MOST for seq_id, seq in self.seqs.items() if 2 * seq.num_missed <= seq.num_tokens}
        return self.controller.plan(most, self.seqs, len(self.seqs))

    def _make(self, wanted: Mapping[int, int]) -> None:
        self._drafts = {seq_id: self.guess(most) for seq_id, most in wanted.items()}
        self.made += sum(wanted.values())

    @override
    def step(self) -> None:
        self._num_steps += 1
        if self._answer and self._num_steps % self._answer == 0:
            self.take(len(self.seqs))
        chosen, num_seqs = self.chosen(self._drafts), len(self.seqs)
        wanted = self._wanted()
        rows = num_seqs + sum(map(len, chosen.values()))
        longest = max(wanted.values(), default=0)
        duration_s = self.cost(rows) + (self.proposal_s(rows, longest) if wanted else 0.0)
        self._num_plain = 0 if wanted else self._num_plain + 1
        if 0 < self._num_plain < COLD:
            duration_s *= 1 + self._cold / 2**self._num_plain
        duration_s = self.varied(duration_s)
        wall_s = duration_s + self.between
        proposal = Proposal(rows, len(wanted), longest) if wanted else None
        self.controller.note_step(num_seqs, rows, duration_s, wall_s, proposal)
        self.land(chosen)
        if self._answer:
            for seq in self.seqs.values():
                seq.token_ids.append(0)
                seq.num_missed += not wanted
        self._make(wanted)
        self.seconds += wall_s

    def lost(self, steps: int) -> float:
        """Seconds that so many steps take longer than plain ones for the same tokens, beyond 2 % of the time, two
        steps with all drafts and 20 plain ones: what is paid back later. What was saved before pays for 12 more."""
        seconds, tokens, prompts_s = self.seconds, self.tokens, self._prompts_s
        self.rate(steps)
        plain_s = (self.tokens - tokens) / self.plain + self._prompts_s - prompts_s
        rows = len(self.seqs) * (1 + MOST)
        dearest = self.cost(rows) + self.proposal_s(rows, MOST) + self.between
        lost = self.seconds - seconds - 1.02 * plain_s - 2 * dearest - 20 * len(self.seqs) / self.plain
        paid = min(self._saved, 12 * len(self.seqs) / self.plain)
        self._saved = max(0.0, self._saved - (self.seconds - seconds - plain_s))
        return lost - paid

    @property
    @override
    def plain(self) -> float:
        return len(self.seqs) / (self.cost(len(self.seqs)) + self.between)


def best(machine: Machine) -> float:
    """Tokens per second of the best fixed number of drafts, on average."""
    rates = [machine.plain]
    for most in range(1, MOST + 1):
        each = sum(machine.right**i for i in range(most + 1))
        rows = len(machine.seqs) * (1 + most)
        step_s = machine.cost(rows) + machine.proposal_s(rows, most)
        rates.append(len(machine.seqs) * each / (step_s + machine.between))
    return max(rates)


WORKLOADS = st.tuples(
    st.lists(st.sampled_from([0.0, 0.0, 0.01, 0.05, 0.3, 1.0]), min_size=3, max_size=60),
    st.tuples(st.sampled_from([0.0, 0.1, 0.5, 2.0, 9.0]), st.sampled_from([0.0, 0.1, 0.5, 3.0])),
    st.sampled_from([0.0, 0.3, 2.0]),
    st.sampled_from([0.0, 0.1, 0.3, 0.6, 0.8, 0.95]),
    st.sampled_from([1, 2, 8, 32]),
    st.sampled_from([0.0, 0.05]),
    st.sampled_from([0.7, 1.0, 2.0]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([0, 20, 70, 200]),
    st.integers(0, 99),
)
Workload: TypeAlias = tuple[list[float], tuple[float, float], float, float, int, float, float, float, int, int]


def machine_of(workload: Workload) -> Machine:
    seconds, (first, further), between, right, num_seqs, noise, believed, cold, answer, seed = workload
    costs = right, curve(seconds), first, further, between
    return Machine(*costs, num_seqs, seed, noise=noise, believed=believed, cold=cold, answer=answer)


def never_loses(workload: Workload) -> None:
    """From the first step on, and when it all changes."""
    machine = machine_of(workload)
    assert machine.lost(400) <= 0
    machine.take(33 - workload[4])
    machine.right = 0.5 * machine.right
    assert machine.lost(400) <= 0
    machine.first, machine.further = 2 * machine.first, 2 * machine.further
    assert machine.lost(400) <= 0


@settings(max_examples=20, deadline=None, phases=(Phase.generate,))
@given(WORKLOADS)
def test_drafts_never_take_longer_than_plain_decoding(workload: Workload) -> None:
    never_loses(workload)


@pytest.mark.each_value
@pytest.mark.parametrize("right", [0.6, 0.8, 0.95])
@pytest.mark.parametrize("costs", [(0.1, 0.1, 0.0), (0.4, 0.3, 0.0), (0.4, 0.3, 2.0)])
@pytest.mark.parametrize("num_seqs", [1, 8])
def test_draft_model_rate_nears_best_fixed_number(
    right: float, costs: tuple[float, float, float], num_seqs: int
) -> None:
    machine = Machine(right, curve([0.02]), *costs, num_seqs, 1)
    machine.rate(200)
    assert machine.rate(3000) >= 0.88 * best(machine)


def gains_on_a_busy_machine(case: tuple[float, float, float, float, float], seed: int) -> None:
    """Half of its time goes to others, for several steps at a time: plain steps and longer ones are delayed alike."""
    right, first, further, often, longest = case
    costs = curve([0.02]), first, further, 0.0
    machine = Machine(right, *costs, 1, seed, interrupted=(often, longest), cold=0.5, answer=200)
    machine.rate(300)
    assert machine.rate(3000) * (1 + often * longest) >= 0.85 * best(machine)


BUSY = [(0.95, 0.8, 0.6, 0.1, 10.0), (0.8, 0.4, 0.3, 0.1, 10.0), (0.6, 0.1, 0.1, 0.3, 3.0)]


@pytest.mark.parametrize("case", BUSY)
def test_busy_machine_gains_as_much_from_drafts(case: tuple[float, float, float, float, float]) -> None:
    for seed in range(3):
        gains_on_a_busy_machine(case, seed)


BUSY_MUTANTS = [
    Mutant("interruptions are the drafts' fault", DraftController, "note_step",
           "min(passed_s, max(expected_s + plain_s, min(self._last_s)))", "passed_s"),
]  # fmt: skip


@pytest.mark.parametrize("mutant", BUSY_MUTANTS, ids=lambda mutant: mutant.trap)
def test_controller_fault_shows_on_busy_machine(mutant: Mutant) -> None:
    def gains(seed: int) -> None:
        for case in BUSY:
            gains_on_a_busy_machine(case, seed)

    assert_noticed(mutant, gains, range(3))


def test_expensive_draft_model_with_good_drafts_is_tried() -> None:
    """Nobody knows before the first trial how often it is right."""
    machine = Machine(0.9, curve([0.02]), 0.8, 0.5, 0.0, 1, 1)
    machine.rate(200)
    assert machine.rate(1000) >= 0.95 * best(machine) > 1.1 * machine.plain


def test_drafts_save_time_between_steps() -> None:
    """Drafts that cost what they bring pay where steps lie far apart."""
    costs = curve([0.02])
    assert Machine(0.6, costs, 0.6, 0.6, 0.0, 1, 1).rate(500) < 1.05
    apart = Machine(0.6, costs, 0.6, 0.6, 3.0, 1, 1)
    assert apart.rate(1000) > 1.15 * apart.plain


def test_draft_model_that_does_not_pay_rests() -> None:
    machine = Machine(0.3, curve([0.02]), 0.4, 0.4, 0.0, 1, 1)
    machine.rate(500)
    before = machine.made
    machine.rate(1000)
    assert 0 < machine.made - before < 60, "a trial now and then"


@pytest.mark.parametrize("believed", [1.0, 3.0])
def test_better_drafts_are_used_again(believed: float) -> None:
    """Nor does it end drafts for good if they are thought to take longer than they do."""
    machine = Machine(0.1, curve([0.02]), 0.1, 0.1, 0.0, 1, 1, believed=believed)
    machine.rate(500)
    machine.right = 0.95
    machine.rate(2500)
    assert machine.rate(300) > 1.5 * machine.plain


def test_hard_answer_stops_drafts_only_for_itself() -> None:
    """One in eight: drafts end within it, and the easy ones behind it have theirs."""

    def drafts_of_each_kind(seed: int) -> None:
        machine, made = Machine(0.95, curve([0.15]), 0.6, 0.13, 0.0, 1, seed, answer=40), {True: 0, False: 0}
        for number in range(24):
            is_hard, before = number % 8 == 7, machine.made
            machine.right = 0.05 if is_hard else 0.95
            machine.rate(40)
            made[is_hard] += 0 if number < 8 else machine.made - before
        assert made[False] > 0.9 * MOST * 14 * 40
        assert made[True] < 0.4 * MOST * 2 * 40

    for seed in range(3):
        drafts_of_each_kind(seed)
    mutant = Mutant("learns slowly", DraftController, "verified", "num_drafts, SEQUENCE_WEIGHT)", "num_drafts, 0.02)")
    assert_noticed(mutant, drafts_of_each_kind, range(3))


def test_made_drafts_of_single_sequence_are_all_verified() -> None:
    """Their number was chosen by what is known, a step ago; but what a grammar forces is not of them."""
    controller, seqs = DraftController(MOST, adapts=True), {0: Sequence([1], 16, id=0)}
    controller.costs = StepCosts({rows: float(rows) for rows in SIZES})
    for _ in range(20):
        controller.verified(seqs[0], MOST, 0)
    controller.are_made = True
    assert controller.choose({0: [5, 6]}, seqs, 1, {}) == {0: [5, 6]}
    assert controller.choose({0: [5, 6]}, seqs, 1, {0: DraftRates([0.1])}) == {}


def test_drafts_are_tried_soon_with_fewer_sequences() -> None:
    """What did not pay for many may for one, however long the rest is that followed."""

    def is_tried(seed: int) -> None:
        machine = Machine(0.2, curve([0.02]), 0.4, 0.2, 0.0, 8, seed)
        machine.rate(4000)
        machine.take(1)
        machine.right, before = 0.9, machine.made
        machine.rate(200)
        assert machine.made > before

    for seed in range(3):
        is_tried(seed)


def test_draft_model_without_adaption_makes_all_drafts() -> None:
    controller, seqs = DraftController(MOST, adapts=False), {0: Sequence([1], 16, id=0)}
    seqs[0].num_missed = 1
    assert controller.plan({0: 3}, seqs, 1) == {0: 3}


def test_draft_model_computes_prompts_for_small_part_of_time() -> None:
    """Where drafts do not pay: so that they may later."""
    machine, taken = Machine(0.1, curve([0.02]), 2.0, 2.0, 0.0, 1, 1), 0
    for _ in range(1000):
        if machine.controller.takes_prompts(1):
            machine.controller.note_prompts(1.0, Proposal(1))
            taken += 1
        machine.step()
    assert 3 <= taken <= 6, "two seconds each, of four and a two-hundredth of a thousand"


LOSSES: list[Workload] = [
    ([0.02] * 3, (9.0, 3.0), 0.0, 0.6, 1, 0.0, 1.0, 0.0, 0, 1),
    ([0.02] * 3, (2.0, 0.5), 0.0, 0.6, 8, 0.05, 0.3, 0.0, 0, 2),
    ([1.0] * 3, (0.5, 0.5), 2.0, 0.3, 2, 0.05, 1.0, 0.0, 0, 3),
    ([0.02] * 3, (0.4, 0.4), 0.0, 0.3, 1, 0.0, 1.0, 0.0, 0, 4),
]
NO_CREDIT = Mutant("no credit", DraftController, "_may_draft", "self._credit >= lowest", "True")
MUTANTS = [
    Mutant("making is free", StepCosts, "drafting_s", "self.making_s(proposal)", "0.0"),
    Mutant("any gain is enough", DraftController, "_best", "tokens / self.", "(1 + number) * 1e9 * self."),
    Mutant("all drafts are right", DraftController, "verified", "learn_run(num_accepted,", "learn_run(num_drafts,"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.trap)
def test_fault_in_prediction_shows_without_credit(mutant: Mutant) -> None:
    with NO_CREDIT.applied():
        assert_noticed(mutant, lambda number: never_loses(LOSSES[number]), range(len(LOSSES)))


def test_trial_needs_credit() -> None:
    """Else a model whose drafts are wrong would be tried all the time."""

    def rests(seed: int) -> None:
        machine = Machine(0.3, curve([0.02]), 0.4, 0.4, 0.0, 1, seed)
        machine.rate(200)
        before = machine.made
        machine.rate(1000)
        assert machine.made - before < 60

    with NO_CREDIT.applied():
        for seed in range(8):
            rests(seed)
        mutant = Mutant("trials without credit", DraftController, "plan", "and self._may_try", "and True")
        assert_noticed(mutant, rests, range(8))


def test_settling_plain_steps_are_not_counted() -> None:
    """They take longer, so drafts that lose would look as if they paid."""

    def loses_nothing(seed: int) -> None:
        costs = 0.8, 0.2, 0.0
        assert Machine(0.6, curve([0.02]), *costs, 1, seed, believed=0.5, cold=1.0, answer=200).lost(2000) <= 0

    mutant = Mutant("no settling", DraftController, "_note_drafts", "_SETTLING if by_model", "0 if by_model")
    assert_noticed(mutant, loses_nothing, range(3))
    for seed in range(3):
        loses_nothing(seed)


def test_slower_machine_keeps_drafts_that_pay() -> None:
    """Steps of a run are compared with plain ones after it too, not only with those before."""

    def gains(seed: int) -> None:
        machine = Machine(0.8, curve([0.02]), 0.4, 0.3, 0.0, 1, seed)
        machine.rate(500)
        cost, first, further = machine.cost, machine.first, machine.further
        machine.cost, machine.first, machine.further = (lambda rows: 3 * cost(rows)), 3 * first, 3 * further
        made = machine.made
        machine.rate(300)
        assert machine.made - made > 500

    for seed in range(3):
        gains(seed)
    mutant = Mutant("old plain steps", DraftController, "_note_plain", "self._spent / longer", "self._spent")
    assert_noticed(mutant, gains, range(3))


@pytest.mark.parametrize("decision", MUTANTS, ids=lambda mutant: mutant.trap)
def test_credit_bounds_losses_of_wrong_predictions(decision: Mutant) -> None:
    """But for the first step, where that alone is more than all that may be lost."""
    with decision.applied():
        for workload in LOSSES[1:]:
            never_loses(workload)
