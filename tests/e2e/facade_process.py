"""The HTTP facade as a process, for tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx2

from tests.e2e.service import Process, free_port, running


class FacadeProcess(Process):
    """A facade."""

    def is_serving(self, service: str = "") -> bool:
        """True if it answers, and has a router with a worker."""
        with contextlib.suppress(httpx2.HTTPError):
            return httpx2.get(f"http://{self.address}/health", timeout=30).status_code == 200
        return False


def facade_process(routers: Sequence[str], folder: Path, environment: dict[str, str] | None = None) -> FacadeProcess:
    """A facade of these routers that has not started; its log goes to `folder`."""
    port = free_port()
    arguments = ["facade", "--port", str(port), "--routers", ",".join(routers)]
    return FacadeProcess("facade", arguments, port, folder / "facade.log", environment or {})


@contextlib.contextmanager
def running_facade(
    routers: Sequence[str], folder: Path, environment: dict[str, str] | None = None
) -> Iterator[FacadeProcess]:
    """A running facade of these routers."""
    facade = facade_process(routers, folder, environment)
    with running([facade]):
        yield facade
