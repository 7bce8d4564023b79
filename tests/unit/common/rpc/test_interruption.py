"""Interrupted work raises its own error, and cancellations by others stay cancellations."""

from __future__ import annotations

import asyncio

import pytest

from common.rpc.interruption import InterruptedWorkError, Interruptible


async def begun(work: Interruptible) -> asyncio.Task[None]:
    async def run() -> None:
        with work:
            await asyncio.Event().wait()

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    return task


async def test_interrupted_task_continues_after_block() -> None:
    work = Interruptible()

    async def run() -> str:
        with pytest.raises(InterruptedWorkError), work:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        return "went on"

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    work.interrupt()
    work.interrupt()
    assert await task == "went on"
    assert task.cancelling() == 0


async def test_cancellation_is_not_an_interruption() -> None:
    task = await begun(Interruptible())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancellation_overrides_interruption() -> None:
    work = Interruptible()
    task = await begun(work)
    work.interrupt()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_interruptible_block_propagates_exceptions() -> None:
    with pytest.raises(KeyError), Interruptible():
        raise KeyError
