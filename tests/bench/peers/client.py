"""The client of every server here: one closed loop and the same measurement for every protocol.

An `Ask` sends one request and records the times of its tokens; `closed_loop` keeps a number of requests in flight.
Latencies are the caller's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import grpc
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub

from common.cli.bench.records import Record
from common.cli.bench.workload import Work
from tests.bench.peers.http_stream import events
from tests.bench.peers.runs import Clock, Job, Run, check, clock_from_now

HOST: Final = "127.0.0.1"


Ask = Callable[[Work, Record, Clock], Awaitable[None]]


async def closed_loop(ask: Ask, job: Job) -> Run:
    """Sends the job's requests in order, so many at a time, the next one when an answer is whole.

    Raises:
        WrongWorkError: an answer has not the length that was asked for.
        HttpError, OSError, grpc.RpcError: a request failed.
    """
    records: list[Record] = []
    left = iter(enumerate(job.works))
    clock = clock_from_now()

    async def lane() -> None:
        for index, work in left:
            now = clock()
            record = Record(index, intended=now, sent=now)
            await ask(work, record, clock)
            record.ended = clock()
            records.append(check(record, work))

    lanes = [asyncio.create_task(lane()) for _ in range(job.concurrency)]
    done, late = await asyncio.wait(lanes, timeout=job.limit_s, return_when=asyncio.FIRST_EXCEPTION)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    for task in done:
        task.result()
    return Run(records, not late)


def openai_completions(port: int, model: str) -> Ask:
    """Requests of `/v1/completions`, with vLLM's parameters for greedy answers of a fixed length."""

    async def ask(work: Work, record: Record, clock: Clock) -> None:
        body = {
            "model": model,
            "prompt": list(work.token_ids),
            "max_tokens": work.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async for event in events(port, "/v1/completions", body):
            if event["choices"]:
                record.arrivals.append(clock())
            if usage := event.get("usage"):
                record.input_tokens, record.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]

    return ask


def llama_completion(port: int) -> Ask:
    """Requests of llama-server's own `/completion`; of its samplers only the one that greedy decoding needs."""

    async def ask(work: Work, record: Record, clock: Clock) -> None:
        body = {
            "prompt": list(work.token_ids),
            "n_predict": work.output_tokens,
            "temperature": 0,
            "samplers": ["temperature"],
            "ignore_eos": True,
            "cache_prompt": False,
            "stream": True,
        }
        async for event in events(port, "/completion", body):
            if event.get("stop"):
                record.input_tokens, record.output_tokens = event["tokens_evaluated"], event["tokens_predicted"]
            # A first event may say no more than that the prompt is taken.
            elif event["tokens_predicted"]:
                record.arrivals.append(clock())

    return ask


@asynccontextmanager
async def grpc_generate(port: int) -> AsyncIterator[Ask]:
    """Requests of Fissile's Generate over one channel."""
    options = [("grpc.max_receive_message_length", -1), ("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(f"{HOST}:{port}", options=options) as channel:
        stub = InferenceServiceStub(channel)

        async def ask(work: Work, record: Record, clock: Clock) -> None:
            params = pb.SamplingParams(temperature=0, max_tokens=work.output_tokens, ignore_eos=True)
            message = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=work.token_ids),
                sampling_params=params,
                output_options=pb.OutputOptions(return_token_ids=True),
            )
            async for part in stub.Generate(message):
                if part.token_ids:
                    record.arrivals.append(clock())
                if part.HasField("finish"):
                    usage = part.finish.usage
                    record.input_tokens, record.output_tokens = usage.prompt_tokens, usage.completion_tokens

        yield ask
