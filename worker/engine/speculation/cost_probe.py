"""Measures what steps take by their number of rows, and what drafts of a model do, on the loaded model, before anything
is served.

The steps are of sequences that nobody asked for, on blocks of the pool that nobody has yet: what they write there is
never read.
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
from worker.engine.speculation.proposal_costs import ProposalCosts
from worker.engine.speculation.step_costs import StepCosts

# Numbers of rows: kernels compute some at a time.
_SIZES: Final = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# Sequences with a draft each, as many rows as decodes of one of the sizes have.
_VERIFYING: Final = 4
# Numbers of sequences behind which a model makes drafts, as many as may be.
_DRAFTING: Final = (1, 8, 32)
# Tokens in front of a row.
_CONTEXT: Final = 32
# Steps of each size in a row, in so many rounds, of which the shortest counts: other programs make steps longer, as do
# steps of another size before them, and nothing makes them shorter. All sizes come first, then such that all is in the
# processor's caches.
_IN_A_ROW: Final = (1, 3, 3, 3, 3)
# Seconds after which no further size, and no size again, is measured.
_MOST_S: Final = 3.0


class _Kind(NamedTuple):
    """A step: decodes of so many sequences, that verify so many drafts of each and make so many others."""

    num_seqs: int
    verified: int = 0
    made: int = 0


def measure_costs(config: Config, executor: Executor) -> tuple[StepCosts, ProposalCosts]:
    """Seconds of steps by their number of rows, and of a model's drafts: as many sizes, from small to large, as there
    is time for."""
    found: dict[_Kind, float] = {}
    spent = 0.0
    for kind in (kind for count in _IN_A_ROW for kind in _kinds(config) for _ in range(count)):
        if spent >= _MOST_S:
            break
        duration_s = executor.submit(_step(kind, config)).result().duration_s
        spent += duration_s
        found[kind] = min(duration_s, found.get(kind, duration_s))
    decodes = {kind.num_seqs: duration_s for kind, duration_s in found.items() if kind == _Kind(kind.num_seqs)}
    plain_s = decodes.get(2 * _VERIFYING, 0.0)
    verify_s = max(0.0, found.get(_Kind(_VERIFYING, 1), plain_s) - plain_s)
    return StepCosts(decodes, verify_s), _proposal_costs(found, config)


def _proposal_costs(found: dict[_Kind, float], config: Config) -> ProposalCosts:
    """Seconds of a model's drafts; none where no model makes any."""
    spec, first, further = config.speculative_config, dict[int, float](), dict[int, float]()
    for count in _DRAFTING:
        kinds = [_Kind(count), _Kind(count, 0, 1), _Kind(count, 0, _most(config))]
        if spec is not None and all(kind in found for kind in kinds):
            plain_s, one_s, most_s = (found[kind] for kind in kinds)
            first[count] = max(0.0, one_s - plain_s)
            further[count] = max(0.0, most_s - one_s) / max(1, spec.num_speculative_tokens - 1)
    return ProposalCosts(first, further)


def _most(config: Config) -> int:
    """Drafts that a model makes behind a sequence; 0 where none makes any."""
    spec = config.speculative_config
    return 0 if spec is None or spec.method == NGRAM else spec.num_speculative_tokens


def _kinds(config: Config) -> Iterator[_Kind]:
    """A step of each size that the engine may have, one with drafts, and some for which a model makes drafts."""
    made = _most(config)
    most = min(config.max_num_batched_tokens, config.num_kvcache_blocks // _blocks_each(config))
    for rows in _SIZES:
        if rows <= most:
            yield _Kind(rows)
        if rows == 2 * _VERIFYING <= most:
            yield _Kind(_VERIFYING, 1)
        if made and rows in _DRAFTING and rows <= most:
            yield from {_Kind(rows, 0, 1), _Kind(rows, 0, made)}


def _context(config: Config) -> int:
    """Tokens in front of the rows, such that all drafts have slots."""
    return min(_CONTEXT, (config.max_model_len or _CONTEXT + 2) - 2)


def _blocks_each(config: Config) -> int:
    return -(-(_context(config) + 2 + _most(config)) // config.kv_cache_block_size)


def _step(kind: _Kind, config: Config) -> ScheduledBatch:
    """Steps of such a kind."""
    seqs, blocks_each, context = dict[int, Sequence](), _blocks_each(config), _context(config)
    for i in range(kind.num_seqs):
        seq = Sequence([0] * (context + 1), config.kv_cache_block_size, SamplingParams(temperature=0.0))
        seq.num_computed_tokens = context
        seq.block_table = list(range(i * blocks_each, (i + 1) * blocks_each))
        seqs[seq.id] = seq
    rows = kind.num_seqs * (1 + kind.verified)
    batch = ScheduledBatch(
        seqs,
        [1 + kind.verified] * kind.num_seqs,
        rows,
        total_tokens_num_decode=rows,
        total_seqs_num=kind.num_seqs,
        total_seqs_num_decode=kind.num_seqs,
        num_spec_step=kind.verified,
        scheduled_spec_decode_tokens={seq_id: [0] * kind.verified for seq_id in seqs} if kind.verified else None,
    )
    batch.want_drafts(dict.fromkeys(seqs, kind.made) if kind.made else {})
    batch.feeds_draft_model = kind.made > 0
    return batch
