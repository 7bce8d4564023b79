"""Table of the engine protocols that a worker can serve beside its own (`--doors`).

The servicer of a protocol whose stubs are in an extra is imported when it is added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import grpc

from worker.doors import openengine_service, vllm_inference
from worker.doors.door_adapter import DoorAdapter


@dataclass(frozen=True, slots=True)
class ServedDoor:
    """Row of the table.

    Attributes:
        services: full names of its services, for health and reflection.
        add: adds its servicers to a server.
        module: module of its stubs that an extra installs; "" if Fissile has them itself.
    """

    services: tuple[str, ...]
    add: Callable[[DoorAdapter, grpc.aio.Server], None]
    module: str = ""


def _add_vllm_engine(adapter: DoorAdapter, server: grpc.aio.Server) -> None:
    from worker.doors.vllm_engine import add_vllm_engine  # noqa: PLC0415

    add_vllm_engine(adapter, server)


SERVED_DOORS: Final[Mapping[str, ServedDoor]] = {
    "openengine": ServedDoor(openengine_service.SERVICES, openengine_service.add_openengine),
    "vllm-engine": ServedDoor(("vllm.grpc.engine.VllmEngine",), _add_vllm_engine, "smg_grpc_proto"),
    "vllm-inference": ServedDoor(vllm_inference.SERVICES, vllm_inference.add_vllm_inference),
}
