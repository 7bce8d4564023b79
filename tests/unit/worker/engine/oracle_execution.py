"""What the oracle's batches compute."""

from __future__ import annotations

from itertools import chain

from tests.unit.worker.engine.oracle_records import Flight, Row
from tests.unit.worker.engine.speculation.truth import TokenModel, fold
from worker.engine.batch import ScheduledBatchOutput, TokenHistory


class Execution:
    """Executes batches naively: what attention reads is looked at, and every slot keeps the hash of its prefix.

    Args:
        size, pool: slots of a block, and blocks.
        k: most drafts of a row.
        model: the token function.
    """

    def __init__(self, size: int, pool: int, k: int, model: TokenModel) -> None:
        self.size = size
        self.k = k
        self.model = model
        self.kv = [[0] * size for _ in range(pool)]
        self.last_output = ScheduledBatchOutput({})

    def check_tokens(self, flight: Flight, i: int, row: Row) -> None:
        """The tokens of a row in the batch equal the tokens of its sequence, late ones included."""
        batch, truth = flight.shown, row.life.truth
        expected = truth.tokens[row.start : row.end - len(row.drafts)] + row.drafts
        given = list(batch.scheduled_tokens[i])
        if batch.from_last_output[i]:
            assert not given, f"sequence {row.life.seq.id}: a token is late and there"
            given = [self.last_output.token_ids[row.life.seq.id][-1], *row.drafts]
        assert given == expected, f"sequence {row.life.seq.id}: computes {given}, not {expected}"

    def late_drafts(self, seq_id: int, count: int) -> list[int]:
        """Drafts that the last step made after its sampled token; a runner chooses any drafts for the remaining
        positions."""
        made = (self.last_output.draft_token_ids or {}).get(seq_id, [])
        return (made + [0] * count)[:count]

    def step(self, flight: Flight) -> None:
        """All reads see the steps before this one only: KV that the step itself writes is no cache hit."""
        for source, target in flight.shown.block_copies:
            self.kv[target] = list(self.kv[source])
        histories = flight.shown.token_histories(self.last_output)
        for i, row in enumerate(flight.rows):
            self._read(row)
            self._check_history(row, histories.get(i))
        tokens: dict[int, tuple[int, ...]] = {}
        drafts: dict[int, list[int]] = {}
        for row in flight.rows:
            self._write(row)
            self._sample(row)
            if row.life.seq.id not in flight.shown.drafts_wanted:
                row.life.drafts = []
            row.life.num_inflight += 1
            if row.final:
                tokens[row.life.seq.id] = tuple(row.sampled)
                if row.life.drafts:
                    drafts[row.life.seq.id] = row.life.drafts
        flight.output = self.last_output = ScheduledBatchOutput(tokens, drafts or None)

    def _read(self, row: Row) -> None:
        """What attention reads: every slot in front of the row holds this sequence's prefix."""
        blocks = row.life.table[: -(-row.start // self.size)]
        context = list(chain.from_iterable(map(self.kv.__getitem__, blocks)))[: row.start]
        assert context == row.life.truth.states[: row.start], f"sequence {row.life.seq.id} reads foreign KV"

    def _write(self, row: Row) -> None:
        states = row.life.truth.states[row.start : row.end - len(row.drafts)]
        for draft in row.drafts:
            states.append(fold(states[-1], draft))
        table, size = row.life.table, self.size
        for position, state in enumerate(states, row.start):
            self.kv[table[position // size]][position % size] = state

    def _check_history(self, row: Row, history: TokenHistory | None) -> None:
        """Penalties and min_tokens use the output so far, late tokens included."""
        seq, known = row.life.seq, row.life.known
        assert (history is not None) is (row.final and row.life.is_steered), f"sequence {seq.id}: history of a row"
        if history is not None:
            assert list(history.output_ids) == row.life.truth.tokens[seq.num_prompt_tokens : known]

    def _sample(self, row: Row) -> None:
        life, truth = row.life, row.life.truth
        if not row.final:
            life.computed = row.after = row.end
            return
        truth.upto(life.known + 2 * self.k + 1)
        accepted = 0
        while accepted < len(row.drafts) and truth.tokens[life.known + accepted] == row.drafts[accepted]:
            accepted += 1
        row.sampled = truth.tokens[life.known : life.known + accepted + 1]
        life.computed = row.after = life.known + accepted
        life.known += accepted + 1
        life.prefilling = False
        life.drafts = self.model.drafts(truth, life.known, self.k)
