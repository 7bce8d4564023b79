"""A scripted WorkerService on a real socket: for what a real worker does only by accident."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import struct
import uuid
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from fissile.worker.v1 import worker_pb2 as wpb
from fissile.worker.v1.worker_pb2_grpc import WorkerServiceServicer, add_WorkerServiceServicer_to_server

from common.limits import HEARTBEAT_S, TOKENIZER_CHUNK_BYTES
from common.text.tokenizer import files_sha256
from common.wire.kv_digests import block_names
from tests.unit.router.support import EOS, small_tokenizer

Answer = Callable[[wpb.SubmitSequence], list[int]]
# Tokens per KV block.
BLOCK_SIZE = 16


@functools.cache
def _encoded(text: str) -> list[int]:
    """Token ids; a tokenizer takes tens of milliseconds to make."""
    return small_tokenizer().encode(text)


def letters(_: wpb.SubmitSequence) -> list[int]:
    """Endless alphabet, one token a letter; never the end of sequence."""
    return _encoded("hijklmnpqrstuvwxyz") * 40_000


def short(_: wpb.SubmitSequence) -> list[int]:
    """A word and the end of sequence."""
    return [*_encoded("hello"), EOS]


@dataclass(slots=True)
class _Running:
    submitted: wpb.SubmitSequence
    answer: list[int]
    sent: int = 0
    begun: bool = False


@dataclass
class FakeWorker(WorkerServiceServicer):
    """One worker; change its attributes while it runs to make it behave.

    `tokens_per_step` tokens of every sequence go out each `step_s` seconds. `silent` stops all frames but keeps the
    stream. `logits` gives digests of logits by position, `vector` is that of every prompt, `kv` gives digests of a
    sequence's KV blocks, None to say nothing of one; they are sent when it comes. `description` overrides
    fields of GetWorker's answer. What runs ends with its stream; a later stream knows nothing of it.
    """

    files: dict[str, bytes]
    worker_id: str = "w0"
    answer: Answer = letters
    step_s: float = 0.002
    logits: Callable[[int], int] | None = lambda position: 7 * position
    vector: Sequence[float] = (3.0, 4.0, 0.0)
    tokens_per_step: int = 1
    max_model_len: int = 4096
    room_seqs: int = 64
    decoding: int | None = None
    latency_us: int = 1000
    silent: bool = False
    busy_ms: int = 0
    intake: wpb.Intake.ValueType = wpb.INTAKE_OPEN
    give_back: bool = False
    caches_prefixes: bool = False
    kv: Callable[[wpb.SubmitSequence, int], int | None] | None = None
    end_with: wpb.SequenceEnd | None = None
    description: dict[str, Any] = field(default_factory=dict)
    instance_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    port: int = 0
    submitted: list[wpb.SubmitSequence] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    lanes: list[wpb.Lane] = field(default_factory=list)
    running: dict[int, _Running] = field(default_factory=dict)
    calls: list[grpc.aio.ServicerContext[Any, Any]] = field(default_factory=list)
    server: grpc.aio.Server | None = None
    digests: list[wpb.KvDigest] = field(default_factory=list)
    _serial: int = 0
    _parts: dict[int, wpb.SubmitSequence] = field(default_factory=dict)

    async def start(self) -> str:
        """Listens; returns the address."""
        self.server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        add_WorkerServiceServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self.server.start()
        return f"127.0.0.1:{self.port}"

    async def stop(self) -> None:
        """Breaks everything at once."""
        if self.server is not None:
            await self.server.stop(0)

    async def GetWorker(self, request: wpb.GetWorkerRequest, context: Any) -> wpb.GetWorkerResponse:
        answer = wpb.GetWorkerResponse(
            worker_id=self.worker_id,
            instance_id=self.instance_id,
            state=wpb.WORKER_STATE_SERVING,
            model="m",
            architecture="Qwen3ForCausalLM",
            weights_digest="ww",
            numerics="nn",
            tokenizer_sha256=files_sha256(self.files) if self.files else "",
            block_size=BLOCK_SIZE,
            limits=wpb.Limits(max_model_len=self.max_model_len, max_num_seqs=64, max_num_batched_tokens=2048),
            vocab_size=300,
            total_blocks=1000,
        )
        answer.MergeFrom(wpb.GetWorkerResponse(**self.description))
        return answer

    async def GetTokenizer(self, request: wpb.GetTokenizerRequest, context: Any) -> None:  # type: ignore[override]
        for name, data in self.files.items():
            for start in range(0, max(1, len(data)), TOKENIZER_CHUNK_BYTES):
                piece = data[start : start + TOKENIZER_CHUNK_BYTES]
                await context.write(wpb.GetTokenizerResponse(name=name, data=piece))
        await context.write(wpb.GetTokenizerResponse(sha256=files_sha256(self.files)))

    async def Generate(self, request: wpb.GenerateRequest, context: Any) -> None:  # type: ignore[override]
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "routers use Session")

    async def Drain(self, request: wpb.DrainRequest, context: Any) -> wpb.DrainResponse:
        return wpb.DrainResponse(sequences=len(self.running))

    async def SetIntake(self, request: wpb.SetIntakeRequest, context: Any) -> wpb.SetIntakeResponse:
        self.intake = request.intake
        return wpb.SetIntakeResponse(sequences=len(self.running))

    async def FlushCache(self, request: wpb.FlushCacheRequest, context: Any) -> wpb.FlushCacheResponse:
        return wpb.FlushCacheResponse(blocks=7)

    async def ListSteps(self, request: wpb.ListStepsRequest, context: Any) -> wpb.ListStepsResponse:
        return wpb.ListStepsResponse(steps=[wpb.Step(number=7)])

    async def Session(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        hello = (await context.read()).hello
        assert hello.router_id
        limits = wpb.Limits(max_model_len=self.max_model_len, max_num_seqs=64, max_num_batched_tokens=2048)
        unknown = [live.rid for live in hello.live]
        welcome = wpb.Welcome(
            worker_id=self.worker_id,
            instance_id=self.instance_id,
            limits=limits,
            load=self._load(),
            unknown=unknown,
            busy_ms=self.busy_ms,
            kv_events=self.caches_prefixes,
        )
        await context.write(wpb.SessionResponse(welcome=welcome))
        self.calls.append(context)
        reader = asyncio.create_task(self._read(context))
        runner = asyncio.create_task(self._run(context))
        try:
            # It ends when the router closes the stream.
            await asyncio.wait([reader, runner], return_when=asyncio.FIRST_COMPLETED)
        finally:
            runner.cancel()
            reader.cancel()
            try:
                with contextlib.suppress(asyncio.CancelledError):
                    await reader
            finally:
                # Also when reading has failed, as it may when the server stops.
                self.running.clear()

    async def _read(self, context: Any) -> None:
        while (frame := await context.read()) is not grpc.aio.EOF:
            kind = frame.WhichOneof("frame")
            if kind == "submit":
                self._submit(frame.submit)
            elif kind == "extend":
                self._extend(frame.extend)
            elif kind == "cancel":
                self.cancelled.extend(frame.cancel.rids)
                for rid in frame.cancel.rids:
                    self.running.pop(rid, None)
                    self._parts.pop(rid, None)
            elif kind == "lane":
                self.lanes.append(frame.lane)

    def _submit(self, frame: wpb.Submit) -> None:
        for sequence in frame.seqs:
            if sequence.more:
                self._parts[sequence.rid] = sequence
            else:
                self._begin(sequence)
        self.groups.append(len(frame.seqs))
        if not frame.more:
            self._serial = frame.serial

    def _extend(self, frame: wpb.Extend) -> None:
        sequence = self._parts.get(frame.rid)
        if sequence is None:
            return
        sequence.token_ids.extend(frame.token_ids)
        if not frame.more:
            sequence.more = False
            self._begin(self._parts.pop(frame.rid))

    def _begin(self, sequence: wpb.SubmitSequence) -> None:
        assert sequence.rid not in self.running
        self.submitted.append(sequence)
        done = len(sequence.token_ids) - sequence.prompt_len
        if self.kv is not None:
            names = block_names(array("I", sequence.token_ids), BLOCK_SIZE, self.description.get("hash_seed", 0))
            said = ((name, self.kv(sequence, i)) for i, name in enumerate(names))
            self.digests += [wpb.KvDigest(name=name, digest=digest) for name, digest in said if digest is not None]
        self.running[sequence.rid] = _Running(sequence, self.answer(sequence), done)

    async def _run(self, context: Any) -> None:
        loop = asyncio.get_running_loop()
        last = loop.time()
        while True:
            await asyncio.sleep(self.step_s)
            if self.silent:
                continue
            if self.digests:
                digests, self.digests = self.digests, []
                await context.write(wpb.SessionResponse(kv_events=wpb.KvEvents(digests=digests)))
            if self.running and not self.busy_ms:
                await context.write(wpb.SessionResponse(step_output=self._step()))
                last = loop.time()
            elif loop.time() - last > HEARTBEAT_S / 5:
                beat = wpb.Heartbeat(load=self._load(), submit_seen=self._serial, busy_ms=self.busy_ms)
                await context.write(wpb.SessionResponse(heartbeat=beat))
                last = loop.time()

    def _step(self) -> wpb.StepOutput:
        step = wpb.StepOutput(submit_seen=self._serial)
        for rid, sequence in list(self.running.items()):
            if self.give_back and not sequence.begun:
                step.returned.append(rid)
                del self.running[rid]
            else:
                self._advance(step, rid, sequence)
        step.load.CopyFrom(self._load())
        return step

    def _advance(self, step: wpb.StepOutput, rid: int, sequence: _Running) -> None:
        params = sequence.submitted.params
        new = sequence.answer[sequence.sent : sequence.sent + self.tokens_per_step]
        if sequence.sent > len(sequence.answer):
            # A client has brought more than the script has.
            new = [EOS]
        new = new[: params.max_tokens - sequence.sent]
        position = sequence.submitted.prompt_len + sequence.sent
        step.rid.append(rid)
        step.first_pos.append(position)
        step.n.append(len(new))
        step.token_ids.extend(new)
        if (every := sequence.submitted.logits_every) and self.logits is not None:
            due = [p for p in range(position, position + len(new)) if (p - sequence.submitted.prompt_len) % every == 0]
            step.logit_digests.add(rid=rid, positions=due, digests=map(self.logits, due))
        if sequence.submitted.pooling and self.vector:
            step.pooled.add(rid=rid, values=struct.pack(f"<{len(self.vector)}f", *self.vector))
        if not sequence.begun:
            sequence.begun = True
            step.starts.add(rid=rid, cached_tokens=3, queue_us=1000, prefill_us=2000)
        sequence.sent += len(new)
        end = None
        if self.end_with is not None:
            end = step.ends.add()
            end.CopyFrom(self.end_with)
        elif new and new[-1] == EOS:
            end = step.ends.add(reason=wpb.END_REASON_EOS, stop_token_id=EOS)
        elif sequence.sent >= params.max_tokens:
            end = step.ends.add(reason=wpb.END_REASON_LENGTH)
        if end is not None:
            end.rid, end.end_pos = rid, position + len(new)
            del self.running[rid]

    def _load(self) -> wpb.Load:
        decoding = len(self.running) if self.decoding is None else self.decoding
        return wpb.Load(
            decoding_seqs=decoding,
            room_tokens=2048,
            room_seqs=max(0, self.room_seqs - len(self.running)),
            last_prompt_latency_us=self.latency_us,
            prefill_rate=10_000,
            intake=self.intake,
        )
