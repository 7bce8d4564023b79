"""Texts waiting for the tokenizer: bounded in bytes, tenants in turn."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import QueueFullError
from common.telemetry.ledger import Blame, Ledger
from common.telemetry.names import Stage
from router.prompts.text_queue import TextJob, TextPool, TextQueue, ThreadTurn, ThreadTurns


def job(tenant: str = "a", size: int = 1, pool: TextPool = TextPool.LONG) -> TextJob:
    return TextJob(tenant, size, pool)


def run(queue: TextQueue, steps: int, needed: dict[TextJob, int]) -> Counter[str]:
    """Runs `steps` steps in one thread; returns the number of each tenant's."""
    served: Counter[str] = Counter()
    for _ in range(steps):
        chosen = queue.next(TextPool.LONG)
        if chosen is None:
            break
        served[chosen.tenant] += 1
        needed[chosen] -= 1
        if needed[chosen]:
            queue.again(chosen)
        else:
            queue.end(chosen)
    return served


def test_text_waits_for_one_step_per_other_tenant() -> None:
    """Ten long texts of one tenant do not delay the text of another."""
    queue, needed = TextQueue(), {}
    for _ in range(10):
        needed[long := job("a", 2_000_000)] = 60
        queue.add(long)
    run(queue, 30, needed)
    needed[short := job("b")] = 1
    queue.add(short)
    assert run(queue, 2, needed) == {"a": 1, "b": 1}


def test_tenants_get_steps_by_weight() -> None:
    queue, needed = TextQueue(), {}
    queue.set_weights({"a": 3.0})
    for tenant in "ab":
        needed[each := job(tenant)] = 1000
        queue.add(each)
    served = run(queue, 400, needed)
    assert abs(served["a"] - 300) <= 4


def test_jobs_of_a_tenant_run_in_turn() -> None:
    queue, needed = TextQueue(), {}
    jobs = [job() for _ in range(3)]
    for each in jobs:
        needed[each] = 5
        queue.add(each)
    run(queue, 7, needed)
    assert [needed[each] for each in jobs] == [0, 3, 5]


def test_full_text_queue_refuses_largest_tenant() -> None:
    """Waiting texts are bounded in bytes, and one tenant's texts do not refuse those of others."""
    queue = TextQueue(most_bytes=100)
    mine = [job("a", 20) for _ in range(5)]
    for each in mine:
        assert queue.add(each) == []
    with pytest.raises(QueueFullError) as refused:
        queue.add(job("a", 20))
    assert refused.value.retry_after_s
    assert queue.next(TextPool.LONG) is mine[0]
    # A running text stays; the newest waiting one is dropped first.
    assert queue.add(job("b", 30)) == [mine[4], mine[3]]
    assert queue.bytes == 90
    with pytest.raises(QueueFullError):
        queue.add(job("b", 100))


def test_abandoned_text_leaves_queue() -> None:
    """Regression: 298 of 300 cancelled texts stayed in the queue."""
    queue = TextQueue()
    jobs = [job(size=1000) for _ in range(300)]
    for each in jobs:
        queue.add(each)
    running = queue.next(TextPool.LONG)
    for each in jobs:
        queue.abandon(each)
    assert running is jobs[0]
    assert (len(queue), queue.bytes) == (1, 1000)
    queue.end(running)
    assert (len(queue), queue.bytes, queue.next(TextPool.LONG)) == (0, 0, None)


def test_refused_text_job_evicts_no_other() -> None:
    queue = TextQueue(most_bytes=100)
    for tenant, size in (("a", 50), ("a", 10), ("b", 40)):
        queue.add(job(tenant, size))
    with pytest.raises(QueueFullError):
        queue.add(job("d", 55))
    assert (len(queue), queue.bytes) == (3, 100)


# More texts arrive than end, one tenant has most, and sizes differ, so one new text evicts several.
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(("add", "add", "add", "next", "again", "end", "abandon")),
        st.sampled_from("aaabc"),
        st.sampled_from((1, 9, 10, 20, 55)),
    ),
    min_size=10,
    max_size=80,
)


@given(OPERATIONS)
def test_text_queue_counts_are_right_after_any_operations(operations: list[tuple[str, str, int]]) -> None:
    queue = TextQueue(most_bytes=100, most_jobs=8)
    waiting: list[TextJob] = []
    running: list[TextJob] = []
    for what, tenant, number in operations:
        pool = list(TextPool)[number % 2]
        if what == "add":
            try:
                out = queue.add(new := job(tenant, number, pool))
            except QueueFullError:
                out, new = [], None
            waiting = [each for each in [*waiting, *([new] if new else [])] if each not in out]
        elif what == "next" and (chosen := queue.next(pool)) is not None:
            waiting.remove(chosen)
            running.append(chosen)
        elif what == "again" and running:
            queue.again(back := running.pop(number % len(running)))
            waiting.append(back)
        elif what == "end" and running:
            queue.end(running.pop(number % len(running)))
        elif what == "abandon" and waiting:
            queue.abandon(waiting.pop(number % len(waiting)))
        assert len(queue) == len(waiting) + len(running) <= 8
        assert queue.bytes == sum(each.size for each in [*waiting, *running]) <= 100
    for pool in TextPool:
        while (chosen := queue.next(pool)) is not None:
            waiting.remove(chosen)
            running.append(chosen)
    assert not waiting


def test_request_that_had_the_threads_longest_is_blamed_for_the_wait() -> None:
    turns, ledger = ThreadTurns(), Ledger(Stage.TOKENIZE_QUEUE, 10.0)
    for name, began, ended in (("a", 8.0, 11.0), ("b", 11.0, 12.0), ("b", 12.0, math.inf), ("mine", 9.0, 20.0)):
        turns.add(ThreadTurn(name, "t", began, ended))
    assert turns.longest(ledger, 14.0, "mine") == Blame("b", "t", 3.0)
    assert turns.longest(Ledger(Stage.TOKENIZE_QUEUE, 14.0), 14.0, "mine") is None
