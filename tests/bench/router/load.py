"""The load of the router's benchmarks, as a process: `python -m tests.bench.router.load '{"plan": ...}' FILE`.

Keeps `streams` requests in flight, or sends bursts at given times. Prints `begin` and `end` around the part that is
measured, so that the parent can read CPU times at those moments, and then writes what it saw to FILE, as JSON.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import uvloop
from fissile.v1 import inference_pb2 as pb
from fissile.worker.v1 import worker_pb2 as wpb

from tests.bench.router.wire import Connection, GrpcConnection, Reply, SseConnection

ROUTER, WORKER, HTTP, VLLM = "router", "worker", "http", "vllm"
PATHS = {
    ROUTER: "/fissile.v1.InferenceService/Generate",
    WORKER: "/fissile.worker.v1.WorkerService/Generate",
    HTTP: "/v1/completions",
    VLLM: "/vllm.grpc.engine.VllmEngine/Generate",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What a load process does.

    Attributes:
        target: ROUTER, WORKER, HTTP (OpenAI's completions) or VLLM (the peer's worker protocol): what is spoken.
        addresses: host:port, used in turn.
        connections: connections in all; SSE opens one per stream.
        streams: requests in flight; 0 sends bursts instead.
        warm_s: seconds before the measured part.
        measure_s: seconds of the measured part.
        burst: requests of a burst.
        spacing_s: between the requests of a burst.
        bursts_per_s: mean rate of bursts (Poisson).
        prompt: tokens of a prompt.
        texts: a JSON file of prompts, used in turn; empty sends token ids, random ones.
        model: its name, for HTTP.
        output: tokens of an answer.
        spread: answers have between `1 - spread` and `1 + spread` times as many tokens. Without it streams that begin
            together also end together.
        pause_s: longest pause of a stream before its next request, at random. Without pauses each request begins right
            after the step that ended the one before. Then it waits for a whole number of steps: a median of the times
            to the first token was 9.7 or 14 ms.
        vocab: token ids are below.
        seed: of everything random.
        token_ids: whether answers carry token ids, so that the tokens in a message can be counted.
    """

    target: str
    addresses: Sequence[str]
    connections: int = 8
    streams: int = 0
    warm_s: float = 1.0
    measure_s: float = 3.0
    burst: int = 0
    spacing_s: float = 0.0
    bursts_per_s: float = 0.0
    prompt: int = 32
    output: int = 64
    spread: float = 0.0
    pause_s: float = 0.0
    vocab: int = 256
    seed: int = 0
    token_ids: bool = True
    texts: str = ""
    model: str = "bench"


@dataclass(slots=True)
class Seen:
    """What a load process saw of the measured part; lists in seconds.

    Attributes:
        ttft: of requests that were sent in it and got their first token.
        firsts: when the first tokens in it came, seconds of `time.perf_counter`.
        tpot: of requests that ended in it: mean time per token after the first.
        gaps: between messages of one stream.
        tokens: that came in it.
        messages: that came in it.
        requests: that ended in it.
        failed: requests without a finish, at any time.
        seconds: how long it was.
        cpu_s: of this process.
    """

    ttft: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    messages: int = 0
    requests: int = 0
    failed: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0


def bodies(plan: Plan) -> Iterator[bytes]:
    """The requests, each with its own prompt."""
    if plan.texts:
        made = [_body(plan, [], text) for text in json.loads(Path(plan.texts).read_text("utf-8"))]
        yield from itertools.cycle(made)
    rnd = random.Random(plan.seed)
    while True:
        ids = rnd.choices(range(plan.vocab), k=plan.prompt)
        yield _body(replace(plan, output=round(plan.output * rnd.uniform(1 - plan.spread, 1 + plan.spread))), ids, "")


