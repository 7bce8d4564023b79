"""Draft models as the runner calls them: after every step, on each rank, in the same forward pass.

Where tokens are on the host at once a draft model is told them (SampledStep). Where they are on their way it drafts
without (LaunchedStep), so that no launch waits for them: the host counts rows and drafts, the device picks among them.

A draft model has KV of its own under the block ids of the target, so that prefix hits, preemption and eviction need no
more. Its rows are those of the target's steps. Where a slot is stale or was never written, drafts are worse, and no
token is another.
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
    """A step behind which a draft model drafts."""

    @property
    def batch(self) -> ScheduledBatch: ...

    @property
    def states(self) -> torch.Tensor:
        """[T, (1 + n) H], the target's hidden states, and the streams before n `aux_layers`. Of rows that give no
        tokens the hidden states may be anything unless the draft model takes them."""
        ...

    @property
    def kv_cache_data(self) -> Mapping[str, KVCacheTensor]:
        """The draft model's KV, by the names of its layers."""
        ...

    @property
    def ends(self) -> Ints:
        """int64 [S], the position behind the last right row of each sequence, or a later one."""
        ...

    def num_tokens(self, i: int) -> int:
        """Tokens of a sequence whose last one the step has reached, with the new ones, by its place in the batch; or
        more."""
        ...

    def num_drafts(self, i: int) -> int:
        """Drafts that a sequence wants and has slots for: the last one's KV is not computed, nor is the newest token's
        without the one behind it."""
        ...


@dataclass(frozen=True)
class SampledStep:
    """A step whose tokens are drawn, and are on the host.

    Attributes:
        batch, states, kv_cache_data: as of DraftedStep.
        tokens: the new tokens of each sequence that has any: its right drafts, and the one behind them.
        token_ids: int64 [T], tokens of all rows.
        num_rejected: int64 [S], drafts of each sequence that were in flight when it was scheduled, and wrong: by so
            many tokens it is shorter than the batch says. None where there were none.
    """

    batch: ScheduledBatch
    tokens: Mapping[int, tuple[int, ...]]
    token_ids: Ints
    states: torch.Tensor
    kv_cache_data: Mapping[str, KVCacheTensor]
    num_rejected: Ints | None = None

    @cached_property
    def begins(self) -> Ints:
        """int64 [S]: the first row of each sequence."""
        lengths = np.array(self.batch.num_scheduled_tokens, np.int64)
        return np.cumsum(lengths) - lengths

    @cached_property
    def starts(self) -> Ints:
        """int64 [S]: the position of that row."""
        starts = np.array(self.batch.num_computed_tokens, np.int64)
        return starts if self.num_rejected is None else starts - self.num_rejected

    @cached_property
    def right_rows(self) -> list[int]:
        """Rows of each sequence without those of drafts that were wrong."""
        rows, drafts = list(self.batch.num_scheduled_tokens), self.batch.scheduled_spec_decode_tokens
        if drafts:
            for i, seq_id in enumerate(self.batch.req_ids):
                num_drafts = len(drafts.get(seq_id, ()))
                num_rejected = num_drafts + 1 - len(self.new_tokens(i)) if num_drafts else 0
                rows[i] -= num_rejected
        return rows

    @cached_property
    def counts(self) -> Ints:
        """int64 [S]: `right_rows`."""
        return np.array(self.right_rows, np.int64)

    @cached_property
    def ends(self) -> Ints:
        """int64 [S]: the position behind the last of these rows."""
        return self.starts + self.counts

    @cached_property
    def next_tokens(self) -> list[int]:
        """The token behind the last right row of each sequence; any id where nobody knows it."""
        known = self.batch.next_token_ids
        every = ((seq_id, self.tokens.get(seq_id)) for seq_id in self.batch.req_ids)
        return [max(0, new[-1]) if new else known.get(seq_id, 0) for seq_id, new in every]

    def new_tokens(self, i: int) -> tuple[int, ...]:
        """The new tokens of a sequence, by its place in the batch."""
        return self.tokens.get(self.batch.req_ids[i], ())

    def num_tokens(self, i: int) -> int:
        """See DraftedStep: exactly."""
        return int(self.ends[i]) + 1

    def num_drafts(self, i: int) -> int:
        """See DraftedStep."""
        if (self.new_tokens(i) or (NO_TOKEN,))[-1] == NO_TOKEN:
            return 0
        return _with_slots(self.batch, i, self.num_tokens(i))

    def history(self, i: int, drafts: list[int]) -> TokenHistory | None:
        """History of a sequence behind the new tokens and these drafts, where it changes logits."""
        known = self.batch.histories.get(i)
        if known is None:
            return None
        if self.batch.from_last_output[i]:
            known = known.with_token(int(self.token_ids[self.begins[i]]))
        return known.with_drafts([*self.new_tokens(i), *drafts])


