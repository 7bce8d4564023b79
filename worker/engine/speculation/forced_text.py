"""Text that grammars force, as drafts: what a runner says that comes next, and how often that was right. Pure.

A grammar that leaves one text only, such as a key of an object and its quotes, does not say how it is cut into tokens:
the model does. So the usual cut is a guess, mostly right, which is verified as any other draft is. It is compared with
the tokens that come, verified or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from worker.engine.sequence import DraftRates, Sequence

# What the newest token counts at least in the mean of its sequence, and in that of all.
_WEIGHT: Final = 0.07
_WEIGHT_OF_ALL: Final = 0.01
# Tokens that what is known of all sequences stands for in a new one.
_PRIOR: Final = 4


@dataclass(slots=True)
class _Run:
    """Tokens from a position on, how many of them have come, and how often those of this sequence were right."""

    rates: DraftRates
    first: int = 0
    token_ids: tuple[int, ...] = ()
    count: int = 0


class ForcedText:
    """Runs of tokens that grammars force, by sequence."""

    def __init__(self) -> None:
        self._runs: dict[int, _Run] = {}
        self._rates = DraftRates(unknown=1.0)

    def __bool__(self) -> bool:
        return bool(self._runs)

    def come(self, seq: Sequence) -> None:
        """Compares what there is of a sequence with tokens that have come since."""
        if (run := self._runs.get(seq.id)) is None:
            return
        for token_id in seq.token_ids[run.first + run.count : run.first + len(run.token_ids)]:
            is_right = token_id == run.token_ids[run.count]
            run.rates.learn(run.count, is_right, _WEIGHT)
            self._rates.learn(run.count, is_right, _WEIGHT_OF_ALL)
            run.count += 1
            if not is_right:
                run.token_ids = ()
                return

    def note(self, seq: Sequence, first: int, token_ids: tuple[int, ...]) -> None:
        """Takes a run of a sequence, from an absolute position on, in place of what was known."""
        if (run := self._runs.get(seq.id)) is None:
            run = self._runs[seq.id] = _Run(self._rates.prior(_PRIOR))
        run.first, run.token_ids, run.count = first, token_ids, 0
        self.come(seq)

    def of(self, seq: Sequence) -> list[int]:
        """Tokens that probably come behind the newest known one."""
        run = self._runs.get(seq.id)
        return [] if run is None or not run.token_ids else list(run.token_ids[seq.num_tokens - run.first :])

    def rates(self, seq: Sequence) -> DraftRates:
        """Rates at which tokens at each place of a run were right."""
        run = self._runs.get(seq.id)
        return self._rates if run is None else run.rates

    def forget(self, seq: Sequence) -> None:
        """Frees the forced text of an ended sequence."""
        self._runs.pop(seq.id, None)
