"""Proposers that are models: an EAGLE-3 head, an MTP layer of the checkpoint, or a small model of its own.

A draft is sampled as the target samples at its position: with the same noise, parameters, penalties, masks and
grammars. If both models give a token the same probability, both sample it, which makes most drafts of sampled answers
right. Grammars with slow masks do not constrain drafts (`GrammarMasks.ahead`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from typing_extensions import override

from common.config import Config
from kernels.interface import KernelBackend, KVCache, KVSpec
from kernels.upload import to_device
from worker.engine.batch import TokenHistory
from worker.model.architectures import CausalModel, DraftModel, model_class
from worker.model.forward_context import KVCacheTensor
from worker.model.sampler import Sampler
from worker.model.sharding import Shard, length
from worker.model.speculation.draft_chains import DraftChains
from worker.model.speculation.draft_proposer import (
    DraftedStep,
    Ints,
    LaunchedDrafts,
    LaunchedStep,
    SampledStep,
    before_no_token,
)
from worker.model.speculation.draft_runner import DraftRows, DraftRunner

if TYPE_CHECKING:
    from worker.config.model_config import ModelConfig
    from worker.model.models.eagle3 import Eagle3Head


class DraftTarget(Protocol):
    """The model runner of the target, as its draft model uses it (`ModelRunner` has the attributes' meanings)."""

    config: Config
    kernels: KernelBackend
    kv_spec: KVSpec
    model: CausalModel
    num_heads: int
    sampled_ids: int
    sampler: Sampler
    shard: Shard


@dataclass(frozen=True)
class StepRows:
    """A draft model's rows for a step of its target.

    Attributes:
        rows: the rows of all sequences.
        places: int64 [T], the step's row whose states each of them takes.
    """

    rows: DraftRows
    places: Ints

    @classmethod
    def behind(cls, step: SampledStep) -> StepRows:
        """One row for each accepted row of the step, with the token after it."""
        counts = step.counts
        ends = np.cumsum(counts)
        places = np.arange(ends[-1]) + np.repeat(step.begins - (ends - counts), counts)
        token_ids = step.token_ids[np.minimum(places + 1, len(step.token_ids) - 1)]
        token_ids[ends - 1] = step.next_tokens
        return cls(DraftRows(step.starts, counts, step.batch.tables, token_ids), places)

    @classmethod
    def with_newest(cls, step: SampledStep, drafting: Iterable[int]) -> StepRows:
        """One row for each accepted row of the step, with its own token, and one with the newest token.

        Args:
            step: the step.
            drafting: places in the batch of the sequences that get the additional row.
        """
        counts = step.counts
        more = np.zeros(len(counts), np.int64)
        more[list(drafting)] = 1
        ends = np.cumsum(counts + more)
        places = np.arange(ends[-1]) + np.repeat(step.begins - (ends - counts - more), counts + more)
        places = np.minimum(places, len(step.token_ids) - 1)
        token_ids = step.token_ids[places]
        token_ids[ends[more > 0] - 1] = np.array(step.next_tokens, np.int64)[more > 0]
        return cls(DraftRows(step.starts, counts + more, step.batch.tables, token_ids), places)


@dataclass(frozen=True)
class LaunchedRows:
    """A draft model's rows for a step whose tokens are on the device, rejected drafts included.

    Rejected rows come after a sequence's accepted ones, so no accepted row attends to them; their slots are written
    again before they are read.

    Attributes:
        rows: the rows of all sequences.
        places: int64 [T], the step's row whose states each of them takes; None for the same order.
    """

    rows: DraftRows
    places: Ints | None

    @classmethod
    def behind(cls, step: LaunchedStep) -> LaunchedRows:
        """One row for each row of the step, with the token after it: the sampled one or the next of the prompt."""
        total, drawn = len(step.token_ids), step.sampled.step_rows
        sources = np.arange(1, total + 1)
        sources[drawn] = total + np.arange(len(drawn))
        open_ends = step.open_ends
        sources[open_ends] = total + len(drawn) + np.arange(len(open_ends))
        return cls(cls._rows(step, step.counts, sources), None)

    @classmethod
    def with_newest(cls, step: LaunchedStep, drafting: Iterable[int]) -> LaunchedRows:
        """One row for each row of the step, with its own token, and one with the newest token.

        Rows of sequences that draft take what the row before sampled: their own token, or the newest one, if the row
        before is accepted.

        Args:
            step: the step.
            drafting: places in the batch of the sequences that get the additional row.
        """
        total, counts = len(step.token_ids), step.counts
        more = np.zeros(len(counts), np.int64)
        more[list(drafting)] = 1
        shifts = np.cumsum(more) - more
        sources = np.arange(total + int(more.sum())) - np.repeat(shifts, counts + more)
        own = step.sampled.sequences
        behind = (step.sampled.step_rows + shifts[own] + 1)[more[own] > 0]
        places = np.minimum(sources, total - 1)
        sources[behind] = total + np.flatnonzero(more[own])
        return cls(cls._rows(step, counts + more, sources), places)

    @staticmethod
    def _rows(step: LaunchedStep, counts: Ints, sources: Ints) -> DraftRows:
        starts = step.ends - step.counts
        return DraftRows(starts, counts, step.batch.tables, step.take(sources), step.metadata.num_rejected)


class ModelProposer:
    """A proposer whose model drafts in a chain: each row takes the states and the draft of the row before.

    Args:
        model: the draft model.
        runner: runs its rows.
        target: the rank's model runner; its sampler holds the grammar states.
    """

    takes_states = False

    def __init__(self, model: DraftModel, runner: DraftRunner, target: DraftTarget) -> None:
        self._model = model
        self._runner = runner
        # A separate sampler, because a sampler keeps state of the sequences that it has sampled.
        self._sampler = Sampler(target.kernels, target.config.eos_token_ids, fetches=True)
        self._confined = target.sampler.confined_drafts
        self._sampled_ids = target.sampled_ids
        self.kv_spec = runner.kv_spec
        self.num_layers = runner.num_layers

    def kv_cache_data(self, cache: KVCache) -> dict[str, KVCacheTensor]:
        """Its layers' KV by layer name, for the forward context."""
        return self._runner.kv_cache_data(cache)

    def propose(self, step: SampledStep) -> dict[int, list[int]]:
        """Computes the step's rows into its KV; returns at most `SampledStep.num_drafts` drafts of each sequence."""
        wanted = self.wanted(step)
        made = self.rows(step, wanted)
        states = step.states[torch.from_numpy(made.places).to(step.states.device)]
        last = made.rows.last[list(wanted)]
        states = self._runner.run(self._enter, made.rows, states, step.kv_cache_data, last)
        ends = made.rows.starts + made.rows.counts
        drafts = self._chain(step, wanted, ends, states[torch.from_numpy(last)])
        return {step.batch.req_ids[i]: own for i, own in drafts.items()}

    def launch(self, step: LaunchedStep) -> LaunchedDrafts:
        """`propose` for a step whose tokens are on the device; no sequence with drafts has a history."""
        wanted = self.wanted(step)
        made = self.launched_rows(step, wanted)
        states = step.states
        if made.places is not None:
            states = states.index_select(0, to_device(made.places, states.device))
        asked = _asked_rows(step, made.rows.last, wanted)
        states = self._runner.run(self._enter, made.rows, states, step.kv_cache_data, asked)
        if not wanted:
            return LaunchedDrafts(step.drawn.new_empty((len(step.sampled.seq_ids), 0)), {})
        _, own, counts = _most_first(wanted)
        ends = made.rows.starts + made.rows.counts
        last, num_rejected = step.stand(own, made.rows.last[own])
        drafts = self._links(step, own, counts, ends[own], states.index_select(0, last), num_rejected)
        return self._launched(step, own, counts, drafts)

    @staticmethod
    def _launched(step: LaunchedStep, own: Ints, counts: Ints, drafts: list[torch.Tensor]) -> LaunchedDrafts:
        """Drafts by sequence from `drafts` by place in the chain; `own` are the sequences' places in the batch."""
        made, borders = torch.cat(drafts), np.cumsum([0, *map(len, drafts[:-1])])
        # Places without a draft refer to any one of them.
        sources = np.zeros((len(step.sampled.seq_ids), len(drafts)), np.int64)
        is_there = np.arange(len(drafts)) < counts[:, None]
        sources[step.final_places[own]] = np.where(is_there, np.arange(len(own))[:, None] + borders, 0)
        token_ids = made.index_select(0, to_device(sources.ravel(), made.device)).view(sources.shape)
        every = zip(own.tolist(), counts.tolist(), strict=True)
        return LaunchedDrafts(token_ids, {step.batch.req_ids[i]: count for i, count in every})

    def wanted(self, step: DraftedStep) -> dict[int, int]:
        """Number of drafts by the sequence's place in the batch, without those that get none."""
        every = range(len(step.batch.req_ids))
        return {i: count for i in every if (count := self.num_drafts(step, i))}

    def num_drafts(self, step: DraftedStep, i: int) -> int:
        """Number of drafts of a sequence, by its place in the batch."""
        return step.num_drafts(i)

    def rows(self, step: SampledStep, wanted: Iterable[int]) -> StepRows:
        """The model's rows for a step.

        Args:
            step: the step that the drafts follow.
            wanted: places in the batch of the sequences that draft.
        """
        return StepRows.behind(step)

    def launched_rows(self, step: LaunchedStep, wanted: Iterable[int]) -> LaunchedRows:
        """`rows` for a step whose tokens are on the device."""
        return LaunchedRows.behind(step)

    def _enter(self, token_ids: torch.Tensor, positions: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return self._model.forward(token_ids, positions, self._model.combine(states))

    def _chain(self, step: SampledStep, wanted: dict[int, int], ends: Ints, last: torch.Tensor) -> dict[int, list[int]]:
        """Drafts by the sequence's place in the batch; fewer than wanted after a NO_TOKEN.

        Args:
            step: the step that the drafts follow.
            wanted: number of drafts of each sequence.
            ends: int64 [S], position of each sequence's first row that is not computed.
            last: states [D, H] of the last rows of the sequences that draft.
        """
        if not wanted:
            return {}
        order, own, counts = _most_first(wanted)
        if len(own) > 1:
            last = last[torch.from_numpy(order).to(last.device)]
        drafts = self._links(step, own, counts, ends[own], last)
        made = torch.cat(drafts).tolist()
        begins = [0, *accumulate(len(each) for each in drafts)]
        runs = zip(own.tolist(), counts.tolist(), strict=True)
        return {i: before_no_token(made[begin + at] for begin in begins[:count]) for at, (i, count) in enumerate(runs)}

    def _links(
        self,
        step: DraftedStep,
        own: Ints,
        counts: Ints,
        ends: Ints,
        last: torch.Tensor,
        num_rejected: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Drafts by place in the chain: int64 [C] of the C first sequences, which have a draft there.

        Args:
            step: the step that the drafts follow.
            own: int64 [D], the sequences' places in the batch.
            counts: int64 [D], drafts of each, in descending order.
            ends: int64 [D], position of each sequence's first row that is not computed.
            last: states [D, H] of the rows before these.
            num_rejected: int64 [D] on the device, by how much the real positions are lower; None if they are exact.
        """
        drafts = [self._draw(step, own, [], last, num_rejected)]
        if counts[0] > 1:
            rows = self._runner.chain(ends, counts - 1, [step.batch.tables[i] for i in own.tolist()], num_rejected)
            for place, count in enumerate(rows.counts):
                # Drafts after a NO_TOKEN are dropped, so any valid id will do.
                newest = drafts[-1][:count].clamp(min=0)
                last = self._runner.go_on(self._model.forward, rows, place, newest, last[:count], step.kv_cache_data)
                drafts.append(self._draw(step, own[:count], drafts, last, num_rejected))
        return drafts

    def _draw(
        self,
        step: DraftedStep,
        own: Ints,
        drafts: list[torch.Tensor],
        states: torch.Tensor,
        num_rejected: torch.Tensor | None,
    ) -> torch.Tensor:
        """Samples the next draft of the sequences at the places `own` in the batch, int64 [C]."""
        if step.batch.is_greedy:
            return self._model.greedy(states, self._sampled_ids)
        logits = self._model.compute_logits(states)
        logits[:, self._sampled_ids :] = -torch.inf
        # The newest token follows the last accepted row, and the drafts follow it.
        positions = step.ends[own] + 1 + len(drafts)
        histories: dict[int, TokenHistory] = {}
        # With tokens on the device, no sequence that drafts has a history.
        if isinstance(step, SampledStep) and step.batch.histories:
            histories = self._histories(step, own, drafts)
        num_rejected = None if num_rejected is None else num_rejected[: len(own)]
        confined = self._confined(histories)
        return self._sampler.sample_rows(
            step.batch, own, positions, logits, histories, confined=confined, num_rejected=num_rejected
        )

    @staticmethod
    def _histories(step: SampledStep, own: Ints, drafts: list[torch.Tensor]) -> dict[int, TokenHistory]:
        """Histories that change logits, by row, with the drafts before the first NO_TOKEN."""
        known = [each.tolist() for each in drafts]
        every = (
            (row, step.history(i, before_no_token(each[row] for each in known))) for row, i in enumerate(own.tolist())
        )
        return {row: history for row, history in every if history is not None}


def _most_first(wanted: dict[int, int]) -> tuple[Ints, Ints, Ints]:
    """Sorts sequences by descending number of drafts, so that those with a draft at a place of the chain come first.

    Returns:
        For each sequence its index in `wanted`, its place in the batch and its number of drafts.
    """
    own, counts = np.array(list(wanted), np.int64), np.array(list(wanted.values()), np.int64)
    order = np.argsort(-counts, kind="stable")
    return order, own[order], counts[order]


def _asked_rows(step: LaunchedStep, last: Ints, drafting: Iterable[int]) -> Ints:
    """A draft model's rows that may be the last accepted one of a sequence.

    Args:
        step: the step that the drafts follow.
        last: int64 [S], the last row of each sequence.
        drafting: places in the batch of the sequences that draft.
    """
    runs = step.sampled.rows_of
    spans = [np.arange(last[i] + 1 - len(runs[i]), last[i] + 1) for i in drafting]
    return np.concatenate(spans) if spans else last[:0]


class EagleProposer(ModelProposer):
    """Proposer by an EAGLE-3 head (worker/model/models/eagle3.py), in one operation if the kernels have it.

    Args:
        model, runner, target: see ModelProposer.
    """

    def __init__(self, model: Eagle3Head, runner: DraftRunner, target: DraftTarget) -> None:
        super().__init__(model, runner, target)
        fused = model.fuse_drafts(target.sampled_ids)
        self._chains = None if fused is None else DraftChains(model, fused)

    @override
    def propose(self, step: SampledStep) -> dict[int, list[int]]:
        if self._chains is None:
            return super().propose(step)
        wanted, steered = self.wanted(step), step.batch.histories
        found = {i: 0 if i in steered else count for i, count in wanted.items()}
        states, drafts = self._chains.run(step, found)
        made = dict(zip(wanted, drafts, strict=True))
        if steered and (others := {i: count for i, count in wanted.items() if i in steered}):
            # Penalties and masks depend on the drafts before, which the operation does not return one by one.
            made |= self._chain(step, others, step.ends, states[[i in others for i in wanted]])
        return {step.batch.req_ids[i]: own for i, own in made.items()}

    @classmethod
    def of(cls, head: Eagle3Head, config: ModelConfig, target: DraftTarget) -> EagleProposer:
        """A proposer for a loaded target.

        Args:
            head: the head, with an embedding.
            config: config of the head.
            target: the rank's model runner.

        Raises:
            ModelError: the head cannot be sharded over the ranks.
        """
        heads = length(target.shard.part(config.num_attention_heads, "num_attention_heads"))
        spec = head.kv_spec(config, target.shard)
        rows = DraftRunner(target.config, target.kernels, head.kv_names, spec, heads)
        return cls(head, rows, target)


class MtpProposer(ModelProposer):
    """Proposer by the first MTP layer of the target's checkpoint (worker/model/models/grouped_moe.py)."""

    takes_states = True

    @classmethod
    def of(cls, layer: DraftModel, target: DraftTarget) -> MtpProposer:
        """A proposer for the target that has the layer."""
        rows = DraftRunner(target.config, target.kernels, layer.kv_names, target.kv_spec, target.num_heads)
        return cls(layer, rows, target)


class SmallModel:
    """A separate draft model as a `DraftModel` that ignores the target's states.

    Args:
        model: the model, with the target's tokenizer.
        config: config of the model.
    """

    def __init__(self, model: CausalModel, config: ModelConfig) -> None:
        self.kv_names: tuple[str, ...] = tuple(f"layers.{layer}" for layer in range(config.num_hidden_layers))
        self._model = model
        self._last_id = config.vocab_size - 1

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """The target's states, unchanged."""
        return states

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, H]; ids beyond its embedding count as its last id."""
        return self._model.forward(token_ids.clamp(max=self._last_id), positions)

    def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits float32 [S, V] of its states [S, H]."""
        return self._model.compute_logits(states)

    def greedy(self, states: torch.Tensor, limit: int) -> torch.Tensor:
        """int64 [S]: the lowest id below `limit` with the largest logit, of its states [S, H]."""
        return self._model.greedy(states, limit)


class SmallModelProposer(ModelProposer):
    """Proposer by a separate model with the same tokenizer, which computes the newest token before it drafts."""

    @classmethod
    def of(cls, model: CausalModel, config: ModelConfig, target: DraftTarget) -> SmallModelProposer:
        """A proposer for a loaded target.

        Args:
            model: the draft model.
            config: config of the draft model.
            target: the rank's model runner.

        Raises:
            ModelError: the model cannot be sharded over the ranks.
        """
        small = SmallModel(model, config)
        heads = length(target.shard.part(config.num_attention_heads, "num_attention_heads"))
        spec = model_class(config.architecture).kv_spec(config, target.shard)
        rows = DraftRunner(target.config, target.kernels, small.kv_names, spec, heads)
        return cls(small, rows, target)

    @override
    def num_drafts(self, step: DraftedStep, i: int) -> int:
        # The newest token's KV is computed too.
        wanted = step.num_drafts(i)
        return max(0, min(wanted, step.batch.num_slots(i) - step.num_tokens(i) + 1)) if wanted else 0

    @override
    def rows(self, step: SampledStep, wanted: Iterable[int]) -> StepRows:
        return StepRows.with_newest(step, wanted)

    @override
    def launched_rows(self, step: LaunchedStep, wanted: Iterable[int]) -> LaunchedRows:
        return LaunchedRows.with_newest(step, wanted)
