"""From the tokens of one answer to a conversation to its channels: reasoning, content and calls of tools. Pure.

Invariants:
  * What comes out depends on the tokens and on nothing else: neither on how they were framed nor on a client's reads.
  * A delimiter that the vocabulary has a token for is one where that token stands, and text where others spell it.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.text.answer_text import TextPiece
from router.answers.channels.calls import Tools
from router.answers.channels.form import ResponseForm
from router.answers.channels.markers import SpelledMarkers
from router.answers.channels.parser import Part, ResponseParser
from router.answers.confinement import Confinement


@dataclass(frozen=True, slots=True)
class Reading:
    """Terms on which the answers to one request are read.

    Attributes:
        form: of the model's answers.
        opening: text of the answer that the prompt ends with.
        separates_reasoning: True if reasoning is a channel of its own.
        tools: that may be called; None for none.
        ends_with_first_call: True if the answer ends with its first call.
        confinement: forms that the answer is held to; None where it may have any.
        is_constrained: True if content satisfies the request's own constraint, so that it is left as it is.
    """

    form: ResponseForm
    opening: str = ""
    separates_reasoning: bool = True
    tools: Tools | None = None
    ends_with_first_call: bool = False
    confinement: Confinement | None = None
    is_constrained: bool = False


class ChannelReader:
    """Reads one answer.

    Args:
        reading: the terms.
    """

    def __init__(self, reading: Reading) -> None:
        self._markers = reading.form.markers
        self._spelled = SpelledMarkers(reading.form.markers.values())
        self._parser = ResponseParser(
            reading.form.template,
            tools=reading.tools,
            separates_reasoning=reading.separates_reasoning,
            opening=reading.opening,
            keeps_blanks=reading.is_constrained,
        )
        self._ends_with_first_call = reading.ends_with_first_call
        self._was_reasoning = self._parser.is_reasoning
        self._num_tokens = 0
        # Tokens of reasoning, as runs from one place up to another.
        self._reasoning: list[tuple[int, int]] = []

    def read(self, piece: TextPiece) -> list[Part]:
        """Returns the parts that the next piece adds: the piece of one token, or of none at the end."""
        marker = self._markers.get(piece.token_ids[0], "") if piece.token_ids else ""
        self._spelled.announce(piece.decoded, marker=marker if piece.decoded.endswith(marker) else "")
        return self._parser.push(self._spelled.mark(piece.text))

    def end_token(self) -> None:
        """Counts a token, of which all that is read now has been."""
        is_reasoning = self._parser.is_reasoning
        if is_reasoning or self._was_reasoning:
            start = self._reasoning.pop()[0] if self._continues_run() else self._num_tokens
            self._reasoning.append((start, self._num_tokens + 1))
        self._was_reasoning = is_reasoning
        self._num_tokens += 1

    def finish(self, *, is_cut: bool, token_id: int | None = None) -> list[Part]:
        """Takes the end of the answer.

        Args:
            is_cut: True if the answer would have gone on.
            token_id: the token that has ended it; None where it is text like any other.
        """
        token = "" if token_id is None else self._markers.get(token_id, "")
        return self._parser.finish(is_cut=is_cut, token=token)

    @property
    def is_done(self) -> bool:
        """True if the answer has what it ends with, whatever would come behind."""
        return self._ends_with_first_call and self._parser.has_had_call

    @property
    def ends_with_call(self) -> bool:
        """True if the last thing that has come is a whole call of a tool."""
        return self._parser.ends_with_call

    def reasoning_tokens(self, start: int, end: int) -> int:
        """Number of tokens of reasoning, its delimiters included, among those from one place up to another."""
        return sum(max(0, min(end, last) - max(start, first)) for first, last in self._reasoning)

    def _continues_run(self) -> bool:
        return bool(self._reasoning) and self._reasoning[-1][1] == self._num_tokens
