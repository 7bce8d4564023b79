"""A worker of the peer's kind, without an engine: `python vllm_double.py PORT STEP_SECONDS MODEL_NAME`.

Speaks `vllm.grpc.engine.VllmEngine` as published in `smg-grpc-proto`, a stream per request, which is how `smg` drives
vLLM. Every step each running request gets one made-up token, as our simulated worker does with `fixed:` steps. Runs in
the peer's own virtual environment and imports nothing of ours.
"""

from __future__ import annotations

import asyncio
import random
import sys
from typing import Any

import grpc
import uvloop
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as rpc

VOCAB_SIZE = 16_384


class VllmDouble(rpc.VllmEngineServicer):
    """Tokens at a fixed pace."""

    def __init__(self, step_s: float, model: str) -> None:
        self._step_s = step_s
        self._model = model
        self._waiting: list[asyncio.Future[None]] = []
        self._random = random.Random(0)

    async def steps(self) -> None:
        """Wakes all requests, step by step."""
        loop = asyncio.get_running_loop()
        while True:
            begin = loop.time()
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                if not each.done():
                    each.set_result(None)
            await asyncio.sleep(max(0.0, begin + self._step_s - loop.time()))

    async def Generate(self, request: Any, context: Any) -> None:
        prompt, wanted = len(request.tokenized.input_ids), request.sampling_params.max_tokens or 16
        loop = asyncio.get_running_loop()
        ids: list[int] = []
        for _ in range(wanted):
            woken: asyncio.Future[None] = loop.create_future()
            self._waiting.append(woken)
            await woken
            ids.append(self._random.randrange(1, VOCAB_SIZE))
            counts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": len(ids)}
            await context.write(pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=ids[-1:], **counts)))
        done = pb.GenerateComplete(output_ids=ids, finish_reason="length", **counts)
        await context.write(pb.GenerateResponse(complete=done))

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        return pb.HealthCheckResponse(healthy=True, message="ok")

    async def Abort(self, request: Any, context: Any) -> Any:
        """The end of the stream's call is what ends a request here."""
        return pb.AbortResponse()

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        return pb.GetModelInfoResponse(
            model_path=self._model,
            served_model_name="bench",
            tokenizer_path=self._model,
            is_generation=True,
            max_context_length=262_144,
            vocab_size=VOCAB_SIZE,
            model_type="qwen3",
            architectures=["Qwen3ForCausalLM"],
            eos_token_ids=[0],
            max_req_input_len=262_144,
        )

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        return pb.GetServerInfoResponse(server_type="vllm-grpc")

    async def GetLoads(self, request: Any, context: Any) -> Any:
        return pb.GetLoadsResponse()


async def _serve(port: int, step_s: float, model: str) -> None:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 1 << 26), ("grpc.so_reuseport", 0)])
    double = VllmDouble(step_s, model)
    rpc.add_VllmEngineServicer_to_server(double, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print("listening", flush=True)
    await double.steps()


def main() -> None:
    """Serves until it is killed."""
    uvloop.run(_serve(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]))


if __name__ == "__main__":
    main()
