"""Tools of `fissile chat`: their definitions in a file, their calls on the screen, and their results."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from fissile.client import tool
from fissile.v1 import inference_pb2 as pb

from common.cli.core.client import CommandAnswer
from common.cli.core.console import TextStream
from common.cli.core.errors import CommandError

# The next line that is typed, or of a pipe, behind this prompt; None behind the last.
ReadLine: TypeAlias = Callable[[str], str | None]
_KEYS: Final = ("name", "description", "parameters", "strict")
_SCHEMA: Final = '{"type": "object", "properties": {"city": {"type": "string"}}}'
_EXAMPLE: Final = f'[{{"name": "get_weather", "parameters": {_SCHEMA}}}]'
# Characters of a command's errors that are repeated.
_QUOTED: Final = 300


def read_tools(path: Path) -> list[pb.Tool]:
    """Reads tools from a JSON file: a list of objects with `name`, `description`, `parameters` and `strict`.

    Each may be the `function` of an object of `type` function, as other services have it.

    Raises:
        CommandError: there is no such file, or it holds something else.
    """
    try:
        given = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise CommandError(f"the tools cannot be read from {path}: {error.strerror}") from None
    except ValueError as error:
        raise CommandError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(given, list) or not given:
        raise CommandError(f"{path} is not a list of tools: write for example {_EXAMPLE}")
    return [_tool(f"{path}: tool {i}", one) for i, one in enumerate(given, start=1)]


def _tool(place: str, given: Any) -> pb.Tool:
    if isinstance(given, dict) and given.get("type") == "function" and set(given) == {"type", "function"}:
        given = given["function"]
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise CommandError(f"{place} has no name: write for example {_EXAMPLE}")
    if others := [key for key in given if key not in _KEYS]:
        raise CommandError(f"{place} has {others[0]!r}; a tool has {', '.join(_KEYS)}")
    kinds: Mapping[str, type] = {"description": str, "parameters": dict, "strict": bool}
    for key, kind in kinds.items():
        if not isinstance(given.get(key, kind()), kind):
            wanted = {str: "a text", dict: "a JSON Schema", bool: "true or false"}[kind]
            raise CommandError(f"{place} has {key} {given[key]!r}; it is {wanted}")
    made = tool(given["name"], given.get("description", ""), given.get("parameters", ""))
    if "strict" in given:
        made.strict = given["strict"]
    return made


def commands_of(given: Sequence[tuple[str, tuple[str, ...]]], tools: Sequence[pb.Tool]) -> dict[str, tuple[str, ...]]:
    """Commands by the names of their tools.

    Raises:
        CommandError: there is no such tool.
    """
    names = [each.name for each in tools]
    for name, _ in given:
        if name not in names:
            there = f"there are {', '.join(names)}" if names else "--tools FILE declares tools"
            raise CommandError(f"--tool-command is for {name!r}, which is not a tool; {there}")
    return dict(given)


@dataclass(slots=True)
class CallLines:
    """Prints calls as they arrive, a line each: `name(arguments)`."""

    shown: TextStream
    _is_open: bool = False

    def show(self, parts: Sequence[pb.ToolCallDelta]) -> None:
        """Prints the next parts."""
        for part in parts:
            if part.name:
                self.end()
                self.shown.end_line()
                self.shown.write(f"{part.name}(")
                self._is_open = True
            self.shown.write(part.arguments_json)

    def end(self) -> None:
        """Ends the last call."""
        if self._is_open:
            self.shown.write(")")
            self._is_open = False


def can_be_answered(answer: CommandAnswer) -> bool:
    """True if an answer calls tools, and each call is complete with arguments that a router accepts."""
    is_whole = answer.finish.reason == pb.FINISH_REASON_TOOL_CALLS
    return is_whole and all(_is_object(call.arguments_json or "{}") for call in answer.tool_calls)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class ToolResults:
    """Gets the results of calls from the user or from commands.

    Attributes:
        read: gives the lines that are typed.
        note: says something to the user.
        commands: by the names of tools.
        confirms: True if the user is asked before a command runs.
        is_forgiving: True if a command that fails leaves it to the user to type the result.
    """

    read: ReadLine
    note: Callable[[str], None]
    commands: Mapping[str, Sequence[str]] = field(default_factory=dict)
    confirms: bool = True
    is_forgiving: bool = True

    def results(self, calls: Sequence[pb.ToolCall]) -> list[dict[str, Any]] | None:
        """Makes the messages with the results of calls; None if the input ends before the last result.

        Raises:
            CommandError: a command failed.
            KeyboardInterrupt: the user wants none.
        """
        made: list[dict[str, Any]] = []
        for call in calls:
            result = self._result(call)
            if result is None:
                return None
            made.append({"role": "tool", "content": result, "tool_call_id": call.id, "name": call.name})
        return made

    def _result(self, call: pb.ToolCall) -> str | None:
        command = self.commands.get(call.name)
        if command and self._may_run(command):
            try:
                return _printed(command, call.arguments_json or "{}")
            except CommandError as error:
                if not self.is_forgiving:
                    raise
                self.note(f"error: {error}")
        return _line(self.read(f"result of {call.name}> "))

    def _may_run(self, command: Sequence[str]) -> bool:
        if not self.confirms:
            return True
        said = self.read(f"run {shlex.join(command)} with these arguments? [y/N] ")
        return (said or "").strip().lower() in ("y", "yes")


def _line(read: str | None) -> str | None:
    return None if read is None else read.removesuffix("\n")


def _printed(command: Sequence[str], arguments: str) -> str:
    """Runs a command with arguments on standard input. Returns its output without the last line break.

    Raises:
        CommandError: it cannot be run, or ends with another exit code than 0.
    """
    try:
        ended = subprocess.run(command, input=arguments.encode(), capture_output=True, check=False)
    except OSError as error:
        raise CommandError(f"{command[0]} cannot be run: {error.strerror}", 1) from None
    if ended.returncode:
        said = ended.stderr.decode(errors="replace").strip()[-_QUOTED:]
        raise CommandError(f"{shlex.join(command)} ended with {ended.returncode}{f': {said}' if said else ''}", 1)
    return ended.stdout.decode(errors="replace").removesuffix("\n")
