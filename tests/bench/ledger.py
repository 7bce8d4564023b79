"""Unexplained time of requests against their client's own clock: `python -m tests.bench.ledger`.

A router with two simulated workers answers a mix of requests, more than the workers run at once, from a pool of KV
blocks that is too small for them. A third worker runs the demo model, for requests with a constraint. From time to time
a worker is killed. The parts of each ledger are held against the time that the client measured from its call to the
last message.

The ledger of a request without a finish, because its client left or its deadline passed, is the one of its log line.

A client's clock runs until its last message is there for it to read. So clients that pause do so early, and then have
as much to read that the router waits for them: a pause while the last message lies in the client's own buffers is
theirs. Its way to the router is `inbound`, because it says when it called (`x-request-start`); without that the router
knows of a call only when its event loop gets it, and the figures `without inbound` hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import grpc
from fissile.client.messages import REQUEST_START
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub

from common.rpc.durations import to_seconds
from common.telemetry.names import Stage
from tests.chaos.support import SMALL_WINDOW, log_entries, until
from tests.e2e.service import Process, Service, free_port, running
from tests.e2e.simulated import simulated_model, wait_workers
from tests.e2e.test_constraints import DEMO

if TYPE_CHECKING:
    from fissile.v1.inference_pb2_grpc import InferenceServiceAsyncStub

_WORKERS: Final = 2
_MAX_MODEL_LEN: Final = 2048
# Of an MI300X: weights of Qwen3-32B and about 2,300 tokens of KV. Its steps take 18 ms, so that two cores are not busy
# with tokens.
_PRESET: Final = "mi300x-qwen3-32b"
_MEMORY: Final = "0.3444"
_QUANTILES: Final = (0.5, 0.9, 0.99)
_PAUSE_S: Final = 3.5
_DEADLINE_S: Final = 0.7
# Cases by the number of a request, modulo 20; the others are plain.
_CASES: Final = {0: "long prompt", 2: "slow client", 4: "stop string", 6: "grammar", 8: "left", 10: "deadline"}


class Sample(NamedTuple):
    """One request.

    Attributes:
        case: what is special about it.
        request_id: its id.
        client_s: seconds that its client measured.
        parts: seconds by stage; those of `unexplained` are left out.
    """

    case: str
    request_id: str
    client_s: float
    parts: dict[str, float]

    @property
    def unexplained_s(self) -> float:
        """Seconds that no part explains."""
        return max(0.0, self.client_s - sum(self.parts.values()))

    @property
    def share(self) -> float:
        """Share of the client's time that no part explains."""
        return self.unexplained_s / self.client_s

    @property
    def share_without_inbound(self) -> float:
        """The same for a client that does not say when it called."""
        known = sum(seconds for stage, seconds in self.parts.items() if stage != Stage.INBOUND)
        return max(0.0, self.client_s - known) / self.client_s


