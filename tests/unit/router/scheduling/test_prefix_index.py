"""The prefix index: bounded, and without false hits."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.limits import EXPECTED_S
from router.scheduling import prefix_index
from router.scheduling.prefix_index import BYTES_PER_ENTRY, PrefixIndex, TieredIndex
from tests.unit.router.scheduling.dispatching import chain

PROMPTS = st.lists(st.integers(0, 1), max_size=7).map(lambda parts: chain(*parts))


class IndexMachine(RuleBasedStateMachine):
    """Cached and expected prefixes of each worker, as sets and dictionaries; at most 8 workers and no overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(1 << 14)
        self.now = 0.0
        self.holds: dict[str, set[int]] = {}
        self.sent: dict[str, dict[int, float]] = {}
        self.last: tuple[str, list[int]] = "", []

    @rule(worker=st.sampled_from("abcdefgh"))
    def start(self, worker: str) -> None:
        self.index.add_worker(worker)
        self.holds[worker], self.sent[worker] = set(), {}

    def worker(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.holds)))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        worker = self.worker(data)
        self.index.remove_worker(worker)
        del self.holds[worker], self.sent[worker]

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), prompts=st.lists(PROMPTS, max_size=4))
    def store(self, data: st.DataObject, prompts: list[list[int]]) -> None:
        worker, granules = self.worker(data), [granule for prompt in prompts for granule in prompt]
        self.index.store(worker, granules)
        self.holds[worker].update(granules)

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), prompt=PROMPTS)
    def evict(self, data: st.DataObject, prompt: list[int]) -> None:
        """Evicts everything that begins with the prompt: a suffix is evicted before its prefix."""
        worker, gone = self.worker(data), behind(prompt)
        self.index.evict(worker, gone)
        self.holds[worker] -= gone

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), prompt=PROMPTS)
    def send(self, data: st.DataObject, prompt: list[int]) -> None:
        self.send_to(self.worker(data), prompt)

    def send_to(self, worker: str, prompt: list[int]) -> None:
        self.last = worker, prompt
        self.index.expect(worker, prompt, self.now)
        self.sent[worker].update(dict.fromkeys(prompt, self.now + EXPECTED_S))

    @precondition(lambda self: self.last[0] in self.holds)
    @rule(seconds=st.sampled_from([0.5, 1.0, 1.5]), other=PROMPTS)
    def send_again(self, seconds: float, other: list[int]) -> None:
        """A prompt sent twice is expected until the second expires, even if others are sent after it."""
        worker, prompt = self.last
        for sent in (prompt, other):
            self.now += seconds
            self.send_to(worker, sent)
        self.look(prompt)

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.5]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(prompt=PROMPTS)
    def look_up(self, prompt: list[int]) -> None:
        self.look(prompt)

    def look(self, prompt: list[int]) -> None:
        sent = {w: {g for g, until in sent.items() if until > self.now} for w, sent in self.sent.items()}
        depths = {w: max(depth_in(prompt, held), depth_in(prompt, sent[w])) for w, held in self.holds.items()}
        assert {worker: self.index.depth(worker, prompt, self.now) for worker in self.holds} == depths
        deepest = max(depths.values(), default=0)
        owners = {worker for worker, depth in depths.items() if depth == deepest and depth}
        found, names = self.index.longest(prompt, self.now)
        assert (found, set(names), len(names)) == (deepest, owners, len(owners))

    @invariant()
    def exact(self) -> None:
        for worker, held in self.holds.items():
            assert self.index.held(worker) == held
        assert len(self.index) >= len(set().union(*self.holds.values()))


IndexMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestIndexMachine = IndexMachine.TestCase

PARTS = {tuple(chain(*parts)): parts for n in range(8) for parts in itertools.product((0, 1), repeat=n)}


def depth_in(prompt: list[int], held: set[int]) -> int:
    return next((i for i, granule in enumerate(prompt) if granule not in held), len(prompt))


GRANULES = st.lists(st.sampled_from(sorted({names[-1] for names in PARTS if names})), max_size=12)
# Worker, memory tier or KV cache, stores or evicts; a memory tier stores and evicts any granules, a KV cache prefixes.
STEPS = st.lists(
    st.booleans().flatmap(
        lambda is_memory: st.tuples(
            st.sampled_from("abc"), st.just(is_memory), st.booleans(), PROMPTS | GRANULES if is_memory else PROMPTS
        )
    ),
    max_size=30,
)


