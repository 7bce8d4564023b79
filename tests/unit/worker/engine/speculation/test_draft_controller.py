"""How many drafts are verified: never at a loss, close to the best fixed number, and again when they get better.

Simulated (draft_machine.py).
"""

from __future__ import annotations

from collections.abc import Iterable
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
from worker.engine.speculation.step_costs import StepCosts

MOST = 8
# Factor of tokens per second that drafts promise to start.
START_GAIN = 1.05
# Flat as where weights are read once; with a kink as int8 has one; as dear as rows.
COSTS: dict[str, Cost] = {
    "flat": lambda rows: 1.0,
    "bfloat16": lambda rows: 1.0 + 0.01 * min(rows, 12) + 0.05 * max(0, rows - 12),
    "int8": lambda rows: 1.0 if rows <= 4 else 0.75 + 0.12 * rows,
    "compute": float,
}


class Machine(DraftMachine):
    """Sequences behind which there are always drafts.

    Args:
        right, cost, num_seqs, seed, noise: as of DraftMachine.
        measured: sizes whose durations are known at the start; none knows nothing.
    """

    def __init__(
        self,
        right: float,
        cost: Cost,
        num_seqs: int,
        seed: int,
        *,
        noise: float = 0.0,
        measured: Iterable[int] = SIZES,
    ) -> None:
        controller = DraftController(MOST, adapts=True)
        controller.costs = StepCosts({rows: cost(rows) for rows in measured})
        super().__init__(controller, right, cost, num_seqs, seed, noise)

    @override
    def step(self) -> None:
        chosen = self.chosen({seq_id: self.guess(MOST) for seq_id in self.seqs})
        rows = len(self.seqs) + sum(map(len, chosen.values()))
        duration_s = self.varied(self.cost(rows))
        self.controller.note_step(len(self.seqs), rows, duration_s)
        self.land(chosen)
        self.seconds += duration_s


def fixed(right: float, cost: Cost, num_seqs: int, count: int) -> float:
    """Tokens per second with always so many drafts, on average."""
    each = sum(right**i for i in range(count + 1))
    return num_seqs * each / cost(num_seqs * (1 + count))


@pytest.mark.each_value
@pytest.mark.parametrize("name", list(COSTS))
@pytest.mark.parametrize("num_seqs", [1, 8])
@pytest.mark.parametrize("right", [0.0, 0.3, 0.6, 0.9])
def test_controller_never_loses_and_nears_best_fixed_number(name: str, num_seqs: int, right: float) -> None:
    machine = Machine(right, COSTS[name], num_seqs, 1)
    machine.rate(100)
    found = machine.rate(1000)
    assert found >= 0.985 * fixed(right, COSTS[name], num_seqs, 0)
    assert found >= 0.88 * max(fixed(right, COSTS[name], num_seqs, count) for count in range(MOST + 1))


WORKLOADS = st.tuples(
    st.lists(st.sampled_from([0.0, 0.0, 0.01, 0.05, 0.3, 1.0]), min_size=3, max_size=60),
    st.sampled_from([0.0, 0.1, 0.3, 0.6, 0.8, 0.95]),
    st.sampled_from([1, 2, 8, 32]),
    st.sampled_from([0.0, 0.05]),
    st.integers(0, 99),
)
Workload: TypeAlias = tuple[list[float], float, int, float, int]


def never_loses(workload: Workload) -> None:
    """Whatever steps cost and however often drafts are right: from the first step on, and when it all changes. But for
    2 % of the time and eight plain steps: what is paid back later."""
    seconds, right, num_seqs, noise, seed = workload
    machine, num_steps = Machine(right, curve(seconds), num_seqs, seed, noise=noise), 250
    assert machine.excess(num_steps) <= 1.02 + 8 / num_steps
    machine.take(33 - num_seqs)
    machine.right = 0.5 * right
    assert machine.excess(num_steps) <= 1.02 + 8 / num_steps


@settings(max_examples=20, deadline=None, phases=(Phase.generate,))
@given(WORKLOADS)
def test_drafts_never_take_longer_than_plain_decoding(workload: Workload) -> None:
    never_loses(workload)


