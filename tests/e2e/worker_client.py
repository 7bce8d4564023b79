"""A router's end of a Session, a model folder without weights, and a worker process, for tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import tokenizers
from fissile.worker.v1 import worker_pb2 as wpb
from fissile.worker.v1.worker_pb2_grpc import WorkerServiceStub

from common.wire.block_hash import hash_chain

VOCAB_SIZE = 500
EOS_ID = 499
BLOCK_SIZE = 16


def make_model_folder(folder: Path, *, architecture: str = "LlamaForCausalLM", tokenizer: bool = True) -> Path:
    """What a simulated worker needs of a checkpoint: configuration and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [architecture],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 4096,
        "eos_token_id": EOS_ID,
    }
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer:
        model = tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0")
        tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text("{}")
    return folder


def sequence(
    rid: int,
    prompt: Sequence[int] = (1, 2, 3),
    max_tokens: int = 5,
    deadline_left_ms: int = 0,
    keep: bool = False,
) -> wpb.SubmitSequence:
    """A greedy sequence for a Submit."""
    return wpb.SubmitSequence(
        rid=rid,
        prompt_len=len(prompt),
        token_ids=prompt,
        params=wpb.SamplingParams(top_p=1, repetition_penalty=1, max_tokens=max_tokens),
        seed=rid,
        chain_hash=(hash_chain(prompt, BLOCK_SIZE) or [0])[-1],
        deadline_left_ms=deadline_left_ms,
        keep=keep,
    )


class RouterEnd:
    """One Session. Checks that tokens continue, that ends are right, and that no rid ends twice."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        router_id: str = "r",
        lease_ms: int = 5000,
        live: Mapping[int, int] | None = None,
    ) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, wpb.SequenceEnd] = {}
        self.returned: list[int] = []
        self.kinds: list[str] = []
        self.frames: list[wpb.SessionResponse] = []
        self.load = wpb.Load()
        self.submit_seen = 0
        self.call: grpc.aio.StreamStreamCall[Any, Any] = WorkerServiceStub(channel).Session()
        kept = [wpb.LiveSequence(rid=rid, have=have) for rid, have in (live or {}).items()]
        self._hello = wpb.Hello(router_id=router_id, lease_ms=lease_ms, live=kept)

    async def open(self) -> wpb.Welcome:
        await self.call.write(wpb.SessionRequest(hello=self._hello))
        await self.read_one()
        assert self.kinds == ["welcome"]
        return self.frames[0].welcome

    async def submit(self, serial: int, *sequences: wpb.SubmitSequence) -> None:
        """Writes a group in one frame."""
        for each in sequences:
            self.tokens[each.rid] = list(each.token_ids)
        await self.call.write(wpb.SessionRequest(submit=wpb.Submit(serial=serial, seqs=sequences)))

    async def cancel(self, *rids: int) -> None:
        await self.call.write(wpb.SessionRequest(cancel=wpb.Cancel(rids=rids)))

    async def lane(self) -> None:
        await self.call.write(wpb.SessionRequest(lane=wpb.Lane()))

    async def read_one(self) -> bool:
        """Reads a frame; False at the end of the stream."""
        frame = await self.call.read()
        if not isinstance(frame, wpb.SessionResponse):
            return False
        kind = frame.WhichOneof("frame") or ""
        self.kinds.append(kind)
        self.frames.append(frame)
        if kind == "step_output":
            self._take(frame.step_output)
        elif kind in ("welcome", "heartbeat"):
            self.load = getattr(frame, kind).load
        return True

    async def read_until(self, condition: Callable[[], object], timeout_s: float = 20.0) -> None:
        """Reads until the condition holds."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                assert await self.read_one(), "the stream ended"

    async def read_to_end(self, timeout_s: float = 20.0) -> grpc.StatusCode:
        """Reads everything; the stream's status."""
        async with asyncio.timeout(timeout_s):
            try:
                while await self.read_one():
                    pass
            except grpc.aio.AioRpcError as error:
                return error.code()
            return await self.call.code()

    def reasons(self) -> dict[int, int]:
        """Why the sequences ended, by rid."""
        return {rid: end.reason for rid, end in self.ends.items()}

    def _take(self, step: wpb.StepOutput) -> None:
        self.load, self.submit_seen = step.load, step.submit_seen
        at = 0
        for rid, first_pos, n in zip(step.rid, step.first_pos, step.n, strict=True):
            assert first_pos == len(self.tokens[rid])
            assert rid not in self.ends
            self.tokens[rid] += step.token_ids[at : at + n]
            at += n
        assert at == len(step.token_ids)
        for end in step.ends:
            assert end.rid not in self.ends
            assert end.reason == wpb.END_REASON_INVALID or end.end_pos == len(self.tokens[end.rid])
            self.ends[end.rid] = end
        self.returned += step.returned
