"""Tokenizers of workers: one per digest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import structlog
from fissile.worker.v1 import worker_pb2 as wpb

from common.text.tokenizer import files_sha256
from router.model_registry import WorkerRefusedError
from router.prompts import tokenizer_store
from router.prompts.tokenizer_store import TokenizerStore
from tests.unit.router.support import tokenizer_files


class Call:
    """A worker's answer to GetTokenizer."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self._files = files

    async def __aiter__(self) -> AsyncIterator[wpb.GetTokenizerResponse]:
        for name, data in self._files.items():
            await asyncio.sleep(0.01)
            yield wpb.GetTokenizerResponse(name=name, data=data)

    def cancel(self) -> None:
        """Does nothing."""


class Stub:
    """A worker that counts its GetTokenizer calls."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.asked = 0
        self._files = files

    def GetTokenizer(self, request: object, timeout: float) -> Call:
        self.asked += 1
        return Call(self._files)


def described(files: dict[str, bytes], vocab_size: int = 300) -> wpb.GetWorkerResponse:
    return wpb.GetWorkerResponse(tokenizer_sha256=files_sha256(files), vocab_size=vocab_size)


def numbered(number: int) -> dict[str, bytes]:
    return tokenizer_files(generation={"top_k": number})


async def read(store: TokenizerStore, stub: Any, files: dict[str, bytes]) -> Any:
    return await store.assets(described(files), stub)


async def test_workers_starting_together_share_one_tokenizer() -> None:
    """Regression: 16 workers caused 16 downloads and 16 tokenizers, all of them kept."""
    store, files = TokenizerStore(), tokenizer_files()
    stubs = [Stub(files) for _ in range(16)]
    assets = await asyncio.gather(*(read(store, stub, files) for stub in stubs))
    assert sum(stub.asked for stub in stubs) == 1
    assert len({id(each.tokenizer) for each in assets}) == 1
    assert not store._reading


async def test_tokenizer_is_read_from_other_worker_after_failure() -> None:
    """A caller that waits for another worker's answer does not fail with it."""
    store, files = TokenizerStore(), tokenizer_files()
    bad, slow, good = Stub(numbered(9)), Stub(files), Stub(files)
    calls = [asyncio.create_task(read(store, stub, files)) for stub in (bad, slow, good)]
    with pytest.raises(WorkerRefusedError):
        await calls[0]
    calls[1].cancel()
    assert (await calls[2]).tokenizer is not None
    assert (bad.asked, good.asked) == (1, 1)
    assert not store._reading


async def test_least_recently_used_tokenizer_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the oldest was evicted even if it was used often."""
    monkeypatch.setattr(tokenizer_store, "_MAX_KEPT", 2)
    store, folders = TokenizerStore(), [numbered(i) for i in range(3)]
    first = await read(store, Stub(folders[0]), folders[0])
    await read(store, Stub(folders[1]), folders[1])
    assert await read(store, Stub(folders[0]), folders[0]) is first
    await read(store, Stub(folders[2]), folders[2])
    assert await read(store, again := Stub(folders[0]), folders[0]) is first
    assert again.asked == 0


async def test_tokenizer_ids_beyond_model_are_warned_once() -> None:
    """Regression: no log line said that texts may have tokens without an embedding in the model."""
    store, files = TokenizerStore(), tokenizer_files()
    with structlog.testing.capture_logs() as logged:
        for _ in range(2):
            await store.assets(described(files, vocab_size=259), Stub(files))  # type: ignore[arg-type]
    (line,) = [entry for entry in logged if entry["log_level"] == "warning"]
    assert (line["tokenizer_ids"], line["model_ids"]) == (300, 259)
