"""TLS on real sockets: admitted and refused peers, and certificates that change under a running server."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.cli.core.client import Credentials, open_channel
from common.cli.core.errors import CommandError
from common.cli.core.tls_options import client_tls, server_tls
from common.rpc.server import GrpcServer
from common.rpc.tls import ClientTls, Dialer, ServerTls, TlsError, is_loopback
from tests.certificates import LOOPBACK, Authority, Pair


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@asynccontextmanager
async def serving(tls: ServerTls | None, host: str = "127.0.0.1") -> AsyncIterator[GrpcServer]:
    server = GrpcServer(host, 0, [], tls=tls)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


async def check(dialer: Dialer, address: str) -> None:
    """One health check on a separate connection."""
    async with dialer.channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=60)


async def refused(dialer: Dialer, address: str) -> str:
    """The reason why a connection is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await check(dialer, address)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    return caught.value.details() or ""


async def serial_number(address: str) -> int:
    """Serial number of the certificate that a new connection receives."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return x509.load_der_x509_certificate(shown).serial_number


def serial_of(pair: Pair) -> int:
    return x509.load_pem_x509_certificate(pair.cert.read_bytes()).serial_number


async def test_tls_refuses_wrong_ca_name_and_plain_text(ca: Authority, tmp_path: Path) -> None:
    pair = ca.issue("server", *LOOPBACK)
    other = Authority(tmp_path, "other")
    async with serving(ServerTls(pair.cert, pair.key)) as server:
        await check(Dialer(ClientTls(ca.cert)), server.address)
        assert "CERTIFICATE_VERIFY_FAILED" in await refused(Dialer(ClientTls(other.cert)), server.address)
        assert "Hostname Verification" in await refused(Dialer(ClientTls(ca.cert, name="somebody")), server.address)
        await refused(Dialer(), server.address)
        await check(Dialer(ClientTls(ca.cert, name="localhost")), server.address)


async def test_mtls_wants_a_certificate_of_the_clients_ca(ca: Authority, tmp_path: Path) -> None:
    clients = Authority(tmp_path, "clients")
    pair, client = ca.issue("server", *LOOPBACK), clients.issue("client", "client")
    stranger, old = ca.issue("stranger", "client"), clients.issue("old", "client", days=(-2, -1))
    async with serving(ServerTls(pair.cert, pair.key, clients.cert)) as server:
        await check(Dialer(ClientTls(ca.cert, client.cert, client.key)), server.address)
        for bad in (stranger, old):
            await refused(Dialer(ClientTls(ca.cert, bad.cert, bad.key)), server.address)
        await refused(Dialer(ClientTls(ca.cert)), server.address)
        await check(Dialer(ClientTls(ca.cert, client.cert, client.key)), server.address)


async def test_renewed_certificate_serves_new_connections_only(ca: Authority) -> None:
    pair = ca.issue("server", *LOOPBACK)
    before = serial_of(pair)
    async with (
        serving(ServerTls(pair.cert, pair.key)) as server,
        Dialer(ClientTls(ca.cert)).channel(server.address) as channel,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await serial_number(server.address) == before
        ca.issue("server", *LOOPBACK)
        assert await serial_number(server.address) == serial_of(pair) != before
        await check(Dialer(ClientTls(ca.cert)), server.address)
        await server.set_serving(True)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING


async def test_new_client_ca_applies_to_next_handshake(ca: Authority, tmp_path: Path) -> None:
    clients = Authority(tmp_path, "clients")
    pair, client = ca.issue("server", *LOOPBACK), ca.issue("client", "client")
    dialer = Dialer(ClientTls(ca.cert, client.cert, client.key))
    async with serving(ServerTls(pair.cert, pair.key, clients.cert)) as server:
        await refused(dialer, server.address)
        clients.cert.write_bytes(ca.cert.read_bytes())
        await check(dialer, server.address)


def half(pair: Pair) -> None:
    pair.cert.write_bytes(pair.cert.read_bytes()[:200])


def without_its_key(pair: Pair) -> None:
    pair.cert.write_bytes(pair.cert.with_name("another.pem").read_bytes())


def gone(pair: Pair) -> None:
    pair.key.unlink()


@pytest.mark.parametrize("damage", [half, without_its_key, gone])
async def test_unusable_certificate_keeps_old_one_with_one_warning(
    damage: Callable[[Pair], None], ca: Authority
) -> None:
    pair = ca.issue("server", *LOOPBACK)
    ca.issue("another", *LOOPBACK)
    before = serial_of(pair)
    async with serving(ServerTls(pair.cert, pair.key)) as server:
        with structlog.testing.capture_logs() as logs:
            damage(pair)
            for _ in range(3):
                assert await serial_number(server.address) == before
            assert [line["log_level"] for line in logs] == ["warning"]
            ca.issue("server", *LOOPBACK)
            assert await serial_number(server.address) == serial_of(pair) != before
            assert [line["event"] for line in logs][1:] == ["certificate reloaded"]
        assert "PRIVATE KEY" not in repr(logs)


async def test_renewed_mounted_secret_is_loaded(tmp_path: Path) -> None:
    """Like the kubelet: the files are links into a folder that is itself a link, which is replaced."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    ca = Authority(tmp_path / "first")
    before = serial_of(ca.issue("tls", *LOOPBACK))
    after = serial_of(Authority(tmp_path / "second").issue("tls", *LOOPBACK))
    (tmp_path / "data").symlink_to("first")
    for name in ("tls.pem", "tls.key"):
        (tmp_path / name).symlink_to(f"data/{name}")
    async with serving(ServerTls(tmp_path / "tls.pem", tmp_path / "tls.key")) as server:
        assert await serial_number(server.address) == before
        (tmp_path / "new").symlink_to("second")
        (tmp_path / "new").rename(tmp_path / "data")
        assert await serial_number(server.address) == after


