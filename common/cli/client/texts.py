"""Commands with many texts: reads the texts from arguments or lines, and splits them into calls."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import click
from fissile.client import Client, FissileError
from fissile.v1 import inference_pb2 as pb

from common.cli.core.client import Credentials, call_failed, client_arguments
from common.cli.core.errors import CommandError
from common.limits import MAX_PROMPT_TEXT_BYTES

T = TypeVar("T")
_Command: TypeAlias = Callable[..., Any]
# A text's place in its call, as a status names it.
_PLACE: Final = re.compile(r"\b(inputs|documents|continuations)\[(\d+)\]")
_SHOWN_CHARACTERS: Final = 100
# Control characters that JSON does not escape.
_ESCAPED: Final = {code: f"\\u{code:04x}" for code in (*range(127, 160), 0x2028, 0x2029)}
# Of a text in a request, beside itself; more than protobuf takes.
_FRAME_BYTES: Final = 32


def with_texts(command: _Command) -> _Command:
    """Hands a command the options about its texts and their requests as one argument, `source`."""

    @functools.wraps(command)
    def wrapped(*args: Any, file: str | None, json_lines: bool, model: str, priority: str | None, **kwargs: Any) -> Any:
        return command(*args, source=Source(file, json_lines, model, priority), **kwargs)

    return wrapped


@dataclass(frozen=True, slots=True)
class Source:
    """Source of a command's texts, and fields of all its requests.

    Attributes:
        file: with a text in each line; `-` is standard input, None takes the arguments.
        json_lines: True if each line is a JSON string.
        model: name; "" is the only one.
        priority: a name of `Priority`, in lower case; None is the caller's.
    """

    file: str | None = None
    json_lines: bool = False
    model: str = ""
    priority: str | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of a request."""
        given = {"model": self.model} if self.model else {}
        return given if self.priority is None else {**given, "priority": f"PRIORITY_{self.priority.upper()}"}

    def texts(self, arguments: Sequence[str], what: str) -> list[str]:
        """The texts.

        Args:
            arguments: of the command.
            what: they are, in the plural.

        Raises:
            UsageError: there are none, or both arguments and a file.
            CommandError: the file cannot be read, or a line is none.
        """
        if arguments and (self.file is not None or self.json_lines):
            raise click.UsageError(f"give {what} as arguments or by --file and --json-lines, not both")
        if arguments:
            return [_checked(text, f"argument {place}") for place, text in enumerate(arguments, 1)]
        name = "standard input" if self.file in (None, "-") else str(self.file)
        if self.file is None and sys.stdin.isatty():
            raise click.UsageError(f"no {what}: give them as arguments, or one per line with --file or standard input")
        content = sys.stdin.buffer.read() if self.file in (None, "-") else _read(Path(name))
        lines = content.removesuffix(b"\n").split(b"\n") if content else []
        if not lines:
            raise click.UsageError(f"no {what}: {name} is empty")
        return [self._text(line, f"line {number} of {name}") for number, line in enumerate(lines, 1)]

    def _text(self, line: bytes, where: str) -> str:
        try:
            text: Any = line.decode().removesuffix("\r")
        except UnicodeDecodeError:
            raise CommandError(f"{where} is not valid UTF-8") from None
        if self.json_lines:
            try:
                text = json.loads(text)
            except ValueError:
                text = None
            if not isinstance(text, str):
                raise CommandError(
                    f'{where} is not a JSON string; with --json-lines each line is one, such as "a text"'
                )
        return _checked(text, where)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}") from None


def _checked(text: str, where: str) -> str:
    """Returns a text after checking that it can be sent.

    Raises:
        CommandError: it is empty, or no Unicode.
    """
    if not text:
        raise CommandError(f"{where} is empty: each text needs at least one character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise CommandError(f"{where} is not valid UTF-8") from None
    return text


def parts_of(
    texts: Sequence[str], most: int, beside: int = 0, most_bytes: int = MAX_PROMPT_TEXT_BYTES
) -> Iterator[Sequence[str]]:
    """Splits texts, in order, into parts that fit in a call each.

    Args:
        texts: all of them.
        most: texts of a part.
        beside: bytes of what stands beside each text in its prompt.
        most_bytes: of a part; a text that is longer is a part by itself.
    """
    start = size = 0
    for place, text in enumerate(texts):
        length = len(text.encode()) + beside + _FRAME_BYTES
        if place > start and (place - start == most or size + length > most_bytes):
            yield texts[start:place]
            start, size = place, 0
        size += length
    if start < len(texts):
        yield texts[start:]


class TextCaller:
    """Calls routers for a command and converts failures to error lines. Used in a `with` block.

    Args:
        addresses: of the routers.
        credentials: of the calls.
    """

    def __init__(self, addresses: Sequence[str], credentials: Credentials) -> None:
        self._addresses = addresses
        self.client = Client(**client_arguments(addresses, credentials))

    def __enter__(self) -> TextCaller:
        """Returns the caller, which connects with its first call."""
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def ask(self, call: Callable[[Client], T], start: int = 0) -> T:
        """Makes one call.

        Args:
            call: makes it.
            start: place of its first text among those of the command.

        Raises:
            CommandError: it has failed; places of texts are those of the command.
        """
        try:
            return call(self.client)
        except FissileError as error:
            failure = call_failed(error, ",".join(self._addresses))
            said = _PLACE.sub(lambda match: f"{match[1]}[{int(match[2]) + start}]", str(failure))
            raise CommandError(said, failure.exit_code) from error

    def ask_in_parts(
        self, texts: Sequence[str], most: int, call: Callable[[Client, Sequence[str]], T], beside: int = 0
    ) -> Iterator[tuple[int, T]]:
        """Makes a call for each part of the texts (`parts_of`); yields the place of its first text, and its answer.

        Raises:
            CommandError: one has failed.
        """
        start = 0
        for part in parts_of(texts, most, beside):
            yield start, self.ask(functools.partial(_call_of, call, part), start)
            start += len(part)


def _call_of(call: Callable[[Client, Sequence[str]], T], part: Sequence[str], client: Client) -> T:
    return call(client, part)


def added_usage(total: pb.Usage, usage: pb.Usage) -> pb.Usage:
    """Adds two token counts."""
    return pb.Usage(
        prompt_tokens=total.prompt_tokens + usage.prompt_tokens, cached_tokens=total.cached_tokens + usage.cached_tokens
    )


def usage_line(count: str, usage: pb.Usage) -> str:
    """Formats the figures of a command for standard error."""
    return f"{count}, {usage.prompt_tokens} tokens ({usage.cached_tokens} cached)"


def shown(text: str) -> str:
    """Formats a text for one line of a table: shortened, without control characters."""
    line = json.dumps(text, ensure_ascii=False).translate(_ESCAPED)
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}..."
