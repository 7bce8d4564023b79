"""Types of option values: each reads a text, and its error says what would be valid."""

from __future__ import annotations

import math
import re
import shlex
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import click

from common.errors import InvalidFieldError
from common.files import parse_json
from common.limits import HEARTBEAT_S, MAX_LEASE_S
from common.params.config_parts import SpeculativeConfig
from common.params.names import PRIORITIES

if TYPE_CHECKING:
    import random

T = TypeVar("T")
# The shortest timeout: 0 would end every call at once.
SHORTEST_S: Final = 0.001
# Value of `--nnodes auto`.
AUTO_NODES: Final = 0
# Objectives of `fissile bench --slo`.
OBJECTIVES: Final = ("ttft", "tpot", "itl", "latency")
_DURATION: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|s|m|h|)")
# Numerator and denominator: 35 / 1000 is the nearest number to 0.035, and 35 * 0.001 is not.
_UNITS: Final = {"ms": (1, 1000), "s": (1, 1), "": (1, 1), "m": (60, 1), "h": (3600, 1)}
_BYTES: Final = re.compile(r"(\d+(?:\.\d+)?) ?(GiB|MiB|KiB|)")
_BYTE_UNITS: Final = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "": 1}
_LENGTHS: Final = re.compile(r"(\d+)(?::(\d+))?")


def seconds(text: str) -> float:
    """Reads a duration, such as `250ms`, `0.25s`, `0.25`, `5m` or `1h`, as seconds.

    Raises:
        ValueError: `text` is not a duration.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a duration; use for example 250ms, 0.25s or 5m")
    times, over = _UNITS[match[2]]
    return float(match[1]) * times / over


class ParsedText(click.ParamType[T]):
    """A type whose values are read from text by `read`.

    Attributes:
        kind: class of the values. A value of this class is returned as it is.
    """

    kind: type

    @abstractmethod
    def read(self, text: str) -> T:
        """Reads a text.

        Raises:
            ValueError: the text is not valid; says what would be.
        """

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> T:
        """Reads the text of an option."""
        if isinstance(value, self.kind):
            return cast("T", value)
        try:
            return self.read(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class AsWritten(click.ParamType[str]):
    """Text that another type can read, kept as it was written. `fissile serve` passes it on to its children.

    Args:
        checked: the other type.
    """

    def __init__(self, checked: click.ParamType[Any]) -> None:
        self.checked = checked
        self.name = checked.name

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Checks the text of an option."""
        self.checked.convert(value, param, ctx)
        return str(value)


class Duration(ParsedText[float]):
    """Seconds, from `250ms`, `0.25s`, `0.25`, `5m` or `1h`: the form of all durations of all commands.

    Args:
        least: seconds, the shortest that is valid.
        most: seconds, the longest.
    """

    name = "duration"
    kind = float

    def __init__(self, least: float = 0.0, most: float = math.inf) -> None:
        self._least = least
        self._most = most

    def read(self, text: str) -> float:
        """Reads a duration; see ParsedText."""
        return seconds(text)

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Reads the text of an option, and checks its range."""
        read = super().convert(value, param, ctx)
        if not self._least <= read <= self._most:
            end = "or more" if math.isinf(self._most) else f"to {self._most:g}s"
            self.fail(f"{value} is out of range; use {self._least:g}s {end}", param, ctx)
        return read


class Lease(Duration):
    """Seconds that workers accept as a lease, and that heartbeats can renew in time."""

    name = "lease"

    def __init__(self) -> None:
        super().__init__(2 * HEARTBEAT_S, MAX_LEASE_S)


class ByteSize(ParsedText[int]):
    """Bytes, from `2GiB`, `512MiB`, `4096KiB` or a plain number."""

    name = "size"
    kind = int

    def read(self, text: str) -> int:
        """Reads a size; see ParsedText."""
        match = _BYTES.fullmatch(text.strip())
        size = int(float(match[1]) * _BYTE_UNITS[match[2]]) if match else 0
        if size <= 0:
            raise ValueError(f"{text!r} is not a size; use for example 2GiB or 512MiB")
        return size


class Fraction(ParsedText[float]):
    """A share, from `0.1%` or `0.001`."""

    name = "fraction"
    kind = float

    def read(self, text: str) -> float:
        """Reads a share; see ParsedText."""
        number = text.strip()
        try:
            share = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
        except ValueError:
            raise ValueError(f"{text!r} is not a fraction; use for example 0.1% or 0.001") from None
        if not 0 <= share <= 1:
            raise ValueError(f"{text} is out of range; use 0% to 100%")
        return share


class NodeCount(ParsedText[int]):
    """Number of machines, or `auto`: AUTO_NODES, for what the launcher's variables say."""

    name = "integer or auto"
    kind = int

    def read(self, text: str) -> int:
        """Reads a number of machines; see ParsedText."""
        if text.strip() == "auto":
            return AUTO_NODES
        if not (text.isascii() and text.isdigit() and int(text)):
            raise ValueError(f"{text!r} is not a number of machines; use for example 2, or auto")
        return int(text)


