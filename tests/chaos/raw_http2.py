"""A client that speaks HTTP/2 itself, so that it can say what a gRPC library would never send."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote

import grpc
import h2.config
import h2.connection
import h2.events
import h2.settings

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_CODES = {code.value[0]: code for code in grpc.StatusCode}


@dataclass
class Outcome:
    """How one request ended: `code` of its trailers; None when the server reset the stream or closed the connection.

    `http` is the HTTP status, `reset` the error code of RST_STREAM, `closed` whether the connection ended.
    """

    code: grpc.StatusCode | None = None
    message: str = ""
    http: str = ""
    reset: int | None = None
    closed: bool = False
    data: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def frame(message: bytes, *, flag: int = 0, length: int | None = None) -> bytes:
    """A message with its prefix; `length` lies about it."""
    return struct.pack(">BI", flag, len(message) if length is None else length) + message


class RawClient:
    """One connection. Requests run one after the other.

    Raises:
        OSError: the server closed the connection, or does not answer within 60 s.
    """

    def __init__(self, address: str, settings: dict[h2.settings.SettingCodes | int, int] | None = None) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        config = h2.config.H2Configuration(client_side=True, header_encoding="utf-8", validate_outbound_headers=False)
        self._http = h2.connection.H2Connection(config)
        self._http.initiate_connection()
        if settings:
            self._http.update_settings(settings)
        self._send()

    def close(self) -> None:
        self._socket.close()

    def request(
        self, path: str, body: bytes, *, headers: Sequence[tuple[str, str]] = (), method: str = "POST", end: bool = True
    ) -> Outcome:
        """Sends a request and waits for its end; `end` is False to never end it: then waits for the server to do so."""
        stream = self._http.get_next_available_stream_id()
        given = dict(headers)
        fields = {
            ":method": method,
            ":scheme": "http",
            ":path": path,
            ":authority": "test",
            "content-type": "application/grpc",
            "te": "trailers",
            **given,
        }
        self._http.send_headers(stream, [(name, value) for name, value in fields.items() if value])
        outcome = Outcome()
        while body:
            room = min(self._http.local_flow_control_window(stream), self._http.max_outbound_frame_size)
            if room:
                self._http.send_data(stream, body[:room])
                body = body[room:]
                self._send()
            elif self._take(stream, outcome):
                return outcome
        if end:
            self._http.end_stream(stream)
        self._send()
        while not self._take(stream, outcome):
            pass
        return outcome

    def _send(self) -> None:
        self._socket.sendall(self._http.data_to_send())

    def _take(self, stream: int, outcome: Outcome) -> bool:
        """Reads once; True when the request has ended."""
        try:
            data = self._socket.recv(65_536)
        except ConnectionError:
            data = b""
        if not data:
            outcome.closed = True
            return True
        ended = False
        for event in self._http.receive_data(data):
            ended |= _note(event, stream, outcome)
            if isinstance(event, h2.events.DataReceived) and event.flow_controlled_length:
                self._http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        self._send()
        return ended


def _note(event: h2.events.Event, stream: int, outcome: Outcome) -> bool:
    if isinstance(event, h2.events.ConnectionTerminated):
        outcome.closed = True
        return True
    if getattr(event, "stream_id", stream) != stream:
        return False
    if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
        outcome.headers |= {str(name): str(value) for name, value in event.headers or ()}
        outcome.http = outcome.headers.get(":status", "")
        if "grpc-status" in outcome.headers:
            outcome.code = _CODES[int(outcome.headers["grpc-status"])]
            outcome.message = unquote(outcome.headers.get("grpc-message", ""))
    elif isinstance(event, h2.events.DataReceived):
        outcome.data += event.data or b""
    elif isinstance(event, h2.events.StreamReset):
        outcome.reset = int(event.error_code or 0)
        return True
    return isinstance(event, h2.events.StreamEnded)
