"""A proposer for tests: drafts that are right for a while, wrong, or both, as many as it likes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

from worker.engine.sequence import Sequence

# By seed and choice of a sequence: the tokens that it will have.
Streams = Mapping[tuple[int, int], list[int]]


def streams_of(answers: Iterable[Mapping[str, Any]]) -> Streams:
    """What the sequences of these answers generate."""
    return {(answer["seed"], answer["index"]): answer["token_ids"] for answer in answers}


class RandomProposer:
    """Knows what comes, and says so for a while.

    Args:
        streams: of the sequences; of others it knows nothing.
        num_ids: ids that a wrong draft is one of.
        rnd: decides how many there are, and how many of them are right.
    """

    def __init__(self, streams: Streams, num_ids: int, rnd: random.Random) -> None:
        self._streams = streams
        self._num_ids = num_ids
        self._rnd = rnd

    def propose(self, seq: Sequence, most: int) -> list[int]:
        count = self._rnd.randint(0, most)
        behind = self._streams.get((seq.seed, seq.choice), [])[seq.num_completion_tokens :]
        right = behind[: self._rnd.choice([count, count, self._rnd.randint(0, count)])]
        return right + [self._rnd.randrange(5, self._num_ids) for _ in range(count - len(right))]
