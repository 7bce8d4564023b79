"""Measures how long steps take, by their number of rows and with a draft model's work, before anything is served.

The sequences of these steps are made up. They use blocks of the KV pool that no request has yet, and what they write
there is never read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from common.config import Config
from common.params.config_parts import NGRAM
from common.params.sampling_params import SamplingParams
from worker.engine.batch import ScheduledBatch
from worker.engine.executor import Executor
from worker.engine.sequence import Sequence
from worker.engine.speculation.step_costs import StepCosts

# Numbers of rows: kernels compute blocks of rows, so durations are steps rather than lines.
_SIZES: Final = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# Sequences with one draft each, whose rows are as many as one of the sizes.
_VERIFYING: Final = 4
# Numbers of sequences for which a draft model makes drafts.
_DRAFTING: Final = (1, 8, 32)
# Tokens of each sequence before the step.
_CONTEXT: Final = 32
# Steps of each size in a row. The shortest of all rounds counts: other programs and steps of another size before
# lengthen a step, and nothing shortens it. The first round takes each size once, in case time runs out.
_IN_A_ROW: Final = 3
# Fewest and most rounds, and the seconds after which no round beyond the fewest starts. On a busy machine five rounds
# found half of a draft model's time.
_FEWEST_ROUNDS, _MOST_ROUNDS, _ENOUGH_S = 5, 64, 0.5
# Seconds after which no further step is measured.
_MOST_S: Final = 3.0


class _StepShape(NamedTuple):
    """A step of `num_seqs` decodes that verifies `verified` drafts of each and makes `made` new ones."""

    num_seqs: int
    verified: int = 0
    made: int = 0


def measure_costs(config: Config, executor: Executor) -> StepCosts:
    """Durations of steps and of a draft model's work, for as many sizes as there is time, smallest first."""
    found: dict[_StepShape, float] = {}
    spent = 0.0
    for number in range(_MOST_ROUNDS):
        if number >= _FEWEST_ROUNDS and spent >= _ENOUGH_S:
            break
        for shape in (shape for shape in _shapes(config) for _ in range(_IN_A_ROW if number else 1)):
            if spent >= _MOST_S:
                break
            duration_s = executor.submit(_step(shape, config)).result().duration_s
            spent += duration_s
            found[shape] = min(duration_s, found.get(shape, duration_s))
    decodes = {shape.num_seqs: duration_s for shape, duration_s in found.items() if shape == _StepShape(shape.num_seqs)}
    plain_s = decodes.get(2 * _VERIFYING, 0.0)
    verify_s = max(0.0, found.get(_StepShape(_VERIFYING, 1), plain_s) - plain_s)
    return StepCosts(decodes, verify_s, *_making_costs(found, config))


def _making_costs(found: dict[_StepShape, float], config: Config) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds of a draft model's first draft and of each further one, by sequences; empty without a draft model."""
    spec, first, further = config.speculative_config, dict[int, float](), dict[int, float]()
    for count in _DRAFTING:
        shapes = [_StepShape(count), _StepShape(count, 0, 1), _StepShape(count, 0, _most(config))]
        if spec is not None and all(shape in found for shape in shapes):
            plain_s, one_s, most_s = (found[shape] for shape in shapes)
            first[count] = max(0.0, one_s - plain_s)
            further[count] = max(0.0, most_s - one_s) / max(1, spec.num_speculative_tokens - 1)
    return first, further


def _most(config: Config) -> int:
    """Most drafts that a draft model makes for a sequence; 0 without a draft model."""
    spec = config.speculative_config
    return 0 if spec is None or spec.method == NGRAM else spec.num_speculative_tokens


def _shapes(config: Config) -> Iterator[_StepShape]:
    """Steps of all sizes that the engine can have, one with drafts, and some with a draft model's work."""
    made = _most(config)
    most = min(config.max_num_batched_tokens, config.num_kvcache_blocks // _blocks_each(config))
    for rows in _SIZES:
        if rows <= most:
            yield _StepShape(rows)
        if rows == 2 * _VERIFYING <= most:
            yield _StepShape(_VERIFYING, 1)
        if made and rows in _DRAFTING and rows <= most:
            yield from {_StepShape(rows, 0, 1), _StepShape(rows, 0, made)}


def _context(config: Config) -> int:
    """Tokens of each sequence before the step; fewer if the drafts would not fit the model's length."""
    return min(_CONTEXT, (config.max_model_len or _CONTEXT + 2) - 2)


def _blocks_each(config: Config) -> int:
    return -(-(_context(config) + 2 + _most(config)) // config.kv_cache_block_size)


def _step(shape: _StepShape, config: Config) -> ScheduledBatch:
    """The batch of such a step."""
    seqs, blocks_each, context = dict[int, Sequence](), _blocks_each(config), _context(config)
    for i in range(shape.num_seqs):
        seq = Sequence([0] * (context + 1), config.kv_cache_block_size, SamplingParams(temperature=0.0))
        seq.num_computed_tokens = context
        seq.block_table = list(range(i * blocks_each, (i + 1) * blocks_each))
        seqs[seq.id] = seq
    rows = shape.num_seqs * (1 + shape.verified)
    batch = ScheduledBatch(
        seqs,
        [1 + shape.verified] * shape.num_seqs,
        rows,
        total_tokens_num_decode=rows,
        total_seqs_num=shape.num_seqs,
        total_seqs_num_decode=shape.num_seqs,
        num_spec_step=shape.verified,
        scheduled_spec_decode_tokens={seq_id: [0] * shape.verified for seq_id in seqs} if shape.verified else None,
    )
    batch.want_drafts(dict.fromkeys(seqs, shape.made) if shape.made else {})
    batch.feeds_draft_model = shape.made > 0
    return batch
