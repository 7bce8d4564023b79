"""An unwritable log stream blocks no writer, and reports how many lines it lost."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import pytest
import structlog

from common.telemetry import output as output_module
from common.telemetry.failures import failures
from common.telemetry.logs import setup_logging
from common.telemetry.output import Output, OutputStream
from tests.e2e.test_broken_output import fill

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    handlers, level, raising = logging.root.handlers[:], logging.root.level, logging.raiseExceptions
    yield
    structlog.reset_defaults()
    logging.captureWarnings(False)
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
    logging.raiseExceptions = raising


@contextlib.contextmanager
def pipe() -> Iterator[tuple[int, TextIO]]:
    reads, writes = os.pipe()
    with contextlib.suppress(OSError), os.fdopen(writes, "w") as stream:
        yield reads, stream
    with contextlib.suppress(OSError):
        os.close(reads)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def read_lines(descriptor: int, last: str) -> list[str]:
    """Reads lines up to one that ends with `last`."""
    data = b""
    while not data.endswith(f"{last}\n".encode()):
        part = os.read(descriptor, 1 << 16)
        assert part, data[-100:]
        data += part
    return data.decode().splitlines()


def test_lines_of_threads_are_whole_and_ordered_per_thread(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as stream:
        output = Output(stream)

        def log(n: int) -> None:
            for i in range(500):
                output.put(f"{n} {i} {'x' * 50}\n")

        threads = [threading.Thread(target=log, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert output.drain(20)
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    for n in range(4):
        assert [int(line[1]) for line in lines if int(line[0]) == n] == list(range(500))
    assert output.dropped == 0


def test_stalled_log_reader_blocks_no_writer_and_gets_loss_line() -> None:
    with pipe() as (reads, stream):
        fill(stream.fileno())
        output = Output(stream, max_pieces=100)
        for i in range(1000):
            output.put(f"line {i}\n")
        assert output.dropped == 900
        assert not output.drain(0.05)
        # No line has moved since, so drain does not wait again.
        assert not output.drain(3600)
        said = read_lines(reads, "are lost")
    lines = [line.lstrip("\0") for line in said]
    assert lines == [*(f"line {i}" for i in range(100)), "900 lines could not be written here and are lost"]


def test_waiting_log_bytes_are_bounded() -> None:
    with pipe() as (_, stream):
        fill(stream.fileno())
        output = Output(stream, max_bytes=10_000)
        for _ in range(20):
            output.put("x" * 999 + "\n")
        assert output.dropped == 10


def test_failed_log_stream_reports_loss_once_writable(tmp_path: Path) -> None:
    file = os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY)
    with open("/dev/full", "w") as stream:
        good = os.dup(stream.fileno())
        output = Output(stream)
        for i in range(3):
            output.put(f"lost {i}\n")
        until(lambda: output.dropped == 3)
        os.dup2(file, stream.fileno())
        output.put("kept\n")
        until(lambda: (tmp_path / "log").read_text().count("\n") == 2)
        os.dup2(good, stream.fileno())
    assert (tmp_path / "log").read_text() == "kept\n3 lines could not be written here and are lost\n"
    for each in (file, good):
        os.close(each)


def test_nonblocking_log_descriptor_loses_no_line() -> None:
    with pipe() as (reads, stream):
        os.set_blocking(stream.fileno(), False)
        output = Output(stream)
        lines = [f"{i} {'x' * 999}" for i in range(1000)]
        for line in lines:
            output.put(line + "\n")
        time.sleep(0.05)
        assert read_lines(reads, lines[-1]) == lines
        assert output.dropped == 0


def test_closed_log_stream_does_not_write_to_reused_descriptor(tmp_path: Path) -> None:
    stream = (tmp_path / "log").open("w")
    output = Output(stream)
    output.put("first\n")
    assert output.drain(20)
    stream.close()
    with (tmp_path / "other").open("w"):
        output.put("second\n")
        until(lambda: output.dropped == 1)
    assert (tmp_path / "other").read_text() == ""


def test_output_stream_writes_line_by_line() -> None:
    inner = io.StringIO()
    stream = OutputStream(inner)
    stream.write("a")
    assert inner.getvalue() == ""
    stream.write("b\nc")
    assert inner.getvalue() == "ab\n"
    stream.flush()
    assert inner.getvalue() == "ab\nc"
    with pytest.raises(TypeError):
        stream.write(b"")  # type: ignore[arg-type]


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


def test_unprintable_log_line_is_counted_and_logged_without_fields() -> None:
    stream = io.StringIO()
    setup_logging(stream=stream, format="json")
    before = failures().get("logs", 0)
    structlog.get_logger().info("strange", value=Unprintable())
    logging.getLogger("library").warning("%d", "no number")
    assert failures()["logs"] == before + 2
    assert '"event": "strange", "fields_lost": "RuntimeError"' in stream.getvalue()


def run(program: str, redirect: str) -> tuple[int, str]:
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirect}', "sh", sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout.decode()


GUARDED = """
import os, sys, structlog
from common.telemetry.logs import setup_logging
from common.telemetry.output import exit_now, guard_standard_streams
guard_standard_streams()
setup_logging(service="x")
log = structlog.get_logger()
for i in range(200):
    log.info("line", number=i)
