"""What the proofs and numbers of the contract cost: `python -m tests.bench.router.contract_cost`.

The same answers through router and worker, so many in flight, in turns: with nothing beside their tokens, with the
logprobs of the chosen tokens and one or twenty others, with a receipt, with digests of the logits of every sixteenth
and of every token, and from a worker that digests the KV blocks that it caches, as its default is and all of them. Real
kernels, random weights. A turn is one batch of streams that begin together; each is held against the turn of the same
round that asks for nothing. CPU is that of the router's and the worker's processes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub

from tests.bench.router.bed import Row, parser, show
from tests.checkpoints import make_checkpoint
from tests.e2e.service import Service, running_service
from tests.e2e.simulated import wait_workers
from tests.shapes import QWEN3_0_6B, QWEN3_60M

_SHAPES = {"tiny": {"vocab_size": 384}, "qwen3-60m": QWEN3_60M, "qwen3-0.6b": QWEN3_0_6B}
_PROMPT = 64
_NOTHING = pb.OutputOptions()


@dataclass(frozen=True, slots=True)
class Way:
    """Options of the requests, and the part of the cached KV blocks that the worker digests."""

    options: pb.OutputOptions = field(default_factory=lambda: _NOTHING)
    kv_digests: str = "0%"


WAYS: Mapping[str, Way] = {
    "nothing": Way(),
    "logprobs, top 1": Way(pb.OutputOptions(logprobs=1)),
    "logprobs, top 20": Way(pb.OutputOptions(logprobs=20)),
    "receipt": Way(pb.OutputOptions(receipt=pb.ReceiptOptions())),
    "logit digests, every 16th": Way(pb.OutputOptions(receipt=pb.ReceiptOptions(logits_every=16))),
    "logit digests, every token": Way(pb.OutputOptions(receipt=pb.ReceiptOptions(logits_every=1))),
    "KV digests, 6.25 %": Way(kv_digests="6.25%"),
    "KV digests, all": Way(kv_digests="100%"),
}


@dataclass(frozen=True, slots=True)
class Taken:
    """What one turn took for each token: wall time and CPU, microseconds."""

    wall_us: float
    router_us: float
    worker_us: float


def requests(number: int, count: int, tokens: int, vocab: int, options: pb.OutputOptions) -> list[pb.GenerateRequest]:
    """Requests with prompts never used before."""
    made = []
    for i in range(count):
        rnd = random.Random(1000 * number + i)
        request = pb.GenerateRequest(output_options=options)
        request.token_ids.ids.extend(rnd.randrange(5, vocab) for _ in range(_PROMPT))
        request.sampling_params.MergeFrom(pb.SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True))
        made.append(request)
    return made


async def stream(stub: InferenceServiceStub, request: pb.GenerateRequest) -> int:
    """Reads one answer. Returns its tokens."""
    tokens = 0
    async for part in stub.Generate(request):  # type: ignore[attr-defined]
        tokens = part.finish.usage.completion_tokens or tokens
    return tokens


def turn(running: Service, asked: Sequence[pb.GenerateRequest]) -> Taken:
    """Runs requests side by side."""

    async def all_of_them() -> tuple[int, float]:
        async with grpc.aio.insecure_channel(running.router.address) as channel:
            stub = InferenceServiceStub(channel)
            await channel.channel_ready()
            began = time.perf_counter()
            counts = await asyncio.gather(*(stream(stub, request) for request in asked))
            return sum(counts), time.perf_counter() - began

    processes = running.router.running.pid, running.workers[0].running.pid
    before = [threads_s(pid) for pid in processes]
    tokens, wall_s = asyncio.run(all_of_them())
    router_s, worker_s = (threads_s(pid) - then for pid, then in zip(processes, before, strict=True))
    return Taken(*(1e6 * each / tokens for each in (wall_s, router_s, worker_s)))


def threads_s(pid: int) -> float:
    """CPU seconds of the threads that a process has, finer than its clock ticks: a turn has few of those."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text("ascii").split()[0]) for file in files) / 1e9


def row(in_flight: int, name: str, taken: Sequence[Taken], nothing: Sequence[Taken]) -> Row:
    """One way at one number in flight: medians, and medians of each round's difference to the plain way."""
    pairs = list(zip(taken, nothing, strict=True))
    return {
        "in flight": in_flight,
        "asked for": name,
        "us/token": statistics.median(each.wall_us for each in taken),
        "of nothing": statistics.median(each.wall_us / base.wall_us for each, base in pairs),
        "worker CPU us/token": statistics.median(each.worker_us for each in taken),
        "worker added": statistics.median(each.worker_us - base.worker_us for each, base in pairs),
        "router CPU us/token": statistics.median(each.router_us for each in taken),
        "router added": statistics.median(each.router_us - base.router_us for each, base in pairs),
    }


@contextlib.contextmanager
def services(folder: Path, model: Path) -> Iterator[dict[str, Service]]:
    """A service for each part of the KV blocks that is digested."""
    with contextlib.ExitStack() as stack:
        made = {}
        for share in sorted({way.kv_digests for way in WAYS.values()}):
            own = folder / share.replace("%", "")
            own.mkdir()
            options = ["--kv-digests", share, "--max-model-len", "256", "--kv-cache-memory", "256MiB"]
            environment = {"FISSILE_LOG_LEVEL": "warning"}
            one = running_service(own, model, worker_options=options, environment=environment)
            made[share] = stack.enter_context(one)
        for running in made.values():
            wait_workers(running, 1, within_s=60)
        yield made


def measure(running: Mapping[str, Service], args: argparse.Namespace, vocab: int) -> Iterator[Row]:
    """All ways in turns, for each number in flight."""
    number = 0
    for in_flight in args.in_flight:
        taken: dict[str, list[Taken]] = {name: [] for name in WAYS}
        # The first round is not counted.
        for counted in range(-1, args.rounds):
            for name, way in WAYS.items():
                number += 1
                asked = requests(number, in_flight, args.tokens, vocab, way.options)
                found = turn(running[way.kv_digests], asked)
                if counted >= 0:
                    taken[name].append(found)
        yield from (row(in_flight, name, each, taken["nothing"]) for name, each in taken.items())


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--shape", choices=_SHAPES, default="qwen3-60m", help="of the model, in bfloat16")
    options.add_argument("--in-flight", type=int, nargs="+", default=[1, 8, 32])
    options.add_argument("--tokens", type=int, default=32, help="of each answer")
    options.add_argument("--rounds", type=int, default=8)
    args = options.parse_args()
    shape = _SHAPES[args.shape]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model = make_checkpoint(folder / "model", dtype="bfloat16", **shape)
        with services(folder, model) as running:
            rows = list(measure(running, args, int(shape["vocab_size"])))
    show(rows, as_json=args.json, shape=args.shape, rounds=args.rounds)


if __name__ == "__main__":
    main()
