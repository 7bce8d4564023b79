"""Options that a router is started with, made from the values of its command, and made anew at a reload."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import click

from common.cli.core.config_file import arguments_of
from common.cli.core.errors import CommandError
from common.cli.core.modes import Mode
from common.errors import ApiError
from common.params.options.services import ROUTER
from common.params.options.table import default_of
from router.api.tenants import TenantPolicy
from router.audit.answer_auditor import AuditOptions
from router.runtime_config import RELOADABLE, ReloadedConfig, RoutingConfig, RuntimeConfig
from router.scheduling.failover import FailoverOptions, FailoverPolicy
from router.security import RouterSecurity
from router.workers.addresses import AddressError, FileTarget, parse_targets
from router.workers.discovery import read_list


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """Options that one router is started with; times in seconds.

    Most fields are the value of one option of `fissile router`. The others combine several options.

    Attributes:
        failover: what happens to requests whose worker is lost.
        tenants: limits and rights of tenants.
        security: TLS and API keys.
        audit: which answers and KV caches are compared between workers.
    """

    workers: Sequence[str]
    host: str = default_of(ROUTER, "host")
    port: int = default_of(ROUTER, "port")
    delay_factor: float = default_of(ROUTER, "delay_factor")
    max_hold_s: float = default_of(ROUTER, "max_hold_s")
    queue_size: int = default_of(ROUTER, "queue_size")
    placement: str = default_of(ROUTER, "placement")
    tokenizer: Path | None = None
    drain_timeout_s: float = default_of(ROUTER, "drain_timeout_s")
    default_max_tokens: int = default_of(ROUTER, "default_max_tokens")
    max_unread_tokens: int = default_of(ROUTER, "max_unread_tokens")
    slow_client_timeout_s: float = default_of(ROUTER, "slow_client_timeout_s")
    failover: FailoverOptions = field(default_factory=FailoverOptions)
    admin_port: int | None = default_of(ROUTER, "admin_port")
    admin_host: str = default_of(ROUTER, "admin_host")
    metrics_port: int | None = default_of(ROUTER, "metrics_port")
    scaler_port: int | None = default_of(ROUTER, "scaler_port")
    expect_models: Sequence[str] = ()
    tenants: TenantPolicy = field(default_factory=TenantPolicy)
    security: RouterSecurity = field(default_factory=RouterSecurity)
    max_connection_age_s: float = default_of(ROUTER, "max_connection_age_s")
    log_level: str = default_of(ROUTER, "log_level")
    trace_slow: float | None = default_of(ROUTER, "trace_slow")
    audit: AuditOptions = field(default_factory=AuditOptions)

    @classmethod
    def from_parameters(cls, given: Mapping[str, Any]) -> RouterOptions:
        """Makes the options from the values of `fissile router`, all but `security`."""
        own = {name: given[name] for name in _SAME}
        policy = FailoverPolicy(given["failover"])
        failover = FailoverOptions(policy, given["worker_wait_s"], given["stall_timeout_s"], given["lease_s"])
        tenants = TenantPolicy(
            given["tenant_key"], require_bound=given["require_bound_tenant"], isolate=given["isolate_tenants"]
        )
        limits = given["tenant_weight"], given["tenant_concurrency"], given["tenant_max_priority"]
        audit = AuditOptions(given["audit"], given["audit_dir"], given["audit_kv"])
        return cls(**own, failover=failover, tenants=tenants.with_limits(*map(dict, limits)), audit=audit)

    def settings(self) -> RuntimeConfig:
        """Returns the settings that may change while the router runs.

        Raises:
            InvalidFieldError: a value is out of range.
            AddressError: the address of a worker is not valid.
        """
        others = {"": self.tenants.concurrency} if self.tenants.concurrency else {}
        routing = RoutingConfig(
            self.placement,
            self.delay_factor,
            self.max_hold_s,
            self.queue_size,
            tenant_weight=dict(self.tenants.weights),
            tenant_concurrency={**others, **self.tenants.concurrency_of},
            tenant_max_priority=dict(self.tenants.max_priority_of),
        )
        return RuntimeConfig(routing, tuple(self.workers), self.log_level)


_COMPOSED: Final = ("failover", "tenants", "security", "audit")
# Fields that hold the value of one option.
_SAME: Final = [each.name for each in fields(RouterOptions) if each.name not in _COMPOSED]


ROUTER_MODES: Final = (
    Mode(
        "without --admin-port",
        lambda given: given["admin_port"] is None,
        "there is no AdminService",
        unused=frozenset({"admin_host", "admin_client_ca"}),
    ),
    Mode(
        "without --audit and --audit-kv",
        lambda given: not given["audit"] and not given["audit_kv"],
        "no answer is compared",
        unused=frozenset({"audit_dir"}),
    ),
)


def rereader(context: click.Context) -> Callable[[], ReloadedConfig]:
    """Makes the function that reads the options of the command in `context` again, for a --config file that changed.

    Raises (the function):
        CommandError: a value is not allowed.
    """
    command, arguments, started = context.command, arguments_of(context), dict(context.params)

    def read() -> ReloadedConfig:
        try:
            given = command.make_context("router", list(arguments)).params
        except click.UsageError as error:
            raise CommandError(error.format_message()) from None
        settings = checked_settings(given)
        options = [(param.opts[0].removeprefix("--"), param.name) for param in command.params if param.name in given]
        fixed = [option for option, name in options if option not in RELOADABLE and given[name] != started[name]]
        return ReloadedConfig(settings, tuple(fixed))

    return read


def checked_settings(given: Mapping[str, Any]) -> RuntimeConfig:
    """Returns the settings that may change while the router runs, from the values of its command.

    Raises:
        CommandError: a value is not allowed, a worker has no known form, or a file of workers is missing or is not a
            list.
    """
    try:
        for target in parse_targets(given["workers"]):
            if isinstance(target, FileTarget):
                read_list(target.path)
        return RouterOptions.from_parameters(given).settings()
    except (AddressError, ApiError) as error:
        raise CommandError(str(error)) from None
