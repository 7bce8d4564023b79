"""Samples a step's tokens, and keeps them for the next step.

A step may be launched before the previous step's tokens have reached the host. It then takes them on the device, where
it also learns how many drafts of that step were right, and so the positions of its own rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from common.limits import MOST_FORCED
from kernels.interface import KernelBackend, SampleParams
from kernels.no_token import NO_TOKEN
from kernels.penalties import Penalties
from kernels.upload import to_device
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput, TokenHistory
from worker.grammars import Grammars
from worker.model.grammar_masks import COMPLETE, NOT_CONFINED, Confined, GrammarMasks
from worker.model.kv_digests import KvDigests
from worker.model.layers.classifier import Classifier
from worker.model.logit_adjustments import SeenTokens
from worker.model.logit_masks import LogitMasks
from worker.model.logprobs import LOGIT_ROWS, Rows, TokenLogprobsMaker
from worker.model.pooling import Pooled, begin_pooling
from worker.model.sampled_rows import SampledRows
from worker.model.speculation.draft_proposer import LaunchedDrafts
from worker.model.speculation.rejection_sampler import RejectionSampler, SpecDecodeMetadata, VerifiedDrafts

Ints = npt.NDArray[np.int64]
# Waits for digests of logits, by row.
Digests: TypeAlias = Callable[[], dict[int, int]]
# Begins to copy int64 numbers to the host; the result waits for them.
Fetch: TypeAlias = Callable[[torch.Tensor], Callable[[], list[int]]]
_NONE_LATE: Final[Mapping[int, int]] = MappingProxyType({})


class SampledTokens:
    """The tokens of a step: on the device at once, on the host when they have arrived.

    Args:
        rows: the sampled rows.
        ids: int64 [R], of the rows, on the device.
        token_ids: int64 [T], on the device, of all rows of the step.
        fetch: begins to copy int64 numbers to the host.
        digests: waits for digests of logits; None if no request wants them.
        logprobs: waits for logprob rows; None if no request wants them.
        given: waits for logprob rows of prompt tokens, each for some sequences.
        kv_digests: waits for digests of KV blocks; None without any.
        pooled: waits for pooled hidden states; None without embedded sequences.
        constraint_ends: by row, as in ScheduledBatchOutput.
        slow_constraints: as in ScheduledBatchOutput.

    Attributes:
        place: index of each sequence among the F sampled ones.
    """

    def __init__(
        self,
        rows: SampledRows,
        ids: torch.Tensor,
        token_ids: torch.Tensor,
        fetch: Fetch,
        digests: Digests | None = None,
        logprobs: Rows | None = None,
        given: Many[Rows] = (),
        kv_digests: KvDigests | None = None,
        pooled: Pooled | None = None,
        constraint_ends: dict[int, str] | None = None,
        slow_constraints: dict[int, float] | None = None,
    ) -> None:
        self.ids = ids
        self._slow_constraints = slow_constraints
        self._token_ids = token_ids
        self._constraint_ends = constraint_ends
        self._digests = digests
        self.place = dict(zip(rows.seq_ids, range(len(rows.seq_ids)), strict=True))
        self._rows = rows
        self._drafts: torch.Tensor | None = None
        # Waits for drafts made on the device, given each sequence's accepted tokens.
        self._launched: Callable[[dict[int, tuple[int, ...]]], dict[int, list[int]]] | None = None
        # The host cannot compare drafts that it does not know.
        self._fetched = fetch(ids if rows.metadata.are_known else torch.cat((ids, self.num_rejected)))
        self._logprobs = logprobs
        self._given = given
        self._kv_digests = kv_digests
        self._pooled = pooled

    @cached_property
    def output(self) -> ScheduledBatchOutput:
        """Waits for the output; two threads may call it at once."""
        rows = self._rows
        tokens = self._accepted_tokens(rows.metadata, self._fetched())
        output = ScheduledBatchOutput(
            dict(zip(rows.seq_ids, tokens, strict=True)), slow_constraints=self._slow_constraints
        )
        if self._launched is not None:
            output.draft_token_ids = self._launched(output.token_ids)
        if self._digests is not None:
            output.logit_digests = self._digests_of(output, self._digests())
        if self._kv_digests is not None:
            output.kv_digests = self._kv_digests()
        if self._logprobs is not None:
            made = self._logprobs()
            output.logprobs = {
                seq_id: b"".join(made[row] for row in own) for seq_id, own in self._accepted(output) if own[0] in made
            }
        if self._given:
            output.target_logprobs = dict(chain.from_iterable(rows().items() for rows in self._given))
        if self._pooled is not None:
            output.pooled = self._pooled()
        if self._constraint_ends:
            # Drafts after a wrong one do not count.
            last = {seq_id: own[-1] for seq_id, own in self._accepted(output)}
            output.constraint_ends = {
                seq_id: self._constraint_ends[row] for seq_id, row in last.items() if row in self._constraint_ends
            }
        return output

    @staticmethod
    def _accepted_tokens(metadata: SpecDecodeMetadata, fetched: list[int]) -> list[tuple[int, ...]]:
        if metadata.are_known:
            return RejectionSampler().accept(metadata, fetched)
        count = len(fetched) - len(metadata.num_draft_tokens)
        return RejectionSampler().accepted(metadata, fetched[:count], np.array(fetched[count:], np.int64))

    @cached_property
    def _verified(self) -> VerifiedDrafts:
        rows = to_device(self._rows.draft_rows, self.ids.device)
        return RejectionSampler().verify(self._rows.metadata, self.ids, self._token_ids.index_select(0, rows))

    @property
    def newest(self) -> torch.Tensor:
        """int64 [F], on the device: each sequence's newest token, after its right drafts."""
        return self._verified.newest if len(self._rows.metadata.draft_token_ids) else self.ids

    @property
    def num_rejected(self) -> torch.Tensor:
        """int64 [F], on the device: number of wrong drafts of each sequence."""
        return self._verified.num_rejected

    @property
    def drafts(self) -> torch.Tensor:
        """int64 [F, k], on the device: drafts made after the newest tokens; any id where there is none.

        A proposer on the device sets them. Drafts made on the host are taken from the output.
        """
        if self._drafts is None:
            made = self.output.draft_token_ids or {}
            drafts = np.zeros((len(self.place), max(map(len, made.values()), default=0)), np.int64)
            for seq_id, own in made.items():
                drafts[self.place[seq_id], : len(own)] = own
            self._drafts = to_device(drafts, self.ids.device)
        return self._drafts

    @drafts.setter
    def drafts(self, drafts: torch.Tensor) -> None:
        self._drafts = drafts

    def take_drafts(self, drafts: LaunchedDrafts, fetch: Fetch) -> None:
        """Takes the drafts that were made on the device after these tokens."""
        seq_ids = self._rows.seq_ids
        fetched = fetch(drafts.token_ids.flatten()) if drafts.counts else list
        self.drafts = drafts.token_ids
        self._launched = lambda tokens: drafts.behind(seq_ids, tokens, fetched())

    def _accepted(self, output: ScheduledBatchOutput) -> Iterator[tuple[int, range]]:
        """The rows of each sequence whose tokens count."""
        for (seq_id, tokens), run in zip(output.token_ids.items(), self._rows.rows_of.values(), strict=True):
            yield seq_id, run[: len(tokens)]

    def _digests_of(self, output: ScheduledBatchOutput, digests: dict[int, int]) -> dict[int, dict[int, int]]:
        positions = self._rows.positions
        found = {
            seq_id: {int(positions[row]): digests[row] for row in own if row in digests}
            for seq_id, own in self._accepted(output)
        }
        return {seq_id: own for seq_id, own in found.items() if own}


