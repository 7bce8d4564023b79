"""Rate of a plain stream beside hostile constraints: `python -m tests.bench.hostile_constraints [--seconds 2]`.

The service has one worker, with the demo model or the model of `--model`. A client runs plain streams one by one.
`--beside` other streams run at the same time and restart when they end. Turns alternate: the other streams first have
a hostile constraint, then they are plain and as long as the mean hostile answer. Each ratio is the median over these
pairs. Also prints the statuses of the other streams and the worker's memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub

from tests.e2e.service import Service, running_service
from tests.unit.common.constraints.test_check import HOSTILE

_DEMO: Final = Path(__file__).parents[2] / "deploy" / "demo" / "checkpoint"
# Seconds between the start of the other streams and the measurement.
_WARM_UP_S: Final = 0.3
# A constraint with equally long answers and quick masks, for comparison.
_HARMLESS: Final = {"harmless": {"regex": "[a-z ]{300,500}"}}


def request(given: Any | None, seed: int, tokens: int) -> pb.GenerateRequest:
    """A request with a constraint, or without."""
    params = pb.SamplingParams(max_tokens=tokens, seed=seed, temperature=0.8, ignore_eos=True)
    if given is not None:
        ((form, content),) = given.items()
        text = content if isinstance(content, str) else json.dumps(content)
        setattr(params.constraint, form, text)
    return pb.GenerateRequest(text="Tell me a story.", sampling_params=params)


class Beside:
    """Streams that start again whenever they end, until the context is left."""

    def __init__(self, stub: InferenceServiceStub, given: Any | None, count: int, tokens: int) -> None:
        self._stub, self._given, self._tokens = stub, given, tokens
        self._stop = threading.Event()
        self._calls: dict[int, grpc.Call] = {}
        self.codes: list[str] = []
        # Output tokens of each stream that ended with a status.
        self.counts: list[int] = []
        self._threads = [threading.Thread(target=self._stream, args=(i,), daemon=True) for i in range(count)]

    def __enter__(self) -> Beside:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for call in list(self._calls.values()):
            call.cancel()
        for thread in self._threads:
            thread.join()

    def _stream(self, place: int) -> None:
        asked = request(self._given, place, self._tokens)
        while not self._stop.is_set():
            asked.sampling_params.seed += 100
            try:
                self._calls[place] = call = self._stub.Generate(asked, timeout=60)
                for part in call:
                    last = part
                self.counts.append(last.finish.usage.completion_tokens)
                self.codes.append("OK")
            except grpc.RpcError as error:
                self.codes.append(error.code().name)
                if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    return


def rate(stub: InferenceServiceStub, seconds: float) -> float:
    """Tokens per second of plain streams, one after the other."""
    count, began = 0, time.monotonic()
    for seed in itertools.count():
        asked = request(None, seed, 400)
        asked.output_options.return_token_ids = True
        call = stub.Generate(asked, timeout=60)
        for part in call:
            count += len(part.token_ids)
            if time.monotonic() - began > seconds:
                call.cancel()
                return count / (time.monotonic() - began)
    raise AssertionError


@dataclass(frozen=True)
class Turn:
    """Rates in tokens per second of one pair of turns, and the statuses of the hostile streams."""

    name: str
    beside_hostile: float
    beside_plain: float
    codes: str


def turns(service: Service, options: argparse.Namespace) -> Iterator[Turn]:
    """Yields one Turn per constraint and round, after measuring it."""
    every = {**_HARMLESS, **HOSTILE}
    for _ in range(options.rounds):
        for name in options.only or every:
            with Beside(service.stub, every[name], options.beside, options.tokens) as hostile:
                time.sleep(_WARM_UP_S)
                beside_hostile = rate(service.stub, options.seconds)
            mean = round(statistics.mean(hostile.counts)) if hostile.counts else options.tokens
            with Beside(service.stub, None, options.beside, max(1, mean)):
                time.sleep(_WARM_UP_S)
                beside_plain = rate(service.stub, options.seconds)
            codes = ", ".join(f"{hostile.codes.count(code)} {code}" for code in sorted({*hostile.codes}))
            yield Turn(name, beside_hostile, beside_plain, f"{codes}; {mean} tokens an answer")


def memory_mb(service: Service) -> float:
    """Resident memory of the worker."""
    status = Path(f"/proc/{service.workers[0].running.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def main() -> None:
    """Prints a line for each constraint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--model", type=Path, default=_DEMO, help="checkpoint folder")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        running_service(
            Path(folder), options.model, workers=1, environment={"FISSILE_LOG_LEVEL": "warning"}
        ) as service,
    ):
        rate(service.stub, options.seconds)
        before = memory_mb(service)
        found: dict[str, list[Turn]] = {}
        for turn in turns(service, options):
            found.setdefault(turn.name, []).append(turn)
        for name, own in found.items():
            rates = [
                round(statistics.median(side))
                for side in zip(*((turn.beside_hostile, turn.beside_plain) for turn in own), strict=True)
            ]
            ratio = statistics.median(turn.beside_hostile / turn.beside_plain for turn in own)
            print(f"{name}: {rates[0]} tokens/s, beside plain {rates[1]}, ratio {ratio:.2f}; {own[-1].codes}")
        print(f"worker's memory: {before:.0f} -> {memory_mb(service):.0f} MB")


if __name__ == "__main__":
    main()
