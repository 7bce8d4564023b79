"""Steps launched after drafts in flight, by the contract of ScheduledBatch and without the engine.

The future of every sequence is known here, and so is the number of right drafts of each step. The batches contain only
an engine's knowledge: nothing of a step in flight. Drafts for a later step are the ones that the runner made in the
earlier step, on the device or on the host.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from common.params.sampling_params import SamplingParams
from kernels.interface import KVCache
from kernels.no_token import NO_TOKEN
from tests.parity.drafts import launched, sampled
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.sequence import Sequence
from worker.model.forward_context import KVCacheTensor
from worker.model.model_runner import ModelRunner
from worker.model.speculation.draft_proposer import LaunchedDrafts, LaunchedStep, SampledStep

MOST_DRAFTS: Final = 3
_FIRST_ID: Final = 5


@dataclass
class Answer:
    """A sequence, and what plain decodes make of it.

    Attributes:
        seq: with the tokens that have landed.
        stream: that it will generate.
        logprobs: rows of these tokens, if they are wanted.
        count: tokens of it that have been generated, in flight or not.
        in_flight: drafts that the step in flight verifies of it; None if it has no part in that.
        fed: the drafts of its last step.
        num_rejected: of these.
        made: drafts behind that step.
    """

    seq: Sequence
    stream: list[int] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)
    count: int = 0
    in_flight: int | None = None
    fed: list[int] = field(default_factory=list)
    num_rejected: int = 0
    made: list[int] = field(default_factory=list)

    @property
    def has_history(self) -> bool:
        """True if its logits are changed, so that it waits for its tokens."""
        return self.seq.sampling_params.penalized

    def guesses(self, rnd: random.Random, num_ids: int) -> list[int]:
        """Drafts after the newest token, the first of them right."""
        count = rnd.randint(0, MOST_DRAFTS)
        num_right = rnd.choice([count, count, rnd.randint(0, count)])
        wrong = [rnd.randrange(_FIRST_ID, num_ids) for _ in range(count - num_right)]
        return self.stream[self.count : self.count + num_right] + wrong

    def go_on(self, fed: list[int]) -> list[int]:
        """The tokens that a step with these drafts generates."""
        num_right = 0
        while num_right < len(fed) and fed[num_right] == self.stream[self.count + num_right]:
            num_right += 1
        self.num_rejected = len(fed) - num_right
        begin, self.count = self.count, self.count + num_right + 1
        return self.stream[begin : self.count]


def answers(runner: ModelRunner, params: Iterable[dict[str, Any]], num_tokens: int, seed: int) -> list[Answer]:
    """Sequences with these parameters, generated one token at a time and each alone."""
    rnd, size = random.Random(seed), runner.config.kv_cache_block_size
    found, blocks = [], list(range(runner._kv_cache.num_blocks))
    rnd.shuffle(blocks)
    for i, each in enumerate(params):
        prompt = [rnd.randrange(_FIRST_ID, 300) for _ in range(rnd.randint(1, 2 * size))]
        seq = Sequence(prompt, size, SamplingParams(**each), seed=seed + i)
        seq.block_table = [blocks.pop() for _ in range(-(-(len(prompt) + num_tokens) // size))]
        found.append(_generate(runner, Answer(seq), num_tokens))
    return found


def _generate(runner: ModelRunner, answer: Answer, num_tokens: int) -> Answer:
    seq = answer.seq
    prompt = len(seq.token_ids)
    for _ in range(num_tokens):
        seq.num_computed_tokens = len(seq.token_ids) - 1 if answer.stream else 0
        count = len(seq.token_ids) - seq.num_computed_tokens
        is_decode = int(bool(answer.stream))
        output = runner.forward(ScheduledBatch({seq.id: seq}, [count], count, total_seqs_num_decode=is_decode))
        answer.stream.extend(output.token_ids[seq.id])
        seq.token_ids.extend(output.token_ids[seq.id])
        if output.logprobs is not None:
            answer.logprobs.append(output.logprobs[seq.id])
    del seq.token_ids[prompt:]
    return answer


class Ahead:
    """Launches steps of answers, each but the first before the one in front of it has landed.

    Args:
        runner: whose KV cache has room for them.
        found: the answers.
        rnd: decides who takes part, and with which drafts.
        on_host: whether a draft model of the runner says its drafts there. If not, they are on the device.
        only_decodes: whether prompts have steps of their own.
    """

    def __init__(
        self, runner: ModelRunner, found: list[Answer], rnd: random.Random, *, on_host: bool, only_decodes: bool = False
    ) -> None:
        self.seen = Counter[str]()
        self._runner = runner
        self._answers = found
        self._rnd = rnd
        self._only_decodes = only_decodes
        self._wait: Callable[[], ScheduledBatchOutput] | None = None
        self._expected: dict[int, list[int]] = {}
        self._on_host = on_host
        if on_host:
            runner.draft_proposer = Telling(runner, found)

    def run(self, num_steps: int) -> Counter[str]:
        """Runs `num_steps` steps, or until nearly all tokens are generated. Returns counts of the cases it met."""
        for _ in range(num_steps):
            if self._rnd.random() < 0.1:
                # Nothing is in flight then, though the runner remembers its last step.
                self._land()
            members = self._members()
            if not members:
                break
            self._step(members)
        self._land()
        return self.seen

    def _members(self) -> list[Answer]:
        """The answers that take part in a step, in any order."""
        able = [
            answer
            for answer in self._answers
            if answer.count + MOST_DRAFTS + 1 <= len(answer.stream) - MOST_DRAFTS
            and not (answer.has_history and answer.in_flight is not None)
        ]
        new = [answer for answer in able if not answer.count]
        if self._only_decodes and new:
            return new
        # Prompts come one after the other.
        able = [answer for answer in able if answer.count or answer is new[0]]
        chosen = [answer for answer in able if self._rnd.random() < 0.8] or able
        self._rnd.shuffle(chosen)
        return chosen

    def _step(self, members: list[Answer]) -> None:
        batch, expected = self._batch(members)
        wait = self._runner.launch(batch)
        last = self._runner.sampler.last
        if not self._on_host:
            made = torch.zeros(len(members), MOST_DRAFTS, dtype=torch.int64)
            for answer in members:
                made[last.place[answer.seq.id], : len(answer.made)] = torch.tensor(answer.made, dtype=torch.int64)
            last.drafts = made
        self._land()
        self._wait, self._expected = wait, expected
        for answer in members:
            answer.in_flight = len(answer.fed)

    def _batch(self, members: list[Answer]) -> tuple[ScheduledBatch, dict[int, list[int]]]:
        """A step, and its future tokens."""
        counts, drafts, in_flight, expected = [], {}, {}, {}
        num_decodes = sum(answer.count > 0 for answer in members)
        for answer in members:
            seq, is_late = answer.seq, answer.in_flight is not None
            is_new = not answer.count
            told = [] if is_new else self._drafts(answer)
            seq.num_computed_tokens = 0 if seq.num_tokens == seq.num_prompt_tokens else seq.num_tokens - 1
            waits_for = (answer.in_flight or 0) + 1 if is_late else 0
            seq.num_placeholder = waits_for
            # A prompt in flight is computed whole.
            seq.num_inflight_tokens = waits_for + seq.num_tokens - 1 - seq.num_computed_tokens if is_late else 0
            counts.append(len(told) + (seq.num_tokens if is_new else 1))
            if told:
                drafts[seq.id] = told
            if answer.in_flight:
                in_flight[seq.id] = answer.in_flight
            answer.fed = (answer.made + [0] * len(told))[: len(told)] if is_late else told
            self._note(answer, told)
            expected[seq.id] = answer.go_on(answer.fed)
            answer.made = [] if answer.has_history else answer.guesses(self._rnd, self._runner.sampled_ids)
        batch = ScheduledBatch(
            {answer.seq.id: answer.seq for answer in members},
            counts,
            sum(counts),
            total_seqs_num=len(members),
            total_seqs_num_decode=num_decodes,
            num_spec_step=max(map(len, drafts.values()), default=0),
            scheduled_spec_decode_tokens=drafts,
        )
        batch.drafts_in_flight = in_flight
        batch.feeds_draft_model = self._on_host
        assert not any(token > 0 for i in batch.late_rows for token in batch.scheduled_tokens[i])
        return batch, expected

    def _drafts(self, answer: Answer) -> list[int]:
        """Drafts that a batch tells of."""
        if answer.in_flight is None:
            return answer.guesses(self._rnd, self._runner.sampled_ids)
        # As many drafts as the runner made, fewer or more.
        most = min(MOST_DRAFTS, len(answer.made) + 1)
        return [NO_TOKEN] * self._rnd.choice([len(answer.made), self._rnd.randint(0, most)])

    def _note(self, answer: Answer, told: list[int]) -> None:
        if answer.in_flight is None:
            self.seen["known drafts"] += len(told)
            return
        self.seen["late drafts"] += len(told)
        self.seen["late without drafts"] += not told
        self.seen["missing drafts"] += len(told) > len(answer.made)
        self.seen["rejected in flight"] += answer.num_rejected > 0
        self.seen["right in flight"] += answer.num_rejected < answer.in_flight

    def _land(self) -> None:
        if self._wait is None:
            return
        output = self._wait()
        assert list(output.token_ids) == list(self._expected)
        assert {seq_id: list(tokens) for seq_id, tokens in output.token_ids.items()} == self._expected
        for answer in self._answers:
            tokens = self._expected.get(answer.seq.id)
            if tokens is None:
                continue
            landed = answer.seq.num_completion_tokens
            if answer.logprobs:
                rows = (output.logprobs or {})[answer.seq.id]
                assert rows == b"".join(answer.logprobs[landed : landed + len(tokens)])
            answer.seq.token_ids.extend(tokens)
            answer.in_flight = None
        self._wait = None


class Telling:
    """A draft model without weights, which returns the drafts of `Ahead`. It checks its arguments of each step."""

    num_layers = 1
    takes_states = False

    def __init__(self, runner: ModelRunner, found: list[Answer]) -> None:
        self.kv_spec = runner.kv_spec
        self._answers = {answer.seq.id: answer for answer in found}

    def kv_cache_data(self, cache: KVCache) -> dict[str, KVCacheTensor]:
        """The KV cache tensors of a draft model."""
        return {"layers.0": KVCacheTensor(0, cache)}

    def propose(self, step: SampledStep) -> dict[int, list[int]]:
        """The drafts that the next step is to have."""
        for i, seq_id in enumerate(step.batch.req_ids):
            answer = self._answers[seq_id]
            tokens = [*answer.seq.token_ids[: answer.seq.num_prompt_tokens], *answer.stream[: answer.count]]
            new, begin = step.new_tokens(i), int(step.begins[i])
            start, end = int(step.starts[i]), int(step.ends[i])
            assert step.num_tokens(i) == len(tokens) == end + 1
            assert list(new) == tokens[len(tokens) - len(new) :]
            rows = step.token_ids[begin : begin + step.batch.num_scheduled_tokens[i]].tolist()
            assert rows[: end - start] == tokens[start:end]
            assert rows[len(rows) - len(answer.fed) :] == answer.fed
        return {seq_id: self._answers[seq_id].made for seq_id in step.batch.req_ids if self._answers[seq_id].made}

    def launch(self, step: LaunchedStep) -> LaunchedDrafts:
        """The drafts of a launched step, as they are on the device."""
        return launched(step, self.propose(sampled(step)))
