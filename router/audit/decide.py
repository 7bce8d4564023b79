"""Decisions of the audit: which answers are computed again, on which workers, and which worker was wrong.

Pure. Another worker of the numerics class computes the answer again. If the two differ, a third worker decides by
majority. Without a third worker both compute the answer once more, and the one that contradicts itself was wrong: a bit
may have flipped in memory that it freed since. If neither contradicts itself, the worker that answered the client is
suspected and taken out, because clients have its answers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence, Set
from dataclasses import dataclass, field


class AuditSampler:
    """Chooses the answers that are audited.

    Args:
        fraction: fraction of the answers, from 0 to 1.
        key: secret of this router, so that no client or worker can predict the choice.
    """

    def __init__(self, fraction: float, key: bytes) -> None:
        self._below = round(fraction * 2**64)
        self._key = key

    def wants(self, request_id: str, index: int) -> bool:
        """True if the answer `index` of a request is chosen."""
        if not self._below:
            return False
        digest = hashlib.blake2b(f"{index}/{request_id}".encode(), digest_size=8, key=self._key).digest()
        return int.from_bytes(digest, "big") < self._below


@dataclass(frozen=True, slots=True)
class AuditRun:
    """One computation of an answer: the worker, and a digest of its output."""

    worker_id: str
    output: bytes


@dataclass(frozen=True, slots=True)
class Ask:
    """Next, this worker computes the answer."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class ConfirmedAnswer:
    """Two workers agree."""


@dataclass(frozen=True, slots=True)
class OpenVerdict:
    """No other worker can compute the answer now."""


@dataclass(frozen=True, slots=True)
class Wrong:
    """A worker was wrong; `is_certain` False if another one may have been wrong instead."""

    worker_id: str
    is_certain: bool


Decision = Ask | ConfirmedAnswer | OpenVerdict | Wrong


@dataclass(slots=True)
class AuditCase:
    """One answer under audit.

    Attributes:
        answer: the computation whose output the client received.
        runs: further computations, in their order.
    """

    answer: AuditRun
    runs: list[AuditRun] = field(default_factory=list)

    def next(self, workers: Sequence[str]) -> Decision:
        """Decides what to do next.

        Args:
            workers: ids of the workers of the numerics class that take work now, the preferred first.
        """
        if not self.runs:
            return self._ask_another(workers, {self.answer.worker_id}) or OpenVerdict()
        first, second = self.answer, self.runs[0]
        if second.output == first.output:
            return ConfirmedAnswer()
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

    def _by_majority(self, first: AuditRun, second: AuditRun, third: AuditRun) -> Decision:
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
    def _ask_again(run: AuditRun, workers: Sequence[str]) -> Ask | None:
        return Ask(run.worker_id) if run.worker_id in workers else None
