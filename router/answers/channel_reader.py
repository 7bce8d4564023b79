"""Reads an answer to a conversation in channels: reasoning, content and calls of tools. Pure.

Invariants:
  * The parts depend on the tokens alone, not on how workers cut runs or when the client reads.
  * If a token stands for a delimiter, only that token is the delimiter. The same text of other tokens is plain text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.text.answer_text import TextPiece
from router.answers.channels.calls import ToolSchemas
from router.answers.channels.form import ResponseForm
from router.answers.channels.grammar import AnswerGrammar, ReasoningLimit
from router.answers.channels.markers import SpelledMarkers
from router.answers.channels.parser import ChannelPart, ResponseParser


@dataclass(frozen=True, slots=True)
class Confinement:
    """Grammar that holds an answer to its tools and its reasoning budget.

    Attributes:
        grammar: grammar of calls and reasoning, without a header; "" if only the request's constraint holds the answer.
        field: path of the request field that requires the grammar.
        schemas: path and text of each schema of arguments.
        writer: writer of the model's grammars.
        thinking: limits of reasoning before the answer; None without reasoning.
        is_beside: True if the grammar holds calls that may replace content with a constraint.
    """

    grammar: str
    field: str
    schemas: Sequence[tuple[str, str]]
    writer: AnswerGrammar
    thinking: ReasoningLimit | None
    is_beside: bool = False

    def around(self, grammar: str, calls: str) -> str:
        """Returns the grammar of an answer whose content has a constraint, behind reasoning.

        Args:
            grammar: grammar of the constraint, without its header.
            calls: `self.grammar` in the form that workers get, without its header.
        """
        if calls and not self.is_beside:
            # The answer is calls alone, without content.
            return calls
        return grammar if self.thinking is None and not calls else self.writer.around(grammar, self.thinking, calls)


@dataclass(frozen=True, slots=True)
class ChannelTerms:
    """Terms on which the answers to one request are read.

    Attributes:
        form: form of the model's answers.
        opening: text of the answer that the prompt ends with.
        separates_reasoning: True if reasoning is a channel of its own.
        tools: tools that may be called; None for none.
        ends_with_first_call: True if the answer ends with its first call.
        confinement: grammar that the answer is held to; None for no grammar.
        is_constrained: True if content satisfies the request's constraint, so that its blanks are kept.
    """

    form: ResponseForm
    opening: str = ""
    separates_reasoning: bool = True
    tools: ToolSchemas | None = None
    ends_with_first_call: bool = False
    confinement: Confinement | None = None
    is_constrained: bool = False


class ChannelReader:
    """Reads one answer in channels, token by token.

    Args:
        reading: terms of the request.
    """

    def __init__(self, reading: ChannelTerms) -> None:
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
        # Runs of reasoning tokens: first token, and the token behind the last.
        self._reasoning: list[tuple[int, int]] = []

    def read(self, piece: TextPiece) -> list[ChannelPart]:
        """Returns the parts that the next piece adds: the piece of one token, or of none at the end."""
        marker = self._markers.get(piece.token_ids[0], "") if piece.token_ids else ""
        self._spelled.announce(piece.decoded, marker=marker if piece.decoded.endswith(marker) else "")
        return self._parser.push(self._spelled.mark(piece.text))

    def end_token(self) -> None:
        """Counts the token whose text was just read."""
        is_reasoning = self._parser.is_reasoning
        if is_reasoning or self._was_reasoning:
            start = self._reasoning.pop()[0] if self._continues_run() else self._num_tokens
            self._reasoning.append((start, self._num_tokens + 1))
        self._was_reasoning = is_reasoning
        self._num_tokens += 1

    def finish(self, *, is_cut: bool, token_id: int | None = None) -> list[ChannelPart]:
        """Ends the answer. Returns the parts that were held back.

        Args:
            is_cut: True if the answer was cut at its length limit.
            token_id: the token that ended the answer; None if that token is text like any other.
        """
        token = "" if token_id is None else self._markers.get(token_id, "")
        return self._parser.finish(is_cut=is_cut, token=token)

    @property
    def is_done(self) -> bool:
        """True if the answer ends here because its first call is complete."""
        return self._ends_with_first_call and self._parser.has_had_call

    @property
    def ends_with_call(self) -> bool:
        """True if the answer so far ends with a complete call."""
        return self._parser.ends_with_call

    def reasoning_tokens(self, start: int, end: int) -> int:
        """Number of tokens of reasoning, delimiters included, among the tokens `start` to `end`."""
        return sum(max(0, min(end, last) - max(start, first)) for first, last in self._reasoning)

    def _continues_run(self) -> bool:
        return bool(self._reasoning) and self._reasoning[-1][1] == self._num_tokens
