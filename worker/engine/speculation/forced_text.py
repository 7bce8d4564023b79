"""Text that grammars force, as drafts, and how often its tokens were right. Pure.

Where a grammar allows one text only, such as a key of an object with its quotes, the model still chooses how that text
is cut into tokens. The usual cut is a guess, mostly right, and is verified like any other draft. Verified or not, it is
compared with the sequence's next tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from worker.engine.sequence import Sequence
from worker.engine.speculation.draft_rates import SEQUENCE_WEIGHT, TOTAL_WEIGHT, DraftRates


@dataclass(slots=True)
class _ForcedRun:
    """One sequence's forced tokens.

    Attributes:
        rates: acceptance of this sequence's forced tokens.
        first: position of the first token.
        token_ids: the tokens; empty after a wrong one.
        count: number of them compared so far.
    """

    rates: DraftRates
    first: int = 0
    token_ids: tuple[int, ...] = ()
    count: int = 0


class ForcedText:
    """Forced tokens by sequence."""

    def __init__(self) -> None:
        self._runs: dict[int, _ForcedRun] = {}
        self._rates = DraftRates()

    def __bool__(self) -> bool:
        return bool(self._runs)

    def come(self, seq: Sequence) -> None:
        """Compares a sequence's forced tokens with its new tokens."""
        if (run := self._runs.get(seq.id)) is None:
            return
        for token_id in seq.token_ids[run.first + run.count : run.first + len(run.token_ids)]:
            is_right = token_id == run.token_ids[run.count]
            run.rates.learn(run.count, is_right, SEQUENCE_WEIGHT)
            self._rates.learn(run.count, is_right, TOTAL_WEIGHT)
            run.count += 1
            if not is_right:
                run.token_ids = ()
                return

    def note(self, seq: Sequence, first: int, token_ids: tuple[int, ...]) -> None:
        """Replaces a sequence's forced tokens by those from position `first` on."""
        if (run := self._runs.get(seq.id)) is None:
            run = self._runs[seq.id] = _ForcedRun(self._rates.copy())
        run.first, run.token_ids, run.count = first, token_ids, 0
        self.come(seq)

    def of(self, seq: Sequence) -> list[int]:
        """Forced tokens after the sequence's newest known one."""
        run = self._runs.get(seq.id)
        return [] if run is None or not run.token_ids else list(run.token_ids[seq.num_tokens - run.first :])

    def rates(self, seq: Sequence) -> DraftRates:
        """Acceptance by position in the forced text."""
        run = self._runs.get(seq.id)
        return self._rates if run is None else run.rates

    def forget(self, seq: Sequence) -> None:
        """Frees the forced text of an ended sequence."""
        self._runs.pop(seq.id, None)