@dataclass(frozen=True)
class LaunchedStep:
    """A step whose tokens are on the device, and perhaps on their way to the host.

    Of the drafts that it verifies, or that were in flight before it, the host takes all for right: a sequence has at
    most as many tokens as it says here.

    Attributes:
        batch, states, kv_cache_data: as of DraftedStep.
        sampled: the rows whose tokens are drawn.
        metadata: of its attention.
        token_ids: int64 [T], tokens of all rows, on the device.
        drawn: int64 [R], likewise, of those that are sampled.
        num_rejected: int64 [F], likewise, drafts of each sequence that were wrong; None where there were none.
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
        """int64 [S]: rows of each sequence."""
        return np.diff(self.metadata.cu_seqlens_q)

    @property
    def ends(self) -> Ints:
        return self.metadata.seq_lens

    @cached_property
    def final_places(self) -> Ints:
        """int64 [S]: the place of each sequence among the F whose tokens are drawn, if it is one of these."""
        return np.cumsum(np.array(self.batch.is_final, np.int64)) - 1

    @property
    def open_ends(self) -> Ints:
        """int64: the last row of each chunk behind which more of its prompt comes."""
        is_open = ~np.array(self.batch.is_final, np.bool_)
        return self.metadata.cu_seqlens_q[1:][is_open] - 1

    def num_tokens(self, i: int) -> int:
        """See DraftedStep."""
        return int(self.ends[i]) + 1

    def num_drafts(self, i: int) -> int:
        """See DraftedStep; some, too, where there is no newest token."""
        return _with_slots(self.batch, i, self.num_tokens(i)) if self.batch.is_final[i] else 0

    def take(self, sources: Ints) -> torch.Tensor:
        """int64, on the device: tokens by their places among those of all rows, those that are drawn, and those behind
        `open_ends`, one after the other; any id for one that is none."""
        known, rows = self.batch.next_token_ids, zip(self.batch.req_ids, self.batch.is_final, strict=True)
        behind = [known.get(seq_id, 0) for seq_id, is_final in rows if not is_final]
        given = to_device(np.concatenate((sources, np.array(behind, np.int64))), self.token_ids.device)
        every = torch.cat((self.token_ids, self.drawn.clamp(min=0), given[len(sources) :]))
        return every.index_select(0, given[: len(sources)])

    def stand(self, own: Ints, rows: Ints) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Finds where sequences stand, by their places in the batch.

        Args:
            own: int64 [D], these places.
            rows: int64 [D], the last row of each.

        Returns:
            On the device, int64 [D]: the last right row of each; and by how many tokens it is shorter than the host
            says, None where all that it says is so.
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
    """Drafts that a sequence of so many tokens wants and has slots for."""
    wanted = batch.drafts_wanted.get(batch.req_ids[i], 0)
    return max(0, min(wanted, batch.num_slots(i) - num_tokens + 2)) if wanted else 0


@dataclass(frozen=True)
class LaunchedDrafts:
    """Drafts that are on the device.

    Attributes:
        token_ids: int64 [F, K], of each sequence of a step whose tokens are drawn; any id where it has none.
        counts: how many each has, by its id.
    """

    token_ids: torch.Tensor
    counts: dict[int, int]

    def behind(
        self, seq_ids: list[int], tokens: Mapping[int, tuple[int, ...]], token_ids: list[int]
    ) -> dict[int, list[int]]:
        """Drafts of each sequence, up to the first that is no token; none where no token is the newest one.

        Args:
            seq_ids: of the F sequences.
            tokens: the new ones of each.
            token_ids: these, on the host, one row after the other.
        """
        found, width = {}, self.token_ids.shape[1]
        for place, seq_id in enumerate(seq_ids):
            if (count := self.counts.get(seq_id, 0)) and tokens[seq_id][-1] != NO_TOKEN:
                found[seq_id] = before_no_token(token_ids[place * width :][:count])
        return found


def before_no_token(drafts: Iterable[int]) -> list[int]:
    """Drafts up to the first that is no token."""
    return list(takewhile(lambda token: token != NO_TOKEN, drafts))


class DraftProposer(Protocol):
    """A draft model.

    Attributes:
        kv_spec: of one of its layers.
        num_layers: that have KV.
        takes_states: True if it takes the target's hidden states of all rows; the streams before `aux_layers` it gets
            in any case.
    """

    kv_spec: KVSpec
    num_layers: int
    takes_states: bool

    def kv_cache_data(self, cache: KVCache) -> dict[str, KVCacheTensor]:
        """KV of its layers as they find it in the forward context."""
        ...

    def propose(self, step: SampledStep) -> dict[int, list[int]]:
        """Computes the step's rows into its KV, and at most `num_drafts` drafts of each sequence."""
        ...

    def launch(self, step: LaunchedStep) -> LaunchedDrafts:
        """Likewise, without a look at a token, of a step in which no sequence that drafts has a history."""
        ...
