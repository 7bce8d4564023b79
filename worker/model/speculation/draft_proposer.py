"""Interface of draft models: the runner calls them after every step, on each rank, in the same forward pass.

If the step's tokens are on the host, a draft model gets them (SampledStep). If they are still on the device, it drafts
without them (LaunchedStep), so that no launch waits: the host counts rows and drafts, the device selects among them.

A draft model has its own KV under the target's block ids, so prefix hits, preemption and eviction need nothing more.
Stale or unwritten slots make drafts worse and change no token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kernels.interface import AttentionMetaData, KVCache, KVSpec
from kernels.no_token import NO_TOKEN
from kernels.upload import to_device
from worker.engine.batch import ScheduledBatch, TokenHistory
from worker.model.forward_context import KVCacheTensor
from worker.model.sampled_rows import SampledRows

Ints = npt.NDArray[np.int64]


class DraftedStep(Protocol):
    """The step that a draft model's drafts follow."""

    @property
    def batch(self) -> ScheduledBatch: ...

    @property
    def states(self) -> torch.Tensor:
        """[T, (1 + n) H]: the target's hidden states and the inputs of n `aux_layers`.

        Unless the draft model takes hidden states, those of rows without a sampled token are undefined.
        """
        ...

    @property
    def kv_cache_data(self) -> Mapping[str, KVCacheTensor]:
        """The draft model's KV by layer name."""
        ...

    @property
    def ends(self) -> Ints:
        """int64 [S]: an upper bound of the position after each sequence's last accepted row."""
        ...

    def num_tokens(self, i: int) -> int:
        """Upper bound of a sequence's tokens after the step, by its place in the batch."""
        ...

    def num_drafts(self, i: int) -> int:
        """Number of drafts that a sequence wants and has slots for, by its place in the batch.

        The last draft needs no slot, as its KV is not computed; nor does the newest token without a draft after it.
        """
        ...


@dataclass(frozen=True)
class SampledStep:
    """A step whose sampled tokens are on the host.

    Attributes:
        batch, states, kv_cache_data: see DraftedStep.
        tokens: new tokens by sequence: its accepted drafts and the token after them.
        token_ids: int64 [T], tokens of all rows.
        num_rejected: int64 [S], rejected drafts that were in flight when the step was scheduled: the sequence is that
            much shorter than the batch says. None without such drafts.
    """

    batch: ScheduledBatch
    tokens: Mapping[int, tuple[int, ...]]
    token_ids: Ints
    states: torch.Tensor
    kv_cache_data: Mapping[str, KVCacheTensor]
    num_rejected: Ints | None = None

    @cached_property
    def begins(self) -> Ints:
        """int64 [S]: each sequence's first row."""
        lengths = np.array(self.batch.num_scheduled_tokens, np.int64)
        return np.cumsum(lengths) - lengths

    @cached_property
    def starts(self) -> Ints:
        """int64 [S]: the position of each sequence's first row."""
        starts = np.array(self.batch.num_computed_tokens, np.int64)
        return starts if self.num_rejected is None else starts - self.num_rejected

    @cached_property
    def right_rows(self) -> list[int]:
        """Number of rows of each sequence, without rejected drafts."""
        rows, drafts = list(self.batch.num_scheduled_tokens), self.batch.scheduled_spec_decode_tokens
        if drafts:
            for i, seq_id in enumerate(self.batch.req_ids):
                num_drafts = len(drafts.get(seq_id, ()))
                num_rejected = num_drafts + 1 - len(self.new_tokens(i)) if num_drafts else 0
                rows[i] -= num_rejected
        return rows

    @cached_property
    def counts(self) -> Ints:
        """`right_rows` as int64 [S]."""
        return np.array(self.right_rows, np.int64)

    @cached_property
    def ends(self) -> Ints:
        """int64 [S]: the position after each sequence's last accepted row."""
        return self.starts + self.counts

    @cached_property
    def next_tokens(self) -> list[int]:
        """The token after each sequence's last accepted row; any id if it is unknown."""
        known = self.batch.next_token_ids
        every = ((seq_id, self.tokens.get(seq_id)) for seq_id in self.batch.req_ids)
        return [max(0, new[-1]) if new else known.get(seq_id, 0) for seq_id, new in every]

    def new_tokens(self, i: int) -> tuple[int, ...]:
        """New tokens of a sequence, by its place in the batch."""
        return self.tokens.get(self.batch.req_ids[i], ())

    def num_tokens(self, i: int) -> int:
        """A sequence's tokens after the step: see DraftedStep, here exact."""
        return int(self.ends[i]) + 1

    def num_drafts(self, i: int) -> int:
        """Number of drafts of a sequence: see DraftedStep."""
        if (self.new_tokens(i) or (NO_TOKEN,))[-1] == NO_TOKEN:
            return 0
        return _with_slots(self.batch, i, self.num_tokens(i))

    def history(self, i: int, drafts: list[int]) -> TokenHistory | None:
        """A sequence's history with its new tokens and `drafts`; None if it changes no logits."""
        known = self.batch.histories.get(i)
        if known is None:
            return None
        if self.batch.from_last_output[i]:
            known = known.with_token(int(self.token_ids[self.begins[i]]))
        return known.with_drafts([*self.new_tokens(i), *drafts])


