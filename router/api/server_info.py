"""Description of a router by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final

from fissile.admin.v1 import admin_pb2 as apb
from google.protobuf.timestamp_pb2 import Timestamp

from common.rpc.durations import to_duration
from common.version import fissile_version

# Files of keys and certificates, and what tenants may do, which GetRouting has.
_LEFT_OUT: Final = frozenset({"security", "tenants"})
_FRACTIONS: Final = frozenset({"audit"})
# Fields that are named otherwise than the options that give them.
_OPTION_OF: Final = {"policy": "failover", "workers": "worker"}


class ServerInfo:
    """Facts that hold for the life of the router.

    Args:
        router_id: of its process, towards workers.
        address: of its public service.
        options: as `shown_options` gives them.
        started: monotonic seconds.
        start_time_ns: the same moment, since the epoch.
    """

    def __init__(
        self, router_id: str, address: str, options: Mapping[str, str], started: float, start_time_ns: int
    ) -> None:
        self._router_id = router_id
        self._address = address
        self._options = options
        self._started = started
        self._start_time = Timestamp()
        self._start_time.FromNanoseconds(start_time_ns)

    def describe(self, now: float, config_version: int, in_flight: int) -> apb.GetServerInfoResponse:
        """The response of GetServerInfo; `now` in monotonic seconds."""
        return apb.GetServerInfoResponse(
            version=fissile_version(),
            router_id=self._router_id,
            start_time=self._start_time,
            uptime=to_duration(now - self._started),
            address=self._address,
            options=self._options,
            config_version=config_version,
            in_flight=in_flight,
        )


def shown_options(options: Any) -> dict[str, str]:
    """The fields of a dataclass of options as text, by the names of the options, without what must not be shown."""
    return dict(_entries(options))


def _entries(options: Any) -> Iterator[tuple[str, str]]:
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name in _LEFT_OUT:
            continue
        if is_dataclass(value):
            yield from _entries(value)
        else:
            name = _OPTION_OF.get(field.name, field.name)
            yield name.removesuffix("_s").replace("_", "-"), _text(field.name, value)


def _text(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    if name in _FRACTIONS:
        return f"{100 * value:g}%"
    return f"{value:g}s" if name.endswith("_s") else str(getattr(value, "value", value))
