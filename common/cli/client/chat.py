"""`fissile chat`: a conversation with a model, on a terminal, or from a pipe with a turn on each line.

On a terminal a mistake or a call that fails is a line, and the conversation goes on; from a pipe it ends the program.
A model that calls tools waits for their results: the next line is one, or what a command prints.
"""

from __future__ import annotations

import contextlib
import io
import json
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import click
from fissile.client import Client, Delta, FissileError, Stream
from fissile.v1 import inference_pb2 as pb

from common.cli.client.chat_tools import CallLines, ReadLine, ToolResults, can_be_answered, commands_of, read_tools
from common.cli.client.generate import LOGPROB_MODES, given
from common.cli.core.client import CommandAnswer, Credentials, call_failed, client_arguments
from common.cli.core.console import TextStream
from common.cli.core.errors import CommandError
from common.cli.core.modes import ModalCommand, Mode
from common.cli.core.options import options
from common.cli.core.tls_options import with_credentials
from common.cli.core.word_wrap import WordWrap

HELP: Final = """\
/help         lists these commands
/reset        forgets the conversation
/system TEXT  begins the conversation with this system message; without TEXT,
              with none
/save FILE    writes the conversation to FILE, as JSON
/usage        shows the figures of the last answer, and the tokens of all
/quit         ends, as Ctrl-D does
//TEXT        sends /TEXT, which is no command
A backslash at the end of a line begins another one, and so does Enter behind
three quotes that begin a message, until three others end it. A paste is one
message. Up and Ctrl-R find earlier ones.
Ctrl-C ends an answer; what has come of it stays in the conversation.
Where a tool is called (--tools), the next line is its result; Ctrl-C there
leaves the calls out."""
PROMPT: Final = "> "


