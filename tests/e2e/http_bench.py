"""A facade on a real socket in front of routers, for tests: its clients, and one raw request."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import openai

from facade.options import FacadeOptions
from facade.server import Facade


@dataclass
class HttpBench:
    """A facade that listens, and OpenAI's client of it."""

    facade: Facade
    openai: openai.AsyncOpenAI

    @property
    def url(self) -> str:
        return f"http://{self.facade.address}"


@contextlib.asynccontextmanager
async def facade_of(routers: Sequence[str], **options: Any) -> AsyncIterator[HttpBench]:
    """A running facade of these routers."""
    facade = Facade(FacadeOptions(routers, **{"port": 0, **options}))
    await facade.start()
    url = f"http://{facade.address}/v1"
    client = openai.AsyncOpenAI(base_url=url, api_key=options.get("api_key") or "none", max_retries=0, timeout=60.0)
    try:
        yield HttpBench(facade, client)
    finally:
        await client.close()
        await facade.stop()
