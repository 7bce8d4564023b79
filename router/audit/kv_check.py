"""Compares the digests of KV blocks that workers send: two different digests in one numerics class show a fault.

Pure. A digest covers a block's contents at its publication. The block's name stands for all tokens up to its end
(common/wire/kv_digests.py). Healthy workers of one class send equal digests, and so does one worker that computes the
block again. Invariants: at most `capacity` blocks are kept, the last compared ones, each with the newest MAX_WITNESSES
workers; the digests of a worker instance count until another instance of the worker sends one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from common.limits import MAX_KV_DIGESTS
from router.audit.decide import AuditCase, AuditRun

MAX_WITNESSES: Final = 8
# Results of the comparison of a digest with those of other workers, or with an earlier one of its own worker.
FIRST, EQUAL, DIFFERENT = "first", "equal", "different"


@dataclass(frozen=True, slots=True)
class Witness:
    """An instance of a worker, with the model and numerics class in which digests are compared."""

    worker_id: str
    instance_id: str
    kv_class: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Dispute:
    """Workers that differ on a block.

    Attributes:
        kv_class: model and numerics class.
        name: name of the block.
        case: the newest digest, one that differs from it, and that of a third worker if there is one.
    """

    kv_class: tuple[str, str]
    name: bytes
    case: AuditCase

    @property
    def contradicts_itself(self) -> bool:
        """True if the two digests are of one worker."""
        return self.case.answer.worker_id == self.case.runs[0].worker_id


class KvCheck:
    """The newest digest of each KV block, per worker.

    Args:
        capacity: blocks that are kept.

    Attributes:
        counts: digests, by the result of their comparison.
    """

    def __init__(self, capacity: int = MAX_KV_DIGESTS) -> None:
        self.counts: Counter[str] = Counter()
        self._capacity = capacity
        # Class and name of a block -> worker -> its instance and digest; the newest last in both mappings.
        self._said: OrderedDict[tuple[tuple[str, str], bytes], dict[str, tuple[str, int]]] = OrderedDict()
        self._instances: dict[str, str] = {}

    def __len__(self) -> int:
        """Number of blocks kept."""
        return len(self._said)

    def take(self, witness: Witness, name: bytes, digest: int, accepting: Collection[str]) -> Dispute | None:
        """Keeps a digest and compares it with those of other workers.

        Args:
            witness: the worker that sent it.
            name: name of the block.
            digest: digest of its contents.
            accepting: ids of the workers that take work; others are neither blamed nor believed.

        Returns:
            The workers that differ; None if all agree.
        """
        self._instances[witness.worker_id] = witness.instance_id
        said = self._remember((witness.kv_class, name))
        own = said.pop(witness.worker_id, None)
        said[witness.worker_id] = (witness.instance_id, digest)
        if len(said) > MAX_WITNESSES:
            del said[next(iter(said))]
        if own is not None and own != (witness.instance_id, digest) and own[0] == witness.instance_id:
            self.counts[DIFFERENT] += 1
            return self._dispute(witness, name, digest, [AuditRun(witness.worker_id, _bytes(own[1]))], accepting)
        others = [
            AuditRun(worker, _bytes(other))
            for worker, (instance, other) in reversed(said.items())
            if worker != witness.worker_id and worker in accepting and self._instances.get(worker) == instance
        ]
        differ = [run for run in others if run.output != _bytes(digest)]
        self.counts[DIFFERENT if differ else EQUAL if others else FIRST] += 1
        if not differ:
            return None
        third = [run for run in others if run is not differ[0]]
        return self._dispute(witness, name, digest, [differ[0], *third[:1]], accepting)

    def digest(self, witness: Witness, name: bytes) -> bytes | None:
        """The newest digest of a block from a worker instance, as `AuditCase` compares it; None for none."""
        instance, digest = self._said.get((witness.kv_class, name), {}).get(witness.worker_id, ("", 0))
        return _bytes(digest) if instance == witness.instance_id else None

    def forget(self, kv_class: tuple[str, str], name: bytes, worker_id: str) -> None:
        """Drops the digest of a worker, so that the next one is of a newer computation."""
        self._said.get((kv_class, name), {}).pop(worker_id, None)

    @staticmethod
    def _dispute(
        witness: Witness, name: bytes, digest: int, runs: list[AuditRun], accepting: Collection[str]
    ) -> Dispute | None:
        if witness.worker_id not in accepting:
            return None
        return Dispute(witness.kv_class, name, AuditCase(AuditRun(witness.worker_id, _bytes(digest)), runs))

    def _remember(self, key: tuple[tuple[str, str], bytes]) -> dict[str, tuple[str, int]]:
        said = self._said.setdefault(key, {})
        self._said.move_to_end(key)
        while len(self._said) > self._capacity:
            self._said.popitem(last=False)
        return said


def _bytes(digest: int) -> bytes:
    return digest.to_bytes(8, "little")
