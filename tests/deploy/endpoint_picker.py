"""A small endpoint picker of the Gateway API Inference Extension: Envoy's external processor, driven by metrics.

It follows the extension's protocol between proxy and picker: it reads vLLM's metrics of each endpoint, and answers the
headers of a request with the endpoint to use, or with 503 if none is ready. Bodies pass in full duplex.
"""

from __future__ import annotations

import http.client
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pb2 as dpb
from google.protobuf import descriptor_pool, message_factory

from tests.scraped import read_text

DESTINATION: Final = "x-gateway-destination-endpoint"
_METHOD: Final = ("envoy.service.ext_proc.v3.ExternalProcessor", "Process")
_PACKAGE: Final = "fissile.tests.ext_proc"
_LOAD: Final = ("vllm:num_requests_waiting", "vllm:num_requests_running")
_TIMEOUT_S: Final = 60.0
_UNAVAILABLE: Final = 503
# Fields of Envoy's messages that the picker uses: message -> (field, number, type). A `*` repeats a field.
_FIELDS: Final[dict[str, tuple[tuple[str, int, str], ...]]] = {
    "HeaderValue": (("key", 1, "string"), ("value", 2, "string"), ("raw_value", 3, "bytes")),
    "HeaderValueOption": (("header", 1, "HeaderValue"), ("append_action", 3, "int32")),
    "HeaderMutation": (("set_headers", 1, "HeaderValueOption*"),),
    "HttpHeaders": (("end_of_stream", 3, "bool"),),
    "HttpBody": (("body", 1, "bytes"), ("end_of_stream", 2, "bool")),
    "HttpTrailers": (),
    "ProcessingRequest": (
        ("request_headers", 2, "HttpHeaders"),
        ("request_body", 4, "HttpBody"),
        ("request_trailers", 6, "HttpTrailers"),
    ),
    "StreamedBodyResponse": (("body", 1, "bytes"), ("end_of_stream", 2, "bool")),
    "BodyMutation": (("streamed_response", 3, "StreamedBodyResponse"),),
    "CommonResponse": (
        ("header_mutation", 2, "HeaderMutation"),
        ("body_mutation", 3, "BodyMutation"),
        ("clear_route_cache", 5, "bool"),
    ),
    "HeadersResponse": (("response", 1, "CommonResponse"),),
    "BodyResponse": (("response", 1, "CommonResponse"),),
    "TrailersResponse": (),
    "HttpStatus": (("code", 1, "int32"),),
    "ImmediateResponse": (("status", 1, "HttpStatus"), ("body", 3, "bytes")),
    "ProcessingResponse": (
        ("request_headers", 1, "HeadersResponse"),
        ("request_body", 3, "BodyResponse"),
        ("request_trailers", 5, "TrailersResponse"),
        ("immediate_response", 7, "ImmediateResponse"),
    ),
}


def _messages() -> dict[str, Any]:
    """Classes of the messages. Envoy's own stubs would need a package `envoy`, which Envoy's wheel has too."""
    file = dpb.FileDescriptorProto(name="fissile/tests/ext_proc.proto", package=_PACKAGE, syntax="proto3")
    kinds = dpb.FieldDescriptorProto
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for field, number, kind in fields:
            label = kinds.LABEL_REPEATED if kind.endswith("*") else kinds.LABEL_OPTIONAL
            added = message.field.add(name=field, number=number, label=label)
            if (kind := kind.removesuffix("*")) in _FIELDS:
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                added.type = kinds.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _FIELDS}


_M: Final = _messages()


@dataclass(frozen=True)
class Endpoint:
    """An endpoint of the pool: where requests go, and where it serves its metrics."""

    port: int
    metrics_port: int

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def load(self) -> float | None:
        """Requests that run or wait there; None if it is not ready."""
        try:
            with closing(http.client.HTTPConnection("127.0.0.1", self.metrics_port, timeout=_TIMEOUT_S)) as connection:
                connection.request("GET", "/health")
                with connection.getresponse() as answer:
                    answer.read()
                    if answer.status != http.client.OK:
                        return None
                connection.request("GET", "/metrics")
                with connection.getresponse() as answer:
                    families = read_text(answer.read().decode())
        except OSError:
            return None
        return sum(float(sample.value) for family in families for sample in family.samples if sample.name in _LOAD)


class EndpointPicker:
    """Picks the endpoint with the least load for each request.

    Attributes:
        picked: addresses picked so far, "" where none was ready.

    Args:
        endpoints: the pool.
    """

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self.picked: list[str] = []
        self._endpoints = endpoints
        handler = grpc.stream_stream_rpc_method_handler(
            self._process, _M["ProcessingRequest"].FromString, _M["ProcessingResponse"].SerializeToString
        )
        service, method = _METHOD
        self._server = grpc.server(ThreadPoolExecutor(16))
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {method: handler})])
        self.port = self._server.add_insecure_port("127.0.0.1:0")

    def __enter__(self) -> EndpointPicker:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0).wait()

    def pick(self) -> str:
        """The address of the ready endpoint with the least load, "" if there is none."""
        loads = {endpoint.address: endpoint.load() for endpoint in self._endpoints}
        ready = {address: load for address, load in loads.items() if load is not None}
        return min(ready, key=ready.__getitem__, default="")

    def _process(self, requests: Iterator[Any], _: grpc.ServicerContext) -> Iterator[Any]:
        for request in requests:
            response = _M["ProcessingResponse"]()
            if request.HasField("request_headers"):
                self.picked.append(address := self.pick())
                if not address:
                    response.immediate_response.status.code = _UNAVAILABLE
                    response.immediate_response.body = b"no endpoint is ready"
                    yield response
                    return
                common = response.request_headers.response
                common.clear_route_cache = True
                header = common.header_mutation.set_headers.add(append_action=2).header
                header.key, header.raw_value = DESTINATION, address.encode()
            elif request.HasField("request_body"):
                streamed = response.request_body.response.body_mutation.streamed_response
                streamed.body, streamed.end_of_stream = request.request_body.body, request.request_body.end_of_stream
            else:
                response.request_trailers.SetInParent()
            yield response
