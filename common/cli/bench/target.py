"""Targets of `fissile bench`. A target runs one load at a time."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable
from typing import Any, Final, Protocol

import grpc
import uvloop
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub

from common.cli.bench.load import Load
from common.cli.bench.machine import CpuMeter, meter_for
from common.cli.bench.records import Record
from common.cli.bench.service import RouterClient, RouterRun, Terms
from common.cli.bench.workload import Work
from common.cli.core.client import Credentials, call_failed, open_channel
from common.wire.draft_counts import Counts, add_counts

PROGRESS_EVERY_S: Final = 0.2
# Gets the records so far and the number of requests in flight.
OnProgress = Callable[[list[Record], int], None]
# Of a model, in the JSON of a result.
_MODEL_FACTS: Final = (
    "name",
    "architecture",
    "max_model_len",
    "vocab_size",
    "tokenizer_sha256",
    "weights_digest",
    "ready_workers",
)


class BenchTarget(Protocol):
    """Something that answers requests."""

    mode: str
    model: dict[str, Any]
    meter: CpuMeter

    def run(self, load: Load, work_of: Callable[[int], Work], on_progress: OnProgress) -> list[Record]:
        """Runs a load to its end, or to `stop`. Returns its records."""
        ...

    def stop(self) -> None:
        """Ends the running load, and each later one before its first request; for a signal handler."""
        ...

    def draft_counts(self) -> list[tuple[int, int]]:
        """Drafts verified and accepted so far, by their position behind a token; empty where nothing says so."""
        ...

    def close(self) -> None:
        """Releases all resources."""
        ...


class RouterTarget:
    """A running router.

    Args:
        address: of it.
        credentials: how it is called.
        terms: of all requests.
        service: process ids of the service on this machine.

    Raises:
        CommandError: it cannot be reached, or does not serve the model.
    """

    mode = "serve"

    def __init__(self, address: str, credentials: Credentials, terms: Terms, service: tuple[int, ...] = ()) -> None:
        self._address = address
        self._terms = terms
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._current: RouterRun | None = None
        self._stopped = False
        self._drafts: list[Counts] = []
        # Salt of this target: prefixes that an earlier benchmark with the same seed left in caches must not be found.
        self._salt, self._runs = secrets.token_hex(8), itertools.count()
        try:
            described = self._runner.run(self._connect(credentials))
        except BaseException:
            self._runner.close()
            raise
        self.meter = meter_for(address, service)
        self.model = {name: getattr(described, name) for name in _MODEL_FACTS}
        self.model["capabilities"] = [pb.Capability.Name(one) for one in described.capabilities]

    async def _connect(self, credentials: Credentials) -> pb.Model:
        self._channel = open_channel(self._address, credentials)
        try:
            asked = pb.GetModelRequest(model=self._terms.model)
            call = InferenceServiceStub(self._channel).GetModel(
                asked, timeout=self._terms.timeout_s, metadata=self._terms.metadata
            )
            return (await call).model
        except grpc.aio.AioRpcError as error:
            raise call_failed(error, self._address) from error

    def run(self, load: Load, work_of: Callable[[int], Work], on_progress: OnProgress) -> list[Record]:
        """Runs a load to its end, or to `stop`. Returns its records."""
        return self._runner.run(self._run(load, work_of, on_progress))

    async def _run(self, load: Load, work_of: Callable[[int], Work], on_progress: OnProgress) -> list[Record]:
        salt = f"bench-{self._salt}-{next(self._runs)}"
        run = self._current = RouterRun(load, work_of, RouterClient(self._channel, self._terms, salt))
        if self._stopped:
            run.stop()
        progress = asyncio.create_task(_tell(run, on_progress))
        try:
            records = await run.run()
        finally:
            progress.cancel()
            self._current = None
        for record in records:
            add_counts(self._drafts, record.drafts)
        return records

    def stop(self) -> None:
        """Ends the running load and each later one; for a signal handler."""
        self._stopped = True
        if self._current is not None:
            self._runner.get_loop().call_soon_threadsafe(self._current.stop)

    def draft_counts(self) -> list[tuple[int, int]]:
        """Drafts verified and accepted for requests that have ended, by their position behind a token."""
        return list(self._drafts)

    def close(self) -> None:
        """Closes the connection."""
        self._runner.run(self._channel.close())
        self._runner.close()


async def _tell(run: RouterRun, on_progress: OnProgress) -> None:
    while True:
        on_progress(run.records, run.in_flight)
        await asyncio.sleep(PROGRESS_EVERY_S)