class Sizes(ParsedText[tuple[int, ...]]):
    """Whole numbers of at least 1, from `1,2,8`."""

    name = "sizes"
    kind = tuple

    def read(self, text: str) -> tuple[int, ...]:
        """Reads a list; see ParsedText."""
        numbers = tuple(int(part) if part.strip().isdecimal() else 0 for part in text.split(","))
        if min(numbers) < 1:
            raise ValueError(f"{text!r} is not a list of sizes; use for example 1,2,8")
        return numbers


class Names(ParsedText[tuple[str, ...]]):
    """Some of a few names, each once, from `first,second`.

    Args:
        known: valid names.
    """

    name = "names"
    kind = tuple

    def __init__(self, known: Sequence[str]) -> None:
        self._known = known

    def read(self, text: str) -> tuple[str, ...]:
        """Reads a list; see ParsedText."""
        names = tuple(part.strip() for part in text.split(",")) if text else ()
        if unknown := [name for name in names if name not in self._known]:
            raise ValueError(f"{unknown[0]!r} is unknown; use some of {','.join(self._known)}")
        if len(set(names)) != len(names):
            raise ValueError(f"{text!r} has a name twice")
        return names


class Numbers(ParsedText[tuple[float, ...]]):
    """Different numbers above 0, from `1,8,32`.

    Args:
        number: class of each number.
    """

    name = "numbers"
    kind = tuple

    def __init__(self, number: type[int] | type[float]) -> None:
        self._number = number

    def read(self, text: str) -> tuple[float, ...]:
        """Reads a list; see ParsedText."""
        try:
            numbers = tuple(self._number(part) for part in text.split(","))
        except ValueError:
            numbers = ()
        if not numbers or not all(0 < each < math.inf for each in numbers):
            whole = "whole numbers" if self._number is int else "numbers"
            raise ValueError(f"{text!r} is not a list of {whole} above 0; use for example 1,8,32")
        if len(set(numbers)) != len(numbers):
            raise ValueError(f"{text!r} names a number twice; --repeat measures all of them again")
        return numbers


class Bias(ParsedText[tuple[int, float]]):
    """A token id and the number to add to its logit, from `42=-1.5`."""

    name = "bias"
    kind = tuple

    def read(self, text: str) -> tuple[int, float]:
        """Reads a bias; see ParsedText."""
        token, _, bias = text.partition("=")
        try:
            return int(token), float(bias)
        except ValueError:
            raise ValueError(f"{text!r} is not a bias; use for example 42=-1.5") from None


class Line(click.ParamType[str]):
    """Text of a repeatable option. Its environment variable has one text on each line, since texts have blanks."""

    name = "text"
    envvar_list_splitter = "\n"


class ToolCommand(ParsedText[tuple[str, tuple[str, ...]]]):
    """Name of a tool and the words of its command, from `NAME=COMMAND`, split as a shell splits words.

    Its environment variable has one command on each line, since commands have blanks.
    """

    name = "tool command"
    kind = tuple
    envvar_list_splitter = "\n"

    def read(self, text: str) -> tuple[str, tuple[str, ...]]:
        """Reads a command; see ParsedText."""
        name, _, command = text.partition("=")
        try:
            words = tuple(shlex.split(command))
        except ValueError as error:
            raise ValueError(f"{text!r} cannot be split into words: {error}") from None
        if not name or not words:
            raise ValueError(f"{text!r} is not NAME=COMMAND; use for example 'get_weather=./weather.py --short'")
        return name, words


class MetadataKey(ParsedText[str]):
    """Name of a text entry of gRPC metadata, in lower case."""

    name = "key"
    kind = type(None)

    def read(self, text: str) -> str:
        """Reads a name; see ParsedText."""
        name = text.lower()
        if re.fullmatch(r"[0-9a-z_.-]+", name) is None or name.endswith("-bin") or name.startswith("grpc-"):
            raise ValueError(f"{text!r} is not a name of text metadata; use letters, digits, - _ and .")
        return name


