"""A router's requests and workers without sockets; a test plays the worker's Session."""

from __future__ import annotations

import asyncio
import time
from array import array
from typing import Any

import pytest
from fissile.worker.v1 import worker_pb2 as wpb

from common.delay_gate import DelayGate
from common.params.sampling_params import SamplingParams
from common.rpc.tls import Dialer
from common.text.answer_text import AnswerText
from common.wire.protocol import PROTO_MINOR
from router.answers.stream_assembly import StreamAssembly
from router.model_registry import ModelRegistry, ServedModel, TextAssets
from router.prompts.tokenizer_store import TokenizerStore
from router.requests.request_router import RequestRouter
from router.requests.stream import RequestStream, RoutedRequest, SubmitListener
from router.scheduling.placement import PLACEMENTS
from router.workers import worker_pool
from router.workers.orphans import OrphanTable
from router.workers.session import Session
from router.workers.worker_pool import WorkerPool
from tests.unit.router.scheduling.dispatching import make_dispatcher
from tests.unit.router.support import tokenizer_files

ADDRESS = "127.0.0.1:1"


class Site:
    """A router whose worker is never dialled; `told` records the notifications of the pool."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def never(*_: Any) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(worker_pool, "keep_connected", never)
        self.told: list[str] = []
        self.registry = ModelRegistry()
        self.dispatcher = make_dispatcher(DelayGate(0.0, 0.25), PLACEMENTS["prefix_aware"](), 16)
        self.orphans = OrphanTable(time.monotonic)
        self.requests = RequestRouter(self.dispatcher, self.registry, self.orphans)
        told = self.told
        self.pool = WorkerPool(
            self.dispatcher,
            self.registry,
            TokenizerStore(),
            self.requests.running,
            self.orphans,
            Dialer(),
            lambda: told.append("serving changed"),
        )
        self.pool.set_workers([ADDRESS])

    def described(self) -> Session:
        """A Session whose worker is described."""
        session = Session(ADDRESS, "r", time.monotonic, Dialer())
        session.worker_id, session.instance_id = "w", "i"
        text = TextAssets.from_files(tokenizer_files())
        session.model = ServedModel("m", "Qwen3ForCausalLM", 128, 300, "t", "d", 16, 0, text)
        self.pool.session_opening(session)
        return session

    def up(self) -> Session:
        """A Session whose worker accepts requests."""
        session = self.described()
        load = wpb.Load(room_tokens=1000, room_seqs=16)
        self.pool.session_up(session, wpb.Welcome(instance_id="i", load=load, proto_minor=PROTO_MINOR))
        return session

    def ask(self, on_submit: SubmitListener = lambda worker, choice: None, **fields: Any) -> RequestStream:
        """Opens a request of three tokens, with further fields of RoutedRequest."""
        (known,) = self.registry.models
        params = SamplingParams(max_tokens=4)
        request = RoutedRequest("m", known.identity, array("I", [1, 2, 3]), params, 0, 0, time.monotonic(), **fields)
        return self.requests.open(request, StreamAssembly(3, text=AnswerText(None)), on_submit)

    async def stop(self) -> None:
        await self.pool.stop()
        self.requests.stop()
