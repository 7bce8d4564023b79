"""`fissile chat`: a conversation with a model, on a terminal, or from a pipe with a turn on each line.

On a terminal a mistake or a call that fails is a line, and the conversation goes on; from a pipe it ends the program.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click
from fissile.client import Client, Delta, FissileError, Stream
from fissile.v1 import inference_pb2 as pb

from common.cli.client.generate import given, with_sampling_options
from common.cli.core.client import Answer, Credentials, call_failed, client_arguments
from common.cli.core.console import TextStream
from common.cli.core.errors import CommandError
from common.cli.core.options import option, routers_option, timeout_option
from common.cli.core.tls_options import with_credentials

HELP: Final = """\
/help         lists these commands
/reset        forgets the conversation
/system TEXT  begins the conversation with this system message; without TEXT, with none
/save FILE    writes the conversation to FILE, as JSON
/usage        shows the figures of the last answer, and the tokens of all
/quit         ends, as Ctrl-D does
//TEXT        sends /TEXT, which is no command
Ctrl-C ends an answer; what has come of it stays in the conversation."""
PROMPT: Final = "> "


@dataclass(slots=True)
class Conversation:
    """Messages so far, and their cost. Pure.

    Attributes:
        system: system message; "" for none.
        turns: messages of user and assistant, by turns.
        session_id: keeps the conversation on one worker, whose prefix cache has it.
        last: the last answer.
        usage: of all answers together.
        answers: number of answers.
    """

    system: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)
    session_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    last: Answer | None = None
    usage: pb.Usage = field(default_factory=pb.Usage)
    answers: int = 0

    @property
    def messages(self) -> list[dict[str, str]]:
        """Messages as a model gets them."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def asked(self, text: str) -> list[dict[str, str]]:
        """Messages with a further one of the user, which is not kept yet."""
        return [*self.messages, {"role": "user", "content": text}]

    def answered(self, text: str, answer: Answer) -> None:
        """Keeps a turn: a question, and what has come of its answer. Without an answer there was no turn."""
        if not answer.text and not answer.reasoning and not answer.finish.reason:
            return
        said = {"role": "assistant", "content": answer.text}
        if answer.reasoning:
            said["reasoning"] = answer.reasoning
        self.turns += [{"role": "user", "content": text}, said]
        self.last, self.answers = answer, self.answers + 1
        for name in ("prompt_tokens", "completion_tokens", "cached_tokens"):
            setattr(self.usage, name, getattr(self.usage, name) + getattr(answer.finish.usage, name))

    def reset(self) -> None:
        """Forgets what was said; the system message and what it has cost stay."""
        self.turns.clear()
        self.session_id = uuid.uuid4().hex

    def figures(self) -> str:
        """Figures of the last answer, and tokens of all."""
        if self.last is None:
            return "nothing has been asked yet"
        # One that was ended has no finish, and so no figures.
        last = self.last.figures() if self.last.finish.reason else f"ended early, request {self.last.request_id}"
        usage = self.usage
        return (
            f"{last}\nin all: {self.answers} answers, {usage.completion_tokens} tokens "
            f"from {usage.prompt_tokens} ({usage.cached_tokens} cached)"
        )


