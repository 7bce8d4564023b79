"""Calls at a router's shutdown: waiting ones are interrupted, all are counted until they end."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from common.errors import RouterEndingError
from router.api.shutdown import OpenCalls


async def test_calls_without_output_are_interrupted_at_shutdown() -> None:
    """For example, a call whose prompt is still being tokenized."""
    calls = OpenCalls()

    async def make_prompt() -> None:
        with calls.interruptible():
            await asyncio.Event().wait()

    made = [asyncio.create_task(make_prompt()) for _ in range(3)]
    await asyncio.sleep(0)
    calls.end()
    for error in await asyncio.gather(*made, return_exceptions=True):
        assert isinstance(error, RouterEndingError)
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "ROUTER_ENDING")
        assert error.retry_after_s
    with pytest.raises(RouterEndingError):
        await make_prompt()
    with pytest.raises(RouterEndingError), calls.held():
        pass


async def test_interruptible_keeps_own_timeouts_and_cancels() -> None:
    calls = OpenCalls()
    with pytest.raises(TimeoutError), calls.interruptible():
        async with asyncio.timeout(0):
            await asyncio.Event().wait()
    cancelled = asyncio.create_task(asyncio.Event().wait())

    async def make_prompt() -> None:
        with calls.interruptible():
            await cancelled

    made = asyncio.create_task(make_prompt())
    await asyncio.sleep(0)
    made.cancel()
    with pytest.raises(asyncio.CancelledError):
        await made


async def test_drain_waits_for_last_call() -> None:
    calls = OpenCalls()
    with calls.held():
        waits = asyncio.create_task(calls.wait_until_none())
        with calls.held():
            await asyncio.sleep(0)
        assert not waits.done()
    await asyncio.wait_for(waits, 60)
