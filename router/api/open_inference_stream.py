"""One ModelStreamInfer: reads its requests, runs them side by side, and writes their messages one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeAlias

import grpc
from fissile.peers.inference import open_inference_pb2 as oip
from fissile.v1 import inference_pb2 as pb
from google.protobuf.message import DecodeError

from common.errors import MalformedRequestError
from common.limits import MAX_STREAM_ITEMS
from common.rpc.request_reader import NOT_A_MESSAGE, MessageReads
from router.api.answer_call import AnswerCall
from router.api.answers import AnswerResponse
from router.api.open_inference_messages import InferAnswers
from router.api.rpc_scope import Context, RpcScope
from router.api.shutdown import OpenCalls

Answer: TypeAlias = Callable[[oip.ModelInferRequest, "InferWriter"], Coroutine[Any, Any, None]]


class InferWriter:
    """Writes the messages of one call, one at a time.

    A write goes on if its request ends meanwhile: gRPC takes no other message of the call before it is done.

    Args:
        context: of the call.
        scope: of the call.
    """

    def __init__(self, context: Context, scope: RpcScope) -> None:
        self._turn = asyncio.Lock()
        self._write_later: Callable[[object], Awaitable[None]] = context.write
        self._write_next: Callable[[object], Awaitable[None]] = scope.write_first

    async def write(self, message: oip.ModelStreamInferResponse) -> None:
        """Writes a message.

        Raises:
            asyncio.CancelledError: the client is gone.
        """
        await asyncio.shield(asyncio.ensure_future(self._write(message)))

    async def _write(self, message: oip.ModelStreamInferResponse) -> None:
        async with self._turn:
            write, self._write_next = self._write_next, self._write_later
            try:
                await write(message)
            except grpc.aio.InternalError:
                raise asyncio.CancelledError from None


class InferParts:
    """Sends each part of the answers to one request.

    Args:
        call: of the request.
        answers: makes the responses.
        writer: writes them.
    """

    is_streamed = True

    def __init__(self, call: AnswerCall, answers: InferAnswers, writer: InferWriter) -> None:
        self.has_begun = self.has_sent = False
        self._call = call
        self._answers = answers
        self._writer = writer

    def new_message(self, request_id: str, index: int) -> AnswerResponse:
        """One message for all parts: `write` makes another one of it at once."""
        return pb.GenerateResponse(request_id=request_id, index=index)

    def begin(self, scope: RpcScope) -> None:
        """Notes that the first message is written."""
        self.has_begun = self.has_sent = True

    def write(self, message: AnswerResponse) -> Awaitable[None]:
        """Sends a message; waits while the client has no room for it."""
        assert isinstance(message, pb.GenerateResponse)
        part = self._answers.part(message, self._call.model)
        return self._writer.write(oip.ModelStreamInferResponse(infer_response=part))


class InferStream:
    """The requests of one call.

    Args:
        context: of the call.
        idle: bounds the calls that have no request in flight, and the time for which they have none.
        open_calls: ends such a call with the router.
        answer: answers one request; an ApiError of it ends the call.
    """

    def __init__(self, context: Context, idle: MessageReads, open_calls: OpenCalls, answer: Answer) -> None:
        self._context = context
        self._idle = idle
        self._open_calls = open_calls
        self._answer = answer
        self._running: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def serve(self, writer: InferWriter) -> None:
        """Answers all requests until the client ends the stream of them.

        Raises:
            ApiError: the call fails, and with it all of its requests.
        """
        try:
            while (message := await self._next()) is not grpc.aio.EOF:
                task = asyncio.create_task(self._answer(message, writer))
                self._running.add(task)
                task.add_done_callback(self._done)
                while len(self._running) >= MAX_STREAM_ITEMS:
                    await self._wait()
            while self._running:
                await self._wait()
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            if not self._failed.cancel():
                # Read, so that asyncio does not report it.
                self._failed.exception()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._failed.done():
            self._failed.set_exception(error)

    async def _wait(self, *others: asyncio.Future[Any]) -> None:
        """Waits until a request ends, or one of `others`."""
        waited = {self._failed, *self._running, *others}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done():
            self._failed.result()

    async def _next(self) -> Any:
        """Reads the next request; EOF if there is none."""
        read = asyncio.ensure_future(self._context.read())
        try:
            while not read.done():
                if self._running:
                    await self._wait(read)
                else:
                    with self._open_calls.interruptible():
                        await self._idle.wait(asyncio.shield(read))
            return read.result()
        except DecodeError:
            raise MalformedRequestError(NOT_A_MESSAGE) from None
        finally:
            read.cancel()
