"""Parts of an answer that its client has not read: one merged message, or several where logprobs fill more than one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from common.limits import MAX_MESSAGE_LOGPROBS
from router.answers.answer_logprobs import AnswerLogprobs, ChunkLogprobs
from router.answers.channels.parser import Channel, Part, merged
from router.answers.stream_chunk import FinishInfo, FirstTokenInfo, StreamChunk

_TEXTS: Final = (Channel.CONTENT, Channel.REASONING)


class UnreadParts:
    """Text, token ids and logprobs that wait for the client of one answer.

    Args:
        logprobs: has the logprobs that wait; None where there are none.
        keeps_token_ids: whether messages carry token ids.
        has_channels: True if the answer is read in channels; otherwise all text is content.

    `num_tokens` wait, and `taken` have been handed out to be written.
    """

    def __init__(self, logprobs: AnswerLogprobs | None, *, keeps_token_ids: bool, has_channels: bool) -> None:
        self.num_tokens = 0
        self.taken = 0
        self._logprobs = logprobs
        self._keeps_token_ids = keeps_token_ids
        self._has_channels = has_channels
        self._parts: list[Part] = []
        self._ids: list[int] = []
        # Where messages with logprobs can end: tokens and pieces of text up to there.
        self._marks: list[tuple[int, int]] = []

    @property
    def has_text(self) -> bool:
        """True if a part waits that has text."""
        return any(part.text for part in self._parts)

    def add(self, part: Part) -> None:
        """Adds a part of the text."""
        self._parts.append(part)

    def add_last(self, part: Part) -> None:
        """Adds a part whose tokens the client has: it is to be written as if one token waited."""
        self._parts.append(part)
        self.num_tokens = max(1, self.num_tokens)

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        """Counts tokens, and takes their ids where they are wanted."""
        self.num_tokens += len(token_ids)
        self.add_ids(token_ids)

    def add_ids(self, token_ids: Sequence[int]) -> None:
        """Takes ids that are counted nowhere, as those of an echoed prompt."""
        if self._keeps_token_ids:
            self._ids.extend(token_ids)

    def mark(self, num_tokens: int) -> None:
        """Notes that a message can end behind so many waiting tokens, as full ones as can be."""
        before = self._marks[-2][0] if len(self._marks) > 1 else 0
        if self._marks and num_tokens - before <= MAX_MESSAGE_LOGPROBS:
            self._marks.pop()
        self._marks.append((num_tokens, len(self._parts)))

    def take(self, start: FirstTokenInfo | None, ending: FinishInfo | None) -> StreamChunk:
        """The next message; it has no ending where others follow."""
        if self._logprobs is not None and (early := self._take_early(self._logprobs, start)) is not None:
            return early
        logprobs = None if self._logprobs is None else ChunkLogprobs(None, self._logprobs.take())
        chunk = self._chunk(self._parts, tuple(self._ids), logprobs, start, ending)
        self.taken += self.num_tokens
        self.clear()
        return chunk

    def clear(self) -> None:
        """Drops everything that waits."""
        self._parts.clear()
        self._ids.clear()
        self._marks.clear()
        self.num_tokens = 0
        if self._logprobs is not None:
            self._logprobs.clear()

    def _take_early(self, logprobs: AnswerLogprobs, start: FirstTokenInfo | None) -> StreamChunk | None:
        """The next message where logprobs are of the prompt, or more than a message takes."""
        prompt = logprobs.take_prompt()
        if prompt is not None:
            return self._chunk((), (), ChunkLogprobs(prompt, None), start)
        if logprobs.num_waiting <= MAX_MESSAGE_LOGPROBS:
            return None
        # A client that has the ids of this part, and nothing behind it, has their text too.
        (count, num_texts), *marks = self._marks
        self._marks = [(tokens - count, texts - num_texts) for tokens, texts in marks]
        # Ids of an echoed prompt have no logprobs.
        num_ids = len(self._ids) - logprobs.num_waiting + count if self._keeps_token_ids else 0
        parts, ids = self._parts[:num_texts], tuple(self._ids[:num_ids])
        del self._parts[:num_texts], self._ids[:num_ids]
        self.taken += count
        self.num_tokens -= count
        return self._chunk(parts, ids, ChunkLogprobs(None, logprobs.take(count)), start)

    def _chunk(
        self,
        parts: Sequence[Part],
        token_ids: tuple[int, ...],
        logprobs: ChunkLogprobs | None,
        start: FirstTokenInfo | None,
        ending: FinishInfo | None = None,
    ) -> StreamChunk:
        if not self._has_channels:
            return StreamChunk("".join(part.text for part in parts), token_ids, start, ending, logprobs)
        texts = ("".join(part.text for part in parts if part.channel is channel) for channel in _TEXTS)
        calls = merged(part for part in parts if part.channel is Channel.CALL)
        return StreamChunk(next(texts), token_ids, start, ending, logprobs, next(texts), tuple(calls))
