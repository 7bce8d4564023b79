"""Servicer of `vllm.grpc.engine.VllmEngine`, which smg calls: Fissile's engine behind another project's router.

The package `smg-grpc-proto` has its stubs, so this module is imported only where the door is wanted.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import math
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import NoReturn

import grpc
import numpy as np
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineServicer, add_VllmEngineServicer_to_server

from common.errors import ApiError, InvalidFieldError, NoTokenizerError, NoWorkerError
from common.limits import KV_EVENTS_S, TOKENIZER_CHUNK_BYTES
from common.params.sampling_params import PARAMETERS
from common.rpc.unsupported_fields import refuse_unserved
from common.wire.heads import OUTPUT_HEAD
from worker.config.model_config import ModelConfig
from worker.doors.door_adapter import Context, DoorAdapter
from worker.doors.door_request import DoorState
from worker.doors.vllm_engine_events import KvEventStream, LoadRecord, LoadRecorder
from worker.doors.vllm_engine_fields import DOOR, AnswerMessages, door_request, embedding_request
from worker.engine.figures import EngineFigures
from worker.session.block_log import BlockLog

# Time of every file in the archive of the tokenizer, so that its digest depends on the files alone.
_EPOCH = (1980, 1, 1, 0, 0, 0)
# States in which a subscription to KV events lasts.
_SUBSCRIBED = frozenset({DoorState.READY, DoorState.CORDONED})


def add_vllm_engine(adapter: DoorAdapter, server: grpc.aio.Server) -> None:
    """Serves the protocol on a server."""
    add_VllmEngineServicer_to_server(VllmEngineDoor(adapter), server)


class VllmEngineDoor(VllmEngineServicer):
    """The worker as an engine of smg.

    Args:
        adapter: of the worker.
        clock: monotonic seconds.
    """

    def __init__(self, adapter: DoorAdapter, clock: Callable[[], float] = time.monotonic) -> None:
        self._adapter = adapter
        self._engine = adapter.engine
        self._config = adapter.config
        self._model_config = adapter.model_config
        self._clock = clock
        self._began = clock()
        self._recorder = LoadRecorder(self._config.max_num_seqs, self._config.kv_cache_block_size)
        self._archive: tuple[bytes, str] | None = None

    # Requests.

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Generates answers to a prompt."""
        async with self._adapter.scope(context):
            messages = AnswerMessages(request)
            async with self._adapter.call(DOOR, door_request(request), context) as call:
                while not call.is_done:
                    for event in await call.next_events():
                        for response in messages.responses(event):
                            await context.write(response)

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Embeds a prompt."""
        async with self._adapter.scope(context):
            vector, num_tokens = await self._adapter.embed(DOOR, embedding_request(request), context)
        return pb.EmbedResponse(embedding=vector, prompt_tokens=num_tokens, embedding_dim=len(vector))

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Ends requests; ids that are unknown or have ended are ignored."""
        async with self._adapter.scope(context):
            refuse_unserved(request, {"request_ids"})
            for request_id in request.request_ids:
                self._adapter.abort(request_id)
        return pb.AbortResponse()

    # Facts.

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        """Says whether the worker takes requests."""
        state = self._adapter.state
        return pb.HealthCheckResponse(healthy=state is DoorState.READY, message=f"the worker is {state.name.lower()}")

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        """Describes the model."""
        async with self._adapter.scope(context):
            self._require_loaded()
        facts, model = self._adapter.facts, self._model_config
        return pb.GetModelInfoResponse(
            model_path=self._config.model,
            is_generation=facts.head == OUTPUT_HEAD,
            max_context_length=facts.max_model_len,
            vocab_size=facts.vocab_size,
            served_model_name=facts.model,
            tokenizer_path=self._config.model if self._adapter.files else "",
            model_type=str(model.source.get("model_type", "")),
            architectures=[facts.architecture],
            eos_token_ids=sorted(facts.eos_token_ids),
            pad_token_id=model.source.get("pad_token_id") or 0,
            bos_token_id=model.bos_token_id or 0,
            # A prompt leaves room for one token.
            max_req_input_len=facts.max_model_len - 1,
            default_sampling_params_json=json.dumps(_defaults(model)),
        )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        """Describes the engine."""
        async with self._adapter.scope(context):
            self._require_loaded()
        facts, state = self._adapter.facts, self._adapter.state
        return pb.GetServerInfoResponse(
            active_requests=self._engine.num_live,
            is_paused=state is not DoorState.READY,
            uptime_seconds=self._clock() - self._began,
            server_type=f"fissile {facts.version}",
            data_parallel_size=1,
            kv_cache_dtype=self._config.kv_cache_dtype,
            block_size=facts.block_size,
            attention_backend=facts.kernels,
            model_dtype=facts.dtype,
            max_num_seqs=facts.max_num_seqs,
            constrained_decoding_start="first_token" if facts.grammar_engine else "",
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        """Reports the load; the sections of `include` beyond it have no figures here."""
        async with self._adapter.scope(context):
            refuse_unserved(request, {"dp_rank", "include"})
            if request.dp_rank:
                raise InvalidFieldError("dp_rank", f"is {request.dp_rank}", "0, a worker's only rank")
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=self._adapter.facts.version,
            dp_rank_count=1,
            loads=[self._load().scheduler_load()],
        )

    async def GetTokenizer(self, request: common.GetTokenizerRequest, context: Context) -> None:
        """Sends the tokenizer's files as a zip archive in chunks, with its digest in the last one."""
        async with self._adapter.scope(context):
            if not self._adapter.files:
                raise NoTokenizerError(self._adapter.facts.model)
            if self._archive is None:
                self._archive = await asyncio.to_thread(_zipped, self._adapter.files)
            archive, digest = self._archive
            for start in range(0, len(archive), TOKENIZER_CHUNK_BYTES):
                data = archive[start : start + TOKENIZER_CHUNK_BYTES]
                is_last = start + len(data) == len(archive)
                await context.write(common.GetTokenizerChunk(data=data, sha256=digest if is_last else ""))

    async def SubscribeKvEvents(self, request: common.SubscribeKvEventsRequest, context: Context) -> None:
        """Sends the cached blocks, their changes and the load until the worker drains or its engine fails."""
        async with self._adapter.scope(context):
            refuse_unserved(request, {"start_sequence_number", "load_records_before_first_batch"})
            self._require_loaded()
            if not self._adapter.facts.prefix_caching:
                # This status ends subscriptions to this worker for good; others are tried again.
                raise ApiError(grpc.StatusCode.UNIMPLEMENTED, "this worker caches no prefixes")
            log = self._engine.watch_blocks()
            feed = KvEventStream(log, request.start_sequence_number)
            while self._engine.block_log is log and self._adapter.state in _SUBSCRIBED:
                for batch in feed.batches(self._load(), self._clock(), time.time()):
                    await context.write(batch)
                await _grown(log)
            raise NoWorkerError(f"worker {self._adapter.facts.worker_id} is {self._adapter.state.name.lower()}")

    # Operations.

    async def FlushCache(self, request: common.FlushCacheRequest, context: Context) -> common.FlushCacheResponse:
        """Drops the cached blocks that no sequence holds, when the engine is idle or `timeout_s` is over."""
        async with self._adapter.scope(context):
            refuse_unserved(request, {"timeout_s"})
            # A comparison with NaN is false.
            if not 0 <= request.timeout_s < math.inf:
                raise InvalidFieldError("timeout_s", f"is {request.timeout_s}", "a number of seconds, 0 or more")
            if request.timeout_s:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(request.timeout_s):
                        await self._engine.wait_idle()
            blocks = await self._adapter.flush_cache()
            running = self._engine.num_live
        kept = f"; those of {running} running sequences stay" if running else ""
        return common.FlushCacheResponse(success=not running, message=f"dropped {blocks} cached blocks{kept}")

    async def StartProfile(self, request: common.StartProfileRequest, context: Context) -> common.ProfileResponse:
        """Refused: a worker has no profiler of its own."""
        async with self._adapter.scope(context):
            _refuse_profile()

    async def StopProfile(self, request: common.StopProfileRequest, context: Context) -> common.ProfileResponse:
        """Refused: a worker has no profiler of its own."""
        async with self._adapter.scope(context):
            _refuse_profile()

    # Used by the methods above.

    def _require_loaded(self) -> None:
        """Refuses a call before the model is loaded, because there are no facts to report."""
        if not self._adapter.facts.max_model_len:
            raise NoWorkerError(f"worker {self._adapter.facts.worker_id} is starting")

    def _load(self) -> LoadRecord:
        figures = self._engine.figures or EngineFigures()
        return self._recorder.record(self._adapter.load, figures, self._clock())


