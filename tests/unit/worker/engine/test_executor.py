"""Steps launched before the previous step has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.executor import PipelinedExecutor


class Device:
    """A device that launches at once and delivers a step's tokens on request. Its time advances by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.launched: list[int] = []
        self.tokens = [threading.Event() for _ in range(4)]
        self.arrived = threading.Semaphore(0)

    def clock(self) -> float:
        return self.now

    def launch(self, batch: ScheduledBatch) -> Callable[[], ScheduledBatchOutput]:
        number = len(self.launched)
        self.launched.append(number)
        self.arrived.release()
        if number == 3:
            raise RuntimeError("no such kernel")

        def tokens() -> ScheduledBatchOutput:
            assert self.tokens[number].wait(60)
            if number == 2:
                raise RuntimeError("the device is lost")
            return ScheduledBatchOutput({number: (7,)})

        return tokens

    def wait_launched(self, count: int) -> None:
        for _ in range(count):
            assert self.arrived.acquire(timeout=60)


def test_steps_overlap_and_their_times_add_up() -> None:
    device, batch = Device(), ScheduledBatch({}, [], 0)
    executor = PipelinedExecutor(device.launch, device.clock)
    first, second = executor.submit(batch), executor.submit(batch)
    device.wait_launched(2)
    assert not first.done()
    device.now = 3.0
    device.tokens[0].set()
    assert (first.result(60).output.req_ids, first.result().duration_s) == ([0], 3.0)
    device.now = 5.0
    device.tokens[1].set()
    # It was launched at 0, but had the device from 3 on.
    assert (second.result(60).output.req_ids, second.result().duration_s) == ([1], 2.0)
    device.tokens[2].set()
    with pytest.raises(RuntimeError, match="the device is lost"):
        executor.submit(batch).result(60)
    with pytest.raises(RuntimeError, match="no such kernel"):
        executor.submit(batch).result(60)
    assert executor.failure() is None
    executor.close()
    executor.close()
