"""What tenants get of a router that is too busy: places in the queue, and work."""

from __future__ import annotations

import pytest

from common.limits import CHARGE_OUTPUT_S, CHARGED_PER_TURN
from router.requests.output_charges import OutputCharges
from router.scheduling.fair_queue import QueuedRequest
from router.text.stream_assembly import StreamAssembly
from tests.bench.router.shares import flood, shared_places


@pytest.mark.parametrize("a_per_s", [60, 200, 2000])
def test_a_flood_of_one_tenant_takes_nothing_of_another(a_per_s: float) -> None:
    """R3: A fills the queue, however fast it asks; B, which asks for a tenth of the service, gets all of it at once."""
    seen = flood(a_per_s, seconds=10.0)
    assert (seen.refused["B"], seen.dropped["B"]) == (0, 0)
    assert seen.served["B"] >= 49
    # One request is being served, and one of A's may go before.
    assert max(seen.waits) <= 3 / 50
    assert seen.served["A"] + seen.served["B"] >= 499


def test_long_answers_and_long_prompts_get_equal_work() -> None:
    """R3: of tenants of equal weight the one with answers of 2000 tokens does not take all places."""
    had = shared_places({"long answers": (20, 2000), "long prompts": (2000, 20)})
    works = [each["work"] for each in had.values()]
    assert max(works) <= 1.15 * min(works)


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
