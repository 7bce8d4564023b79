from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.model.runner_setup import kv_budget

GIB = 1 << 30


def test_cache_budget_is_memory_left_by_largest_step() -> None:
    # 80 GiB, of which 16 of weights and others are taken: 72 may be used, and a step needs 4.
    assert kv_budget(80 * GIB, 64 * GIB, 4 * GIB, 0.9) == int(80 * GIB * 0.9) - 20 * GIB
    assert kv_budget(80 * GIB, 4 * GIB, 0, 0.9) == 0


@given(st.integers(1, 1 << 40), st.data())
def test_never_more_than_is_free(total: int, data: st.DataObject) -> None:
    free = data.draw(st.integers(0, total))
    budget = kv_budget(total, free, data.draw(st.integers(0, total)), data.draw(st.floats(0.01, 1)))
    assert 0 <= budget <= free
