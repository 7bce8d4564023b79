"""HTTP clients that stream through Envoy while facades, routers and workers are killed.

A stream whose facade lives ends with the answer that gRPC gives. One whose facade is killed has a beginning of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from fissile.v1 import inference_pb2 as pb

from tests.chaos.conftest import Report
from tests.chaos.scale import FULL, SCALE
from tests.chaos.storm import Known, StormProcess, known_answers
from tests.chaos.test_drill import killers
from tests.chaos.test_storm import DEMO, questions, service
from tests.deploy.envoy import connection_manager, load, running_envoy
from tests.e2e.service import free_port
from tests.e2e.simulated import OPTIONS, simulated_model

# Added by Envoy here: the facade that answers.
FACADE_HEADER = "x-served-by"


class FacadeProcess(StormProcess):
    """A facade that notes when it does not run."""

    def is_serving(self, service: str = "") -> bool:
        """True if it answers, and has a router with a worker."""
        with contextlib.suppress(httpx2.HTTPError):
            return httpx2.get(f"http://{self.address}/health", timeout=30).status_code == 200
        return False

    def wait_serving(self, service: str = "") -> None:
        """Waits until it answers, which ends the time in which it was down."""
        super().wait_serving(service)
        self.is_back()

    def stop(self, sig: signal.Signals = signal.SIGTERM, timeout: float = 90.0) -> int:
        """Ends it, which begins a time in which it is down."""
        self.send(sig)
        return self.running.wait(timeout)


@contextlib.contextmanager
def facades_of(routers: Sequence[StormProcess], folder: Path, count: int) -> Iterator[list[FacadeProcess]]:
    """Facades that each know all routers."""
    addresses = ",".join(router.address for router in routers)
    made = []
    for i in range(count):
        port = free_port()
        arguments = ["facade", "--routers", addresses, "--port", str(port), "--give-up", "60s"]
        made.append(FacadeProcess(f"facade-{i}", arguments, port, folder / f"facade-{i}.log"))
    try:
        for facade in made:
            facade.start()
        for facade in made:
            facade.wait_serving()
        yield made
    finally:
        for facade in made:
            if facade.child is not None and facade.child.poll() is None:
                facade.child.kill()
                facade.child.wait()


@dataclass(slots=True)
class StreamEnd:
    """How a stream ended.

    Attributes:
        known: the request and its answer.
        began: of the request.
        facade: HOST:PORT; "" if no response came.
        failure: "" for a whole stream.
    """

    known: Known
    began: float
    facade: str = ""
    failure: str = "no end"
    ended: float = 0.0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    has_finish: bool = False

    @property
    def is_changed(self) -> bool:
        """True if the text or a token is not that of the known answer."""
        got, known = tuple(self.token_ids), self.known
        if not self.failure:
            return (got, self.text, self.has_finish) != (known.token_ids, known.text, True)
        return got != known.token_ids[: len(got)] or not known.text.startswith(self.text)

    def add(self, line: str) -> None:
        """Takes a line of the body."""
        data = line.removeprefix("data: ")
        if data == line:
            return
        if data == "[DONE]":
            self.failure = ""
            return
        chunk = msgspec.json.decode(data)
        if "error" in chunk:
            self.failure = str(chunk["error"]["code"])
            return
        for choice in chunk["choices"]:
            self.text += choice["text"]
            self.token_ids += choice.get("token_ids") or ()
            self.has_finish |= choice["finish_reason"] is not None


def body_of(request: pb.GenerateRequest) -> dict[str, Any]:
    """The request as a completion."""
    params = request.sampling_params
    return {
        "model": "storm",
        "prompt": [*request.token_ids.ids],
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "seed": params.seed,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }


async def stream(client: httpx2.AsyncClient, known: Known) -> StreamEnd:
    """Asks once."""
    end = StreamEnd(known, time.monotonic())
    try:
        async with client.stream("POST", "/v1/completions", json=body_of(known.request)) as response:
            end.facade = response.headers.get(FACADE_HEADER, "")
            if response.status_code == 200:
                async for line in response.aiter_lines():
                    end.add(line)
            else:
                end.failure = f"{response.status_code} {(await response.aread()).decode()[:200]}"
    except httpx2.HTTPError as error:
        end.failure = f"{type(error).__name__}: {error}"
    end.ended = time.monotonic()
    return end


async def ask_for(url: str, seconds: float, clients: int, known: Sequence[Known]) -> list[StreamEnd]:
    """Has so many clients ask one question after another; all ends."""
    ends, last = list[StreamEnd](), time.monotonic() + seconds

    async def ask(number: int) -> None:
        draw = random.Random(number)
        async with httpx2.AsyncClient(base_url=url, timeout=120.0) as client:
            while time.monotonic() < last:
                ends.append(await stream(client, draw.choice(known)))

    await asyncio.gather(*map(ask, range(clients)))
    return ends


def is_excused(end: StreamEnd, facades: Sequence[FacadeProcess]) -> bool:
    """True if the facade of the stream did not live all the while."""
    return any(each.address == end.facade and each.was_down(end.began, end.ended) for each in facades)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_http_streams_survive_kills_while_their_facade_lives(tmp_path: Path, report: Report) -> None:
    """HTTP: kill -9 of facades, routers and workers, at random, behind Envoy."""
    model, options = (DEMO, ()) if FULL else (simulated_model(tmp_path / "model"), OPTIONS)
    configuration = load("envoy-http.yaml")
    (host,) = connection_manager(configuration)["route_config"]["virtual_hosts"]
    host["response_headers_to_add"] = [{"header": {"key": FACADE_HEADER, "value": "%UPSTREAM_HOST%"}}]
    with (
        service(tmp_path, model, options) as (routers, workers),
        facades_of(routers, tmp_path, 2) as facades,
        running_envoy(tmp_path, configuration, [facade.port for facade in facades]) as envoy,
    ):
        envoy.wait_healthy(2, "facades")
        known = known_answers(routers[0], questions(SCALE.storm_answers, 300 if FULL else 150, 250))
        with killers(facades, routers, workers) as killed:
            ends = asyncio.run(ask_for(f"http://{envoy.address}", SCALE.drill_s, SCALE.drill_clients, known))
        logs = "".join(facade.log.read_text() for facade in facades)
    lost = [end for end in ends if end.failure]
    unexcused = [end for end in lost if not is_excused(end, facades)]
    changed = [end for end in ends if end.is_changed]
    report(
        "HTTP",
        clients=SCALE.drill_clients,
        killed_facades=killed[0],
        killed_routers=killed[1],
        killed_workers=killed[2],
        streams=len(ends),
        tokens=sum(len(end.token_ids) for end in ends),
        lost_with_facade=len(lost) - len(unexcused),
        failed=len(unexcused),
        changed=len(changed),
        by_facade=" ".join(f"{name}:{count}" for name, count in Counter(end.facade for end in ends).items()),
    )
    assert not changed, [(end.facade, end.failure, len(end.token_ids)) for end in itertools.islice(changed, 5)]
    assert not unexcused, Counter((end.facade, end.failure) for end in unexcused).most_common(8)
    assert all(killed)
    assert "Traceback" not in logs
