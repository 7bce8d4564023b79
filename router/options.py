"""Options of a router: what it is started with, and how a command line says it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import click

from common.cli.core.config_file import arguments_of
from common.cli.core.errors import CommandError
from common.cli.core.modes import Mode
from common.cli.core.options import Duration, Fraction, option
from common.cli.core.tls_options import apply
from common.errors import ApiError
from common.limits import (
    DRAIN_TIMEOUT_S,
    HEARTBEAT_S,
    LEASE_S,
    MAX_HOLD_S,
    MAX_LEASE_S,
    MAX_QUEUED_REQUESTS,
    MAX_UNREAD_TOKENS,
    SLOW_CLIENT_TIMEOUT_S,
    STALL_TIMEOUT_S,
    WORKER_WAIT_S,
)
from common.params.names import LEVELS, PRIORITIES
from router.api.tenants import TENANT_KEY, TenantPolicy
from router.audit.answer_auditor import AuditOptions
from router.runtime_config import RELOADABLE, ReloadedConfig, RoutingConfig, RuntimeConfig
from router.scheduling.failover import FailoverOptions, FailoverPolicy
from router.scheduling.placement import PLACEMENTS
from router.security import RouterSecurity, security_options
from router.workers.addresses import AddressError, FileTarget, parse_targets
from router.workers.discovery import read_list


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """Options that one router is started with; times in seconds.

    Attributes:
        workers: the workers, in the forms of `addresses`.
        host: address to listen on.
        port: TCP port; 0 takes any.
        delay_factor: of the delay gate; 0 is off.
        max_hold_s: longest that the gate holds a prompt.
        queue_size: most requests that wait for a worker.
        placement: a key of PLACEMENTS.
        tokenizer: folder to take tokenizer and template from, None to ask the workers.
        drain_timeout_s: how long streams may go on after SIGTERM.
        default_max_tokens: longest answer to a request without `max_tokens`; 0 is the rest of the context.
        max_unread_tokens: a client that leaves more unread is dropped.
        slow_client_timeout_s: a client that lets a message wait for so long is dropped; 0 is never.
        failover: what happens to requests whose worker is lost.
        admin_port: TCP port of AdminService on `admin_host`; 0 takes any, None is off.
        admin_host: address of AdminService.
        tenants: what tenants get.
        security: TLS and API keys.
        max_connection_age_s: after which clients must connect anew for new calls; 0 is never.
        log_level: least to log.
        audit: which answers are computed again by another worker.
    """

    workers: Sequence[str]
    host: str = "127.0.0.1"
    port: int = 50051
    delay_factor: float = 0.0
    max_hold_s: float = MAX_HOLD_S
    queue_size: int = MAX_QUEUED_REQUESTS
    placement: str = "prefix_aware"
    tokenizer: Path | None = None
    drain_timeout_s: float = DRAIN_TIMEOUT_S
    default_max_tokens: int = 0
    max_unread_tokens: int = MAX_UNREAD_TOKENS
    slow_client_timeout_s: float = SLOW_CLIENT_TIMEOUT_S
    failover: FailoverOptions = field(default_factory=FailoverOptions)
    admin_port: int | None = None
    admin_host: str = "127.0.0.1"
    tenants: TenantPolicy = field(default_factory=TenantPolicy)
    security: RouterSecurity = field(default_factory=RouterSecurity)
    max_connection_age_s: float = 0.0
    log_level: str = "info"
    audit: AuditOptions = field(default_factory=AuditOptions)

    @classmethod
    def from_parameters(cls, given: Mapping[str, Any]) -> RouterOptions:
        """Makes them of the parameters of a command with `router_options`; `security` is not read again."""
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
        """Settings that may change while the router runs.

        Raises:
            InvalidFieldError: a value is out of range.
            AddressError: a worker is none.
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
# Fields that one option each gives, of the same name as its parameter.
_SAME: Final = [each.name for each in fields(RouterOptions) if each.name not in _COMPOSED]


class Lease(Duration):
    """Seconds that workers take as a lease, and that its renewal in the rhythm of heartbeats can keep."""

    name = "lease"

    def __init__(self) -> None:
        super().__init__(2 * HEARTBEAT_S, MAX_LEASE_S)


