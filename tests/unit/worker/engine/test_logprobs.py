"""Logprobs come once for each token that asks for them, in order, whatever the engine does with its sequence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.config import SCHEDULING_POLICIES
from common.params.sampling_params import SamplingParams
from tests.unit.worker.engine.small_engine import BLOCK, engine, prompts
from worker.engine.core import EngineCore
from worker.engine.outputs import RequestOutput
from worker.engine.sequence import Sequence

PARAMS = SamplingParams(
    max_tokens=9, ignore_eos=True, logprobs=2, prompt_logprobs=1, prompt_logprobs_start=3, logprob_token_ids=(5,)
)


class Taken:
    """What comes of a sequence."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.rows = self.given = b""

    def take(self, output: RequestOutput) -> None:
        width = PARAMS.prompt_logprob_layout.width
        if output.given is not None:
            assert not self.tokens
            assert output.given.width == width
            assert output.given.first_pos == 3 + len(self.given) // width
            self.given += output.given.rows
        self.tokens += output.output_tokens
        self.rows += output.logprobs
        assert len(self.rows) == len(self.tokens) * PARAMS.logprob_layout.width


def run(core: EngineCore, groups: list[list[list[int]]]) -> list[Taken]:
    """The answers to groups of prompts that come one after the other, each when the last has ended."""
    taken: dict[int, Taken] = {}
    for group in groups:
        seqs = [Sequence(prompt, BLOCK, PARAMS, seed=len(prompt)) for prompt in group]
        taken |= {seq.id: Taken() for seq in seqs}
        core.add_group(seqs)
        while core.has_unfinished():
            for output in core.step().outputs:
                taken[output.request_id].take(output)
        core.scheduler.check_integrity()
    return list(taken.values())


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("budget", [9, 40, 512])
@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
def test_logprob_rows_equal_each_sequence_alone(policy: str, budget: int, deferred: bool, num_drafts: int) -> None:
    alone = run(engine(max_num_seqs=1), [[prompt] for prompt in prompts(14)])
    core = engine(
        scheduling_policy=policy, max_num_batched_tokens=budget, deferred_output=deferred, num_drafts=num_drafts
    )
    together = run(core, [prompts(14)])
    core.close()
    assert core.scheduler.lifecycle.num_preemptions > 0 or budget == 9
    for one, other, prompt in zip(together, alone, prompts(14), strict=True):
        assert (one.tokens, one.rows, one.given) == (other.tokens, other.rows, other.given)
        assert len(one.given) == (len(prompt) - 3) * PARAMS.prompt_logprob_layout.width


def test_resumed_sequence_reports_logprobs_of_given_tokens() -> None:
    """A resumed sequence returns the same logprob rows for all tokens from the requested start."""
    (prompt,) = prompts(14)[:1]
    (whole,) = run(engine(), [[prompt]])
    params = replace(PARAMS, prompt_logprobs_start=len(prompt), prompt_logprobs=PARAMS.logprobs)
    seq = Sequence(prompt + whole.tokens[:4], BLOCK, params, num_prompt_tokens=len(prompt), seed=len(prompt))
    core = engine()
    core.add_group([seq])
    outputs = [output for _ in range(9) for output in core.step().outputs]
    assert b"".join((output.given.rows if output.given else b"") + output.logprobs for output in outputs) == whole.rows
    assert [token for output in outputs for token in output.output_tokens] == whole.tokens[4:]


def test_recomputed_prompt_reports_logprobs_once() -> None:
    prompt = prompts(14)[2]
    (whole,) = run(engine(), [[prompt]])
    core, taken = engine(max_num_batched_tokens=9), Taken()
    seq = Sequence(prompt, BLOCK, PARAMS, seed=len(prompt))
    core.add_group([seq])
    for number in range(100):
        if number in (1, 3):
            core.scheduler.preempt(seq)
        for output in core.step().outputs:
            taken.take(output)
        if seq.is_finished:
            break
    assert (taken.tokens, taken.rows, taken.given) == (whole.tokens, whole.rows, whole.given)
