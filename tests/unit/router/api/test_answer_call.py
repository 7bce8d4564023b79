"""Several answers on one call, as their tasks end."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from common.errors import EngineError
from router.api.answer_call import Answering
from router.requests.stream import ReplacedError

NOTHING = cast("Any", None)


class Scripted(Answering):
    """Answers of which each ends as it is said."""

    def __init__(self, *ends: BaseException | None) -> None:
        super().__init__(*[NOTHING] * 6)
        self.ends = list(ends)

    async def _send(
        self, stream: Any, asked: Any, measure: Any, answers: Any, turn: Any = None, began: Any = None
    ) -> None:
        await asyncio.sleep(0)
        if (end := self.ends[stream]) is not None:
            raise end

    async def send(self) -> None:
        """Sends all of them."""
        await self._send_side_by_side(cast("Any", range(len(self.ends))), NOTHING, NOTHING, NOTHING)


async def test_a_call_whose_client_is_gone_has_not_ended_well() -> None:
    """The tasks find that out by themselves, before gRPC has cancelled the call."""
    await Scripted(None, None).send()
    with pytest.raises(asyncio.CancelledError):
        await Scripted(None, asyncio.CancelledError()).send()


async def test_a_failure_counts_before_the_wish_to_begin_anew() -> None:
    with pytest.raises(EngineError):
        await Scripted(ReplacedError("m"), EngineError("broken")).send()
    with pytest.raises(ReplacedError):
        await Scripted(ReplacedError("m"), None).send()
