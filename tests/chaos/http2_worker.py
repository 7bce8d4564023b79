"""A worker that speaks HTTP/2 itself, and breaks its streams in the ways that gRPC's negative tests list."""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass, field
from typing import TypeVar

import h2.config
import h2.connection
import h2.events
import h2.settings
from fissile.worker.v1 import worker_pb2 as wpb
from google.protobuf.message import Message

from tests.chaos.raw_http2 import frame

M = TypeVar("M", bound=Message)
_OK = [("grpc-status", "0")]
_HEADERS = [(":status", "200"), ("content-type", "application/grpc")]
_STEP_S = 0.01
# Tokens of a sequence before a fault that comes in the middle.
MIDDLE = 5
FAULTS = ("goaway", "rst_after_headers", "rst_during_data", "rst_after_data", "close")


def token_at(position: int) -> int:
    """The token at a position, whatever the prompt."""
    return 65 + position % 20


@dataclass
class Http2Worker:
    """Listens on a thread of its own, one thread a connection.

    Attributes:
        fault: what happens to a Session; "" for nothing.
        times: so many Sessions meet it.
        padding: of DATA frames.
        max_streams: that a connection may have.
        port: where it listens.
        sessions: how many there have been.
    """

    fault: str = ""
    times: int = 0
    padding: int = 0
    max_streams: int = 100
    port: int = 0
    sessions: int = 0
    connections: list[socket.socket] = field(default_factory=list)
    listener: socket.socket = field(default_factory=socket.socket)

    def start(self) -> None:
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(20)
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def sever(self) -> None:
        """Breaks every connection; new ones are taken."""
        for accepted in self.connections:
            with contextlib.suppress(OSError):
                accepted.shutdown(socket.SHUT_RDWR)
        self.connections.clear()

    def stop(self) -> None:
        # A thread that waits in accept is not woken by close alone.
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted, _ = self.listener.accept()
                self.connections.append(accepted)
                threading.Thread(target=_Connection(self, accepted).run, daemon=True).start()


class _Ended(Exception):
    """The connection is over."""


class _Connection:
    def __init__(self, worker: Http2Worker, accepted: socket.socket) -> None:
        self.worker = worker
        self.socket = accepted
        self.http = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
        self.paths: dict[int, str] = {}
        self.received: dict[int, bytes] = {}
        self.session: int | None = None
        self.broken = False
        # Next position and end of each sequence.
        self.running: dict[int, list[int]] = {}
        self.sent = 0
        self.seen = 0

    def run(self) -> None:
        self.http.initiate_connection()
        self.http.update_settings({h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: self.worker.max_streams})
        self.socket.settimeout(_STEP_S)
        with contextlib.suppress(_Ended, OSError), self.socket:
            while True:
                self.socket.sendall(self.http.data_to_send())
                try:
                    data = self.socket.recv(65_536)
                except TimeoutError:
                    self.step()
                    continue
                if not data:
                    return
                for event in self.http.receive_data(data):
                    self.take(event)

    def take(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.RequestReceived) and event.headers is not None and event.stream_id is not None:
            path = next(str(value) for name, value in event.headers if str(name) == ":path")
            self.paths[event.stream_id] = path.rpartition("/")[2]
            self.received[event.stream_id] = b""
        elif isinstance(event, h2.events.DataReceived) and event.stream_id is not None:
            self.http.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id)
            self.received[event.stream_id] += event.data or b""
            self.read(event.stream_id)
        elif isinstance(event, h2.events.StreamReset) and event.stream_id == self.session:
            self.session = None
        elif isinstance(event, h2.events.ConnectionTerminated):
            raise _Ended

    def read(self, stream: int) -> None:
        data = self.received[stream]
        while len(data) >= 5 and len(data) >= 5 + (size := int.from_bytes(data[1:5], "big")):
            message, data = data[5 : 5 + size], data[5 + size :]
            if self.paths[stream] == "GetWorker":
                self.http.send_headers(stream, _HEADERS)
                self.send(stream, describe())
                self.http.send_headers(stream, _OK, end_stream=True)
            elif self.paths[stream] == "Session":
                self.frame(stream, wpb.SessionRequest.FromString(message))
        self.received[stream] = data

    def frame(self, stream: int, read: wpb.SessionRequest) -> None:
        kind = read.WhichOneof("frame")
        if kind == "hello":
            self.session = stream
            self.worker.sessions += 1
            self.broken = self.worker.times > 0
            self.worker.times -= self.broken
            self.http.send_headers(stream, _HEADERS)
            if self.broken and self.worker.fault == "rst_after_headers":
                self.reset()
                return
            unknown = [live.rid for live in read.hello.live]
            welcome = wpb.Welcome(worker_id="http2", instance_id="one", load=load(), unknown=unknown)
            self.send(stream, wpb.SessionResponse(welcome=welcome))
        elif kind == "submit":
            self.seen = read.submit.serial
            for sequence in read.submit.seqs:
                end = sequence.prompt_len + sequence.params.max_tokens
                self.running[sequence.rid] = [len(sequence.token_ids), end]
        elif kind == "cancel":
            for rid in read.cancel.rids:
                self.running.pop(rid, None)

    def step(self) -> None:
        """A token of each sequence; a heartbeat when there is none."""
        if self.session is None:
            return
        made = wpb.StepOutput(submit_seen=self.seen, load=load())
        for rid, (position, end) in list(self.running.items()):
            made.rid.append(rid)
            made.first_pos.append(position)
            made.n.append(1)
            made.token_ids.append(token_at(position))
            self.running[rid][0] += 1
            if position + 1 == end:
                made.ends.add(rid=rid, end_pos=end, reason=wpb.END_REASON_LENGTH)
                del self.running[rid]
        self.sent += bool(made.rid)
        if self.broken and self.sent == MIDDLE:
            self.break_off(made)
            return
        self.send(self.session, wpb.SessionResponse(step_output=made))

    def break_off(self, made: wpb.StepOutput) -> None:
        assert self.session is not None
        fault = self.worker.fault
        if fault == "goaway":
            self.http.close_connection(error_code=2)
        elif fault == "rst_during_data":
            data = frame(wpb.SessionResponse(step_output=made).SerializeToString())
            self.http.send_data(self.session, data[: len(data) // 2])
            self.reset()
        elif fault == "rst_after_data":
            self.send(self.session, wpb.SessionResponse(step_output=made))
            self.reset()
        if fault in ("goaway", "close"):
            self.socket.sendall(self.http.data_to_send())
            raise _Ended

    def reset(self) -> None:
        assert self.session is not None
        self.http.reset_stream(self.session, error_code=2)
        self.session = None
        self.running.clear()

    def send(self, stream: int, message: Message) -> None:
        padding = self.worker.padding or None
        self.http.send_data(stream, frame(message.SerializeToString()), pad_length=padding)


def describe() -> wpb.GetWorkerResponse:
    limits = wpb.Limits(max_model_len=4096, max_num_seqs=64, max_num_batched_tokens=2048)
    return wpb.GetWorkerResponse(
        worker_id="http2",
        instance_id="one",
        state=wpb.WORKER_STATE_SERVING,
        model="m",
        weights_digest="ww",
        numerics="nn",
        block_size=16,
        limits=limits,
        vocab_size=300,
        total_blocks=1000,
    )


def load() -> wpb.Load:
    return wpb.Load(room_tokens=2048, room_seqs=64, prefill_rate=10_000)
