"""Several answers on one call, with tasks that end in different ways."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from common.errors import EngineError
from router.api.answer_writer import AnswerWriter
from router.requests.stream import ReplacedError

NOTHING = cast("Any", None)


class ScriptedWriter(AnswerWriter):
    """Answers that end as `ends` says; None is a normal end."""

    def __init__(self, *ends: BaseException | None) -> None:
        params = SimpleNamespace(prompt_logprobs=None)
        streams = [SimpleNamespace(request=SimpleNamespace(params=params), end=end) for end in ends]
        super().__init__(NOTHING, NOTHING, NOTHING, cast("Any", streams), NOTHING)

    async def _write(self, stream: Any) -> None:
        await asyncio.sleep(0)
        if stream.end is not None:
            raise stream.end


async def test_client_lost_during_one_answer_cancels_call() -> None:
    """The writing tasks notice it before gRPC cancels the call."""
    await ScriptedWriter(None, None)._write_side_by_side()
    with pytest.raises(asyncio.CancelledError):
        await ScriptedWriter(None, asyncio.CancelledError())._write_side_by_side()


async def test_failure_of_one_answer_wins_over_replaced_weights() -> None:
    with pytest.raises(EngineError):
        await ScriptedWriter(ReplacedError("m"), EngineError("broken"))._write_side_by_side()
    with pytest.raises(ReplacedError):
        await ScriptedWriter(ReplacedError("m"), None)._write_side_by_side()
