"""A facade on a real socket in front of routers, for tests: its clients, and strict checks of what they receive."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2
import openai
from openai.types import Completion
from pydantic import BaseModel, TypeAdapter

from facade.options import FacadeOptions
from facade.server import Facade

# Fields beside those of OpenAI: class of its package and name. Clients skip them.
EXTRAS = {
    ("Choice", "fissile"),
    ("Choice", "stop_reason"),
    ("Choice", "token_ids"),
    ("CompletionChoice", "fissile"),
    ("CompletionChoice", "stop_reason"),
    ("CompletionChoice", "token_ids"),
    ("CompletionChoice", "prompt_token_ids"),
    ("ChatCompletion", "prompt_token_ids"),
    ("ChatCompletionMessage", "reasoning_content"),
    ("ChoiceDelta", "reasoning_content"),
    ("CreateEmbeddingResponse", "fissile"),
    ("Model", "fissile"),
    ("Model", "root"),
    ("Model", "parent"),
    ("Model", "max_model_len"),
    # Anthropic's package reads the same path.
    ("Model", "type"),
    ("Model", "display_name"),
    ("Model", "created_at"),
    ("Model", "lifecycle"),
    ("Model", "max_input_tokens"),
}


@dataclass
class HttpBench:
    """A facade that listens, OpenAI's client of it, and a plain client."""

    facade: Facade
    openai: openai.AsyncOpenAI
    http: httpx2.AsyncClient

    @property
    def url(self) -> str:
        return f"http://{self.facade.address}"


@contextlib.asynccontextmanager
async def facade_of(routers: Sequence[str], **options: Any) -> AsyncIterator[HttpBench]:
    """A running facade of these routers."""
    facade = Facade(FacadeOptions(routers, **{"port": 0, **options}))
    await facade.start()
    url = f"http://{facade.address}"
    key = options.get("api_key") or "none"
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60.0)
    try:
        async with httpx2.AsyncClient(base_url=url, timeout=60.0) as http:
            yield HttpBench(facade, client, http)
    finally:
        await client.close()
        await facade.stop()


def checked(received: Any) -> Any:
    """Returns an object of OpenAI's package after checking it against its strict type; only EXTRAS may be added."""
    kind, given = type(received), received.to_dict()
    if isinstance(received, Completion):
        _fill_known_nulls(given)
    TypeAdapter(kind).validate_python(given, strict=True)
    assert {*_extras(received)} <= EXTRAS
    return received


def _fill_known_nulls(completion: dict[str, Any]) -> None:
    """Fills the nulls that OpenAI sends although its types have none: of chunks before the last, of a first token."""
    for choice in completion["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
        for name in ("token_logprobs", "top_logprobs"):
            column = (choice.get("logprobs") or {}).get(name) or [0]
            del column[: column[0] is None]


def _extras(value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, list):
        for each in value:
            yield from _extras(each)
    elif isinstance(value, BaseModel):
        yield from ((type(value).__name__, name) for name in value.model_extra or ())
        for name in type(value).model_fields:
            yield from _extras(getattr(value, name))
