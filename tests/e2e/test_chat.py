"""`fissile chat` by a pipe and on a terminal, and `fissile generate` over several routers, against real routers."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fissile.worker.v1 import worker_pb2 as wpb

from tests.e2e.fake_worker import FakeWorker, letters, short
from tests.e2e.router_bench import FILES, TOKENIZER, Bench, bench, until
from tests.e2e.service import free_port

ROOT = Path(__file__).resolve().parents[2]
# Makes standard input the terminal of a session of its own, so that Ctrl-C is a signal, and becomes the program. Code
# that runs in the child between fork and exec would deadlock with gRPC's threads. What a shell starts in the background
# ignores the signal, and so would the program.
ON_ITS_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
LETTERS = "hijklmnpqrstuvwxyz"
# The editor sends this when it begins to read a message: it asks the terminal to mark pastes.
PASTES = "\x1b[?2004h"


def prompts(b: Bench) -> list[str]:
    """Prompts that the worker has got, as text."""
    return [TOKENIZER.decode(list(one.token_ids)) for one in b.workers[0].submitted]


async def command(*arguments: str, text: str = "") -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command with `text` on standard input."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "common.cli.main", *arguments),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate(text.encode())
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_each_piped_line_is_turn_of_one_conversation(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    text = f"first\n\n//second\n/usage\n/save {kept}\n/reset\n/system be kind\nthird\n/quit\nnever\n"
    async with bench(FakeWorker(FILES, answer=short)) as b:
        code, out, err = await command("chat", "--address", b.router.server.address, "--system", "be brief", text=text)
        assert (code, out) == (0, "hello\nhello\nhello\n"), err
        first, second, third = prompts(b)
        assert "be brief" in first
        assert first.count("first") == second.count("first") == second.count("hello") == second.count("/second") == 1
        assert "//second" not in second
        assert "be kind" in third
        assert not any(said in third for said in ("be brief", "first", "hello"))
        assert [(said["role"], said["content"]) for said in json.loads(kept.read_text())] == [
            ("system", "be brief"),
            ("user", "first"),
            ("assistant", "hello"),
            ("user", "/second"),
            ("assistant", "hello"),
        ]
        assert "in all: 2 answers, " in err
        assert "TTFT " in err
        await b.empty()


async def test_pipe_chat_failure_sets_exit_code() -> None:
    async with bench(FakeWorker(FILES, answer=short)) as b:
        at = ("chat", "--address", b.router.server.address)
        assert await command(*at, text="hi\n/no such\nnever\n") == (
            2,
            "hello\n",
            "error: there is no command /no; /help lists those that there are\n",
        )
        code, out, err = await command(*at, "--model", "other", text="hi\n")
        assert (code, out, err.partition(": ")[0]) == (2, "", "error"), err
        assert "NOT_FOUND" in err
        code, out, err = await command(*at, "--stop", "x" * 100_000, text="hi\n")
        assert (code, out) == (2, ""), err
    code, out, err = await command("chat", "--address", f"127.0.0.1:{free_port()}", text="hi\n")
    assert (code, out) == (3, "")
    assert "no router can be reached at" in err


async def test_chat_command_refuses_model_without_template() -> None:
    files = {name: data for name, data in FILES.items() if "template" not in name}
    config = json.loads(files["tokenizer_config.json"])
    config.pop("chat_template", None)
    files["tokenizer_config.json"] = json.dumps(config).encode()
    async with bench(FakeWorker(files, answer=short)) as b:
        code, _, err = await command("chat", "--address", b.router.server.address, text="hi\n")
        assert (code, "fissile generate --text" in err) == (2, True), err


class Terminal:
    """`fissile chat` on a terminal of its own.

    Attributes:
        shown: what the terminal has shown.
    """

    def __init__(self, *arguments: str, kind: str = "dumb", columns: int = 0, state: Path | None = None) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if columns else 0, columns, 0, 0))
        self._arguments = arguments
        # Keeps tests away from the history of the user who runs them.
        self._history = {"XDG_STATE_HOME": str(state)} if state else {"FISSILE_HISTORY": "0"}
        self._kind = kind
        self._slave = slave
        self.shown = ""
        self._searched = 0

    async def __aenter__(self) -> Terminal:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-c", ON_ITS_TERMINAL, "-m", "common.cli.main", "chat", *self._arguments),
            cwd=ROOT,
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            env={**os.environ, "TERM": self._kind, "PROMPT_TOOLKIT_NO_CPR": "1", **self._history},
        )
        os.close(self._slave)
        asyncio.get_running_loop().add_reader(self._master, self._read)
        return self

    async def __aexit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._master)
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        os.close(self._master)

    def _read(self) -> None:
        try:
            self.shown += os.read(self._master, 4096).decode(errors="replace")
        except OSError:
            # The other end is closed.
            asyncio.get_running_loop().remove_reader(self._master)

    @property
    def is_dumb(self) -> bool:
        """True if the terminal has no control sequences."""
        return self._kind == "dumb"

    def paste(self, text: str) -> None:
        """Pastes `text` between the marks of bracketed paste."""
        self.type(f"\x1b[200~{text}\x1b[201~")

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    async def sees(self, text: str) -> str:
        """Waits for the next `text` on the terminal; what stands before it."""
        try:
            await until(lambda: text in self.shown[self._searched :])
        except AssertionError:
            raise AssertionError(f"{text!r} is not in {self.shown[self._searched :]!r}, after {self.shown!r}") from None
        before, _, _ = self.shown[self._searched :].partition(text)
        self._searched += len(before) + len(text)
        return before


@asynccontextmanager
async def terminal(b: Bench, *arguments: str, **options: Any) -> AsyncIterator[Terminal]:
    async with Terminal("--address", b.router.server.address, *arguments, **options) as made:
        await made.sees("/help lists the commands")
        await made.sees("> " if made.is_dumb else PASTES)
        yield made


async def test_ctrl_c_ends_answer_but_not_chat() -> None:
    worker = FakeWorker(FILES, answer=letters, step_s=0.02)
    async with bench(worker) as b, terminal(b) as chat:
        chat.type("count\n")
        await chat.sees(LETTERS[:6])
        chat.type("\x03")
        await chat.sees("(ended)")
        await chat.sees("> ")
        await b.empty()
        # What has come is said to have been said; Ctrl-C at the prompt drops the line.
        worker.answer = short
        chat.type("dropped\x03")
        await chat.sees("> ")
        chat.type("again\n")
        await chat.sees("hello")
        await chat.sees("> ")
        assert LETTERS[:6] in prompts(b)[-1]
        assert "dropped" not in prompts(b)[-1]
        chat.type("/usage\n")
        await chat.sees("in all: 2 answers")
        await chat.sees("> ")
        chat.type("\x04")
        assert await chat.process.wait() == 0


async def test_terminal_chat_failure_is_one_line() -> None:
    async with bench(FakeWorker(FILES, answer=short)) as b, terminal(b) as chat:
        for typed, said in (
            ("/nonsense\n", "error: there is no command /nonsense; /help"),
            ("/save\n", "error: /save needs the name of a file"),
            ("/save /no/such/folder/file\n", "error: the conversation cannot be written to /no/such/folder"),
            ("/usage\n", "nothing has been asked yet"),
            ("/help\n", "/reset        forgets the conversation"),
        ):  # fmt: skip
            chat.type(typed)
            await chat.sees(said)
            await chat.sees("> ")
        b.workers[0].end_with = wpb.SequenceEnd(reason=wpb.END_REASON_NOT_A_NUMBER, message="not a number")
        chat.type("first\n")
        await chat.sees("error: INTERNAL: ")
        await chat.sees("> ")
        b.workers[0].end_with = None
        chat.type("second\n")
        await chat.sees("hello")
        await chat.sees("> ")
        chat.type("/quit\n")
        assert await chat.process.wait() == 0


def said(b: Bench) -> list[str]:
    """The user's messages in the last prompt that the worker received."""
    # The decoded prompt has no special tokens, so roles separate the messages.
    turns = prompts(b)[-1].split("user\n")[1:]
    return [turn.partition("assistant\n")[0] for turn in turns]


