"""A runner without a model: tokens are a pure function of the computed tokens, and wrong batches are errors.

It keeps a KV cache of numbers: each slot holds the state after its token, made from the state before it. If a sequence
is given a block computed under another prefix, a block that another sequence overwrote, or a position out of order, it
does not just produce wrong tokens: it raises. A cost model decides how long a step takes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from mmap import mmap

import numpy as np

from common.config import Config
from common.params.logprobs import LogprobLayout
from common.params.pooling import LABELS, MEAN, Pooling
from common.wire.logprob_rows import rows_table
from worker.config.model_config import ModelConfig
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.pooling import MEAN_SCALE, PooledStates
from worker.kv_pool import size_simulated_pool
from worker.simulation.cost_model import INSTANT, CostModel, StepWork


def simulated_runner(config: Config, model_config: ModelConfig, cost: CostModel) -> tuple[Config, SimulatedRunner]:
    """The runner, and `config` with the size of its KV pool.

    Vocabulary and longest length are the checkpoint's.

    Raises:
        InvalidFieldError: the lengths do not fit the KV memory, or the preset's weights leave no room.
    """
    kv_tokens = cost.kv_tokens(config.gpu_memory_utilization)
    config = size_simulated_pool(config, model_config, kv_tokens, cost.kv_bytes_per_token)
    runner = SimulatedRunner(
        model_config.vocab_size,
        config.eos_token_id,
        cost,
        block_size=config.kv_cache_block_size,
        num_blocks=config.num_kvcache_blocks,
        check_contexts=False,
        hidden_size=model_config.hidden_size,
        num_labels=model_config.num_labels,
    )
    return config, runner


def settled(batch: ScheduledBatch, last_output: ScheduledBatchOutput) -> ScheduledBatch:
    """The batch after the runner's last step has ended: rows after drafts in flight are moved to their places, and late
    drafts have their tokens. The same batch if it has neither."""
    ids, drafts = batch.req_ids, dict(batch.scheduled_spec_decode_tokens)
    late = [i for i in batch.late_rows if ids[i] in drafts or ids[i] in batch.drafts_in_flight]
    if not late:
        return batch
    tokens, starts, is_late = batch.input_tokens(last_output), [*batch.num_computed_tokens], [*batch.from_last_output]
    for i in late:
        is_late[i] = False
        starts[i] -= _num_rejected(batch, ids[i], last_output)
        if ids[i] in drafts:
            drafts[ids[i]] = tokens[i][1:]
    changed = {
        "num_computed_tokens": starts,
        "from_last_output": is_late,
        "scheduled_spec_decode_tokens": drafts,
        "drafts_in_flight": {},
        "scheduled_tokens": [[] if late else own for own, late in zip(tokens, is_late, strict=True)],
    }
    return ScheduledBatch.restored(batch.columns, batch.tables, batch.histories, batch.fields() | changed)


def _num_rejected(batch: ScheduledBatch, seq_id: int, last_output: ScheduledBatchOutput) -> int:
    """Number of a sequence's drafts in flight that were wrong."""
    count = batch.drafts_in_flight.get(seq_id, 0)
    return count + 1 - len(last_output.token_ids[seq_id]) if count else 0


_MASK = (1 << 64) - 1
_START = 0x243F6A8885A308D3
# Makes from a state the digest that a token is sampled from.
_DIGEST = 0x452821E638D01377


class InconsistentBatchError(Exception):
    """The scheduler or the block manager has made a batch that no model could run."""


