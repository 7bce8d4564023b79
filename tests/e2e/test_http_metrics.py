"""`/metrics` on the facade's port: what an endpoint picker reads there."""

from __future__ import annotations

import asyncio
import socket
import urllib.error
import urllib.request

import pytest

from facade.options import FacadeOptions
from facade.server import Facade
from tests.e2e.fake_worker import FakeWorker, short
from tests.e2e.http_bench import facade_of
from tests.e2e.router_bench import FILES, Bench, bench, collect, request
from tests.scraped import read_text

Values = dict[tuple[str, str], float]


def scrape(url: str) -> Values:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        families = read_text(answer.read().decode())
    samples = [sample for family in families for sample in family.samples if "le" not in sample.labels]
    return {(each.name, each.labels.get("finished_reason", "")): each.value for each in samples}


async def until_scraped(url: str, wanted: Values) -> None:
    async with asyncio.timeout(60):
        while not wanted.items() <= (await asyncio.to_thread(scrape, url)).items():
            pass


def metrics_of(b: Bench) -> str:
    assert b.router.scrapes is not None
    return f"127.0.0.1:{b.router.scrapes.port}"


async def test_facade_adds_up_the_figures_of_its_routers() -> None:
    async with (
        bench(FakeWorker(FILES), metrics_port=0) as one,
        bench(FakeWorker(FILES, room_seqs=1, busy_ms=1), metrics_port=0) as two,
    ):
        for b, tokens in ((one, 5), (one, 6)):
            await collect(b.stub.Generate(request(params={"max_tokens": tokens})))
        # They do not end before they have been seen.
        calls = [two.stub.Generate(request(request_id=str(i), params={"max_tokens": 60})) for i in range(3)]
        routers = [b.router.server.address for b in (one, two)]
        places = [metrics_of(one), metrics_of(two)]
        async with facade_of(routers, router_metrics=places) as facade:
            wanted = {
                ("fissile_http_routers", ""): 2.0,
                ("vllm:num_requests_waiting", ""): 2.0,
                ("vllm:num_requests_running", ""): 1.0,
                ("vllm:generation_tokens_total", ""): 11.0,
                ("vllm:request_success_total", "length"): 2.0,
                ("vllm:time_to_first_token_seconds_count", ""): 2.0,
            }
            await until_scraped(facade.url, wanted)
            for call in calls:
                call.cancel()
            await one.router.stop()
            await until_scraped(facade.url, {("fissile_http_routers", ""): 1.0, ("vllm:num_requests_waiting", ""): 0.0})


async def test_router_metrics_that_hang_hold_up_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        places = [f"127.0.0.1:{hanging.getsockname()[1]}"]
        async with (
            bench(FakeWorker(FILES, answer=short)) as b,
            facade_of([b.router.server.address], router_metrics=places) as facade,
        ):
            reading = asyncio.create_task(asyncio.to_thread(scrape, facade.url))
            said = await facade.openai.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "say"}], max_tokens=4
            )
            assert said.choices[0].finish_reason
            with pytest.raises(urllib.error.HTTPError) as refused:
                await reading
            assert refused.value.code == 503


async def test_metrics_are_off_without_addresses() -> None:
    facade = Facade(FacadeOptions(["127.0.0.1:1"], port=0))
    await facade.start()
    try:
        with pytest.raises(urllib.error.HTTPError) as refused:
            await asyncio.to_thread(scrape, f"http://{facade.address}")
        assert refused.value.code == 404
    finally:
        await facade.stop()
