"""Decisions of the audit: which finished answers are computed again, on which workers, and which worker was wrong.

Pure. An answer of one worker is computed by another one of its numerics class. Where the two differ a third one decides
by majority; where there is none, both compute it once more, and the one that contradicts itself was wrong, as after a
flipped bit in memory that was given back since. If both stand by what they said, nobody can know: the one that has
answered the client is taken out, since its answers are in the world, and is said to be only suspected.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence, Set
from dataclasses import dataclass, field


class AuditSampler:
    """Chooses the answers that are audited.

    Args:
        fraction: of all answers, from 0 to 1.
        key: of this router, so that nobody can tell beforehand which ones it chooses.
    """

    def __init__(self, fraction: float, key: bytes) -> None:
        self._below = round(fraction * 2**64)
        self._key = key

    def wants(self, request_id: str, index: int) -> bool:
        """True if an answer is chosen."""
        if not self._below:
            return False
        digest = hashlib.blake2b(f"{index}/{request_id}".encode(), digest_size=8, key=self._key).digest()
        return int.from_bytes(digest, "big") < self._below


@dataclass(frozen=True, slots=True)
class Run:
    """A computation of an answer: the worker, and the digest of what came out."""

    worker_id: str
    output: bytes


@dataclass(frozen=True, slots=True)
class Ask:
    """Has a worker compute the answer next."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class Passed:
    """Two workers agree."""


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Nobody else can compute the answer now."""


@dataclass(frozen=True, slots=True)
class Wrong:
    """A worker was wrong; `is_certain` False where it is only more likely than another one."""

    worker_id: str
    is_certain: bool


Decision = Ask | Passed | Unanswered | Wrong


@dataclass(slots=True)
class AuditCase:
    """One answer under audit.

    Attributes:
        answer: what the client has got, and of which worker.
        runs: what came of further computations, in their order.
    """

    answer: Run
    runs: list[Run] = field(default_factory=list)

    def next(self, workers: Sequence[str]) -> Decision:
        """Decides what to do next.

        Args:
            workers: ids of the workers of the numerics class that take work now, the preferred first.
        """
        if not self.runs:
            return self._ask_another(workers, {self.answer.worker_id}) or Unanswered()
        first, second = self.answer, self.runs[0]
        if second.output == first.output:
            return Passed()
        if len(self.runs) == 1:
            third = self._ask_another(workers, {first.worker_id, second.worker_id})
            return third or self._ask_again(first, workers) or self._suspect()
        last = self.runs[-1]
        if last.worker_id not in (first.worker_id, second.worker_id):
            return self._by_majority(first, second, last)
        said = first if last.worker_id == first.worker_id else second
        if last.output != said.output:
            return Wrong(last.worker_id, is_certain=True)
        if len(self.runs) == 2 and last.worker_id == first.worker_id:
            return self._ask_again(second, workers) or self._suspect()
        return self._suspect()

    def _by_majority(self, first: Run, second: Run, third: Run) -> Decision:
        if third.output == first.output:
            return Wrong(second.worker_id, is_certain=True)
        if third.output == second.output:
            return Wrong(first.worker_id, is_certain=True)
        return self._suspect()

    def _suspect(self) -> Wrong:
        return Wrong(self.answer.worker_id, is_certain=False)

    @staticmethod
    def _ask_another(workers: Sequence[str], but: Set[str]) -> Ask | None:
        return next((Ask(worker) for worker in workers if worker not in but), None)

    @staticmethod
    def _ask_again(run: Run, workers: Sequence[str]) -> Ask | None:
        return Ask(run.worker_id) if run.worker_id in workers else None
