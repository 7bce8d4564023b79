"""Table of the engine protocols that a worker can serve beside its own (`--doors`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import grpc

from worker.doors import openengine_service
from worker.doors.door_adapter import DoorAdapter


@dataclass(frozen=True, slots=True)
class ServedDoor:
    """Row of the table.

    Attributes:
        services: full names of its services, for health and reflection.
        add: adds its servicers to a server.
    """

    services: tuple[str, ...]
    add: Callable[[DoorAdapter, grpc.aio.Server], None]


SERVED_DOORS: Final[Mapping[str, ServedDoor]] = {
    "openengine": ServedDoor(openengine_service.SERVICES, openengine_service.add_openengine),
}