@dataclass(frozen=True)
class LaunchedStep:
    """A step whose sampled tokens are still on the device.

    The host counts all drafts as accepted, those of this step and those in flight before it, so its numbers of tokens
    are upper bounds.

    Attributes:
        batch, states, kv_cache_data: see DraftedStep.
        sampled: the sampled rows.
        metadata: the step's attention metadata.
        token_ids: int64 [T] on the device, tokens of all rows.
        drawn: int64 [R] on the device, sampled tokens.
        num_rejected: int64 [F] on the device, rejected drafts of each sampled sequence; None without drafts.
    """

    batch: ScheduledBatch
    sampled: SampledRows
    metadata: AttentionMetaData
    token_ids: torch.Tensor
    drawn: torch.Tensor
    num_rejected: torch.Tensor | None
    states: torch.Tensor
    kv_cache_data: Mapping[str, KVCacheTensor]

    @property
    def counts(self) -> Ints:
        """int64 [S]: number of rows of each sequence."""
        return np.diff(self.metadata.cu_seqlens_q)

    @property
    def ends(self) -> Ints:
        return self.metadata.seq_lens

    @cached_property
    def final_places(self) -> Ints:
        """int64 [S]: each sequence's place among the F sampled ones, if it is one of them."""
        return np.cumsum(np.array(self.batch.is_final, np.int64)) - 1

    @property
    def open_ends(self) -> Ints:
        """int64: the last row of each chunk that does not end its prompt."""
        is_open = ~np.array(self.batch.is_final, np.bool_)
        return self.metadata.cu_seqlens_q[1:][is_open] - 1

    def num_tokens(self, i: int) -> int:
        """Upper bound of a sequence's tokens after the step."""
        return int(self.ends[i]) + 1

    def num_drafts(self, i: int) -> int:
        """Number of drafts of a sequence: see DraftedStep; not 0 if the step samples no valid token."""
        return _with_slots(self.batch, i, self.num_tokens(i)) if self.batch.is_final[i] else 0

    def take(self, sources: Ints) -> torch.Tensor:
        """Selects tokens on the device, int64; any id where a place holds no token.

        Args:
            sources: int64, places in the concatenation of all rows' tokens, the sampled tokens, and the tokens after
                `open_ends`.
        """
        known, rows = self.batch.next_token_ids, zip(self.batch.req_ids, self.batch.is_final, strict=True)
        behind = [known.get(seq_id, 0) for seq_id, is_final in rows if not is_final]
        given = to_device(np.concatenate((sources, np.array(behind, np.int64))), self.token_ids.device)
        every = torch.cat((self.token_ids, self.drawn.clamp(min=0), given[len(sources) :]))
        return every.index_select(0, given[: len(sources)])

    def stand(self, own: Ints, rows: Ints) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Finds the last accepted row of sequences.

        Args:
            own: int64 [D], their places in the batch.
            rows: int64 [D], the last row of each, accepted or not.

        Returns:
            On the device, int64 [D]: the last accepted row of each, and by how many tokens it is shorter than the host
            counts; None for the latter if no draft can be rejected.
        """
        given = np.stack((rows, self.final_places[own], own))
        last, places, sequences = to_device(given, self.token_ids.device)
        late = self.metadata.num_rejected
        late = None if late is None else late.index_select(0, sequences)
        if self.num_rejected is None:
            return last, late
        wrong = self.num_rejected.index_select(0, places)
        return last - wrong, wrong if late is None else wrong + late


def _with_slots(batch: ScheduledBatch, i: int, num_tokens: int) -> int:
    """Number of drafts that a sequence of `num_tokens` tokens wants and has slots for."""
    wanted = batch.drafts_wanted.get(batch.req_ids[i], 0)
    return max(0, min(wanted, batch.num_slots(i) - num_tokens + 2)) if wanted else 0


@dataclass(frozen=True)
class LaunchedDrafts:
    """Drafts on the device.

    Attributes:
        token_ids: int64 [F, K], drafts of each sampled sequence of a step; any id after its last one.
        counts: number of drafts by sequence id.
    """

    token_ids: torch.Tensor
    counts: dict[int, int]

    def behind(
        self, seq_ids: list[int], tokens: Mapping[int, tuple[int, ...]], token_ids: list[int]
    ) -> dict[int, list[int]]:
        """Drafts by sequence, each up to the first NO_TOKEN; none for a sequence whose newest token is NO_TOKEN.

        Args:
            seq_ids: ids of the F sequences.
            tokens: new tokens by sequence.
            token_ids: the drafts' `token_ids` on the host, row by row.
        """
        found, width = {}, self.token_ids.shape[1]
        for place, seq_id in enumerate(seq_ids):
            if (count := self.counts.get(seq_id, 0)) and tokens[seq_id][-1] != NO_TOKEN:
                found[seq_id] = before_no_token(token_ids[place * width :][:count])
        return found


def before_no_token(drafts: Iterable[int]) -> list[int]:
    """Drafts before the first NO_TOKEN."""
    return list(takewhile(lambda token: token != NO_TOKEN, drafts))


class DraftProposer(Protocol):
    """A draft model.

    Attributes:
        kv_spec: KV format of one of its layers.
        num_layers: number of its layers with KV.
        takes_states: True if it needs the target's hidden states of all rows. It gets `aux_layers` anyway.
    """

    kv_spec: KVSpec
    num_layers: int
    takes_states: bool

    def kv_cache_data(self, cache: KVCache) -> dict[str, KVCacheTensor]:
        """Its layers' KV by layer name, for the forward context."""
        ...

    def propose(self, step: SampledStep) -> dict[int, list[int]]:
        """Computes the step's rows into its KV; returns at most `num_drafts` drafts of each sequence."""
        ...

    def launch(self, step: LaunchedStep) -> LaunchedDrafts:
        """`propose` for a step whose tokens are on the device; no sequence with drafts has a history."""
        ...
