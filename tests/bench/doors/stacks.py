"""The ways to the same simulated workers that are compared, each as running processes."""

from __future__ import annotations

import contextlib
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.bench.router import bed
from tests.bench.router.load import HTTP, ROUTER, WORKER
from tests.e2e.service import Process, Service, free_port, running
from tests.peers.dynamo import BARE, PACKAGES, running_frontend, running_sidecar
from tests.peers.environment import SMG_PACKAGES, is_installed
from tests.peers.smg import MODEL, running_smg

# Of the workers, so that every door is open.
_WORKER_OPTIONS: Final = ("--doors", "openengine,vllm-engine")
_LOG_LEVEL: Final = {"FISSILE_LOG_LEVEL": "warning"}
# A row of a result: tests/bench/plots/results.py has the fields.
Entry = Mapping[str, str | float | int | bool]


@dataclass(frozen=True, slots=True)
class Door:
    """One running way from clients to the workers.

    Attributes:
        protocol: WORKER, ROUTER or HTTP of `tests.bench.router.load`: what clients speak.
        addresses: host:port of each process that clients may call.
        model: name of the model in requests.
        parts: process ids by name, in the order from the client to the worker.
    """

    protocol: str
    addresses: Sequence[str]
    model: str
    parts: Mapping[str, Sequence[int]]

    @property
    def pids(self) -> list[int]:
        """All its processes; the workers are not among them."""
        return [pid for pids in self.parts.values() for pid in pids]


class _Facade(Process):
    """A facade."""

    def is_serving(self, service: str = "") -> bool:
        """True if it answers, and has a router with a worker."""
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(f"http://{self.address}/health", timeout=30).close()
            return True
        return False


@contextlib.contextmanager
def _worker(service: Service, num_routers: int) -> Iterator[Door]:
    """Calls of a worker itself: the floor."""
    yield Door(WORKER, [service.workers[0].address], MODEL, {})


@contextlib.contextmanager
def _router(service: Service, num_routers: int) -> Iterator[Door]:
    """Fissile's routers over gRPC."""
    workers = [part for worker in service.workers for part in ("--worker", worker.address)]
    further = []
    for i in range(1, num_routers):
        port = free_port()
        arguments = ["router", "--port", str(port), *workers]
        log = _folder(service) / f"router-{i}.log"
        further.append(Process(f"router-{i}", arguments, port, log, {"OMP_NUM_THREADS": "1", **_LOG_LEVEL}))
    with running(further):
        routers = [service.router, *further]
        pids = [each.running.pid for each in routers]
        yield Door(ROUTER, [each.address for each in routers], MODEL, {"router": pids})


@contextlib.contextmanager
def _facade(service: Service, num_routers: int) -> Iterator[Door]:
    """Fissile's HTTP facade in front of its routers."""
    with _router(service, num_routers) as routers:
        port = free_port()
        arguments = ["facade", "--routers", ",".join(routers.addresses), "--port", str(port)]
        facade = _Facade("facade", arguments, port, _folder(service) / "facade.log", _LOG_LEVEL)
        with running([facade]):
            yield Door(HTTP, [facade.address], MODEL, {"facade": [facade.running.pid], **routers.parts})


@contextlib.contextmanager
def _smg(service: Service, num_routers: int) -> Iterator[Door]:
    """The router of smg."""
    options = ["--policy", "round_robin", "--log-level", "warn"]
    with running_smg(service.workers, _folder(service), *options) as smg:
        yield Door(HTTP, [f"127.0.0.1:{smg.port}"], MODEL, {"router": [smg.pid]})


@contextlib.contextmanager
def _dynamo(service: Service, num_routers: int, *options: str) -> Iterator[Door]:
    """Dynamo's frontend with these options, and a sidecar for OpenEngine beside each worker."""
    folder, model = _folder(service), str(bed.bench_model())
    with ExitStack() as stack:
        sidecars = [
            stack.enter_context(running_sidecar(folder, worker, "_run_trtllm_sidecar", "--model-path", model))
            for worker in service.workers
        ]
        frontend = stack.enter_context(running_frontend(folder, model, *options))
        yield Door(HTTP, [f"127.0.0.1:{frontend.port}"], model, {"router": [frontend.pid], "sidecar": sidecars})


@contextlib.contextmanager
def _migrating_dynamo(service: Service, num_routers: int) -> Iterator[Door]:
    """Dynamo that continues a stream of a lost worker at another one, which it does not do by default."""
    with _dynamo(service, num_routers, "--migration-limit", "3") as door:
        yield door


_Opener = Callable[[Service, int], AbstractContextManager[Door]]
# Name in `--only` -> title in the tables, and what starts it.
_DOORS: Final[Mapping[str, tuple[str, _Opener]]] = {
    "worker": ("worker itself, gRPC", _worker),
    "router": ("Fissile router, gRPC", _router),
    "facade": ("Fissile facade and router, HTTP", _facade),
    "smg": ("smg 1.13.0, HTTP", _smg),
    "dynamo": ("Dynamo 1.6.1, HTTP", _dynamo),
    "dynamo-migration": ("Dynamo with `--migration-limit 3`", _migrating_dynamo),
}
TITLES: Final = {name: title for name, (title, _) in _DOORS.items()}
# Doors whose costs are measured, and doors that get the faults.
MEASURED: Final = ("worker", "router", "facade", "smg", "dynamo")
FAULTED: Final = ("router", "facade", "smg", "dynamo", "dynamo-migration")


@dataclass(frozen=True, slots=True)
class RunningDoors:
    """Doors by name, over the workers of one service."""

    service: Service
    doors: Mapping[str, Door]

    @property
    def pids(self) -> list[int]:
        """All processes of doors and service."""
        own = [each.running.pid for each in (self.service.router, *self.service.workers)]
        return [*own, *(pid for door in self.doors.values() for pid in door.pids)]


@contextlib.contextmanager
def running_doors(
    names: Sequence[str], preset: str, *, workers: int = 1, routers: int = 1, options: Sequence[str] = ()
) -> Iterator[RunningDoors]:
    """Starts simulated workers and these doors.

    Args:
        names: keys of TITLES.
        preset: what the workers simulate.
        workers: number of workers.
        routers: number of Fissile's routers.
        options: further options of the workers.
    """
    with (
        bed.service(preset, workers=workers, worker_options=[*_WORKER_OPTIONS, *options]) as service,
        ExitStack() as stack,
    ):
        doors = {}
        for name in names:
            print(f"starting: {TITLES[name]}", file=sys.stderr)
            doors[name] = stack.enter_context(_DOORS[name][1](service, routers))
        yield RunningDoors(service, doors)


def missing_doors(names: Sequence[str]) -> list[str]:
    """Those doors whose programs are not installed."""
    has_peer = {"smg": is_installed("smg", SMG_PACKAGES), "dynamo": is_installed("dynamo", PACKAGES, BARE)}
    return [name for name in names if not has_peer.get(name.partition("-")[0], True)]


def _folder(service: Service) -> Path:
    return service.router.log.parent