class PerTenant(ParsedText[tuple[str, float]]):
    """A tenant and a number, from `TENANT=NUMBER`. A whole number alone is for all other tenants, named "".

    Args:
        number: class of the number.
    """

    name = "tenant"
    kind = tuple

    def __init__(self, number: type[int] | type[float]) -> None:
        self._number = number

    def read(self, text: str) -> tuple[str, float]:
        """Reads a tenant and its number; see ParsedText."""
        tenant, equals, number = text.rpartition("=")
        is_whole = self._number is int
        try:
            read = self._number(number)
        except ValueError:
            raise ValueError(f"{text!r} is not {'[TENANT=]N' if is_whole else 'TENANT=WEIGHT'}") from None
        if not (read >= 0 if is_whole else 0 < read < math.inf) or (not tenant and (equals or not is_whole)):
            valid = "0 or more, after TENANT= or alone" if is_whole else "more than 0, after TENANT="
            raise ValueError(f"{text!r} is out of range; use a number {valid}")
        return tenant, read


class TenantPriority(ParsedText[tuple[str, str]]):
    """A tenant and a priority, from `TENANT=PRIORITY`. A priority alone is for all other tenants, named ""."""

    name = "priority"
    kind = tuple

    def read(self, text: str) -> tuple[str, str]:
        """Reads a tenant and its priority; see ParsedText."""
        tenant, equals, priority = text.rpartition("=")
        if priority not in PRIORITIES or (equals and not tenant):
            raise ValueError(f"{text!r} is not [TENANT=]PRIORITY, with one of {', '.join(PRIORITIES)}")
        return tenant, priority


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens, uniform in [low, high], both included.

    Raises:
        ValueError: the range is empty or begins below 1.
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(
                f"{self} is not a range of lengths; use LOW:HIGH with 1 <= LOW <= HIGH, or one number from 1"
            )

    def __str__(self) -> str:
        """Formats the range as `parse` reads it."""
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Reads `LOW:HIGH`, or one number.

        Raises:
            ValueError: it is neither.
        """
        match = _LENGTHS.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a range of lengths; use LOW:HIGH, for example 32:256, or one number")
        return cls(int(match[1]), int(match[2] or match[1]))

    def draw(self, rnd: random.Random) -> int:
        """Draws one length."""
        return rnd.randint(self.low, self.high)


class LengthRange(ParsedText[Lengths]):
    """A range of numbers of tokens, from `LOW:HIGH` or one number."""

    name = "lengths"
    kind = Lengths

    def read(self, text: str) -> Lengths:
        """Reads a range; see ParsedText."""
        return Lengths.parse(text)


class Objectives(ParsedText[dict[str, float]]):
    """Most seconds by the names of OBJECTIVES, from `METRIC=TIME,...`."""

    name = "objectives"
    kind = dict

    def read(self, text: str) -> dict[str, float]:
        """Reads objectives; see ParsedText."""
        found: dict[str, float] = {}
        for part in text.split(","):
            name, _, limit = part.partition("=")
            if name.strip() not in OBJECTIVES or name.strip() in found:
                valid = f"{', '.join(OBJECTIVES)}, each once: ttft=200ms,tpot=50ms"
                raise ValueError(f"{part!r} is not an objective; use {valid}")
            found[name.strip()] = seconds(limit)
        return found


_SPECULATION_EXAMPLE: Final = '{"method": "ngram", "num_speculative_tokens": 4}'
_SPECULATION_FIELDS: Final = tuple(field.name for field in fields(SpeculativeConfig))


class Speculation(ParsedText[SpeculativeConfig]):
    """Speculative decoding, from a JSON object with fields of SpeculativeConfig."""

    name = "speculation"
    kind = SpeculativeConfig

    def read(self, text: str) -> SpeculativeConfig:
        """Reads a JSON object; see ParsedText."""
        try:
            given = parse_json(text)
        except ValueError:
            given = None
        if not isinstance(given, dict):
            raise ValueError(f"{text!r} is not a JSON object; use for example '{_SPECULATION_EXAMPLE}'")
        for name in given:
            if name not in _SPECULATION_FIELDS:
                raise ValueError(f"{name} is unknown; valid: {', '.join(_SPECULATION_FIELDS)}")
        for name in ("method", "num_speculative_tokens"):
            if name not in given:
                raise ValueError(f"{name} is missing; use for example '{_SPECULATION_EXAMPLE}'")
        try:
            return SpeculativeConfig(**given)
        except InvalidFieldError as error:
            raise ValueError(str(error)) from None
