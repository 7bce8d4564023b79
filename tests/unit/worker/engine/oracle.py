"""A brute-force oracle of the engine: it watches a Scheduler from outside, executes its batches naively, and objects.

It shares no code with the scheduler, the block manager or the simulated runner; it sees only what they show: the
batch's columns, the sequences' fields, the outputs. The "model" is a pure function of the tokens so far, the salt, the
seed and the position, so that the one stream a sequence can have is known before it runs (`Truth`), whatever is cut,
cached, preempted, drafted, late or discarded. Every slot of the KV cache holds the hash of the whole prefix that was
computed into it (a polynomial over a prime field, root salted), so a slot tells which token at which position behind
which prefix it belongs to.

An AssertionError names what is wrong. Batches execute in the order in which they are scheduled, as on a stream.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from copy import copy
from itertools import chain

from common.config import MIXED, Config
from common.limits import MAX_HOLD_S
from kernels.no_token import NO_TOKEN
from tests.unit.worker.engine.oracle_execution import Execution
from tests.unit.worker.engine.oracle_records import (
    COLUMNS,
    Cache,
    Flight,
    Life,
    Row,
    blocks_in,
    check_totals,
    num_rejected,
    rank,
    rows_in_flight,
    tail_in,
)
from tests.unit.worker.engine.speculation.truth import TokenModel, Truth
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.outputs import RequestOutput
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import EndReason, Priority, Sequence, SequenceStatus


class Oracle:
    """Watches one Scheduler.

    Args:
        scheduler: under test, new.
        config: its configuration.
        model: the token function.
        knows_hits: whether prefix hits can be foreseen; not when hashes collide on purpose.
    """

    def __init__(self, scheduler: Scheduler, config: Config, model: TokenModel, *, knows_hits: bool = True) -> None:
        self.scheduler = scheduler
        self.config = config
        self.model = model
        self.size, self.pool = config.kv_cache_block_size, config.num_kvcache_blocks
        self.max_model_len = config.max_model_len or self.pool * self.size
        spec = config.speculative_config
        self.k = spec.num_speculative_tokens if spec else 0
        self.caching = config.enable_prefix_caching
        self.cache = Cache() if self.caching and knows_hits else None
        self.lives: dict[int, Life] = {}
        self.all: list[Life] = []
        self.flights: deque[Flight] = deque()
        self.execution = Execution(self.size, self.pool, self.k, model)
        self.last_prompt_latency = 0.0
        self.num_batches = self.num_prefill_steps = self.num_preemptions = self.num_admissions = 0
        self.num_drafts = self.num_accepted = 0
        self._now = 0.0
        # Cost of attention to a token when the last step was scheduled, and what its prompts might cost.
        self._weight, self._most_cost = 0.0, math.inf
        self._preempts = False
        self._held: set[int] = set()
        # Tokens that prompts have for certain in a mixed step, and the decodes that the last one left out for them.
        self._share = scheduler.limits.min_prefill_tokens
        self._left_out: set[int] = set()
        # When the last holder of a block has left, in no unit.
        self._released: dict[int, int] = {}
        self._num_releases = 0
        self._gated: list[Life] = []
        self._places: dict[int, int] = {}
        self._queues: dict[Priority, list[Life]] = {p: [] for p in sorted(Priority, reverse=True)}

    # What happens to sequences between steps.

    def entered(self, seq: Sequence, *, gated: bool, outputs: list[RequestOutput]) -> None:
        """Records a new sequence; `outputs` holds its end if an earlier attempt had already reached one (S5)."""
        assert seq.id not in self.lives, f"sequence {seq.id} is taken twice"
        truth = Truth(seq, self.model, self.max_model_len, self.config)
        life = Life(seq, truth, len(seq), len(seq), gated)
        self.all.append(life)
        if truth.end == len(seq):
            self._expect_end(life, outputs, [], truth.finish_reason, truth.end_reason)
            return
        assert not outputs, f"{outputs} for a sequence that has just come"
        self.lives[seq.id] = life
        (self._gated if gated else self._queues[seq.priority]).append(life)

    def aborted(self, seq_id: int, done: bool, outputs: list[RequestOutput], reason: EndReason) -> None:
        """`abort` has returned `done` and left `outputs`."""
        life = self.lives.pop(seq_id, None)
        assert done is (life is not None), f"abort({seq_id}) says {done}"
        if life is None:
            assert not outputs, f"{outputs} of a sequence that had ended"
            return
        if life.computed is None:
            (self._gated if life.gated else self._queues[life.seq.priority]).remove(life)
        self._expect_end(life, outputs, [], "aborted", reason)

    def preempted(self, life: Life) -> None:
        """Records a `preempt` call between two steps. Steps in flight still deliver their tokens."""
        assert life.seq.status is SequenceStatus.WAITING
        self.num_preemptions += 1
        self._wait_in_front(life)

    def _wait_in_front(self, life: Life) -> None:
        self._release(life.table)
        life.computed, life.table, life.drafts, life.prefilling = None, [], [], False
        self._queues[life.seq.priority].insert(0, life)

    def _release(self, blocks: Iterable[int]) -> None:
        self._num_releases += 1
        for block in blocks:
            self._released[block] = self._num_releases

    def _expect_end(
        self, life: Life, outputs: list[RequestOutput], tokens: list[int], finish: str, reason: EndReason
    ) -> None:
        assert len(outputs) == 1, f"{len(outputs)} outputs at the end of sequence {life.seq.id}"
        out = outputs[0]
        assert (out.request_id, list(out.output_tokens), out.finished) == (life.seq.id, tokens, True), out
        assert (out.finish_reason, out.end_reason) == (finish, reason), f"{out}, not {finish}"
        assert life.seq.status is SequenceStatus.FINISHED
        life.ended, life.computed, life.table = True, None, []

    # Scheduling.

    def before_schedule(self, now: float) -> None:
        """Call before `schedule(now)`."""
        self._now = now
        self._weight, budget = self.scheduler.meter.context_cost.weight, self.config.max_num_batched_tokens
        decodes = any(life.computed is not None and not life.prefilling for life in self.lives.values())
        self._most_cost = self._cost(0, budget) if decodes else math.inf
        self._open_gate(now)
        order = chain.from_iterable(self._queues.values())
        self._places = {life.seq.id: i for i, life in enumerate(order)}

    def _open_gate(self, now: float) -> None:
        """The gate's rule, once for all that wait."""
        factor = self.config.scheduler_delay_factor
        if not self._gated:
            return
        running = any(life.computed is not None for life in self.lives.values())
        age = now - min(life.seq.arrive_time for life in self._gated)
        if factor <= 0 or not running or age > min(factor * self.last_prompt_latency, MAX_HOLD_S):
            for life in self._gated:
                life.gated = False
                self._queues[life.seq.priority].append(life)
            self._gated = []

    def scheduled(self, step: tuple[ScheduledBatch, dict[int, Sequence]] | None) -> Flight | None:
        """`schedule` has returned `step`: checks every decision, then executes the batch."""
        victims = self._take_victims()
        self._preempts = bool(victims)
        if step is None:
            assert self.flights or not self.lives, "there is work, and no step"
            assert not self._admitted(), "a sequence is admitted to no step"
            assert not self._decodable(), "a decode is left out"
            self._check_diligence(self.config.max_num_batched_tokens, None, bool(victims))
            return None
        # The step itself makes its columns when it is asked, which is later.
        batch, seqs = copy(step[0]), step[1]
        self._check_columns(batch, seqs)
        newcomers = self._admitted()
        unfinished = sum(life.known - life.start for life in self.lives.values() if life.prefilling)
        assert not (victims and newcomers), "a newcomer in a step that preempts"
        decoding = self._decodable()
        flight = Flight(step[0], batch, seqs, [], set(), self.execution.last_output, ScheduledBatchOutput({}))
        for i, seq_id in enumerate(batch.req_ids):
            self._add_row(flight, i, self.lives[seq_id])
        # Blocks for drafts are taken when every row has its own, those for drafts to come when every draft has.
        for row in flight.rows:
            self._grow(row.life, row.table, row.end + row.num_rejected)
        for row in flight.rows:
            self._grow(row.life, row.table, math.inf)
        self._check_order(flight, newcomers)
        check_totals(batch, flight.rows, self.config.max_num_batched_tokens)
        running = sum(life.computed is not None for life in self.lives.values())
        assert running <= self.config.max_num_seqs, f"{running} sequences run"
        self._check_phase(flight, decoding, bool(victims))
        self._check_cost(flight.rows)
        if self.config.scheduling_policy == MIXED:
            self._check_share(flight.rows, unfinished)
        self._check_writes(flight)
        self.execution.step(flight)
        self.flights.append(flight)
        self.num_batches += 1
        return flight

    def _take_victims(self) -> list[Life]:
        """Sequences that `schedule` has preempted, in the order of their admission."""
        running = [life for life in self.lives.values() if life.computed is not None]
        victims = [life for life in running if life.seq.status is not SequenceStatus.RUNNING]
        self.num_preemptions += len(victims)
        assert self.num_preemptions == self.scheduler.lifecycle.num_preemptions, "a preemption that does not show"
        if victims:
            survivors = [life for life in running if life.seq.status is SequenceStatus.RUNNING]
            victims.sort(key=rank)
            assert survivors, "the oldest running sequence is preempted"
            assert max(map(rank, survivors)) < rank(victims[0]), "a victim is not the newest of the lowest class"
            self._check_need(victims[0], survivors)
        for life in reversed(victims):
            self._wait_in_front(life)
        return victims

    def _check_need(self, last: Life, survivors: list[Life]) -> None:
        """Without the last victim's blocks a survivor or the victim itself would have had too few."""
        kept = set(chain.from_iterable(life.table for life in survivors))
        freed = sum(block not in kept for block in last.table)
        own_need = max(0, -(-(last.start + 1) // self.size) - len(last.table))
        free = self.scheduler.block_manager.num_free_blocks
        assert free < freed + own_need, f"sequence {last.seq.id} is preempted without need"

    def _admitted(self) -> list[Life]:
        return [
            life for life in self.lives.values() if life.computed is None and life.seq.status is SequenceStatus.RUNNING
        ]

    def _decodable(self) -> list[Life]:
        """Running sequences that any step of decodes must contain."""
        return [
            life
            for life in self.lives.values()
            if life.computed is not None
            and not life.prefilling
            and (not life.num_inflight or not (life.awaited or self._waits(life)))
        ]

    def _ends_foreseeably(self, life: Life, wrong: int = 0) -> bool:
        """Whether the last token of the sequence is known or in flight if `wrong` drafts in flight are wrong."""
        most = life.seq.num_prompt_tokens + life.seq.sampling_params.max_tokens
        return life.known + wrong >= min(most, self.max_model_len)

    def _waits(self, life: Life) -> bool:
        """Whether a sequence that needs no output may still wait: it may end or need a block, if all its drafts in
        flight are right."""
        wrong, drafts = self._wrong(life), any(row.drafts for row in rows_in_flight(self.flights, life))
        return self._ends_foreseeably(life, wrong) or (drafts and life.start + wrong >= len(life.table) * self.size)

    def _wrong(self, life: Life) -> int:
        return num_rejected(self.flights, life)

    def _check_columns(self, batch: ScheduledBatch, seqs: dict[int, Sequence]) -> None:
        ids = list(batch.req_ids)
        assert 0 < len(set(ids)) == len(ids), f"a step of {ids}"
        assert list(seqs) == ids, "the batch's sequences are not its rows"
        assert all(seqs[i] is self.lives[i].seq for i in ids), "a row of a sequence that is not live"
        assert len(ids) <= self.config.max_num_seqs, f"{len(ids)} rows"
        assert not batch.is_dummy_run
        drafts = batch.scheduled_spec_decode_tokens
        assert batch.num_spec_step == max(map(len, drafts.values()), default=0) <= self.k
        assert {*drafts, *batch.drafts_wanted} <= set(ids)

    def _add_row(self, flight: Flight, i: int, life: Life) -> None:
        batch, seq = flight.shown, life.seq
        start, count, end = batch.num_computed_tokens[i], batch.num_scheduled_tokens[i], batch.context_lens[i]
        table, shown = list(seq.block_table), -(-end // self.size)
        assert list(batch.block_tables[i]) == table[:shown], f"sequence {seq.id}: other blocks in the batch"
        assert batch.last_block_num_tokens[i] == (end - 1) % self.size + 1
        in_flight = sum(len(row.drafts) for row in rows_in_flight(self.flights, life))
        assert batch.drafts_in_flight.get(seq.id, 0) == in_flight, (
            f"sequence {seq.id}: not {in_flight} drafts in flight"
        )
        wrong = self._wrong(life)
        if life.computed is None:
            self._admit(flight, life, batch.num_cached_tokens[i], table)
            life.first_scheduled = self._now if life.first_scheduled is None else life.first_scheduled
        else:
            self._grow(life, table, start + 1)
        start, end = start - wrong, end - wrong
        assert start == life.computed, f"sequence {seq.id}: its row begins at {start}, not {life.computed}"
        assert 1 <= count == end - start, f"sequence {seq.id}: {count} tokens from {start} to {end}"
        drafts = list(batch.scheduled_spec_decode_tokens.get(seq.id, []))
        if drafts and batch.from_last_output[i]:
            assert drafts == [NO_TOKEN] * len(drafts), f"sequence {seq.id}: drafts {drafts} behind a late token"
            drafts = self.execution.late_drafts(seq.id, len(drafts))
        was = start, life.known, life.drafts, life.prefilling
        life.awaited = bool(drafts or seq.id in batch.drafts_wanted) and (
            life.is_steered or not self.config.deferred_output
        )
        row = Row(life, start, end, drafts, end - len(drafts) == life.known, was, life.prefilling, table, wrong)
        self._check_row(row)
        self.execution.check_tokens(flight, i, row)
        assert bool(batch.is_final[i]) is row.final, f"sequence {seq.id}: is_final {batch.is_final[i]} at {end}"
        assert (batch.sampling.seeds[i], batch.sampling.choices[i]) == (seq.seed, seq.choice)
        if life.prefilling:
            flight.computing.update(blocks_in(life, start, end, self.size))
            flight.computing.update(tail_in(self.cache, life, end, self.size))
        flight.rows.append(row)

    def _check_row(self, row: Row) -> None:
        """A row computes known tokens and drafts, and holds exactly the blocks it may need."""
        life, known = row.life, row.end - len(row.drafts)
        assert known <= life.known, f"sequence {life.seq.id}: computes {known} of {life.known} tokens"
        assert not self._ends_foreseeably(life), f"sequence {life.seq.id}: computes behind its end"
        num_slots = len(row.table) * self.size
        end = row.end + row.num_rejected
        assert num_slots >= end, f"sequence {life.seq.id}: {num_slots} slots for {end} tokens"
        # This step's drafts and those proposed after them, and the wrong drafts of an earlier step at later
        # positions.
        most = max(life.known, row.start + 1 + self.k) + self.k * (2 if self.config.deferred_output else 1)
        assert num_slots < most + self.size, f"sequence {life.seq.id}: {num_slots} slots for {most} tokens"
        if row.drafts:
            self._check_drafts(life, row.drafts, row.start)

    def _check_drafts(self, life: Life, drafts: list[int], start: int) -> None:
        made = life.drafts if not life.num_inflight else self.execution.late_drafts(life.seq.id, len(drafts))
        most = min(life.seq.num_prompt_tokens + life.seq.sampling_params.max_tokens, self.max_model_len)
        assert start == life.known - 1, f"sequence {life.seq.id}: drafts in its prompt"
        assert not life.prefilling, f"sequence {life.seq.id}: drafts in a visit's first row"
        assert drafts == made[: len(drafts)], f"sequence {life.seq.id}: drafts {drafts}, not {made}"
        assert life.known + len(drafts) < most, f"sequence {life.seq.id}: drafts behind its end"

    def _admit(self, flight: Flight, life: Life, cached: int, table: list[int]) -> None:
        seq = life.seq
        assert not life.gated, f"sequence {seq.id} passes the gate"
        assert not life.num_inflight, f"sequence {seq.id} is admitted with a token in flight"
        assert seq.num_tokens == life.known == life.delivered, f"sequence {seq.id}: {seq.num_tokens} of {life.known}"
        assert 0 <= cached < life.known, f"sequence {seq.id}: {cached} tokens cached"
        assert cached % self.size == 0 or cached == life.known - 1
        assert self.caching or not cached
        hits = cached // self.size
        copies = [pair for pair in flight.shown.block_copies if pair[1] in table[hits : hits + 1]]
        assert len(copies) == (cached % self.size > 0), f"sequence {seq.id}: copies {copies}"
        if self.cache is not None:
            assert self.cache.hits(life, self.size) == hits, f"sequence {seq.id}: {hits} hits"
            tail = self._tail(life, hits)
            assert [pair[0] for pair in copies] == ([] if tail is None else [tail]), f"sequence {seq.id}: not {tail}"
            found = [self.cache.block(life.truth.states[(j + 1) * self.size - 1]) for j in range(hits)]
            assert table[:hits] == found, f"sequence {seq.id}: hits {table[:hits]}, not {found}"
            self._check_follower(flight, life, hits)
        least, most = -(-life.known // self.size), -(-(life.known + self.k) // self.size)
        assert least <= len(table) <= most, f"sequence {seq.id}: {len(table)} blocks reserved"
        self._queues[seq.priority].remove(life)
        self.num_admissions += 1
        life.computed, life.published, life.serial, life.prefilling = cached, hits, self.num_admissions, True
        life.cached = cached
        life.table = table[:hits]
        self._grow(life, table, life.known)

    def _check_follower(self, flight: Flight, life: Life, hits: int) -> None:
        """Asserts that no sequence computes a block or a tail that a step in flight, or this step, already computes.
        Prompts have a tail if they end after the first token of a block."""
        if hits < (life.known - 1) // self.size:
            state = life.truth.states[(hits + 1) * self.size - 1]
            computing = any(state in other.computing for other in [*self.flights, flight])
            assert not computing, f"sequence {life.seq.id} computes what is being computed"
        elif life.seq.shares_prompt and (life.known - 1) % self.size and self._tail(life, hits) is None:
            state = life.truth.state_before(life.known - 1)
            computing = any(state in other.computing for other in [*self.flights, flight])
            assert not computing, f"sequence {life.seq.id} computes the tail that is being computed"

    def _tail(self, life: Life, hits: int) -> int | None:
        """The partly filled block that a sequence with `hits` hits still needs, apart from its last token."""
        if self.cache is None or not life.seq.shares_prompt or hits < (life.known - 1) // self.size:
            return None
        return self.cache.tail(life.truth.state_before(life.known - 1))

    def _grow(self, life: Life, table: list[int], num_tokens: float) -> None:
        """Takes the blocks of `table` that hold `num_tokens` tokens."""
        held = len(life.table)
        assert table[:held] == life.table, f"sequence {life.seq.id}: its blocks have changed"
        life.table = table[:held]
        for block in table[held : math.ceil(min(num_tokens, len(table) * self.size) / self.size)]:
            if self.cache is not None:
                self._check_eviction(self.cache, block)
                self.cache.take(block)
            life.table.append(block)

    def _check_eviction(self, cache: Cache, block: int) -> None:
        """Empty blocks are taken first, then the blocks that were freed longest ago. In a step with a preemption the
        free blocks at that moment are unknown."""
        if block in cache and not self._preempts:
            tables = (life.table for life in self.lives.values() if life.computed is not None)
            free = set(range(self.pool)).difference(chain.from_iterable(tables))
            assert all(other in cache for other in free), f"block {block} is evicted while others hold nothing"
            oldest = min(self._released[other] for other in free)
            assert self._released[block] == oldest, f"block {block} is evicted before older ones"

    # Decisions.

    def _check_order(self, flight: Flight, newcomers: list[Life]) -> None:
        """Higher priority classes run first, FIFO within a class; only followers of a prefix in computation may be
        passed. New sequences have already left the queues."""
        assert all(life.computed is not None for life in newcomers), "a sequence is admitted to no row"
        places = [self._places[row.life.seq.id] for row in flight.rows if row.life in newcomers]
        assert places == sorted(places), "newcomers out of turn"
        for life in self._waiting() if places else []:
            if self._places[life.seq.id] < places[-1]:
                assert self.caching, f"sequence {life.seq.id} is passed"
                assert self._follows(life, flight), f"sequence {life.seq.id} is passed, and follows nobody"

    def _waiting(self) -> Iterable[Life]:
        return chain.from_iterable(self._queues.values())

    def _follows(self, life: Life, flight: Flight | None) -> bool:
        """Whether a step in flight or in the making may compute a block of a sequence that waits."""
        if self.cache is None:
            return self.caching
        blocks = [*blocks_in(life, 0, life.known, self.size)]
        if life.seq.shares_prompt:
            blocks.append(life.truth.state_before(life.known - 1))
        flights = [*self.flights, flight] if flight else self.flights
        return any(state in other.computing for other in flights for state in blocks)

    def _check_phase(self, flight: Flight, decoding: list[Life], preempted: bool) -> None:
        """Who must be in the step, given its policy."""
        rows, mixes = flight.rows, self.config.scheduling_policy == MIXED
        kinds = [row.prefill for row in rows]
        assert kinds == sorted(kinds), "prompts in front of decodes"
        assert mixes or len(set(kinds)) == 1, "prefill_first has mixed"
        had_enough = self.num_prefill_steps >= self.config.max_consecutive_prefill_steps
        present = {row.life.seq.id for row in rows}
        if mixes or not kinds[0]:
            self._check_left_out(rows, [life.seq.id for life in decoding if life.seq.id not in present], preempted)
        else:
            assert not (had_enough and decoding), "running sequences are frozen"
        if mixes or kinds[0] or not had_enough:
            used = sum(row.end - row.start for row in rows if mixes or row.prefill)
            self._check_diligence(self.config.max_num_batched_tokens - used, flight, preempted)
        self.num_prefill_steps = self.num_prefill_steps + 1 if kinds[-1] else 0

    def _check_left_out(self, rows: list[Row], left_out: list[int], preempted: bool) -> None:
        """Decodes are left out for prompts only, for no more than their share, and no decode twice in a row."""
        assert not self._left_out.intersection(left_out), "a decode is left out twice in a row"
        self._left_out = set(left_out)
        if left_out:
            assert self.config.scheduling_policy == MIXED, "a decode is left out"
            waits = any(row.prefill for row in rows) or any(life.prefilling for life in self.lives.values())
            assert waits or any(self._waiting()), "a decode is left out for nobody"
            decodes = sum(not row.prefill for row in rows)
            most = self.config.max_num_batched_tokens - self._share
            assert preempted or decodes >= most, f"a decode is left out beside {decodes} tokens of decodes"

    def _cost(self, start: int, count: int) -> float:
        """Cost of `count` tokens from `start` on, in tokens without context."""
        return count + self._weight * (count * start + count * count / 2)

    def _check_cost(self, rows: list[Row]) -> None:
        """Beside decodes, prompts cost no more than a full step of one that begins, unless they are few tokens."""
        prompts = [(row.start, row.end - row.start) for row in rows if row.prefill]
        cost = sum(self._cost(*prompt) for prompt in prompts)
        few = len(prompts) == 1 and prompts[0][1] <= math.ceil(self.config.max_num_batched_tokens / 64)
        assert few or cost <= self._most_cost * 1.0001, f"prompts cost {cost}, not {self._most_cost}"

    def _can_afford(self, start: int, flight: Flight | None) -> bool:
        """Whether the step could have computed a further prompt token at `start`."""
        rows = [row for row in flight.rows if row.prefill] if flight else []
        spent = sum(self._cost(row.start, row.end - row.start) for row in rows)
        return spent + self._cost(start, 1) <= self._most_cost * 0.9999

    def _check_share(self, rows: list[Row], unfinished: int) -> None:
        """Prompts that are being computed have their share of a mixed step, if they are not too expensive."""
        prompts = sum(row.end - row.start for row in rows if row.prefill)
        if self._weight and self._most_cost < math.inf:
            return
        assert prompts >= min(self._share, unfinished), f"{prompts} of {unfinished} prompt tokens"

    def _check_diligence(self, budget: int, flight: Flight | None, preempted: bool) -> None:
        """With budget left, every prompt that could continue or be admitted is scheduled."""
        present = {row.life.seq.id for row in flight.rows} if flight else set()
        left_out = [
            life
            for life in self.lives.values()
            if life.prefilling and life.seq.id not in present and self._can_afford(life.start, flight)
        ]
        assert not (budget and left_out), f"{budget} tokens left, and sequence {left_out[0].seq.id} does not go on"
        head = next(iter(self._waiting()), None)
        if head is None or preempted or head.num_inflight or self._follows(head, flight):
            return
        hits = self.cache.hits(head, self.size) if self.cache is not None else 0
        tables = [life.table for life in self.lives.values() if life.computed is not None]
        in_use = self.cache.num_in_use(head, hits, self.size, chain.from_iterable(tables)) if self.cache else 0
        free = self.scheduler.block_manager.num_free_blocks
        has_blocks = free >= -(-head.known // self.size) - in_use + len(tables)
        start = hits * self.size if self._tail(head, hits) is None else head.known - 1
        has_budget = head.known - start <= budget and self._can_afford(start, flight)
        is_full = len(tables) >= min(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        assert is_full or not (has_blocks and has_budget), f"sequence {head.seq.id} is not admitted"

    # Execution.

    def _check_writes(self, flight: Flight) -> None:
        """A block that is written has one holder, so that no slot is written twice either."""
        tables = (life.table for life in self.lives.values() if life.computed is not None)
        holders = Counter(chain.from_iterable(tables))
        for row in flight.rows:
            written = row.life.table[row.start // self.size : (row.end + row.num_rejected - 1) // self.size + 1]
            assert all(holders[block] == 1 for block in written), f"sequence {row.life.seq.id} writes a shared block"

    # Landing.

    def before_landing(self) -> None:
        """Call before `postprocess`: a runner may have asked the oldest flight as late as now."""
        flight = self.flights[0]
        for name in COLUMNS:
            assert getattr(flight.batch, name) == getattr(flight.shown, name), f"{name} of a step in flight has changed"

    def landed(self, now: float, finished: list[Sequence], outputs: list[RequestOutput]) -> None:
        """The oldest flight was postprocessed at `now`, which returned `finished` and left `outputs`."""
        flight, self._now = self.flights.popleft(), now
        given = {out.request_id: out for out in outputs}
        expected = [row.life for row in flight.rows if self._land_row(row, given)]
        assert [out.request_id for out in outputs] == [life.seq.id for life in expected], f"outputs of {[*given]}"
        assert finished == [life.seq for life in expected if life.ended]

    def _land_row(self, row: Row, given: dict[int, RequestOutput]) -> bool:
        """Whether the row's sequence has to have an output, with what and why."""
        life = row.life
        life.num_inflight -= 1
        if life.ended:
            return False
        tokens = row.sampled[: life.truth.end - life.delivered]
        life.delivered += len(tokens)
        if life.computed is not None:
            self._publish(row)
            if tokens and life.first_token is None:
                self._publish_tail(life, row.end - 1)
        if tokens:
            assert life.seq.id in given, f"no output of sequence {life.seq.id}"
            life.first_token = self._now if life.first_token is None else life.first_token
            self._check_output(life, given[life.seq.id], tokens)
        return bool(tokens)

    def _check_output(self, life: Life, out: RequestOutput, tokens: list[int]) -> None:
        if life.delivered < life.truth.end:
            assert (list(out.output_tokens), out.finished) == (tokens, False), f"{out}, not {tokens}"
            return
        del self.lives[life.seq.id]
        if life.computed is None:
            self._queues[life.seq.priority].remove(life)
        self._expect_end(life, [out], tokens, life.truth.finish_reason, life.truth.end_reason)
        assert life.seq.leave_time == self._now

    def _publish(self, row: Row) -> None:
        """Full blocks whose KV is written and whose tokens are final can be found; equal ones are held once."""
        life, size = row.life, self.size
        if row.drafts:
            self.num_drafts += len(row.drafts)
            self.num_accepted += len(row.sampled) - 1
        while self.cache is not None and (life.published + 1) * size <= min(row.after, life.delivered):
            j = life.published
            state, parent = life.truth.states[(j + 1) * size - 1], life.truth.state_before(j * size)
            present = self.cache.block(state)
            if present is None:
                self.cache.publish(state, parent, life.table[j])
            else:
                # Even if the sequence ends at once: then the block is released again.
                life.table[j] = present
                self._held.add(present)
            life.published += 1

    def _publish_tail(self, life: Life, end: int) -> None:
        """What a prompt's last token, at `end`, has read of its block can be found."""
        if self.cache is not None and life.seq.shares_prompt and end % self.size:
            begin = end - end % self.size
            state, parent = life.truth.state_before(end), life.truth.state_before(begin)
            self.cache.publish_tail(state, parent, life.table[begin // self.size])

    def discarded(self) -> None:
        """The only step in flight was discarded, so its work is scheduled again."""
        (flight,) = self.flights
        self.flights.clear()
        self.execution.last_output = flight.last_output
        for row in flight.rows:
            life = row.life
            life.num_inflight -= 1
            start, life.known, drafts, was_prefilling = row.was
            if life.computed is not None:
                if start == life.cached:
                    # Its copy is lost too.
                    life.cached = start = start - start % self.size
                life.computed, life.drafts = start, drafts
                life.prefilling = was_prefilling and start < life.known - 1

    # At any time, and at the end.

    def check(self) -> None:
        """Compares the scheduler's public state between steps with the oracle's."""
        sched = self.scheduler
        num_running = num_decoding = ahead = 0
        held: set[int] = set()
        for life in self.lives.values():
            seq = life.seq
            if self.cache is None and life.computed is not None:
                # The oracle cannot predict which of two equal blocks a sequence holds; `_read` compares their
                # contents.
                life.table = list(seq.block_table)
            assert seq.block_table == life.table, f"sequence {seq.id} holds {seq.block_table}, not {life.table}"
            assert seq.num_tokens == life.delivered, f"sequence {seq.id} has {seq.num_tokens} tokens"
            held.update(life.table)
            num_running += life.computed is not None
            num_decoding += life.computed is not None and not life.prefilling
            if life.prefilling or life.computed is None:
                ahead += life.delivered - (life.computed or 0)
        assert sched.block_manager.num_free_blocks == self.pool - len(held), "a block is lost"
        self._release(self._held - held)
        self._held = held
        assert list(sched.lifecycle.live) == list(self.lives)
        assert (len(sched.lifecycle.live), sched.lifecycle.num_decoding) == (len(self.lives), num_decoding)
        assert sched.load().waiting_seqs == len(self.lives) - num_running
        assert sched.load().waiting_tokens == ahead

    def check_end(self) -> None:
        """Nothing is left, and every sequence has ended in one output."""
        assert not self.lives
        assert not self.flights
        self.check()
        assert not self.scheduler.has_unfinished()
        for life in self.all:
            assert life.ended, f"sequence {life.seq.id} has not ended"
            assert life.seq.token_ids == life.truth.tokens[: life.delivered]
            assert (life.seq.first_scheduled_time, life.seq.first_token_time) == (
                life.first_scheduled,
                life.first_token,
            )
        stats = self.scheduler.spec_stats
        assert (stats.total_draft_tokens, stats.total_accepted_tokens) == (self.num_drafts, self.num_accepted)
