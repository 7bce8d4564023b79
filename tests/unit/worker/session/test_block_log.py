"""The log of cached blocks adds up to the cache, whatever the engine does and whatever a reader has missed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import Config
from common.params.sampling_params import SamplingParams
from common.wire.block_hash import hash_chain
from tests.unit.worker.session.support import simulated_core
from worker.engine.prefix_cache import BlockChange, StoredBlock
from worker.engine.sequence import Sequence as EngineSequence
from worker.engine.turns import EngineTurns, Flush, StepListener, Submit, TicketReceipt, WatchBlocks
from worker.session import block_log
from worker.session.block_log import BlockLog

BLOCK = 16
SALTED: dict[str, Any] = {"cache_salt": b"s", "hash_root": 5}


class Nobody(StepListener):
    def on_step(self, step: int, submit_seen: int | None) -> None:
        pass


def prompt(parts: Sequence[int]) -> list[int]:
    """A prompt of parts of two blocks each."""
    return [part + i % 7 for part in parts for i in range(2 * BLOCK)]


def applied(held: dict[int, StoredBlock], changes: Sequence[BlockChange]) -> None:
    """Applies changes as a subscriber does: a child needs its parent."""
    for change in changes:
        if isinstance(change, int):
            del held[change]
        else:
            assert change.parent is None or change.parent in held
            held[change.hash] = change


GROUPS = st.lists(st.lists(st.lists(st.sampled_from([10, 20]), min_size=1, max_size=6), max_size=3), max_size=10)


@settings(max_examples=25)
@given(GROUPS, st.integers(0, 9), st.integers(1, 30))
def test_log_adds_up_to_cache_of_engine(groups: list[list[list[int]]], watched_from: int, capacity: int) -> None:
    """Salted prompts are left out, and a log that begins late begins with what is cached."""
    config = Config(
        max_num_seqs=4,
        max_num_batched_tokens=128,
        num_kvcache_blocks=40,
        max_model_len=512,
        enable_prefix_caching=True,
    )
    core = simulated_core(config)
    turns, log, listener = EngineTurns(core, lambda: 0.0), BlockLog(7, capacity), Nobody()
    prefixes = core.scheduler.block_manager.prefixes
    held: dict[int, StoredBlock] = {}
    seen = log.number
    chains, salted = set[int](), set[int]()
    for serial, group in enumerate([*groups, []]):
        seqs = [
            EngineSequence(prompt(parts), BLOCK, SamplingParams(max_tokens=20), **(SALTED if i == 2 else {}))
            for i, parts in enumerate(group)
        ]
        for seq in seqs:
            chain = hash_chain(seq.token_ids, BLOCK, root=seq.hash_root, seed=config.hash_seed)
            (salted if seq.cache_salt else chains).update(chain)
        first = [WatchBlocks()] if serial == watched_from else [Flush(lambda blocks: None)] if serial == 5 else []
        for commands in ([*first, Submit(TicketReceipt(listener, serial), seqs)], [], []):
            log.append(turns.run(commands).blocks)
            if log.remembers(seen):
                for batch in log.after(seen):
                    seen += 1
                    assert batch.number == seen
                    applied(held, batch.changes)
            else:
                held.clear()
                applied(held, log.snapshot())
                seen = log.number
            assert held == {block.hash: block for block in log.snapshot()}
            if serial >= watched_from:
                assert chains & set(prefixes.hash_to_block_id) <= set(held) <= set(prefixes.hash_to_block_id)
                assert salted.isdisjoint(held)
    core.close()


def test_stored_blocks_have_tokens_and_hashes_of_the_prompt() -> None:
    core = simulated_core()
    turns, log, tokens = EngineTurns(core, lambda: 0.0), BlockLog(1), list(range(1, BLOCK * 5 + 5))
    seq = EngineSequence(tokens, BLOCK, SamplingParams(max_tokens=1))
    log.append(turns.run([WatchBlocks(), Submit(TicketReceipt(Nobody(), 1), [seq])]).blocks)
    while turns.has_work:
        log.append(turns.run([]).blocks)
    chain = hash_chain(tokens, BLOCK, seed=core.config.hash_seed)
    assert [block.hash for block in log.snapshot()] == chain
    assert [block.parent for block in log.snapshot()] == [None, *chain[:-1]]
    assert [token for block in log.snapshot() for token in block.token_ids] == tokens[: 5 * BLOCK]
    core.close()


def test_unwatched_engine_reports_no_blocks() -> None:
    core = simulated_core()
    turns = EngineTurns(core, lambda: 0.0)
    seq = EngineSequence(list(range(1, 100)), BLOCK, SamplingParams(max_tokens=1))
    turn = turns.run([Submit(TicketReceipt(Nobody(), 1), [seq])])
    assert turn.granules == turn.blocks == []
    while turns.has_work:
        assert turns.run([]).blocks == []
    assert core.scheduler.block_manager.prefixes.hash_to_block_id
    core.close()


def test_large_step_becomes_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_log, "MAX_KV_FRAME_CHANGES", 10)
    log, rnd = BlockLog(1), random.Random(1)
    woken: list[int] = []
    log.wait(lambda: woken.append(log.number))
    blocks = [StoredBlock(rnd.getrandbits(64), None, b"") for _ in range(25)]
    log.append(blocks)
    assert [len(batch.changes) for batch in log.after(0)] == [10, 10, 5]
    assert woken == [3]
    log.append([])
    log.append([5])
    assert log.number == 3
    log.append([block.hash for block in blocks])
    assert (log.snapshot(), woken) == ([], [3])
