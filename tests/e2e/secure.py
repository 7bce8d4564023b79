"""A service for tests with mTLS on every hop and API keys: its certificates, its processes, and clients of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from fissile.admin.v1.admin_pb2_grpc import AdminServiceStub
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.rpc.api_keys import Role, new_key
from tests.certificates import LOOPBACK, Authority, Pair
from tests.e2e.service import Answer, Process, free_port, generate, running

WORKER_NAME = "workers.fissile"
ROUTER_IDENTITY = "spiffe://fissile.test/router"
# Of another router that may use the same workers.
OTHER_IDENTITY = "other-router.fissile.test"


class Pki:
    """A CA for each kind of caller, and who has a certificate."""

    def __init__(self, folder: Path) -> None:
        self.servers, self.routers = Authority(folder, "servers"), Authority(folder, "routers")
        self.clients, self.operators = Authority(folder, "clients"), Authority(folder, "operators")
        self.router, self.worker = self.servers.issue("router", *LOOPBACK), self.servers.issue("worker", WORKER_NAME)
        self.router_client = self.routers.issue("router-client", ROUTER_IDENTITY)
        self.client, self.operator = self.clients.issue("client", "alice"), self.operators.issue("operator", "ops")


@dataclass
class SecureService:
    """One router and its workers, and what callers have.

    Attributes:
        keys: by name: `alice` (tenant gold), `bob` (tenant silver), `ops` (the roles of AdminService).
    """

    pki: Pki
    router: Process
    workers: list[Process]
    admin_address: str
    keys: dict[str, str]
    key_file: Path

    @property
    def logs(self) -> str:
        """What all processes have logged."""
        return "".join(process.log.read_text() for process in (self.router, *self.workers))

    def channel(self, name: str = "alice", pair: Pair | None = None) -> grpc.Channel:
        """To the router, with a key."""
        return tls_channel(self.router.address, self.pki.servers, pair or self.pki.client, key=self.keys[name])

    def stub(self, name: str = "alice") -> InferenceServiceStub:
        """Blocking client of the router."""
        return InferenceServiceStub(self.channel(name))

    @contextlib.contextmanager
    def admin(self, name: str = "ops") -> Iterator[AdminServiceStub]:
        """Blocking client of AdminService."""
        pki = self.pki
        with tls_channel(self.admin_address, pki.servers, pki.operator, key=self.keys[name]) as channel:
            yield AdminServiceStub(channel)

    def ask(self, request: pb.GenerateRequest, name: str = "alice") -> Answer:
        """Runs one Generate to its end."""
        with self.channel(name) as channel:
            return generate(InferenceServiceStub(channel), request)

    def cli(self, *, admin: bool = False) -> dict[str, str]:
        """The environment of a client command."""
        pair = self.pki.operator if admin else self.pki.client
        return {
            "FISSILE_ADDRESS": self.router.address,
            "FISSILE_ADMIN_ADDRESS": self.admin_address,
            "FISSILE_TLS_CA": str(self.pki.servers.cert),
            "FISSILE_CLIENT_CERT": str(pair.cert),
            "FISSILE_CLIENT_KEY": str(pair.key),
            "FISSILE_API_KEY": self.keys["ops" if admin else "alice"],
        }


def credentials(ca: Authority, pair: Pair | None = None) -> grpc.ChannelCredentials:
    """Of a client that trusts `ca` and shows `pair`."""
    if pair is None:
        return grpc.ssl_channel_credentials(ca.cert.read_bytes())
    return grpc.ssl_channel_credentials(ca.cert.read_bytes(), pair.key.read_bytes(), pair.cert.read_bytes())


def tls_channel(address: str, ca: Authority, pair: Pair | None = None, name: str = "", key: str = "") -> grpc.Channel:
    """A channel with a connection of its own, that shows `key` with every call."""
    options: list[tuple[str, str | int]] = [("grpc.use_local_subchannel_pool", 1)]
    if name:
        options.append(("grpc.ssl_target_name_override", name))
    shown = credentials(ca, pair)
    if key:
        shown = grpc.composite_channel_credentials(shown, grpc.access_token_call_credentials(key))
    return grpc.secure_channel(address, shown, options)


def check_health(channel: grpc.Channel) -> None:
    """One call that needs no key."""
    health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=60)


@contextlib.contextmanager
def secure_service(
    folder: Path, model: Path, *, workers: int, worker_options: Sequence[str] = (), environment: dict[str, str]
) -> Iterator[SecureService]:
    """Starts the service with simulated workers, logs at level debug, and stops it at the end."""
    made = _described(folder, model, workers, worker_options, {"FISSILE_LOG_LEVEL": "debug", **environment})
    with running([*made.workers, made.router]):
        yield made


def _described(folder: Path, model: Path, workers: int, options: Sequence[str], env: dict[str, str]) -> SecureService:
    pki, key_file, admin_port = Pki(folder), folder / "keys", free_port()
    made = {
        "alice": new_key("alice", "gold", [Role.INFER]),
        "bob": new_key("bob", "silver", [Role.INFER]),
        "ops": new_key("ops", "", [Role.ADMIN_READ, Role.ADMIN_WRITE]),
    }
    key_file.write_text("".join(f"{kept.line()}\n" for _, kept in made.values()))
    fleet = [_worker(folder, model, i, options, pki, env) for i in range(workers)]
    arguments = ["router", "--api-keys", str(key_file), "--admin-port", str(admin_port), *_router_tls(pki)]
    for worker in fleet:
        arguments += ["--worker", worker.address]
    router = _process("router", arguments, folder, env)
    keys = {name: key for name, (key, _) in made.items()}
    return SecureService(pki, router, fleet, f"127.0.0.1:{admin_port}", keys, key_file)


def _router_tls(pki: Pki) -> list[str]:
    files = {
        "--tls-cert": pki.router.cert,
        "--tls-key": pki.router.key,
        "--tls-client-ca": pki.clients.cert,
        "--admin-client-ca": pki.operators.cert,
        "--worker-ca": pki.servers.cert,
        "--worker-client-cert": pki.router_client.cert,
        "--worker-client-key": pki.router_client.key,
        "--worker-tls-name": WORKER_NAME,
    }
    return [part for name, file in files.items() for part in (name, str(file))]


def _worker(folder: Path, model: Path, i: int, options: Sequence[str], pki: Pki, env: dict[str, str]) -> Process:
    files = {"--tls-cert": pki.worker.cert, "--tls-key": pki.worker.key, "--tls-client-ca": pki.routers.cert}
    arguments = ["worker", "--model", str(model), "--model-name", "test", "--worker-id", f"worker-{i}", *options]
    for name, file in files.items():
        arguments += [name, str(file)]
    arguments += ["--router-identity", ROUTER_IDENTITY, "--router-identity", OTHER_IDENTITY]
    return _process(f"worker-{i}", arguments, folder, env)


def _process(name: str, arguments: list[str], folder: Path, env: dict[str, str]) -> Process:
    port, health_port = free_port(), free_port()
    listening = ["--port", str(port), "--health-port", str(health_port)]
    return Process(name, [*arguments, *listening], port, folder / f"{name}.log", env, health_port)
