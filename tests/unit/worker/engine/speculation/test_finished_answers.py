"""Lookup in finished answers, beside its definition: who finds which, how much is kept, and what goes first."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import Config, SpeculativeConfig
from common.params.config_parts import NGRAM
from common.params.pooling import LAST
from common.params.sampling_params import SamplingParams
from tests.unit.mutants import OBJECTIONS, Mutant
from tests.unit.worker.engine.speculation.test_drafter import brute_force
from worker.engine.core import EngineCore
from worker.engine.sequence import Sequence
from worker.engine.speculation import finished_answers
from worker.engine.speculation.finished_answers import END, FinishedAnswers
from worker.engine.speculation.ngram_proposer import NgramProposer
from worker.simulation.runner import SimulatedRunner

SIZE: Final = 16
PREFIX: Final = 2
OF_PREFIX: Final = 25
# Salt, adapter's root, prompt, answer; and whether the answer is taken, or a lookup made.
Asked: TypeAlias = tuple[bytes, int | None, list[int], list[int], bool]
ASKED = st.lists(
    st.tuples(
        st.sampled_from([b"", b"a"]),
        st.sampled_from([None, 7]),
        st.lists(st.integers(0, 2), min_size=1, max_size=6),
        st.lists(st.integers(0, 2), min_size=1, max_size=9),
        st.booleans(),
    ),
    max_size=25,
)
SETTINGS = st.tuples(st.integers(10, 90), st.integers(1, 2), st.integers(2, 4), st.integers(1, 5))


def sequence(asked: Asked) -> Sequence:
    salt, root, prompt, answer, _ = asked
    tokens = [*prompt, *answer]
    return Sequence(tokens, SIZE, num_prompt_tokens=len(prompt), cache_salt=salt, hash_root=root)


class Known:
    """What is kept, by definition: lists, the one that was used last at the end."""

    def __init__(self, most: int, context: int) -> None:
        self.most, self.context = most, context
        self.groups: list[tuple[object, list[int]]] = []

    def of(self, seq: Sequence) -> list[int]:
        key = self.key(seq)
        found = [group for group in self.groups if group[0] == key]
        self.groups = [group for group in self.groups if group[0] != key] + found
        return found[0][1] if found else []

    def add(self, seq: Sequence) -> None:
        tokens = list(self.of(seq))
        new = [*seq.prompt_token_ids[-self.context :], *seq.completion_token_ids, END]
        if not any(tokens[i : i + len(new)] == new for i in range(len(tokens))):
            tokens = (tokens + new)[-min(OF_PREFIX, self.most) :]
        self.groups = [group for group in self.groups if group[0] != self.key(seq)] + [(self.key(seq), tokens)]
        while sum(len(group) for _, group in self.groups) > self.most:
            del self.groups[0]

    @staticmethod
    def key(seq: Sequence) -> object:
        return seq.cache_salt, seq.hash_root, seq.prompt_token_ids[:PREFIX]

    def proposal(self, seq: Sequence, shortest: int, longest: int, most: int) -> list[int]:
        tokens, others = seq.token_ids, self.of(seq)
        own = longest_match(tokens[:-1], tokens, longest)
        theirs = longest_match(others, tokens, longest)
        if theirs > own and theirs >= shortest:
            ends = [i for i in range(theirs, len(others)) if others[i - theirs : i] == tokens[-theirs:]]
            behind = [others[end:] for end in ends if others[end] != END]
            if behind:
                return behind[-1][: behind[-1].index(END)][:most]
        return brute_force(tokens, shortest, longest, most)


def longest_match(within: list[int], tokens: list[int], longest: int) -> int:
    """Length of the longest suffix of `tokens` in `within`, `longest` at most."""
    controller = range(1, min(longest, len(tokens)) + 1)
    return max((n for n in controller if any(within[i : i + n] == tokens[-n:] for i in range(len(within)))), default=0)


def check(asked: list[Asked], most: int, shortest: int, longest: int, drafts: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finished_answers, "PREFIX_TOKENS", PREFIX)
        patch.setattr(finished_answers, "MOST_OF_PREFIX", OF_PREFIX)
        answers, known = FinishedAnswers(most, longest), Known(most, longest)
        proposer = NgramProposer(shortest, longest, answers)
        for one in asked:
            seq = sequence(one)
            if one[-1]:
                answers.add(seq)
                known.add(seq)
            elif longest_match(seq.token_ids[:-1], seq.token_ids, longest) < longest:
                assert proposer.propose(seq, drafts) == known.proposal(seq, shortest, longest, drafts)
            assert answers.num_tokens == sum(len(tokens) for _, tokens in known.groups) <= most


@given(ASKED, SETTINGS)
def test_lookup_equals_brute_force(asked: list[Asked], settings: tuple[int, int, int, int]) -> None:
    check(asked, *settings)


LOOKS: Final[list[Asked]] = [
    (b"", None, [1, 2, 3], [4, 5, 6], True),
    (b"a", None, [1, 2, 3], [4, 7], True),
    (b"", 7, [1, 2, 3], [4, 8], True),
    (b"", None, [1, 2, 0], [9, 3, 4], False),
    (b"", 7, [1, 2, 0], [9, 3, 4], False),
    (b"", None, [2, 2, 0], [9, 3, 4], False),
    (b"", None, [1, 2, 3], [4, 5, 0], True),
    (b"", None, [1, 2, 0], [4, 5], False),
    (b"", None, [1, 2, 0], [4, 5, 0], False),
    (b"", None, [1, 2, 5], [0, 5], False),
    (b"", None, [5, 5], [6, 6, 7, 7, 8, 8], True),
    (b"a", None, [1, 2, 0], [9, 3, 4], False),
    (b"", None, [6, 6], [7], True),
    (b"a", None, [1, 2, 0], [9, 3, 4], False),
    (b"", None, [1, 2, 0], [9, 3, 4], False),
]
MUTANTS = [
    Mutant("another's salt", finished_answers, "_key", "seq.cache_salt, ", ""),
    Mutant("another adapter", finished_answers, "_key", "seq.hash_root, ", ""),
    Mutant("any prompt", finished_answers, "_key", "tuple(seq.token_ids[", "tuple(seq.token_ids[:0]["),
    Mutant("no bound", FinishedAnswers, "add", "self.num_tokens > self._most", "False"),
    Mutant("the newest goes", FinishedAnswers, "add", "last=False", "last=True"),
    Mutant("a lookup is no use", FinishedAnswers, "beside", "self._kept.move_to_end(key)", "pass"),
    Mutant("the end is a token", NgramProposer, "propose", "_up_to_end(", "list("),
    Mutant("nothing behind it", NgramProposer, "propose", "others[answers[others + 1] != END]", "others"),
    Mutant("a shorter one counts", NgramProposer, "propose", "longer > length", "longer"),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.trap)
def test_fault_is_detected(mutant: Mutant) -> None:
    def all_sizes() -> None:
        for most in range(8, 40):
            check(LOOKS, most, 1, 4, 3)

    all_sizes()
    with mutant.applied(), pytest.raises((*OBJECTIONS, KeyError)):
        all_sizes()


def test_embedded_sequences_are_not_kept_as_answers() -> None:
    answers = FinishedAnswers(100, 4)
    answers.add(Sequence([1, 2, 3], SIZE, num_prompt_tokens=2, pooling=LAST))
    assert answers.num_tokens == 0


def test_engine_finds_drafts_in_finished_answers() -> None:
    """The same prompt again, under another seed that the simulated model pays no attention to, and another salt."""
    spec = SpeculativeConfig(4, NGRAM, prompt_lookup_min=2, prompt_lookup_finished=1000, adaptive=False)
    settings: dict[str, Any] = {"num_kvcache_blocks": 30, "max_model_len": 96, "eos_token_id": 0}
    config = Config(**settings, speculative_config=spec)
    core = EngineCore(config, SimulatedRunner(1000, 0, num_blocks=30, eos_every=10**6))
    accepted = []
    for salt in (b"", b"", b"a"):
        params = SamplingParams(max_tokens=40)
        seq = Sequence(np.arange(1, 30).tolist(), SIZE, params, seed=3, cache_salt=salt)
        core.add_request(seq)
        while core.has_unfinished():
            core.step()
        accepted.append(core.scheduler.spec_stats.total_accepted_tokens)
    assert accepted[0] < 10
    assert accepted[1] - accepted[0] > 25
    assert accepted[2] - accepted[1] == accepted[0]