def _body(plan: Plan, ids: Sequence[int], text: str) -> bytes:
    if plan.target == WORKER:
        params = wpb.SamplingParams(
            max_tokens=plan.output, top_p=1, temperature=1, repetition_penalty=1, ignore_eos=True
        )
        return wpb.GenerateRequest(token_ids=ids, params=params).SerializeToString()
    if plan.target == VLLM:
        return _vllm_request(ids, plan.output)
    if plan.target == HTTP:
        asked = {"max_tokens": plan.output, "ignore_eos": True, "stream": True, "model": plan.model}
        # Peers do not know the second way.
        prompt = {"prompt": text} if text else {"prompt": ids, "return_token_ids": plan.token_ids}
        return json.dumps({**asked, **prompt, "stream_options": {"include_usage": True}}).encode()
    request = pb.GenerateRequest(text=text) if text else pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids))
    request.sampling_params.max_tokens = plan.output
    request.sampling_params.ignore_eos = True
    request.output_options.return_token_ids = plan.token_ids
    return request.SerializeToString()


def _vllm_request(ids: Sequence[int], max_tokens: int) -> bytes:
    """A GenerateRequest of vllm_engine.proto, written by hand: the peer's package is not in our environment."""
    tokenized = _field(2, b"".join(map(_to_varint, ids)))
    params = _number(2, 0) + _number(8, max_tokens) + _number(14, 1)
    return _field(1, b"bench") + _field(2, tokenized) + _field(4, params) + _number(5, 1)


def _field(number: int, data: bytes) -> bytes:
    return _to_varint(number << 3 | 2) + _to_varint(len(data)) + data


def _number(number: int, value: int) -> bytes:
    return _to_varint(number << 3) + _to_varint(value)


def _to_varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def tokens_in_router_message(message: memoryview) -> int:
    """Token ids in an encoded GenerateResponse: the values of its field 4."""
    at = 0
    while at < len(message):
        tag, (size, at) = message[at], _varint(message, at + 1)
        if tag == 0x22:
            return sum(byte < 0x80 for byte in message[at : at + size])
        if tag & 7 != 2:
            return 0
        at += size
    return 0


def tokens_in_worker_message(message: memoryview) -> int:
    """Token ids in an encoded fissile.worker.v1.GenerateResponse: the values of its field 1."""
    if not message or message[0] != 0x0A:
        return 0
    size, at = _varint(message, 1)
    return sum(byte < 0x80 for byte in message[at : at + size])


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def tokens_in_event(message: memoryview) -> int:
    """Token ids in an event, if it has them; else one for an event with text: `smg` sends an event per token."""
    event = bytes(message)
    _, found, rest = event.partition(b'"token_ids":[')
    if found:
        ids = rest.partition(b"]")[0]
        return ids.count(b",") + 1 if ids else 0
    return int(b'"finish_reason":null' in event)


def tokens_in_vllm_message(message: memoryview) -> int:
    """One for a GenerateStreamChunk: our double sends a token in each, and a GenerateComplete at the end."""
    return int(message[0] == 0x0A)


COUNTERS = {
    ROUTER: tokens_in_router_message,
    WORKER: tokens_in_worker_message,
    HTTP: tokens_in_event,
    VLLM: tokens_in_vllm_message,
}


def final_tokens(plan: Plan, reply: Reply) -> int | None:
    """Tokens of a whole answer as its last message says; None when it has not ended well."""
    if plan.target == HTTP:
        usage = json.loads(reply.last).get("usage") if reply.last.startswith(b"{") else None
        return int(usage["completion_tokens"]) if usage else None
    if plan.target == VLLM:
        return sum(reply.tokens) if reply.last[:1] == b"\x12" else None
    if plan.target == WORKER:
        answer = wpb.GenerateResponse.FromString(reply.last)
        return sum(reply.tokens) if answer.HasField("end") else None
    finish = pb.GenerateResponse.FromString(reply.last).finish
    return finish.usage.completion_tokens if finish.reason else None


