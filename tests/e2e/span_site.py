"""A fleet of simulated workers whose spans come to a collector in this process, for tests of span trees."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from fissile.admin.v1 import admin_pb2 as apb
from fissile.admin.v1.admin_pb2_grpc import AdminServiceStub

from tests.e2e.service import Service, free_port, running_service
from tests.e2e.simulated import request, simulated_model, wait_workers
from tests.otlp_receiver import OtlpReceiver, ReceivedSpan
from tests.scraped import scrape

METHOD = "fissile.v1.InferenceService/Generate"


class Site:
    """A router, its workers, and the collector of all."""

    def __init__(self, service: Service, receiver: OtlpReceiver, admin: AdminServiceStub) -> None:
        self.stub = service.stub
        self.service = service
        self.receiver = receiver
        self.admin = admin
        self._number = 0

    def begin(self, max_tokens: int, timeout_s: float = 300.0, metadata: tuple[tuple[str, str], ...] = ()) -> Any:
        """A call with a request id of its own, `call.request_id`."""
        self._number += 1
        asked = request(self._number, max_tokens)
        asked.request_id = f"tree-{self._number}"
        call: Any = self.stub.Generate(asked, timeout=timeout_s, metadata=metadata)
        call.request_id = asked.request_id
        return call

    def listed(self, call: Any) -> apb.InFlightRequest:
        """A call as the router lists it; empty if the router does not have it."""
        listed = self.admin.ListRequests(apb.ListRequestsRequest(), timeout=60).requests
        return next((one for one in listed if one.request_id == call.request_id), apb.InFlightRequest())

    def has_state(self, call: Any, *states: apb.RequestState.ValueType) -> bool:
        """True if a call in flight is in one of the states."""
        return self.listed(call).state in states

    def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.01)

    def root(self, call: Any) -> ReceivedSpan:
        """The router's span of a call that has ended."""

        def found() -> list[ReceivedSpan]:
            named = self.receiver.named(METHOD)
            return [span for span in named if span.attributes.get("gen_ai.response.id") == call.request_id]

        self.until(found)
        (span,) = found()
        return span

    def tree(self, call: Any, workers: int = 1) -> tuple[ReceivedSpan, list[ReceivedSpan]]:
        """The router's span of a call that has ended, and the `workers` spans of workers below it, oldest first."""
        root, found = self.root(call), list[ReceivedSpan]()

        def has_found() -> bool:
            found[:] = [each for each in self.below(root, 0) if each.name == "worker.generate"]
            return len(found) >= workers

        self.until(has_found)
        return root, sorted(found, key=lambda span: span.start_ns)

    def below(self, span: ReceivedSpan, count: int) -> list[ReceivedSpan]:
        """The `count` children of a span."""

        def found() -> list[ReceivedSpan]:
            return [each for each in self.receiver.spans if each.parent_id == span.span_id]

        self.until(lambda: len(found()) >= count)
        return found()

    def sequence(self, root: ReceivedSpan) -> ReceivedSpan | None:
        """The worker's span below a root; None if none comes in ten seconds."""
        end = time.monotonic() + 10
        while time.monotonic() < end:
            for span in self.receiver.spans:
                if span.parent_id == root.span_id and span.name == "worker.generate":
                    return span
            time.sleep(0.05)
        return None

    def fill(self) -> list[Any]:
        """Calls that run on both workers for as long as a test takes."""
        calls = [self.begin(1900) for _ in range(2)]
        self.until(lambda: all(self.has_state(call, apb.REQUEST_STATE_STREAMING) for call in calls))
        return calls

    def end(self, calls: list[Any]) -> None:
        """Cancels calls, and waits until both workers are idle."""
        for call in calls:
            call.cancel()
        self.until(lambda: not sum(one.running for one in self.admin.ListWorkers(apb.ListWorkersRequest()).workers))


@contextmanager
def running_site(
    folder: Path,
    worker_options: Sequence[str],
    *,
    workers: int = 1,
    router_options: Sequence[str] = (),
    environment: dict[str, str] | None = None,
) -> Iterator[Site]:
    """Starts a fleet that exports to a collector in this process every 50 ms."""
    port = free_port()
    model = simulated_model(folder / "model")
    with OtlpReceiver() as receiver:
        exports = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50"}
        with running_service(
            folder, model, workers=workers, worker_options=worker_options,
            router_options=["--admin-port", str(port), *router_options], environment={**exports, **(environment or {})},
        ) as service:  # fmt: skip
            wait_workers(service, workers)
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                yield Site(service, receiver, AdminServiceStub(channel))


def names(spans: list[ReceivedSpan]) -> Counter[str]:
    """Number of spans by name."""
    return Counter(span.name for span in spans)


def span_counts(port: int) -> Mapping[str, float]:
    """Spans of a process by result, and those that are `open`."""
    found = scrape(port)
    counts = {labels["fissile_span_result"]: value for labels, value in found["fissile_spans_total"]}
    return counts | {"open": found["fissile_spans_open"][0][1]}