@pytest.mark.parametrize("measured", [(), (1,), (1, 64)])
@pytest.mark.parametrize("right", [0.1, 0.95])
def test_unmeasured_costs_are_learnt(measured: tuple[int, ...], right: float) -> None:
    machine = Machine(right, float, 8, 1, measured=measured)
    machine.rate(200)
    assert machine.excess(200) <= 1.03


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_costs_measured_too_low_lose_little(share: float) -> None:
    """Rows beyond those of plain steps are thought to take a part of what they take."""
    machine = Machine(0.3, COSTS["compute"], 8, 1)
    machine.controller.costs = StepCosts({rows: min(rows, 8) + share * max(0, rows - 8) for rows in SIZES})
    machine.rate(300)
    assert machine.excess(300) <= 1.03


def test_temporary_slowdown_changes_no_choice() -> None:
    machine = Machine(0.8, COSTS["bfloat16"], 1, 1, noise=0.05)
    before = machine.rate(300)
    cost = machine.cost
    machine.cost = lambda rows: 3 * cost(rows)
    assert machine.rate(300) >= 0.9 * before / 3
    machine.cost = cost
    assert machine.rate(300) >= 0.9 * before


LOSSES: list[Workload] = [
    ([1.0, 1.0, 1.0], 0.1, 8, 0.0, 1),
    ([0.05] * 40, 0.6, 32, 0.05, 2),
    ([0.3] * 30, 0.3, 2, 0.05, 3),
]
NO_CREDIT = Mutant("no credit", DraftController, "_may_draft", "self._credit >= lowest", "True")
MUTANTS = [
    Mutant("rows are free", DraftController, "_count", "self.costs.longer(rows, num_drafts)", "np.ones(num_drafts)"),
    Mutant("any gain is enough", DraftController, "_count", "if per_needed[best] > 1.0", "if True"),
    Mutant("all drafts are right", DraftController, "verified", "learn_run(num_accepted,", "learn_run(num_drafts,"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.trap)
def test_fault_in_prediction_shows_without_credit(mutant: Mutant) -> None:
    with NO_CREDIT.applied():
        for workload in LOSSES:
            never_loses(workload)
        assert_noticed(mutant, lambda number: never_loses(LOSSES[number]), range(len(LOSSES)))


def test_credit_bounds_losses_of_wrong_predictions() -> None:
    with MUTANTS[1].applied():
        for workload in LOSSES:
            never_loses(workload)


@pytest.mark.parametrize("name", ["flat", "int8"])
def test_better_drafts_are_used_again(name: str) -> None:
    machine = Machine(0.0, COSTS[name], 1, 2)
    machine.rate(200)
    before = machine.verified
    machine.rate(200)
    assert machine.verified == before, "a step verified drafts that are never right"
    machine.right = 0.95
    machine.rate(60)
    assert machine.rate(100) > 1.5


def test_controller_without_adaption_verifies_all_drafts() -> None:
    machine = Machine(0.0, COSTS["compute"], 3, 3)
    machine.controller = DraftController(MOST, adapts=False)
    machine.rate(10)
    assert machine.verified == 10 * 3 * MOST


@settings(max_examples=200)
@given(
    st.dictionaries(st.integers(0, 5), st.lists(st.integers(0, 9), min_size=1, max_size=MOST)),
    st.lists(st.tuples(st.integers(1, 60), st.floats(1e-4, 10.0)), max_size=30),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, MOST)), max_size=30),
)
def test_chosen_drafts_are_prefixes_of_all_drafts(
    drafts: dict[int, list[int]], steps: list[tuple[int, float]], learned: list[tuple[int, int]]
) -> None:
    controller = DraftController(MOST, adapts=True)
    seqs = {i: Sequence([1], 16, id=i) for i in range(6)}
    controller.costs = StepCosts(dict(steps))
    for seq_id, accepted in learned:
        controller.verified(seqs[seq_id], MOST, accepted)
    chosen = controller.choose(drafts, seqs, len(seqs), {})
    assert all(own and drafts[seq_id][: len(own)] == own for seq_id, own in chosen.items())
    count = sum(map(len, chosen.values()))
    expected = len(seqs) + sum(
        sum(controller._rates_of(seqs[seq_id]).gains(len(own))) for seq_id, own in chosen.items()
    )
    if count:
        # What was measured says that it pays.
        assert expected / controller.costs.drafting_s(len(seqs) + count) > len(seqs) / controller.costs.plain_s(
            len(seqs)
        )


