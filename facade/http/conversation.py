"""Conversations from the parts that other APIs send: joins the parts of one turn into one message of `fissile.v1`.

OpenAI's Responses and Anthropic's Messages send reasoning, text and tool calls of one turn as separate parts. A chat
template expects one message for each turn, with its calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from common.errors import InvalidFieldError

# Between texts of the system or of the user that become one message.
_BETWEEN_TEXTS: Final = "\n\n"


class ConversationBuilder:
    """A conversation that grows by parts.

    Args:
        joins_turns: True if neighbouring messages of the user, or texts of the assistant, are one turn.

    Attributes:
        messages: as `AsyncClient.chat_stream` takes them.
    """

    def __init__(self, *, joins_turns: bool) -> None:
        self.messages: list[dict[str, Any]] = []
        self._joins_turns = joins_turns
        # Id of a call -> name of its tool.
        self._called: dict[str, str] = {}

    def add_system(self, text: str) -> None:
        """Adds instructions. Those at the beginning become one message, because many templates read only the first."""
        is_first = all(message["role"] == "system" for message in self.messages)
        self._add_text("system", text, is_joined=is_first)

    def add_user(self, text: str) -> None:
        """Adds a text of the user."""
        self._add_text("user", text, is_joined=self._joins_turns)

    def add_reasoning(self, text: str) -> None:
        """Adds reasoning; after a text or a call it begins a new turn of the assistant."""
        if not text:
            return
        turn = self._turn()
        if turn["content"] or turn["tool_calls"]:
            turn = self._begin_turn()
        turn["reasoning"] += text

    def add_answer(self, text: str) -> None:
        """Adds a text of the assistant."""
        turn = self._turn()
        if turn["content"] and not turn["tool_calls"] and not self._joins_turns:
            turn = self._begin_turn()
        turn["content"] += text

    def add_call(self, call_id: str, name: str, arguments_json: str) -> None:
        """Adds a tool call to the assistant's turn."""
        self._called[call_id] = name
        self._turn()["tool_calls"].append({"id": call_id, "name": name, "arguments_json": arguments_json})

    def add_result(self, path: str, call_id: str, text: str) -> None:
        """Adds the result of a call.

        Raises:
            InvalidFieldError: the conversation has no such call; the error names `path`.
        """
        name = self._called.get(call_id)
        if name is None:
            raise InvalidFieldError(path, f"is {call_id[:64]!r}", "the id of a call earlier in the conversation")
        self.messages.append({"role": "tool", "tool_call_id": call_id, "name": name, "content": text})

    def _add_text(self, role: str, text: str, *, is_joined: bool) -> None:
        if is_joined and self.messages and self.messages[-1]["role"] == role:
            self.messages[-1]["content"] += _BETWEEN_TEXTS + text
        else:
            self.messages.append({"role": role, "content": text})

    def _turn(self) -> dict[str, Any]:
        if self.messages and self.messages[-1]["role"] == "assistant":
            return self.messages[-1]
        return self._begin_turn()

    def _begin_turn(self) -> dict[str, Any]:
        turn: dict[str, Any] = {"role": "assistant", "content": "", "reasoning": "", "tool_calls": []}
        self.messages.append(turn)
        return turn


def join_texts(texts: list[str]) -> str:
    """Texts of one turn, such as blocks of a system prompt, as one text."""
    return _BETWEEN_TEXTS.join(texts)


def with_tools(arguments: dict[str, Any], choice: Mapping[str, str] | None, *, is_parallel: bool) -> dict[str, Any]:
    """Adds the choice of tools to the arguments of a call. Without tools, a choice that calls none has no effect.

    Args:
        arguments: of `AsyncClient.chat_stream`, with `tools`.
        choice: `tool_choice`; None for the default.
        is_parallel: False if the answer ends with its first call.
    """
    if arguments.get("tools") or (choice is not None and choice.get("mode") not in ("auto", "none")):
        arguments["tool_choice"] = choice
        arguments["parallel_tool_calls"] = None if is_parallel else False
    return arguments
