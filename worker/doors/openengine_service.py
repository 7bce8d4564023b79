"""Servicers of OpenEngine v0.1.0 on a worker: openengine.v1.Inference and openengine.v1.Control.

A failure before a request is accepted is a gRPC status. Behind that it is one EngineError, the last message of a stream
that ends with OK. LoRA answers as the protocol says for an engine without adapters.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import grpc
from fissile.peers.openengine.v1 import openengine_pb2 as pb
from fissile.peers.openengine.v1 import openengine_pb2_grpc as rpc

from common.errors import ApiError, InvalidFieldError, NoWorkerError
from common.rpc.unsupported_fields import field_paths, refuse_unserved
from common.telemetry.request_record import current_record
from worker.doors.block_follower import FollowedBatch
from worker.doors.door_adapter import Context, DoorAdapter
from worker.doors.door_call import DoorCall
from worker.doors.door_request import AbortResult, DoorRequest, DoorState
from worker.doors.openengine_requests import DOOR, door_request
from worker.doors.openengine_responses import (
    OpenEngineEncoder,
    check_role,
    engine_error,
    engine_role,
    health_state,
    kv_events,
    load_info,
    model_info,
    server_info,
    usage_message,
)

SERVICES = ("openengine.v1.Inference", "openengine.v1.Control")


def add_openengine(adapter: DoorAdapter, server: grpc.aio.Server) -> None:
    """Serves OpenEngine on a server."""
    rpc.add_InferenceServicer_to_server(OpenEngineInference(adapter), server)
    rpc.add_ControlServicer_to_server(OpenEngineControl(adapter), server)


class OpenEngineInference(rpc.InferenceServicer):
    """Generation.

    Args:
        adapter: of the worker.
    """

    def __init__(self, adapter: DoorAdapter) -> None:
        self._adapter = adapter

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """Answers one prompt."""
        async with self._adapter.scope(context):
            wanted = door_request(request, context.invocation_metadata() or (), dp_rank(self._adapter))
            check_role(wanted, self._adapter.facts.role)
            self._adapter.check_model(request.model)
            async with self._adapter.call(DOOR, wanted, context) as call:
                made = call.session if wanted.is_context_only else None
                encoder = OpenEngineEncoder(call.request_id, request.response, self._adapter.text.token_text, made)
                failure = await self._write(call, encoder, context)
            if failure is not None:
                # The stream ends with OK; the log says what happened.
                current_record().fail(failure)
                current_record().close()

    async def _write(self, call: DoorCall, encoder: OpenEngineEncoder, context: Context) -> ApiError | None:
        """Writes an accepted request's messages. Returns its failure."""
        try:
            while not call.is_done:
                responses = [each for event in await call.next_events() for each in encoder.responses(event)]
                if call.is_done:
                    responses[-1].usage.CopyFrom(usage_message(call.usage))
                for response in responses:
                    await context.write(response)
        except ApiError as error:
            await context.write(encoder.error(error, self._adapter.state, call.usage))
            return error
        return None