async def test_touched_certificate_is_not_reloaded(ca: Authority) -> None:
    pair = ca.issue("server", *LOOPBACK)
    async with serving(ServerTls(pair.cert, pair.key)) as server:
        with structlog.testing.capture_logs() as logs:
            os.utime(pair.cert)
            assert await serial_number(server.address) == serial_of(pair)
        assert logs == []


async def test_client_reads_tls_files_at_each_dial(ca: Authority, tmp_path: Path) -> None:
    clients = Authority(tmp_path, "clients")
    pair, mine = ca.issue("server", *LOOPBACK), ca.issue("mine", "client")
    dialer = Dialer(ClientTls(ca.cert, mine.cert, mine.key))
    async with serving(ServerTls(pair.cert, pair.key, clients.cert)) as server:
        await refused(dialer, server.address)
        clients.issue("mine", "client")
        await check(dialer, server.address)
        mine.key.write_bytes(b"half")
        await check(dialer, server.address)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"cert": None}, r"server\.pem cannot be read: No such file"),
        ({"key": b""}, r"server\.pem and .*server\.key are not a certificate chain and its unencrypted key"),
        ({"key": "other"}, "KEY_VALUES_MISMATCH"),
        ({"cert": b"text"}, "in PEM form"),
        ({"ca": b"text"}, r"ca\.pem holds no CA certificates"),
        ({"ca": None}, r"ca\.pem cannot be read"),
    ],
)
def test_unusable_tls_file_at_start_is_named(content: dict[str, Any], problem: str, ca: Authority) -> None:
    pair, other = ca.issue("server"), ca.issue("other")
    paths = {"cert": pair.cert, "key": pair.key, "ca": ca.cert}
    for name, data in content.items():
        if data is None:
            paths[name].unlink()
        else:
            paths[name].write_bytes(other.key.read_bytes() if data == "other" else data)
    with pytest.raises(TlsError, match=problem) as caught:
        ServerTls(pair.cert, pair.key, ca.cert).credentials()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["server.pem", "server.key", "ca.pem"])