@settings(max_examples=150)
@given(STEPS, PROMPTS)
def test_tiered_index_equals_sets_of_each_worker_and_tier(
    steps: list[tuple[str, bool, bool, list[int]]], prompt: list[int]
) -> None:
    index = TieredIndex(1 << 14)
    held: dict[tuple[str, bool], set[int]] = {(worker, tier): set() for worker in "abc" for tier in (False, True)}
    for worker in "abc":
        index.add_worker(worker)
    for worker, is_memory, is_stored, granules in steps:
        tier, of_tier = index.memory if is_memory else index.pool, held[worker, is_memory]
        if is_stored:
            tier.store(worker, granules)
            of_tier |= set(granules)
        else:
            gone = set(granules) if is_memory else behind(granules)
            tier.evict(worker, list(gone))
            of_tier -= gone
    pools = {worker: depth_in(prompt, held[worker, False]) for worker in "abc"}
    depths = {w: pool + depth_in(prompt[pool:], held[w, True]) for w, pool in pools.items()}
    assert {worker: index.depths(worker, prompt, 0.0) for worker in "abc"} == {
        worker: (pools[worker], depths[worker]) for worker in "abc"
    }
    longest = index.longest(prompt, 0.0)
    assert (longest.pool_depth, longest.depth) == (max(pools.values()), max(depths.values()))
    memories = {worker: depth for worker, depth in depths.items() if depth > pools[worker]}
    for owners, found in ((longest.pool_owners, pools), (longest.memory_owners, memories)):
        assert sorted(owners) == [worker for worker, depth in found.items() if depth == max(found.values()) > 0]
    index.remove_worker("a")
    assert index.longest(prompt, 0.0).depth == max(depths["b"], depths["c"])


def behind(prompt: list[int]) -> set[int]:
    """All granules that begin with the prompt: a KV cache evicts a suffix before its prefix."""
    begin = PARTS[tuple(prompt)]
    return {names[-1] for names, parts in PARTS.items() if parts and parts[: len(begin)] == begin}


def test_memory_granules_behind_a_hole_are_not_counted() -> None:
    index, prompt = TieredIndex(1 << 14), chain(1, 2, 3, 4)
    index.add_worker("a")
    index.memory.store("a", prompt[1:])
    assert index.depths("a", prompt, 0.0) == (0, 0)
    assert index.longest(prompt, 0.0) == (0, 0, [], [])
    index.pool.store("a", prompt[:1])
    assert index.depths("a", prompt, 0.0) == (1, 4)
    assert index.longest(prompt, 0.0) == (4, 1, ["a"], ["a"])
    index.memory.evict("a", prompt[2:3])
    assert index.longest(prompt, 0.0) == (2, 1, ["a"], ["a"])


def test_few_memory_tiers_are_compared_for_a_prompt_in_many() -> None:
    index, prompt = TieredIndex(1 << 14), chain(*range(20))
    for i in range(30):
        index.add_worker(f"w{i}")
        index.memory.store(f"w{i}", prompt[: i % 20 + 1])
    assert len(index.memory.holders(prompt)) == 8
    longest = index.longest(prompt, 0.0)
    assert (longest.depth, longest.pool_depth) == (20, 0)
    assert set(longest.memory_owners) == {"w19"}


def test_prefix_index_is_bounded_without_false_hits() -> None:
    index = PrefixIndex(1000)
    assert (index.capacity, index.nbytes) == (1024, 1024 * BYTES_PER_ENTRY)
    rnd = random.Random(1)
    index.add_worker("a")
    index.add_worker("b")
    given_to: dict[str, set[int]] = {"a": set(), "b": set()}
    prompts = [[rnd.getrandbits(64) for _ in range(4)] for _ in range(3000)]
    for prompt in prompts:
        worker = rnd.choice("ab")
        index.store(worker, prompt)
        given_to[worker] |= set(prompt)
    for prompt in prompts:
        for worker, granules in given_to.items():
            assert index.depth(worker, prompt, 0.0) == 0 or granules.issuperset(prompt[:1])
    assert sum(index.depth("a", prompt, 0.0) > 0 for prompt in prompts) > 50
    assert len(index) == 1024
    assert index.forgotten >= 12_000 - 1024


