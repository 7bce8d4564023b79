"""The port for scrapers over real sockets: what it answers, and what hostile callers cost."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.exposition import choose_encoder

from common.limits import MAX_SCRAPE_CONNECTIONS, MAX_SCRAPE_REQUEST_BYTES, SCRAPE_EVERY_S
from common.rpc.scrape_port import BadHttpError, HttpRequest, ScrapePort, ScrapeTexts, prefers_openmetrics
from common.rpc.server import PortTakenError
from common.rpc.tls import ServerTls
from common.telemetry.prometheus import SeriesTable
from tests.certificates import Authority
from tests.scraped import read_openmetrics, read_text

PATIENT_S = 60.0
GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


@dataclass
class Served:
    """A port, the table behind it, and what its health says."""

    port: ScrapePort
    table: SeriesTable
    is_serving: list[bool]
    reads: list[float] = field(default_factory=list)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port.port), PATIENT_S)

    def get(self, path: str, **headers: str) -> tuple[int, str, bytes]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port.port, timeout=PATIENT_S)) as client:
            client.request("GET", path, headers=headers)
            answer = client.getresponse()
            return answer.status, answer.headers["Content-Type"], answer.read()


def serve(tls: ServerTls | None = None) -> Served:
    table = SeriesTable({"service.name": "x"})
    is_serving = [True]
    served = Served(ScrapePort("127.0.0.1", 0, table, lambda: is_serving[0], tls), table, is_serving)

    def read() -> list[tuple[float, dict[str, str]]]:
        served.reads.append(time.monotonic())
        return [(len(served.reads), {"model": 'a"b\\c\nd'})]

    table.add("reads", "counter", "", "Readings", read)
    served.port.start()
    return served


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    made = serve()
    yield made
    made.port.stop()


def status_of(connection: socket.socket) -> int:
    """Status of the next answer; 0 if the connection ended without one."""
    connection.settimeout(PATIENT_S)
    try:
        head = connection.makefile("rb").readline()
    except ConnectionError:
        return 0
    return int(head.split()[1]) if head else 0


def test_metrics_in_the_format_that_the_scraper_prefers(served: Served) -> None:
    status, kind, body = served.get("/metrics")
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    (sample,) = next(each for each in read_text(body.decode()) if each.name == "reads").samples
    assert sample.labels == {"model": 'a"b\\c\nd'}
    # What Prometheus 2.42 sends.
    accept = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"  # noqa: E501
    status, kind, body = served.get("/metrics?x=1", Accept=accept)
    assert (status, kind) == (200, "application/openmetrics-text; version=1.0.0; charset=utf-8")
    assert {each.name for each in read_openmetrics(body.decode())} == {"target", "reads"}


@pytest.mark.parametrize(
    ("accept", "is_openmetrics"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain;version=0.0.4", False),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", True),
        ("application/openmetrics-text;version=0.0.1,text/plain;q=0.5", True),
        ("text/plain;version=0.0.4;q=0.9,application/openmetrics-text;version=1.0.0;q=0.1", False),
        ("application/openmetrics-text;version=2.0.0,text/plain", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=x,text/plain", False),
        ("TEXT/PLAIN, Application/OpenMetrics-Text;Version=1.0.0", True),
        (";;;,=,q=", False),
    ],
)
def test_openmetrics_is_negotiated(accept: str, is_openmetrics: bool) -> None:
    assert prefers_openmetrics(accept) is is_openmetrics


def test_ordinary_accepts_are_read_as_by_prometheus_client() -> None:
    for accept in ("", "*/*", "text/plain", "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"):
        assert prefers_openmetrics(accept) is ("openmetrics" in choose_encoder(accept)[1])


def test_health_says_whether_the_process_serves(served: Served) -> None:
    assert served.get("/health")[::2] == (200, b"SERVING\n")
    served.is_serving[0] = False
    try:
        assert served.get("/health")[::2] == (503, b"NOT_SERVING\n")
    finally:
        served.is_serving[0] = True


def test_one_connection_serves_many_requests_and_head(served: Served) -> None:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", served.port.port, timeout=PATIENT_S)) as client:
        client.connect()
        connection = client.sock
        for method, path, status in (
            ("GET", "/metrics", 200), ("HEAD", "/metrics", 200), ("GET", "/", 404), ("POST", "/metrics", 405),
            ("GET", "/health", 200),
        ):  # fmt: skip
            client.request(method, path, headers={"Content-Length": "0"})
            answer = client.getresponse()
            assert answer.status == status
            body = answer.read()
            assert bool(body) is (method != "HEAD")
            assert client.sock is connection


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"\r\n\r\n\r\n", 400),
        (b"GET\r\n\r\n", 400),
        (b"GET /metrics\r\n\r\n", 400),
        (b"get /metrics HTTP/1.1\r\n\r\n", 400),
        (b"GET /metrics HTTP/2.0\r\n\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\n", 505),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nA : b\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nA: b\r\n folded\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nA: \x00\r\n\r\n", 400),
        (b"GET /met\xffrics HTTP/1.1\r\n\r\n", 400),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", 413),
        (b"GET /metrics HTTP/1.1\r\nContent-Length: 0\r\nContent-Length: 9\r\n\r\n", 413),
        (b"GET /metrics HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 413),
        (b"GET /metrics HTTP/1.1\r\nA: " + b"a" * MAX_SCRAPE_REQUEST_BYTES, 431),
        (b"GET /metrics HTTP/1.0\r\n\r\n", 200),
        (b"GET /metrics HTTP/1.1\r\nConnection: close\r\n\r\n", 200),
    ],
)
def test_malformed_request_gets_status_and_end(served: Served, request_: bytes, status: int) -> None:
    with served.connect() as connection:
        connection.sendall(request_)
        connection.settimeout(PATIENT_S)
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    assert int(answer.split()[1]) == status
    assert b"Connection: close" in answer
    assert served.get("/health")[0] == 200


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_refused(head: bytes) -> None:
    with contextlib.suppress(BadHttpError):
        assert HttpRequest(head).method


def test_scrapes_in_between_share_one_reading() -> None:
    now, reads = [100.0], [0]
    table = SeriesTable({})

    def read() -> list[tuple[float, dict[str, str]]]:
        reads[0] += 1
        return [(reads[0], {})]

    table.add("reads", "gauge", "", "", read)
    texts = ScrapeTexts(table, lambda: now[0])
    first = texts.text(is_openmetrics=False)
    for _ in range(1000):
        now[0] += SCRAPE_EVERY_S / 2000
        assert texts.text(is_openmetrics=False) is first
        assert b"reads 1" in texts.text(is_openmetrics=True)
    assert reads == [1]
    now[0] += SCRAPE_EVERY_S
    assert b"reads 2" in texts.text(is_openmetrics=True)
    assert b"reads 2" in texts.text(is_openmetrics=False)


def test_silent_connections_do_not_keep_a_scraper_out(served: Served) -> None:
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(served.connect()) for _ in range(2 * MAX_SCRAPE_CONNECTIONS)]
        # Half a request, a whole one whose answer is not read, and none.
        for i, connection in enumerate(silent):
            if i % 3 < 2:
                connection.sendall((GET[:10], GET)[i % 3])
        assert served.get("/metrics")[0] == 200
        # The oldest were ended.
        ended = silent[2]
        ended.settimeout(PATIENT_S)
        assert ended.recv(1) == b""


def test_reader_that_stops_costs_no_other(served: Served) -> None:
    """It sends requests without end and reads no answer; the port takes no more of them than a buffer holds."""
    with served.connect() as connection:
        connection.setblocking(False)
        sent = 0
        try:
            while sent < 64 << 20:
                sent += connection.send(GET * 100)
        except BlockingIOError:
            pass
        assert sent < 64 << 20
        for _ in range(20):
            assert served.get("/metrics")[0] == 200


def test_concurrent_scrapers_get_whole_texts(served: Served) -> None:
    bodies: list[bytes] = []

    def scrape() -> None:
        bodies.extend(served.get("/metrics")[2] for _ in range(20))

    threads = [threading.Thread(target=scrape) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(bodies) == 160
    for body in set(bodies):
        assert {each.name for each in read_text(body.decode())} == {"target_info", "reads"}


def test_taken_port_is_named_with_its_option(served: Served) -> None:
    other = ScrapePort("127.0.0.1", served.port.port, SeriesTable({}), lambda: True)
    with pytest.raises(PortTakenError, match="--metrics-port"):
        other.start()
    other.stop()


def test_tls_asks_for_a_certificate_and_follows_its_files(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair, client = authority.issue("server", "127.0.0.1"), authority.issue("scraper")
    served = serve(ServerTls(pair.cert, pair.key, authority.cert))
    try:
        trusting = ssl.create_default_context(cafile=authority.cert)
        url = f"https://127.0.0.1:{served.port.port}/metrics"
        with pytest.raises((OSError, http.client.HTTPException)):
            urllib.request.urlopen(url, context=trusting, timeout=PATIENT_S)
        with served.connect() as plain:
            plain.sendall(GET)
            assert status_of(plain) == 0
        trusting.load_cert_chain(client.cert, client.key)
        assert b"reads_total" in urllib.request.urlopen(url, context=trusting, timeout=PATIENT_S).read()
        with contextlib.closing(
            http.client.HTTPSConnection("127.0.0.1", served.port.port, timeout=PATIENT_S, context=trusting)
        ) as scraper:
            scraper.connect()
            connection = scraper.sock
            for _ in range(20):
                scraper.request("GET", "/metrics")
                assert b"reads_total" in scraper.getresponse().read()
                assert scraper.sock is connection
            connection.sendall(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            while connection.recv(1 << 16):
                pass
        # Connections without TLS keep nobody out, and neither do those that were ended for others.
        with contextlib.ExitStack() as stack:
            for _ in range(3 * MAX_SCRAPE_CONNECTIONS):
                stack.enter_context(served.connect())
            assert urllib.request.urlopen(url, context=trusting, timeout=PATIENT_S).read()
        before = certificate_of(served, trusting)
        authority.issue("server", "127.0.0.1")
        assert certificate_of(served, trusting) != before
    finally:
        served.port.stop()


def certificate_of(served: Served, context: ssl.SSLContext) -> bytes | None:
    with served.connect() as raw, context.wrap_socket(raw, server_hostname="127.0.0.1") as connection:
        return connection.getpeercert(binary_form=True)


def test_stop_closes_connections_and_frees_the_port() -> None:
    served = serve()
    with served.connect() as connection:
        connection.sendall(GET)
        assert status_of(connection) == 200
        served.port.stop()
        served.port.stop()
        while connection.recv(1 << 16):
            pass
    with pytest.raises(ConnectionRefusedError):
        served.connect()
