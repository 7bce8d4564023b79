"""Charges tenants for output: every now and then, and when an attempt ends; never token by token. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from common.limits import CHARGE_OUTPUT_S, CHARGED_PER_TURN
from router.answers.stream_assembly import StreamAssembly
from router.scheduling.queued_request import QueuedRequest


class Running(Protocol):
    """A request that a worker has."""

    queued: QueuedRequest
    assembly: StreamAssembly
    is_adopted: bool


class OutputCharges:
    """Charges the tenants of what runs, all of it once in CHARGE_OUTPUT_S, a part of it in each turn of the loop.

    Args:
        charge: told a request and how many output tokens it has in all; a request may be told again.
    """

    def __init__(self, charge: Callable[[QueuedRequest, int], None]) -> None:
        self._charge = charge
        self._due: list[Running] = []
        self._next = 0.0

    def turn(self, running: Iterable[Running], now: float) -> None:
        """Charges the next part of `running`."""
        if not self._due and now >= self._next:
            self._next = now + CHARGE_OUTPUT_S
            self._due = list(running)
        part, self._due = self._due[-CHARGED_PER_TURN:], self._due[:-CHARGED_PER_TURN]
        for each in part:
            self.settle(each)

    def settle(self, ended: Running) -> None:
        """Charges all that has come of a request, but for what another router's sequence brings a second time.

        An answer that is generated a second time, because its client knows its text alone, is charged like any other:
        it takes its steps again, and a client may ask for it as often as it likes.
        """
        if ended.is_adopted:
            ended.queued.output = max(ended.queued.output, ended.assembly.num_left_out)
        self._charge(ended.queued, ended.assembly.delivered)