@dataclass(slots=True)
class Conversation:
    """Messages of a conversation so far, and their token counts. Pure.

    Attributes:
        system: system message; "" for none.
        turns: messages of user and assistant, by turns, with the results of tools between them.
        session_id: keeps the conversation on one worker, whose prefix cache has it.
        last: the last answer.
        usage: of all answers together.
        answers: number of answers.
    """

    system: str = ""
    turns: list[dict[str, Any]] = field(default_factory=list)
    session_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    last: CommandAnswer | None = None
    usage: pb.Usage = field(default_factory=pb.Usage)
    answers: int = 0

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Messages in the form of a request."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def answered(
        self, said: Sequence[dict[str, Any]], answer: CommandAnswer, results: Sequence[dict[str, Any]] = ()
    ) -> None:
        """Adds a question, its answer, and the results of the tools that the answer calls.

        Calls without results are left out, and nothing is kept where nothing is left of the answer.
        """
        if not answer.text and not answer.reasoning and not answer.finish.reason:
            return
        self._count(answer)
        message: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if answer.reasoning:
            message["reasoning"] = answer.reasoning
        if results:
            message["tool_calls"] = [
                {"id": call.id, "name": call.name, "arguments_json": call.arguments_json} for call in answer.tool_calls
            ]
        if answer.text or results or not answer.tool_calls:
            self.turns += [*said, message, *results]

    def _count(self, answer: CommandAnswer) -> None:
        self.last, self.answers = answer, self.answers + 1
        for name in ("prompt_tokens", "completion_tokens", "cached_tokens"):
            setattr(self.usage, name, getattr(self.usage, name) + getattr(answer.finish.usage, name))

    def reset(self) -> None:
        """Removes all messages except the system message; keeps the token counts."""
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
        read: returns the user's next message.
        tools: give the results of calls.
        wrap: breaks the lines of answers; None leaves that to the terminal.
        on_terminal: True if standard input is a terminal.
    """

    def __init__(
        self,
        client: Client,
        request: Mapping[str, Any],
        conversation: Conversation,
        read: ReadLine,
        tools: ToolResults,
        wrap: WordWrap | None = None,
        *,
        on_terminal: bool,
    ) -> None:
        self._read = read
        self._wrap = wrap
        self._tools = tools
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

    def run(self) -> None:
        """Handles the user's messages in turn, until the input ends or a message is /quit or /exit.

        Raises:
            CommandError: of a pipe, a line is no command, or a call has failed.
        """
        while True:
            try:
                message = self._read(PROMPT)
                if message is None or message.strip() in ("/quit", "/exit"):
                    return
                self._take(message)
            except KeyboardInterrupt:
                if not self._on_terminal:
                    raise
                _note("")
            except CommandError as error:
                if not self._on_terminal:
                    raise
                _note(f"error: {error}")

    def _take(self, message: str) -> None:
        text = message.strip()
        name = text.split(maxsplit=1)[0] if text else ""
        # A message of several lines may begin with a path, so only a single line is refused as an unknown command.
        if name.removeprefix("/") in self._commands and name.startswith("/"):
            self._commands[name[1:]](text[len(name) :].strip())
        elif name.startswith("/") and not name.startswith("//") and "\n" not in text:
            raise CommandError(f"there is no command {name}; /help lists those that there are")
        elif text.startswith("//"):
            self._ask(text[1:])
        elif text:
            # A message of several lines keeps its indentation: it may be code.
            self._ask(message.strip("\r\n").rstrip() if "\n" in text else text)

    def _ask(self, text: str) -> None:
        """Sends a message, and results of tools as long as the answers call some."""
        said: list[dict[str, Any]] | None = [{"role": "user", "content": text}]
        while said is not None:
            said = self._answer(said)

    def _answer(self, said: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """Streams the answer to a message. Returns the tool results to send next, if any."""
        messages, session_id = [*self._conversation.messages, *said], self._conversation.session_id
        stream = self._client.chat_stream(messages, session_id=session_id, **self._request)
        results: list[dict[str, Any]] = []
        try:
            self._show(stream)
            for line in CommandAnswer.of(stream).logprob_lines():
                _note(line)
            results = self._results(CommandAnswer.of(stream))
        except KeyboardInterrupt:
            if not self._on_terminal:
                raise
            _note("(ended)")
        except FissileError as error:
            is_partial = stream.progress.answers[0].has_any
            raise call_failed(error, ",".join(self._client.connection.targets), partial=is_partial) from None
        finally:
            self._conversation.answered(said, CommandAnswer.of(stream), results)
        if self._conversation.last and self._conversation.last.finish.reason == pb.FINISH_REASON_LENGTH:
            _note("(the answer ends here because of its length)")
        return [] if results else None

    def _results(self, answer: CommandAnswer) -> list[dict[str, Any]]:
        """Results of the calls of an answer; none where it has no calls, or they are not answered."""
        results = self._tools.results(answer.tool_calls) if can_be_answered(answer) else None
        if answer.tool_calls and results is None:
            _note("(the calls are left out of the conversation)")
        return results or []

    def _show(self, stream: Stream) -> None:
        shown = TextStream(wrap=self._wrap)
        calls = CallLines(shown)
        try:
            with interrupt_cancels(stream), stream:
                for event in stream:
                    if isinstance(event, Delta):
                        shown.think(event.reasoning)
                        shown.write(event.text)
                        calls.show(event.tool_calls)
            calls.end()
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


@contextlib.contextmanager
def interrupt_cancels(stream: Stream) -> Iterator[None]:
    """Lets Ctrl-C cancel the stream, and raises KeyboardInterrupt once nothing of the stream runs any more.

    Raised where the signal arrives, it could leave a lock of gRPC taken; then the next call never ended. Where SIGINT
    is ignored, or another thread than the main one reads, nothing changes.
    """
    if (
        signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    # A signal handler may put into this queue whatever the main thread is doing.
    interrupts: SimpleQueue[bool] = SimpleQueue()
    was_interrupted = False

    def cancel_when_interrupted() -> None:
        if interrupts.get():
            stream.cancel()

    def interrupt(*_: object) -> None:
        nonlocal was_interrupted
        was_interrupted = True
        interrupts.put(True)

    canceller = threading.Thread(target=cancel_when_interrupted, daemon=True)
    canceller.start()
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except FissileError:
        if not was_interrupted:
            raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupts.put(False)
        canceller.join()
    if was_interrupted:
        raise KeyboardInterrupt


def _note(text: str) -> None:
    """Prints a note that is not part of an answer."""
    click.echo(text, err=True)


def by_terminal(*, keeps_history: bool) -> tuple[ReadLine, ReadLine, WordWrap]:
    """Makes the readers of messages and of single lines for a terminal, and the wrapper of answers' lines."""
    # Imported here, because prompt_toolkit takes a tenth of a second, which pipes and other commands do not pay.
    from prompt_toolkit.utils import get_cwidth, is_dumb_terminal  # noqa: PLC0415

    from common.cli.client.message_editor import MessageEditor, PlainEditor, history_file  # noqa: PLC0415

    kept = history_file() if keeps_history else None
    editor = PlainEditor() if is_dumb_terminal() else MessageEditor(kept)
    return editor.message, editor.answer, WordWrap(0, get_cwidth)