class MetadataKey(click.ParamType[str]):
    """The name of a text metadata entry of gRPC."""

    name = "key"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Reads the text of an option."""
        text = str(value).lower()
        if re.fullmatch(r"[0-9a-z_.-]+", text) is None or text.endswith("-bin") or text.startswith("grpc-"):
            self.fail(f"{value!r} is not a name of text metadata; use letters, digits, - _ and .", param, ctx)
        return text


class PerTenant(click.ParamType[tuple[str, float]]):
    """`TENANT=NUMBER`, or a whole number alone, which is for the tenants that have none of their own."""

    name = "tenant"

    def __init__(self, kind: type[int] | type[float]) -> None:
        self._kind = kind

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        """Reads the text of an option; the name is "" when there is none."""
        if isinstance(value, tuple):
            return value
        name, named, number = str(value).rpartition("=")
        whole = self._kind is int
        try:
            read = self._kind(number)
        except ValueError:
            self.fail(f"{value!r} is not {'[TENANT=]N' if whole else 'TENANT=WEIGHT'}", param, ctx)
        if not (read >= 0 if whole else 0 < read < math.inf) or (not name and (named or not whole)):
            allowed = "0 or more, after TENANT= or alone" if whole else "more than 0, after TENANT="
            self.fail(f"{value!r} is out of range; use a number {allowed}", param, ctx)
        return name, read


class TenantPriority(click.ParamType[tuple[str, str]]):
    """`TENANT=PRIORITY`, or a priority alone, which is for the tenants that have none of their own."""

    name = "priority"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """Reads the text of an option; the tenant is "" when there is none."""
        if isinstance(value, tuple):
            return value
        tenant, named, priority = str(value).rpartition("=")
        if priority not in PRIORITIES or (named and not tenant):
            self.fail(f"{value!r} is not [TENANT=]PRIORITY, with one of {', '.join(PRIORITIES)}", param, ctx)
        return tenant, priority


router_options = apply(
    option(
        "--worker", "workers", envvar="FISSILE_WORKERS", multiple=True, metavar="TARGET",
        help="Addresses of workers: HOST:PORT; dns:///NAME:PORT for all addresses of a name, such as a headless "
        "Service, looked up again and again; file:PATH for those that a file lists, read again when it changes. "
        "Repeat it, or separate several by commas. Workers may start before or after the router.",
    ),
    option("--host", envvar="FISSILE_HOST", default="127.0.0.1", help="Address to listen on."),
    option(
        "--port", envvar="FISSILE_PORT", default=50051, type=click.IntRange(0, 65535),
        help="Port; 0 takes any free one.",
    ),
    option(
        "--delay-factor", envvar="FISSILE_DELAY_FACTOR", default=0.0, type=click.FloatRange(0),
        help="Hold prompts back for this many prefill durations, so that more of them share a prefill; 0 is off.",
    ),
    option(
        "--max-hold", "max_hold_s", envvar="FISSILE_MAX_HOLD", default="250ms", type=Duration(),
        help="Longest time that --delay-factor holds a prompt back.",
    ),
    option(
        "--queue-size", envvar="FISSILE_QUEUE_SIZE", default=MAX_QUEUED_REQUESTS, type=click.IntRange(1),
        help="Most requests of one priority class that may wait for a worker. Further ones are refused with "
        "RESOURCE_EXHAUSTED, or displace one of the tenant that has the most waiting for its weight.",
    ),
    option(
        "--tenant-key", envvar="FISSILE_TENANT_KEY", default=TENANT_KEY, type=MetadataKey(), metavar="NAME",
        help="Metadata key whose value names the tenant of a call. Tenants share the queue fairly, by prompt and "
        "output tokens.",
    ),
    option(
        "--tenant-weight", envvar="FISSILE_TENANT_WEIGHT", multiple=True, type=PerTenant(float),
        metavar="TENANT=WEIGHT",
        help="Share of a tenant in the queue and the service; the others have 1. Repeat it for several tenants.",
    ),
    option(
        "--tenant-concurrency", envvar="FISSILE_TENANT_CONCURRENCY", multiple=True, type=PerTenant(int),
        metavar="[TENANT=]N",
        help="Most requests that a tenant may have in flight; without a name, the limit of each other tenant. 0 is no "
        "limit.",
    ),
    option(
        "--tenant-max-priority", envvar="FISSILE_TENANT_MAX_PRIORITY", multiple=True, type=TenantPriority(),
        metavar="[TENANT=]PRIORITY",
        help="Highest priority that a tenant's requests may ask for: low, normal or high; without a name, that of "
        "each other tenant. Default: high, or normal with API keys. A key may have a maximum too; the lower one "
        "counts.",
    ),
    option(
        "--require-bound-tenant", envvar="FISSILE_REQUIRE_BOUND_TENANT", is_flag=True,
        help="Refuse calls that name a tenant in their metadata unless their API key is bound to it. Otherwise a "
        "caller can pose as another tenant in every call, and have as many shares. Calls of all other keys are "
        "one tenant together.",
    ),
    option(
        "--isolate-tenants", envvar="FISSILE_ISOLATE_TENANTS", is_flag=True,
        help="Share no prefix cache between tenants, whatever cache_salt their requests name. Otherwise the time to "
        "the first token and cached_tokens tell a tenant whether others have asked the same before. Answers stay "
        "the same.",
    ),
    option(
        "--placement", envvar="FISSILE_PLACEMENT", default="prefix_aware", type=click.Choice(list(PLACEMENTS)),
        help=f"Which worker a request goes to. {'; '.join(f'{name}: {p.what}' for name, p in PLACEMENTS.items())}.",
    ),
    option(
        "--failover", envvar="FISSILE_FAILOVER", default=FailoverPolicy.EXACT.value,
        type=click.Choice([policy.value for policy in FailoverPolicy]),
        help="Where an answer that has begun continues when its worker is lost. exact: only on workers of the same "
        "numerics class, with exactly the tokens it would have had; any: on any worker with the same weights.",
    ),
    option(
        "--audit", envvar="FISSILE_AUDIT", default="0%", type=Fraction(), metavar="FRACTION",
        help="Part of the answers that another worker of the numerics class computes again, at the lowest priority. "
        "A worker that was wrong is cordoned. 0% is off.",
    ),
    option(
        "--audit-kv/--no-audit-kv", envvar="FISSILE_AUDIT_KV", default=True,
        help="Compare what workers of one numerics class hold in their KV caches for equal prefixes. A worker that was "
        "wrong is cordoned.",
    ),
    option(
        "--audit-dir", envvar="FISSILE_AUDIT_DIR", default=None, type=click.Path(path_type=Path), metavar="FOLDER",
        help="Folder for the answers that were wrong, with their requests, for `fissile verify`. Default: none are "
        "kept.",
    ),
    option(
        "--worker-wait", "worker_wait_s", envvar="FISSILE_WORKER_WAIT", default=f"{WORKER_WAIT_S:g}s", type=Duration(),
        help="How long a request waits for a worker to come up when there is none for it.",
    ),
    option(
        "--stall-timeout", "stall_timeout_s", envvar="FISSILE_STALL_TIMEOUT", default=f"{STALL_TIMEOUT_S:g}s",
        type=Duration(),
        help="Longest time of an engine step, after which its worker is given up; long prefills get more.",
    ),
    option(
        "--lease", "lease_s", envvar="FISSILE_LEASE", default=f"{LEASE_S:g}s", type=Lease(),
        help="How long workers keep this router's requests without hearing from it.",
    ),
    option(
        "--default-max-tokens", envvar="FISSILE_DEFAULT_MAX_TOKENS", default=0, type=click.IntRange(0), metavar="N",
        help="Longest answer to a request that does not say max_tokens; 0 is all that the model's length leaves.",
    ),
    option(
        "--max-unread-tokens", envvar="FISSILE_MAX_UNREAD_TOKENS", default=MAX_UNREAD_TOKENS, type=click.IntRange(1),
        help="Most tokens of a stream that a client may leave unread; beyond that the stream ends with "
        "RESOURCE_EXHAUSTED.",
    ),
    option(
        "--slow-client-timeout", "slow_client_timeout_s", envvar="FISSILE_SLOW_CLIENT_TIMEOUT",
        default=f"{SLOW_CLIENT_TIMEOUT_S:g}s",
        type=Duration(),
        help="Longest time that a client may leave a waiting message unread; then the stream ends with "
        "RESOURCE_EXHAUSTED, and what it held is free again. 0s is never.",
    ),
    option(
        "--tokenizer", envvar="FISSILE_TOKENIZER", default=None, type=click.Path(path_type=Path), metavar="FOLDER",
        help="Folder to take tokenizer and chat template from, instead of from the workers.",
    ),
    option(
        "--drain-timeout", "drain_timeout_s", envvar="FISSILE_DRAIN_TIMEOUT", default=f"{DRAIN_TIMEOUT_S:g}s",
        type=Duration(),
        help="How long streams may continue after SIGTERM.",
    ),
    option(
        "--admin-port", envvar="FISSILE_ADMIN_PORT", default=None, type=click.IntRange(0, 65535),
        help="Port of AdminService, which lists and drains workers; 0 takes any free one. Default: off.",
    ),
    option("--admin-host", envvar="FISSILE_ADMIN_HOST", default="127.0.0.1", help="Address of AdminService."),
    security_options,
    option(
        "--max-connection-age", "max_connection_age_s", envvar="FISSILE_MAX_CONNECTION_AGE", default="0s",
        type=Duration(),
        help="Age after which clients must reconnect for new calls, so that they find new routers; running calls "
        "continue. 0s is never.",
    ),
    option(
        "--log-level", envvar="FISSILE_LOG_LEVEL", default="info", type=click.Choice(LEVELS),
        help="Lowest level that is logged.",
    ),
)  # fmt: skip


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
    """Reads the options of a router again that was called in `context`: its file has changed, perhaps.

    Raises (what is returned):
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
    """Settings among a command's parameters that may change while the router runs.

    Raises:
        CommandError: a value is not allowed, or what a mistake in the command is the likely reason for: a worker is in
            no known form, a file of workers is missing, or there is no list in it.
    """
    try:
        for target in parse_targets(given["workers"]):
            if isinstance(target, FileTarget):
                read_list(target.path)
        return RouterOptions.from_parameters(given).settings()
    except (AddressError, ApiError) as error:
        raise CommandError(str(error)) from None
