"""A collector for a first look: prints each trace that routers and workers send by OTLP over gRPC.

    python examples/print_traces.py                    # listens on 127.0.0.1:4317 until Ctrl-C
    OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4317 fissile serve

Needs the packages of the service (`pip install ./protos '.[router]'`). For daily work take a real collector.
"""

from __future__ import annotations

import argparse
import sys
from concurrent import futures
from threading import Lock

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps all spans, and prints a trace again whenever more of its spans arrive."""

    def __init__(self) -> None:
        """Starts without spans."""
        self._lock = Lock()
        self._traces: dict[bytes, dict[bytes, tuple[str, trace_pb2.Span]]] = {}

    def Export(self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext) -> object:
        """Takes the spans of one process."""
        with self._lock:
            new = set[bytes]()
            for resource in request.resource_spans:
                names = {each.key: each.value.string_value for each in resource.resource.attributes}
                for span in (span for scope in resource.scope_spans for span in scope.spans):
                    service = names.get("service.name", "")
                    self._traces.setdefault(span.trace_id, {})[span.span_id] = (service, span)
                    new.add(span.trace_id)
            for trace_id in new:
                self._print(trace_id)
        return trace_service_pb2.ExportTraceServiceResponse()

    def _print(self, trace_id: bytes) -> None:
        spans = self._traces[trace_id]
        roots = [key for key, (_, span) in spans.items() if span.parent_span_id not in spans]
        begin = min(span.start_time_unix_nano for _, span in spans.values())
        print(f"trace {trace_id.hex()}")
        for key in roots:
            self._print_span(spans, key, begin, 1)
        sys.stdout.flush()

    def _print_span(self, spans: dict[bytes, tuple[str, trace_pb2.Span]], key: bytes, begin: int, depth: int) -> None:
        service, span = spans[key]
        start = (span.start_time_unix_nano - begin) / 1e6
        length = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
        print(f"{'  ' * depth}{span.name:<{44 - 2 * depth}} {service:<16} from {start:8.1f} ms, {length:8.1f} ms")
        children = [other for other, (_, each) in spans.items() if each.parent_span_id == key]
        for child in sorted(children, key=lambda other: spans[other][1].start_time_unix_nano):
            self._print_span(spans, child, begin, depth + 1)


def main() -> None:
    """Listens until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", nargs="?", default="127.0.0.1:4317", help="Where to listen.")
    address = parser.parse_args().address
    server = grpc.server(futures.ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(), server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(address)
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