def test_tls_file_that_is_a_device_is_refused(name: str, ca: Authority, tmp_path: Path) -> None:
    """Regression: reading a device never ended."""
    pair = ca.issue("server", *LOOPBACK)
    paths = {"server.pem": pair.cert, "server.key": pair.key, "ca.pem": ca.cert}
    paths[name] = tmp_path / "device" / name
    paths[name].parent.mkdir()
    paths[name].symlink_to("/dev/zero")
    with pytest.raises(TlsError, match=f"{name} cannot be read: it is not a regular file"):
        ServerTls(paths["server.pem"], paths["server.key"], paths["ca.pem"]).credentials()


def test_encrypted_tls_key_is_refused_without_prompt(ca: Authority, tmp_path: Path) -> None:
    pair = ca.issue("server")
    locked = tmp_path / "locked.key"
    subprocess.run(
        ["openssl", "pkcs8", "-topk8", "-in", pair.key, "-out", locked, "-passout", "pass:secret"], check=True
    )
    imports = "import sys; from pathlib import Path; from common.rpc.tls import ServerTls"
    program = f"{imports}\nServerTls(*map(Path, sys.argv[1:])).credentials()"
    result = subprocess.run(
        [sys.executable, "-c", program, pair.cert, locked], capture_output=True, text=True, timeout=60, check=False
    )
    assert "unencrypted key" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.0.1:50051", True),
        ("localhost", True),
        ("localhost:1", True),
        ("::1", True),
        ("[::1]", True),
        ("[::1]:50051", True),
        ("0.0.0.0", False),
        ("::", False),
        ("[::]:50051", False),
        ("10.0.0.1:50051", False),
        ("fe80::1", False),
        ("worker-0.workers:50061", False),
        ("localhost.example.org", False),
    ],
)
def test_is_loopback(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


async def test_plain_text_outside_loopback_warns(ca: Authority) -> None:
    pair = ca.issue("server", *LOOPBACK)

    async def warnings(tls: ServerTls | None, host: str) -> list[str]:
        with structlog.testing.capture_logs() as logs:
            async with serving(tls, host):
                return [line["event"] for line in logs if line["log_level"] == "warning"]

    (warned,) = await warnings(None, "0.0.0.0")
    assert warned.startswith("PLAIN TEXT outside loopback")
    assert await warnings(None, "127.0.0.1") == []
    assert await warnings(ServerTls(pair.cert, pair.key), "0.0.0.0") == []


def test_api_key_is_not_sent_remotely_in_plain_text() -> None:
    with pytest.raises(CommandError, match="would go to router:50051 in plain text") as caught:
        open_channel("router:50051", Credentials(api_key="flk_secret"))
    assert "flk_secret" not in str(caught.value)
    assert "flk_secret" not in repr(Credentials(api_key="flk_secret"))


def test_incomplete_tls_options_are_refused() -> None:
    one = Path("one")
    for given, missing in [((one, None, None), "--tls-key"), ((None, one, None), "--tls-cert")]:
        with pytest.raises(CommandError, match=f"{missing} is missing"):
            server_tls(*given)
    with pytest.raises(CommandError, match="--tls-cert is missing"):
        server_tls(None, None, one)
    with pytest.raises(CommandError, match="--worker-client-key is missing"):
        client_tls(ca=one, cert=one, key=None, name="", prefix="--worker-")
    for cert, name, which in [(one, "", "--client-cert"), (None, "name", "--tls-name")]:
        with pytest.raises(CommandError, match=f"{which} needs TLS"):
            client_tls(ca=None, cert=cert, key=cert, name=name)
    assert client_tls(ca=None, cert=None, key=None, name="") is None
    assert client_tls(ca=None, cert=None, key=None, name="", wanted=True) == ClientTls()
