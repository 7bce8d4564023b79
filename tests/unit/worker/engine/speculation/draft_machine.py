"""Sequences that decode with drafts on a machine whose steps take what only a test knows; time is added up.

What comes is 0s, and a wrong draft is a 1. Drafts are right with a probability that only the test knows either.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from itertools import count
from typing import TypeAlias

from worker.engine.sequence import Sequence
from worker.engine.speculation.draft_controller import DraftController

# Seconds of a step by its rows.
Cost: TypeAlias = Callable[[int], float]
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def curve(seconds: list[float]) -> Cost:
    """Cost of steps that get longer by so much with each row; by the last of these beyond them."""

    def cost(rows: int) -> float:
        more = rows - 1 - len(seconds)
        return 1.0 + sum(seconds[: rows - 1]) + max(0, more) * seconds[-1]

    return cost


class DraftMachine(ABC):
    """Sequences that decode at once.

    Args:
        controller: chooses how many drafts are verified.
        right: the probability that a draft is right behind right ones.
        cost: of a step.
        num_seqs: that decode.
        seed: of the draws.
        noise: durations vary by this part.
        interrupted: what else the machine does: how often in a second on average, and for how many seconds.
    """

    def __init__(
        self,
        controller: DraftController,
        right: float,
        cost: Cost,
        num_seqs: int,
        seed: int,
        noise: float = 0.0,
        interrupted: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self.controller, self.right, self.cost = controller, right, cost
        self.seconds, self.tokens, self.verified = 0.0, 0, 0
        self._noise, self._rnd, self._ids = noise, random.Random(seed), count()
        self._interrupted = interrupted
        self.seqs: dict[int, Sequence] = {}
        self.take(num_seqs)

    def take(self, num_seqs: int) -> None:
        """Other sequences, so many, instead of those that there are."""
        self.seqs = {seq.id: seq for seq in (Sequence([1], 16, id=next(self._ids)) for _ in range(num_seqs))}

    @abstractmethod
    def step(self) -> None:
        """One step of all sequences."""

    def guess(self, most: int) -> list[int]:
        """So many drafts of a sequence."""
        return [int(self._rnd.random() >= self.right) for _ in range(most)]

    def varied(self, seconds: float) -> float:
        """A duration that is so long on average, but for interruptions."""
        often, longest = self._interrupted
        left = seconds if often else 0.0
        varied = seconds * (1 + self._rnd.uniform(-self._noise, self._noise))
        while left > 0 and (left := left - self._rnd.expovariate(often)) > 0:
            varied += longest
        return varied

    def chosen(self, drafts: Mapping[int, list[int]]) -> dict[int, list[int]]:
        """The drafts that a step verifies of these."""
        chosen = self.controller.choose(drafts, self.seqs, len(self.seqs), {})
        self.controller.decided(drafts, self.seqs, chosen)
        return chosen

    def land(self, chosen: Mapping[int, list[int]]) -> None:
        """Takes what a step has brought that has verified these."""
        for seq_id, seq in self.seqs.items():
            own = chosen.get(seq_id, [])
            accepted = own.index(1) if 1 in own else len(own)
            if own:
                self.controller.verified(seq, len(own), accepted)
            elif seq.draft_history is not None and seq.draft_history.shadow:
                self.controller.came(seq.draft_history, 0)
            self.tokens += 1 + accepted
            self.verified += len(own)

    def rate(self, steps: int) -> float:
        """Tokens per second of so many steps."""
        tokens, seconds = self.tokens, self.seconds
        for _ in range(steps):
            self.step()
        return (self.tokens - tokens) / (self.seconds - seconds)

    @property
    def plain(self) -> float:
        """Tokens per second without drafts."""
        return len(self.seqs) / self.cost(len(self.seqs))

    def excess(self, steps: int) -> float:
        """Time of so many steps, in that of plain ones for the same tokens."""
        return self.plain / self.rate(steps)