@settings(max_examples=200)
@given(
    st.dictionaries(st.integers(0, 5), st.lists(st.integers(0, 9), min_size=1, max_size=MOST), min_size=1),
    st.dictionaries(st.integers(1, 60), st.floats(0.1, 10.0), min_size=1, max_size=9),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, MOST)), max_size=60),
    st.floats(0.0, 0.5),
)
def test_chosen_number_has_most_tokens_per_second(
    drafts: dict[int, list[int]], table: dict[int, float], learned: list[tuple[int, int]], verify_s: float
) -> None:
    controller = DraftController(MOST, adapts=True)
    controller.costs = StepCosts(table, verify_s)
    seqs = {i: Sequence([1], 16, id=i) for i in range(6)}
    for seq_id, accepted in learned:
        controller.verified(seqs[seq_id], MOST, accepted)
    num_seqs = len(seqs)
    chosen = sum(map(len, controller.choose(drafts, seqs, num_seqs, {}).values()))
    gains = [gain for seq_id, own in drafts.items() for gain in controller._rates_of(seqs[seq_id]).gains(len(own))]
    tokens = [num_seqs + sum(sorted(gains)[::-1][:count]) for count in range(len(gains) + 1)]
    costs = controller.costs
    most = min(len(gains), costs.most_rows(num_seqs) - num_seqs)
    rates = {count: tokens[count] / costs.drafting_s(num_seqs + count) for count in range(1, most + 1)}
    plain = START_GAIN * num_seqs / costs.plain_s(num_seqs)
    assert rates.get(chosen, plain) >= max([plain, *rates.values()]) * (1 - 1e-9)


def forced_rows(controller: DraftController, num_forced: int) -> int:
    """Number of forced drafts chosen for a step of 6 sequences, `num_forced` of them with forced text."""
    drafts = {i: [0] * MOST for i in range(num_forced)}
    rates = {i: DraftRates() for i in drafts}
    return sum(map(len, controller.choose(drafts, {i: Sequence([1], 16, id=i) for i in range(6)}, 6, rates).values()))


@settings(max_examples=200)
@given(st.dictionaries(st.integers(1, 60), st.floats(0.1, 10.0), min_size=1, max_size=9), st.integers(1, 5))
def test_forced_text_lengthens_mixed_steps_by_at_most_5_percent(table: dict[int, float], num_forced: int) -> None:
    controller = DraftController(MOST, adapts=True)
    controller.costs = StepCosts(table)
    count = forced_rows(controller, num_forced)
    assert controller.costs.drafting_s(6 + count) <= 1.05 * controller.costs.plain_s(6) * (1 + 1e-9)


@pytest.mark.parametrize("name", ["flat", "bfloat16"])
def test_forced_text_is_verified_if_rows_are_cheap_or_all_have_it(name: str) -> None:
    controller = DraftController(MOST, adapts=True)
    controller.costs = StepCosts({rows: COSTS[name](rows) for rows in SIZES})
    assert forced_rows(controller, 6) > 6
    assert forced_rows(controller, 5) == (5 * MOST if name == "flat" else 5)


def test_pays_is_true_if_drafts_of_sequence_alone_pay() -> None:
    for seed in range(1, 50):
        machine = Machine(0.5, COSTS["int8"], 3, seed)
        machine.rate(seed)
        if machine.controller._num_drafting >= 256:
            continue
        for seq in machine.seqs.values():
            chosen = machine.controller.choose({seq.id: [0] * MOST}, machine.seqs, 3, {})
            assert machine.controller.pays(seq, 3) is bool(chosen)


def test_looks_for_drafts_take_half_a_percent_of_time() -> None:
    controller = DraftController(MOST, adapts=True)
    controller.costs = StepCosts({1: 0.04, 64: 0.08})
    assert [controller.rest(1), controller.rest(64)] == [0, 4]
    controller.costs = StepCosts({1: 0.001, 64: 0.001})
    assert [controller.rest(1), controller.rest(64)] == [6, 256]
    assert DraftController(MOST, adapts=False).rest(64) == 0
