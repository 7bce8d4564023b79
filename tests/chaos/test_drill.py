"""Clients that stream through Envoy while routers and workers are killed: none fails, and no answer changes."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from fissile.client import Client, Delta, FissileError
from fissile.v1.inference_pb2_grpc import InferenceServiceStub

from tests.chaos.conftest import Report
from tests.chaos.scale import FULL, SCALE
from tests.chaos.storm import Known, StormProcess, known_answers
from tests.chaos.support import quantile
from tests.chaos.test_storm import DEMO, questions, service
from tests.deploy.envoy import load, running_envoy
from tests.e2e.simulated import OPTIONS, simulated_model

# Through a proxy, both end streams whose router has gone: it says INTERNAL or UNAVAILABLE.
LOST = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.ABORTED}


@dataclass
class Drill:
    """Answers of a drill, from all threads."""

    known: Sequence[Known]
    wrong: int = 0
    tokens: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    resumed_gaps_s: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, one: Known, token_ids: Sequence[int], outcome: str, gaps_s: Sequence[float] = ()) -> None:
        """An answer, or the part of one that came."""
        with self.lock:
            self.ended[outcome] += 1
            self.tokens += len(token_ids)
            self.wrong += tuple(token_ids) != one.token_ids[: len(token_ids)]
            self.wrong += outcome == "OK" and len(token_ids) != len(one.token_ids)
            self.resumed_gaps_s += gaps_s


def by_library(client: Client, drill: Drill, one: Known) -> None:
    """Asks once by the client library; the gaps are those at which another router took over."""
    request, token_ids, gaps, last, calls = one.request, list[int](), list[float](), time.monotonic(), 0
    sampling = {each.name: value for each, value in request.sampling_params.ListFields()}
    stream = client.generate_stream(list(request.token_ids.ids), output_options={"return_token_ids": True}, **sampling)
    try:
        for event in stream:
            now = time.monotonic()
            if isinstance(event, Delta):
                if token_ids and stream.num_calls > calls:
                    gaps.append(now - last)
                calls, last = stream.num_calls, now
                token_ids += event.token_ids
    except FissileError as error:
        drill.count(one, token_ids, error.code.name)
    else:
        drill.count(one, token_ids, "OK", gaps)


def by_stub(stub: InferenceServiceStub, drill: Drill, one: Known) -> None:
    """Asks once by a bare stub."""
    token_ids: list[int] = []
    try:
        for part in stub.Generate(one.request, timeout=120):
            token_ids += part.token_ids
    except grpc.RpcError as error:
        drill.count(one, token_ids, error.code().name)
    else:
        drill.count(one, token_ids, "OK")


def kill_in_turns(processes: Sequence[StormProcess], stop: threading.Event, draw: random.Random) -> int:
    """Kills one of the processes after the other, and starts it again, until it is told to stop; how many."""
    killed = 0
    while not stop.wait(draw.uniform(0.5, 2.5)):
        process = draw.choice(processes)
        process.stop(signal.SIGKILL)
        killed += 1
        stop.wait(draw.uniform(0.0, 0.5))
        process.start()
        process.wait_serving()
    return killed


@contextlib.contextmanager
def killers(*groups: Sequence[StormProcess]) -> Iterator[list[int]]:
    """Kills in each group, one at a time; at the end all serve again, and the numbers of kills are told."""
    stop, killed = threading.Event(), [0] * len(groups)

    def run(i: int) -> None:
        killed[i] = kill_in_turns(groups[i], stop, random.Random(i))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(groups))]
    for thread in threads:
        thread.start()
    try:
        yield killed
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def ask_for(seconds: float, clients: int, drill: Drill, ask: Callable[[Known], None]) -> None:
    """Has so many threads ask one question after the other."""
    end = time.monotonic() + seconds

    def run(i: int) -> None:
        draw = random.Random(i)
        while time.monotonic() < end:
            ask(draw.choice(drill.known))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_drill(tmp_path: Path, report: Report) -> None:
    """DRILL: kill -9 of routers and of workers, at random, behind Envoy."""
    model, options = (DEMO, ()) if FULL else (simulated_model(tmp_path / "model"), OPTIONS)
    with (
        service(tmp_path, model, options) as (routers, workers),
        running_envoy(tmp_path, load("envoy.yaml"), [router.port for router in routers]) as envoy,
    ):
        envoy.wait_healthy(2)
        known = known_answers(routers[0], questions(SCALE.storm_answers, 300 if FULL else 150, 250))
        drill, bare = Drill(known), Drill(known)
        with Client(envoy.address, give_up_s=60.0) as client, killers(routers, workers) as killed:
            ask_for(SCALE.drill_s, SCALE.drill_clients, drill, lambda one: by_library(client, drill, one))
        with grpc.insecure_channel(envoy.address) as channel, killers(routers, workers) as killed_bare:
            stub = InferenceServiceStub(channel)
            ask_for(SCALE.drill_s / 4, SCALE.drill_clients, bare, lambda one: by_stub(stub, bare, one))
    for name, each, kills in (("library", drill, killed), ("stub", bare, killed_bare)):
        report(
            "DRILL",
            client=name,
            killed_routers=kills[0],
            killed_workers=kills[1],
            answers=sum(each.ended.values()),
            failed=sum(each.ended.values()) - each.ended["OK"],
            wrong=each.wrong,
            tokens=each.tokens,
            moved=len(each.resumed_gaps_s),
            gap_p50_s=quantile(each.resumed_gaps_s, 0.5) if each.resumed_gaps_s else 0.0,
            gap_p99_s=quantile(each.resumed_gaps_s, 0.99) if each.resumed_gaps_s else 0.0,
            ended=" ".join(f"{code}:{count}" for code, count in each.ended.most_common()),
        )
    assert drill.wrong == 0
    assert set(drill.ended) == {"OK"}, drill.ended
    assert all(killed)
    # What is lost without the library is said to be, and what came is right.
    assert bare.wrong == 0
    assert set(bare.ended) <= {"OK", *(code.name for code in LOST)}, bare.ended
