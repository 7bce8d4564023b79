"""From the tokens of a sequence to what its penalties and its min_tokens change in a row of logits.

The order of the changes is the kernels' (design-details section 4); here is which ids they concern:
- repetition: every id of prompt and output; presence and frequency: ids of the output only;
- before `min_tokens` output tokens, the ids that would end the sequence are masked: the request's `stop_token_ids`, and
  the model's end-of-sequence ids unless `ignore_eos`. Stop token sequences and stop strings are not masked: they are no
  single ids, and worker/stop_rules.py does not look at them yet.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kernels.interface import MaskedIds, Penalties
from worker.batch import TokenHistory

Ids = npt.NDArray[np.int64]


def penalties(histories: Mapping[int, TokenHistory]) -> Penalties | None:
    """The penalties of the rows that are the keys; None when there are none."""
    penalized = {row: history for row, history in histories.items() if history.params.penalized}
    seen = {row: _seen(history) for row, history in penalized.items()}
    sizes = [len(ids) for ids, _ in seen.values()]
    if not sum(sizes):
        return None

    def per_entry(values: list[float]) -> npt.NDArray[np.float32]:
        return np.repeat(np.array(values, np.float32), sizes)

    params = [history.params for history in penalized.values()]
    return Penalties(
        rows=np.repeat(np.array(list(seen), np.int64), sizes),
        ids=np.concatenate([ids for ids, _ in seen.values()]),
        output_counts=np.concatenate([counts for _, counts in seen.values()]).astype(np.float32),
        repetition=per_entry([p.repetition_penalty for p in params]),
        presence=per_entry([p.presence_penalty for p in params]),
        frequency=per_entry([p.frequency_penalty for p in params]),
    )


def masked_ids(histories: Mapping[int, TokenHistory], eos_token_ids: frozenset[int], size: int) -> MaskedIds | None:
    """What rows that have not reached their `min_tokens` must not sample; None when nothing.

    Args:
        histories: by row.
        eos_token_ids: the model's.
        size: logits per row; an id outside can not be sampled anyway.
    """
    ids = {row: _ending_ids(history, eos_token_ids, size) for row, history in histories.items()}
    rows = [row for row, masked in ids.items() for _ in masked]
    if not rows:
        return None
    return MaskedIds(np.array(rows, np.int64), np.array([token for masked in ids.values() for token in masked]))


def _seen(history: TokenHistory) -> tuple[Ids, Ids]:
    """Distinct ids, and how often each is in the output."""
    ids, counts = np.unique(np.array(history.output_ids, np.int64), return_counts=True)
    prompt_only = np.setdiff1d(history.prompt_ids, ids, assume_unique=True)
    return np.concatenate((ids, prompt_only)), np.concatenate((counts, np.zeros(len(prompt_only), np.int64)))


def _ending_ids(history: TokenHistory, eos_token_ids: frozenset[int], size: int) -> list[int]:
    params = history.params
    if len(history.output_ids) >= params.min_tokens:
        return []
    ending = set(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
    return [token for token in sorted(ending) if 0 <= token < size]
