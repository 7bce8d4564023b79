"""Reads chat messages from a terminal with prompt_toolkit: several lines, pastes, and a history kept in a file."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Final

import click
from prompt_toolkit import PromptSession
from prompt_toolkit.history import DummyHistory, FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output

from common.limits import MAX_CHAT_HISTORY_BYTES

QUOTES: Final = '"""'
_ENTRY: Final = b"\n# "


def history_file() -> Path:
    """Path of the chat history, in the user's state folder (XDG_STATE_HOME)."""
    given = os.environ.get("XDG_STATE_HOME", "")
    # The XDG specification says that a relative path is ignored.
    folder = Path(given) if Path(given).is_absolute() else Path.home() / ".local" / "state"
    return folder / "fissile" / "chat_history"


class MessageEditor:
    """Reads chat messages from a terminal, with editing and a history.

    Enter sends the message. After a backslash, or while three opening quotes are not closed, Enter starts a new line.
    A paste is one message, however many lines it has.

    Args:
        history: file of earlier messages; None keeps only the messages of this conversation.
    """

    def __init__(self, history: Path | None) -> None:
        # If standard output goes into a file, the prompt goes to standard error, so that the file has answers alone.
        self._output = create_output(sys.stdout if sys.stdout.isatty() else sys.stderr)
        self._messages = self._session(_kept(history) if history else InMemoryHistory(), with_lines=True)
        self._answers = self._session(DummyHistory(), with_lines=False)
        self._is_open = False

    def message(self, prompt: str) -> str | None:
        """The user's next message; None at Ctrl-D.

        Raises:
            KeyboardInterrupt: the user pressed Ctrl-C; the typed text is dropped.
        """
        self._is_open = False
        text = _read(self._messages, prompt)
        return _unquoted(text, was_open=self._is_open)

    def answer(self, prompt: str) -> str | None:
        """The user's next single line, which no history keeps; None at Ctrl-D. Raises as `message`."""
        return _read(self._answers, prompt)

    def _session(self, history: History, *, with_lines: bool) -> PromptSession[str]:
        return PromptSession(
            history=history,
            multiline=with_lines,
            key_bindings=self._keys() if with_lines else None,
            prompt_continuation="  ",
            enable_suspend=True,
            output=self._output,
        )

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()

        @keys.add("enter")
        def _(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            if ends_with_backslash(buffer.document.text_before_cursor):
                buffer.delete_before_cursor()
                buffer.insert_text("\n")
            elif is_open(buffer.text):
                self._is_open = True
                buffer.insert_text("\n")
            else:
                buffer.validate_and_handle()

        return keys


class PlainEditor:
    """Reads chat messages from a terminal without cursor control, such as Emacs's shell; keeps no history file."""

    def __init__(self) -> None:
        with contextlib.suppress(ImportError):
            # The import alone adds line editing to `input`.
            import readline  # noqa: F401, PLC0415

    def message(self, prompt: str) -> str | None:
        """The user's next message, of one or several lines; None at Ctrl-D. Lines continue as in `MessageEditor`."""
        text, was_open = self.answer(prompt), False
        while text is not None and (ends_with_backslash(text) or is_open(text)):
            more = self.answer("  ")
            if more is None:
                return None
            if ends_with_backslash(text):
                text = text[:-1]
            else:
                was_open = True
            text += "\n" + more
        return _unquoted(text, was_open=was_open)

    def answer(self, prompt: str) -> str | None:
        """The user's next single line; None at Ctrl-D."""
        try:
            if sys.stdout.isatty():
                return input(prompt)
            # `input` would write the prompt to standard output, among the answers.
            click.echo(prompt, err=True, nl=False)
            return input()
        except EOFError:
            click.echo(err=True)
            return None


def ends_with_backslash(text: str) -> bool:
    """True if `text` ends with an unescaped backslash: with an odd number of them."""
    return (len(text) - len(text.rstrip("\\"))) % 2 == 1


def is_open(text: str) -> bool:
    """True if `text` begins with three quotes and does not end with three others."""
    stripped = text.strip()
    return stripped.startswith(QUOTES) and not (len(stripped) >= 2 * len(QUOTES) and stripped.endswith(QUOTES))


def _unquoted(text: str | None, *, was_open: bool) -> str | None:
    """Removes the three quotes around a typed message; a pasted message of several lines keeps its quotes."""
    stripped = (text or "").strip()
    is_quoted = stripped.startswith(QUOTES) and not is_open(stripped)
    return (
        stripped[len(QUOTES) : -len(QUOTES)].strip("\n") if is_quoted and (was_open or "\n" not in stripped) else text
    )


def _read(session: PromptSession[str], prompt: str) -> str | None:
    try:
        return _text(session.prompt(prompt))
    except EOFError:
        return None


def _text(typed: str) -> str:
    """Replaces typed bytes that are not UTF-8 by the replacement character."""
    return typed.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


class _History(FileHistory):
    """A history file whose write errors, such as a full disk, never disturb the conversation."""

    def store_string(self, string: str) -> None:
        """Appends a message to the history file, if the file can be written."""
        with contextlib.suppress(OSError):
            super().store_string(_text(string))


def _kept(path: Path) -> History:
    """Opens the history file, readable by its owner alone; keeps the history in memory if that fails."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.fchmod(file, 0o600)
            if os.fstat(file).st_size > MAX_CHAT_HISTORY_BYTES:
                _shorten(path)
        finally:
            os.close(file)
    except OSError as error:
        click.echo(f"the history is not kept: {path} cannot be written ({error.strerror})", err=True)
        return InMemoryHistory()
    return _History(str(path))


def _shorten(path: Path) -> None:
    """Drops the older half of a history file, up to the start of an entry."""
    data = path.read_bytes()
    place = data.find(_ENTRY, len(data) // 2)
    path.write_bytes(data[place:] if place >= 0 else b"")