async def _grown(log: BlockLog) -> None:
    """Waits for the next batch of a log, at most KV_EVENTS_S, after which the load is reported again."""
    grown = asyncio.Event()
    log.wait(grown.set)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KV_EVENTS_S):
                await grown.wait()
    finally:
        log.leave(grown.set)


def _refuse_profile() -> NoReturn:
    message = "this worker has no profiler; attach one to its process, such as py-spy or rocprof"
    raise ApiError(grpc.StatusCode.UNIMPLEMENTED, message)


def _zipped(files: Mapping[str, bytes]) -> tuple[bytes, str]:
    """The files as a zip archive, the same bytes for the same files, and its SHA-256."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as written:
        for name in sorted(files):
            written.writestr(zipfile.ZipInfo(name, _EPOCH), files[name], zipfile.ZIP_DEFLATED)
    return archive.getvalue(), hashlib.sha256(archive.getbuffer()).hexdigest()


def _defaults(model: ModelConfig) -> dict[str, float]:
    """The model's own sampling parameters where they differ from Fissile's, with the digits that float32 has."""
    own, plain = asdict(model.sampling_defaults), asdict(type(model.sampling_defaults)())
    names = [name for name, row in PARAMETERS.items() if row.is_of_model and own[name] != plain[name]]
    return {name: own[name] if isinstance(own[name], int) else float(str(np.float32(own[name]))) for name in names}
