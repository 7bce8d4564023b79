"""Servicers of vllm.Inference and vllm.Control on a worker, as Dynamo's vLLM sidecar calls them.

A failure is a gRPC status, also after tokens. Control serves discovery and Abort; its other methods are refused by
name.
"""

from __future__ import annotations

from typing import Any, Final

import grpc
from fissile.peers.vllm import control_pb2 as cpb
from fissile.peers.vllm import inference_pb2 as pb
from fissile.peers.vllm.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server
from fissile.peers.vllm.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server

from common.errors import ApiError, InvalidFieldError, NoWorkerError
from common.rpc.unsupported_fields import refuse_unserved
from worker.doors.door_adapter import Context, DoorAdapter
from worker.doors.door_request import DoorRequest, DoorState
from worker.doors.vllm_inference_messages import (
    DOOR,
    OutputEncoder,
    check_rank,
    joined,
    model_info,
    read_request,
    server_info,
)

SERVICES: Final = ("vllm.Inference", "vllm.Control")
_NO_ADAPTERS: Final = "this engine has no LoRA adapters"
_NO_PAUSE: Final = "this engine cannot pause"
_NO_SLEEP: Final = "this engine cannot sleep"
_FIXED_WEIGHTS: Final = "the weights of this engine do not change"


def _unserved(method: str, why: str) -> Any:
    """A method of Control that refuses every call."""

    async def refuse(control: VllmControl, _: object, context: Context) -> None:
        async with control.adapter.scope(context):
            message = f"vllm.Control/{method} is not served: {why}"
            raise ApiError(
                grpc.StatusCode.UNIMPLEMENTED, message, reason="UNSERVED_METHOD", metadata={"method": method}
            )

    return refuse


def add_vllm_inference(adapter: DoorAdapter, server: grpc.aio.Server) -> None:
    """Serves both services on a server."""
    add_InferenceServicer_to_server(VllmInference(adapter), server)
    add_ControlServicer_to_server(VllmControl(adapter), server)


class VllmInference(InferenceServicer):
    """Generation.

    Args:
        adapter: of the worker.
    """

    def __init__(self, adapter: DoorAdapter) -> None:
        self._adapter = adapter

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        """Answers one prompt, in one message."""
        async with self._adapter.scope(context):
            wanted = self._read(request, context)
            if wanted.params.get("n", 1) > 1:
                problem = f"is {request.sampling.num_sequences}"
                raise InvalidFieldError("sampling.num_sequences", problem, "1; GenerateStream sends several answers")
            encoder, responses = OutputEncoder(request.response), []
            async with self._adapter.call(DOOR, wanted, context) as call:
                while not call.is_done:
                    responses += [encoder.response(event) for event in await call.next_events()]
        return joined(responses)

    async def GenerateStream(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """Answers one prompt, in parts."""
        async with self._adapter.scope(context):
            wanted, encoder = self._read(request, context), OutputEncoder(request.response)
            async with self._adapter.call(DOOR, wanted, context) as call:
                while not call.is_done:
                    for event in await call.next_events():
                        await context.write(encoder.response(event))

    def _read(self, request: pb.GenerateRequest, context: Context) -> DoorRequest:
        wanted = read_request(request)
        check_rank(context.invocation_metadata() or (), _dp_rank(self._adapter))
        self._adapter.check_model(request.model)
        return wanted


class VllmControl(ControlServicer):
    """Discovery and Abort.

    Args:
        adapter: of the worker.

    Attributes:
        adapter: as given.
    """

    def __init__(self, adapter: DoorAdapter) -> None:
        self.adapter = adapter

    async def GetServerInfo(self, request: cpb.GetServerInfoRequest, context: Context) -> cpb.ServerInfo:
        """Describes the engine, once the model is loaded."""
        async with self.adapter.scope(context):
            refuse_unserved(request)
            self._require_loaded()
            size = self.adapter.config.parallel_config.data_parallel_size
            return server_info(self.adapter.facts, _dp_rank(self.adapter), size)

    async def GetModelInfo(self, request: cpb.GetModelInfoRequest, context: Context) -> cpb.ModelInfo:
        """Describes the model, once it is loaded."""
        async with self.adapter.scope(context):
            refuse_unserved(request)
            self._require_loaded()
            has_tokenizer = self.adapter.text.tokenizer is not None
            return model_info(self.adapter.facts, self.adapter.config.model, has_tokenizer=has_tokenizer)

    async def Abort(self, request: cpb.AbortRequest, context: Context) -> cpb.AbortResponse:
        """Ends requests; an unknown id may be one that has ended."""
        async with self.adapter.scope(context):
            refuse_unserved(request, frozenset({"request_ids"}))
            for request_id in request.request_ids:
                self.adapter.abort(request_id)
            return cpb.AbortResponse()

    async def GetKvEventSources(
        self, request: cpb.GetKvEventSourcesRequest, context: Context
    ) -> cpb.GetKvEventSourcesResponse:
        """Names no source: this engine publishes nothing over ZMQ."""
        async with self.adapter.scope(context):
            refuse_unserved(request)
            return cpb.GetKvEventSourcesResponse()

    Shutdown = _unserved("Shutdown", "end the worker with SIGTERM")
    LoadLora = _unserved("LoadLora", _NO_ADAPTERS)
    UnloadLora = _unserved("UnloadLora", _NO_ADAPTERS)
    ListLoras = _unserved("ListLoras", _NO_ADAPTERS)
    PauseGeneration = _unserved("PauseGeneration", _NO_PAUSE)
    ResumeGeneration = _unserved("ResumeGeneration", _NO_PAUSE)
    IsPaused = _unserved("IsPaused", _NO_PAUSE)
    Sleep = _unserved("Sleep", _NO_SLEEP)
    WakeUp = _unserved("WakeUp", _NO_SLEEP)
    IsSleeping = _unserved("IsSleeping", _NO_SLEEP)
    InitWeightTransferEngine = _unserved("InitWeightTransferEngine", _FIXED_WEIGHTS)
    StartWeightUpdate = _unserved("StartWeightUpdate", _FIXED_WEIGHTS)
    StartDraftWeightUpdate = _unserved("StartDraftWeightUpdate", _FIXED_WEIGHTS)
    UpdateWeights = _unserved("UpdateWeights", _FIXED_WEIGHTS)
    FinishWeightUpdate = _unserved("FinishWeightUpdate", _FIXED_WEIGHTS)
    UpdateWeightVersion = _unserved("UpdateWeightVersion", _FIXED_WEIGHTS)
    GetWeightVersion = _unserved("GetWeightVersion", _FIXED_WEIGHTS)

    def _require_loaded(self) -> None:
        if self.adapter.state is DoorState.STARTING:
            raise NoWorkerError(f"worker {self.adapter.facts.worker_id} is starting")


def _dp_rank(adapter: DoorAdapter) -> int:
    return adapter.config.parallel_config.data_parallel_rank
