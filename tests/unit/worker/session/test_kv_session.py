"""KV sessions by themselves: their names are those of the engine's blocks, and other sessions bring nothing."""

from __future__ import annotations

from array import array

import pytest

from common.errors import InvalidFieldError
from tests.unit.worker.engine.small_engine import BLOCK, engine
from worker.engine.sequence import Sequence
from worker.engine.tier_lookups import Tiers, root_name
from worker.kv_tiers.memory_tier import MemoryTier
from worker.kv_tiers.tiers import HEADER_BYTES, KvTiers
from worker.session.kv_session import NO_SHARED_KV, SharedKv, may_have_blocks, new_session, prompt_name

ROOT = root_name(["weights"])
SHARED = SharedKv(("files:1", "redis:2"), ROOT)
PROMPT = array("I", range(3 * BLOCK + 1))


@pytest.mark.parametrize("salt", [b"", b"tenant"])
@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, 3 * BLOCK, 3 * BLOCK + 1])
def test_name_of_prompt_is_that_of_its_last_block_in_tiers(length: int, salt: bytes) -> None:
    store = KvTiers({"memory": MemoryTier(1 << 20, HEADER_BYTES + 32)}, 32)
    core = engine(tiers=Tiers(store, ROOT))
    seq = Sequence(PROMPT[:length].tolist(), BLOCK, cache_salt=salt)
    assert core.tiers is not None
    names = core.tiers._names(seq, length // BLOCK)
    core.close()
    name = prompt_name(ROOT, salt, PROMPT[:length], BLOCK)
    assert name == (names[-1] if names else prompt_name(ROOT, salt, PROMPT[:0], BLOCK))


def test_session_is_found_where_tier_and_root_are_the_same() -> None:
    name = prompt_name(ROOT, b"", PROMPT, BLOCK)
    session = new_session(SHARED, name, 3, "request", 0)
    assert may_have_blocks(session, SharedKv(("redis:2",), ROOT), name)
    assert not may_have_blocks(session, SharedKv(("redis:3",), ROOT), name)
    assert not may_have_blocks(session, SharedKv(SHARED.stores, root_name(["others"])), name)
    assert not may_have_blocks(session, NO_SHARED_KV, name)
    assert not may_have_blocks(new_session(NO_SHARED_KV, name, 3, "request", 0), NO_SHARED_KV, name)


def test_session_of_another_prompt_is_refused() -> None:
    session = new_session(SHARED, prompt_name(ROOT, b"", PROMPT, BLOCK), 3, "request", 0)
    for salt, tokens in ((b"", PROMPT[BLOCK:]), (b"salt", PROMPT)):
        with pytest.raises(InvalidFieldError, match="another prompt or cache salt"):
            may_have_blocks(session, SHARED, prompt_name(ROOT, salt, tokens, BLOCK))


def test_requests_with_equal_prompts_have_sessions_of_their_own() -> None:
    name = prompt_name(ROOT, b"", PROMPT, BLOCK)
    assert len({new_session(SHARED, name, 3, request, 0).session_id for request in ("a", "b")}) == 2
