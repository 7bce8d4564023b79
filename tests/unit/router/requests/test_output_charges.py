"""Tenants are charged for output periodically, for some of the running requests at a time."""

from __future__ import annotations

import pytest

from common.limits import CHARGE_OUTPUT_S, CHARGED_PER_TURN, OUTPUT_TOKEN_COST
from common.text.answer_text import AnswerText
from router.answers.delivered import DeliveredTokens
from router.answers.stream_assembly import StreamAssembly
from router.requests.running import OutputCharges
from router.scheduling.fair_queue import TenantShares
from router.scheduling.queued_request import NORMAL, QueuedRequest


class Stream:
    def __init__(self, key: int, *, is_adopted: bool = False, received: tuple[int, ...] = ()) -> None:
        self.queued = QueuedRequest(key, "m", 1, 0.0)
        delivered = DeliveredTokens(0, len(received), received) if received else None
        self.assembly = StreamAssembly(1, text=AnswerText(None), delivered_tokens=delivered)
        self.is_adopted = is_adopted


def test_output_is_charged_in_parts_per_turn() -> None:
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


@pytest.mark.parametrize(("is_adopted", "charged"), [(True, 2), (False, 5)])
def test_replayed_output_of_adopted_sequence_is_not_charged(is_adopted: bool, charged: int) -> None:
    """An adopted sequence is not computed again. An answer generated a second time costs its steps a second time."""
    shares, stream = TenantShares(), Stream(1, is_adopted=is_adopted, received=(7, 8, 9))
    output = OutputCharges(shares.charge_output)
    # Output is charged only while others wait.
    shares.enter(QueuedRequest(2, "m", 1, 0.0, tenant="other"))
    for tokens in ([7, 8], [9, 10], [11]):
        stream.assembly.append(1 + stream.assembly.delivered, tokens, 0.0)
        output.settle(stream)
        output.settle(stream)
    assert stream.assembly.num_left_out == 3
    assert shares.start(NORMAL, "") == charged * OUTPUT_TOKEN_COST
