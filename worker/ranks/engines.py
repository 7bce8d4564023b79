"""Store of engines in lockstep; their ranks learn its port at the door of `--dist-init`."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Container
from types import TracebackType
from typing import Any, Final

from common.limits import RANK_TCP_TIMEOUT_S
from worker.ranks.collectives import open_store, reach_store
from worker.ranks.door import Door, knock_until_admitted
from worker.ranks.frames import FrameError, encode, messages

_ADMIT_S: Final = 0.2
_AGAIN_S: Final = 0.5


class StoreDoor:
    """Holds the store, and a door that tells its port to the other ranks until all have joined.

    Args:
        host: address of both.
        port: of the door.
        places: numbers of the other ranks among those of all engines.
        secret: that they prove to know.

    Attributes:
        store: of all ranks of all engines.

    Raises:
        OSError: the address cannot be listened on.
    """

    def __init__(self, host: str, port: int, places: Container[int], secret: str) -> None:
        self._places = places
        self._door = Door(host, port, secret)
        self.store, self._store_port = open_store(host)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="store door", daemon=True)

    def __enter__(self) -> StoreDoor:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the door; the store stays."""
        self._stop.set()
        self._thread.join()
        self._door.close()

    def _tell(self) -> None:
        while not self._stop.is_set():
            # A rank whose connection broke connects again, so each rank may be admitted any number of times.
            guest = self._door.admit(self._places, _ADMIT_S)
            if guest is not None:
                with contextlib.suppress(OSError), guest.sock:
                    guest.sock.sendall(encode(("store", self._store_port)))


def find_store(host: str, port: int, place: int, secret: str) -> Any:
    """Asks the door at `host` and `port` for the store's port, until the store is reached."""
    within = datetime.timedelta(seconds=RANK_TCP_TIMEOUT_S)
    while True:
        sock, reader = knock_until_admitted(host, port, place, secret)
        # RuntimeError: the engine that told the port has ended since.
        with sock, contextlib.suppress(OSError, EOFError, FrameError, RuntimeError):
            match next(messages(sock, reader)):
                case ("store", int(store_port)):
                    return reach_store(host, store_port, within)
        time.sleep(_AGAIN_S)