class Sampler:
    """Samples the rows of logits of one rank.

    Args:
        kernels: sample.
        eos_token_ids: ids that a sequence may not have before its `min_tokens`, and may have whatever ids it is
            allowed.
        fetches: True if the host wants the tokens as soon as possible: on the rank that answers. Other ranks need them
            only for penalties and grammars, and wait then.
        grammars: compiled grammars; None if no sequence can have one.

    Attributes:
        last: the tokens of the last step.
        waits_for_tokens: True if these may still be on their way to the host when the next step is launched.
    """

    def __init__(
        self,
        kernels: KernelBackend,
        eos_token_ids: frozenset[int],
        *,
        fetches: bool,
        grammars: Grammars | None = None,
    ) -> None:
        self._sampling = kernels.sampling
        self._kernels = kernels
        self._fetches = fetches
        self._seen = SeenTokens()
        self._masks = LogitMasks(eos_token_ids)
        self._grammars = None if grammars is None else GrammarMasks(grammars, self._masks, eos_token_ids)
        # Ends of the last sampled step; below, histories by index in the batch.
        self._constraint_ends: dict[int, str] = {}
        # One thread, because only one step at a time may change the states of grammars.
        self._threads = ThreadPoolExecutor(1, "masks")
        # The step that is computing, its histories by row, and their masks.
        self._begun: tuple[ScheduledBatch, dict[int, TokenHistory], Future[Confined]] | None = None
        # Histories of that step, by index in the batch.
        self._confined: dict[int, TokenHistory] = {}
        self._logprobs = TokenLogprobsMaker(kernels.sampling, kernels.device)
        self.waits_for_tokens = kernels.device.type != "cpu"
        self.last = self.keep(SampledRows.of(ScheduledBatch({}, [], 0)), self.no_ids(), self.no_ids())

    @property
    def _fetch(self) -> Fetch:
        return self._sampling.fetch if self._fetches else _fetch_when_asked

    def no_ids(self, count: int = 0) -> torch.Tensor:
        """int64 [count]: placeholder tokens of final rows that are not sampled."""
        return torch.zeros(count, dtype=torch.int64, device=self._kernels.device)

    def keep(
        self,
        rows: SampledRows,
        ids: torch.Tensor,
        token_ids: torch.Tensor,
        digests: Digests | None = None,
        logprobs: Rows | None = None,
        given: Many[Rows] = (),
        kv_digests: KvDigests | None = None,
        pooled: Pooled | None = None,
    ) -> SampledTokens:
        """Stores a step's tokens for the next step, and what is output with them."""
        ends, self._constraint_ends = self._constraint_ends, {}
        slow = None if self._grammars is None else self._grammars.take_slow()
        self.last = SampledTokens(
            rows, ids, token_ids, self._fetch, digests, logprobs, given, kv_digests, pooled, ends, slow
        )
        return self.last

    def keep_drafts(self, drafts: LaunchedDrafts) -> None:
        """Stores the drafts made after the last step's tokens, for the next step and for the output."""
        self.last.take_drafts(drafts, self._fetch)

    def begin(self, batch: ScheduledBatch, rows: SampledRows) -> None:
        """Starts the slow host work of a step before its computation: compiling grammars, and masks of the rows.

        Masks that need tokens still on their way are made when these arrive, while the device computes.
        """
        self._begun, self._confined = None, {}
        if self._grammars is None or not any(history.params.grammar for history in batch.histories.values()):
            return
        self._grammars.begin(batch.histories)
        if not self.waits_for_tokens:
            histories, _ = self._histories(batch, rows)
            if self._grammars.are_quick(histories):
                masks: Future[Confined] = Future()
                masks.set_result(self._grammars.confined(histories))
            else:
                masks = self._threads.submit(self._grammars.confined, histories)
            self._begun = batch, histories, masks

    def confined_drafts(self, histories: Mapping[int, TokenHistory]) -> Confined:
        """Grammar masks for rows that a draft model draws after the tokens of the last step.

        Args:
            histories: token histories by row of the draft model's logits.
        """
        return NOT_CONFINED if self._grammars is None else self._grammars.ahead(histories)

    def end_complete(self, batch: ScheduledBatch) -> None:
        """Ends sequences whose grammars allow nothing after the last step's tokens, if these are on the host already.

        Otherwise the next step is launched anyway and finds out; to know earlier, steps would have to wait for the
        device.
        """
        if self._fetches and self._confined and not self.waits_for_tokens:
            self._end_complete(batch, self.last.output, self._confined)

    def later_ends(self, batch: ScheduledBatch) -> Callable[[ScheduledBatchOutput], ScheduledBatchOutput]:
        """A function that ends full sequences with complete grammars, once the last step's output is there.

        No later step would do it, because a full sequence has none.
        """
        confined = self._confined if self._fetches and self.waits_for_tokens else {}

        def with_ends(output: ScheduledBatchOutput) -> ScheduledBatchOutput:
            drawn = {i: len(output.token_ids.get(batch.req_ids[i], ())) for i in confined}
            full = {i: own for i, own in confined.items() if own.num_output + drawn[i] >= own.params.max_tokens}
            self._end_complete(batch, output, full)
            return output

        return with_ends

    def _end_complete(
        self, batch: ScheduledBatch, output: ScheduledBatchOutput, confined: dict[int, TokenHistory]
    ) -> None:
        for i, history in confined.items():
            tokens = output.token_ids.get(seq_id := batch.req_ids[i], ())
            if tokens and tokens[-1] != NO_TOKEN and self._grammars and self._grammars.completes(history, tokens):
                output.constraint_ends = {**(output.constraint_ends or {}), seq_id: COMPLETE}

    def forced(self, batch: ScheduledBatch) -> dict[int, tuple[int, list[int]]]:
        """Tokens of forced grammar text after the last step's tokens, by sequence, with the position of the first.

        If the step's own tokens may still be on their way, the text starts after the tokens known before it.
        """
        if self._grammars is None or not self._confined:
            return {}
        found, known = {}, None if self.waits_for_tokens else self.last.output.token_ids
        for i, history in self._confined.items():
            drawn = () if known is None else known.get(batch.req_ids[i], (NO_TOKEN,))
            own = history.params.num_drafts
            most = MOST_FORCED if own is None else min(own, MOST_FORCED)
            if most and NO_TOKEN not in drawn and (run := self._grammars.forced(history, drawn)):
                first = history.begin + history.num_output + len(drawn)
                found[batch.req_ids[i]] = first, run[: most + (not drawn)]
        return found

    def digests(self, batch: ScheduledBatch, rows: SampledRows, logits: torch.Tensor) -> Digests | None:
        """Begins the digests of rows of logits that requests want, before sampling changes them.

        On a GPU the rows are copied on the device, and hashed on the host when their tokens have arrived.
        """
        if not (batch.digested and self._fetches):
            return None
        wanted = [
            row for i in batch.digested for row in rows.rows_of[i] if batch.is_digested(i, int(rows.positions[row]))
        ]
        if not self.waits_for_tokens:
            digests = {row: xxhash.xxh3_64_intdigest(logits[row].numpy().data) for row in wanted}
            return lambda: digests
        copied = logits.index_select(0, to_device(np.array(wanted, np.int64), self._kernels.device))
        return lambda: {
            row: xxhash.xxh3_64_intdigest(values.data) for row, values in zip(wanted, copied.cpu().numpy(), strict=True)
        }

    def pooled(self, batch: ScheduledBatch, hidden: torch.Tensor, classifier: Classifier | None) -> Pooled | None:
        """Begins to pool the hidden states [T, H] of embedded sequences, on the rank that answers."""
        return begin_pooling(batch, hidden, classifier) if batch.pooled and self._fetches else None

    def given_logprobs(self, batch: ScheduledBatch, logits: Callable[[slice], torch.Tensor]) -> list[Rows]:
        """Begins the logprobs of `batch.targets`, on the rank that answers.

        Args:
            batch: of the step.
            logits: float32 logits of a slice of the rows before the targets; the other ranks compute them too.
        """
        begun: list[Rows] = []
        first = 0
        for i, targets in batch.targets.items():
            starts = range(0, len(targets), LOGIT_ROWS)
            runs = [(first + start, targets[start : start + LOGIT_ROWS]) for start in starts]
            first += len(targets)
            parts = ((logits(slice(start, start + len(run))), run) for start, run in runs)
            if self._fetches:
                begun.append(self._logprobs.given(batch.req_ids[i], batch.columns.logprob_params[i], parts))
            else:
                deque(parts, maxlen=0)
        return begun

    def with_late_tokens(self, batch: ScheduledBatch, token_ids: torch.Tensor, starts: Ints) -> torch.Tensor:
        """`token_ids` with the tokens sampled by the last step and the drafts made after them, without leaving the
        device.

        Args:
            batch: of the step.
            token_ids: int64 [T], written to.
            starts: int64 [S], each sequence's first row.
        """
        late = batch.late_rows
        if late:
            places = np.array([self.last.place[batch.req_ids[i]] for i in late], np.int64)
            rows, places_there = to_device(np.stack((starts[late], places)), self._kernels.device)
            # NO_TOKEN has no embedding. Its sequence ends, so the value does not matter.
            token_ids.index_copy_(0, rows, self.last.newest.index_select(0, places_there).clamp(min=0))
            if batch.scheduled_spec_decode_tokens:
                wanted = np.array(batch.num_scheduled_tokens, np.int64)[late] - 1
                self._write_late_drafts(token_ids, starts[late] + 1, places, wanted)
        return token_ids

    def _write_late_drafts(self, token_ids: torch.Tensor, first_rows: Ints, places: Ints, wanted: Ints) -> None:
        """Writes the drafts of the last step into `token_ids`, as far as they exist.

        Args:
            token_ids: int64 [T].
            first_rows: int64 [L], first row of each sequence's drafts.
            places: int64 [L], index of these sequences in the last step.
            wanted: int64 [L], drafts of each.
        """
        if not wanted.any():
            return
        drafts = self.last.drafts
        counts = np.minimum(wanted, drafts.shape[1])
        own = np.repeat(np.arange(len(counts)), counts)
        offsets = np.arange(len(own)) - (np.cumsum(counts) - counts)[own]
        cells = np.stack((first_rows[own] + offsets, places[own] * drafts.shape[1] + offsets))
        rows, cells_there = to_device(cells, self._kernels.device)
        token_ids.index_copy_(0, rows, drafts.flatten().index_select(0, cells_there).clamp(min=0))

    def num_rejected(self, batch: ScheduledBatch) -> torch.Tensor:
        """int64 [S], on the device: number of each sequence's drafts in flight that were wrong."""
        in_flight = batch.drafts_in_flight
        places = [self.last.place[seq_id] if seq_id in in_flight else -1 for seq_id in batch.req_ids]
        there = to_device(np.array(places, np.int64), self._kernels.device)
        return torch.where(there < 0, 0, self.last.num_rejected.index_select(0, there.clamp(min=0)))

    def _histories(self, batch: ScheduledBatch, rows: SampledRows) -> tuple[dict[int, TokenHistory], dict[int, int]]:
        """Histories of the rows that have any; and for some, the place of their newest token in the last step.

        On a CPU that token is on the host already, and in the history; on other devices nothing waits for it.
        """
        late = [i for i in batch.histories if batch.from_last_output[i]]
        known = batch.histories
        if late and not self.waits_for_tokens:
            known, late = batch.token_histories(self.last.output), []
        elif late and any(known[i].params.grammar for i in late):
            # Masks are made on the host, so a row with a mask waits for its token, like the step that outputs it.
            come = batch.token_histories(self.last.output)
            known = {i: come[i] if history.params.grammar else history for i, history in known.items()}
            late = [i for i in late if not known[i].params.grammar]
        self._confined = {i: history for i, history in known.items() if history.params.grammar}
        places = {rows.rows_of[i][0]: self.last.place[batch.req_ids[i]] for i in late}
        return rows.histories(batch, known), places

    def _penalties(self, histories: dict[int, TokenHistory], late: Mapping[int, int]) -> Penalties | None:
        """Penalties of the rows; None without any."""
        penalized = {row: history for row, history in histories.items() if history.params.penalized}
        newest = self._newest([late.get(row, -1) for row in penalized]) if late else None
        return self._seen.penalties(penalized, newest)

    def _newest(self, places: list[int]) -> torch.Tensor:
        """int64 [R], on the device: the last step's tokens at these places, NO_TOKEN for a negative place."""
        there = to_device(np.array(places, np.int64), self._kernels.device)
        return torch.where(there < 0, NO_TOKEN, self.last.newest.index_select(0, there.clamp(min=0)))

    def draw(self, batch: ScheduledBatch, rows: SampledRows, logits: torch.Tensor) -> tuple[torch.Tensor, Rows | None]:
        """Samples the rows, and makes the wanted logprob rows of the tokens on the rank that answers."""
        if not (self._fetches and batch.columns.samples_logprobs):
            return self.sample(batch, rows, logits), None
        wanted = {
            row: batch.columns.logprob_params[i]
            for row, i in enumerate(rows.sequences.tolist())
            if i in batch.columns.logprob_params and batch.columns.logprob_params[i].logprobs is not None
        }
        if not wanted:
            return self.sample(batch, rows, logits), None
        asked = self._logprobs.ask(wanted, logits)
        ids = self.sample(batch, rows, logits)
        return ids, self._logprobs.sampled(asked, logits, ids)

    @torch.inference_mode()
    def sample(self, batch: ScheduledBatch, rows: SampledRows, logits: torch.Tensor) -> torch.Tensor:
        """int64 [R]: the sampled tokens of the rows."""
        if not len(rows):
            return self.no_ids()
        if self._begun is None or self._begun[0] is not batch:
            (histories, late), confined = self._histories(batch, rows), None
        else:
            (_, histories, masks), self._begun = self._begun, None
            late, confined = {}, masks.result()
        return self.sample_rows(
            batch, rows.sequences, rows.positions, logits, histories, late, confined, num_rejected=rows.num_rejected
        )

    def sample_rows(
        self,
        batch: ScheduledBatch,
        own: Ints,
        positions: Ints,
        logits: torch.Tensor,
        histories: dict[int, TokenHistory],
        late: Mapping[int, int] = _NONE_LATE,
        confined: Confined | None = None,
        num_rejected: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """int64 [R]: the sampled tokens of any rows.

        Args:
            batch: has their sequences.
            own: int64 [R], index of each row's sequence in the batch.
            positions: int64 [R], absolute positions of the tokens.
            logits: float32 [R, V], changed.
            histories: by row, if they change logits.
            late: place of the newest token in the last step, of rows whose history lacks it.
            confined: masks of grammars, if made already.
            num_rejected: int64 [R] on the device, subtracted from the positions; None for zeros.
        """
        self._masks.forget(histories)
        size = logits.shape[1]
        if confined is None:
            confined = self._grammars.confined(histories) if self._grammars is not None and histories else NOT_CONFINED
        allowed, ended = confined
        sampling = batch.sampling
        params = SampleParams(
            temperature=sampling.temperature[own],
            top_k=sampling.top_k[own],
            top_p=sampling.top_p[own],
            min_p=sampling.min_p[own],
            masked=self._masks.masked(histories, late, self._newest, size),
            penalties=self._penalties(histories, late),
            biased=self._masks.biased(histories, size),
            allowed=self._masks.allowed(histories, size),
            confined=allowed,
        )
        ids = self._sampling.sample(
            logits,
            params,
            seeds=sampling.seeds[own],
            positions=positions,
            choices=sampling.choices[own],
            num_rejected=num_rejected,
        )
        return self._without_ended(ids, ended)

    def _without_ended(self, ids: torch.Tensor, ended: dict[int, str]) -> torch.Tensor:
        """`ids` with NO_TOKEN in the rows whose grammar has ended; stores the reasons for `keep`."""
        self._constraint_ends = ended
        if ended:
            ids.index_fill_(0, to_device(np.array(list(ended), np.int64), self._kernels.device), NO_TOKEN)
        return ids


def _fetch_when_asked(numbers: torch.Tensor) -> Callable[[], list[int]]:
    return numbers.tolist
