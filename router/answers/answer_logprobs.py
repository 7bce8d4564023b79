"""Logprobs of one answer on their way to the client, in step with its tokens.

Rows (common/wire/logprob_rows.py) stay bytes until a message is made of them. Invariants:
  * Rows of given tokens are taken iff they continue what is there; all of them are there before the first token.
  * Of generated tokens there is a row for each that the client gets, and none else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from common.limits import MAX_MESSAGE_LOGPROBS
from common.params.logprobs import LogprobLayout
from common.params.sampling_params import SamplingParams
from common.wire.logprob_rows import added, raw_logprobs


class LogprobRows(NamedTuple):
    """Rows of tokens that follow each other, and how long they are."""

    token_ids: tuple[int, ...]
    rows: bytes
    layout: LogprobLayout


class ChunkLogprobs(NamedTuple):
    """Logprobs of one part: of the prompt, in the first parts only, and of generated tokens."""

    prompt: LogprobRows | None
    generated: LogprobRows | None


class LogprobGapError(Exception):
    """The worker's logprobs do not fit its tokens: it is of a version that has none, or breaks the protocol."""


class AnswerLogprobs:
    """Logprobs of one answer.

    Args:
        params: of its sequence; `prompt_logprobs` is wanted of given tokens from `prompt_logprobs_start` on, of which
            those behind the prompt, of an answer that is resumed, are summed up and not sent.
        prompt: its token ids.
        num_given: prompt tokens, and those that the client has already.
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
        """Forgets what has come: another worker begins, and nothing has been generated."""
        self._next_given = self._start
        self._total = 0.0
        self._rows = bytearray()
        self._prompt_rows = bytearray()
        self._prompt_pos = self._start
        self._ids.clear()

    @property
    def total(self) -> float | None:
        """Sum of the raw logprobs of the whole answer; None where they are not wanted."""
        return None if self._layout is None else self._total

    @property
    def has_prompt(self) -> bool:
        """True if logprobs of the prompt have not been handed out."""
        return bool(self._prompt_rows)

    def add_given(self, first_pos: int, rows: bytes) -> None:
        """Takes rows of given tokens; repeated ones are dropped.

        Raises:
            LogprobGapError: they leave a gap, or are not whole.
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
        """Checks the rows that come with so many tokens.

        Raises:
            LogprobGapError: some are missing, or of given tokens.
        """
        expected = 0 if self._layout is None else num_tokens * self._layout.width
        if len(rows) != expected or (num_tokens and self._next_given < self._num_given):
            raise LogprobGapError("tokens without their logprobs")

    def add(self, token_ids: tuple[int, ...], rows: bytes) -> None:
        """Takes the tokens that the client gets, and rows that `check` has passed; the first ones are theirs."""
        if self._layout is not None:
            own = rows[: len(token_ids) * self._layout.width]
            self._rows += own
            self._ids += token_ids
            self._total = added(self._total, raw_logprobs(self._layout, own))

    def clear(self) -> None:
        """Drops what has not been handed out."""
        self._rows.clear()
        self._prompt_rows.clear()
        self._ids.clear()

    def take_prompt(self) -> LogprobRows | None:
        """Hands out rows of the prompt, as many as a message takes; None when none are left."""
        if not self._prompt_rows:
            return None
        rows, count = _cut(self._prompt_rows, self._given_layout, MAX_MESSAGE_LOGPROBS)
        ids = tuple(self._prompt[self._prompt_pos : self._prompt_pos + count])
        self._prompt_pos += count
        return LogprobRows(ids, rows, self._given_layout)

    def take(self, most: int = MAX_MESSAGE_LOGPROBS) -> LogprobRows | None:
        """Hands out rows of generated tokens, at most so many; None when none are left."""
        if not self._rows or self._layout is None:
            return None
        rows, count = _cut(self._rows, self._layout, most)
        ids = tuple(self._ids[:count])
        del self._ids[:count]
        return LogprobRows(ids, rows, self._layout)

    @property
    def num_waiting(self) -> int:
        """Generated tokens whose rows have not been handed out."""
        return len(self._ids)


def _cut(rows: bytearray, layout: LogprobLayout, most: int) -> tuple[bytes, int]:
    """Takes at most so many rows off the front, and counts them."""
    size = min(len(rows), most * layout.width)
    cut = bytes(rows[:size])
    del rows[:size]
    return cut, size // layout.width