def piped_line(_: str) -> str | None:
    """Reads the next line of a pipe; None at its end. Prints no prompt, since nobody reads it."""
    return sys.stdin.readline() or None


def chatting_model(client: Client, name: str, timeout_s: float, *, with_tools: bool) -> pb.Model:
    """Finds the model to talk to.

    Raises:
        CommandError: no router answers, there is no such model, or it has no chat template, or none that knows tools.
    """
    try:
        model = client.model(name, timeout_s=timeout_s)
    except FissileError as error:
        raise call_failed(error, ",".join(client.connection.targets)) from None
    if pb.CAPABILITY_CHAT not in model.capabilities:
        raise CommandError(f"{model.name} has no chat template: ask it by `fissile generate --text`")
    if with_tools and pb.CAPABILITY_TOOLS not in model.capabilities:
        raise CommandError(f"the chat template of {model.name} knows no tools: leave --tools away")
    return model


_MODES: Final = (
    *LOGPROB_MODES,
    Mode(
        "without --tool-command",
        lambda given: not given["tool_commands"],
        "no command runs",
        unused=frozenset({"confirms"}),
    ),
)


@click.command(cls=ModalCommand, modes=_MODES)
@options("chat")
@with_credentials
def chat(
    addresses: Sequence[str],
    model: str,
    system: str,
    tools_file: Path | None,
    tool_commands: Sequence[tuple[str, tuple[str, ...]]],
    confirms: bool,
    keeps_history: bool,
    credentials: Credentials,
    timeout: float,
    **sampling: Any,
) -> None:
    """Talk to a model: its answers stream, and it knows what was said before.

    Without a terminal each line of standard input is a turn. On one, a paste of several lines is one message, and a
    backslash at the end of a line begins another. /help lists the commands of a conversation. With --tools
    the model may call tools. Each call is shown as `name(arguments)`, and the next line is its result, which the model
    gets and goes on; from a pipe too. Exit code: 0 ended, 1 failed, 2 something must be changed, 3 it may work later.
    """
    chosen, on_terminal = given(sampling), sys.stdin.isatty()
    declared = read_tools(tools_file) if tools_file else []
    commands = commands_of(tool_commands, declared)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    with Client(**client_arguments(addresses, credentials)) as client:
        found = chatting_model(client, model, timeout, with_tools=bool(declared))
        request = {"model": model, "timeout_s": timeout, **chosen, **({"tools": declared} if declared else {})}
        if on_terminal:
            _note(f"{found.name} at {','.join(addresses)}; /help lists the commands, Ctrl-D ends")
        message: ReadLine = piped_line
        line: ReadLine = piped_line
        wrap: WordWrap | None = None
        if on_terminal:
            message, line, wrap = by_terminal(keeps_history=keeps_history)
        tools = ToolResults(line, _note, commands, confirms=confirms, is_forgiving=on_terminal)
        Chat(client, request, Conversation(system), message, tools, wrap, on_terminal=on_terminal).run()
