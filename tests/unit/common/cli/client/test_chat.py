"""Ctrl-C during an answer of `fissile chat`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from fissile.client import FissileError

from common.cli.client.chat import interrupt_cancels


class InterruptedStream:
    """A stream that gets SIGINT while it waits, and ends when it is cancelled.

    Attributes:
        has_failed: True once its wait ended by the cancellation, not by an exception of the signal.
    """

    def __init__(self) -> None:
        self.has_failed = False
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        self._cancelled.set()

    def wait(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert self._cancelled.wait(60)
        self.has_failed = True
        raise FissileError(grpc.StatusCode.CANCELLED, "cancelled by this program")


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt even where it is ignored: in a job that a shell started with `&`."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_interrupt_is_raised_after_the_stream_has_ended() -> None:
    stream: Any = InterruptedStream()
    with pytest.raises(KeyboardInterrupt), interrupt_cancels(stream):
        stream.wait()
    assert stream.has_failed
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_failure_without_interrupt_stays_a_failure() -> None:
    stream: Any = InterruptedStream()
    with pytest.raises(FissileError, match="lost"), interrupt_cancels(stream):
        raise FissileError(grpc.StatusCode.UNAVAILABLE, "lost")


def test_ignored_interrupt_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stream: Any = InterruptedStream()
    with interrupt_cancels(stream):
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
