"""Chooses how many drafts a step verifies and a draft model makes: those with most tokens per second. Pure, no clock.

It knows how often drafts are accepted (draft_rates.py) and what steps take (step_costs.py). Drafts that a step does not
verify are compared with its next tokens, which costs nothing, and are used again when they are right.

Predictions can be wrong, so the time that drafts save is kept as a credit, which also gets a small part of all time.
Drafts start with a credit of at least 0 and stop below a bound. With full credit a draft model is tried although its
drafts should not pay. Plain steps after a run of steps with drafts show what the run has really saved.

No number of drafts changes a token (docs/explanation/determinism.md), so the choice may depend on durations.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from worker.engine.sequence import Sequence
from worker.engine.speculation.draft_rates import SEQUENCE_WEIGHT, TOTAL_WEIGHT, DraftHistory, DraftRates, gains_of
from worker.engine.speculation.step_costs import Proposal, StepCosts

# Factors of tokens per second that drafts must promise to start and to continue. Two, so that noise does not switch
# drafts on and off; more than 1, since the sequences with the best rates are partly those with luck.
_START_GAIN: Final = 1.05
_KEEP_GAIN: Final = 1.02
# Part of all time that drafts may lose: trials, prompts that a draft model computes in vain, looks for drafts.
_MOST_LOST: Final = 0.005
# Credit at the start, in plain steps. A trial needs half and costs two or three steps; drafts stop at half below 0.
_STAKE: Final = 6.0
# Most credit, in plain steps: a hard answer of the demo costs fewer, and old gains pay for no more.
_MOST_KEPT: Final = 24.0
# Plain steps after a draft model's work that do not count. Its weights have pushed the model's out of the caches: on
# the demo the first plain step takes half as long again, the seventh as long as before.
_SETTLING: Final = 6
# Steps with drafts until one must be plain, and most steps without a look for drafts: costs half a percent.
_LONGEST_RUN: Final = 256
# Seconds of a look for drafts, for each sequence (tests/bench/speculation_cost.py, several times over).
_LOOK_S: Final = 30e-6
# Largest share by which forced grammar text may lengthen a step that has sequences without drafts.
_MOST_LONGER: Final = 0.05


class DraftController:
    """Number of drafts of each sequence and step.

    Args:
        most: most drafts of a sequence and step.
        adapts: False uses all drafts.

    Attributes:
        adapts: as above.
        costs: durations of steps.
        are_made: True if the drafts for the next step are already made, so that their cost is spent.
    """

    def __init__(self, most: int, *, adapts: bool) -> None:
        self.costs = StepCosts()
        self.adapts = adapts
        self.are_made = False
        self._most = most
        self._rates = DraftRates()
        # Steps left without a look for drafts; True if a draft model's drafts paid at the last look.
        self._rest, self._pays = 0, False
        # Plain steps saved, bounded; and the worth of one token of the newest step, in plain steps.
        self._credit, self._per_token = _STAKE, 0.0
        # Steps with drafts since a counted plain one, counted plain steps since drafts, plain steps left not to count.
        self._num_drafting, self._num_plain, self._settling = 0, _LONGEST_RUN, 0
        # The last run of steps with drafts: the credit before it, and, in plain steps, the worth of its tokens and
        # its duration.
        self._before, self._worth, self._spent = 0.0, 0.0, 0.0
        # Seconds of its last two steps.
        self._last_s = 0.0, 0.0

    def choose(
        self, drafts: Mapping[int, list[int]], seqs: Mapping[int, Sequence], rows: int, rates: Mapping[int, DraftRates]
    ) -> dict[int, list[int]]:
        """Returns the drafts that a step verifies, by sequence.

        Args:
            drafts: all drafts, by sequence.
            seqs: sequences of the step.
            rows: rows of the step without drafts.
            rates: acceptance of forced grammar text, for the sequences whose drafts are such text. If any other
                sequence has no drafts, all drafts together lengthen the step by at most `_MOST_LONGER`.
        """
        if not self.adapts or (self.are_made and len(seqs) == 1 and not rates):
            return dict(drafts)
        if not drafts or not (self.are_made or self._may_draft):
            return {}
        known = [rates.get(seq_id) or self._rates_of(seqs[seq_id]) for seq_id in drafts]
        gains = gains_of(known, [len(own) for own in drafts.values()])
        order = np.argsort(-gains, axis=None, kind="stable")
        longest = 1.0 + (_MOST_LONGER if rates and len(drafts) < len(seqs) else math.inf)
        count = self._count(gains.ravel()[order], len(seqs), rows, longest)
        # A draft never gains more than the one before it, so the chosen ones of a sequence are its first ones.
        lengths = np.bincount(order[:count] // gains.shape[1], minlength=len(drafts)).tolist()
        return {seq_id: own[:length] for (seq_id, own), length in zip(drafts.items(), lengths, strict=True) if length}

    def pays(self, seq: Sequence, num_seqs: int) -> bool:
        """True if a step of `num_seqs` sequences would verify drafts of this one alone."""
        if not self.adapts or not self._may_draft:
            return not self.adapts
        gains = np.array(self._rates_of(seq).gains(self._most))
        return self._count(gains, num_seqs, num_seqs, math.inf) > 0

    def rest(self, num_seqs: int) -> int:
        """Steps without a look for drafts after one that found none, so that looks take a small part of the time."""
        looks = num_seqs * _LOOK_S / (_MOST_LOST * self.costs.plain_s(num_seqs))
        return min(int(looks), _LONGEST_RUN) if self.adapts else 0

    def looks(self, *, has_prompts: bool) -> bool:
        """True if the next step may make drafts; asked once for each step. After a prompt drafts may begin."""
        self._rest = 0 if has_prompts else max(0, self._rest - 1)
        return self._rest == 0

    def plan(self, most: Mapping[int, int], seqs: Mapping[int, Sequence], num_seqs: int) -> dict[int, int]:
        """Returns how many drafts a draft model makes for each sequence; empty if it does not work.

        Args:
            most: most drafts of each sequence that may have some.
            seqs: the sequences.
            num_seqs: number of sequences of the step.
        """
        if not self.adapts:
            return dict(most)
        count, self._pays = 0, False
        if most and self._may_draft:
            known = [(self._rates_of(seqs[seq_id]), own) for seq_id, own in most.items()]
            count = self._best([rates.gains(own) for rates, own in known], num_seqs)
            self._pays = count > 0
            if not count and self._may_try and 8 * self._num_plain >= _LONGEST_RUN:
                # A trial: half of the rejections may be over; with most credit, all of them.
                doubt = 0.5 if self._credit < _MOST_KEPT else 0.0
                count = self._best([rates.gains(own, doubt) for rates, own in known], num_seqs)
        if not count and self._num_plain:
            self._rest = self.rest(num_seqs)
        return {seq_id: min(own, count) for seq_id, own in most.items()} if count else {}

    def takes_prompts(self, num_seqs: int) -> bool:
        """True if a draft model should compute a step's prompts, without which it cannot draft after them."""
        if not self.adapts or self._pays or self._may_try:
            return True
        # Drafts might pay if the model had computed the prompts of all sequences.
        return self._credit >= 0.0 and self._best([self._rates.gains(self._most)] * num_seqs, num_seqs) > 0

    def note_step(
        self, num_seqs: int, rows: int, duration_s: float, wall_s: float | None = None, proposal: Proposal | None = None
    ) -> None:
        """Adds a step without prompts; `verified` tells the outcome of its drafts afterwards.

        Args:
            num_seqs: number of sequences.
            rows: rows, drafts included.
            duration_s: seconds that it took.
            wall_s: seconds since the end of the step before; None if there was none right before.
            proposal: a draft model's work in it.
        """
        costs, has_drafts = self.costs, rows > num_seqs or proposal is not None
        passed_s = max(duration_s, wall_s or 0.0)
        self.are_made = proposal is not None and proposal.longest > 0
        if has_drafts:
            self._note_drafts(by_model=proposal is not None)
        if proposal is None:
            costs.note(rows, duration_s, is_verifying=has_drafts)
        self._per_token, plain_s = 1 / num_seqs, costs.plain_s(num_seqs)
        if not has_drafts and not self._settling:
            costs.note_plain(num_seqs, duration_s, wall_s)
            now_s = costs.plain_s(num_seqs)
            self._note_plain(_MOST_LOST * passed_s / now_s, now_s / plain_s)
            return
        self._settling -= not has_drafts
        # Long steps are interrupted more often than short ones, which is no fault of drafts. So a step counts as at
        # most a plain one longer than expected, unless the two before it were as long.
        expected_s = max(plain_s, costs.drafting_s(rows, proposal)) if has_drafts else plain_s
        spent_s = min(passed_s, max(expected_s + plain_s, min(self._last_s)))
        self._last_s = self._last_s[1], passed_s
        self._add(1.0, (1 - _MOST_LOST) * spent_s / plain_s)

    def note_prompts(
        self, duration_s: float, proposal: Proposal | None, num_decodes: int = 0, decode_rows: int = 0
    ) -> None:
        """Adds a step with prompts, which has `decode_rows` rows of `num_decodes` sequences that it decodes."""
        self.are_made = proposal is not None and proposal.longest > 0
        if self.are_made:
            self._note_drafts(by_model=True)
        costs, plain_s = self.costs, self.costs.plain_s(max(1, num_decodes))
        more_s = costs.drafting_s(decode_rows) - plain_s if decode_rows > num_decodes else 0.0
        self._add(0.0, (more_s - _MOST_LOST * duration_s) / plain_s)
        # Drafts pay a draft model's work on prompts back in the run that follows, not at once.
        making = costs.making_s(proposal) / plain_s
        self._spent += making
        if self._num_plain:
            self._credit -= making

    def decided(self, drafts: Mapping[int, list[int]], seqs: Mapping[int, Sequence], verified: Container[int]) -> None:
        """Adds the drafts of a step that verifies those of the sequences in `verified`."""
        for seq_id, own in drafts.items():
            history = seqs[seq_id].draft_history or self._history(seqs[seq_id])
            if seq_id in verified:
                history.shadow = ()
            elif not history.shadow:
                history.shadow, history.position = own, 0

    def verified(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Adds the outcome of a sequence's verified drafts."""
        history = seq.draft_history or self._history(seq)
        history.counter.count(num_drafts, num_accepted)
        history.rates.learn_run(num_accepted, num_drafts, SEQUENCE_WEIGHT)
        self._rates.learn_run(num_accepted, num_drafts, TOTAL_WEIGHT)
        self._credit += num_accepted * self._per_token
        self._worth += num_accepted * self._per_token

    def came(self, history: DraftHistory, token_id: int) -> None:
        """Compares a new token with the draft in its place that was not verified."""
        is_right = history.shadow[history.position] == token_id
        history.rates.learn(history.position, is_right, SEQUENCE_WEIGHT)
        self._rates.learn(history.position, is_right, TOTAL_WEIGHT)
        history.position += 1
        if not is_right or history.position == len(history.shadow):
            history.shadow = ()

    @property
    def _may_try(self) -> bool:
        return self._credit >= _STAKE / 2

    @property
    def _may_draft(self) -> bool:
        """True if the credit allows drafts, and the next step need not be plain to measure one."""
        lowest = 0.0 if self._num_plain else -_STAKE / 2
        return self._credit >= lowest and self._num_drafting < _LONGEST_RUN

    @property
    def _least_gain(self) -> float:
        """Factor by which drafts must raise the tokens per second; 1 for drafts that are already made."""
        return 1.0 if self.are_made else _START_GAIN if self._num_plain else _KEEP_GAIN

    def _note_drafts(self, *, by_model: bool) -> None:
        """Adds a step with drafts to the run, which starts with the first one."""
        if self._num_plain:
            self._before, self._worth, self._spent = self._credit, 0.0, 0.0
            self._num_plain, self._last_s = 0, (0.0, 0.0)
        self._num_drafting += 1
        self._settling = _SETTLING if by_model else self._settling

    def _add(self, worth: float, spent: float) -> None:
        """Adds a step to the run, and what it saves to the credit."""
        self._worth, self._spent = self._worth + worth, self._spent + spent
        self._credit = min(self._credit + worth - spent, _MOST_KEPT)

    def _note_plain(self, earned: float, longer: float) -> None:
        """Adds a counted plain step, which changes the duration of plain steps by a factor of `longer`.

        The first ones after a run change what that took in plain steps, and so what it has saved.
        """
        self._num_plain, self._num_drafting = self._num_plain + 1, 0
        if self._num_plain <= _SETTLING:
            self._before, self._spent = self._before + earned, self._spent / longer
            self._credit = max(self._before + self._worth - self._spent, -_STAKE / 2) - earned
        self._credit = min(self._credit + earned, _MOST_KEPT)

    def _count(self, gains: npt.NDArray[np.float64], num_seqs: int, rows: int, longest: float) -> int:
        """Number of drafts with which a step has most tokens per second; 0 if they gain too little.

        Args:
            gains: expected accepted tokens of each draft, in descending order.
            num_seqs: tokens of the step without drafts.
            rows: rows of the step without drafts.
            longest: largest factor by which drafts may lengthen the step.
        """
        num_drafts = min(len(gains), self.costs.most_rows(rows) - rows)
        longer = self.costs.longer(rows, num_drafts)
        if (most := int(np.searchsorted(longer, longest, side="right"))) == 0:
            return 0
        per_needed = (num_seqs + np.add.accumulate(gains[:most])) / (self._least_gain * num_seqs * longer[:most])
        best = int(per_needed.argmax())
        return best + 1 if per_needed[best] > 1.0 else 0

    def _best(self, gains: list[list[float]], num_seqs: int) -> int:
        """Number of drafts of each sequence in `gains` with which a draft model makes most tokens per second, or 0."""
        best, count = self._least_gain * num_seqs / self.costs.plain_s(num_seqs), 0
        tokens, rows = float(num_seqs), num_seqs
        for number in range(1, max(map(len, gains)) + 1):
            for own in gains:
                if number <= len(own):
                    tokens, rows = tokens + own[number - 1], rows + 1
            if (rate := tokens / self.costs.drafting_s(rows, Proposal(rows, len(gains), number))) > best:
                best, count = rate, number
        return count

    def _rates_of(self, seq: Sequence) -> DraftRates:
        return self._rates if seq.draft_history is None else seq.draft_history.rates

    def _history(self, seq: Sequence) -> DraftHistory:
        seq.draft_history = DraftHistory(self._rates.copy())
        return seq.draft_history
