"""Broken models, and a process that starts commands with them.

`Broken` makes wrong JSON values and wrong bytes at random places of a file. `Commands` runs commands of `fissile` in
forks of one process, each within a limit of memory: what a command imports takes seconds, and a fork has it already.
"""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from common.telemetry.output import exit_now

ROOT: Final = Path(__file__).resolve().parents[1]
# Address space of a command beyond that of the process that has imported it all.
SPARE_BYTES: Final = 2 << 30
# A command that has not ended by then hangs.
LIMIT_S: Final = 120.0
DELETED: Final = object()


def nested(depth: int) -> Any:
    """A list in a list, and so on."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


# Values of JSON that a setting may have by mistake or by intent.
VALUES: Final[tuple[Any, ...]] = (
    *(DELETED, None, True, False, -1, 0, 1, 3, 2**31 - 1, 2**31, 2**63, 10**400, 0.5, -2.5, 1e308),
    *(float("nan"), float("inf"), float("-inf"), "", "x", "\n\x1b[2J\u202e", "../../x", "\ud800", "a" * 100_000),
    *([], [None], [1, 2], [-1] * 10_000, ["x"], {}, {"a": 1}, {"a": {}}, nested(60), nested(900)),
)


class Broken:
    """Wrong contents of files, drawn with a seed."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def json(self, content: bytes) -> tuple[bytes, str]:
        """Changes one value of a JSON text, whatever its place. Returns the text and what was changed."""
        value = json.loads(content)
        return with_value(value, self.draw.choice(list(places(value))), self.draw.choice(VALUES))

    def bytes(self, content: bytes, end: int) -> tuple[bytes, str]:
        """Changes bytes before `end`, or cuts the content. Returns it and what was changed."""
        wrong, at = bytearray(content), self.draw.randrange(end)
        kind = self.draw.choice(("bit", "number", "cut", "more", "zeros"))
        if kind == "bit":
            wrong[at] ^= 1 << self.draw.randrange(8)
        elif kind == "number":
            most = self.draw.choice((1, 255, 2**31, 2**40, 2**63, 2**64 - 1))
            wrong[at : at + 8] = self.draw.randint(0, most).to_bytes(8, "little")
        elif kind == "cut":
            del wrong[at:]
        elif kind == "more":
            wrong[at:at] = self.draw.randbytes(self.draw.randint(1, 40))
        else:
            wrong[at : at + 16] = bytes(16)
        return bytes(wrong), f"{kind} at {at}"


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values in a JSON value, at most 40 of each list or object."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items)[:40]:
        yield from places(item, (*path, key))


def with_value(value: Any, path: tuple[Any, ...], new: Any) -> tuple[bytes, str]:
    """The JSON text of `value` with `new` at a path, and a name of the change."""
    wrong = copy.deepcopy(value)
    inner = wrong
    for key in path[:-1]:
        inner = inner[key]
    if new is DELETED:
        del inner[path[-1]]
    else:
        inner[path[-1]] = new
    named = "deleted" if new is DELETED else repr(new)[:40]
    return json.dumps(wrong).encode(), f"{'.'.join(map(str, path))} = {named}"


class Ended(NamedTuple):
    """How a command ended: exit code, or minus the signal; lines of standard error; most kilobytes of memory."""

    code: int
    lines: list[str]
    kilobytes: int

    @property
    def fault(self) -> str:
        """What is wrong with how a command ended that was given a broken model; empty if nothing is."""
        errors = [line for line in self.lines if line.startswith("error: ")]
        if any("Traceback" in line for line in self.lines):
            return "a traceback"
        if self.code == 0:
            return ""
        if self.code != 2:
            return f"exit code {self.code}"
        if len(errors) != 1 or self.lines[-1] != errors[0]:
            return f"{len(errors)} error lines"
        if not errors[0].isprintable() or len(errors[0]) > 5_000:
            return f"a line of {len(errors[0])} characters, printable: {errors[0].isprintable()}"
        return ""


class Commands:
    """Runs commands in forks of a process that has imported them."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.hostile_models"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "FISSILE_WEIGHTS_CACHE": "off", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str) -> Ended:
        """Runs `fissile` with arguments; a worker ends once it serves."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        return Ended(*json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()


@contextmanager
def commands() -> Iterator[Commands]:
    """Commands until the block ends."""
    started = Commands()
    try:
        yield started
    finally:
        started.close()


def load(model: Path) -> tuple[str, ...]:
    """Arguments of a worker that loads a model, in little memory."""
    small = ("--kv-cache-memory", "8MiB", "--max-num-seqs", "4", "--max-num-batched-tokens", "64")
    return ("worker", "--model", str(model), "--port", "0", "--threads", "1", *small)


def _run(arguments: list[str]) -> Ended:
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if not child:
            _become(arguments, output.fileno())
        watched = os.pidfd_open(child)
        has_ended = bool(select.select([watched], [], [], LIMIT_S)[0])
        os.close(watched)
        if not has_ended:
            os.kill(child, signal.SIGKILL)
        _, status, usage = os.wait4(child, 0)
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
    code = os.waitstatus_to_exitcode(status)
    return Ended(code, lines if has_ended else [*lines, "it hangs"], usage.ru_maxrss)


def _become(arguments: list[str], output: int) -> None:
    """Runs a command in this forked process, and ends it."""
    code = 70
    try:
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(0, 1)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + SPARE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.argv = ["fissile", *arguments]
        from common.cli.group import run

        code = run()
    except BaseException:
        traceback.print_exc()
    finally:
        exit_now(code)


def _serve() -> None:
    """Runs the commands that standard input names, one JSON list a line."""
    _import_all()
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)


def _import_all() -> None:
    from common.cli.group import add_stubs_to_path

    add_stubs_to_path()
    from common.text.tokenizer_reading import import_transformers
    from worker import server
    from worker.config.transformers_config import is_of_other_model

    import_transformers()
    is_of_other_model("llama", "qwen3")
    wait_ready = server.Worker.wait_ready

    async def end_when_ready(self: server.Worker) -> None:
        await wait_ready(self)
        os.kill(os.getpid(), signal.SIGTERM)

    server.Worker.wait_ready = end_when_ready  # type: ignore[method-assign]


if __name__ == "__main__":
    _serve()