"""


@pytest.mark.parametrize(
    ("end", "code", "last"),
    [
        ("", 0, '"number": 199}'),
        ("exit_now(7)", 7, '"number": 199}'),
        ("sys.exit('error: the end')", 1, "error: the end"),
        ("raise RuntimeError('the end')", 1, "RuntimeError: the end"),
        ("print('half', end='', file=sys.stderr); exit_now(3)", 3, "half"),
    ],
)
def test_process_end_flushes_lines_in_order(end: str, code: int, last: str) -> None:
    returned, text = run(GUARDED + end, "")
    lines = text.splitlines()
    assert returned == code
    assert [f'"number": {i}' in lines[i] for i in range(200)] == [True] * 200
    assert lines[-1].endswith(last)


@pytest.mark.parametrize("redirect", ["2>/dev/full", "2>&-", "2>&- >&- <&-"])
@pytest.mark.parametrize(("end", "code"), [("sys.exit(5)", 5), ("raise RuntimeError", 1), ("exit_now(6)", 6)])
def test_exit_code_is_unchanged_without_writable_output(redirect: str, end: str, code: int) -> None:
    assert run(GUARDED + end, redirect)[0] == code


def test_closed_standard_descriptors_are_not_reused() -> None:
    program = GUARDED + "import socket\nassert socket.socket().fileno() > 2\nassert open('/dev/null').fileno() > 2\n"
    assert run(program, "2>&- >&- <&-")[0] == 0


def test_gathered_log_lines_are_written_in_one_system_call() -> None:
    """Waking the writer thread for each line cost more than the line itself. Each packet is one system call."""
    reads, writes = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with reads, os.fdopen(writes.detach(), "w") as stream:
        os.set_blocking(stream.fileno(), False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(stream.fileno(), b"filled")
        os.set_blocking(stream.fileno(), True)
        output = Output(stream)
        output.put("first\n")
        until(lambda: not output._is_idle and output._thread is not None)
        for i in range(20):
            output.put(f"line {i}\n")
        packets = list[str]()
        while not packets or not packets[-1].endswith("line 19\n"):
            packets.append(reads.recv(1 << 16).decode())
        said = [packet for packet in packets if packet != "filled"]
    assert "".join(said) == "first\n" + "".join(f"line {i}\n" for i in range(20))
    assert len(said) <= 2


def test_drain_does_not_wait_for_gathering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_module, "GATHER_S", 3600.0)
    with (tmp_path / "log").open("w") as stream:
        output = Output(stream)
        for i in range(50):
            output.put(f"{i}\n")
            if i % 5 == 0:
                assert output.drain(20)
        assert output.drain(20)
    assert (tmp_path / "log").read_text() == "".join(f"{i}\n" for i in range(50))


CUT_OFF = """
import os, resource, sys
from common.telemetry import output
output.GATHER_S = 3600.0
resource.setrlimit(resource.RLIMIT_FSIZE, (25, 25))
stream = open(sys.argv[1], "w")
out = output.Output(stream)
out.put("line 0000\\n")
while os.path.getsize(sys.argv[1]) < 10 or out._waiting:
    pass
for i in range(1, 5):
    out.put(f"line {i:04}\\n")
out.drain(20)
print(out.dropped)
"""


def test_partly_written_batch_loses_only_unwritten_lines(tmp_path: Path) -> None:
    file = tmp_path / "log"
    done = subprocess.run(
        [sys.executable, "-c", CUT_OFF, str(file)], cwd=ROOT, stdout=subprocess.PIPE, timeout=60, check=True
    )
    assert file.read_text() == "line 0000\nline 0001\nline "
    assert done.stdout.split() == [b"3"]
