"""Clients of the doors that see what users see: `openai`, or Fissile's client of all routers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import httpx2
import openai
from fissile.client import AsyncClient, Delta, FissileError

from tests.bench.doors.stacks import Door
from tests.bench.router.load import ROUTER

_LIMIT_S: Final = 90.0
_OUT_OF_TIME: Final = "client's time is over"


@dataclass(slots=True)
class StreamEnd:
    """What a client got of one stream.

    Attributes:
        text: so far.
        error: why the stream is not whole; empty if it ended in order.
        begun: set with the first text, or at an end without text.
    """

    text: str = ""
    error: str = ""
    begun: asyncio.Event = field(default_factory=asyncio.Event)


class DoorClient:
    """A client of one door.

    Args:
        door: what it calls.
        fissile: client of Fissile's routers, for a door that speaks gRPC.
        http: client of OpenAI's API, for the others.
    """

    def __init__(self, door: Door, fissile: AsyncClient, http: openai.AsyncOpenAI) -> None:
        self._door, self._fissile, self._http = door, fissile, http

    async def read(
        self,
        end: StreamEnd,
        seed: int,
        max_tokens: int,
        *,
        logprobs: int | None = None,
        timeout_s: float = _LIMIT_S,
        pause_s: float = 0.0,
    ) -> None:
        """Reads one answer to its end.

        Args:
            end: what arrives.
            seed: of the answer; its prompt follows from it.
            max_tokens: length of the answer.
            logprobs: likely tokens beside each token; None for none.
            timeout_s: the client's deadline.
            pause_s: how long it stops reading after the first text.
        """
        texts = self._grpc_texts if self._door.protocol == ROUTER else self._http_texts
        try:
            async with asyncio.timeout(timeout_s):
                async for text in texts(seed, max_tokens, logprobs, timeout_s):
                    end.text += text
                    end.begun.set()
                    if pause_s:
                        await asyncio.sleep(pause_s)
                        pause_s = 0.0
        except (TimeoutError, openai.OpenAIError, httpx2.HTTPError, FissileError) as error:
            end.error = _said(error)
        end.begun.set()

    async def _grpc_texts(
        self, seed: int, max_tokens: int, logprobs: int | None, timeout_s: float
    ) -> AsyncIterator[str]:
        stream = self._fissile.generate_stream(
            _prompt(seed),
            seed=seed,
            max_tokens=max_tokens,
            ignore_eos=True,
            output_options={} if logprobs is None else {"logprobs": logprobs},
            timeout_s=timeout_s,
        )
        async with stream:
            async for event in stream:
                if isinstance(event, Delta):
                    yield event.text

    async def _http_texts(
        self, seed: int, max_tokens: int, logprobs: int | None, timeout_s: float
    ) -> AsyncIterator[str]:
        stream = await self._http.completions.create(
            model=self._door.model,
            prompt=_prompt(seed),
            seed=seed,
            max_tokens=max_tokens,
            logprobs=logprobs,
            stream=True,
            extra_body={"ignore_eos": True},
            timeout=timeout_s,
        )
        async with stream:
            async for chunk in stream:
                for choice in chunk.choices:
                    yield choice.text


@asynccontextmanager
async def client_of(door: Door) -> AsyncIterator[DoorClient]:
    """A client that tries no request again by itself, except that Fissile's continues at another router."""
    async with AsyncExitStack() as stack:
        http = openai.AsyncOpenAI(
            base_url=f"http://{door.addresses[0]}/v1",
            api_key="none",
            max_retries=0,
            http_client=httpx2.AsyncClient(limits=httpx2.Limits(max_connections=None)),
        )
        stack.push_async_callback(http.close)
        yield DoorClient(door, await stack.enter_async_context(AsyncClient(door.addresses)), http)


def _prompt(seed: int) -> str:
    return f"story {seed}"


def _said(error: Exception) -> str:
    """What the client was told, in a few words."""
    if isinstance(error, FissileError):
        return error.code.name
    if isinstance(error, TimeoutError | openai.APITimeoutError | httpx2.TimeoutException):
        return _OUT_OF_TIME
    if isinstance(error, openai.APIStatusError):
        return f"HTTP {error.status_code}"
    if isinstance(error, openai.APIConnectionError | httpx2.HTTPError):
        return "connection closed"
    return "`error` event"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How streams ended: with the known text, with another one, or with an error."""

    whole: int
    changed: int
    errors: Mapping[str, int]

    @classmethod
    def from_ends(cls, ends: Iterable[StreamEnd], texts: Iterable[str]) -> Outcome:
        """Compares each stream with the text that it should have; a broken one must be the beginning of it."""
        whole = changed = 0
        errors: Counter[str] = Counter()
        for end, text in zip(ends, texts, strict=True):
            is_right = text.startswith(end.text) if end.error else text == end.text
            changed += not is_right
            whole += is_right and not end.error
            if end.error:
                errors[end.error] += 1
        return cls(whole, changed, errors)

    @property
    def failed(self) -> int:
        """Number of streams that ended with an error."""
        return sum(self.errors.values())

    @property
    def seen(self) -> str:
        """The errors with their numbers."""
        return ", ".join(f"{count} x {error}" for error, count in sorted(self.errors.items())) or "no error"
