"""Measures what steps take by their number of rows, on the loaded model, before anything is served.

The steps are of sequences that nobody asked for, on blocks of the pool that nobody has yet: what they write there is
never read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from common.config import Config
from common.sampling_params import SamplingParams
from worker.engine.batch import ScheduledBatch
from worker.engine.executor import Executor
from worker.engine.sequence import Sequence
from worker.engine.step_costs import StepCosts

# Numbers of rows: kernels compute some at a time.
_SIZES: Final = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# Sequences with a draft each, as many rows as decodes of one of the sizes have.
_VERIFYING: Final = 4
# Tokens in front of a row.
_CONTEXT: Final = 32
# Steps of each size, of which the shortest counts: other programs make steps longer, nothing makes them shorter.
_TIMES: Final = 3
# Seconds after which no further size, and no size again, is measured.
_MOST_S: Final = 3.0


def measure_step_costs(config: Config, executor: Executor) -> StepCosts:
    """Seconds of steps by their number of rows: as many sizes, from small to large, as there is time for."""
    found: dict[tuple[int, bool], float] = {}
    spent = 0.0
    for _ in range(_TIMES):
        for batch in _batches(config):
            if spent >= _MOST_S:
                break
            duration_s = executor.submit(batch).result().duration_s
            spent += duration_s
            kind = batch.total_tokens_num, batch.num_spec_step > 0
            found[kind] = min(duration_s, found.get(kind, duration_s))
    decodes = {rows: duration_s for (rows, verifies), duration_s in found.items() if not verifies}
    rows = 2 * _VERIFYING
    plain_s = decodes.get(rows, 0.0)
    return StepCosts(decodes, max(0.0, found.get((rows, True), plain_s) - plain_s))


def _batches(config: Config) -> Iterator[ScheduledBatch]:
    """A step of each size that the engine may have, and one with drafts."""
    size = config.kv_cache_block_size
    context = min(_CONTEXT, (config.max_model_len or _CONTEXT + 2) - 2)
    blocks_each = -(-(context + 2) // size)
    most = min(config.max_num_batched_tokens, config.num_kvcache_blocks // blocks_each)
    for rows in _SIZES:
        if rows <= most:
            yield _step(rows, 0, context, blocks_each, size)
        if rows == 2 * _VERIFYING <= most:
            yield _step(_VERIFYING, 1, context, blocks_each, size)


def _step(count: int, num_drafts: int, context: int, blocks_each: int, block_size: int) -> ScheduledBatch:
    """Decodes of so many sequences, with so many drafts each."""
    seqs = {}
    for i in range(count):
        seq = Sequence([0] * (context + 1), block_size, SamplingParams(temperature=0.0))
        seq.num_computed_tokens = context
        seq.block_table = list(range(i * blocks_each, (i + 1) * blocks_each))
        seqs[seq.id] = seq
    rows = count * (1 + num_drafts)
    return ScheduledBatch(
        seqs,
        [1 + num_drafts] * count,
        rows,
        total_tokens_num_decode=rows,
        total_seqs_num=count,
        total_seqs_num_decode=count,
        num_spec_step=num_drafts,
        scheduled_spec_decode_tokens={seq_id: [0] * num_drafts for seq_id in seqs} if num_drafts else None,
    )
