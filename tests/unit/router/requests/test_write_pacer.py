"""WritePacer: turns in order, `per_turn` per loop iteration, and none for a cancelled stream."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from router.requests.stream import WritePacer


def note_turn(order: list[int], number: int) -> asyncio.Future[None]:
    """A future that records its number when it is resolved."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def note(done: asyncio.Future[None]) -> None:
        if not done.cancelled():
            order.append(number)

    future.add_done_callback(note)
    return future


async def settled(turns: WritePacer) -> int:
    """Runs the loop until no stream waits; returns the number of iterations."""
    count = 0
    while turns:
        await asyncio.sleep(0)
        count += 1
    return count


@given(waiting=st.lists(st.booleans(), max_size=40), per_turn=st.integers(1, 9))
def test_write_turns_are_in_order_and_skip_cancelled(waiting: list[bool], per_turn: int) -> None:
    async def main() -> None:
        turns, order = WritePacer(per_turn), list[int]()
        futures = [note_turn(order, i) for i in range(len(waiting))]
        for future in futures:
            turns.join(future)
        for future, stays in zip(futures, waiting, strict=True):
            if not stays:
                future.cancel()
        taken = await settled(turns)
        await asyncio.sleep(0)
        assert order == [i for i, stays in enumerate(waiting) if stays]
        assert taken <= 1 + len(order) // per_turn

    asyncio.run(main())


async def test_write_pacer_yields_to_loop() -> None:
    """Callbacks that become ready while many streams wait run before the last of these."""
    turns, seen, other = WritePacer(per_turn=2), list[int](), -1
    for i in range(10):
        turns.join(note_turn(seen, i))
    asyncio.get_running_loop().call_soon(seen.append, other)
    await settled(turns)
    await asyncio.sleep(0)
    assert seen.index(other) <= 2
    assert len(seen) == 11
