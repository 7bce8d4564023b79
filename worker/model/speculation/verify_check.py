"""Checks on the loaded model that verifying drafts gives the bits of single decodes.

Speculation depends on it: a row after accepted drafts must have the bits of a plain decode. Batch-invariant kernels
have them; others, or a wrong instruction set, library or device, may not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from worker.engine.batch import ScheduledBatch
from worker.engine.sequence import Sequence

if TYPE_CHECKING:
    from worker.model.model_runner import ModelRunner

# Tokens before the drafts: less than a block, and enough that back ends split them.
_CONTEXTS: Final = (5, 300)
# A prime, so that the ids differ.
_STRIDE: Final = 7919


def verifies_exactly(runner: ModelRunner, num_drafts: int) -> bool:
    """True if verified rows have the bits of plain decodes, at a few context lengths."""
    longest = runner.max_model_len - num_drafts - 1
    lengths = sorted({min(length, longest) for length in _CONTEXTS if longest > 0})
    return all(_is_exact(runner, length, num_drafts) for length in lengths)


def _is_exact(runner: ModelRunner, length: int, num_drafts: int) -> bool:
    ids = [place * _STRIDE % runner.sampled_ids for place in range(length + num_drafts + 1)]
    with runner.scratch_kv_cache(-(-len(ids) // runner.config.kv_cache_block_size)):
        _logits(runner, ids[:length], 0)
        alone = [_logits(runner, ids[: end + 1], end) for end in range(length, len(ids))]
        together = _logits(runner, ids[: length + 1], length, ids[length + 1 :])
    return torch.equal(torch.cat(alone), together)


def _logits(runner: ModelRunner, ids: list[int], start: int, drafts: list[int] | None = None) -> torch.Tensor:
    """Logits of a step that computes `ids` from `start` on, and the drafts after them."""
    seq = Sequence(ids, runner.config.kv_cache_block_size)
    seq.num_computed_tokens = start
    drafts = drafts or []
    seq.block_table = list(range(-(-(len(ids) + len(drafts)) // seq.block_size)))
    count = len(ids) - start + len(drafts)
    verified = {seq.id: drafts} if drafts else None
    batch = ScheduledBatch(
        {seq.id: seq}, [count], count, num_spec_step=len(drafts), scheduled_spec_decode_tokens=verified
    )
    return runner.run_model(runner.prepare_model(batch)).clone()