class OpenEngineControl(rpc.ControlServicer):
    """Facts, state and control of the engine.

    Args:
        adapter: of the worker.
        clock_ns: wall clock, nanoseconds.
    """

    def __init__(self, adapter: DoorAdapter, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._adapter = adapter
        self._clock_ns = clock_ns

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.ServerInfo:
        """Describes the engine, once the model is loaded."""
        async with self._adapter.scope(context):
            refuse_unserved(request)
            self._require_loaded()
            size = self._adapter.config.parallel_config.data_parallel_size
            return server_info(self._adapter.facts, dp_rank(self._adapter), size)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.ModelInfo:
        """Describes the model, once it is loaded."""
        async with self._adapter.scope(context):
            refuse_unserved(request, frozenset({"model"}))
            if not request.model:
                raise InvalidFieldError("model", "is empty", self._adapter.facts.model)
            self._adapter.check_model(request.model)
            self._require_loaded()
            has_tokenizer = self._adapter.text.tokenizer is not None
            return model_info(self._adapter.facts, self._adapter.config.model, has_tokenizer=has_tokenizer)

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.LoadInfo:
        """Says how much the engine has to do."""
        async with self._adapter.scope(context):
            refuse_unserved(request, frozenset({"include_per_rank"}))
        load = None if self._adapter.state is DoorState.STARTING else self._adapter.load
        rank = dp_rank(self._adapter) if request.include_per_rank else None
        return load_info(self._adapter.facts, load, self._clock_ns(), rank, self._adapter.num_sessions)

    async def Health(self, request: pb.HealthRequest, context: Context) -> pb.HealthResponse:
        """Says whether the engine takes requests; with a probe it generates one token."""
        async with self._adapter.scope(context):
            if request.role not in pb.EngineRole.values():
                request.role = pb.ENGINE_ROLE_UNSPECIFIED
            refuse_unserved(request, frozenset({"include_inference_probe", "model", "role"}))
            self._adapter.check_model(request.model)
            state = health_state(self._adapter.state)
            checks = [pb.HealthCheck(name="model", state=state)]
            own = engine_role(self._adapter.facts.role)
            if request.role not in (pb.ENGINE_ROLE_UNSPECIFIED, own):
                message = f"the role is {pb.EngineRole.Name(own)}, not {pb.EngineRole.Name(request.role)}"
                checks.append(pb.HealthCheck(name="role", state=pb.HEALTH_STATE_NOT_READY, message=message))
            if request.include_inference_probe:
                checks.append(await self._probe(context))
        worst = next((each.state for each in checks if each.state != pb.HEALTH_STATE_READY), state)
        return pb.HealthResponse(state=worst, checks=checks)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Ends one request, or all."""
        async with self._adapter.scope(context):
            refuse_unserved(request, _ABORT)
            return self._abort(request)

    async def LoadLora(self, request: pb.LoadLoraRequest, context: Context) -> pb.LoadLoraResponse:
        """Refuses, because this engine has no adapters."""
        async with self._adapter.scope(context):
            raise _no_lora()

    async def UnloadLora(self, request: pb.UnloadLoraRequest, context: Context) -> pb.UnloadLoraResponse:
        """Refuses, because this engine has no adapters."""
        async with self._adapter.scope(context):
            raise _no_lora()

    async def ListLoras(self, request: pb.ListLorasRequest, context: Context) -> pb.ListLorasResponse:
        """Refuses, because this engine has no adapters."""
        async with self._adapter.scope(context):
            raise _no_lora()

    async def GetKvEventSources(
        self, request: pb.GetKvEventSourcesRequest, context: Context
    ) -> pb.GetKvEventSourcesResponse:
        """Names no source: SubscribeKvEvents has the events."""
        async with self._adapter.scope(context):
            refuse_unserved(request, frozenset({"data_parallel_ranks"}))
            self._check_ranks(request.data_parallel_ranks)
            return pb.GetKvEventSourcesResponse()

    async def SubscribeKvEvents(self, request: pb.SubscribeKvEventsRequest, context: Context) -> None:  # type: ignore[override]
        """Sends the changes of the prefix cache until the client leaves."""
        async with self._adapter.scope(context):
            refuse_unserved(request, _SUBSCRIPTION)
            self._check_ranks(request.data_parallel_ranks)
            self._require_loaded()
            start = request.start_sequence_number
            follower = self._adapter.follow_blocks(start, wants_snapshot=request.include_snapshot)
        # Outside of the scope, because a drain does not wait for subscribers.
        await context.send_initial_metadata(())
        try:
            while True:
                for batch in await follower.next_batches():
                    await context.write(pb.SubscribeKvEventsResponse(batch=self._batch(batch)))
        except ApiError as error:
            await context.write(pb.SubscribeKvEventsResponse(error=engine_error(error, self._adapter.state)))
        except grpc.aio.InternalError:
            # gRPC raises this when the peer disconnects during a write; it is no fault of this process.
            raise asyncio.CancelledError from None

    def _abort(self, request: pb.AbortRequest) -> pb.AbortResponse:
        target = request.WhichOneof("target")
        if target is None or (target == "request_id" and not request.request_id):
            raise InvalidFieldError("target", "is missing", "request_id, kv_session or all_requests")
        if target == "all_requests":
            return pb.AbortResponse(status=pb.ABORT_STATUS_ABORTED, message=f"{self._adapter.abort_all()} requests")
        is_session = target == "kv_session"
        given = request.kv_session.session_id if is_session else request.request_id
        result = self._adapter.abort_session(given) if is_session else self._adapter.abort(given)
        if result is AbortResult.UNKNOWN:
            raise _unknown(f"{'KV session' if is_session else 'request'} {given[:64]!r}")
        is_over = result is AbortResult.ALREADY_FINISHED
        return pb.AbortResponse(status=pb.ABORT_STATUS_ALREADY_FINISHED if is_over else pb.ABORT_STATUS_ABORTED)

    def _batch(self, batch: FollowedBatch) -> pb.KvEventBatch:
        message = pb.KvEventBatch(
            sequence_number=batch.number,
            timestamp_unix_nanos=self._clock_ns(),
            data_parallel_rank=dp_rank(self._adapter),
        )
        if batch.is_whole:
            message.events.add(all_blocks_cleared=pb.AllBlocksCleared())
        message.events.extend(kv_events(batch.changes, self._adapter.facts.block_size))
        return message

    async def _probe(self, context: Context) -> pb.HealthCheck:
        """A check that generates one token."""
        check = pb.HealthCheck(name="inference_probe", state=pb.HEALTH_STATE_READY)
        try:
            async with self._adapter.call(DOOR, DoorRequest([0], {"max_tokens": 1}), context) as call:
                while not call.is_done:
                    await call.next_events()
        except ApiError as error:
            check.state, check.message = pb.HEALTH_STATE_NOT_READY, error.message
        return check

    def _require_loaded(self) -> None:
        if self._adapter.state is DoorState.STARTING:
            raise NoWorkerError(f"worker {self._adapter.facts.worker_id} is starting")

    def _check_ranks(self, ranks: Iterable[int]) -> None:
        own = dp_rank(self._adapter)
        for i, rank in enumerate(ranks):
            if rank != own:
                raise InvalidFieldError(f"data_parallel_ranks[{i}]", f"is {rank}", f"{own}, this engine's rank")


_SUBSCRIPTION = frozenset({"data_parallel_ranks", "include_snapshot", "start_sequence_number"})
_ABORT = frozenset(field_paths(pb.AbortRequest.DESCRIPTOR))


def dp_rank(adapter: DoorAdapter) -> int:
    """Data-parallel rank of this engine."""
    return adapter.config.parallel_config.data_parallel_rank


def _no_lora() -> ApiError:
    return ApiError(grpc.StatusCode.FAILED_PRECONDITION, "this engine serves no LoRA adapters")


def _unknown(what: str) -> ApiError:
    return ApiError(grpc.StatusCode.NOT_FOUND, f"{what} is not known here", reason="UNKNOWN_REQUEST")
