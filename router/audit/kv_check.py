"""Compares digests of KV blocks that workers send: two of one numerics class that differ show a fault.

Pure. A digest is of a block's contents when it was published, under a name that stands for all tokens up to its end
(common/wire/kv_digests.py): healthy workers of one class say the same, and a worker says the same whenever it computes
the block again. Invariants: at most `capacity` blocks are remembered, the ones last spoken of, with the newest
MAX_WITNESSES workers of each; what an instance of a worker has said counts as long as no other instance of it speaks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from common.limits import MAX_KV_DIGESTS
from router.audit.decide import AuditCase, Run

MAX_WITNESSES: Final = 8
# Results of the comparison of a digest with those of other workers, or with an earlier one of its own worker.
FIRST, EQUAL, DIFFERENT = "first", "equal", "different"


@dataclass(frozen=True, slots=True)
class Witness:
    """An instance of a worker, and the workers that it is to be compared with: their model and numerics class."""

    worker_id: str
    instance_id: str
    kv_class: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Dispute:
    """Workers that differ on a block.

    Attributes:
        kv_class: model and numerics class.
        name: of the block.
        case: the one that spoke last, one that differs from it, and a third one if there is one.
    """

    kv_class: tuple[str, str]
    name: bytes
    case: AuditCase

    @property
    def contradicts_itself(self) -> bool:
        """True if one worker has said two things."""
        return self.case.answer.worker_id == self.case.runs[0].worker_id


class KvCheck:
    """The digests that have come.

    Args:
        capacity: blocks that are remembered.

    Attributes:
        counts: digests, by what came of their comparison.
    """

    def __init__(self, capacity: int = MAX_KV_DIGESTS) -> None:
        self.counts: Counter[str] = Counter()
        self._capacity = capacity
        # By model, numerics class and name, the last one spoken of at the end: what each worker has said, likewise.
        self._said: OrderedDict[tuple[tuple[str, str], bytes], dict[str, tuple[str, int]]] = OrderedDict()
        self._instances: dict[str, str] = {}

    def __len__(self) -> int:
        """Blocks that are remembered."""
        return len(self._said)

    def take(self, witness: Witness, name: bytes, digest: int, accepting: Collection[str]) -> Dispute | None:
        """Compares a digest with those of others.

        Args:
            witness: who says it.
            name: of the block.
            digest: of its contents.
            accepting: ids of the workers that take work; others are neither blamed nor believed.

        Returns:
            Workers that differ, or None where all agree.
        """
        self._instances[witness.worker_id] = witness.instance_id
        said = self._remember((witness.kv_class, name))
        own = said.pop(witness.worker_id, None)
        said[witness.worker_id] = (witness.instance_id, digest)
        if len(said) > MAX_WITNESSES:
            del said[next(iter(said))]
        if own is not None and own != (witness.instance_id, digest) and own[0] == witness.instance_id:
            self.counts[DIFFERENT] += 1
            return self._dispute(witness, name, digest, [Run(witness.worker_id, _bytes(own[1]))], accepting)
        others = [
            Run(worker, _bytes(other))
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
        """The newest digest that an instance has sent of a block, as `AuditCase` compares them; None for none."""
        instance, digest = self._said.get((witness.kv_class, name), {}).get(witness.worker_id, ("", 0))
        return _bytes(digest) if instance == witness.instance_id else None

    def forget(self, kv_class: tuple[str, str], name: bytes, worker_id: str) -> None:
        """Counts nothing that a worker has said of a block: the next one will be of what it has computed since."""
        self._said.get((kv_class, name), {}).pop(worker_id, None)

    @staticmethod
    def _dispute(
        witness: Witness, name: bytes, digest: int, runs: list[Run], accepting: Collection[str]
    ) -> Dispute | None:
        if witness.worker_id not in accepting:
            return None
        return Dispute(witness.kv_class, name, AuditCase(Run(witness.worker_id, _bytes(digest)), runs))

    def _remember(self, key: tuple[tuple[str, str], bytes]) -> dict[str, tuple[str, int]]:
        said = self._said.setdefault(key, {})
        self._said.move_to_end(key)
        while len(self._said) > self._capacity:
            self._said.popitem(last=False)
        return said


def _bytes(digest: int) -> bytes:
    return digest.to_bytes(8, "little")