class Chat:
    """A conversation by a terminal or a pipe.

    Args:
        client: of the routers.
        request: fields of every request besides messages and session.
        conversation: so far.
        on_terminal: True if standard input is a terminal.
    """

    def __init__(
        self, client: Client, request: Mapping[str, Any], conversation: Conversation, *, on_terminal: bool
    ) -> None:
        self._client = client
        self._request = request
        self._conversation = conversation
        self._on_terminal = on_terminal
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: _note(HELP),
            "reset": self._reset,
            "system": self._system,
            "save": self._save,
            "usage": lambda _: _note(self._conversation.figures()),
        }

    def run(self, read: Callable[[], str | None]) -> None:
        """Takes one line after the other until there is none, or one says so.

        Args:
            read: gives the next line, None behind the last.

        Raises:
            CommandError: of a pipe, a line is no command, or a call has failed.
        """
        while True:
            try:
                line = read()
                if line is None or line.strip() in ("/quit", "/exit"):
                    return
                self._take(line.strip())
            except KeyboardInterrupt:
                if not self._on_terminal:
                    raise
                _note("")
            except CommandError as error:
                if not self._on_terminal:
                    raise
                _note(f"error: {error}")

    def _take(self, line: str) -> None:
        if line.startswith("/") and not line.startswith("//"):
            name, _, argument = line[1:].partition(" ")
            if name not in self._commands:
                raise CommandError(f"there is no command /{name}; /help lists those that there are")
            self._commands[name](argument.strip())
        elif line:
            self._ask(line.removeprefix("/") if line.startswith("//") else line)

    def _ask(self, text: str) -> None:
        said = self._conversation.asked(text)
        stream = self._client.chat_stream(said, session_id=self._conversation.session_id, **self._request)
        try:
            self._show(stream)
        except KeyboardInterrupt:
            if not self._on_terminal:
                raise
            _note("(ended)")
        except FissileError as error:
            is_partial = stream.progress.answers[0].has_any
            raise call_failed(error, ",".join(self._client.connection.targets), partial=is_partial) from None
        finally:
            self._conversation.answered(text, Answer.of(stream))
        if self._conversation.last and self._conversation.last.finish.reason == pb.FINISH_REASON_LENGTH:
            _note("(the answer ends here because of its length)")

    def _show(self, stream: Stream) -> None:
        shown = TextStream()
        try:
            with stream:
                for event in stream:
                    if isinstance(event, Delta):
                        shown.think(event.reasoning)
                        shown.write(event.text)
        finally:
            shown.end_line()

    def _reset(self, _: str) -> None:
        self._conversation.reset()
        _note("the conversation is forgotten")

    def _system(self, text: str) -> None:
        self._conversation.system = text
        _note("the system message is set" if text else "there is no system message")

    def _save(self, name: str) -> None:
        if not name:
            raise CommandError("/save needs the name of a file")
        path = Path(name).expanduser()
        try:
            path.write_text(json.dumps(self._conversation.messages, ensure_ascii=False, indent=1) + "\n", "utf-8")
        except OSError as error:
            raise CommandError(f"the conversation cannot be written to {path}: {error.strerror}") from None
        _note(f"{len(self._conversation.messages)} messages are in {path}")


def _note(text: str) -> None:
    """Says what is not of the model, apart from what is."""
    click.echo(text, err=True)


def typed_line() -> str | None:
    """The next line of a terminal, None at Ctrl-D."""
    try:
        if sys.stdout.isatty():
            return input(PROMPT)
        # `input` would write it among the answers.
        click.echo(PROMPT, err=True, nl=False)
        return input()
    except EOFError:
        _note("")
        return None


def piped_line() -> str | None:
    """The next line of a pipe, None at its end."""
    return sys.stdin.readline() or None


def chatting_model(client: Client, name: str, timeout_s: float) -> pb.Model:
    """The model to talk to.

    Raises:
        CommandError: no router answers, there is no such model, or it has no chat template.
    """
    try:
        model = client.model(name, timeout_s=timeout_s)
    except FissileError as error:
        raise call_failed(error, ",".join(client.connection.targets)) from None
    if pb.CAPABILITY_CHAT not in model.capabilities:
        raise CommandError(f"{model.name} has no chat template: ask it by `fissile generate --text`")
    return model


@click.command()
@routers_option
@option("--model", envvar="FISSILE_MODEL_NAME", default="", help="Model name. Default: the only model of the router.")
@option("--system", envvar="FISSILE_SYSTEM", default="", help="System message of a chat. Default: none.")
@with_sampling_options
@with_credentials
@timeout_option
def chat(
    addresses: Sequence[str], model: str, system: str, credentials: Credentials, timeout: float, **sampling: Any
) -> None:
    """Talk to a model: its answers stream, and it knows what was said before.

    Without a terminal each line of standard input is a turn. /help lists the commands of a conversation. Exit code: 0
    ended, 1 failed, 2 something must be changed, 3 it may work later.
    """
    chosen, on_terminal = given(sampling), sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    with contextlib.suppress(ImportError):
        # Its import alone gives `input` editing, and the lines before.
        import readline  # noqa: F401, PLC0415
    with Client(**client_arguments(addresses, credentials)) as client:
        found = chatting_model(client, model, timeout)
        request = {"model": model, "timeout_s": timeout, **chosen}
        if on_terminal:
            _note(f"{found.name} at {','.join(addresses)}; /help lists the commands, Ctrl-D ends")
        read = typed_line if on_terminal else piped_line
        Chat(client, request, Conversation(system), on_terminal=on_terminal).run(read)