async def test_paste_of_several_lines_sends_one_message() -> None:
    """Former fault: a paste of three lines sent three messages."""
    async with bench(FakeWorker(FILES, answer=short)) as b, terminal(b, kind="xterm", columns=80) as chat:
        for pasted in (
            "one\ntwo\nthree",
            "  indented \\\n\tmore\n",
            '"""\na docstring\n"""',
            "/usr/bin/x\nwhat is it?",
        ):
            chat.paste(pasted)
            chat.type("\r")
            await chat.sees("hello")
            await chat.sees(PASTES)
            assert said(b)[-1] == pasted.rstrip()
        assert len(b.workers[0].submitted) == 4


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("one\\\rtwo\\\rthree\r", "one\ntwo\nthree"),
        ('"""one\r\rtwo"""\r', "one\n\ntwo"),
        ('"""\rone\r"""\r', "one"),
        ('"""one"""\r', "one"),
        ("path \\\\\r", "path \\\\"),
    ],
)
@pytest.mark.parametrize("kind", ["xterm", "dumb"])
@pytest.mark.each_value
async def test_typed_lines_with_continuation_send_one_message(typed: str, message: str, kind: str) -> None:
    async with bench(FakeWorker(FILES, answer=short)) as b, terminal(b, kind=kind, columns=80) as chat:
        chat.type(typed)
        await chat.sees("hello")
        assert said(b) == [message]