class Load:
    """One run of a plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._bodies = bodies(plan)
        self._connections: list[Connection] = []
        self._turn = 0
        self._replies: list[Reply] = []
        self._running: dict[int, tuple[Connection, Reply]] = {}

    async def run(self) -> Seen:
        """Warms up, measures, and gives up what still runs."""
        plan = self._plan
        count = plan.streams if plan.target == HTTP and plan.streams else plan.connections
        for i in range(count):
            self._connections.append(await self._open(i))
        work = [asyncio.create_task(self._keep_busy(i)) for i in range(plan.streams)]
        if not plan.streams:
            work.append(asyncio.create_task(self._bursts()))
        await _pause(plan.warm_s, work)
        print("begin", flush=True)
        begin, cpu = time.perf_counter(), time.process_time()
        await _pause(plan.measure_s, work)
        end, cpu = time.perf_counter(), time.process_time() - cpu
        print("end", flush=True)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        for connection in self._connections:
            connection.close()
        return self._seen(begin, end, cpu)

    async def _open(self, i: int) -> Connection:
        kind = SseConnection if self._plan.target == HTTP else GrpcConnection
        address = self._plan.addresses[i % len(self._plan.addresses)]
        return await kind.open(address, COUNTERS[self._plan.target])

    async def _keep_busy(self, i: int) -> None:
        """One stream after another. The first ones start apart, so that they do not end together."""
        await asyncio.sleep(0.8 * self._plan.warm_s * i / self._plan.streams)
        connection, rnd = self._connections[i % len(self._connections)], random.Random(f"{self._plan.seed} {i}")
        while True:
            await self._request(connection)
            if self._plan.pause_s:
                await asyncio.sleep(rnd.uniform(0.0, self._plan.pause_s))

    async def _bursts(self) -> None:
        rnd = random.Random(self._plan.seed + 1)
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._burst(group))
                await asyncio.sleep(rnd.expovariate(self._plan.bursts_per_s))

    async def _burst(self, group: asyncio.TaskGroup) -> None:
        for _ in range(self._plan.burst):
            self._turn += 1
            group.create_task(self._request(self._connections[self._turn % len(self._connections)]))
            await asyncio.sleep(self._plan.spacing_s)

    async def _request(self, connection: Connection) -> None:
        reply = connection.start(PATHS[self._plan.target], next(self._bodies))
        self._replies.append(reply)
        await reply.ended

    def _seen(self, begin: float, end: float, cpu_s: float) -> Seen:
        seen = Seen(seconds=end - begin, cpu_s=cpu_s)
        for reply in self._replies:
            self._add(seen, reply, begin, end)
        return seen

    def _add(self, seen: Seen, reply: Reply, begin: float, end: float) -> None:
        times = reply.times
        whole = final_tokens(self._plan, reply) if reply.ended.done() and not reply.ended.cancelled() else 0
        if whole is None:
            seen.failed += 1
        if times and begin <= reply.began < end:
            seen.ttft.append(times[0] - reply.began)
        if times and begin <= times[0] < end:
            seen.firsts.append(times[0])
        inside = [begin <= at < end for at in times]
        seen.messages += sum(inside)
        seen.tokens += sum(count for count, within in zip(reply.tokens, inside, strict=True) if within)
        seen.gaps += [b - a for a, b, within in zip(times, times[1:], inside[1:], strict=False) if within]
        if whole and inside[-1]:
            seen.requests += 1
            if whole > 1:
                seen.tpot.append((times[-1] - times[0]) / (whole - 1))


async def _pause(seconds: float, work: Sequence[asyncio.Task[None]]) -> None:
    """Waits.

    Raises:
        ConnectionError: a server has closed a connection meanwhile.
    """
    done, _ = await asyncio.wait(work, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()


def main() -> None:
    """Runs the plan in the first argument, and writes its measurements to the file in the second one."""
    plan = Plan(**json.loads(sys.argv[1]))
    try:
        seen = uvloop.run(Load(plan).run())
    except ConnectionError as error:
        # One line for all streams, because the others would repeat it.
        print(f"failed: {error}", flush=True)
        os._exit(1)
    Path(sys.argv[2]).write_text(json.dumps(asdict(seen)))


if __name__ == "__main__":
    main()