@pytest.mark.slow
def test_prefix_index_keeps_entries_while_growing() -> None:
    """The index grows a little with every report, never all at once."""
    index = PrefixIndex(1 << 20)
    begun = index.nbytes
    rnd = random.Random(2)
    held: dict[str, set[int]] = {"a": set(), "b": set()}
    for worker in held:
        index.add_worker(worker)
    for _ in range(30):
        for worker, granules in held.items():
            new = [rnd.getrandbits(64) for _ in range(2000)]
            before = index.nbytes
            shared = rnd.sample(sorted(held["b" if worker == "a" else "a"]), 50) if held["a"] and held["b"] else []
            index.store(worker, [*new, *shared])
            granules.update(new, shared)
            # A report waits only for its own room: six entries for each of its granules.
            assert index.nbytes - before <= 6 * BYTES_PER_ENTRY * (len(new) + len(shared)) + BYTES_PER_ENTRY * 8
            gone = rnd.sample(sorted(granules), 300)
            index.evict(worker, gone)
            granules.difference_update(gone)
    assert begun == BYTES_PER_ENTRY << 16
    assert BYTES_PER_ENTRY << 18 < index.nbytes <= 6 * BYTES_PER_ENTRY * (len(index) + 8000)
    # A bucket overflows now and then, though the index is sparse.
    assert index.forgotten < 50
    for worker, granules in held.items():
        assert index.held(worker) <= granules
        assert len(granules - index.held(worker)) <= index.forgotten
    assert len(held["a"] | held["b"]) - index.forgotten <= len(index) <= len(held["a"] | held["b"])


def test_expected_prefix_depth_is_found_within_an_eighth() -> None:
    index = PrefixIndex(64)
    index.add_worker("a")
    sent = chain(*range(900))
    index.expect("a", sent, 0.0)
    for common in (1, 3, 15, 16, 31, 100, 513, 899, 900):
        for after in ([], [7] * 50):
            prompt = [*sent[:common], *(chain(common, *after) if common < 900 or after else [])]
            depth = index.depth("a", prompt, 1.0)
            assert 8 * common <= 9 * depth + 8
            assert depth <= common
    assert index.depth("a", sent, 1.0) == 900
    assert index.depth("a", sent, EXPECTED_S) == 0


def test_expected_prefixes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "MAX_EXPECTED_GRANULES", 1000)
    index = PrefixIndex(64)
    index.add_worker("a")
    prompts = [chain(i, *range(30)) for i in range(100)]
    for prompt in prompts:
        index.expect("a", prompt, 0.0)
    expected = index._expected
    assert expected._marks <= 1000
    assert sum(map(len, expected._until.values())) <= 1000
    assert index.depth("a", prompts[0], 0.0) == 0
    assert index.depth("a", prompts[-1], 0.0) == 31
    index.expect("a", chain(1), EXPECTED_S)
    assert len(expected._until) == 1


def test_prefix_index_keeps_eight_owners_and_finds_deeper_ones() -> None:
    index = PrefixIndex(64)
    prompt = chain(1, 2, 3, 4)
    for i in range(12):
        index.add_worker(f"w{i}")
        index.store(f"w{i}", prompt[:3])
    assert set(index.longest(prompt, 0.0)[1]) == {f"w{i}" for i in range(8)}
    assert index.forgotten == 12
    assert index.depth("w11", prompt, 0.0) == 0
    index.store("w11", prompt[3:])
    assert index.depth("w11", prompt, 0.0) == 4
    assert index.longest(prompt, 0.0) == (4, ["w11"])
    index.evict("w0", prompt[:3])
    index.store("w10", prompt[:3])
    assert index.depth("w10", prompt, 0.0) == 3


def test_prefix_index_renumbers_workers_after_overflow() -> None:
    index = PrefixIndex(64)
    prompt = chain(1)
    index.add_worker("a")
    index.store("a", prompt)
    for _ in range(70_000):
        index.add_worker("z")
    assert index.depth("z", prompt, 0.0) == 0
    assert index.longest(prompt, 0.0) == (1, ["a"])
    index.store("z", prompt)
    assert set(index.longest(prompt, 0.0)[1]) == {"a", "z"}
