"""Chooses how many drafts of each sequence a step verifies: as many as bring more tokens in the time. Pure, no clock.

It weighs two things that are measured: how often the drafts of a sequence are right, by their position behind the
newest token, and how long a step of so many rows takes (step_costs.py). Drafts that are not verified are compared with
the tokens that come all the same, which costs nothing, so that they are taken up again when they are right. What has
come of the decisions is kept in account (draft_savings.py), which ends drafts that lose more than they should.

Nothing of this can change a token (docs/explanation/determinism.md), so it may depend on durations.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from itertools import accumulate, islice
from operator import lt
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from worker.engine.sequence import DraftHistory, DraftRates, Sequence
from worker.engine.speculation.draft_savings import DraftSavings
from worker.engine.speculation.plain_steps import PlainSteps
from worker.engine.speculation.proposal_costs import Proposal, ProposalCosts
from worker.engine.speculation.step_costs import StepCosts

# What the newest verification counts at least in the mean of its sequence, and in that of all. Passages are hard to
# draft or easy: drafts that would be for nothing are to end within a few steps, before the account does it (which then
# ends those that pay, too). Of many sequences those that had luck come first, so luck must count little.
_WEIGHT: Final = 0.12
_WEIGHT_OF_ALL: Final = 0.01
# Verifications that what is known of all sequences stands for in a new one.
_PRIOR: Final = 8
# Fewer verifications say nothing of how often drafts are right.
_FEW_VERIFIED: Final = 8
# How much more tokens per second drafts must promise: to begin with them, and to go on.
_LEAST_GAIN: Final = 1.05
_LEAST_FURTHER_GAIN: Final = 1.02
# Seconds that proposals for a sequence and a decision about them take at most, and the part of a step's time that they
# may take while nothing comes of them.
_EFFORT_S: Final = 30e-6
_MOST_EFFORT: Final = 0.005
# Steps without a look at drafts, at most.
_LONGEST_REST: Final = 63
# What the newest step counts in the mean of the time between two; which is taken for no more than so many steps.
_BETWEEN_WEIGHT: Final = 0.1
_LONGEST_BETWEEN: Final = 3.0
# While a model rests one of so many plain steps is noted.
_NOTED_EVERY: Final = 4
# Steps count that have as many sequences as those before them, but for this part.
_NEAR: Final = 1 / 16
# Plain steps whose time may be lost, until it is paid back, by drafts that have begun.
_MOST_OWED: Final = 8.0
# Once they have saved the time of so many they may owe nothing: a debt ends drafts for a hundred times as long.
_PAID: Final = 4.0
# Part of the time that may go into prompts without drafts behind them, and plain steps whose time may go there at once.
_FOR_PROMPTS: Final = 0.005
_FIRST_FOR_PROMPTS: Final = 2.0
# Largest share of its time by which forced grammar text may lengthen a step that has sequences without drafts.
_MOST_SLOWER: Final = 0.05
_NO_RATES: Final[Mapping[int, DraftRates]] = MappingProxyType({})


class DraftLengths:
    """Chooses how many drafts are verified, and learns from what becomes of them.

    Args:
        most: drafts of a sequence and step.
        adapts: False takes all drafts there are.

    Attributes:
        adapts: as above.
        costs: of steps.
        proposals: what a model takes that makes drafts.
        are_made: True if the newest step makes the drafts that there are for the next one, so that what they take is
            spent.
    """

    def __init__(self, most: int, *, adapts: bool) -> None:
        self.costs = StepCosts()
        self.proposals = ProposalCosts()
        self.adapts = adapts
        # Between the end of a step and the begin of the next one: seconds, None before the first.
        self._between_s: float | None = None
        self._most = most
        self._savings = DraftSavings()
        self._plain_steps = PlainSteps()
        # True if drafts have saved something since they have begun.
        self._have_paid = False
        # Sequences of the last step.
        self._num_seqs = 0
        # Plain steps, and their seconds, since the last one that was noted.
        self._num_unnoted = 0
        self._unnoted_s = 0.0
        # Spent on prompts that a model has taken in though it may never draft behind them, beyond what time allows.
        self._for_prompts_s = 0.0
        self.are_made = False
        # The last step in which a model made drafts: its rows, and these; and the part that these had in its time, by
        # the tables, at the last plain step.
        self._last_made: tuple[int, Proposal] | None = None
        self._made_share = 0.0
        # Over all sequences: what a new one begins with.
        self._rates = DraftRates()

    def choose(
        self,
        drafts: Mapping[int, list[int]],
        seqs: Mapping[int, Sequence],
        rows: int,
        rates: Mapping[int, DraftRates] = _NO_RATES,
    ) -> dict[int, list[int]]:
        """The drafts that a step verifies, by sequence.

        Args:
            drafts: that there are, by sequence.
            seqs: of the step.
            rows: of the step, without any draft.
            rates: rates of sequences whose drafts are text that a grammar forces. With any of these and any sequence
                without drafts, all drafts together lengthen the step by at most `_MOST_SLOWER`.
        """
        if not self.adapts:
            return dict(drafts)
        if self.are_made and len(seqs) == 1 and not rates:
            # As many as pay were made a step ago, by all that is known; that was spent.
            return dict(drafts)
        if not drafts or self.compares or not (self.are_made or self._savings.allows):
            return {}
        gains = self._gains_of_all(drafts, seqs, rates)
        order = np.argsort(-gains, axis=None, kind="stable")
        slower = _MOST_SLOWER if rates and len(drafts) < len(seqs) else math.inf
        count = self._count(gains.ravel()[order], len(seqs), rows, slower)
        # What a draft brings is no more than the one before it does, so those of a sequence are its first ones.
        lengths = np.bincount(order[:count] // gains.shape[1], minlength=len(drafts)).tolist()
        return {seq_id: own[:length] for (seq_id, own), length in zip(drafts.items(), lengths, strict=True) if length}

    def rest(self, num_seqs: int) -> int:
        """Steps of so many sequences that need no look at drafts behind one that verifies nothing: none where a look
        takes little of a step's time."""
        effort = num_seqs * _EFFORT_S / (_MOST_EFFORT * self.costs.of(num_seqs))
        return min(int(effort), _LONGEST_REST) if self.adapts else 0

    def pays(self, seq: Sequence, num_seqs: int) -> bool:
        """True if drafts of a sequence would be verified in a step of so many, were the others to have none."""
        if not self.adapts:
            return True
        if not self._savings.allows:
            return False
        most = min(self._most, self.costs.most_rows(num_seqs) - num_seqs)
        needed = self._needed(num_seqs, num_seqs, most).tolist()
        return any(map(lt, needed, islice(accumulate(self.gains(seq, most), initial=num_seqs), 1, None)))

    def took(
        self,
        num_seqs: int,
        rows: int,
        duration_s: float,
        wall_s: float | None = None,
        proposal: Proposal | None = None,
    ) -> None:
        """A step without prompts has taken so long; those of its drafts that were right are yet to be told.

        Args:
            num_seqs: of the step.
            rows: of the step.
            duration_s: that it took.
            wall_s: since the end of the step before it; None if there was none just before.
            proposal: what a model did for drafts in it; None for nothing.
        """
        verifies = rows > num_seqs
        has_drafts = verifies or proposal is not None
        # Tables and columns are made anew for other sequences.
        counts = self._plain_steps.count and abs(num_seqs - self._num_seqs) <= _NEAR * num_seqs
        self._num_seqs = num_seqs
        passed_s = max(duration_s, wall_s or 0.0)
        if counts and not has_drafts and self._rests():
            self._unnoted_s += passed_s
            return
        made_s = 0.0 if proposal is None else self.costs.level * self.proposals.of(proposal)
        step_s = self.costs.verification(rows) if verifies else self.costs.of(rows)
        expected_s = step_s + made_s + (self._between_s or 0.0)
        # That of plain steps, as soon as there is one.
        if wall_s is not None and wall_s > duration_s and (self._between_s is None or (counts and proposal is None)):
            self._note_between(min(wall_s - duration_s, _LONGEST_BETWEEN * duration_s))
        if proposal is not None and self.proposals.are_known:
            self._last_made = rows, proposal
            # No more than a plain step longer, as in the account.
            longest_s = made_s + self.costs.of(num_seqs)
            self.proposals.note(proposal, min(duration_s - step_s, longest_s) / self.costs.level)
        elif counts:
            self.costs.note(rows, duration_s, verifies=verifies)
        self.are_made = proposal is not None and proposal.longest > 0
        plain_s = self.plain_s(num_seqs)
        self._for_prompts_s = max(0.0, self._for_prompts_s - _FOR_PROMPTS * (passed_s + self._unnoted_s))
        # Drafts are also why plain steps behind them take longer.
        told = expected_s if has_drafts or not self._plain_steps.are_settled else None
        self._savings.step(passed_s, plain_s, num_seqs, told, unnoted_s=self._unnoted_s)
        self._unnoted_s = 0.0
        if has_drafts:
            self._savings.of_model |= proposal is not None
            self._plain_steps.drafted(by_model=proposal is not None)
        else:
            self._made_share = self._share_of_made()
            self._plain_steps.passed(self.costs.level, self._drafting_level)

    def _rests(self) -> bool:
        """True if a plain step need not be noted: while a model drafts nothing, some of them are enough."""
        if not self.proposals.are_known or self.drafts:
            return False
        self._num_unnoted = (self._num_unnoted + 1) % _NOTED_EVERY
        return self._num_unnoted > 0

    def took_prompts(self, proposal: Proposal | None, num_seqs: int = 0, rows: int = 0) -> None:
        """A step with prompts is over.

        Args:
            proposal: what a model did in it; None for nothing.
            num_seqs: that it decoded besides.
            rows: of these, with the drafts that it verified.
        """
        self._plain_steps.prompted()
        self.are_made = proposal is not None and proposal.longest > 0
        if rows > num_seqs:
            self._savings.spend(self.costs.verification(rows) - self.costs.of(num_seqs))
        if proposal is None:
            return
        if proposal.longest:
            self._plain_steps.drafted(by_model=True)
        seconds = self.costs.level * self.proposals.of(proposal)
        if self.drafts:
            self._savings.spend(seconds)
        else:
            self._for_prompts_s += seconds

    def plain_s(self, num_seqs: int) -> float:
        """Seconds from a plain step of so many sequences to the next one."""
        return self.costs.of(num_seqs) + (self._between_s or 0.0)

    def drafting_s(self, rows: int, proposal: Proposal | None = None) -> float:
        """Seconds from a step of so many rows, which verifies drafts and makes others, to the next one."""
        made_s = 0.0 if proposal is None else self.costs.level * self.proposals.of(proposal)
        return self.costs.verification(rows) + made_s + (self._between_s or 0.0)

    @property
    def _drafting_level(self) -> float:
        """By how much longer a step for which a model drafts is now than the tables say, beside a plain one: always the
        same step until the next comparison."""
        return 1.0 + self._made_share * (self.proposals.level - 1.0)

    def _share_of_made(self) -> float:
        if self._last_made is None:
            return 0.0
        rows, proposal = self._last_made
        rest_s, made_s = self.costs.verification(rows) / self.costs.level, self.proposals.of(proposal)
        made_s /= self.proposals.level
        return made_s / (rest_s + made_s)

    @property
    def knows_rates(self) -> bool:
        """True if enough drafts were verified to tell how often they are right."""
        return bool(self._rates.counts) and self._rates.counts[0] >= _FEW_VERIFIED

    @property
    def may_take_in(self) -> bool:
        """True if a model may take in prompts behind which it may never draft."""
        return self._for_prompts_s <= _FIRST_FOR_PROMPTS * self.plain_s(1)

    @property
    def drafts(self) -> bool:
        """True if the last step had drafts, or made any; or would have but for a comparison."""
        return self._plain_steps.drafts

    @property
    def least_gain(self) -> float:
        """Factor by which drafts must promise more tokens per second now."""
        return _LEAST_FURTHER_GAIN if self.drafts else _LEAST_GAIN

    @property
    def owes_nothing(self) -> bool:
        """True if no more was lost than may be."""
        return self._savings.allows

    def affords_more(self, num_drafting: int) -> bool:
        """True if a further draft of so many sequences may be for nothing."""
        longer, shorter = (self.proposals.of(Proposal(num_drafting, num_drafting, number)) for number in (2, 1))
        return self._savings.allows_beyond(-self.costs.level * (longer - shorter))

    def may_propose(self, proposal: Proposal, num_seqs: int) -> bool:
        """True if no more was lost than may be. Drafts that have begun may lose more until they have shown what they
        bring."""
        plain_s = self.plain_s(num_seqs)
        if not self.drafts:
            self._have_paid = False
            return self._savings.allows
        if self._savings.allows_beyond(-_PAID * plain_s):
            self._have_paid = True
            return True
        seconds = self.costs.level * self.proposals.of(proposal)
        return self._savings.allows_beyond(seconds if self._have_paid else max(seconds, _MOST_OWED * plain_s))

    def _note_between(self, seconds: float) -> None:
        known = self._between_s
        self._between_s = seconds if known is None else known + _BETWEEN_WEIGHT * (seconds - known)

    def decided(self, drafts: Mapping[int, list[int]], seqs: Mapping[int, Sequence], verified: Container[int]) -> None:
        """A step has decided about drafts: of sequences that `verified` has it verifies some, of the others none."""
        for seq_id, own in drafts.items():
            history = seqs[seq_id].draft_history or self._history(seqs[seq_id])
            if seq_id in verified:
                history.shadow = ()
            elif not history.shadow:
                history.shadow, history.position = own, 0

    def verified(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """A step has verified drafts of a sequence."""
        history = seq.draft_history or self._history(seq)
        history.counter.count(num_drafts, num_accepted)
        self._savings.accepted(num_accepted)
        history.rates.learn_run(num_accepted, num_drafts, _WEIGHT)
        self._rates.learn_run(num_accepted, num_drafts, _WEIGHT_OF_ALL)

    def came(self, history: DraftHistory, token_id: int) -> None:
        """A token has come where a draft was not verified."""
        is_right = history.shadow[history.position] == token_id
        self._learn(history, history.position, is_right=is_right)
        history.position += 1
        if not is_right or history.position == len(history.shadow):
            history.shadow = ()

    @property
    def compares(self) -> bool:
        """True if the next step is a plain one, to compare those with drafts with."""
        return self._plain_steps.is_due(self.costs.level, self._drafting_level)

    def _count(self, gains: npt.NDArray[np.float64], num_tokens: int, rows: int, slower: float = math.inf) -> int:
        """Number of drafts, the most promising first, with which a step yields most tokens per time.

        Returns 0 if drafts gain less than `_least`.

        Args:
            gains: expected tokens of each draft, in descending order.
            num_tokens: tokens that the step yields without drafts.
            rows: rows of the step without drafts.
            slower: largest share of the step's time by which drafts may lengthen it.
        """
        most = min(len(gains), self.costs.most_rows(rows) - rows)
        if most <= 0:
            return 0
        longer = self._longer(rows, most)
        most = int(np.searchsorted(longer, 1.0 + slower, side="right"))
        if most == 0:
            return 0
        tokens = num_tokens + np.add.accumulate(gains[:most])
        per_needed = tokens / (self._least * num_tokens * longer[:most])
        best = int(per_needed.argmax())
        return best + 1 if per_needed[best] > 1.0 else 0

    def _needed(self, num_tokens: int, rows: int, most: int) -> npt.NDArray[np.float64]:
        """Tokens that a step must bring to be worth its time, with one draft, two drafts, up to `most`: those that
        plain steps of so many rows and tokens bring in that time, times the least gain."""
        return self._least * num_tokens * self._longer(rows, most)

    @property
    def _least(self) -> float:
        """Factor by which drafts must raise the tokens per time; 1 for drafts that are already made."""
        return 1.0 if self.are_made else self.least_gain

    def _longer(self, rows: int, most: int) -> npt.NDArray[np.float64]:
        """Factors by which one draft, two drafts, up to `most` lengthen a step of `rows` rows; they never decrease."""
        shortest = self.costs.of(rows)
        # No step is shorter for having more rows.
        seconds = np.maximum(shortest, np.maximum.accumulate(self.costs.verifications(rows, most)))
        between_s = self._between_s or 0.0
        return (seconds + between_s) / (shortest + between_s)

    def _gains_of_all(
        self, drafts: Mapping[int, list[int]], seqs: Mapping[int, Sequence], rates: Mapping[int, DraftRates]
    ) -> npt.NDArray[np.float64]:
        """`gains` of each sequence in a row; 0 behind its last draft."""
        counts = [len(own) for own in drafts.values()]
        most = max(counts)
        known: list[float] = []
        for seq_id in drafts:
            own = rates.get(seq_id) or self._rates_of(seqs[seq_id])
            known += own.rates if len(own.rates) == most else own.first(most)
        table = np.fromiter(known, np.float64, len(known)).reshape(-1, most)
        gains = np.multiply.accumulate(table, axis=1)
        if min(counts) < most:
            gains[np.arange(most) >= np.array(counts)[:, None]] = 0.0
        return gains

    def gains(self, seq: Sequence, count: int, known: DraftRates | None = None, doubt: float = 1.0) -> list[float]:
        """Tokens that each of so many drafts brings on average: what follows a wrong one is for nothing.

        Args:
            seq: behind which they stand.
            count: how many.
            known: how often they are right; None for what has been learnt.
            doubt: part of the wrong ones that are taken for wrong.
        """
        return (self._rates_of(seq) if known is None else known).gains(count, doubt)

    def _rates_of(self, seq: Sequence) -> DraftRates:
        return self._rates if seq.draft_history is None else seq.draft_history.rates

    def _history(self, seq: Sequence) -> DraftHistory:
        if seq.draft_history is None:
            seq.draft_history = DraftHistory(self._rates.prior(_PRIOR))
        return seq.draft_history

    def _learn(self, history: DraftHistory, position: int, *, is_right: bool) -> None:
        history.rates.learn(position, is_right, _WEIGHT)
        self._rates.learn(position, is_right, _WEIGHT_OF_ALL)
