"""The grammar that confines an answer to a conversation: its calls, its reasoning and its constraint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.answers.channels.grammar import AnswerGrammar, Thinking


@dataclass(frozen=True, slots=True)
class Confinement:
    """Forms that an answer is held to.

    Attributes:
        grammar: of its calls or its budget of reasoning, without a header; "" where its constraint alone confines it.
        is_beside: True if the grammar is of calls that may come instead of content that satisfies a constraint.
        field: that asks for it.
        schemas: of arguments, with the paths of their fields.
        writer: writes grammars of the model.
        thinking: that may come before; None for none.
    """

    grammar: str
    field: str
    schemas: Sequence[tuple[str, str]]
    writer: AnswerGrammar
    thinking: Thinking | None
    is_beside: bool = False

    def around(self, grammar: str, calls: str) -> str:
        """The grammar of an answer with a constraint of its own: of its content, behind reasoning.

        Args:
            grammar: of the constraint, without its header.
            calls: `self.grammar` as workers get it, without its header.
        """
        if calls and not self.is_beside:
            # Calls alone, which have no content.
            return calls
        return grammar if self.thinking is None and not calls else self.writer.around(grammar, self.thinking, calls)
