"""Clients that do not read get a status all the same."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import h2.settings
import pytest

from tests.chaos.raw_http2 import Outcome, RawClient, _note, frame
from tests.chaos.support import log_entries, until
from tests.e2e.service import Service, running_service
from tests.e2e.simulated import OPTIONS, outcome, request, simulated_model

CALLS = 20


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("unread")
    options = ["--max-unread-tokens", "20"]
    with running_service(
        folder, simulated_model(folder / "model"), worker_options=OPTIONS, router_options=options
    ) as running:
        yield running


class Unread(RawClient):
    """A client whose streams may carry nothing before `read`."""

    def __init__(self, address: str) -> None:
        super().__init__(address, {h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
        self._streams: list[int] = []

    def begin(self, path: str, message: bytes) -> None:
        stream = self._http.get_next_available_stream_id()
        headers = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "test"}
        headers |= {"content-type": "application/grpc", "te": "trailers"}
        self._http.send_headers(stream, list(headers.items()))
        self._http.send_data(stream, frame(message), end_stream=True)
        self._send()
        self._streams.append(stream)

    def read(self) -> list[Outcome]:
        """Lets the streams carry what they have; how each ended."""
        for stream in self._streams:
            self._http.increment_flow_control_window(1 << 20, stream)
        self._send()
        outcomes = {stream: Outcome() for stream in self._streams}
        left = set(self._streams)
        while left:
            for event in self._http.receive_data(self._socket.recv(65_536)):
                left -= {stream for stream in left if _note(event, stream, outcomes[stream])}
            self._send()
        return list(outcomes.values())


def num_dropped(service: Service) -> int:
    return sum(entry.get("reason") == "SLOW_CLIENT" for entry in log_entries(service.router))


def test_client_dropped_before_first_message_gets_status(service: Service) -> None:
    """Former fault: while the first message was written no status could be sent; the client waited for ever."""
    client = Unread(service.router.address)
    for i in range(CALLS):
        client.begin("/fissile.v1.InferenceService/Generate", request(i, 1000).SerializeToString())
    until(lambda: num_dropped(service) == CALLS, within_s=60, what="streams that were dropped")
    outcomes = client.read()
    client.close()
    assert [outcome.code for outcome in outcomes] == [grpc.StatusCode.RESOURCE_EXHAUSTED] * CALLS


def test_dropped_unread_clients_leave_no_traceback(service: Service) -> None:
    """The first message of a dropped client is still being written, and fails when the connection closes."""
    before = num_dropped(service)
    client = Unread(service.router.address)
    for i in range(CALLS):
        client.begin("/fissile.v1.InferenceService/Generate", request(1000 + i, 1000).SerializeToString())
    until(lambda: num_dropped(service) == before + CALLS, within_s=60, what="streams that were dropped")
    client.close()
    service.wait_idle()
    assert outcome(service.stub, 2000, 4) == (grpc.StatusCode.OK, 4)
    log = service.router.log.read_text()
    assert "Traceback" not in log
    assert "never retrieved" not in log
