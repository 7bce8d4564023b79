"""Settings that may change while a router runs: admission, placement, the workers' addresses, logging.

Pure. Values are checked when they are made, so applying them cannot fail. A version counts the changes applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Final

from common.errors import ConfigVersionError, InvalidFieldError
from common.limits import MAX_TENANTS
from common.params.names import LEVELS, PRIORITIES
from common.params.options.services import ROUTER
from common.params.options.table import default_of
from router.scheduling.placement import PLACEMENTS
from router.workers.addresses import parse_targets

_MAX_HOLD_LIMIT_S: Final = 60.0


@dataclass(frozen=True)
class RoutingConfig:
    """Settings of admission and placement. Fields are named as the router's options.

    Attributes:
        placement: a key of PLACEMENTS.
        delay_factor: prefill durations that the delay gate holds a prompt; 0 is off.
        max_hold_s: longest that the gate holds a prompt, seconds.
        queue_size: most requests of one class that wait.
        tenant_weight: share of a tenant in the queue, by name; absent tenants have 1.
        tenant_concurrency: most requests in flight, by tenant; "" is for each absent tenant, 0 is no limit.
        tenant_max_priority: highest priority class of a tenant, by name; "" is for each absent tenant.

    Raises:
        InvalidFieldError: a value is out of range.
    """

    placement: str = default_of(ROUTER, "placement")
    delay_factor: float = default_of(ROUTER, "delay_factor")
    max_hold_s: float = default_of(ROUTER, "max_hold_s")
    queue_size: int = default_of(ROUTER, "queue_size")
    tenant_weight: Mapping[str, float] = field(default_factory=dict)
    tenant_concurrency: Mapping[str, int] = field(default_factory=dict)
    tenant_max_priority: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(self.placement in PLACEMENTS, "placement", self.placement, f"one of {', '.join(PLACEMENTS)}")
        delay = self.delay_factor
        _require(math.isfinite(delay) and delay >= 0, "delay_factor", delay, "0 or more")
        _require(
            0 <= self.max_hold_s <= _MAX_HOLD_LIMIT_S, "max_hold", self.max_hold_s, f"0 to {_MAX_HOLD_LIMIT_S:g} s"
        )
        _require(self.queue_size >= 1, "queue_size", self.queue_size, "1 or more")
        for tenant, weight in self.tenant_weight.items():
            _require(math.isfinite(weight) and weight > 0, f"tenant_weight[{tenant!r}]", weight, "more than 0")
        for tenant, limit in self.tenant_concurrency.items():
            _require(limit >= 0, f"tenant_concurrency[{tenant!r}]", limit, "0 or more")
        classes = ", ".join(PRIORITIES)
        for tenant, most in self.tenant_max_priority.items():
            _require(most in PRIORITIES, f"tenant_max_priority[{tenant!r}]", most or "empty", f"one of {classes}")
        for name in ("tenant_weight", "tenant_concurrency", "tenant_max_priority"):
            tenants = getattr(self, name)
            _require(len(tenants) <= MAX_TENANTS, name, f"{len(tenants)} tenants", f"at most {MAX_TENANTS}")
        _require("" not in self.tenant_weight, "tenant_weight", "an entry without a tenant", "TENANT=WEIGHT")


# Option of each field. The fields of RoutingConfig decide which options are reloadable.
_ROUTING_OPTIONS: Final = {each.name: each.name.removesuffix("_s").replace("_", "-") for each in fields(RoutingConfig)}
RELOADABLE: Final = frozenset({"worker", *_ROUTING_OPTIONS.values(), "log-level"})
"""Options of a router, without dashes, that may change while it runs."""


@dataclass(frozen=True)
class RuntimeConfig:
    """Every setting that may change while the router runs.

    Attributes:
        routing: how requests are admitted and placed.
        workers: the workers, in the forms of `addresses`.
        log_level: lowest level that is logged, one of LEVELS.

    Raises:
        InvalidFieldError: a value is out of range.
        AddressError: the address of a worker is not valid.
    """

    routing: RoutingConfig
    workers: tuple[str, ...]
    log_level: str = default_of(ROUTER, "log_level")

    def __post_init__(self) -> None:
        parse_targets(self.workers)
        _require(self.log_level in LEVELS, "log_level", self.log_level, f"one of {', '.join(LEVELS)}")

    def differences(self, other: RuntimeConfig) -> list[str]:
        """Names, without dashes, of the options that differ."""
        mine, theirs = _by_option(self), _by_option(other)
        return [name for name, value in mine.items() if value != theirs[name]]


@dataclass(frozen=True, slots=True)
class ReloadedConfig:
    """Result of reading the configuration again: new settings, and changed options that need a restart."""

    settings: RuntimeConfig
    needs_restart: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReloadResult:
    """Options that a reload changed.

    `undone` has the options of `changed` whose value `set_routing` had set.
    """

    version: int
    changed: tuple[str, ...] = ()
    needs_restart: tuple[str, ...] = ()
    undone: tuple[str, ...] = ()


class ConfigStore:
    """The settings in force and their version.

    Args:
        settings: at the start.
        apply: applies settings; must not fail.
        reread: reads the configuration again, or raises its error; None without a configuration to read.

    Attributes:
        settings: the ones in force.
        version: counts changes; 1 at the start.
    """

    def __init__(
        self,
        settings: RuntimeConfig,
        apply: Callable[[RuntimeConfig], None],
        reread: Callable[[], ReloadedConfig] | None = None,
    ) -> None:
        self.settings = settings
        self.version = 1
        # Options that `set_routing` has changed since the configuration was read.
        self._set: set[str] = set()
        self._apply = apply
        self._reread = reread

    def set_routing(self, routing: RoutingConfig, if_version: int = 0) -> None:
        """Applies another routing.

        Raises:
            ConfigVersionError: `if_version` is not 0, and not the version in force.
        """
        if if_version not in (0, self.version):
            raise ConfigVersionError(if_version, self.version)
        self._set.update(self._take(replace(self.settings, routing=routing)))

    def reload(self) -> ReloadResult:
        """Reads the configuration and applies it; an error is raised and changes nothing."""
        if self._reread is None:
            return ReloadResult(self.version)
        read = self._reread()
        changed = self._take(read.settings)
        undone = tuple(name for name in changed if name in self._set)
        self._set.clear()
        return ReloadResult(self.version, tuple(changed), read.needs_restart, undone)

    def _take(self, settings: RuntimeConfig) -> list[str]:
        changed = settings.differences(self.settings)
        if changed:
            self.settings = settings
            self.version += 1
            self._apply(settings)
        return changed


def _by_option(settings: RuntimeConfig) -> dict[str, object]:
    routing = {option: getattr(settings.routing, name) for name, option in _ROUTING_OPTIONS.items()}
    return {"worker": settings.workers, **routing, "log-level": settings.log_level}


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise InvalidFieldError(f"routing.{name}", f"is {value}", allowed)
