"""A proposer for tests: drafts with a random number of right tokens, then wrong ones."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from worker.engine.sequence import Sequence
from worker.engine.speculation.drafter import Proposer
from worker.model.speculation.draft_proposer import LaunchedDrafts, LaunchedStep, SampledStep
from worker.model.speculation.rejection_sampler import RejectionSampler

# Future tokens of a sequence, by its seed and choice.
Streams = Mapping[tuple[int, int], list[int]]


def streams_of(answers: Iterable[Mapping[str, Any]]) -> Streams:
    """What the sequences of these answers generate."""
    return {(answer["seed"], answer["index"]): answer["token_ids"] for answer in answers}


class RandomProposer(Proposer):
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


def sampled(step: LaunchedStep) -> SampledStep:
    """The SampledStep of a launched step once its tokens are on the host."""
    metadata, wrong = step.sampled.metadata, step.num_rejected
    num_rejected = np.zeros(len(step.sampled.seq_ids), np.int64) if wrong is None else wrong.numpy()
    accepted = RejectionSampler().accepted(metadata, step.drawn.tolist(), num_rejected)
    late = step.metadata.num_rejected
    told = None if late is None else late.numpy()
    tokens = dict(zip(step.sampled.seq_ids, accepted, strict=True))
    return SampledStep(step.batch, tokens, step.token_ids.numpy(), step.states, step.kv_cache_data, told)


def launched(step: LaunchedStep, drafts: Mapping[int, list[int]]) -> LaunchedDrafts:
    """Drafts of its sequences, as they are on the device."""
    token_ids = torch.zeros(len(step.sampled.seq_ids), max(map(len, drafts.values()), default=0), dtype=torch.int64)
    for place, seq_id in enumerate(step.sampled.seq_ids):
        own = drafts.get(seq_id, [])
        token_ids[place, : len(own)] = torch.tensor(own, dtype=torch.int64)
    return LaunchedDrafts(token_ids, {seq_id: len(own) for seq_id, own in drafts.items()})
