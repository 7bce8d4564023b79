"""Tenants are charged for output now and then, a part of what runs at a time."""

from __future__ import annotations

from common.limits import CHARGE_OUTPUT_S, CHARGED_PER_TURN
from router.requests.output_charges import OutputCharges
from router.scheduling.fair_queue import QueuedRequest
from router.text.stream_assembly import StreamAssembly


class Stream:
    def __init__(self, key: int) -> None:
        self.queued = QueuedRequest(key, "m", 1, 0.0)
        self.assembly = StreamAssembly(1, detokenizer=None)


def test_all_output_is_charged_a_part_in_each_turn() -> None:
    streams = [Stream(key) for key in range(3 * CHARGED_PER_TURN)]
    charged: dict[int, int] = {}
    calls: list[int] = []

    def charge(request: QueuedRequest, output: int) -> None:
        charged[request.key] = output
        calls.append(request.key)

    output = OutputCharges(charge)
    for stream in streams:
        stream.assembly.append(1, [7] * (stream.queued.key % 3), 0.0)
    for turn in range(3):
        output.turn(streams, 0.0)
        assert len(calls) == (turn + 1) * CHARGED_PER_TURN
    assert charged == {key: key % 3 for key in range(len(streams))}
    output.turn(streams, CHARGE_OUTPUT_S / 2)
    assert len(calls) == len(streams)
    streams[0].assembly.append(1, [7], 0.0)
    output.settle(streams[0])
    assert charged[0] == 1
    output.turn(streams, CHARGE_OUTPUT_S)
    assert len(calls) == len(streams) + 1 + CHARGED_PER_TURN
