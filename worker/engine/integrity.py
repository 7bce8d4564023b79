"""Checks of the engine's invariants, for tests and idle time: O(blocks)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from worker.engine.block_manager import BlockManager
from worker.engine.lifecycle import Lifecycle
from worker.engine.prefix_cache import UNSALTED_ROOT, Block
from worker.engine.sequence import Sequence, SequenceStatus
from worker.engine.step import StepLimits


class IntegrityError(Exception):
    """An invariant of the engine is broken."""


def check_lifecycle(limits: StepLimits, lifecycle: Lifecycle, *, is_computing: bool) -> None:
    """Checks the live sequences and their blocks between two steps.

    Args:
        limits: bounds of a step.
        lifecycle: the live sequences.
        is_computing: True if a step is in flight.

    Raises:
        IntegrityError: an invariant is broken.
    """
    queued, running = [*lifecycle.gated, *lifecycle.waiting], lifecycle.running
    everywhere = [seq.id for seq in [*queued, *running]]
    _require(sorted(everywhere) == sorted(lifecycle.live), "a live sequence is in no queue, or in two")
    _require(len(running) <= limits.max_num_seqs, f"{len(running)} sequences run")
    for seq in queued:
        _require(seq.status is SequenceStatus.WAITING and not seq.block_table, f"waiting sequence {seq.id}")
        _require(seq.num_computed_tokens == 0 and not seq.spec_token_ids, f"waiting sequence {seq.id} has a past")
    for seq in running:
        _check_running(seq, is_prefilling=seq.id in lifecycle.prefilling, is_computing=is_computing)
    _require(lifecycle.num_growing == sum(seq.may_grow for seq in running), "the count of growing sequences")
    tokens = sum(seq.num_tokens for seq in lifecycle.waiting)
    _require(lifecycle.waiting.num_tokens == tokens, "the count of waiting tokens")
    check_blocks(lifecycle.block_manager, running)


def check_blocks(manager: BlockManager, seqs: Iterable[Sequence]) -> None:
    """Checks the blocks and the cached prefixes; `seqs` are all sequences with blocks.

    Raises:
        IntegrityError: an invariant is broken.
    """
    seqs = list(seqs)
    refs = Counter(b for seq in seqs for b in seq.block_table)
    for block in manager.blocks:
        held = refs[block.block_id]
        _require(block.ref_count == held, f"block {block.block_id} is held by {held}")
        _require((held == 0) == (block.block_id in manager.free_block_ids), f"block {block.block_id} is lost")
    _check_tree(manager)
    for seq in seqs:
        _require(seq.num_slots == len(seq.block_table) * manager.block_size, f"slots of sequence {seq.id}")
        own = [manager.blocks[b] for b in seq.block_table[manager.num_published(seq) :]]
        _require(all(b.ref_count == 1 and b.hash is None for b in own), f"sequence {seq.id} shares unwritten blocks")


def _check_running(seq: Sequence, *, is_prefilling: bool, is_computing: bool) -> None:
    _require(seq.status is SequenceStatus.RUNNING, f"running sequence {seq.id} is {seq.status}")
    _require(0 <= seq.num_cached_tokens <= seq.num_computed_tokens < seq.num_tokens, f"lengths of {seq.id}")
    _require(len(seq.block_table) * seq.block_size >= seq.next_position, f"blocks of {seq.id}")
    _require(is_computing or seq.num_inflight_tokens == 0, f"sequence {seq.id} is in no step in flight")
    # Each draft follows a token that the same step computes.
    most = max(0, seq.num_inflight_tokens - seq.num_placeholder)
    _require(0 <= seq.num_inflight_drafts <= most, f"drafts in flight of {seq.id}")
    _require(not (seq.num_placeholder and seq.spec_token_ids), f"{seq.id} has drafts behind a token in flight")
    if is_prefilling:
        _require(seq.num_placeholder == 0 and seq.next_position < seq.num_tokens, f"prefill of {seq.id}")
    else:
        unknown = 0 if seq.num_inflight_tokens else seq.num_tokens - 1 - seq.num_computed_tokens
        _require((seq.num_placeholder > 0) == (seq.num_inflight_tokens > 0), f"output in flight of {seq.id}")
        _require(unknown == 0, f"sequence {seq.id} neither prefills nor decodes")


def _check_tree(manager: BlockManager) -> None:
    cached = {b.node: b for b in manager.blocks if b.hash is not None}
    for block in manager.blocks:
        if block.tail is not None:
            _require(block.tail[0] <= UNSALTED_ROOT or block.tail[0] in cached, f"tail of block {block.block_id}")
    index = {b.hash: b.block_id for b in cached.values()}
    _require(index == manager.hash_to_block_id, "the index differs from the blocks' hashes")
    order = {block_id: i for i, block_id in enumerate(manager.free_block_ids)}
    for block in cached.values():
        if block.parent is None or block.parent <= UNSALTED_ROOT:
            _require(block.depth == 1, f"block {block.block_id} begins a prefix at depth {block.depth}")
            continue
        parent = cached.get(block.parent)
        if parent is None:
            raise IntegrityError(f"block {block.block_id} is cached without its parent")
        _check_child(block, parent, order)


def _check_child(block: Block, parent: Block, order: dict[int, int]) -> None:
    _require(block.depth == parent.depth + 1, f"depth of block {block.block_id}")
    _require(parent.is_proved or not block.is_proved, f"block {block.block_id} is proved without its parent")
    if parent.ref_count == 0:
        dies_first = block.ref_count == 0 and order[block.block_id] < order[parent.block_id]
        _require(dies_first, f"block {parent.block_id} would be evicted before its child {block.block_id}")


def _require(ok: bool, problem: str) -> None:
    if not ok:
        raise IntegrityError(problem)