async def test_history_is_kept_for_later_conversations(tmp_path: Path) -> None:
    kept = tmp_path / "fissile" / "chat_history"
    async with bench(FakeWorker(FILES, answer=short)) as b:
        async with terminal(b, kind="xterm", columns=80, state=tmp_path) as chat:
            chat.paste("first\nof two lines")
            chat.type("\r")
            await chat.sees("hello")
            await chat.sees(PASTES)
        assert kept.stat().st_mode & 0o777 == 0o600
        assert kept.parent.stat().st_mode & 0o777 == 0o700
        for options, found in (([], "first\nof two lines"), (["--no-history"], "")):
            before = kept.read_bytes()
            async with terminal(b, *options, kind="xterm", columns=80, state=tmp_path) as chat:
                chat.type("\x1b[A!\r")
                await chat.sees("hello")
            assert said(b)[-1] == f"{found}!"
            assert (kept.read_bytes() == before) == bool(options)


async def test_unwritable_history_prints_one_line(tmp_path: Path) -> None:
    (tmp_path / "fissile").write_text("no folder")
    async with (
        bench(FakeWorker(FILES, answer=short)) as b,
        Terminal("--address", b.router.server.address, kind="xterm", columns=80, state=tmp_path) as chat,
    ):
        await chat.sees("the history is not kept")
        await chat.sees(PASTES)
        chat.type("hi\r")
        await chat.sees("hello")


def words(_: wpb.SubmitSequence) -> list[int]:
    """An answer of 400 words of four letters and a blank, without an end of sequence."""
    return [*TOKENIZER.encode("lion ")] * 400


async def test_answers_are_wrapped_between_words() -> None:
    worker = FakeWorker(FILES, answer=words)
    async with bench(worker) as b, terminal(b, "--max-tokens", "200", kind="xterm", columns=23) as chat:
        chat.type("say\r")
        await chat.sees("\x1b[?2004l")
        shown = await chat.sees("(the answer")
        lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown).split()
        assert set(lines) == {"lion"}
        assert all(len(line) <= 23 and not line.strip().replace("lion", "").strip() for line in shown.splitlines())


async def test_cut_answer_is_marked_partial() -> None:
    async with bench(FakeWorker(FILES, answer=letters)) as b, terminal(b, "--max-tokens", "3") as chat:
        chat.type("count\n")
        await chat.sees("hij")
        await chat.sees("(the answer ends here because of its length)")


async def test_generate_command_resumes_at_next_router() -> None:
    """The answer is complete, and its figures cover both parts."""
    workers = [FakeWorker(FILES, worker_id=f"w{i}", answer=letters, step_s=0.01) for i in range(2)]
    async with bench(workers[0], drain_timeout_s=0.0) as b, bench(workers[1]) as other:
        addresses = f"{b.router.server.address},{other.router.server.address}"
        asking = asyncio.ensure_future(
            command("generate", "--router", addresses, "--text", "--max-tokens", "200", "--json", "say")
        )
        await until(lambda: any(one.sent > 5 for one in workers[0].running.values()))
        await b.router.stop()
        code, out, err = await asking
        answer = json.loads(out)
        assert code == 0, err
        assert answer["text"] == (LETTERS * 20)[: len(answer["text"])]
        assert answer["usage"]["completion_tokens"] == 200
        assert (answer["finish_reason"], answer["worker_id"]) == ("length", "w1")


async def test_empty_entry_in_address_list_is_refused() -> None:
    code, _, err = await command("generate", "--router", "127.0.0.1:1,,", "say")
    assert (code, "is not a list of addresses" in err) == (2, True)
