"""Tokenizers and templates: fetched from workers, checked, and kept by digest; or read from a folder."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import structlog
from fissile.worker.v1 import worker_pb2 as wpb

from common.limits import MAX_TOKENIZER_BYTES, TOKENIZER_TIMEOUT_S
from common.text.tokenizer import TokenizerError, files_sha256, tokenizer_files
from router.model_registry import TextAssets, WorkerRefusedError

if TYPE_CHECKING:
    # In the type stubs only: at run time the one stub class serves both kinds of channel.
    from fissile.worker.v1.worker_pb2_grpc import WorkerServiceAsyncStub

# Digests kept: more than a router's models, few enough to stay small when workers change their model often.
_MAX_KEPT = 16

log = structlog.get_logger(__name__)


class TokenizerStore:
    """Keeps tokenizers and templates by the sha256 of their files. A thread reads each once, which may take seconds."""

    def __init__(self) -> None:
        # The least recently used entry is first.
        self._kept: OrderedDict[str, TextAssets] = OrderedDict()
        # Locks of digests that are being read: of workers that start together one is asked, and the next if that fails.
        self._reading: dict[str, asyncio.Lock] = {}
        self._folder: tuple[str, TextAssets] | None = None

    async def read_folder(self, folder: Path) -> None:
        """Reads the tokenizer of every model from `folder` instead of from the workers.

        Raises:
            TokenizerError: the tokenizer cannot be used.
        """
        files = await asyncio.to_thread(tokenizer_files, folder)
        self._folder = files_sha256(files), await asyncio.to_thread(TextAssets.from_files, files)

    async def assets(self, description: wpb.GetWorkerResponse, stub: WorkerServiceAsyncStub) -> TextAssets:
        """Returns tokenizer and templates of a worker's model; empty assets for a model without a tokenizer.

        Raises:
            WorkerRefusedError: the files cannot be used, or differ from the digest that the worker gives.
            grpc.RpcError: the worker could not be asked.
        """
        digest = description.tokenizer_sha256
        if self._folder is not None:
            return self._from_folder(digest)
        if not digest:
            return TextAssets()
        if digest not in self._kept:
            await self._read(digest, description.vocab_size, stub)
        self._kept.move_to_end(digest)
        return self._kept[digest]

    async def _read(self, digest: str, vocab_size: int, stub: WorkerServiceAsyncStub) -> None:
        async with self._reading.setdefault(digest, asyncio.Lock()):
            if digest not in self._kept:
                self._kept[digest] = assets = await self._load(digest, stub)
                _warn_of_more_ids(digest, assets, vocab_size)
        self._reading.pop(digest, None)
        self._kept.move_to_end(digest)
        while len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)

    def _from_folder(self, digest: str) -> TextAssets:
        if self._folder is None:
            raise ValueError("no folder was read")
        ours, assets = self._folder
        if digest and digest != ours:
            raise WorkerRefusedError(f"its tokenizer {digest[:12]} is not that of --tokenizer, {ours[:12]}")
        return assets

    async def _load(self, digest: str, stub: WorkerServiceAsyncStub) -> TextAssets:
        begin = time.monotonic()
        files = await _fetch(stub)
        if (found := files_sha256(files)) != digest:
            raise WorkerRefusedError(f"its tokenizer files have sha256 {found[:12]}, not {digest[:12]} as it says")
        try:
            assets = await asyncio.to_thread(TextAssets.from_files, files)
        except TokenizerError as error:
            raise WorkerRefusedError(f"its tokenizer cannot be used: {error}") from None
        log.info("tokenizer loaded", sha256=digest[:12], seconds=round(time.monotonic() - begin, 3))
        return assets


def _warn_of_more_ids(digest: str, assets: TextAssets, vocab_size: int) -> None:
    tokenizer = assets.tokenizer
    if tokenizer is not None and 0 < vocab_size < tokenizer.vocab_size:
        log.warning(
            "tokenizer has ids beyond the model's vocabulary; texts with them are refused",
            sha256=digest[:12],
            tokenizer_ids=tokenizer.vocab_size,
            model_ids=vocab_size,
        )


async def _fetch(stub: WorkerServiceAsyncStub) -> dict[str, bytes]:
    pieces: dict[str, list[bytes]] = {}
    size = 0
    call: grpc.aio.UnaryStreamCall[wpb.GetTokenizerRequest, wpb.GetTokenizerResponse] = stub.GetTokenizer(
        wpb.GetTokenizerRequest(), timeout=TOKENIZER_TIMEOUT_S
    )
    try:
        async for piece in call:
            size += len(piece.data)
            if size > MAX_TOKENIZER_BYTES:
                raise WorkerRefusedError(f"its tokenizer has more than {MAX_TOKENIZER_BYTES} bytes")
            if piece.name:
                pieces.setdefault(piece.name, []).append(piece.data)
    finally:
        # Leaving the loop does not end the gRPC call.
        call.cancel()
    return {name: b"".join(data) for name, data in pieces.items()}