def mix(state: int, value: int) -> int:
    """The next 64-bit state (splitmix64)."""
    x = ((state ^ value) + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _logprob(state: int, token: int) -> float:
    """The logprob of a token after a state: from -8 to 0, a float32."""
    return -(mix(state, token) % (1 << 20)) / (1 << 17)


class SimulatedRunner:
    """Implements Runner with arithmetic instead of a model (no torch).

    On a real clock its own work is part of the step, so a step takes what the cost model says as long as that is more.
    A written KV slot takes 16 bytes. Logprobs and hidden states are arithmetic too, the same wherever they are
    computed.

    Args:
        vocab_size: tokens are in [0, vocab_size).
        eos_token_id: the end-of-sequence id; None for none.
        cost: duration of the steps.
        eos_every: about one of `eos_every` tokens is `eos_token_id`; 0 never samples it.
        block_size: tokens per KV block.
        num_blocks: blocks in the pool.
        num_drafts: drafts per step, as of a draft model.
        draft_errors: about one of `draft_errors` drafts is wrong; 0 is never wrong.
        check_contexts: True if every step compares all blocks of all its sequences, which takes time in proportion to
            their contexts. Otherwise a sequence continues from its last slot, like a model.
        hidden_size: numbers of a hidden state.
        num_labels: of the classifier; its scores are the first numbers of the state.
        clock: seconds; a virtual clock in simulations, with its `sleep`.
        sleep: waits for the given seconds.

    Raises:
        ValueError: the vocabulary has no id except `eos_token_id`.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_token_id: int | None,
        cost: CostModel = INSTANT,
        *,
        eos_every: int = 0,
        block_size: int = 16,
        num_blocks: int = 4096,
        num_drafts: int = 0,
        draft_errors: int = 3,
        check_contexts: bool = True,
        hidden_size: int = 16,
        num_labels: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if vocab_size < 2:
            raise ValueError(f"vocab_size is {vocab_size}; at least 2")
        self.vocab_size = vocab_size
        self.eos_token_id = eos_token_id
        self.cost = cost
        self.eos_every = eos_every if eos_token_id is not None else 0
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_drafts = num_drafts
        self.draft_errors = draft_errors
        self.check_contexts = check_contexts
        self.hidden_size = hidden_size
        self.num_labels = num_labels
        self._last_output = ScheduledBatchOutput({})
        self._clock = clock
        self._sleep = sleep
        # Per slot the state before its token and after it; 0 is not written. Pages take memory when written.
        self._before = memoryview(mmap(-1, 8 * block_size * num_blocks)).cast("Q")
        self._after = memoryview(mmap(-1, 8 * block_size * num_blocks)).cast("Q")

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        """Computes one step.

        Raises:
            InconsistentBatchError: lengths disagree, a block table is too short, a block is written by one sequence
                and used by another, or what the block table points to was not computed from this sequence's tokens.
        """
        start = self._clock()
        if self.check_contexts:
            self._check_sharing(batch)
        blocks_down = self._move_blocks(batch)
        batch = settled(batch, self._last_output)
        inputs = batch.input_tokens(self._last_output)
        sampled: dict[int, tuple[int, ...]] = {}
        drafts: dict[int, list[int]] = {}
        digests: dict[int, dict[int, int]] = {}
        logprobs: dict[int, bytes] = {}
        given: dict[int, bytes] = {}
        pooled: dict[int, bytes] = {}
        for i, seq_id in enumerate(batch.req_ids):
            states = self._compute(batch, i, inputs[i])
            if batch.is_final[i]:
                sampled[seq_id], state = self._verify(batch, i, states)
                if i in batch.columns.digested:
                    digests[seq_id] = self._digests(batch, i, states, len(sampled[seq_id]))
                if wanted := min(self.num_drafts, batch.drafts_wanted.get(seq_id, 0)):
                    drafts[seq_id] = self._draft(batch, i, state, len(sampled[seq_id]), wanted)
            if i in batch.columns.logprob_params:
                self._add_logprobs(batch, i, states, sampled.get(seq_id, ()), logprobs, given)
            if i in batch.pooled:
                pooled[seq_id] = self._pooled(states, batch.pooled[i])
        self._pause_until(start + self.cost.step_s(StepWork.of(batch)))
        self._last_output = ScheduledBatchOutput(
            sampled,
            drafts or None,
            digests or None,
            logprobs or None,
            given or None,
            pooled=pooled or None,
            blocks_down=blocks_down,
        )
        return self._last_output

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one KV block."""
        return 2 * self.block_size * self._before.itemsize

    def reference(self, token_ids: Sequence[int], num_tokens: int, seed: int = 0, choice: int = 0) -> list[int]:
        """The `num_tokens` tokens that must follow `token_ids`, whatever the batch, the cache and the chunks."""
        state, position = _START, len(token_ids)
        for token in token_ids:
            state = mix(state, token)
        out: list[int] = []
        while len(out) < num_tokens:
            out.append(self._sample(state, seed, position + len(out), choice))
            state = mix(state, out[-1])
        return out

    def logit_digest(self, token_ids: Sequence[int]) -> int:
        """The digest of the state from which the token after `token_ids` is sampled."""
        state = _START
        for token in token_ids:
            state = mix(state, token)
        return mix(state, _DIGEST)

    def embedding(self, token_ids: Sequence[int], pooling: Pooling) -> bytes:
        """The vector of `token_ids`, float32."""
        states, state = [], _START
        for token in token_ids:
            state = mix(state, token)
            states.append(state)
        pooled = PooledStates(pooling)
        pooled.take(0, len(states), self._pooled(states, pooling))
        return pooled.finish()

    def _pooled(self, states: Sequence[int], pooling: Pooling) -> bytes:
        """The hidden state of the last token, its labels, or the sum of all states: numbers from -1 to 1."""
        seen = np.array(states if pooling == MEAN else states[-1:], np.uint64)[:, None]
        odd = np.arange(1, 2 * self.hidden_size, 2, dtype=np.uint64)
        hidden = (((seen * odd) >> np.uint64(40)).astype(np.float64) / (1 << 23) - 1).astype(np.float32)
        if pooling == MEAN:
            sums = np.rint(hidden.astype(np.float64) * MEAN_SCALE).astype(np.int64).sum(0)
            return bytes(sums.tobytes())
        return bytes(hidden[0, : self.num_labels if pooling == LABELS else None].tobytes())

    def _verify(self, batch: ScheduledBatch, i: int, states: list[int]) -> tuple[tuple[int, ...], int]:
        """The tokens that follow: the last one comes after the right drafts. And the state after all of them."""
        drafts = batch.scheduled_spec_decode_tokens.get(batch.req_ids[i], [])
        first = batch.context_lens[i] - len(drafts)
        tokens: list[int] = []
        for state, draft in zip(states[-1 - len(drafts) :], [*drafts, None], strict=True):
            tokens.append(self._sample_row(batch, i, state, first + len(tokens)))
            if tokens[-1] != draft:
                break
        return tuple(tokens), mix(states[len(states) - len(drafts) + len(tokens) - 2], tokens[-1])

    def _sample_row(self, batch: ScheduledBatch, i: int, state: int, position: int) -> int:
        sampling = batch.sampling
        return self._sample(state, int(sampling.seeds[i]), position, int(sampling.choices[i]))

    @staticmethod
    def _digests(batch: ScheduledBatch, i: int, states: list[int], count: int) -> dict[int, int]:
        """Digests of the states that `count` tokens of a sequence were sampled from, by the tokens' positions."""
        num_drafts = len(batch.scheduled_spec_decode_tokens.get(batch.req_ids[i], []))
        first = batch.context_lens[i] - num_drafts
        before = states[len(states) - 1 - num_drafts :]
        return {first + t: mix(before[t], _DIGEST) for t in range(count) if batch.is_digested(i, first + t)}

    def _add_logprobs(
        self,
        batch: ScheduledBatch,
        i: int,
        states: list[int],
        tokens: tuple[int, ...],
        logprobs: dict[int, bytes],
        given: dict[int, bytes],
    ) -> None:
        """Adds the wanted logprob rows of a sequence: of its tokens, and of given ones."""
        seq_id, params = batch.req_ids[i], batch.columns.logprob_params[i]
        if tokens and params.logprobs is not None:
            num_drafts = len(batch.scheduled_spec_decode_tokens.get(seq_id, []))
            before = states[len(states) - 1 - num_drafts :]
            logprobs[seq_id] = self._logprobs(before, tokens, params.logprob_layout, params.logprob_token_ids)
        if targets := batch.targets.get(i):
            before = states[len(states) - batch.is_final[i] - len(targets) :]
            given[seq_id] = self._logprobs(before, targets, params.prompt_logprob_layout, params.logprob_token_ids)

    def _logprobs(
        self, states: Sequence[int], tokens: Sequence[int], layout: LogprobLayout, ids: Sequence[int]
    ) -> bytes:
        """Logprob rows of tokens after states. The token is always the most likely one."""
        numbers = [_logprob(state, token) for state, token in zip(states, tokens, strict=False)]
        top_ids = [[(token + k) % self.vocab_size for k in range(layout.top)] for token in tokens]
        own = np.array(numbers, np.float32)
        return rows_table(
            layout,
            own,
            np.ones(len(numbers), np.int64),
            np.array(top_ids, np.int64).reshape(len(numbers), -1),
            (own[:, None] - np.arange(layout.top)).astype(np.float32),
            np.array([[_logprob(s, token) for token in ids] for s in states[: len(tokens)]], np.float32).reshape(
                len(numbers), -1
            ),
        ).tobytes()

    def _draft(self, batch: ScheduledBatch, i: int, state: int, num_new: int, count: int) -> list[int]:
        """Drafts after the newest token: the runner's own next tokens, some of them wrong."""
        position = batch.context_lens[i] - len(batch.scheduled_spec_decode_tokens.get(batch.req_ids[i], [])) + num_new
        drafts: list[int] = []
        while len(drafts) < count:
            token = self._sample(
                state, int(batch.sampling.seeds[i]), position + len(drafts), int(batch.sampling.choices[i])
            )
            state = mix(state, token)
            wrong = self.draft_errors and (state >> 40) % self.draft_errors == 0
            drafts.append((token + 1) % self.vocab_size if wrong else token)
        return drafts

    def _move_blocks(self, batch: ScheduledBatch) -> list[tuple[bytes, bytes, bytes]]:
        """Reads blocks for KV tiers, writes those that come from there, and copies blocks."""
        size, kept = self.block_size, (self._before, self._after)
        down = [
            (*key, b"".join(states[block * size : (block + 1) * size].tobytes() for states in kept))
            for block, key in batch.blocks_down.items()
        ]
        for block, data in batch.blocks_up:
            for states, half in zip(kept, (data[: len(data) // 2], data[len(data) // 2 :]), strict=True):
                states[block * size : (block + 1) * size] = memoryview(half).cast("Q")
        for source, target in batch.block_copies:
            for states in kept:
                states[target * size : (target + 1) * size] = states[source * size : (source + 1) * size]
        return down

    def _compute(self, batch: ScheduledBatch, i: int, tokens: list[int]) -> list[int]:
        """The states after each of a sequence's tokens."""
        start, end, table = batch.num_computed_tokens[i], batch.context_lens[i], batch.block_tables[i]
        if not tokens or len(tokens) != batch.num_scheduled_tokens[i] or end - start != len(tokens):
            raise InconsistentBatchError(f"sequence {batch.req_ids[i]}: {len(tokens)} tokens for [{start}, {end})")
        if len(table) * self.block_size < end:
            raise InconsistentBatchError(f"sequence {batch.req_ids[i]}: {len(table)} blocks for {end} tokens")
        if self.check_contexts:
            if not all(0 <= b < self.num_blocks for b in table):
                raise InconsistentBatchError(f"sequence {batch.req_ids[i]}: a block outside the pool in {table}")
            state = self._read_context(batch.req_ids[i], table, start)
        else:
            state = self._after[self._slot(table, start - 1)] if start else _START
        states: list[int] = []
        for slot, token in zip(self._slots(table, start, end), tokens, strict=True):
            self._before[slot] = state
            state = self._after[slot] = mix(state, token)
            states.append(state)
        return states

    def _read_context(self, seq_id: int, table: list[int], length: int) -> int:
        """State after `length` tokens. Compares at the borders of full blocks and at every token of a partial block."""
        state, size = _START, self.block_size
        partial = length - length % size
        for block in table[: length // size]:
            self._continue(seq_id, block * size, state)
            state = self._after[block * size + size - 1]
            if not state:
                raise InconsistentBatchError(f"sequence {seq_id}: block {block} is not full")
        for slot in self._slots(table, partial, length):
            state = self._continue(seq_id, slot, state)
        return state

    def _continue(self, seq_id: int, slot: int, before: int) -> int:
        if self._before[slot] != before:
            raise InconsistentBatchError(f"sequence {seq_id}: its block table points to KV of another prefix")
        return self._after[slot]

    def _slots(self, table: list[int], start: int, end: int) -> Iterator[int]:
        return (self._slot(table, position) for position in range(start, end))

    def _slot(self, table: list[int], position: int) -> int:
        size = self.block_size
        return table[position // size] * size + position % size

    def _check_sharing(self, batch: ScheduledBatch) -> None:
        used = Counter(block for table in batch.block_tables for block in table)
        for i, table in enumerate(batch.block_tables):
            first = batch.num_computed_tokens[i] // self.block_size
            last = (batch.context_lens[i] - 1) // self.block_size
            if any(used[block] > 1 for block in table[first : last + 1]):
                raise InconsistentBatchError(f"sequence {batch.req_ids[i]} writes a block that another sequence uses")

    def _sample(self, state: int, seed: int, position: int, choice: int) -> int:
        x = mix(mix(mix(state, seed), position), choice)
        if self.eos_every and self.eos_token_id is not None and (x >> 32) % self.eos_every == 0:
            return self.eos_token_id
        token = x % self.vocab_size
        return token if token != self.eos_token_id else (token + 1) % self.vocab_size

    def _pause_until(self, end: float) -> None:
        seconds = end - self._clock()
        if seconds > 0:
            self._sleep(seconds)
