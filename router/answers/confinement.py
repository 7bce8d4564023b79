"""The grammar of an answer to a conversation: calls, reasoning and constraint together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.answers.channels.grammar import AnswerGrammar, ReasoningLimit


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
