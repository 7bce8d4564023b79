"""Unexplained time of requests against their client's own clock: `python -m tests.bench.ledger`.

A service of two simulated workers answers a mix of requests: short and long prompts, as text and as ids, long answers,
clients that stop reading for a while, and more requests than the workers run at once. The parts of each ledger are held
against the time that the client measured from the call to the last message.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import grpc
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub

from common.rpc.durations import to_seconds
from tests.e2e.service import running_service
from tests.e2e.simulated import simulated_model, wait_workers

if TYPE_CHECKING:
    from fissile.v1.inference_pb2_grpc import InferenceServiceAsyncStub

_WORKERS: Final = 2
_MAX_MODEL_LEN: Final = 16_384
_QUANTILES: Final = (0.5, 0.9, 0.99)


class Sample(NamedTuple):
    """One request: seconds that its client measured, that no part explains, and of its largest part."""

    client_s: float
    unexplained_s: float
    largest: str


def mixed(number: int) -> pb.GenerateRequest:
    """The request of this number: the same ones in every run."""
    rnd = random.Random(number)
    made = pb.GenerateRequest(request_id=f"r{number}")
    length = rnd.choice((20, 200, 2000, 10_000)) if number % 8 == 0 else rnd.randrange(20, 400)
    if number % 3:
        made.token_ids.ids.extend(rnd.randrange(256) for _ in range(length))
    else:
        made.text = " ".join(rnd.choice(("say", "tell", "me", "more")) for _ in range(length // 4))
    made.sampling_params.max_tokens = rnd.randrange(10, 300)
    made.sampling_params.ignore_eos = True
    return made


async def ask(stub: InferenceServiceAsyncStub, number: int) -> Sample:
    """Sends one request. Every tenth client stops reading for 50 ms in the middle."""
    began = time.monotonic()
    call = stub.Generate(mixed(number), timeout=600)
    finish, messages, client_s = pb.Finish(), 0, 0.0
    async for part in call:
        messages += 1
        if part.HasField("finish"):
            client_s, finish = time.monotonic() - began, part.finish
        elif number % 10 == 0 and messages == 5:
            await asyncio.sleep(0.05)
    parts = {part.stage: to_seconds(part.duration) for part in finish.timings.parts}
    return Sample(client_s, max(0.0, client_s - sum(parts.values())), max(parts, key=parts.__getitem__))


async def measure(address: str, count: int, in_flight: int) -> list[Sample]:
    """Sends `count` requests, `in_flight` at a time."""
    turn, samples = iter(range(count)), list[Sample]()

    async def keep_busy(stub: InferenceServiceAsyncStub) -> None:
        for number in turn:
            samples.append(await ask(stub, number))

    async with grpc.aio.insecure_channel(address) as channel:
        stub: InferenceServiceAsyncStub = InferenceServiceStub(channel)
        await asyncio.gather(*(keep_busy(stub) for _ in range(in_flight)))
    return samples


def summary(samples: Sequence[Sample]) -> dict[str, object]:
    """Quantiles of unexplained time, as a share of the client's and in milliseconds, and the largest parts."""
    shares = sorted(100 * each.unexplained_s / each.client_s for each in samples)
    left = sorted(1000 * each.unexplained_s for each in samples)
    return {
        "requests": len(samples),
        **{f"unexplained % p{100 * q:g}": round(shares[int(q * (len(shares) - 1))], 2) for q in _QUANTILES},
        **{f"unexplained ms p{100 * q:g}": round(left[int(q * (len(left) - 1))], 2) for q in _QUANTILES},
        "of all time %": round(
            100 * sum(each.unexplained_s for each in samples) / sum(each.client_s for each in samples), 2
        ),
        "largest part": dict(Counter(each.largest for each in samples).most_common()),
    }


def main() -> None:
    """Prints the summary as JSON."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--requests", type=int, default=1000)
    options.add_argument("--in-flight", type=int, default=16)
    options.add_argument("--simulate", default="mi300x-llama-8b")
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = simulated_model(Path(folder) / "model", _MAX_MODEL_LEN)
        worker = ["--simulate", args.simulate, "--max-num-seqs", "6"]
        with running_service(Path(folder), model, workers=_WORKERS, worker_options=worker) as service:
            wait_workers(service, _WORKERS)
            samples = asyncio.run(measure(service.router.address, args.requests, args.in_flight))
    print(json.dumps(summary(samples), indent=2))


if __name__ == "__main__":
    main()
