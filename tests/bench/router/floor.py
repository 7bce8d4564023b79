"""The least that a server with gRPC for Python costs: `python -m tests.bench.router.floor PORT STEP_SECONDS`.

Answers Generate like a router whose own work is free: every step it writes one constant message to each stream, with
the server's options and the event loop that the router has. What the router takes above this is ours.
"""

from __future__ import annotations

import asyncio
import sys

import grpc
import uvloop
from fissile.v1 import inference_pb2 as pb

from common.limits import MAX_REQUEST_BYTES
from common.rpc.server import server_options
from router.api.rpc_scope import SERVICE, Context


class FloorService:
    """The one method of InferenceService that is called: one token per stream and step."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._waiting: list[asyncio.Future[None]] = []

    async def tick(self) -> None:
        """Wakes all streams, step by step."""
        loop = asyncio.get_running_loop()
        while True:
            begin = loop.time()
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                if not each.done():
                    each.set_result(None)
            await asyncio.sleep(max(0.0, begin + self._step_s - loop.time()))

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Writes until the client goes."""
        message = pb.GenerateResponse(request_id="0" * 32, text=" token", token_ids=[1234])
        loop = asyncio.get_running_loop()
        while True:
            woken: asyncio.Future[None] = loop.create_future()
            self._waiting.append(woken)
            await woken
            await context.write(message)


async def _serve(port: int, step_s: float) -> None:
    server = grpc.aio.server(options=server_options(MAX_REQUEST_BYTES))
    service = FloorService(step_s)
    handler = grpc.unary_stream_rpc_method_handler(
        service.Generate,
        request_deserializer=pb.GenerateRequest.FromString,
        response_serializer=pb.GenerateResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Generate": handler}),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print("listening", flush=True)
    await service.tick()


def main() -> None:
    """Serves until it is killed."""
    uvloop.run(_serve(int(sys.argv[1]), float(sys.argv[2])))


if __name__ == "__main__":
    main()