def mixed(number: int) -> pb.GenerateRequest:
    """The request of this number: the same ones in every run."""
    rnd, case = random.Random(number), _CASES.get(number % 20)
    made = pb.GenerateRequest(request_id=f"r{number}", model="test")
    params = made.sampling_params
    length = rnd.choice((1000, 1500)) if case == "long prompt" else rnd.randrange(20, 250)
    if case == "grammar":
        made.model, made.text = "demo", "Tell me more."
        # Each is compiled anew.
        params.constraint.regex = f"[a-z]{{3,8}}(-[0-9]{{2}}){{30,{number + 30}}}"
    elif number % 3:
        made.token_ids.ids.extend(rnd.randrange(256) for _ in range(length))
    else:
        made.text = " ".join(rnd.choice(("say", "tell", "me", "more")) for _ in range(length // 4))
    params.max_tokens = rnd.randrange(10, 50) if case in (None, "long prompt") else 300
    params.ignore_eos = case != "grammar"
    if case == "slow client":
        made.output_options.return_token_ids = True
        made.output_options.logprobs, params.max_tokens = 20, 150
    if case == "stop string":
        params.stop_strings.extend("aeiou")
        params.min_tokens = rnd.randrange(10, 50)
    return made


async def ask(stub: InferenceServiceAsyncStub, number: int) -> Sample | None:
    """Sends one request. None for one that has failed, though its client neither left nor had a deadline."""
    case, made = _CASES.get(number % 20, "plain"), mixed(number)
    began, messages = time.monotonic(), 0
    sent = ((REQUEST_START, f"t={time.time():.6f}"),)
    call = stub.Generate(made, timeout=_DEADLINE_S if case == "deadline" else 600, metadata=sent)
    try:
        async for part in call:
            messages += 1
            if part.HasField("finish"):
                return sample(case, made.request_id, time.monotonic() - began, part.finish)
            if messages == 5 and case == "slow client":
                await asyncio.sleep(_PAUSE_S)
            if messages == 15 and case == "left":
                call.cancel()
    except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
        if case not in ("left", "deadline"):
            print(f"{made.request_id} failed: {error!r}")
    return Sample(case, made.request_id, time.monotonic() - began, {}) if case in ("left", "deadline") else None


def sample(case: str, request_id: str, client_s: float, finish: pb.Finish) -> Sample:
    """The sample of an answer. What happened to it is its case, if that is worth more than what was asked."""
    parts = {part.stage: to_seconds(part.duration) for part in finish.timings.parts}
    if finish.attempts > 1:
        case = "failover"
    elif Stage.PREEMPTED in parts:
        case = "preempted"
    return Sample(case, request_id, client_s, parts)


async def measure(service: Service, count: int, in_flight: int, kill_every: int) -> list[Sample]:
    """Sends `count` requests, `in_flight` at a time. Kills a worker each time `kill_every` of them have been sent."""
    turn, samples, killing = iter(range(count)), list[Sample](), asyncio.Lock()
    failed = 0

    async def keep_busy(stub: InferenceServiceAsyncStub, patient: InferenceServiceAsyncStub) -> None:
        nonlocal failed
        for number in turn:
            if kill_every and number % kill_every == kill_every // 2 and not killing.locked():
                async with killing:
                    worker = service.workers[number // kill_every % _WORKERS]
                    await asyncio.to_thread(_restart, worker)
            found = await ask(patient if _CASES.get(number % 20) == "slow client" else stub, number)
            failed += found is None
            samples.extend([found] if found is not None else [])

    async with _stub(service, []) as stub, _stub(service, SMALL_WINDOW) as patient:
        for each in (stub, patient):
            # Connects.
            await each.ListModels(pb.ListModelsRequest())
        await asyncio.gather(*(keep_busy(stub, patient) for _ in range(in_flight)))
    print(f"failed: {failed}")
    return samples


def _restart(worker: Process) -> None:
    worker.running.kill()
    worker.running.wait()
    worker.start()
    worker.wait_serving()


@contextlib.asynccontextmanager
async def _stub(service: Service, options: list[tuple[str, int]]) -> AsyncIterator[InferenceServiceAsyncStub]:
    async with grpc.aio.insecure_channel(service.router.address, options=options) as channel:
        yield InferenceServiceStub(channel)


def with_log(samples: Sequence[Sample], service: Service) -> list[Sample]:
    """The samples, those without parts with the parts of their log lines."""
    lines = {str(line["request_id"]): line for line in log_entries(service.router) if "parts_ms" in line}
    return [each if each.parts else each._replace(parts=_logged(lines.get(each.request_id, {}))) for each in samples]


def _logged(line: dict[str, Any]) -> dict[str, float]:
    parts = line.get("parts_ms", {})
    return {stage: float(ms) / 1000 for stage, ms in parts.items() if stage != Stage.UNEXPLAINED}


def summary(samples: Sequence[Sample]) -> dict[str, object]:
    """Quantiles of unexplained time, as a share of the client's and in milliseconds, and the parts of all time."""
    shares = sorted(100 * each.share for each in samples)
    bare = sorted(100 * each.share_without_inbound for each in samples)
    left = sorted(1000 * each.unexplained_s for each in samples)
    total, parts = sum(each.client_s for each in samples), Counter[str]()
    for each in samples:
        parts.update(each.parts)
    return {
        "requests": len(samples),
        "mean ms": round(1000 * total / len(samples)),
        **{f"% p{100 * q:g}": _at(shares, q) for q in _QUANTILES},
        "% worst": round(shares[-1], 2),
        **{f"% p{100 * q:g} without inbound": _at(bare, q) for q in _QUANTILES},
        **{f"ms p{100 * q:g}": _at(left, q) for q in _QUANTILES},
        "ms worst": round(left[-1], 2),
        "% of all time": round(100 * sum(each.unexplained_s for each in samples) / total, 3),
        "parts %": {stage: round(100 * seconds / total, 2) for stage, seconds in parts.most_common()},
    }


def _at(values: Sequence[float], quantile: float) -> float:
    return round(values[int(quantile * (len(values) - 1))], 2)


def worst(samples: Sequence[Sample], count: int) -> list[dict[str, object]]:
    """The requests with the largest unexplained shares."""
    found = sorted(samples, key=lambda each: each.share, reverse=True)[:count]
    return [
        {
            "request": each.request_id,
            "case": each.case,
            "client ms": round(1000 * each.client_s, 1),
            "unexplained ms": round(1000 * each.unexplained_s, 1),
            "parts ms": {stage: round(1000 * seconds, 1) for stage, seconds in each.parts.items()},
        }
        for each in found
    ]


@contextlib.contextmanager
def mixed_service(folder: Path) -> Iterator[Service]:
    """A router with two simulated workers of model `test`, and one of the demo model."""
    model = simulated_model(folder / "model", _MAX_MODEL_LEN)
    simulated = ["--simulate", _PRESET, "--max-num-seqs", "10", "--gpu-memory-utilization", _MEMORY]
    env = {"OMP_NUM_THREADS": "1", "FISSILE_LOG_LEVEL": "info"}

    def worker(name: str, checkpoint: Path, served: str, options: Sequence[str]) -> Process:
        port = free_port()
        arguments = ["worker", "--model", str(checkpoint), "--model-name", served, "--port", str(port)]
        return Process(name, [*arguments, "--worker-id", name, *options], port, folder / f"{name}.log", env)

    fleet = [worker(f"worker-{i}", model, "test", simulated) for i in range(_WORKERS)]
    demo = worker("demo", DEMO, "demo", [])
    port = free_port()
    addresses = [part for each in (*fleet, demo) for part in ("--worker", each.address)]
    router = Process("router", ["router", "--port", str(port), *addresses], port, folder / "router.log", env)
    with running([*fleet, demo, router]), grpc.insecure_channel(router.address) as channel:
        yield Service(router, fleet, channel)


def main() -> None:
    """Prints the summary of all requests, of each case, and the worst requests, as JSON."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--requests", type=int, default=1000)
    options.add_argument("--in-flight", type=int, default=24)
    options.add_argument("--kill-every", type=int, default=1000, help="requests between two kills of a worker; 0: none")
    options.add_argument("--worst", type=int, default=10)
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as folder, mixed_service(Path(folder)) as service:
        wait_workers(service, _WORKERS, model="test")
        until(lambda: len(service.stub.ListModels(pb.ListModelsRequest()).models) == 2)
        began = time.monotonic()
        samples = asyncio.run(measure(service, args.requests, args.in_flight, args.kill_every))
        took_s = time.monotonic() - began
        samples = with_log(samples, service)
    by_case: Callable[[str], list[Sample]] = lambda case: [each for each in samples if each.case == case]  # noqa: E731
    found = {
        "seconds": round(took_s),
        "all": summary(samples),
        **{case: summary(by_case(case)) for case in sorted({each.case for each in samples})},
        "worst": worst(samples, args.worst),
    }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
