"""Collects the logprobs of one answer for its client, in step with the tokens.

Rows (common/wire/logprob_rows.py) stay bytes until they go into a message. Invariants:
  * Rows of given tokens are added iff they continue the earlier ones. All are there before the first generated token.
  * There is exactly one row for each generated token that the client gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from common.limits import MAX_MESSAGE_LOGPROBS
from common.params.logprobs import LogprobLayout
from common.params.sampling_params import SamplingParams
from common.wire.logprob_rows import added, raw_logprobs


class LogprobRows(NamedTuple):
    """Rows of consecutive tokens, with their layout."""

    token_ids: tuple[int, ...]
    rows: bytes
    layout: LogprobLayout


class ChunkLogprobs(NamedTuple):
    """Logprobs of one message: those of the prompt, in the first messages only, and those of generated tokens."""

    prompt: LogprobRows | None
    generated: LogprobRows | None


class LogprobGapError(Exception):
    """The worker's logprobs do not fit its tokens: its version has none, or it breaks the protocol."""


class AnswerLogprobs:
    """Logprobs of one answer.

    Args:
        params: parameters of the sequence. Given tokens have logprobs from `prompt_logprobs_start` on. Those behind the
            prompt, in a resumed answer, are added to the total and not sent.
        prompt: token ids of the prompt.
        num_given: number of given tokens: the prompt, and tokens that an earlier call delivered.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int], num_given: int) -> None:
        self._layout = None if params.logprobs is None else params.logprob_layout
        self._given_layout = params.prompt_logprob_layout
        self._start = min(params.prompt_logprobs_start, num_given) if params.prompt_logprobs is not None else num_given
        self._prompt = prompt
        self._num_given = num_given
        self._ids: list[int] = []
        self.restart()

    def restart(self) -> None:
        """Discards all rows, because another worker sends them again. No token may have been generated."""
        self._next_given = self._start
        self._total = 0.0
        self._rows = bytearray()
        self._prompt_rows = bytearray()
        self._prompt_pos = self._start
        self._ids.clear()

    @property
    def total(self) -> float | None:
        """Sum of the raw logprobs of the whole answer; None if logprobs were not requested."""
        return None if self._layout is None else self._total

    @property
    def has_prompt(self) -> bool:
        """True if logprobs of the prompt are still to be sent."""
        return bool(self._prompt_rows)

    def add_given(self, first_pos: int, rows: bytes) -> None:
        """Adds rows of given tokens; drops repeated ones.

        Raises:
            LogprobGapError: the rows leave a gap, or the last one is cut.
        """
        width = self._given_layout.width
        if len(rows) % width or first_pos > self._next_given:
            raise LogprobGapError(f"logprobs at position {first_pos} where {self._next_given} were expected")
        rows = rows[(self._next_given - first_pos) * width :]
        of_prompt = max(0, min(len(rows) // width, len(self._prompt) - self._next_given)) * width
        self._prompt_rows += rows[:of_prompt]
        self._total = added(self._total, raw_logprobs(self._given_layout, rows[of_prompt:]))
        self._next_given += len(rows) // width

    def check(self, num_tokens: int, rows: bytes) -> None:
        """Checks that `rows` has a row for each of `num_tokens` generated tokens.

        Raises:
            LogprobGapError: rows of these or of given tokens are missing.
        """
        expected = 0 if self._layout is None else num_tokens * self._layout.width
        if len(rows) != expected or (num_tokens and self._next_given < self._num_given):
            raise LogprobGapError("tokens without their logprobs")

    def add(self, token_ids: tuple[int, ...], rows: bytes) -> None:
        """Adds tokens for the client with checked rows; rows of further tokens are ignored."""
        if self._layout is not None:
            own = rows[: len(token_ids) * self._layout.width]
            self._rows += own
            self._ids += token_ids
            self._total = added(self._total, raw_logprobs(self._layout, own))

    def clear(self) -> None:
        """Discards the rows that were not sent."""
        self._rows.clear()
        self._prompt_rows.clear()
        self._ids.clear()

    def take_prompt(self) -> LogprobRows | None:
        """Returns rows of the prompt for the next message; None if none are left."""
        if not self._prompt_rows:
            return None
        rows, count = _cut(self._prompt_rows, self._given_layout, MAX_MESSAGE_LOGPROBS)
        ids = tuple(self._prompt[self._prompt_pos : self._prompt_pos + count])
        self._prompt_pos += count
        return LogprobRows(ids, rows, self._given_layout)

    def take(self, most: int = MAX_MESSAGE_LOGPROBS) -> LogprobRows | None:
        """Returns at most `most` rows of generated tokens for the next message; None if none are left."""
        if not self._rows or self._layout is None:
            return None
        rows, count = _cut(self._rows, self._layout, most)
        ids = tuple(self._ids[:count])
        del self._ids[:count]
        return LogprobRows(ids, rows, self._layout)

    @property
    def num_waiting(self) -> int:
        """Number of generated tokens whose rows are still to be sent."""
        return len(self._ids)


def _cut(rows: bytearray, layout: LogprobLayout, most: int) -> tuple[bytes, int]:
    """Removes at most `most` rows from the front. Returns them and their number."""
    size = min(len(rows), most * layout.width)
    cut = bytes(rows[:size])
    del rows[:size]
    return cut, size // layout.width
