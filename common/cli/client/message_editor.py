"""Messages typed on a terminal, with prompt_toolkit: several lines, pastes, and a history that outlives the program."""

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
    """Path of the history, in the folder for what programs remember (XDG_STATE_HOME)."""
    given = os.environ.get("XDG_STATE_HOME", "")
    # A relative path is none, by the specification.
    folder = Path(given) if Path(given).is_absolute() else Path.home() / ".local" / "state"
    return folder / "fissile" / "chat_history"


class MessageEditor:
    """Reads messages from a terminal.

    Enter sends a message. Behind a backslash, or within three quotes that the message begins with, it begins another
    line. What is pasted is one message, however many lines it has.

    Args:
        history: file that has the earlier messages; None keeps those of this conversation alone.
    """

    def __init__(self, history: Path | None) -> None:
        # Beside an answer that goes into a file, the prompt is on standard error.
        self._output = create_output(sys.stdout if sys.stdout.isatty() else sys.stderr)
        self._messages = self._session(_kept(history) if history else InMemoryHistory(), with_lines=True)
        self._answers = self._session(DummyHistory(), with_lines=False)
        self._is_open = False

    def message(self, prompt: str) -> str | None:
        """The next message, None at Ctrl-D.

        Raises:
            KeyboardInterrupt: Ctrl-C; what was typed is dropped.
        """
        self._is_open = False
        text = _read(self._messages, prompt)
        return _unquoted(text, was_open=self._is_open)

    def answer(self, prompt: str) -> str | None:
        """The next line, which no history keeps; as of `message`."""
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
    """Reads messages from a terminal that shows characters alone, such as the shell of Emacs: without a history."""

    def __init__(self) -> None:
        with contextlib.suppress(ImportError):
            # Its import alone gives `input` editing.
            import readline  # noqa: F401, PLC0415

    def message(self, prompt: str) -> str | None:
        """The next message, of one line or several, None at Ctrl-D; as of `MessageEditor`."""
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
        """The next line, None at Ctrl-D."""
        try:
            if sys.stdout.isatty():
                return input(prompt)
            # `input` would write it among the answers.
            click.echo(prompt, err=True, nl=False)
            return input()
        except EOFError:
            click.echo(err=True)
            return None


def ends_with_backslash(text: str) -> bool:
    """True if the last backslash is not itself behind one."""
    return (len(text) - len(text.rstrip("\\"))) % 2 == 1


def is_open(text: str) -> bool:
    """True if a message begins with three quotes, and no others have come at its end."""
    stripped = text.strip()
    return stripped.startswith(QUOTES) and not (len(stripped) >= 2 * len(QUOTES) and stripped.endswith(QUOTES))


def _unquoted(text: str | None, *, was_open: bool) -> str | None:
    """Removes quotes that were typed for the sake of several lines; a paste of several lines keeps its own."""
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
    """Makes text of what was typed; bytes that are not UTF-8 become the replacement character."""
    return typed.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


class _History(FileHistory):
    """A history of which the conversation does not notice that its disk is full."""

    def store_string(self, string: str) -> None:
        """Adds a message."""
        with contextlib.suppress(OSError):
            super().store_string(_text(string))


def _kept(path: Path) -> History:
    """The history in a file that its owner alone can read; without one where it cannot be written."""
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
    """Drops the older half of a history, at the beginning of an entry."""
    data = path.read_bytes()
    place = data.find(_ENTRY, len(data) // 2)
    path.write_bytes(data[place:] if place >= 0 else b"")
